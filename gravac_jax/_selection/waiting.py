"""How long entries of a gradient wait until they are sent."""

import jax
import jax.numpy as jnp

# Fitted to the record 2026-11-26_sparse_progress, which has the errors.
SMALL_ENTRIES_WAIT = 1 / 32
# An entry that is not sent is missing; a rounded entry is there, too large as often as
# too small. Fitted to eleven workloads: the record 2026-11-27_longer_runs has errors.
ROUNDING_WAITS = 1 / 10


def waiting_steps(
    share: jax.Array, steps: jax.Array | int = 1, counted: float = 1.0
) -> jax.Array:
    """Return how many steps an entry waits on average until it is sent.

    It waits for the end of its round. An exchange that sends the share a of what has
    gathered, and decides by chance what that is, leaves 1 - a to the next, of which it
    sends a, and so on: an entry waits (1 - a) + (1 - a)**2 + ... = (1 - a) / a rounds
    more. Parts in H turns are rounds of H steps to each entry.

    Args:
      share: float32, the share of the energy of one gradient that an exchange sends.
      steps: the steps of a round, of a shape that goes with `share`.
      counted: how much of what is left counts: `ROUNDING_WAITS` if entries are rounded.

    Returns:
      float32; infinite where the share is 0.
    """
    return (steps - 1) / 2 + steps * counted * (1 - share) / share


def share_by_chance(waiting: jax.Array) -> jax.Array:
    """Return the share that lets entries wait so many steps: undo `waiting_steps`."""
    return 1 / (1 + waiting)


def shares_by_chance(shares: jax.Array, counts: tuple[int, ...], n: int) -> jax.Array:
    """Return the shares of exchanges by chance in which entries wait as long.

    Where an exchange sends the largest entries, the small ones wait longer than by
    chance: until what is held back of them is as large as the large ones. They are
    1 - a of the energy, and wait for n / k / 32 steps more.

    Args:
      shares: `[rungs]` float32, of the largest entries.
      counts: static, the k entries that each rung sends.
      n: static, entries of the gradient.
    """
    factors = jnp.asarray([n / max(k, 1) for k in counts], jnp.float32)
    longer = (1 - shares) * factors * SMALL_ENTRIES_WAIT
    return share_by_chance(waiting_steps(shares) + longer)
