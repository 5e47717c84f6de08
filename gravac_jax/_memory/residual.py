"""Error feedback: add what was not sent to the next gradient."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax._memory.base import Memory


class ErrorFeedback(Memory):
    """Base of memories whose state has a `residual`."""

    def held(self, state: Any, n: int) -> jax.Array:
        """Return the residual."""
        return state.residual

    def hold(self, residual: jax.Array, compensated: jax.Array, state: Any) -> Any:
        """Return the state with the new residual."""
        return state._replace(residual=residual)


class ResidualState(NamedTuple):
    """The state of `Residual`.

    Attributes:
      residual: `[n]` float32, what this replica still has to send.
    """

    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Residual(ErrorFeedback):
    """Plain error feedback: compensated = gradient + residual.

    Put momentum after the exchange: `optax.chain(gravac.transform(), optax.sgd(0.1,
    momentum=0.9))`.

    Law:
      The sum of what was sent plus the last residual is the sum of the gradients,
      exactly for integers and otherwise within 2**-23 of the sum of |compensated|.

    Cost:
      4 bytes of state per parameter and replica.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> memory = gravac.Residual()
      >>> compensated, state = memory.compensate(jnp.ones(3), memory.init(3))
      >>> state = memory.hold(jnp.array([0.0, 1.0, 1.0]), compensated, state)
      >>> memory.compensate(jnp.ones(3), state)[0].tolist()
      [1.0, 2.0, 2.0]

    References:
      Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Stich et al.,
      Sparsified SGD with memory, NeurIPS 2018; GraVAC, section on error feedback.
    """

    def init(self, n: int) -> ResidualState:
        """Return an empty residual."""
        return ResidualState(jnp.zeros(n, jnp.float32))

    def compensate(
        self, gradient: jax.Array, state: ResidualState
    ) -> tuple[jax.Array, ResidualState]:
        """Return the gradient plus the residual, GraVAC's g_ef."""
        return gradient + state.residual, state
