"""The interface of memories, and its laws.

A memory sees one bucket of one replica. It does not know how the selection was made.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp

MASKINGS = ("aged", "literal", "none")


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


def masked(
    velocity: jax.Array,
    residual: jax.Array,
    compensated: jax.Array,
    before: jax.Array,
    masking: str,
) -> jax.Array:
    """Momentum factor masking: less momentum where old gradients were sent.

    The paper's rule zeroes the momentum of every entry that is sent. A step that sends
    everything would leave none, and is not what the rule was made for: there it is not
    applied. What it is meant against is stale momentum, of entries that had to wait;
    "aged" keeps of it as much as the entry was new, at any factor.

    Args:
      velocity: `[n]` float32.
      residual: `[n]` float32, what was not sent of `compensated`.
      compensated: `[n]` float32.
      before: `[n]` float32, the residual of the step before.
      masking: one of `MASKINGS`.

    Returns:
      `[n]` float32, the new velocity. With "aged", |velocity| / (|velocity| + |before|)
      of it where the entry was sent: all of it where nothing had waited.

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, section 3.3.
    """
    if masking == "none":
        return velocity
    if masking == "literal":
        kept = jnp.where(jnp.any(residual != 0), 0, velocity)
    else:
        size = jnp.abs(velocity)
        all_of_it = size + jnp.abs(before)
        aged = velocity * (size / jnp.where(all_of_it > 0, all_of_it, 1))
        kept = jnp.where(before == 0, velocity, aged)  # to the last bit
    return jnp.where(residual == compensated, velocity, kept)


class Accelerated(Memory):
    """What memories share whose state has a `velocity` and a `residual`.

    Attributes:
      masking: one of `MASKINGS`.
    """

    masking: str

    @property
    def masks(self) -> bool:
        """Unless it is "none"."""
        return self.masking != "none"

    def held(self, state: Any, n: int) -> jax.Array:
        """The residual."""
        del n
        return state.residual

    def retain(self, residual: jax.Array, compensated: jax.Array, state: Any) -> Any:
        """The new residual, and the velocity as masking leaves it."""
        velocity = masked(
            state.velocity, residual, compensated, state.residual, self.masking
        )
        return state._replace(velocity=velocity, residual=residual)
