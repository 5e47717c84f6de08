"""The power method, one step an exchange: what a matrix has most of.

Vogels et al., PowerSGD, NeurIPS 2019, Algorithm 1, for a matrix M_i on each replica:
the left basis P, orthonormal, is that of mean(M_i) Q, what replica i sends is
P P^T M_i, and the next Q is the mean of M_i^T P.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _tree

# On TPUs, and on GPUs that round to TF32, a mean of products would otherwise not be
# the product of means.
_multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class PowerState(NamedTuple):
    """What is known of one matrix.

    Attributes:
      right: `[columns, ranks]` float32, where the next power iteration begins: the mean
        right matrix of the last one, each column scaled to at most 1; random at first.
      remaining_shares: `[ranks]` float32, what each further rank took, when it was last
        sent, of the energy that those before it had left.
    """

    right: jax.Array
    remaining_shares: jax.Array


def send(
    mine: list[jax.Array],
    state: tuple[PowerState, ...],
    energies: list[jax.Array],
    is_low: list[bool],
    rank: int,
    rounded: Callable[[jax.Array], jax.Array],
    mean: Callable[[list[jax.Array]], list[jax.Array]],
) -> tuple[list[jax.Array], list[jax.Array], list[PowerState]]:
    """Send all arrays of a bucket, in two collectives.

    Args:
      mine: this replica's arrays, `[rows, columns]` each.
      state: of each.
      energies: of each.
      is_low: which of them go as two thin matrices.
      rank: of these.
      rounded: what others receive of an array.
      mean: over replicas, of what was rounded.

    Returns:
      What this replica sent of each, the means of that, and the new states; of the
      arrays that are not low, the whole.
    """
    sketches = [
        rounded(_multiply(x, s.right[:, :rank]) if low else x)
        for x, s, low in zip(mine, state, is_low, strict=True)
    ]
    means = mean(sketches)
    lefts = [jnp.linalg.qr(x)[0] for x, low in zip(means, is_low, strict=True) if low]
    low = [i for i, is_mine in enumerate(is_low) if is_mine]
    rights = [
        rounded(_multiply(mine[i].T, left)) for i, left in zip(low, lefts, strict=True)
    ]
    sent, learned = list(sketches), list(state)
    for i, left, right, right_mean in zip(
        low, lefts, rights, mean(rights), strict=True
    ):
        sent[i] = _multiply(left, right.T)
        means[i] = _multiply(left, right_mean.T)
        learned[i] = _learn(state[i], right, right_mean, energies[i])
    return sent, means, learned


def look(
    mean: jax.Array, mine: jax.Array, state: PowerState, energy: jax.Array
) -> PowerState:
    """What all ranks would have sent of a matrix that was averaged whole."""
    if not state.remaining_shares.size:
        return state
    left = jnp.linalg.qr(_multiply(mean, state.right))[0]
    right, right_mean = _multiply(mine.T, left), _multiply(mean.T, left)
    return _learn(state, right, right_mean, energy)


def _learn(
    state: PowerState, right: jax.Array, mean: jax.Array, energy: jax.Array
) -> PowerState:
    """After an exchange of `right` (`[columns, rank]`), whose mean that is.

    A direction in which nothing was found is kept. Scaled columns neither overflow nor
    vanish, and span the same space.
    """
    rank = right.shape[1]
    largest = jnp.max(jnp.abs(mean), axis=0, keepdims=True)
    is_found = largest >= _tree.SMALLEST_NORMAL
    scaled = mean / jnp.where(is_found, largest, 1)
    sent = jnp.sum(jnp.square(right), axis=0)
    left = energy - jnp.cumsum(sent) + sent
    shares = jnp.clip(sent / jnp.where(left > 0, left, 1), 0, 1)
    begun = jnp.where(is_found, scaled, state.right[:, :rank])
    return PowerState(
        state.right.at[:, :rank].set(begun),
        state.remaining_shares.at[:rank].set(shares),
    )


def taken(state: PowerState, rank: int) -> jax.Array:
    """`[]` float32, the share of a matrix's energy that this rank sends."""
    return 1 - jnp.prod(1 - state.remaining_shares[:rank])
