"""What one phase of a step hands to the next."""

from typing import Any, NamedTuple

import jax
import numpy as np

from gravac_jax._buckets import Buckets
from gravac_jax._encodings.ladder import Ladder
from gravac_jax._info import Tables
from gravac_jax._network import Axes
from gravac_jax._state import LocalState, Told, TransformState
from gravac_jax._step.components import Components


class Setting(NamedTuple):
    """What a step knows before it begins. The first five are static.

    Attributes:
      components: what the transform is made of.
      axes: the other replicas.
      buckets: what is fused, and what goes dense.
      ladders: the encodings of each bucket.
      tables: what each rung sends.
      looks: whether the step estimates what other rungs would send, `[]` bool or
        static.
      key: a random key, the same on all replicas, new at every step.
      state: the transform's state after the last step.
      rung: the rung of this step, `[]` int32, on which all replicas have agreed; an
        `np.int32` if it never changes or the caller knows it.
      reach: the rungs that steps may take, rising; static.
      rides: whether the first bucket's exchange also averages what replicas agree on;
        static.
      params: the params, or None if `update` was not given any.
      own_params: this replica's own params, in parts, before an exchange that comes
        before its gradient is added to the memory; None without such an exchange.
      times: the measured time of each kind of step, and whether it is known:
        `[kinds]` float32 both.
      is_due: with rounds, whether this step exchanges, if the caller knows: static.
      at_own_params: whether gradients are known to be taken at own params, static.
    """

    components: Components
    axes: Axes
    buckets: Buckets
    ladders: list[Ladder]
    tables: Tables
    looks: jax.Array | bool
    key: jax.Array
    state: TransformState
    rung: jax.Array | np.int32
    reach: tuple[int, ...]
    rides: bool
    params: Any = None
    own_params: Any = None
    times: Any = ()
    is_due: bool | None = None
    at_own_params: bool = False


class Gradient(NamedTuple):
    """This replica's own gradient.

    Attributes:
      parts: the buckets, then the leaves that go dense: `[n]` float32 each.
      bad: `[]` float32, 1 if an entry is not finite or, unclipped, beyond the bound of
        `prepare`.
    """

    parts: tuple[jax.Array, ...]
    bad: jax.Array


class Fed(NamedTuple):
    """What the memory made of the gradient.

    Attributes:
      parts: the buckets, then the leaves that go dense: the gradient and what was held
        back, `[n]` float32 each.
      memory: the states that `Memory.retain` takes, one a part.
    """

    parts: tuple[jax.Array, ...]
    memory: tuple[Any, ...]


class Agreed(NamedTuple):
    """What every step averages over replicas, whatever its rung; or one's own figures.

    Attributes:
      told: what replicas tell of their gradients and times; `bad` is above 0 if some
        gradient is, and `timed` the share of replicas that measured a time.
      dense: `[m]` float32, the mean of the leaves that go dense.
      contrast: `[]` float32, 0 if the gradient's energy is the same on all replicas.
      rung: `[]` float32, the rung in the first replica's state.
      round_steps: `[1]` float32, the length of the round after the next exchange, in
        the first replica's state; `[0]` without rounds.
      apart: `[1]` float32, above 0 if replicas hold different params; `[0]` if params
        are never compared.
    """

    told: Told
    dense: jax.Array
    contrast: jax.Array
    rung: jax.Array
    round_steps: jax.Array
    apart: jax.Array


class Arrived(NamedTuple):
    """What all replicas have received, the same on each of them.

    Attributes:
      agreed: what every step averages.
      rung: `[]` int32, the rung that was taken; the number of rungs if it was local.
      means: the mean of what was sent, `[n]` float32 a bucket.
      mean_energies: `[rungs + 1]` float32, the mean over replicas of the energy that
        each rung would have sent, as in `Exchanged`, and of the whole.
      energy: `[]` float32, the energy of the means; 0 without rounds.
    """

    agreed: Agreed
    rung: jax.Array
    means: tuple[jax.Array, ...]
    mean_energies: jax.Array
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
