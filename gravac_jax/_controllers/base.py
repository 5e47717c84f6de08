"""The interface of controllers, and the laws that hold for all of them.

A controller sees only scalars that were reduced over the replicas. So all replicas
decide alike; a decision that differed between devices would hang the job.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOOK_FIRST = 32  # steps; arbitrary
DROP = 0.7  # of a learning rate in one step; arbitrary: smooth schedules fall less


class Evidence(NamedTuple):
    """What a controller may know about a step; the same on every replica.

    Attributes:
      step: `[]` int32, steps before this one.
      replicas: N, static.
      first_sparse: `[]` int32, the lowest rung that does not send everything. Rungs
        below it are dense steps whatever their factors, because with so many replicas
        their payloads would weigh more.
      energies: `[rungs]` float32, the mean over replicas of the energy that each rung
        would have sent in this step. In a step that does not look (`Controller.looks`)
        only the energy of the rung taken is right.
      energy: `[]` float32, the mean energy of the error-fed gradient.
      gradient_energy: `[]` float32, the mean energy of the gradient after clip and
        decay, without residual and momentum.
      gradient_energies: `[rungs]` float32, the energy that each rung would have sent of
        that gradient, had nothing been held back (of a selection, few bits and parts in
        turn that of an exchange by chance in which entries wait as long), plus that of
        the leaves that go dense; with a delay, of the gradient that this exchange
        sends. Zeros if the controller does not ask (`samples_gradient`), and if the
        step of that gradient did not look.
      predicted_parts: `[rungs, 4]` float32, seconds of compute, selection, messages and
        bytes in a step at each rung, by the cost model.
      measured_seconds: `[rungs]` float32, the mean of the step times that were handed
        to `update` since the last decision, at the rung that they measured; NaN at
        other rungs.
      local_seconds: `[]` float32, the same of local steps: how long a step takes that
        exchanges nothing. NaN if unknown; None without rounds.
      steps: steps since the last decision: 1, unless some are local.
      wire_bytes: `[rungs]` float32, the bytes that one replica sends in a step at each
        rung; None if unknown.
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
    steps: Any = 1
    wire_bytes: jax.Array | None = None
    at_own_params: jax.Array | bool = False

    @property
    def effective_step(self) -> jax.Array:
        """The step at which the decision takes effect, `[]` int32: three exchanges on.

        The next exchange agrees on it. A host with a program for each rung reads it
        during the exchange after that. With rounds it is the last step of one, if all
        stay as long as the last one was.
        """
        return self.step + 3 * self.steps

    @property
    def predicted_seconds(self) -> jax.Array:
        """Seconds of a step at each rung by the cost model, `[rungs]` float32."""
        return self.predicted_parts.sum(-1)


class Predictions(NamedTuple):
    """What a controller predicted of its choices at the last decision.

    Attributes:
      factors: the factor of each choice, static.
      steps: the steps of a round of each choice, static.
      seconds: `[choices]` float32, the mean seconds of a step.
      progress: `[choices]` float32, what a step is worth, in dense steps; zeros before
        the first decision.
      is_allowed: `[choices]` bool, whether that is enough for the choice to be taken.
      waits_too_long: `[choices]` bool, whether its entries wait for longer than they
        may at the shared params.
      fits: `[choices]` bool, whether its bytes are within the budget.
      home: `[]` int32, the choice believed to be fastest.
      current: `[]` int32, the choice that was decided on; another one than home is
        visited to measure it.
      times: `[]` int32, measured step times so far. Without any, the seconds are those
        of the cost model.

    Example:
      See `gravac.Controller`.
    """

    factors: tuple[float, ...]
    steps: tuple[int, ...]
    seconds: jax.Array
    progress: jax.Array
    is_allowed: jax.Array
    waits_too_long: jax.Array
    fits: jax.Array
    home: jax.Array
    current: jax.Array
    times: jax.Array


