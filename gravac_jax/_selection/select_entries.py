"""The half of a sparse exchange that needs no other replica: mark, collect, keep.

Everything that reads the whole bucket happens here, once, for the rung that was
decided. The branches of the exchange hold only what depends on static shapes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._selection import entries
from gravac_jax._selection.compressor import Compressor, Wanted, at_most
from gravac_jax._selection.entries import WORD_BITS, Marks, Payload, take
from gravac_jax._selection.rungs import (
    Rungs,
    SentEnergy,
    energies_of_rungs,
    sample_bucket,
    sent_energy,
)
from gravac_jax._selection.wire_format import WireFormat

# How many entries a step sends is data. One branch for every count would compile as
# many programs as the ladder has rungs; payloads of three sizes, the largest divided by
# these, waste little. A loop over eighths was slower when all were filled, because
# threads wait for each other at each of its small kernels.
PAYLOAD_SIZES = (8, 2, 1)


class Selected(NamedTuple):
    """A selection from a bucket.

    Attributes:
      payload: as many slots as the largest sparse rung has; those beyond the marked
        ones are undefined.
      kept: `[n]` float32, what the other replicas will not receive.
      energies: `[rungs]` float32, the energy that each rung would send.
      energy: `[]` float32, the energy of the bucket.
    """

    payload: Payload
    kept: jax.Array
    energies: jax.Array
    energy: jax.Array


def select(
    compressor: Compressor,
    wire_format: WireFormat,
    bucket: jax.Array,
    state: Any,
    rungs: Rungs,
    key: jax.Array,
) -> tuple[Selected, Any]:
    """Mark the entries that the rung sends, and take them out of the bucket.

    A dense step sends no payload, but it may look at one, because the controller needs
    to know whether compressing again would pay. Otherwise it marks nothing.

    Args:
      compressor: chooses the entries.
      wire_format: rounds their values.
      bucket: `[n]` float32.
      state: the compressor's.
      rungs: how many entries each rung sends, at least one of them fewer than n.
      key: a random key.

    Returns:
      The selection, and the compressor's new state.
    """
    sparse = tuple(k for k in rungs.counts if k < rungs.n)
    looked_at = sparse[len(sparse) // 2]
    is_looked_at = rungs.is_dense & jnp.asarray(rungs.looks)
    k = jnp.where(is_looked_at, looked_at, rungs.sparse_count)
    energy = _arrays.energy(bucket)
    outlook = sample_bucket(bucket, rungs.counts, k, key, rungs.looks)
    wanted = Wanted(k, outlook.bracket, key)
    marks, state = _mark(compressor, bucket, state, rungs, wanted)

    def collect(size: int) -> tuple[Payload, SentEnergy]:
        taken = take(bucket, entries.places(marks, size))
        payload = taken._replace(values=wire_format.rounded(taken.values))
        padded = jax.tree.map(lambda x: jnp.pad(x, (0, max(sparse) - size)), payload)
        return padded, sent_energy(payload.values, outlook)

    is_one_size = len(set(sparse)) == 1
    payload, sent = _by_size(collect, max(sparse), None if is_one_size else k)
    energies = energies_of_rungs(
        outlook, marks, rungs, sent, energy, compressor.is_blind
    )
    kept = wire_format.kept(bucket, marks)
    return Selected(payload, kept, energies, energy), state


def _by_size(collect: Any, capacity: int, k: jax.Array | None) -> Any:
    """Collect `capacity` slots; if `k` is given, the smallest size that has k slots."""
    if k is None:
        return collect(capacity)
    sizes = sorted({-(-capacity // x) for x in PAYLOAD_SIZES})
    # Not in a branch: XLA's CPU backend runs nothing beside a branch.
    few = collect(sizes[0])
    which = jnp.sum((k > jnp.asarray(sizes[:-1], jnp.int32)).astype(jnp.int32))
    branches = [lambda: few, *(functools.partial(collect, x) for x in sizes[1:])]
    return jax.lax.switch(which, branches)


def _mark(
    compressor: Compressor,
    bucket: jax.Array,
    state: Any,
    rungs: Rungs,
    wanted: Wanted,
) -> tuple[Marks, Any]:
    """Mark at most `wanted.k` entries; a step that marks nothing keeps the state."""
    is_any = wanted.k > 0

    def some() -> tuple[Marks, Any]:
        choice, after = compressor.mark(bucket, state, wanted)
        marks = at_most(wanted.k, choice, bucket, wanted.key)
        return marks, _arrays.where(is_any, after, state)

    def none() -> tuple[Marks, Any]:
        words = jnp.zeros(-(-bucket.size // WORD_BITS), jnp.uint32)
        return Marks(words, words.astype(jnp.int32), jnp.int32(0)), state

    # Marking is the costliest pass, and few dense steps look.
    if rungs.looks is True or rungs.n not in rungs.counts:
        return some()
    # Both branches must be marked as varying over the replicas, as the bucket is.
    is_number = _arrays.magnitude_bits(bucket[0]) >= 0
    alike = lambda tree: jax.tree.map(lambda x: jnp.where(is_number, x, x), tree)
    return jax.lax.cond(is_any, lambda: alike(some()), lambda: alike(none()))
