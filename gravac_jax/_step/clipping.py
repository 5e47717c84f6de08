"""Clips of each replica's own gradient, before it is remembered.

A large gradient that is clipped after the exchange has already been accumulated; Deep
Gradient Compression clips before. Bounds are stated for the averaged gradient. The
gradients of N replicas that see different data are about sqrt(N) times as long as their
mean, so each replica clips at sqrt(N) times the bound. (The paper adds up gradients
that were divided by N before, for which the same bound reads N^-1/2.)
"""

import abc
import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _refuse
from gravac_jax._network import Comm


class Clip(abc.ABC):
    """Bounds a gradient. Subclass it to write your own.

    Law:
      A gradient within the bound stays as it is, bit for bit. Whether a gradient is
      finite is checked before it is clipped.

    Example:
      >>> import gravac_jax as gravac
      >>> class Halved(gravac.Clip):
      ...     def clip(self, parts, norm, replicas):
      ...         return tuple(x / 2 for x in parts)
      >>> isinstance(Halved(), gravac.Clip)
      True
    """

    @abc.abstractmethod
    def clip(
        self, parts: tuple[jax.Array, ...], norm: Callable[[], jax.Array], replicas: int
    ) -> tuple[jax.Array, ...]:
        """Clip one replica's gradient.

        Args:
          parts: float32 vectors, which together are the gradient of the whole model.
          norm: returns the norm of the gradient, `[]` float32.
          replicas: N.

        Returns:
          The clipped parts.
        """


@dataclasses.dataclass(frozen=True)
class ClipByGlobalNorm(Clip):
    """Shortens a gradient whose norm over the whole model is too large.

    This clip acts before the exchange, on each replica's own gradient. After
    `gravac.transform`, `optax.clip_by_global_norm` shortens the average of what was
    sent. Both may be used.

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
        self, parts: tuple[jax.Array, ...], norm: Callable[[], jax.Array], replicas: int
    ) -> tuple[jax.Array, ...]:
        """Scale the gradient to the bound if its norm is larger."""
        bound = float(self.max_norm) * math.sqrt(replicas)
        length = norm()
        is_long = length > bound
        scale = bound / jnp.where(is_long, length, 1)
        return tuple(jnp.where(is_long, x * scale, x) for x in parts)


def global_norm(parts: tuple[jax.Array, ...], slices: Comm) -> jax.Array:
    """Return the norm of a gradient over the whole model, `[]` float32.

    Args:
      parts: all leaves, or a device's slices of them.
      slices: the devices that hold the other slices; alone if nothing is sharded.
    """
    energy = _arrays.total(map(_arrays.energy, parts))
    return jnp.sqrt(slices.mean(energy) * slices.replicas)
