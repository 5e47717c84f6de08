"""Selected entries: take them, send values and indices in one buffer, add them up.

A value may be rounded on the way; what rounding drops stays in the residual, exactly.
Indices travel without loss. A buffer is made of words of 16 bits, as integers: XLA's
CPU backend would turn bfloat16 into float32.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._encodings.selection import PAD, Marks, clear

WORD_BYTES = 2
BLOCK_BITS = 16  # of an index: its place within a block of 65,536 entries
BLOCK = 2**BLOCK_BITS
MAX_UNROLLED_PAYLOADS = 16  # payloads that one kernel adds up; arbitrary


class Payload(NamedTuple):
    """Selected entries of a bucket, followed by empty slots.

    Attributes:
      values: `[k]` float32; 0 in an empty slot.
      indices: `[k]` int32, the place of each value in the bucket, rising. `PAD` or
        above in an empty slot.
    """

    values: jax.Array
    indices: jax.Array


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """How payloads of a bucket of `n` entries travel.

    Attributes:
      values: how values travel, "float32" or "bfloat16".
      n: entries of the bucket.

    Law:
      Of `rounded` values, `decode(encode(payload), k)` returns the payload. What
      rounding drops, `x - rounded(x)`, is exact in float32, so that nothing is lost
      (except below 2**-126, which XLA may flush to zero).
    """

    values: str
    n: int

    def rounded(self, x: jax.Array) -> jax.Array:
        """Return what others receive of values, float32."""
        return _arrays.round_to_bfloat16(x) if self.values == "bfloat16" else x

    def kept(self, bucket: jax.Array, marks: Marks) -> jax.Array:
        """Return what others do not receive: unmarked entries, and what rounding drops.

        The result is `[n]` float32.
        """
        lost = bucket - self.rounded(bucket) if self.values == "bfloat16" else 0
        return clear(bucket, marks, lost)

    def _words(self, k: int) -> tuple[int, int, int]:
        """Return the words of the values, places and ends of blocks of `k` slots."""
        values = k if self.values == "bfloat16" else 2 * k
        return values, k, 2 * -(-self.n // BLOCK)

    def payload_bytes(self, k: int) -> int:
        """Return the bytes of a payload of `k` slots."""
        return WORD_BYTES * sum(self._words(k))

    def encode(self, payload: Payload) -> jax.Array:
        """Return a payload as one buffer, `[words]` uint16."""
        values, parts = payload.values, _in_blocks(payload.indices, self.n)
        if self.values == "bfloat16":
            values = _arrays.bfloat16_to_bits(values)
        words = [_arrays.to_words(x, jnp.uint16) for x in (values, *parts)]
        return jnp.concatenate(words)

    def decode(self, buffer: jax.Array, k: int) -> Payload:
        """Return the payload of `k` slots that `encode` was given."""
        borders = list(itertools.accumulate(self._words(k)))[:-1]
        values, places, ends = jnp.split(buffer, borders)
        as_floats = lambda x: x.view(jnp.float32)
        read = _arrays.bfloat16_from_bits if self.values == "bfloat16" else as_floats
        return Payload(read(values), _from_blocks(places, ends.view(jnp.int32)))


def _in_blocks(indices: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Return places in blocks, and the entries before the end of each block.

    Indices rise, so the ends tell the block of every slot. The receiver pays a running
    sum over k slots.
    """
    ends = jnp.minimum(jnp.arange(1, -(-n // BLOCK) + 1, dtype=jnp.int32) * BLOCK, n)
    search = lambda method: functools.partial(jnp.searchsorted, method=method)
    reached = jax.lax.platform_dependent(
        indices, ends, cpu=search("scan"), default=search("scan_unrolled")
    )
    return (indices & (BLOCK - 1)).astype(jnp.uint16), reached.astype(jnp.int32)


def _from_blocks(places: jax.Array, ends: jax.Array) -> jax.Array:
    """Add to each place the start of its block: the number of ends before the slot."""
    over = jnp.zeros(places.size, jnp.int32).at[ends].add(1, mode="drop")
    block = jnp.cumsum(over, dtype=jnp.int32)
    slots = jnp.arange(places.size, dtype=jnp.int32)
    indices = (block << BLOCK_BITS) + places.astype(jnp.int32)
    return jnp.where(slots < ends[-1], indices, PAD + slots)


def take(bucket: jax.Array, indices: jax.Array) -> Payload:
    """Return the entries of `bucket` (`[n]`) at `indices` (`[k]`, as in a payload)."""
    values = bucket.at[indices].get(
        mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
    )
    return Payload(values, indices)


def mean_of_payloads(
    buffers: jax.Array, decode: Callable[[jax.Array], Payload], zeros: jax.Array
) -> jax.Array:
    """Return the mean over replicas of the payloads in `buffers`.

    Payloads are added one after the other, in the order of the replicas and without
    repeated indices. So the sum does not depend on the order in which a device runs its
    threads, and replicas stay bit-identical. Each value is divided before it is added:
    k divisions, not n.

    Args:
      buffers: `[replicas, words]`, one encoded payload a row.
      decode: returns the payload of one row.
      zeros: `[n]` float32.

    Returns:
      `[n]` float32.
    """
    replicas = buffers.shape[0]

    def add(total: jax.Array, replica: jax.Array | int) -> jax.Array:
        payload = decode(jax.lax.dynamic_index_in_dim(buffers, replica, keepdims=False))
        at = total.at[payload.indices]
        share = payload.values / replicas
        return at.add(share, mode="drop", unique_indices=True, indices_are_sorted=True)

    looped = lambda zeros: jax.lax.fori_loop(0, replicas, lambda i, x: add(x, i), zeros)
    # A GPU would copy the total into a loop.
    each = lambda zeros: functools.reduce(add, range(replicas), zeros)
    if replicas > MAX_UNROLLED_PAYLOADS:
        return looped(zeros)
    return jax.lax.platform_dependent(zeros, cpu=looped, default=each)
