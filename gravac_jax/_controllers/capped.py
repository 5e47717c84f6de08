"""Another controller, up to a cap on the factor that may change with the step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._controllers.base import (
    Controller,
    Evidence,
    Wrapping,
    has_dropped,
    highest,
)


@dataclasses.dataclass(frozen=True)
class Capped(Wrapping):
    """Takes what another controller decides, up to a cap on the factor.

    The other controller sees all evidence and does not know about the cap, so it cannot
    learn from measured times above the cap, and `metrics.explain` shows what it chose
    before the cap. A cap below the lowest rung means that rung. A warm-up is a rising
    cap, such as `gravac.warm_up(1000).schedule` or any schedule of Optax. For drops of
    the learning rate use `gravac.low_after_drops`.

    Args:
      controller: the other controller.
      cap: a factor, or a function from the step (`[]` int32, counted from 0) to one.

    Raises:
      TypeError: if `controller` is not a controller, or `cap` neither a number nor a
        function.
      ValueError: if `cap` is below 1.

    Example:
      >>> import optax
      >>> import gravac_jax as gravac
      >>> rising = optax.linear_schedule(1, 1000, transition_steps=2000)
      >>> controller = gravac.Capped(gravac.GraVAC(), cap=rising)
      >>> int(controller.init()[0])
      0
    """

    controller: Controller
    cap: float | Callable[[Any], Any]

    def __post_init__(self) -> None:
        _checks.component(self.controller, Controller, "controller", "gravac.GraVAC()")
        _checks.no_rounds(self.controller, "gravac.Capped")
        if not callable(self.cap):
            _checks.factor(self.cap, "cap")

    def _capped(self, rung: jax.Array, step: jax.Array) -> jax.Array:
        cap = self.cap(step) if callable(self.cap) else self.cap
        return jnp.minimum(rung, highest(self.ladder, cap))

    def init(self) -> tuple[jax.Array, Any]:
        """Return the first rung of the other controller, capped, and its state."""
        rung, state = self.controller.init()
        return self._capped(rung, jnp.zeros((), jnp.int32)), state

    def decide(self, evidence: Evidence, state: Any) -> tuple[jax.Array, Any]:
        """Return the decision of the other controller, capped."""
        rung, state = self.controller.decide(evidence, state)
        return self._capped(rung, evidence.effective_step), state


def low_after_drops(
    learning_rate: Callable[[Any], Any], factor: float, steps: int
) -> Callable[[Any], jax.Array]:
    """Return a cap for `gravac.Capped` that is low after the learning rate drops.

    Args:
      learning_rate: a schedule of Optax. A fall to less than 0.7 of itself from one
        step to the next is a drop.
      factor: the cap after a drop; otherwise there is no cap.
      steps: how many steps the cap lasts.

    Returns:
      A function from the step to a factor.

    Raises:
      TypeError: if `learning_rate` is not a function.
      ValueError: if `factor` is below 1, or `steps` not a positive number.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> rate = lambda step: jnp.where(step < 1000, 0.1, 0.01)
      >>> cap = gravac.low_after_drops(rate, factor=10, steps=200)
      >>> [float(cap(step)) for step in (900, 1000, 1100, 1300)]
      [inf, 10.0, 10.0, inf]

    References:
      Agarwal et al., Accordion, MLSys 2021: a learning rate that drops begins a
      critical regime.
    """
    _checks.schedule(learning_rate, "learning_rate")
    _checks.factor(factor)
    _checks.positive_integer(steps, "steps", "those that a drop is remembered")

    def cap(step: Any) -> jax.Array:
        dropped = has_dropped(learning_rate, step, steps)
        return jnp.where(dropped, jnp.float32(factor), jnp.inf)

    return cap
