"""Two encodings: the one that sends more while the gradient's norm changes fast."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _refuse
from gravac_jax._controllers import base
from gravac_jax._controllers.base import Controller, Evidence, has_dropped
from gravac_jax._encodings.base import Encoding
from gravac_jax._encodings.low_rank import LowRank


class AccordionState(NamedTuple):
    """The state of Accordion.

    Attributes:
      seen: `[]` int32, steps of this interval so far.
      total: `[]` float32, the sum of the norms of their gradients.
      last_total: `[]` float32, the sum over the previous interval; 0 if there was none.
      regime: `[]` int32, the rung of this interval, apart from learning rate drops.
    """

    seen: jax.Array
    total: jax.Array
    last_total: jax.Array
    regime: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class Accordion(Controller):
    """Sends more in critical regimes, in which the norm of the gradient changes fast.

    After each interval it compares the norm with that of the interval before::

        |norm before - norm now| / norm before >= threshold:  the first encoding
        otherwise:                                            the second one

    The first two intervals and two steps have the first encoding, as does one interval
    of steps after the learning rate drops. It needs neither times nor gains.

    The norm is that of single gradients (the root of the mean square over replicas),
    added up over the steps, of all leaves together. The paper takes the norm of a sum
    of gradients, for each layer. A clip before the exchange makes all norms alike, so
    that no regime is critical: clip after it.

    Args:
      ladder: the encoding of critical regimes, and that of all others.
      interval: steps of an interval; ten epochs in the paper.
      threshold: the relative change of the norm that makes a regime critical.
      learning_rate: a schedule of Optax. A fall to less than 0.7 of itself from one
        step to the next is critical. None if it does not drop.

    Raises:
      TypeError: if `ladder` is not a tuple of encodings, or `learning_rate` not a
        function.
      ValueError: if there are not two encodings, `interval` is not a positive number,
        or `threshold` is not above 0.

    Example:
      >>> import gravac_jax as gravac
      >>> controller = gravac.Accordion((gravac.LowRank(4), gravac.LowRank(1)))
      >>> tx = gravac.transform(send=controller)

    References:
      Agarwal et al., Accordion, MLSys 2021, section 4. GraVAC's code calls another rule
      by this name, which compares one step with the next.
    """

    ladder: tuple[Encoding, ...] = (LowRank(4), LowRank(1))
    interval: int = 1000
    threshold: float = 0.5
    learning_rate: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        base.check_ladder(self.ladder, "Accordion", least=2, most=2)
        _refuse.count(self.interval, "interval", "steps between two decisions")
        _refuse.number(self.threshold, "threshold", above=0)
        if self.learning_rate is not None:
            schedule = "optax.constant_schedule(0.1)"
            _refuse.function(self.learning_rate, "learning_rate", schedule)

    def init(self) -> tuple[jax.Array, AccordionState]:
        """Return the first rung, and the state."""
        return jnp.zeros((), jnp.int32), AccordionState(
            seen=jnp.zeros((), jnp.int32),
            total=jnp.zeros((), jnp.float32),
            last_total=jnp.zeros((), jnp.float32),
            regime=jnp.zeros((), jnp.int32),
        )

    def decide(
        self, evidence: Evidence, state: AccordionState
    ) -> tuple[jax.Array, AccordionState]:
        """Compare norms at the end of an interval."""
        norm = jnp.sqrt(evidence.gradient_energy)
        total = state.total + jnp.where(jnp.isfinite(norm), norm, 0)
        seen = state.seen + 1
        is_over = seen == self.interval
        change = jnp.abs(state.last_total - total)
        is_calm = change < self.threshold * state.last_total
        rung = jnp.where(is_over, is_calm.astype(jnp.int32), state.regime)
        after = AccordionState(
            seen=jnp.where(is_over, 0, seen),
            total=jnp.where(is_over, 0.0, total),
            last_total=jnp.where(is_over, total, state.last_total),
            regime=rung,
        )
        if self.learning_rate is None:
            return rung, after
        dropped = has_dropped(
            self.learning_rate, evidence.effective_step, self.interval
        )
        return jnp.where(dropped, 0, rung), after
