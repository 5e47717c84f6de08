"""Momentum correction: momentum before the selection, so that none of it is lost."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._memory.base import ErrorFeedback

MASKINGS = ("aged", "literal", "none")


class MomentumState(NamedTuple):
    """What one replica remembers.

    Attributes:
      velocity: `[n]` float32, the momentum of its own gradients, the paper's u.
      residual: `[n]` float32, what it still has to deliver, the paper's v.
    """

    velocity: jax.Array
    residual: jax.Array


class DenseMomentumState(NamedTuple):
    """That of the leaves that go dense.

    Attributes:
      dense_velocity: `[m]` float32.
    """

    dense_velocity: jax.Array


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


@dataclasses.dataclass(frozen=True)
class Momentum(ErrorFeedback):
    """Deep Gradient Compression: each replica accumulates its own momentum.

    With u the velocity, v the residual and g the gradient, u = m u + g and v + u is
    selected from; Nesterov's u = m (u + g) and v + u + g. Momentum after the exchange
    would multiply a gradient that waited by the momentum of its arrival only.

    The optimizer after it must have no momentum of its own: `optax.chain(
    gravac.transform(momentum=0.9), optax.sgd(0.1))`. `gravac.init`, `gravac.place` and
    `gravac.guard` raise where they see that of `optax.sgd` or `optax.trace`; they do
    not see Adam's mean, nor a momentum by another name.

    Law:
      At factor 1 the updates are those of the mean gradient with momentum:
      `optax.trace(m, nesterov)` after `jax.lax.pmean`.

    Cost:
      8 bytes of state per compressed parameter and replica, 4 per other parameter.

    Args:
      decay: m.
      nesterov: whether to look ahead.
      masking: what becomes of the momentum of entries that were sent, on steps that
        hold something back. "none" keeps it, and with it the size of steps at every
        factor. "literal" zeroes it, as the paper does. "aged" keeps as much of it as
        the entry was new: all where it did not wait.

    Raises:
      TypeError: if `nesterov` is no bool.
      ValueError: if `decay` is not in [0, 1), or `masking` none of these. By
        `gravac.transform`: with masking, if the exchange sends no entries.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> memory = gravac.Momentum(0.5)
      >>> compensated, state = memory.compensate(jnp.ones(2), memory.init(2))
      >>> state = memory.retain(jnp.array([1.0, 0.0]), compensated, state)
      >>> memory.compensate(jnp.ones(2), state)[0].tolist()
      [2.5, 1.5]

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, sections 3.2 and 3.3, and
      appendix B for Nesterov's.
    """

    decay: float = 0.9
    nesterov: bool = False
    masking: str = "none"

    def __post_init__(self) -> None:
        _checks.decay(self.decay, "decay")
        _checks.flag(self.nesterov, "nesterov")
        _checks.one_of(self.masking, "masking", MASKINGS)

    @property
    def masks(self) -> bool:
        """Unless it is "none"."""
        return self.masking != "none"

    def init(self, n: int) -> MomentumState:
        """At rest, with nothing held back."""
        return MomentumState(jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.float32))

    def _accelerate(
        self, gradient: jax.Array, velocity: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What a gradient adds, and the new velocity."""
        if self.nesterov:
            velocity = self.decay * (velocity + gradient)
            return velocity + gradient, velocity
        velocity = self.decay * velocity + gradient
        return velocity, velocity

    def compensate(
        self, gradient: jax.Array, state: MomentumState
    ) -> tuple[jax.Array, MomentumState]:
        """The residual and what the gradient adds with its momentum."""
        added, velocity = self._accelerate(gradient, state.velocity)
        return state.residual + added, state._replace(velocity=velocity)

    def retain(
        self, residual: jax.Array, compensated: jax.Array, state: MomentumState
    ) -> MomentumState:
        """The new residual, and the velocity as masking leaves it."""
        velocity = masked(
            state.velocity, residual, compensated, state.residual, self.masking
        )
        return state._replace(velocity=velocity, residual=residual)

    def init_dense(self, n: int) -> DenseMomentumState:
        """At rest."""
        return DenseMomentumState(jnp.zeros(n, jnp.float32))

    def follow(
        self, mean: jax.Array, state: DenseMomentumState
    ) -> tuple[jax.Array, DenseMomentumState]:
        """The same momentum, after the mean."""
        added, velocity = self._accelerate(mean, state.dense_velocity)
        return added, DenseMomentumState(velocity)