class Controller(abc.ABC):
    """Chooses the rung of each step. Subclass it to write your own.

    Law:
      The rung is on the ladder; another number is taken for the nearest rung. The state
      keeps its shapes and dtypes, and nothing in it depends on one replica alone.

    Attributes:
      ladder: the factors to choose from, rising.

    Example:
      >>> import dataclasses, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> @dataclasses.dataclass(frozen=True)
      ... class EveryTenthDense(gravac.Controller):
      ...     ladder: tuple[float, ...] = (1, 100)
      ...     def init(self):
      ...         return jnp.int32(0), ()
      ...     def decide(self, evidence, state):
      ...         is_sparse = evidence.effective_step % 10 > 0
      ...         return is_sparse.astype(jnp.int32), state
      >>> tx = gravac.transform(controller=EveryTenthDense())
    """

    ladder: tuple[float, ...]

    @property
    def is_fixed(self) -> bool:
        """Whether it never leaves its first rung, so that steps need no branches."""
        return False

    @property
    def has_rounds(self) -> bool:
        """Whether some steps are local and exchange nothing."""
        return False

    def round_steps(self, step: jax.Array, state: Any) -> Any:
        """Return how long a round shall be; asked only of a controller with rounds.

        Every exchange asks for the round after the next exchange. So all replicas have
        agreed on it before it begins, and a host can read it without waiting.

        Args:
          step: `[]` int32, steps before the first one of that round.
          state: the controller's state.

        Returns:
          `[]` int32, the steps of the round, of which the last one exchanges.
        """
        del step, state
        return 1

    @property
    def uses_seconds(self) -> bool:
        """Whether it decides by how long steps take, measured or predicted."""
        return False

    @property
    def samples_gradient(self) -> bool:
        """Whether it needs `Evidence.gradient_energies`, which cost a sample."""
        return False

    @property
    def look_every(self) -> int:
        """Steps from one look at the rungs that are not taken to the next."""
        return 1

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

    def predictions(self, state: Any) -> Predictions | None:
        """Return what the last decision predicted, or None if it predicts nothing.

        Args:
          state: from `decide`.
        """
        del state
        return None


class DerivedLadder(Controller):
    """Base of controllers whose ladder follows from their other arguments."""

    @property
    @abc.abstractmethod
    def ladder(self) -> tuple[float, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The factors to choose from, rising."""


class Wrapping(DerivedLadder):
    """Base of controllers around another one, whose rungs and needs are theirs."""

    controller: Controller

    @property
    def ladder(self) -> tuple[float, ...]:
        """The ladder of the other controller."""
        return self.controller.ladder

    @property
    def uses_seconds(self) -> bool:
        """Whether the other controller decides by how long steps take."""
        return self.controller.uses_seconds

    @property
    def samples_gradient(self) -> bool:
        """Whether the other controller needs `Evidence.gradient_energies`."""
        return self.controller.samples_gradient

    @property
    def look_every(self) -> int:
        """Number of steps between two looks: that of the other controller."""
        return self.controller.look_every

    def predictions(self, state: Any) -> Predictions | None:
        """Return what the other controller predicted."""
        return self.controller.predictions(state)


def kinds_of_steps(controller: Controller) -> int:
    """Return of how many kinds a timed step may be.

    One for each rung, and with rounds one for local steps.
    """
    return len(controller.ladder) + controller.has_rounds


def highest(ladder: Sequence[float], allowed: Any) -> jax.Array:
    """Return the highest rung with a factor up to `allowed`, else the lowest."""
    # A schedule that multiplies its way to a factor may miss it by a rounding.
    limit = jnp.asarray(allowed, jnp.float32) * (1 + 1e-5)
    reached = jnp.asarray(ladder, jnp.float32) <= limit
    return jnp.maximum(jnp.sum(reached, dtype=jnp.int32) - 1, 0)


def has_dropped(
    learning_rate: Callable[[Any], Any], step: jax.Array, steps: int
) -> jax.Array:
    """Return whether the rate fell below 0.7 of itself in the last `steps` steps."""
    at = jax.vmap(lambda step: jnp.asarray(learning_rate(step), jnp.float32))
    last = jnp.maximum(step - jnp.arange(steps, dtype=jnp.int32), 0)
    return jnp.any(at(last) < DROP * at(jnp.maximum(last - 1, 0)))
