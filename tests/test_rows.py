"""QuantizedTopK: what is selected of rows, its levels, codes, words and bytes."""

import functools

import _harness
import jax
import numpy as np
import pytest
from _harness import assert_same, on_host

import gravac_jax as gravac
from gravac_jax import Comm
from gravac_jax._exchanges import row_codes
from gravac_jax._selection.entries import PAD
from gravac_jax._selection.row_top_k import row_top_k

RNG = np.random.default_rng(0)
LADDER = (1.0, 32.0, 64.0, 1024.0)
WHOLE_ROWS, OTHER = 3 * 4096, 10_000  # sizes of buckets
BITS_OF_A_PLACE = 12
every_width = pytest.mark.parametrize("bits", row_codes.BITS)


def heavy(*shape):
    return RNG.standard_t(3, shape).astype(np.float32)


@functools.cache
def jitted(exchange, ladder):
    return jax.jit(
        lambda x, rung: exchange.exchange(
            x, (), rung, ladder=ladder, key=jax.random.key(0), comm=Comm(None)
        )[0]
    )


def exchanged(bucket, rung, bits=2, ladder=LADDER):
    run = jitted(gravac.QuantizedTopK(bits), ladder)
    return on_host(run(bucket, np.int32(rung)))


coded = jax.jit(row_codes.encode, static_argnums=2)
decoded = jax.jit(row_codes.decode, static_argnums=2)
fitted = jax.jit(row_codes.fit, static_argnums=1)
packed = jax.jit(row_codes.pack, static_argnums=1)
top_of_rows = jax.jit(row_top_k, static_argnums=(1, 2))
unpacked = jax.jit(row_codes.unpack, static_argnums=(1, 2))


# Selection -------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 16, 17, 4096], ids="k={}".format)
@pytest.mark.parametrize("n", [2 * 4096, 2 * 4096 + 5], ids="n={}".format)
def test_the_largest_of_each_row_come_first(n, k):
    bucket = heavy(n)
    top = top_of_rows(bucket, 4096, k)
    for row, start in enumerate(range(0, n, 4096)):
        own = bucket[start : start + 4096]
        order = np.argsort(-np.abs(own), stable=True)[:k]
        assert top.places[row, : order.size].tolist() == order.tolist()
        assert_same(top.values[row, : order.size], own[order])
        assert not top.values[row, order.size :].any()


@pytest.mark.parametrize("k", [3, 40], ids="k={}".format)
def test_of_equal_magnitudes_any_k_are_selected_once(k):
    bucket = np.where(RNG.random(4096) < 0.5, -2, 2).astype(np.float32)
    top = top_of_rows(bucket, 4096, k)
    places = np.asarray(top.places[0])
    assert len(set(places.tolist())) == k
    assert_same(top.values[0], bucket[places])


def test_a_bucket_shorter_than_a_row_is_one_row():
    bucket = heavy(100)
    received = exchanged(bucket, 1, ladder=(1.0, 25.0))
    largest = np.argsort(-np.abs(bucket))[:4]
    assert sorted(largest) == np.flatnonzero(received.mean).tolist()


def test_rows_fill_the_bucket_if_they_can():
    row = gravac.QuantizedTopK()._row
    assert [row(n) for n in (2**20, 10**6, 4097, 100, 1)] == [4096, 4000, 4096, 100, 1]


# Levels ----------------------------------------------------------------------------


@every_width
def test_a_row_is_sent_at_as_many_magnitudes_as_its_values_have(bits):
    bucket = heavy(WHOLE_ROWS)
    received = exchanged(bucket, LADDER.index(64), bits)
    for start in range(0, bucket.size, 4096):
        own, sent = (x[start : start + 4096] for x in (bucket, received.mean))
        chosen = np.flatnonzero(sent)
        assert chosen.size == 64
        assert np.unique(np.abs(sent[chosen])).size == bits
        assert_same(np.sign(sent[chosen]), np.sign(own[chosen]))


@every_width
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("shape", ["heavy", "one entry counts", "mostly zero"])
def test_what_is_sent_is_orthogonal_to_what_is_kept(shape, scale, bits):
    x = heavy(OTHER).astype(np.float64)
    if shape == "one entry counts":
        x[17] = 1e4
    if shape == "mostly zero":
        x[RNG.random(x.size) < 0.999] = 0
    bucket = (x * scale).astype(np.float32)
    for rung in range(1, len(LADDER)):
        received = exchanged(bucket, rung, bits)
        kept = np.asarray(received.residual, np.float64)
        sent = np.asarray(received.mean, np.float64)
        whole = np.square(bucket.astype(np.float64)).sum()
        assert abs(sent @ kept) < 1e-6 * whole
        energy = float(received.energies[rung])
        assert energy == pytest.approx(np.square(sent).sum(), 1e-5)


@every_width
def test_sent_and_kept_add_up_to_the_bucket(bits):
    bucket = heavy(OTHER)
    received = exchanged(bucket, 2, bits)
    sent, kept = np.asarray(received.mean), np.asarray(received.residual)
    is_sent = sent != 0
    assert_same(kept[~is_sent], bucket[~is_sent])
    assert_same(kept[is_sent], bucket[is_sent] - sent[is_sent])


