"""Encodings lose nothing that the residual does not keep, and weigh what they say."""

import functools

import _examples
import _oracles
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import assert_same

import gravac_jax as gravac
from gravac_jax import _payload, _scale
from gravac_jax._codec import Codec
from gravac_jax._encoding import INDEX_ENCODINGS, VALUE_ENCODINGS
from gravac_jax._marking import compaction
from gravac_jax._payload import PAD, Payload

VALUES = _examples.members(VALUE_ENCODINGS)
INDICES = _examples.members(INDEX_ENCODINGS)
NORMAL = 2.0**-126

of_every_value = pytest.mark.parametrize("values", VALUES, ids=repr)
of_every_index = pytest.mark.parametrize("indices", INDICES, ids=repr)

# Everything that arithmetic does not take for zero, up to the largest.
WIDTH = 32
FLOATS = hnp.arrays(
    np.float32,
    WIDTH,
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False).filter(
        lambda x: x == 0 or abs(x) >= NORMAL
    ),
)


@functools.cache
def jitted(values):
    def journey(x):
        exponents = _scale.exponents(jnp.max(jnp.abs(x))).astype(jnp.int32)
        rounded = values.rounded(x, exponents)
        encoded = values.encode(rounded, exponents)
        again = values.rounded(rounded, exponents)
        return rounded, encoded, values.decode(encoded, exponents), again

    return jax.jit(journey)


@of_every_value
@hypothesis.settings(deadline=None)  # the first call compiles
@hypothesis.given(x=FLOATS)
def test_what_arrives_is_what_was_rounded_to(values, x):
    rounded, encoded, arrived, again = map(np.asarray, jitted(values)(x))
    assert encoded.dtype == values.dtype
    assert np.isfinite(rounded).all()
    np.testing.assert_array_equal(arrived, rounded)
    np.testing.assert_array_equal(again, rounded)
    if values.is_exact:
        assert_same(rounded, x)


@of_every_value
@hypothesis.settings(deadline=None)
@hypothesis.given(x=FLOATS)
def test_it_rounds_like_its_oracle(values, x):
    rounded = np.asarray(jitted(values)(x)[0])
    oracle = _oracles.look_up(_oracles.VALUE_ENCODINGS, values)
    np.testing.assert_array_equal(rounded, oracle(x))


@of_every_value
@hypothesis.settings(deadline=None)
@hypothesis.given(x=FLOATS)
def test_what_is_lost_is_known_exactly(values, x):
    rounded = np.asarray(jitted(values)(x)[0])
    lost = x.astype(np.float64) - rounded
    is_normal = (lost == 0) | (abs(lost) >= NORMAL)
    assert (lost == lost.astype(np.float32))[is_normal].all()
    assert (abs(lost) <= abs(x)).all()


def slots(n, k, sent, seed=0):
    """The indices of a payload of `sent` entries in `k` slots."""
    places = np.random.default_rng(seed).choice(n, sent, replace=False)
    empty = PAD + np.arange(sent, k)
    return np.concatenate([np.sort(places), empty]).astype(np.int32)


SIZES = {
    "one block": (100, 10, 10),
    "slots left": (200_000, 50, 20),
    "nothing sent": (70_000, 5, 0),
    "blocks without entries": (2**20, 7, 7),
    "all of a block": (65_536, 65_536, 65_536),
    "a border": (131_072, 131_072, 131_072),
    "one entry": (1, 1, 1),
}


@of_every_index
@pytest.mark.parametrize("size", SIZES)
def test_indices_come_back(indices, size):
    n, k, sent = SIZES[size]
    expected = slots(n, k, sent)
    parts = jax.jit(indices.encode, static_argnums=1)(expected, n)
    received = jax.jit(indices.decode, static_argnums=(1, 2))(parts, k, n)
    assert_same(received, expected)


@of_every_value
@of_every_index
def test_a_buffer_carries_a_payload_and_weighs_what_it_says(values, indices):
    n, k, sent = 20_001, 301, 300
    bucket = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    bucket[:8192] *= 1000  # blocks of different exponents
    codec = Codec(values, indices, n)
    places = slots(n, k, sent)
    mask = np.isin(np.arange(n), places)
    figures = np.array([1 / 3, 2.0**60, 0.0], np.float32)

    @jax.jit
    def journey(bucket):
        marks = compaction.mark(mask)
        exponents = codec.exponents(bucket, marks)
        payload = _payload.take(bucket, jnp.asarray(places))
        rounded = codec.rounded(payload.values, exponents, payload.indices)
        buffer = codec.encode(Payload(rounded, payload.indices), exponents, figures)
        kept = codec.kept(bucket, exponents, marks)
        beside = codec.figures(buffer, figures.size)
        return buffer, codec.decode(buffer, k), beside, kept

    buffer, arrived, beside, kept = jax.tree.map(np.asarray, journey(bucket))
    assert buffer.ndim == 1
    assert buffer.nbytes == codec.payload_bytes(k) + figures.nbytes
    assert_same(beside, figures)
    assert_same(arrived.indices, places)
    assert not arrived.values[sent:].any()
    total = kept.astype(np.float64)
    total[places[:sent]] += arrived.values[:sent]
    np.testing.assert_array_equal(total, bucket)
    assert_same(kept[~mask], bucket[~mask])
    assert (abs(kept[mask]) <= abs(bucket[mask]) / 2).mean() > 0.9


def test_at_factor_100_short_entries_weigh_at_most_4_1_bytes():
    codec = Codec(gravac.BFloat16(), gravac.UInt16(), 10_000_000)
    assert codec.payload_bytes(100_000) <= 4.1 * 100_000
