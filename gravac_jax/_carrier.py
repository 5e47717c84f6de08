"""Figures that travel with the messages of an exchange, in place of their own."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _collectives
from gravac_jax._collectives import Comm


@dataclasses.dataclass(frozen=True, eq=False)
class Carrier(Comm):
    """The other replicas, for an exchange that takes a few figures along.

    An exchange in two stages swaps parts of a bucket, and then gathers their means. The
    first rows of words that it swaps take parts of the figures with them, each replica
    averages its part, and the next row that it gathers takes the mean along. An
    exchange that only gathers takes the figures along with the first row that it
    gathers, and one that averages with its first mean, if that has few entries. If it
    does none of these, the figures have a collective of their own. A Carrier serves one
    exchange in one branch of one step; `Carrier.on` makes it.

    Args:
      axis_name: as for `Comm`.
      figures: a tree of float32 arrays, to be averaged over replicas.
      beneath: the `Comm` that sends the messages, such as another Carrier.

    Law:
      `mean_of_figures()` is `Comm(axis_name).mean(figures)`, but for the order in which
      a sum of N numbers is added up.

    Cost:
      No message, if they travel along. In two stages the bytes of a ring all-reduce of
      the figures, filled up to a multiple of N (`_collectives.carried_traffic`); with a
      gather N - 1 times those of the figures; with a mean those of a ring all-reduce,
      and a copy of what is averaged.
    """

    figures: Any
    beneath: Comm
    _parts: dict[str, jax.Array] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def on(cls, comm: Comm, figures: Any) -> Self:
        """Return a carrier whose messages are those of `comm`."""
        return cls(comm.axis_name, figures, comm)

    @property
    def _has_figures(self) -> bool:
        return bool(jax.tree.leaves(self.figures))

    @property
    def _is_done(self) -> bool:
        """Whether there is nothing to take along, or it has gone."""
        return bool(self._parts) or not self._has_figures

    def _flat(self) -> jax.Array:
        return self.cast(_arrays.ravel(jax.tree.leaves(self.figures)))

    def mean(self, tree: Any) -> Any:
        """Return the mean of `tree`; the first one of few entries takes figures along.

        To join many entries with the figures would copy them.
        """
        sizes = [x.size for x in jax.tree.leaves(tree)]
        if self._is_done or not sizes or not _collectives.takes_along(sum(sizes)):
            return self.beneath.mean(tree)
        mean, figures = self.beneath.mean((tree, self.figures))
        self._parts["all"] = _arrays.ravel(jax.tree.leaves(figures))
        return mean

    def swap(self, x: jax.Array) -> jax.Array:
        """Swap rows of words, `[replicas, m]`; the first take figures along."""
        if self._is_done:
            return self.beneath.swap(x)
        flat = self._flat()
        parts = jnp.pad(flat, (0, -flat.size % self.replicas))
        parts = _arrays.to_words(parts.reshape(self.replicas, -1), x.dtype)
        swapped = self.beneath.swap(jnp.concatenate([x, parts], axis=1))
        rows, parts = jnp.split(swapped, [x.shape[1]], axis=1)
        self._parts["own"] = jnp.mean(_arrays.from_words(parts), axis=0)
        return rows

    def gather(self, x: jax.Array) -> jax.Array:
        """Gather words, `[m]`; the first take figures along, or means after a swap."""
        if "all" in self._parts or not self._has_figures:
            return self.beneath.gather(x)
        own = self._parts.get("own")
        given = _arrays.to_words(self._flat() if own is None else own, x.dtype)
        gathered = self.beneath.gather(jnp.concatenate([x, given]))
        rows, parts = jnp.split(gathered, [x.size], axis=1)
        found = _arrays.from_words(parts)
        mean = jnp.mean(found, axis=0) if own is None else found.reshape(-1)
        self._parts["all"] = mean
        return rows

    def mean_of_figures(self) -> Any:
        """Return the mean of the figures over replicas; call it after the exchange."""
        if "all" not in self._parts:
            return self.beneath.mean(self.figures)
        leaves, structure = jax.tree.flatten(self.figures)
        mean = _arrays.unravel(self._parts["all"], leaves)
        return jax.tree.unflatten(structure, mean)
