"""Always the same factor."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._controllers.base import DerivedLadder, Evidence


@dataclasses.dataclass(frozen=True)
class Fixed(DerivedLadder):
    """Sends `factor` times fewer bits, or entries, in every step.

    Args:
      factor: at least 1; 1 is dense. What it means depends on the exchange: in
        `QuantizedAllReduce` 4, 8 and 16 are 8, 4 and 2 bits of all entries, and 64 is 2
        bits of a quarter of them; in `AllGather` n entries over k that are sent.

    Raises:
      ValueError: if `factor` is below 1, as a density would be.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.Fixed(factor=100).ladder
      (100,)
    """

    factor: float

    def __post_init__(self) -> None:
        _checks.factor(self.factor)

    @property
    def ladder(self) -> tuple[float, ...]:
        """The one factor."""
        return (self.factor,)

    @property
    def is_fixed(self) -> bool:
        """Whether it never leaves its first rung: yes."""
        return True

    def init(self) -> tuple[jax.Array, Any]:
        """Return the only rung, and no state."""
        return jnp.zeros((), jnp.int32), ()

    def decide(self, evidence: Evidence, state: Any) -> tuple[jax.Array, Any]:
        """Return the only rung."""
        del evidence
        return jnp.zeros((), jnp.int32), state
