"""How much a step is worth whose gradient is not sent whole, or not at once."""

import jax
import jax.numpy as jnp

from gravac_jax._selection.waiting import waiting_steps

# The best for all of five workloads is 0.11, and for momentum SGD alone 0.17 to 0.18
# (examples/benchmarks/records/2026-11-25_progress, which says how wrong each is). A
# value that is too high costs some time, and one that is too low costs quality.
WAITING_COST = 0.15


def progress(share: jax.Array, steps: jax.Array | int = 1) -> jax.Array:
    """Return what a step is worth, in dense steps.

    The law: 1 / (1 + 0.15 sqrt(waiting steps)). While entries wait, replicas drift
    apart like random walks, and the cost grows with the distance. It is an observation,
    not a theorem. It holds for gradients at own params and momentum before long rounds.

    Args:
      share: float32, the share of the energy of one gradient that an exchange sends.
      steps: the steps of a round, of a shape that goes with `share`.

    Returns:
      float32 in [0, 1].
    """
    return 1 / (1 + WAITING_COST * jnp.sqrt(waiting_steps(share, steps)))
