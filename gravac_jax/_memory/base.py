"""The interface of memories, the laws that hold for all of them, and the plainest one.

A memory sees one bucket of one replica. It does not know how entries were selected.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

Leaves = tuple[tuple[str, tuple[int, ...]], ...]  # the path and the shape of each


class Memory(abc.ABC):
    """Adds what was held back to the next step's gradient. Subclass it for your own.

    Law:
      Over a run, the sum of what was sent plus the last residual is the sum of what the
      memory made of the gradients.

    Attributes:
      is_at_own_params: whether gradients count as taken at own params unless `update`
        is told otherwise.
      masking: whether it needs to know which entries were sent.
      needs_params: whether `compensate` takes this replica's own params, too: `[n]`
        float32.
      by_leaf: whether it must see whole leaves, in place of a flat vector.
      keeps_norm: whether what it adds is scaled, so that the mean over replicas is as
        long as each replica's own; for steps that an optimizer normalises.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> class PlainResidual(gravac.Memory):
      ...     def init(self, n):
      ...         return jnp.zeros(n)
      ...     def compensate(self, gradient, state):
      ...         return gradient + state, state
      ...     def held(self, state):
      ...         return state
      ...     def hold(self, residual, compensated, state):
      ...         return residual
      >>> memory = PlainResidual()
      >>> state = memory.hold(jnp.ones(2), jnp.ones(2), memory.init(2))
      >>> memory.compensate(jnp.ones(2), state)[0].tolist()
      [2.0, 2.0]
    """

    is_at_own_params: ClassVar[bool] = False
    masking: bool = False
    needs_params: bool = False
    by_leaf: bool = False
    keeps_norm: bool = False

    def of_leaves(self, leaves: Leaves) -> "Memory":
        """Return the memory of a bucket that holds these leaves, in this order."""
        return self

    @abc.abstractmethod
    def init(self, n: int) -> Any:
        """Return this replica's state for a bucket of `n` entries."""

    @abc.abstractmethod
    def compensate(self, gradient: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Return the vector to select from.

        Args:
          gradient: `[n]` float32, this replica's own gradient.
          state: from `init` or `hold`.

        Where `needs_params` is true, this replica's own params come third, `[n]`
        float32.

        Returns:
          compensated: `[n]` float32, the gradient plus what was held back.
          state: the state that `hold` takes.
        """

    def held(self, state: Any) -> jax.Array:
        """Return what is held back, which a replica with a bad gradient sends from.

        By default it is `state.residual`. `hold` must return `state` as it was if all
        of this is held back again.

        Args:
          state: from `init` or `hold`.

        Returns:
          `[n]` float32.
        """
        return state.residual

    def hold(self, residual: jax.Array, compensated: jax.Array, state: Any) -> Any:
        """Return the state after an exchange, or in which all waits for a later one.

        By default it is `state` with this `residual`.

        Args:
          residual: `[n]` float32, the part of `compensated` that was not sent.
          compensated: `[n]` float32, from `compensate`.
          state: from `compensate`.

        Returns:
          The new state.
        """
        return state._replace(residual=residual)


class ResidualState(NamedTuple):
    """The state of `Residual`.

    Attributes:
      residual: `[n]` float32, what this replica still has to send.
    """

    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Residual(Memory):
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
