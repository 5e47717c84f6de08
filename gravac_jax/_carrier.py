"""Figures that travel with the messages of an exchange, in place of their own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._collectives import Comm


@dataclasses.dataclass(frozen=True, eq=False)
class Carrier(Comm):
    """The other replicas, for an exchange that takes a few figures along.

    An exchange in two stages swaps parts of a bucket, and then gathers their means. The
    first rows of words that it swaps take parts of the figures with them, each replica
    averages its part, and the next row that it gathers takes the mean along. An
    exchange that `carries` figures does both, once, outside of any branch. It is handed
    a Carrier for one step only.

    Args:
      axis_name: as for `Comm`.
      figures: a tree of float32 arrays, to be averaged over replicas.

    Law:
      `mean_of_figures()` is `Comm(axis_name).mean(figures)`, but for the order in which
      a sum of N numbers is added up.

    Cost:
      The bytes of a ring all-reduce of the figures, filled up to a multiple of N, and
      no message: `_collectives.carried_traffic`.
    """

    figures: Any
    _parts: dict[str, jax.Array] = dataclasses.field(default_factory=dict, repr=False)

    def swap(self, x: jax.Array) -> jax.Array:
        """Swap rows of words, `[replicas, m]` uint32; the first take figures along."""
        if "own" in self._parts:
            return super().swap(x)
        flat = self.cast(_arrays.ravel(jax.tree.leaves(self.figures)))
        parts = jnp.pad(flat, (0, -flat.size % self.replicas))
        parts = _words(parts.reshape(self.replicas, -1))
        swapped = super().swap(jnp.concatenate([x, parts], axis=1))
        rows, parts = jnp.split(swapped, [x.shape[1]], axis=1)
        self._parts["own"] = jnp.mean(_floats(parts), axis=0)
        return rows

    def gather(self, x: jax.Array) -> jax.Array:
        """Gather words, `[m]` uint32; the first after a swap take means along."""
        if "own" not in self._parts or "all" in self._parts:
            return super().gather(x)
        gathered = super().gather(jnp.concatenate([x, _words(self._parts["own"])]))
        rows, parts = jnp.split(gathered, [x.size], axis=1)
        self._parts["all"] = _floats(parts).reshape(-1)
        return rows

    def mean_of_figures(self) -> Any:
        """Return the mean of the figures over replicas; call it after the exchange."""
        leaves, structure = jax.tree.flatten(self.figures)
        mean = _arrays.unravel(self._parts["all"], leaves)
        return jax.tree.unflatten(structure, mean)


def _words(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _floats(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)
