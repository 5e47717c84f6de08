"""The interface of memories, and its laws.

A memory sees one bucket of one replica. It does not know how the selection was made.
"""

import abc
from typing import Any

import jax


class Memory(abc.ABC):
    """Feeds what was held back into the next step's gradient.

    Law:
      What is sent plus what is kept is what came in: over a run, the sum of what was
      sent plus the last residual is the sum of what the memory made of the gradients.
    """

    @property
    def masks(self) -> bool:
        """Whether it asks which entries were sent, and not only what was not."""
        return False

    @abc.abstractmethod
    def init(self, n: int) -> Any:
        """This replica's state for a bucket of `n` entries."""

    @abc.abstractmethod
    def compensate(self, gradient: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """The vector to select from.

        Args:
          gradient: `[n]` float32, this replica's own gradient.
          state: from `init` or `retain`.

        Returns:
          compensated: `[n]` float32.
          state: for `retain`.
        """

    @abc.abstractmethod
    def held(self, state: Any, n: int) -> jax.Array:
        """What is held back: the compensated vector of a step that is skipped.

        Such a step sends nothing, so all of it comes back as the residual, with the
        same state, and `retain` makes of both the state that it was.

        Args:
          state: from `init` or `retain`.
          n: entries of the bucket.

        Returns:
          `[n]` float32.
        """

    @abc.abstractmethod
    def retain(self, residual: jax.Array, compensated: jax.Array, state: Any) -> Any:
        """The state after an exchange.

        Args:
          residual: `[n]` float32, what was not sent of `compensated`.
          compensated: `[n]` float32, from `compensate`.
          state: from `compensate`.

        Returns:
          The new state.
        """

    def init_dense(self, n: int) -> Any:
        """The state, the same on all replicas, for `n` entries that go dense: none."""
        del n
        return ()

    def follow(self, mean: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """What entries that go dense get, for one optimizer all over the model.

        Args:
          mean: `[n]` float32, of their gradients over replicas.
          state: from `init_dense` or the last step.

        Returns:
          `[n]` float32, here the mean as it is, and the new state.
        """
        return mean, state


class ErrorFeedback(Memory):
    """What memories share whose state has a `residual`."""

    def held(self, state: Any, n: int) -> jax.Array:
        """The residual."""
        del n
        return state.residual

    def retain(self, residual: jax.Array, compensated: jax.Array, state: Any) -> Any:
        """The new residual, and the rest of the state as it is."""
        del compensated
        return state._replace(residual=residual)
