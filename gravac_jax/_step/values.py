"""What one phase of a step hands to the next: own and mean figures, results."""

from typing import Any, NamedTuple

import jax

from gravac_jax._step.states import LocalState, Told


class Figures(NamedTuple):
    """What every step averages over replicas, at every rung: one's own, or the mean.

    Attributes:
      told: what replicas tell of their gradients and times; `bad` is above 0 if some
        gradient is, and `timed` the share of replicas that measured a time.
      dense: `[m]` float32, the mean of the leaves that go dense.
      rung: `[]` float32, the rung in the first replica's state.
      round_steps: `[1]` float32, the length of the round after the next exchange, in
        the first replica's state; `[0]` without rounds.
      apart: `[1]` float32, other than 0 if a sample shows that replicas hold different
        params; `[0]` if they are not compared.
    """

    told: Told
    dense: jax.Array
    rung: jax.Array
    round_steps: jax.Array
    apart: jax.Array


class Arrived(NamedTuple):
    """What all replicas have received, the same on each of them.

    Attributes:
      figures: the means of what every step averages.
      rung: `[]` int32, the rung that was taken; the number of rungs if it was local.
      means: the mean of what was sent, `[n]` float32 a bucket.
      energies: `[rungs]` float32, the mean over replicas of the energy that each rung
        would have sent, as in `Exchanged`.
      energy: `[]` float32, that of the whole.
    """

    figures: Figures
    rung: jax.Array
    means: tuple[jax.Array, ...]
    energies: jax.Array
    energy: jax.Array


class Taken(NamedTuple):
    """What came of a step, before it is reported.

    Attributes:
      arrived: what all replicas have received.
      local: this replica's own state after the step.
      decided: `[]` int32, the rung of the third exchange from here.
      controller: the controller's new state.
      gains: `[rungs]` float32, the gain of each rung, as last known.
    """

    arrived: Arrived
    local: LocalState
    decided: jax.Array
    controller: Any
    gains: jax.Array
