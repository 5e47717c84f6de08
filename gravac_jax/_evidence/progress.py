"""How much a step is worth whose gradient is not sent whole, or not at once."""

import jax
import jax.numpy as jnp

# The best for all of eleven workloads is 0.1, and for each alone 0 to 0.27
# (docs/results.md has its error). A value that is too high costs some time, and one
# that is too low costs quality.
WAITING_COST = 0.15
# Of gradients, which ask again for what waits: 1.24 is the best for four workloads.
WAITING_COST_AT_SHARED = 1.2


def waiting_steps(share: jax.Array, steps: jax.Array | int = 1) -> jax.Array:
    """Return how many steps an entry waits on average until it is sent.

    It waits for the end of its round, and (1 - a) + (1 - a)**2 + ... = (1 - a) / a
    rounds more, if an exchange sends the share a, and decides by chance what that is.

    Args:
      share: a, float32.
      steps: the steps of a round, of a shape that goes with `share`.

    Returns:
      float32; infinite where the share is 0.
    """
    return (steps - 1) / 2 + steps * (1 - share) / share


def progress(
    share: jax.Array, steps: jax.Array | int = 1, cost: jax.Array | float = WAITING_COST
) -> jax.Array:
    """Return what a step is worth, in dense steps.

    The law: 1 / (1 + c sqrt(waiting steps)). While entries wait, replicas drift apart
    like random walks, and the cost grows with the distance. It is an observation, not a
    theorem. With c = 0.15 it holds for gradients at own params and for an optimizer's
    steps. It fails for momentum after the exchange in long rounds, and for one bit of
    SGD's steps (0.70, where 0.92 is predicted). Gradients at the shared params ask
    again for what waits; there c = 1.2.

    Args:
      share: float32, the share of the energy of one gradient that an exchange sends.
      steps: the steps of a round, of a shape that goes with `share`.
      cost: c, `WAITING_COST` or `WAITING_COST_AT_SHARED`.

    Returns:
      float32 in [0, 1].
    """
    return 1 / (1 + cost * jnp.sqrt(waiting_steps(share, steps)))
