"""The factor follows a schedule, whatever the gradients are."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._controllers.base import Controller, Evidence, highest

STAGES = (4, 16, 64, 250, 1000)  # Deep Gradient Compression's warm-up


@dataclasses.dataclass(frozen=True)
class Scheduled(Controller):
    """Takes the highest rung that a schedule allows.

    A step that `gravac.guard` skipped decides nothing: the third step after it takes
    the rung of the second.

    Args:
      schedule: a function from the step, `[]` int32 counted from 0, to a factor, such
        as any schedule of Optax. A factor below the first rung means the first rung.
      ladder: the factors to choose from, rising. Default: those of `gravac.warm_up`.

    Raises:
      ValueError: if the ladder does not rise.

    Example:
      >>> import optax
      >>> import gravac_jax as gravac
      >>> rising = optax.linear_schedule(1, 100, transition_steps=1000)
      >>> controller = gravac.Scheduled(rising, ladder=(1, 10, 100))
      >>> int(controller.init()[0])
      0
    """

    schedule: Callable[[Any], Any]
    ladder: tuple[float, ...] = STAGES

    def __post_init__(self) -> None:
        _checks.schedule(self.schedule)
        _checks.ladder(self.ladder)

    def _rung(self, step: jax.Array) -> jax.Array:
        return highest(self.ladder, self.schedule(step))

    @property
    def look_every(self) -> int:
        """100: only readers of `StepInfo.gains` need it."""
        return 100

    def init(self) -> tuple[jax.Array, Any]:
        """Return the rung of step 0, and no state."""
        return self._rung(jnp.zeros((), jnp.int32)), ()

    def decide(self, evidence: Evidence, state: Any) -> tuple[jax.Array, Any]:
        """Return the rung of the step that is decided."""
        return self._rung(evidence.effective_step), state


def warm_up(steps: int, factors: Sequence[float] = STAGES) -> Scheduled:
    """Return a controller whose factor rises in stages of equal length.

    The default stages are those of Deep Gradient Compression: densities of 25%, 6.25%,
    1.5625% and 0.4%, then 0.1%. A stage is dense if an all-gather would move more bytes
    than a dense mean, as the first stages do with many replicas.

    The paper keeps the learning rate small during the warm-up. Use a schedule of Optax
    over as many steps: `optax.linear_schedule(0.01, 0.1, steps)`.

    Args:
      steps: length of all stages before the last one together; 0 for no warm-up.
      factors: the factors of the stages, rising.

    Returns:
      The controller.

    Raises:
      ValueError: if `steps` is negative, or the factors do not rise.

    Example:
      >>> import gravac_jax as gravac
      >>> controller = gravac.warm_up(400)
      >>> [int(controller.schedule(step)) for step in (0, 99, 100, 399, 400)]
      [4, 4, 16, 250, 1000]

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, section 3.3.
    """
    if steps != 0:
        _checks.positive_integer(
            steps, "steps", "those before the last stage, 0 for none"
        )
    ladder = _checks.listed(factors, "factors")
    _checks.ladder(ladder)
    stages = len(ladder) - 1
    ends = [-(-steps * (i + 1) // stages) for i in range(stages)]

    def schedule(step: Any) -> jax.Array:
        stage = jnp.sum(step >= jnp.asarray(ends, jnp.int32), dtype=jnp.int32)
        return jnp.asarray(ladder, jnp.float32)[stage]

    return Scheduled(schedule, ladder)
