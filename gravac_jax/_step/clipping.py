"""The clip of each replica's own gradient, before it is remembered.

A large gradient that is clipped after the exchange has already been accumulated; Deep
Gradient Compression clips before. Bounds are stated for the averaged gradient. The
gradients of N replicas that see different data are about sqrt(N) times as long as their
mean, so each replica clips at sqrt(N) times the bound. (The paper adds up gradients
that were divided by N before, for which the same bound reads N^-1/2.)
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _refuse
from gravac_jax._network import Comm


@dataclasses.dataclass(frozen=True)
class ClipByGlobalNorm:
    """Shortens a gradient whose norm over the whole model is too large.

    This clip acts before the exchange, on each replica's own gradient. After
    `gravac.transform`, `optax.clip_by_global_norm` shortens the average of what was
    sent. Both may be used. To bound gradients otherwise, put a clip of Optax before the
    transform. Its bound is that of each replica's own gradient, and with a fast axis of
    each device's; and `StepInfo.bad_steps` does not see an infinity that it cuts off.

    Law:
      A gradient within the bound stays as it is, bit for bit. Whether a gradient is
      finite is checked before it is clipped.

    Args:
      max_norm: bound of the averaged gradient's norm; a replica's own gradient is
        clipped at sqrt(N) times this bound.

    Raises:
      ValueError: if `max_norm` is not above 0.

    Cost:
      One more pass over the gradient, and a second one if it is too long. With sharded
      params a number is reduced over the fast axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> clip = gravac.ClipByGlobalNorm(1.0)
      >>> tx = gravac.transform(axis_name=None, clip=clip, compress=False)
      >>> grads = jnp.array([3.0, 4.0])
      >>> updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
      >>> [round(x, 3) for x in updates.tolist()]
      [0.6, 0.8]

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _refuse.number(self.max_norm, "max_norm", "for none leave `clip` out", above=0)

    def clip(
        self, parts: tuple[jax.Array, ...], slices: Comm, replicas: int
    ) -> tuple[jax.Array, ...]:
        """Scale a gradient to the bound if its norm over the whole model is larger.

        Args:
          parts: this replica's own gradient, float32 vectors, or a device's slices.
          slices: the devices that hold the other slices; alone if nothing is sharded.
          replicas: N.
        """
        energy = slices.mean(_arrays.total(map(_arrays.energy, parts)))
        norm = jnp.sqrt(energy * slices.replicas)
        bound = float(self.max_norm) * math.sqrt(replicas)
        is_long = norm > bound
        scale = bound / jnp.where(is_long, norm, 1)
        return tuple(jnp.where(is_long, x * scale, x) for x in parts)
