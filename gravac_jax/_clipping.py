"""Clips on each replica's own gradient, before it is remembered.

A large gradient that is clipped after the exchange has already been accumulated; Deep
Gradient Compression clips what enters. Bounds are stated for the averaged gradient:
gradients of N replicas that see different data are about sqrt(N) times as long as their
mean, and so is what they are clipped at. (The paper adds up gradients that were divided
by N beforehand, for which the same bound reads N^-1/2.)
"""

import abc
import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gravac_jax import _checks, _tree
from gravac_jax._comm import Comm

NONE = "To clip nothing leave `clip` out."


class Clip(abc.ABC):
    """Bounds a gradient.

    Law:
      What is within the bound stays as it is, bit for bit. Whether a gradient is finite
      is asked before it is clipped.
    """

    @abc.abstractmethod
    def clip(
        self,
        parts: tuple[jax.Array, ...],
        norm: Callable[[], tuple[jax.Array, jax.Array]],
        replicas: int,
    ) -> tuple[jax.Array, ...]:
        """Clip one replica's gradient.

        Args:
          parts: float32 vectors.
          norm: gives that of the gradient over the whole model, as `_tree.norm` does.
          replicas: N.

        Returns:
          The clipped parts.
        """


@dataclasses.dataclass(frozen=True)
class NoClip(Clip):
    """The gradient as it is: the off switch of the family.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.NoClip()
      NoClip()
    """

    def clip(
        self,
        parts: tuple[jax.Array, ...],
        norm: Callable[[], tuple[jax.Array, jax.Array]],
        replicas: int,
    ) -> tuple[jax.Array, ...]:
        """The same."""
        del norm, replicas
        return parts


@dataclasses.dataclass(frozen=True)
class ClipByGlobalNorm(Clip):
    """Shortens a gradient whose norm over the whole model is too large.

    Before the exchange, where `optax.clip_by_global_norm` after `gravac.transform`
    shortens the average of what was sent. Both may be used.

    Args:
      max_norm: of the averaged gradient; a replica's own is clipped at sqrt(N) of it.

    Raises:
      ValueError: if `max_norm` is not above 0.

    Cost:
      One more pass over the gradient, and a second one where it is too long. With
      sharded params two numbers are reduced over the fast axis. With `bucket_bytes` all
      buckets wait for the norm, and so for all gradients.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> clip = gravac.ClipByGlobalNorm(1.0)
      >>> tx = gravac.transform(axis_name=None, clip=clip, compress=False)
      >>> grads = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> [round(x, 3) for x in updates.tolist()]
      [0.6, 0.8]

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, section 3.2.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _checks.above_zero(self.max_norm, "max_norm", NONE)

    def clip(
        self,
        parts: tuple[jax.Array, ...],
        norm: Callable[[], tuple[jax.Array, jax.Array]],
        replicas: int,
    ) -> tuple[jax.Array, ...]:
        """Divide by what the norm is too large by."""
        bound = self.max_norm * math.sqrt(replicas)
        unit, length = norm()
        is_long = length > bound / unit
        scale = bound / jnp.where(is_long, length, 1)
        return tuple(jnp.where(is_long, x / unit * scale, x) for x in parts)


@dataclasses.dataclass(frozen=True)
class ClipByValue(Clip):
    """Bounds every entry of a gradient.

    Args:
      max_value: of an entry of the averaged gradient, in magnitude; a replica's own are
        clipped at sqrt(N) of it.

    Raises:
      ValueError: if `max_value` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> clip = gravac.ClipByValue(1.0)
      >>> tx = gravac.transform(axis_name=None, clip=clip, compress=False)
      >>> grads = jnp.array([3.0, -0.5])
      >>> tx.update(grads, tx.init(grads))[0].tolist()
      [1.0, -0.5]
    """

    max_value: float

    def __post_init__(self) -> None:
        _checks.above_zero(self.max_value, "max_value", NONE)

    def clip(
        self,
        parts: tuple[jax.Array, ...],
        norm: Callable[[], tuple[jax.Array, jax.Array]],
        replicas: int,
    ) -> tuple[jax.Array, ...]:
        """Clip every entry."""
        del norm
        bound = self.max_value * math.sqrt(replicas)
        return tuple(jnp.clip(x, -bound, bound) for x in parts)


def global_norm(
    flat: tuple[jax.Array, ...], dense: jax.Array, slices: Comm
) -> tuple[jax.Array, jax.Array]:
    """The norm of a gradient over the whole model, as a unit and a length.

    Args:
      flat: the compressed leaves: if they are sharded, the slices of one device.
      dense: the other leaves, the same on all devices of `slices`.
      slices: those who hold the others; alone if nothing is sharded.

    Returns:
      `[]` float32 each; their product is the norm. The unit is 1, or where slices are
      put together the largest entry, so that no square overflows.
    """
    if slices.axis_name is None:
        return _tree.norm((*flat, dense))
    top = jnp.max(slices.gather(_tree.largest((*flat, dense))))
    unit = jnp.where(top > 0, top, 1)
    energy = lambda parts: _tree.total(_tree.energy(x / unit) for x in parts)
    whole = slices.mean(energy(flat)) * slices.replicas
    return unit, jnp.sqrt(whole + energy([dense]))


CLIPS = (NoClip, ClipByGlobalNorm, ClipByValue)
