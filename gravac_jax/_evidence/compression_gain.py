"""What a step is worth: the share of a gradient that it sends, and what has to wait."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LEAST_ENERGY = 2.0**-100  # squares of entries of a smaller one are beyond float32

# Three compression gains are in print:
#   (1) E|g_c|^2 / E|g_ef|^2             GraVAC, in the text: each energy smoothed first
#   (2) E[|g_c|^2 / |g_ef|^2]            GraVAC, Algorithm 1: the quotient is smoothed
#   (3) sum_l |g_c| / sum_l |g|          the authors' code: not squared, layer norms
#       added up, and over the raw gradient instead of the error-fed one
# We do (1). With g_ef = gradient + residual in the denominator, it is the share of the
# energy that was sent and cannot exceed 1 for any selector. (3) can, whenever the
# residual is large, and (2) lets one step with a small gradient dominate the average.
# The paper's figures use norms: the square root of (1).

# The best for all of eleven workloads is 0.1, and for each alone 0 to 0.27
# (`progress` in docs/results.csv). A value that is too high costs some time, and one
# that is too low costs quality. More replicas than four drift further apart, beside the
# noise of their mean: of a GPT's steps in 4 turns it is 0.04, 0.14 and 0.40 with four,
# eight and sixteen, and in 2 turns 0.06 with sixteen (`quality-replicas`).
WAITING_COST, FEW_REPLICAS = 0.15, 4
# Of gradients, which ask again for what waits: 1.24 is the best for four workloads.
WAITING_COST_AT_SHARED = 1.2


def gain(sent: jax.Array, total: jax.Array) -> jax.Array:
    """Return the share of the `total` energy that `sent` holds.

    Args:
      sent: float32 of any shape, the energy of what was sent.
      total: `[]` float32, the energy of the error-fed gradient.

    Returns:
      float32 in [0, 1], the shape of `sent`. It is 0 if float32 cannot hold the energy
      (norms above 1e19, and below 1e-15, where squares vanish): then only a dense step
      is known to be good.
    """
    # Compared first, because XLA divides by multiplying with the reciprocal, which
    # makes 1 - 2**-24 of x / x.
    is_all = sent >= total
    share = jnp.where(is_all, 1.0, sent / jnp.where(is_all, 1.0, total))
    return jnp.where(jnp.isfinite(total) & (total > LEAST_ENERGY), share, 0.0)


class Averages(NamedTuple):
    """Exponentially weighted averages of energies.

    Attributes:
      sent: `[rungs]` float32, the average energy that each rung sends.
      total: `[]` float32, the average energy of everything.
    """

    sent: jax.Array
    total: jax.Array


def no_averages(rungs: int) -> Averages:
    """Return averages of no observations."""
    return Averages(jnp.zeros(rungs, jnp.float32), jnp.zeros((), jnp.float32))


def smooth(old: Averages, sent: jax.Array, total: jax.Array, weight: float) -> Averages:
    """Add one step, which counts for `weight` (GraVAC uses replicas / 100).

    Only quotients of averages are used, so the correction for their start at zero
    cancels. Energies beyond float32 are left out; otherwise they would stay in the
    averages for ever.
    """
    used = jnp.where(jnp.isfinite(total + jnp.sum(sent)), jnp.float32(weight), 0.0)
    moved = lambda x, new: x + used * (jnp.where(used > 0, new, 0.0) - x)
    return Averages(moved(old.sent, sent), moved(old.total, total))


def progress(
    share: jax.Array, steps: Any = 1, asks_again: Any = False, replicas: int = 1
) -> jax.Array:
    """Return what a step is worth, in dense steps.

    The law: 1 / (1 + c sqrt(waiting steps)). An entry waits for the end of its round,
    and (1 - a) + (1 - a)**2 + ... = (1 - a) / a rounds more, if an exchange sends the
    share a, and decides by chance what that is. While entries wait, replicas drift
    apart like random walks, and the cost grows with the distance. It is an observation,
    not a theorem. With c = 0.15, times sqrt(N / 4) for more than four replicas, it
    holds for gradients at own params and for an optimizer's steps. It fails for
    momentum after the exchange in long rounds, and for one bit of SGD's steps (0.70,
    where 0.92 is predicted). Gradients at the shared params ask again for what waits;
    there c = 1.2.

    Args:
      share: a, float32, of the energy of one gradient that an exchange sends.
      steps: the steps of a round, of a shape that goes with `share`.
      asks_again: `[]` bool, whether gradients ask again for what waits.
      replicas: N.

    Returns:
      float32 in [0, 1].
    """
    drift = WAITING_COST * jnp.sqrt(jnp.maximum(replicas / FEW_REPLICAS, 1))
    cost = jnp.where(asks_again, WAITING_COST_AT_SHARED, drift)
    waiting = (steps - 1) / 2 + steps * (1 - share) / share
    return 1 / (1 + cost * jnp.sqrt(waiting))
