"""Quantized: levels, scales, packed words, and widths along a ladder."""

import functools

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from _harness import assert_same, on_host

import gravac_jax as gravac
from gravac_jax import Comm
from gravac_jax._exchanges import quantizer
from gravac_jax._exchanges.quantizer import WIDTHS

RNG = np.random.default_rng(0)
LADDER = (1.0, 4.0, 8.0, 16.0, 32.0)
ONE_BIT = gravac.Quantized(least_bits=1)  # at factor 32
SIZE, LARGE = 5000, 2**18  # of buckets; the large one fills rows of 4,096
every_width = pytest.mark.parametrize("bits", WIDTHS)


@every_width
def test_words_hold_the_codes(bits):
    @jax.jit
    def coded(x):
        levels = quantizer.fit(x, jnp.full(5, 96.0), bits)
        words = quantizer.pack(x, levels, bits)
        codes = quantizer.encode(x, levels.units, bits)
        return words, codes, quantizer.unpack(words, bits).reshape(codes.shape)

    x = RNG.standard_normal((5, 96)).astype(np.float32)
    words, codes, unpacked = on_host(coded(x))
    assert (words.size, words.dtype) == (codes.size * bits // 32, np.uint32)
    assert_same(unpacked, codes)
    assert codes.max() < 2**bits


@every_width
@pytest.mark.parametrize("replicas", [3, quantizer.MAX_UNROLLED + 1])
def test_the_mean_is_that_of_what_replicas_sent(bits, replicas):
    @jax.jit
    @jax.vmap
    def rounded(own):
        levels = quantizer.fit(own, jnp.full(5, 96.0), bits)
        words = quantizer.pack(own, levels, bits)
        return words, levels.scales, quantizer.rounded(own, levels, bits)

    x = RNG.standard_normal((replicas, 5, 96)).astype(np.float32)
    words, scales, sent = on_host(rounded(x))
    mean = jax.jit(functools.partial(quantizer.mean, bits=bits))
    received = mean(words, scales).reshape(5, 96)
    np.testing.assert_allclose(received, np.mean(sent, 0, np.float64), atol=1e-6)


@functools.cache
def rounded_rows(platform, bits):
    """Return what `round_rows` does on a platform; the tests' own takes no part."""
    del platform
    return jax.jit(lambda *args: quantizer.round_rows(*args, bits))


@every_width
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_accelerators_round_rows_as_cpus_do(platform, bits, monkeypatch):
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    x[-1, 70:] = 0
    entries = np.array([96, 96, 96, 96, 70], np.float32)
    on_cpu = rounded_rows("cpu", bits)(x, entries)

    def elsewhere(*args, default, **platforms):
        return platforms.get(platform, default)(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)
    words, levels, dropped = rounded_rows(platform, bits)(x, entries)
    assert_same(words, on_cpu[0])
    assert dropped.shape == x.shape
    np.testing.assert_allclose(dropped, on_cpu[2], atol=1e-6)
    np.testing.assert_allclose(levels.scales, on_cpu[1].scales, rtol=1e-6)


@functools.cache
def jitted(exchange):
    return jax.jit(
        lambda x, rung: exchange.exchange(
            x, (), rung, ladder=LADDER, key=jax.random.key(0), comm=Comm(None)
        )[0]
    )


def exchanged(bucket, rung, exchange=ONE_BIT):
    return on_host(jitted(exchange)(bucket, np.int32(rung)))


def test_a_look_at_some_rows_tells_what_all_of_them_would_send():
    exchange, rng = gravac.Quantized(32, least_bits=1), np.random.default_rng(6)
    of_layers = 4.0 ** rng.integers(-2, 3, (16, 1)).repeat(128, axis=0)
    rows = rng.standard_t(4, (2048, 32)) * of_layers
    bucket = rows.astype(np.float32).ravel()
    exact = [exchanged(bucket, i, exchange).energies[i] for i in range(len(LADDER))]
    exact = np.asarray(exact) / exact[0]
    shares = jax.jit(lambda x, key: exchange.bucket_shares(x, LADDER, key, Comm(None)))
    keys = jax.random.split(jax.random.key(0), 8)
    found = on_host([shares(bucket, key) for key in keys])
    assert len({float(x[-1]) for x in found}) > 1  # other rows each time
    error = np.std(found, 0) / np.sqrt(len(found))
    assert (np.abs(np.mean(found, 0) - exact) <= 3 * error + 1e-6).all()
    assert (error < 0.02 * exact).all()
    few = rows[:511].astype(np.float32)
    seen = shares(few.ravel(), keys[0])
    means = np.abs(few).mean(1, dtype=np.float64)  # what one bit sends
    taken = 32 * np.square(means).sum() / np.square(few.astype(np.float64)).sum()
    np.testing.assert_allclose(seen[4], taken, rtol=1e-5)


@pytest.mark.parametrize("least_bits", [1, 2])
def test_what_rounding_keeps_waits_a_tenth_as_long(least_bits):
    exchange = gravac.Quantized(32, least_bits=least_bits)
    given = LADDER, jax.random.key(0), Comm(None)
    bucket = jnp.asarray(RNG.standard_normal(2**13), jnp.float32)
    sent = np.float64(exchange.bucket_shares(bucket, *given))
    found = np.float64(exchange.shares(bucket, *given))
    turns = np.array([1, 1, 1, 1, 1 if least_bits == 1 else 2])
    kept = 1 - sent * turns  # of an entry, when it is its turn
    waiting = (turns - 1) / 2 + turns * 0.1 * kept / (1 - kept)
    np.testing.assert_allclose(1 / found - 1, waiting, rtol=2e-3, atol=1e-6)
    assert waiting[-1] > waiting[-2] > 0


def test_what_rounding_keeps_of_spared_leaves_waits_a_tenth_as_long():
    exchange = gravac.Quantized(32, least_bits=2, shapes=((64,), (2**13 - 64,)))
    given = (1.0, 64.0), jax.random.key(0), Comm(None)
    bucket = np.zeros(2**13, np.float32)
    bucket[:64] = RNG.standard_normal(64)  # all energy is in what goes in every step
    sent = float(exchange.bucket_shares(bucket, *given)[1])
    found = float(exchange.shares(bucket, *given)[1])
    assert 0.9 < sent < 1
    assert 1 / found - 1 == pytest.approx(0.1 * (1 - sent) / sent, rel=2e-3)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("shape", ["gaussian", "one entry counts", "mostly zero"])
def test_what_is_sent_is_orthogonal_to_what_is_kept(shape, scale):
    x = RNG.standard_normal(SIZE)
    if shape == "one entry counts":
        x[17] = 1e4
    if shape == "mostly zero":
        x[RNG.random(x.size) < 0.9] = 0
    bucket = (x * scale).astype(np.float32)
    for rung in range(1, len(LADDER)):
        kept = np.asarray(exchanged(bucket, rung).residual, np.float64)
        sent = bucket - kept
        whole = np.square(bucket.astype(np.float64)).sum()
        assert abs(sent @ kept) < 1e-5 * whole
        assert 0 < np.square(sent).sum() < whole


# The share of the energy that 8, 4, 2 and 1 bits keep: of a Gaussian, of Laplace's
# distribution, and of Student's with three degrees of freedom, whose tails are heavier.
GAINS = {
    "norm": (0.9999, 0.962, 0.864, 0.637),
    "laplace": (0.9998, 0.962, 0.820, 0.500),
    "t": (0.9983, 0.929, 0.702, 0.412),
}


@pytest.mark.parametrize("tails", GAINS)
def test_levels_suit_light_and_heavy_tails(tails):
    # Quantiles, not draws: the largest of Student's draws alone moves a share by 0.1.
    n, shape = LARGE, (3,) if tails == "t" else ()
    quantiles = getattr(scipy.stats, tails).ppf((np.arange(n) + 0.5) / n, *shape)
    bucket = RNG.permutation(quantiles).astype(np.float32)
    received = exchanged(bucket, 4)
    gains = np.asarray(received.energies / received.energy)[1:]
    np.testing.assert_allclose(gains, GAINS[tails], atol=0.002, rtol=0)


def test_gains_are_those_of_each_width_in_use():
    bucket = RNG.standard_normal(SIZE).astype(np.float32)
    seen = exchanged(bucket, 4).energies
    taken = [exchanged(bucket, rung).energies[rung] for rung in range(len(LADDER))]
    np.testing.assert_allclose(seen, taken, rtol=1e-5)


def test_a_row_of_zeros_sends_zeros():
    bucket = np.zeros(LARGE, np.float32)
    bucket[-1] = 3
    received = exchanged(bucket, 4)
    assert not received.mean[:-4096].any()
    assert float(received.mean[-1]) == pytest.approx(3 / 4096)


def test_a_small_bucket_has_sixteen_rows_or_nearly():
    bucket = np.zeros(SIZE, np.float32)
    bucket[-1] = 3
    received = exchanged(bucket, 4)
    assert not received.mean[: 15 * 320].any()
    assert float(received.mean[-1]) == pytest.approx(3 / 200)


def test_a_factor_allows_as_many_bits_as_it_pays_for():
    factors = (2, 4, 5, 8, 16, 31, 32, 1000)
    assert [ONE_BIT.bits(x) for x in factors] == [8, 8, 4, 4, 2, 1, 1, 1]


def test_many_replicas_make_wide_rungs_dense():
    exchange, n = ONE_BIT, 10**6
    for replicas, dense in [(2, 1), (8, 2), (16, 3), (64, 5)]:
        entries = exchange.entries(n, LADDER, replicas)
        assert entries.count(n) == dense, replicas


def test_rows_fill_whole_words():
    with pytest.raises(ValueError, match="multiple of 32, got 100"):
        gravac.Quantized(row_entries=100)


def test_training_at_one_bit_follows_the_mean():
    """Over a run, what was sent and what is kept is what came in."""
    gradients = RNG.standard_normal((30, 4, 300)).astype(np.float32)
    _harness.assert_follows_the_mean(gravac.Quantized(96, least_bits=1), 32, gradients)


def test_between_two_replicas_an_all_reduce_is_a_gather():
    factors = (8.0, 64.0)  # a width, and some entries in turn
    buckets = RNG.standard_normal((2, 4096)).astype(np.float32)
    both = []
    for kind in (gravac.Quantized, gravac.QuantizedAllReduce):
        exchange = kind(32)

        def step(bucket, figures, turn, exchange=exchange):
            exchanges = [
                exchange.exchange(
                    bucket,
                    (),
                    np.int32(0),
                    ladder=(factor,),
                    key=jax.random.key(0),
                    comm=Comm("data"),
                    step=turn,
                    figures=figures,
                )[0]
                for factor in factors
            ]
            return exchanges

        replicas = jax.jit(jax.vmap(step, (0, 0, None), axis_name="data"))
        figures = {"x": buckets[:, :5], "y": buckets[:, 0]}
        both.append(replicas(buckets, figures, np.int32(3)))
        for received in both[-1]:
            expected = jax.tree.map(lambda x: np.stack([x.mean(0)] * 2), figures)
            assert_same(received.figures, expected)
            sent = (buckets - received.residual).mean(0)
            np.testing.assert_allclose(received.mean[0], sent, atol=1e-6)
    assert_same(both[0], both[1])
