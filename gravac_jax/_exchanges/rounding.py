"""What exchanges share that round entries to a few values and know what that drops."""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._collectives import Comm
from gravac_jax._exchanges.base import GatheringExchange
from gravac_jax._selection.rungs import Rungs


class Local(NamedTuple):
    """What is known before the branch of a rung.

    Attributes:
      is_taken: `[rungs]` bool, a mask of the rung of this step.
      energies: `[rungs + 1]` float32, the energy that each rung would send of this
        replica's bucket, 0 without a look; then that of the bucket.
    """

    is_taken: jax.Array
    energies: jax.Array

    def own(self, sent: jax.Array) -> jax.Array:
        """Return the energies with `sent` for the rung that is taken."""
        looked = jnp.where(self.is_taken, sent, self.energies[:-1])
        return jnp.append(looked, self.energies[-1])


class RoundingExchange(GatheringExchange):
    """An exchange that computes exactly what each rung would send of a bucket."""

    @abc.abstractmethod
    def _energies(
        self, bucket: jax.Array, counts: Sequence[int], energy: jax.Array
    ) -> jax.Array:
        """Return the energy of `bucket` that each rung would send, `[rungs]`."""

    def shares(
        self, gradient: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Return the share of a gradient's energy that each rung would send; exact."""
        energy = _arrays.energy(gradient)
        counts = self.entries(gradient.size, ladder, comm.replicas)
        energies = self._energies(gradient, counts, energy)
        return energies / jnp.maximum(energy, _arrays.SMALLEST_NORMAL)

    def prepare(
        self, bucket: jax.Array, state: Any, rungs: Rungs, key: jax.Array, comm: Comm
    ) -> Any:
        """Look at the rungs that are not taken."""
        energy = _arrays.energy(bucket)
        looked = jnp.zeros_like(bucket, shape=(len(rungs.counts),))
        if len(rungs.counts) > 1:
            look = lambda: self._energies(bucket, rungs.counts, energy)
            looked = jax.lax.cond(rungs.looks, look, lambda: looked)
        return Local(rungs.is_taken, jnp.append(looked, energy))
