"""One power iteration per exchange: the directions that a matrix has most of.

Vogels et al., PowerSGD, NeurIPS 2019, Algorithm 1, for a matrix M_i on each replica:
the left basis P, orthonormal, is that of mean(M_i) Q. Replica i sends P P^T M_i, and
the next Q is the mean of M_i^T P.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays

# At lower precision, as on TPUs and on GPUs that round to TF32, a mean of products
# would not be the product of means.
_multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class PowerState(NamedTuple):
    """What is known about one matrix.

    Attributes:
      right: `[columns, ranks]` float32, where the next iteration begins: the mean right
        matrix of the last one, each column scaled to at most 1; random at first.
      remaining_shares: `[ranks]` float32, the share of the remaining energy that each
        further rank took when it was last sent.
    """

    right: jax.Array
    remaining_shares: jax.Array


class SentMatrices(NamedTuple):
    """What a rank sent, array by array.

    Attributes:
      own: what this replica sent of each array.
      means: the means over replicas of what was sent.
      states: the new states.
      energy: `[]` float32, of what this replica sent.
    """

    own: list[jax.Array]
    means: list[jax.Array]
    states: list[PowerState]
    energy: jax.Array


class Collective(NamedTuple):
    """How thin matrices travel.

    Attributes:
      rounded: returns what the other replicas receive of an array.
      mean: returns the means over replicas of arrays that were rounded.
      tell: is told the energy that is sent, before the last mean.
    """

    rounded: Callable[[jax.Array], jax.Array]
    mean: Callable[[list[jax.Array]], list[jax.Array]]
    tell: Callable[[jax.Array], None]


def send(
    mine: list[jax.Array],
    states: tuple[PowerState, ...],
    is_low: list[bool],
    rank: int,
    collective: Collective,
) -> SentMatrices:
    """Send all arrays of a bucket, in two collectives, or in one if none is low.

    Args:
      mine: this replica's arrays, `[rows, columns]` each.
      states: the state of each array.
      is_low: whether each array is sent as two thin matrices; otherwise whole.
      rank: columns of the thin matrices.
      collective: averages over replicas.
    """
    sketches = [
        collective.rounded(_multiply(x, s.right[:, :rank]) if low else x)
        for x, s, low in zip(mine, states, is_low, strict=True)
    ]
    low = [i for i, is_this_low in enumerate(is_low) if is_this_low]
    whole = [_arrays.energy(x) for i, x in enumerate(sketches) if i not in low]
    if not low:
        energy = _arrays.total(whole)
        collective.tell(energy)
        return SentMatrices(sketches, collective.mean(sketches), [*states], energy)
    means = collective.mean(sketches)
    lefts = [jnp.linalg.qr(means[i])[0] for i in low]
    rights = [
        collective.rounded(_multiply(mine[i].T, left))
        for i, left in zip(low, lefts, strict=True)
    ]
    # Left matrices are orthonormal.
    energy = _arrays.total([*whole, *map(_arrays.energy, rights)])
    collective.tell(energy)
    right_means = collective.mean(rights)
    own, learned = list(sketches), list(states)
    for i, left, right, mean in zip(low, lefts, rights, right_means, strict=True):
        own[i] = _multiply(left, right.T)
        means[i] = _multiply(left, mean.T)
        learned[i] = _learn(states[i], right, mean, _arrays.energy(mine[i]))
    return SentMatrices(own, means, learned, energy)


def _learn(
    state: PowerState, right: jax.Array, mean: jax.Array, energy: jax.Array
) -> PowerState:
    """Return the state after `right` (`[columns, rank]`) with this `mean` was sent.

    A direction in which nothing was found is kept. Scaled columns neither overflow nor
    vanish, and span the same space.
    """
    rank = right.shape[1]
    largest = jnp.max(jnp.abs(mean), axis=0, keepdims=True)
    is_found = largest >= _arrays.SMALLEST_NORMAL
    scaled = mean / jnp.where(is_found, largest, 1)
    sent = jnp.sum(jnp.square(right), axis=0)
    left = energy - jnp.cumsum(sent) + sent
    shares = jnp.clip(sent / jnp.where(left > 0, left, 1), 0, 1)
    begun = jnp.where(is_found, scaled, state.right[:, :rank])
    return PowerState(
        state.right.at[:, :rank].set(begun),
        state.remaining_shares.at[:rank].set(shares),
    )


def sent_share(state: PowerState, rank: int) -> jax.Array:
    """Return the share of a matrix's energy that `rank` sends, `[]` float32."""
    return 1 - jnp.prod(1 - state.remaining_shares[:rank])
