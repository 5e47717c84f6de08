"""Payloads on the wire: rounding loses nothing that the residual does not keep."""

import functools

import _oracles
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import assert_same

from gravac_jax._encodings import payload as payloads
from gravac_jax._encodings import selection
from gravac_jax._encodings.dense import VALUES
from gravac_jax._encodings.payload import Payload, WireFormat
from gravac_jax._encodings.selection import PAD

NORMAL = 2.0**-126
# Everything that arithmetic does not take for zero, up to the largest.
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(
    lambda x: x == 0 or abs(x) >= NORMAL
)


@functools.partial(jax.jit, static_argnums=(0, 1))
def journey(wire, k, bucket, places, mask):
    """Return a buffer of the rounded entries at `places`, and what others read."""
    payload = payloads.take(bucket, places)
    payload = payload._replace(values=wire.rounded(payload.values))
    buffer, marks = wire.encode(payload), selection.mark(mask)
    return payload.values, buffer, wire.decode(buffer, k), wire.kept(bucket, marks)


@pytest.mark.parametrize("values", VALUES)
@hypothesis.settings(deadline=None)  # the first call compiles
@hypothesis.given(x=hnp.arrays(np.float32, 32, elements=FLOATS))
def test_values_arrive_as_rounded_and_what_is_lost_is_known_exactly(values, x):
    places, all_of_it = np.arange(32, dtype=np.int32), np.ones(32, bool)
    wire = WireFormat(values, 32)
    found = journey(wire, 32, x, places, all_of_it)
    rounded, _, (arrived, _), kept = jax.tree.map(np.asarray, found)
    np.testing.assert_array_equal(rounded, _oracles.VALUES[values](x))
    np.testing.assert_array_equal(arrived, rounded)
    np.testing.assert_array_equal(wire.rounded(jnp.asarray(rounded)), rounded)
    lost = x.astype(np.float64) - rounded
    assert (lost == kept)[(lost == 0) | (abs(lost) >= NORMAL)].all()
    assert (abs(lost) <= abs(x)).all()


SIZES = {  # entries, slots, and how many of them are filled
    "slots left": (200_000, 50, 20),
    "odd": (20_001, 301, 300),
    "nothing sent": (70_000, 5, 0),
    "blocks without entries": (2**20, 7, 7),
    "all of a block": (65_536, 65_536, 65_536),
    "a border": (131_072, 131_072, 131_072),
    "one entry": (1, 1, 1),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("size", SIZES)
def test_a_buffer_carries_a_payload_and_weighs_what_it_says(values, size):
    n, k, sent = SIZES[size]
    rng = np.random.default_rng(1)
    bucket = rng.standard_normal(n).astype(np.float32)
    mask = rng.permutation(n) < sent
    places = np.append(np.flatnonzero(mask), PAD + np.arange(sent, k)).astype(np.int32)
    wire = WireFormat(values, n)
    found = journey(wire, k, bucket, places, mask)
    _, buffer, arrived, kept = jax.tree.map(np.asarray, found)
    assert buffer.ndim == 1
    assert buffer.nbytes == wire.payload_bytes(k)
    assert_same(arrived.indices, places)
    assert not arrived.values[sent:].any()
    total = kept.astype(np.float64)
    total[mask] += arrived.values[:sent]
    np.testing.assert_array_equal(total, bucket)
    assert_same(kept[~mask], bucket[~mask])
    assert (abs(kept[mask]) <= abs(bucket[mask]) * 2.0**-8).all()


def mean_of(values, indices, n):
    decode = lambda row: Payload(values[row], indices[row])
    rows = jnp.arange(len(values))
    mean = lambda rows: payloads.mean_of_payloads(rows, decode, jnp.zeros(n))
    return jax.jit(mean)(rows).tolist()


def test_payloads_are_added_where_they_belong_in_the_order_of_the_replicas():
    values, indices = jnp.array([[2.0, 1.0], [8.0, 16.0]]), jnp.array([[0, 4], [0, 2]])
    assert mean_of(values, indices, 5) == [5.0, 0.0, 8.0, 0.0, 0.5]
    # Added from the back, or pairwise, the small one would survive.
    values = jnp.array([[2.0**30], [1.0], [-(2.0**30)], [0.0]])
    zeros = jnp.zeros((4, 1), jnp.int32)
    assert mean_of(values, zeros, 1) == [0]
    assert mean_of(values[jnp.array([0, 2, 1, 3])], zeros, 1) == [1 / 4]
