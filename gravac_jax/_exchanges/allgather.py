"""Everybody sends its own selection to everybody."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _comm, _payload, _tree
from gravac_jax._comm import Comm
from gravac_jax._compressors import TopK
from gravac_jax._compressors.base import Compressor
from gravac_jax._exchanges.base import Exchange, Selection, Traffic
from gravac_jax._exchanges.dense import dense_mean, dense_traffic


@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
    """All-gathers what a compressor selects, and adds it up in replica order.

    The bucket is compressed once, for the smallest factor of the ladder that leaves
    anything out; larger factors narrow that payload (GraVAC's multi-level
    compression). A rung that would send every entry is a dense mean instead.

    Cost:
      (N - 1) alpha + (N - 1) 8 k beta, against a dense ring's 2 (N - 1) / N 4 n beta:
      it moves fewer bytes than dense above a factor of N.

    Args:
      compressor: chooses the entries.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(gravac.TopK()).traffic(1000, factor=100, replicas=4)
      Traffic(entries=10, payload_bytes=80, wire_bytes=240)

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018; Tyagi and Swany, GraVAC, 2023.
    """

    compressor: Compressor = TopK()  # noqa: RUF009 (frozen, without arrays)

    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """The compressor's state."""
        del ladder
        return self.compressor.init(n)

    def select(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
    ) -> tuple[Selection, Any]:
        """Compress once, at the largest k that is not everything."""
        n, energy = bucket.size, _tree.energy(bucket)
        counts = [self.compressor.count(n, factor) for factor in ladder]
        sparse = [k for k in counts if k < n]
        if not sparse:
            energies = jnp.broadcast_to(energy, (len(ladder),))
            return Selection(energies, energy, ()), state
        payload, state = self.compressor.compress(bucket, state, k=max(sparse), key=key)
        energies = [
            _tree.energy(self.compressor.narrow(payload, k).values) if k < n else energy
            for k in counts
        ]
        return Selection(jnp.stack(energies), energy, payload), state

    def exchange(
        self,
        bucket: jax.Array,
        selection: Selection,
        rung: jax.Array,
        *,
        ladder: tuple[float, ...],
        comm: Comm,
    ) -> tuple[jax.Array, jax.Array]:
        """One branch per rung: a dense mean, or an all-gather of its k entries."""

        def branch(factor: float) -> Any:
            k = self.compressor.count(bucket.size, factor)
            if k == bucket.size:
                return lambda bucket, payload: dense_mean(bucket, comm)
            return lambda bucket, payload: _gathered_mean(
                bucket, self.compressor.narrow(payload, k), comm
            )

        branches = [branch(factor) for factor in ladder]
        return jax.lax.switch(rung, branches, bucket, selection.payload)

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """8 bytes an entry that is sent; 4 where all are."""
        k = self.compressor.count(n, factor)
        if k == n:
            return dense_traffic(n, replicas)
        payload_bytes = _payload.ENTRY_BYTES * k
        wire_bytes = _comm.gather_wire_bytes(payload_bytes, replicas)
        return Traffic(k, payload_bytes, wire_bytes)


def _gathered_mean(
    bucket: jax.Array, payload: _payload.Payload, comm: Comm
) -> tuple[jax.Array, jax.Array]:
    packed = comm.gather(_payload.pack(payload))  # [replicas, 2, k]
    mean = _payload.add_up(packed, bucket.size) / comm.replicas
    return mean, _payload.drop(bucket, payload)
