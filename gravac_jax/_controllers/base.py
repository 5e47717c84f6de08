"""The interface of controllers, and its laws.

A controller sees scalars only, and only such as were reduced over the replicas: all
of them decide alike, because a predicate that differs between devices hangs the job.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOOK_FIRST = 32  # steps, arbitrary
DROP = 0.7  # of a learning rate in one step, arbitrary: smooth schedules fall less


class Evidence(NamedTuple):
    """What a controller may know of a step; the same on every replica.

    Attributes:
      step: `[]` int32, steps before this one.
      replicas: N, static.
      first_sparse: `[]` int32, the lowest rung that does not send everything. Those
        between it and 0 are dense steps, whatever their factors: with so many replicas
        their payloads would weigh more.
      energies: `[rungs]` float32, the mean over replicas of the energy that each rung
        would have sent in this step; where it does not look (`Controller.looks`) that
        of the rung that was taken alone is right.
      energy: `[]` float32, the mean energy of the error-fed gradient.
      gradient_energy: `[]` float32, the mean energy of the gradient, after clip and
        decay, without residual and momentum.
      gradient_energies: `[rungs]` float32, what each rung would have sent of it and of
        the leaves that go dense, had nothing been held back, so that a dense first rung
        has all of both; zeros if the controller does not ask (`samples_gradient`), and
        in steps that do not look.
      predicted_parts: `[rungs, 4]` float32, seconds of compute, selection, messages and
        bytes in a step at each rung, by the cost model.
      measured_seconds: `[rungs]` float32, the mean of the step times that were handed
        to `update` this time, each at the rung that it was measured at; NaN elsewhere.
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

    @property
    def predicted_seconds(self) -> jax.Array:
        """`[rungs]` float32, a step at each rung by the cost model."""
        return self.predicted_parts.sum(-1)


class Controller(abc.ABC):
    """Chooses the rung of each step.

    Law:
      The rung is on the ladder, and so is every rung of its state; the state keeps its
      shapes and dtypes; nothing in it depends on one replica alone.

    Attributes:
      ladder: the factors it may choose from, rising.
    """

    ladder: tuple[float, ...]

    @property
    def samples_gradient(self) -> bool:
        """Whether it asks for `Evidence.gradient_energies`, which cost a sample."""
        return False

    @property
    def look_every(self) -> int:
        """Steps from one look at rungs that are not taken to the next."""
        return 1

    def looks(self, step: jax.Array) -> jax.Array | bool:
        """Whether a step (`[]` int32) looks at rungs that it does not take.

        The first steps always do.
        """
        if self.look_every == 1:
            return True
        return (step < LOOK_FIRST) | (step % self.look_every == 0)

    @abc.abstractmethod
    def init(self) -> tuple[jax.Array, Any]:
        """The rung of the first step, `[]` int32, and the state before it.

        A state may have a method `moved(fresh)`: what is true of it on other devices,
        for a run that is restored there; `fresh` is this one.
        """

    @abc.abstractmethod
    def decide(self, evidence: Evidence, state: Any) -> tuple[jax.Array, Any]:
        """Choose the rung of the next step.

        Args:
          evidence: of this step.
          state: from `init` or the last step.

        Returns:
          rung: `[]` int32.
          state: the new state.
        """


class DerivedLadder(Controller):
    """A controller whose ladder follows from its other arguments."""

    @property
    @abc.abstractmethod
    def ladder(self) -> tuple[float, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The factors it may choose from, rising."""


def highest(ladder: Sequence[float], allowed: Any) -> jax.Array:
    """`[]` int32, the highest rung that the factor `allowed` lets in, or the lowest."""
    # A schedule that multiplies its way to a factor may miss it by a rounding.
    limit = jnp.asarray(allowed, jnp.float32) * (1 + 1e-5)
    reached = jnp.asarray(ladder, jnp.float32) <= limit
    return jnp.maximum(jnp.sum(reached.astype(jnp.int32)) - 1, 0)


def has_dropped(
    learning_rate: Callable[[Any], Any], step: jax.Array, steps: int
) -> jax.Array:
    """`[]` bool, whether it fell below 0.7 of itself at one of the last `steps`."""
    at = jax.vmap(lambda step: jnp.asarray(learning_rate(step), jnp.float32))
    last = jnp.maximum(step - jnp.arange(steps, dtype=jnp.int32), 0)
    return jnp.any(at(last) < DROP * at(jnp.maximum(last - 1, 0)))
