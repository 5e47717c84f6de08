"""Exchange in every H-th step only, and let replicas go on alone between."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._controllers.base import Controller, Evidence, Predictions, Wrapping


@dataclasses.dataclass(frozen=True)
class Every(Wrapping):
    """Exchanges in every H-th step, at the rung that another controller decides.

    The steps between are *local*: nothing at all is sent, no gradient, no evidence.
    Each replica feeds its gradient to its memory and goes on at its own params, as
    `gravac.train_step` does, while the params that all share get nothing from the
    gradients. (Decay and momentum that come after the transform act on them in every
    step, the same on all replicas.) The exchange of a round averages what has gathered.

    The other controller sees the exchanges alone, and the times of steps that exchange.
    A gradient that is not finite counts for nothing on its replica, and the others hear
    of it at the next exchange.

    Args:
      steps: H, the steps of a round, of which the last one exchanges; or a function
        from the step (`[]` int32, counted from 0) to H, the same on all hosts. Short
        rounds at first lose least.
      controller: the controller of the exchanges, such as `gravac.Fixed(16)`.

    Raises:
      TypeError: if `controller` is not a controller.
      ValueError: if `steps` is neither a positive integer nor a function, or if
        `controller` has rounds itself.

    Law:
      `Every(1, controller)` is `controller`. What all replicas made in a round is what
      was sent plus what is kept.

    Cost:
      A local step has no collective over the compressed axis. A round sends what one
      step would.

    Example:
      >>> import gravac_jax as gravac
      >>> controller = gravac.Every(8, gravac.Fixed(16))  # 128 times fewer bits
      >>> tx = gravac.adamw(1e-3, controller=controller)

    References:
      Stich, Local SGD converges fast and communicates little, ICLR 2019; Lin et al.,
      Don't use large mini-batches, use local SGD, ICLR 2020, whose rounds begin short;
      Basu et al., Qsparse-local-SGD, NeurIPS 2019.
    """

    steps: int | Callable[[Any], Any]
    controller: Controller

    def __post_init__(self) -> None:
        _checks.component(self.controller, Controller, "controller", "gravac.Fixed(16)")
        _checks.steps_of_a_round(self.steps)
        _checks.no_rounds(self.controller, "gravac.Every")

    @property
    def has_rounds(self) -> bool:
        """Whether some steps are local: unless all exchange."""
        return self.steps != 1

    def round_steps(self, step: jax.Array, state: Any) -> Any:
        """Return the length of the round that begins at a step, a whole number."""
        del state
        steps = self.steps(step) if callable(self.steps) else self.steps
        return jnp.int32(jnp.round(steps))

    @property
    def is_fixed(self) -> bool:
        """Whether all exchanges are at one rung."""
        return self.controller.is_fixed

    def init(self) -> tuple[jax.Array, Any]:
        """Return the first rung of the other controller, and its state."""
        return self.controller.init()

    def predictions(self, state: Any) -> Predictions | None:
        """Return what the other controller predicted, of rounds of H steps."""
        found = self.controller.predictions(state)
        if found is None or callable(self.steps):
            return found
        return found._replace(steps=(self.steps,) * len(found.steps))

    def decide(self, evidence: Evidence, state: Any) -> tuple[jax.Array, Any]:
        """Return the decision of the other controller."""
        return self.controller.decide(evidence, state)
