"""A mean that travels as bfloat16: by shards, each added up in float32."""

import jax
import jax.numpy as jnp

from gravac_jax import _tree
from gravac_jax._comm import Comm
from gravac_jax._encoding import BFloat16

VALUE_BYTES = 2
_VALUES = BFloat16()


def rounded(x: jax.Array) -> jax.Array:
    """What others receive of `x`, float32 of any shape."""
    return _VALUES.rounded(x, jnp.int32(0))


def mean(sent: list[jax.Array], comm: Comm) -> list[jax.Array]:
    """The mean over replicas of what was `rounded`, rounded again, like `sent`."""
    none = jnp.int32(0)  # bfloat16 has no use for exponents
    flat = _tree.ravel(sent)
    padded = jnp.pad(flat, (0, -flat.size % comm.replicas)).reshape(comm.replicas, -1)
    swapped = comm.swap(_VALUES.encode(padded, none))
    total = jnp.sum(_VALUES.decode(swapped, none), axis=0)
    shards = comm.gather(_VALUES.encode(rounded(total / comm.replicas), none))
    whole = _VALUES.decode(shards, none).reshape(-1)[: flat.size]
    return _tree.unravel(whole, sent)


def shard_bytes(n: int, replicas: int) -> int:
    """Of `n` entries, what one replica adds up."""
    return VALUE_BYTES * -(-n // replicas)