def test_two_magnitudes_keep_more_than_the_equal_distances_of_sparse_loco():
    bucket = np.random.default_rng(1).standard_t(3, 50 * 4096).astype(np.float32)
    values = top_of_rows(bucket, 4096, 64).values
    whole = float(np.square(values).sum())
    ours = float(fitted(values, 2).sent.sum()) / whole
    x = np.asarray(values)
    step = 6 * x.std(1, keepdims=True) / 4
    q = np.clip(np.round((x - x.mean(1, keepdims=True)) / step + 2), 0, 3)
    theirs = sum(
        np.square(own[code == i].sum()) / (code == i).sum()
        for own, code in zip(x, q, strict=True)
        for i in np.unique(code)
    )
    assert 1 - ours < (1 - theirs / whole) / 2


def test_gains_are_those_of_each_rung_in_use():
    bucket = heavy(WHOLE_ROWS)
    seen = exchanged(bucket, len(LADDER)).energies
    taken = [exchanged(bucket, rung).energies[rung] for rung in range(len(LADDER))]
    np.testing.assert_allclose(seen, taken, rtol=1e-6)
    shares = jax.jit(
        lambda x: gravac.QuantizedTopK().bucket_shares(
            x, LADDER, jax.random.key(0), Comm(None)
        )
    )
    np.testing.assert_allclose(shares(bucket), seen / seen[0], rtol=1e-6)


@every_width
def test_zeros_are_not_sent(bits):
    bucket = np.zeros(WHOLE_ROWS, np.float32)
    bucket[[7, 4000]] = 3, -5
    received = exchanged(bucket, LADDER.index(64), bits)
    assert np.flatnonzero(received.mean).tolist() == [7, 4000]
    if bits == 2:
        assert not received.residual.any()
    assert not exchanged(np.zeros_like(bucket), 2).mean.any()


def test_a_row_too_small_for_float32_waits():
    bucket = np.full(WHOLE_ROWS, 1e-40, np.float32)
    received = exchanged(bucket, 2)
    assert not received.mean.any()
    assert_same(received.residual, bucket)


# Codes, words, bytes ---------------------------------------------------------------


@every_width
def test_codes_stand_for_places_signs_and_levels(bits):
    bucket = heavy(3 * 4096 - 50)
    bucket[4096:8190] = 0  # a row with two entries
    top = top_of_rows(bucket, 4096, 20)
    levels = fitted(top.values, bits)
    codes = coded(top, levels, bits)
    assert int(codes.max()) < 2 ** (BITS_OF_A_PLACE + bits)
    values, indices = decoded(codes, levels.scales, 4096)
    values, indices = (np.asarray(x).reshape(3, 20) for x in (values, indices))
    is_filled = np.asarray(top.values) != 0
    assert is_filled.sum(1).tolist() == [20, 2, 20]
    places = 4096 * np.arange(3)[:, None] + top.places
    assert_same(indices[is_filled], places[is_filled])
    assert (indices[~is_filled] >= PAD).all()
    assert len(set(indices.ravel().tolist())) == indices.size
    assert_same(np.sign(values), np.sign(top.values))


@pytest.mark.parametrize("width", [1, 7, 12, 13, 14, 30])
@pytest.mark.parametrize("m", [1, 31, 32, 1000])
def test_words_hold_the_codes(width, m):
    codes = RNG.integers(0, 2**width, m).astype(np.uint32)
    words = packed(codes, width)
    assert (words.size, words.dtype) == (row_codes.words_of(m, width), np.uint32)
    assert_same(unpacked(words, m, width), codes)
    assert 32 * words.size < m * width + 32 * width.bit_count()


@pytest.mark.parametrize(("bits", "code_bytes"), [(2, 1.75), (1, 1.625)])
def test_an_entry_takes_narrow_bytes_and_a_row_its_magnitudes(bits, code_bytes):
    n = 512 * 4096
    for factor, k in [(32, 128), (64, 64), (1024, 4), (1e6, 1)]:
        traffic = gravac.QuantizedTopK(bits).traffic(n, factor, replicas=4)
        assert traffic.entries == 512 * k
        assert traffic.payload_bytes == 512 * (code_bytes * k + 4 * bits)
        assert traffic.wire_bytes == 3 * traffic.payload_bytes


@pytest.mark.parametrize("bits", [0, 3, 32])
def test_values_have_one_bit_or_two(bits):
    with pytest.raises(ValueError, match=f"`bits` must be 2 or 1, got {bits}"):
        gravac.QuantizedTopK(bits)


# Training --------------------------------------------------------------------------


def test_training_at_a_high_factor_follows_the_mean():
    """Over a run, what was sent and what is kept is what came in."""
    gradients = heavy(30, 4, 300)
    exchange = gravac.QuantizedTopK(row_entries=96)
    _harness.assert_follows_the_mean(exchange, 48, gradients)
