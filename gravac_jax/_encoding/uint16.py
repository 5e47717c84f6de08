"""Indices in 16 bits: places within blocks of 65,536 entries."""

import dataclasses

import jax
import jax.numpy as jnp

from gravac_jax._encoding.base import IndexEncoding
from gravac_jax._payload import PAD

BLOCK_BITS = 16
BLOCK = 2**BLOCK_BITS


@dataclasses.dataclass(frozen=True)
class UInt16(IndexEncoding):
    """Indices travel as 16-bit places within blocks, and where each block ends.

    They rise, so that the ends tell which block each belongs to.

    Cost:
      2 bytes an entry, 4 bytes for every 65,536 entries of the bucket, and at the
      receiver a running sum over the k slots of each payload.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(indices=gravac.UInt16()).traffic(10_000, 100, replicas=2)
      Traffic(entries=100, payload_bytes=404, wire_bytes=404, messages=1)
    """

    def encode(self, indices: jax.Array, n: int) -> tuple[jax.Array, ...]:
        """Places, and how many entries of the payload lie before the end of each block.

        Ends, not counts: the receiver needs them, and they cost the same.
        """
        ends = jnp.minimum(jnp.arange(1, -(-n // BLOCK) + 1) * BLOCK, n)
        reached = jnp.searchsorted(indices, ends.astype(jnp.int32), method="scan")
        return (indices & (BLOCK - 1)).astype(jnp.uint16), reached.astype(jnp.int32)

    def decode(self, parts: tuple[jax.Array, ...], k: int, n: int) -> jax.Array:
        """The place in its block, and how many blocks ended before the slot."""
        places, ends = parts
        del n
        over = jnp.zeros(k, jnp.int32).at[ends].add(1, mode="drop")
        block = jnp.cumsum(over, dtype=jnp.int32)
        slots = jnp.arange(k, dtype=jnp.int32)
        indices = (block << BLOCK_BITS) + places.astype(jnp.int32)
        return jnp.where(slots < ends[-1], indices, PAD + slots)
