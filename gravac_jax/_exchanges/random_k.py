"""Random places that all replicas know: only values travel."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _collectives
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._exchanges.base import Exchange, Kept, dense_if_cheaper
from gravac_jax._selection import entries, random_k
from gravac_jax._selection.entries import Marks, Payload, scatter, take
from gravac_jax._selection.rungs import Rungs


@dataclasses.dataclass(frozen=True)
class SharedRandomK(Exchange):
    """All-reduces k entries at random places, the same on every replica.

    No index travels, since every replica draws the same places, and the bytes do not
    grow with the number of replicas. Entries that were not drawn wait in the residual;
    over many steps every entry has its turn.

    Law:
      Each place is drawn with probability k / n, which is also the share of the energy
      that is sent on average.

    Cost:
      Ring all-reduce of k values: 2 (N - 1) alpha + 2 (N - 1) / N 4 k beta.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.SharedRandomK().traffic(1000, factor=100, replicas=4)
      Traffic(entries=10, payload_bytes=40, wire_bytes=60.0, messages=6)

    References:
      Stich et al., Sparsified SGD with memory, NeurIPS 2018, rand-k; Vogels et al.,
      PowerSGD, NeurIPS 2019, random-k with a shared seed.
    """

    @property
    def is_blind(self) -> bool:
        """Whether places are drawn without looking: always."""
        return True

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of 4 bytes an entry."""
        k = random_k.RandomK().count(n, factor)
        return dense_if_cheaper(_collectives.mean_traffic(k, replicas), n, replicas)

    def prepare(
        self, bucket: jax.Array, state: Any, rungs: Rungs, key: jax.Array, comm: Comm
    ) -> Marks:
        """Draw the places."""
        k = jnp.maximum(rungs.sparse_count, 1)
        return random_k.drawn(bucket.size, k, key).marks

    def send(
        self, bucket: jax.Array, prepared: Marks, k: int, comm: Comm
    ) -> tuple[jax.Array, jax.Array]:
        """Average the values at the places; also return the energy that was sent."""
        indices = entries.places(prepared, k)
        values = take(bucket, indices).values
        mean = Payload(comm.mean(values), indices)
        return scatter(mean, comm.zeros(bucket)), _arrays.energy(values)

    def found_dense(
        self, bucket: jax.Array, prepared: Marks, mean: jax.Array, comm: Comm
    ) -> jax.Array:
        """Return the energy of the bucket."""
        return _arrays.energy(bucket)

    def conclude(
        self,
        bucket: jax.Array,
        state: Any,
        prepared: Marks,
        found: jax.Array,
        rungs: Rungs,
    ) -> tuple[Kept, Any]:
        """Keep what was not drawn; other rungs would send their share on average."""
        energy = _arrays.energy(bucket)
        on_average = jnp.asarray(rungs.counts, jnp.float32) * (energy / rungs.n)
        energies = jnp.where(rungs.is_taken, found, on_average)
        return Kept(entries.clear(bucket, prepared), energies, energy), state
