"""From marks to a payload, of one of a few sizes.

How many slots a step fills is data. A branch for every count would be compiled as often
as the ladder has rungs; a few sizes, each a part of the largest, waste little.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _payload, _tree
from gravac_jax._marking import compaction
from gravac_jax._marking.compaction import Marks
from gravac_jax._payload import Payload

# Of the largest payload, one over these. A loop over eighths was slower where all are
# filled: threads wait for each other at each of its small kernels.
SIZES = (8, 2, 1)


class Collected(NamedTuple):
    """The marked entries of a bucket, and what they weigh.

    Attributes:
      payload: of as many slots as were asked for; what comes after them is void.
      energy: `[]` float32.
      excess: `[rungs]` float32, of their squares over each threshold.
    """

    payload: Payload
    energy: jax.Array
    excess: jax.Array


def collect(
    bucket: jax.Array,
    marks: Marks,
    k: jax.Array | int,
    capacity: int,
    thresholds: jax.Array,
    rounded: Callable[[jax.Array, jax.Array], jax.Array] = lambda values, _: values,
    is_asked: jax.Array | bool = True,
) -> Collected:
    """Fill `k` (`[]` int32) slots with the marked entries of `bucket` (`[n]`).

    Args:
      bucket: float32.
      marks: of it, at most `k`.
      k: at most `capacity`.
      capacity: static, of the payload.
      thresholds: `[rungs]` float32, squares.
      rounded: what others receive of values (`[c]`) with these indices (`[c]`).
      is_asked: whether the excess is; zeros where it is not.

    Returns:
      What was collected.
    """

    def filled(size: int) -> Collected:
        indices = compaction.select(marks, size)
        values = rounded(_payload.take(bucket, indices).values, indices)
        void = (0, capacity - size)
        return Collected(
            Payload(jnp.pad(values, void), jnp.pad(indices, void)),
            _tree.energy(values),
            _tree.excess_if(is_asked, jnp.square(values), thresholds),
        )

    if isinstance(k, int):
        return filled(capacity)
    sizes = sorted({-(-capacity // x) for x in SIZES})
    # Not in a branch, where XLA's CPU backend runs nothing beside it.
    few = filled(sizes[0])
    which = jnp.sum((k > jnp.asarray(sizes[:-1], jnp.int32)).astype(jnp.int32))
    branches = [lambda: few, *(functools.partial(filled, x) for x in sizes[1:])]
    return jax.lax.switch(which, branches)
