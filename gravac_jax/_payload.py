"""What one replica hands to the collective."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ENTRY_BYTES = 8  # a float32 value and its int32 index

# No bucket has more entries than this. The index of a slot that holds nothing is
# PAD + slot: outside every bucket, none twice, and within int32.
MAX_ENTRIES = PAD = 2**30


class Payload(NamedTuple):
    """Selected entries of a bucket, and empty slots after them.

    Attributes:
      values: `[k]` float32; 0 in an empty slot.
      indices: `[k]` int32, where in the bucket each value belongs; rising, so none
        twice. `PAD` and above in an empty slot.
    """

    values: jax.Array
    indices: jax.Array


def take(bucket: jax.Array, indices: jax.Array) -> Payload:
    """The entries of `bucket` (`[n]`) at `indices` (`[k]`, as in a payload)."""
    values = bucket.at[indices].get(
        mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
    )
    return Payload(values, indices)


def drop(bucket: jax.Array, payload: Payload) -> jax.Array:
    """`bucket` without the entries of `payload`: what is left to send later."""
    return bucket.at[payload.indices].set(
        0, mode="drop", unique_indices=True, indices_are_sorted=True
    )


def pack(payload: Payload) -> jax.Array:
    """`[2, k]` int32: one buffer, so that one collective carries it."""
    bits = jax.lax.bitcast_convert_type(payload.values, jnp.int32)
    return jnp.stack([bits, payload.indices])


def unpack(packed: jax.Array) -> Payload:
    """The inverse of `pack`."""
    bits, indices = packed
    return Payload(jax.lax.bitcast_convert_type(bits, jnp.float32), indices)


def add_up(packed: jax.Array, n: int, replicas: int = 1) -> jax.Array:
    """`[n]` float32, the sum of the payloads packed in `[replicas, 2, k]`.

    Payloads are added one after the other, each without repeated indices, so that the
    sum does not depend on the order in which a device happens to run its threads:
    replicas must stay bit-identical.

    Args:
      packed: int32.
      n: static, entries of the bucket.
      replicas: what values are divided by, before they are added: k of them, not n.
    """

    def add(replica: jax.Array, total: jax.Array) -> jax.Array:
        payload = unpack(jax.lax.dynamic_index_in_dim(packed, replica, keepdims=False))
        return total.at[payload.indices].add(
            payload.values / replicas,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=True,
        )

    return jax.lax.fori_loop(0, packed.shape[0], add, jnp.zeros(n, jnp.float32))
