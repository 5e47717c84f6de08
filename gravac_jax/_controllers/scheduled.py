"""The encoding follows a schedule, whatever the gradients are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _refuse
from gravac_jax._controllers.base import Controller, Evidence, check_ladder
from gravac_jax._encodings.base import Encoding


@dataclasses.dataclass(frozen=True, repr=False)
class Scheduled(Controller):
    """Goes down a ladder at given steps, as in Deep Gradient Compression's warm-up.

    A stage is dense if an all-gather would move more bytes than a dense mean, as the
    first stages of a warm-up do with many replicas. A step that `gravac.guard` skipped
    decides nothing: the third step after it takes the rung of the second.

    The paper keeps the learning rate small during the warm-up. Use a schedule of Optax
    over as many steps: `optax.linear_schedule(0.01, 0.1, steps)`.

    Args:
      ladder: the encodings, one after the other.
      starts: the step, counted from 0, at which each but the first begins; none before
        the one before it. What would begin at step 1 or 2 begins at step 3, because a
        decision takes effect three exchanges later. With rounds of changing length it
        may begin an exchange or two early or late.

    Raises:
      TypeError: if `ladder` is not a tuple of encodings.
      ValueError: if the starts fall, or are not one fewer than the encodings.

    Example:
      >>> import gravac_jax as gravac
      >>> stages = (gravac.TopK(4), gravac.TopK(16), gravac.TopK(100))
      >>> tx = gravac.transform(send=gravac.Scheduled(stages, starts=(500, 1000)))

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, section 3.3.
    """

    ladder: tuple[Encoding, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        check_ladder(self.ladder, "Scheduled")
        starts, others = self.starts, len(self.ladder) - 1
        is_step = lambda x: _refuse.is_number(x, is_whole=True) and 0 <= x < 2**31
        is_fine = isinstance(starts, tuple) and all(map(is_step, starts))
        if not is_fine or len(starts) != others or list(starts) != sorted(starts):
            raise ValueError(
                f"`starts` must be a tuple of rising steps, counted from 0, at which"
                f" each of {others + 1} encodings but the first begins, got {starts!r}."
            )

    def _rung(self, step: jax.Array) -> jax.Array:
        return jnp.sum(step >= jnp.asarray(self.starts, jnp.int32), dtype=jnp.int32)

    def init(self) -> tuple[jax.Array, Any]:
        """Return the rung of step 0, and no state."""
        return self._rung(jnp.zeros((), jnp.int32)), ()

    def decide(self, evidence: Evidence, state: Any) -> tuple[jax.Array, Any]:
        """Return the rung of the step that is decided."""
        return self._rung(evidence.effective_step), state
