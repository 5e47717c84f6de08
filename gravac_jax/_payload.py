"""What one replica hands to the collective."""

from collections.abc import Callable
from typing import NamedTuple

import jax

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


def drop(bucket: jax.Array, indices: jax.Array) -> jax.Array:
    """`bucket` without the entries at `indices`: what is left to send later."""
    return bucket.at[indices].set(
        0, mode="drop", unique_indices=True, indices_are_sorted=True
    )


def spread(payload: Payload, zeros: jax.Array) -> jax.Array:
    """`[n]` float32: the entries of `payload` in their places among `zeros` (`[n]`)."""
    return zeros.at[payload.indices].set(
        payload.values, mode="drop", unique_indices=True, indices_are_sorted=True
    )


def add_up(
    buffers: jax.Array, decode: Callable[[jax.Array], Payload], zeros: jax.Array
) -> jax.Array:
    """`[n]` float32, the mean of what `decode` finds in each row of `buffers`.

    Payloads are added one after the other, each without repeated indices, so that the
    sum does not depend on the order in which a device happens to run its threads:
    replicas must stay bit-identical. Values are divided before they are added: k of
    them, not n.

    Args:
      buffers: `[replicas, words]`.
      decode: the payload of one row.
      zeros: `[n]` float32.
    """
    replicas = buffers.shape[0]

    def add(replica: jax.Array, total: jax.Array) -> jax.Array:
        buffer = jax.lax.dynamic_index_in_dim(buffers, replica, keepdims=False)
        payload = decode(buffer)
        return total.at[payload.indices].add(
            payload.values / replicas,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=True,
        )

    return jax.lax.fori_loop(0, replicas, add, zeros)
