"""Figures that travel with the messages of an exchange, in place of their own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._collectives import Comm


@dataclasses.dataclass(frozen=True)
class Carrier(Comm):
    """The other replicas, for an exchange that takes a few figures along.

    An exchange in two stages swaps parts of a bucket, and then gathers their means. The
    first words that it swaps and gathers take parts of the figures with them, so that
    each replica averages its part between both: no collective of their own, no latency
    more. Where an exchange does something else, the figures have an all-reduce, which
    XLA merges with one of the exchange.

    It holds what is under way, so it must not outlive one trace.

    Args:
      axis_name: as for `Comm`.
      figures: a tree of float32 arrays, to be averaged over replicas.

    Law:
      `mean_of_figures()` is `Comm(axis_name).mean(figures)`, but for the order in which
      a sum of N numbers is added up.

    Cost:
      The bytes of a ring all-reduce of the figures, and no message.
    """

    figures: Any
    _under_way: list[jax.Array] = dataclasses.field(default_factory=list, repr=False)

    def swap(self, x: jax.Array) -> jax.Array:
        """Swap rows; the first rows of words take parts of the figures along."""
        if x.dtype != jnp.uint32 or self._under_way:
            return super().swap(x)
        flat = self.cast(_arrays.ravel(jax.tree.leaves(self.figures)))
        parts = jnp.pad(flat, (0, -flat.size % self.replicas))
        parts = _words(parts.reshape(self.replicas, -1))
        swapped = super().swap(jnp.concatenate([x, parts], axis=1))
        rows, parts = jnp.split(swapped, [x.shape[1]], axis=1)
        self._under_way.append(jnp.mean(_floats(parts), axis=0))
        return rows

    def gather(self, x: jax.Array) -> jax.Array:
        """Gather rows; the first words after a swap take the means along."""
        if x.dtype != jnp.uint32 or len(self._under_way) != 1:
            return super().gather(x)
        (mine,) = self._under_way
        gathered = super().gather(jnp.concatenate([x, _words(mine)]))
        rows, parts = jnp.split(gathered, [x.size], axis=1)
        self._under_way.append(_floats(parts).reshape(-1))
        return rows

    def mean_of_figures(self) -> Any:
        """Return the mean of the figures over replicas; call it after the exchange."""
        leaves, structure = jax.tree.flatten(self.figures)
        if len(self._under_way) < 2:
            return self.mean(self.figures)
        size = sum(x.size for x in leaves)
        mean = _arrays.unravel(self._under_way[1][:size], leaves)
        return jax.tree.unflatten(structure, mean)


def _words(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _floats(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)
