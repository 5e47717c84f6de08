"""Random places that all replicas know: values travel alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _ladder, _payload, _tree
from gravac_jax._comm import Comm
from gravac_jax._compressors.randomk import drawn
from gravac_jax._exchanges.base import Exchange, Exchanged, Traffic, in_branch
from gravac_jax._exchanges.dense import cheaper, dense_exchange, dense_traffic
from gravac_jax._marking import compaction


@dataclasses.dataclass(frozen=True)
class SharedRandomK(Exchange):
    """An all-reduce of k entries at random places, the same on every replica.

    No index travels, since every replica draws the same places, and what travels does
    not grow with the replicas. What was not drawn waits in the residual; over many
    steps every entry has its turn.

    Law:
      Each place is drawn with probability k / n, and that is the share of the energy
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
        """It is."""
        return True

    def exchange(
        self,
        bucket: jax.Array,
        state: Any,
        rung: jax.Array,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
        comm: Comm,
        looks: jax.Array | bool = True,
    ) -> tuple[Exchanged, Any]:
        """Draw once; then one branch per rung."""
        del looks
        n = bucket.size
        counts = self.entries(n, ladder, comm.replicas)
        if min(counts) == n:
            return dense_exchange(bucket, rung, len(ladder), comm), state
        k = jnp.asarray([*(k if k < n else 0 for k in counts), 0], jnp.int32)[rung]
        marks = drawn(n, jnp.maximum(k, 1), key).marks

        def at_places(k: int) -> tuple[jax.Array, jax.Array]:
            indices = compaction.select(marks, k)
            values = _payload.take(bucket, indices).values
            mean = _payload.Payload(comm.mean(values), indices)
            return _payload.spread(mean, comm.zeros(bucket)), _tree.energy(values)

        energy = _tree.energy(bucket)
        mean, sent = in_branch(
            rung,
            counts,
            n,
            sparse=at_places,
            dense=lambda: (comm.mean(bucket), energy),
            nothing=lambda: (comm.zeros(bucket), comm.cast(comm.zeros(energy))),
        )
        rungs = jnp.arange(len(ladder))
        on_average = jnp.asarray(counts, jnp.float32) * (energy / n)
        rest = jnp.where(k > 0, compaction.clear(bucket, marks), 0)
        return Exchanged(
            mean=mean,
            residual=jnp.where(rung == len(ladder), bucket, rest),
            energies=jnp.where(rungs == rung, sent, on_average),
            energy=energy,
        ), state

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """4 bytes an entry."""
        k = _ladder.entries(n, factor)
        return cheaper(dense_traffic(k, replicas), n, replicas)
