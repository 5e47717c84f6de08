"""The interface of controllers, and the laws that hold for all of them.

A controller sees only scalars that were reduced over the replicas. So all replicas
decide alike; a decision that differed between devices would hang the job.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax

from gravac_jax import _arrays
from gravac_jax._encodings.base import Encoding

LOOK_FIRST = 32  # steps; arbitrary


class Evidence(NamedTuple):
    """What a controller may know about a step; the same on every replica.

    Where the compiler shards the model, energies are divided by the devices that share
    a replica: use their quotients.

    Attributes:
      step: `[]` int32, steps before this one.
      replicas: N, static.
      first_sparse: `[]` int32, the lowest rung where something is encoded. Rungs below
        it are dense steps whatever their encodings, because with so many replicas their
        payloads would weigh more.
      energies: `[rungs]` float32, the mean over replicas of the energy that each rung
        would have sent in this step of the leaves that are compressed. If the
        controller does not look at the bucket (`looks_at`), or the step does not
        (`looks`), only that of the rung taken is right.
      energy: `[]` float32, the mean energy of the error-fed gradient of these leaves.
      gradient_energy: `[]` float32, the mean energy of the gradient after the clip,
        without decay, residual and momentum.
      gradient_energies: `[rungs]` float32, the energy that an exchange by chance would
        have sent of that gradient, in which entries wait as long as at each rung
        (`Encoding.waits`), plus that of the leaves that go dense; with a delay, of the
        gradient that this exchange sends. Zeros if the controller does not look at
        gradients, and if the step of that gradient did not look.
      predicted_parts: `[rungs, 4]` float32, seconds of compute, selection, messages and
        bytes in a step at each rung, by the cost model.
      measured_seconds: `[rungs]` float32, the mean over replicas of the newest step
        time at each rung that was handed to `update` since the last decision; 0 where
        there is none.
      local_seconds: `[]` float32, the same of local steps, which exchange nothing; None
        without rounds.
      round_steps: steps since the last decision: 1, unless some are local.
      at_own_params: `[]` bool or static, whether gradients are known to be taken at
        own params.

    Example:
      See `gravac.Controller`.
    """

    step: jax.Array
    replicas: int
    first_sparse: jax.Array
    energies: jax.Array
    energy: jax.Array
    gradient_energy: jax.Array
    gradient_energies: jax.Array
    predicted_parts: jax.Array
    measured_seconds: jax.Array
    local_seconds: jax.Array | None = None
    round_steps: Any = 1
    at_own_params: jax.Array | bool = False

    @property
    def effective_step(self) -> jax.Array:
        """The step at which the decision takes effect, `[]` int32: three exchanges on.

        The next exchange agrees on it. A host with a program for each rung reads it
        during the exchange after that. With rounds it is the last step of one, if all
        stay as long as the last one was.
        """
        return self.step + 3 * self.round_steps


class Controller(abc.ABC):
    """Chooses the rung of each step. Subclass it to write your own.

    Law:
      The rung is on the ladder; another number is taken for the nearest rung. The state
      keeps its shapes and dtypes, and nothing in it depends on one replica alone.

    Attributes:
      ladder: the encodings to choose from, by falling bytes.
      uses_seconds: whether it decides by how long steps take, measured or predicted.
      looks_at: what it needs to know of rungs that are not taken, for which steps look
        at a sample: "gradient" for `Evidence.gradient_energies`, "bucket" for
        `Evidence.energies` of all rungs, of the error-fed gradient, or "nothing".
      look_every: steps from one look to the next.

    Example:
      >>> import dataclasses, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> @dataclasses.dataclass(frozen=True, repr=False)
      ... class EveryTenthDense(gravac.Controller):
      ...     ladder: tuple = (gravac.Dense(), gravac.TopK(100))
      ...     def init(self):
      ...         return jnp.int32(0), ()
      ...     def decide(self, evidence, state):
      ...         is_sparse = evidence.effective_step % 10 > 0
      ...         return is_sparse.astype(jnp.int32), state
      >>> tx = gravac.transform(send=EveryTenthDense())
    """

    uses_seconds: ClassVar[bool] = False
    looks_at: ClassVar[Literal["gradient", "bucket", "nothing"]] = "nothing"
    look_every: ClassVar[int] = 1
    ladder: tuple[Encoding, ...]

    def reach(self, at_own_params: bool) -> tuple[int, ...]:
        """Return the rungs that it may take, rising: a step is compiled for no others.

        Args:
          at_own_params: whether gradients are known to be taken at own params.
        """
        return tuple(range(len(self.ladder)))

    def looks(self, step: jax.Array, local_steps: Any = 0) -> jax.Array | bool:
        """Return whether a step looks at rungs that it does not take.

        The first 32 steps always look.

        Args:
          step: `[]` int32, steps before this one.
          local_steps: `[]` int32, steps since the last exchange, which cannot look.
        """
        if self.look_every == 1:
            return True
        return (step < LOOK_FIRST) | (step % self.look_every <= local_steps)

    @abc.abstractmethod
    def init(self) -> tuple[jax.Array, Any]:
        """Return the rung of the first three exchanges, and the state before them.

        A state may have a method `moved(fresh)`. It returns the state for a run that is
        restored on other devices; `fresh` is the state from `init`.
        """

    @abc.abstractmethod
    def decide(self, evidence: Evidence, state: Any) -> tuple[jax.Array, Any]:
        """Choose the rung of a coming step, `evidence.effective_step`.

        Args:
          evidence: what is known after this step.
          state: from `init` or the last step.

        Returns:
          rung: `[]` int32.
          state: the new state.
        """

    def __repr__(self) -> str:
        """Return the constructor, with what differs from the defaults."""
        return _arrays.constructor(self)

    def explain(self, state: Any) -> str:
        """Return in words what the last decision compared; nothing if it predicts none.

        Args:
          state: from `decide`, in NumPy.
        """
        return ""


def check_ladder(value: Any, owner: str, least: int = 1) -> None:
    """Refuse what is no tuple of encodings, each of them once."""
    is_frozen = lambda x: dataclasses.is_dataclass(x) and x.__hash__ is not None
    is_one = lambda x: isinstance(x, Encoding) and is_frozen(x)
    is_tuple = isinstance(value, tuple) and all(map(is_one, value))
    if not is_tuple or len(value) < least or len({*value}) < len(value):
        raise (ValueError if is_tuple else TypeError)(
            f"the ladder of {owner} must be a tuple of {least} encodings or more, each"
            f" of them once, as (gravac.Dense(), gravac.Bits(8)) is, got"
            f" {_arrays.brief(value)}: for one alone write"
            f" gravac.transform(send=gravac.Bits(2)), and make each encoding a frozen"
            f" dataclass, by @dataclasses.dataclass(frozen=True)."
        )
