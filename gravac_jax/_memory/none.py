"""Forget what was not sent: the off switch of the family."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax._memory.base import Memory


@dataclasses.dataclass(frozen=True)
class NoMemory(Memory):
    """Keeps nothing. What is not sent is lost: for ablations, and for dense runs.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.NoMemory().init(1000)
      ()
    """

    def init(self, n: int) -> Any:
        """No state."""
        del n
        return ()

    def compensate(self, gradient: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The gradient as it is."""
        return gradient, state

    def held(self, state: Any, n: int) -> jax.Array:
        """Zeros."""
        del state
        return jnp.zeros(n, jnp.float32)

    def retain(self, residual: jax.Array, compensated: jax.Array, state: Any) -> Any:
        """Nothing."""
        del residual, compensated
        return state
