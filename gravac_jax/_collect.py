"""From marks to a payload, some slots at a time.

How many slots a step fills is data. A branch for every count would be compiled as
often as the ladder has rungs; a loop over pieces of the largest one is compiled once,
and takes as many turns as the count needs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _compaction, _payload, _tree
from gravac_jax._compaction import Marks
from gravac_jax._payload import Payload

PIECES = 8  # of the largest payload; 16 are slower: threads wait at each small kernel


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


class _Turn(NamedTuple):
    slot: jax.Array  # so many are filled
    word: jax.Array  # so many words begin before
    indices: jax.Array  # from here on what `_compaction.begins` says
    values: jax.Array
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
    pieces = 1 if isinstance(k, int) else PIECES
    piece = -(-capacity // pieces)

    def fill(t: _Turn) -> _Turn:
        begins = jax.lax.dynamic_slice(t.indices, (t.slot,), (piece,))
        indices, word = _compaction.places(marks, begins, t.slot, t.word)
        values = rounded(_payload.take(bucket, indices).values, indices)
        return _Turn(
            slot=t.slot + piece,
            word=word,
            indices=jax.lax.dynamic_update_slice(t.indices, indices, (t.slot,)),
            values=jax.lax.dynamic_update_slice(t.values, values, (t.slot,)),
            energy=t.energy + _tree.energy(values),
            excess=t.excess + _tree.excess_if(is_asked, jnp.square(values), thresholds),
        )

    begins = _compaction.begins(marks, piece * pieces)
    # Zeros of the bucket's kind: they vary over the axis of replicas where it does.
    none = 0 * (marks.total + _compaction.magnitude_bits(bucket[:1])[0])
    nothing = none.astype(jnp.float32)
    turn = _Turn(
        slot=none,
        word=none,
        indices=begins + none,
        values=jnp.zeros(begins.shape, jnp.float32) + nothing,
        energy=nothing,
        excess=jnp.zeros_like(thresholds) + nothing,
    )
    is_short = lambda t: t.slot < k
    last = fill(turn) if pieces == 1 else jax.lax.while_loop(is_short, fill, turn)
    payload = Payload(last.values[:capacity], last.indices[:capacity])
    return Collected(payload, last.energy, last.excess)
