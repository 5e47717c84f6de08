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
    """

    own: list[jax.Array]
    means: list[jax.Array]
    states: list[PowerState]


class Collective(NamedTuple):
    """How thin matrices travel.

    Attributes:
      rounded: returns what the other replicas receive of an array.
      mean: returns the means over replicas of arrays that were rounded.
    """

    rounded: Callable[[jax.Array], jax.Array]
    mean: Callable[[list[jax.Array]], list[jax.Array]]


def send(
    mine: list[jax.Array],
    states: tuple[PowerState, ...],
    energies: list[jax.Array],
    is_low: list[bool],
    rank: int,
    collective: Collective,
) -> SentMatrices:
    """Send all arrays of a bucket, in two collectives.

    Args:
      mine: this replica's arrays, `[rows, columns]` each.
      states: the state of each array.
      energies: the energy of each array.
      is_low: whether each array is sent as two thin matrices; otherwise whole.
      rank: columns of the thin matrices.
      collective: averages over replicas.
    """
    sketches = [
        collective.rounded(_multiply(x, s.right[:, :rank]) if low else x)
        for x, s, low in zip(mine, states, is_low, strict=True)
    ]
    means = collective.mean(sketches)
    low = [i for i, is_this_low in enumerate(is_low) if is_this_low]
    lefts = [jnp.linalg.qr(means[i])[0] for i in low]
    rights = [
        collective.rounded(_multiply(mine[i].T, left))
        for i, left in zip(low, lefts, strict=True)
    ]
    right_means = collective.mean(rights)
    own, learned = list(sketches), list(states)
    for i, left, right, mean in zip(low, lefts, rights, right_means, strict=True):
        own[i] = _multiply(left, right.T)
        means[i] = _multiply(left, mean.T)
        learned[i] = _learn(states[i], right, mean, energies[i])
    return SentMatrices(own, means, learned)


def learn_from_whole(
    mean: jax.Array, mine: jax.Array, state: PowerState, energy: jax.Array
) -> PowerState:
    """Return what all ranks would have taught about a matrix that was sent whole."""
    if not state.remaining_shares.size:
        return state
    left = jnp.linalg.qr(_multiply(mean, state.right))[0]
    right, right_mean = _multiply(mine.T, left), _multiply(mean.T, left)
    return _learn(state, right, right_mean, energy)


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
