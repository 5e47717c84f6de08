"""Forget what was not sent: no error feedback."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax._error_feedback.base import Memory


@dataclasses.dataclass(frozen=True)
class NoMemory(Memory):
    """Keeps nothing, so that what is not sent is lost: for ablations and dense runs.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.NoMemory().init(1000)
      ()
    """

    def init(self, n: int) -> Any:
        """Return no state."""
        del n
        return ()

    def compensate(self, gradient: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Return the gradient."""
        return gradient, state

    def held(self, state: Any, n: int) -> jax.Array:
        """Return zeros."""
        del state
        return jnp.zeros(n, jnp.float32)

    def retain(self, residual: jax.Array, compensated: jax.Array, state: Any) -> Any:
        """Return no state."""
        del residual, compensated
        return state
