"""Momentum correction: momentum before selection, so that waiting entries keep it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _refuse
from gravac_jax._memory.base import Memory


class MomentumState(NamedTuple):
    """The state of `Momentum` on one replica.

    Attributes:
      velocity: `[n]` float32, the momentum of its own gradients; the paper's u.
      residual: `[n]` float32, what it still has to send; the paper's v.
    """

    velocity: jax.Array
    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Momentum(Memory):
    """Deep Gradient Compression: each replica accumulates its own momentum.

    With the velocity u, the residual v and the gradient g, u = m u + g, and entries are
    selected from v + u. Nesterov's form is u = m (u + g), selecting from v + u + g.
    With momentum after the exchange, a gradient that waited would only gain momentum
    from its arrival on.

    The optimizer after it must have no momentum of its own: `optax.chain(
    gravac.transform(memory=gravac.Momentum()), optax.sgd(0.1))`. `gravac.train_step`,
    `gravac.place` and `gravac.guard` raise if they see the momentum of `optax.sgd` or
    `optax.trace`, and see none by another name, such as Adam's first moment.

    Law:
      If everything is sent the updates are those of the mean gradient with momentum:
      `optax.trace(m, nesterov)` after `jax.lax.pmean`.

    Cost:
      8 bytes of state per parameter and replica.

    Args:
      decay: m, the share of the velocity that is kept.
      nesterov: whether momentum looks ahead.
      masking: whether to zero the momentum of entries that were sent, in steps that
        hold something back, as the paper does. Keeping it, the default, keeps the size
        of steps the same, however few entries are sent.

    Raises:
      TypeError: if `nesterov` or `masking` is not a bool.
      ValueError: if `decay` is not in [0, 1). From `gravac.transform`: for masking, if
        an encoding sends a part of every entry.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> memory = gravac.Momentum(0.5)
      >>> compensated, state = memory.compensate(jnp.ones(2), memory.init(2))
      >>> state = memory.hold(jnp.array([1.0, 0.0]), compensated, state)
      >>> memory.compensate(jnp.ones(2), state)[0].tolist()
      [2.5, 1.5]

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, sections 3.2 and 3.3, and
      appendix B for Nesterov's.
    """

    decay: float = 0.9
    nesterov: bool = False
    masking: bool = False

    def __post_init__(self) -> None:
        _refuse.number(self.decay, "decay", low=0, below=1)
        _refuse.instance(self.nesterov, bool, "nesterov", "False")
        _refuse.instance(self.masking, bool, "masking", "False")

    def init(self, n: int) -> MomentumState:
        """Return no velocity and an empty residual."""
        return MomentumState(jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.float32))

    def compensate(
        self, gradient: jax.Array, state: MomentumState
    ) -> tuple[jax.Array, MomentumState]:
        """Return the residual plus the gradient with its momentum."""
        if self.nesterov:
            velocity = float(self.decay) * (state.velocity + gradient)
            added = velocity + gradient
        else:
            velocity = added = float(self.decay) * state.velocity + gradient
        return state.residual + added, state._replace(velocity=velocity)

    def hold(
        self, residual: jax.Array, compensated: jax.Array, state: MomentumState
    ) -> MomentumState:
        """Return the new residual, and the velocity after momentum factor masking.

        It zeroes the momentum of entries that were sent, to get rid of the stale
        momentum of entries that had to wait. A step that sends everything would lose
        all momentum, so the rule is not applied there.
        """
        velocity = state.velocity
        if self.masking:
            kept = jnp.where(jnp.any(residual != 0), 0, velocity)
            velocity = jnp.where(residual == compensated, velocity, kept)
        return MomentumState(velocity, residual)
