"""Every replica sends its own selection to all others."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _checks, _collectives
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._exchanges.base import Exchange, Kept, dense_if_cheaper
from gravac_jax._selection import Threshold, select_entries, wire_format
from gravac_jax._selection.compressor import Compressor
from gravac_jax._selection.entries import Payload, mean_of_payloads
from gravac_jax._selection.rungs import Rungs
from gravac_jax._selection.select_entries import Selected
from gravac_jax._selection.wire_format import WireFormat


class _Prepared(NamedTuple):
    selected: Selected
    compressor: Any  # its new state


@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
    """All-gathers what a compressor selects, and adds it up in replica order.

    The bucket is compressed once, for the rung that was decided. What smaller factors
    would have sent is read from that payload; for larger payloads a sample tells the
    rest. A rung that would send every entry, or more bytes than a dense mean, is a
    dense mean instead. So the buffers of all replicas together never hold more than
    twice the bytes of a bucket, apart from the energies that travel along.

    Cost:
      (N - 1) alpha + (N - 1) b k beta with b bytes an entry: 4 by default, 8 with
      values and indices of 32 bits. A dense ring costs 2 (N - 1) / N 4 n beta, so that
      factors below N b / 8 are dense.

    Args:
      compressor: chooses the entries.
      values: how values travel: "bfloat16" (the default, 2 bytes; what rounding drops
        stays in the residual) or "float32" (4 bytes).
      indices: how indices travel: "uint16" (the default, 2 bytes: places within 65,536
        entries) or "int32" (4 bytes).

    Raises:
      TypeError: if `compressor` is not a `gravac.Compressor`.
      ValueError: if `values` or `indices` is none of these names.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(gravac.TopK()).traffic(1000, factor=100, replicas=4)
      Traffic(entries=10, payload_bytes=44, wire_bytes=132, messages=3)

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018; Tyagi and Swany, GraVAC, 2023.
    """

    compressor: Compressor = dataclasses.field(default_factory=Threshold)
    values: str = "bfloat16"
    indices: str = "uint16"

    def __post_init__(self) -> None:
        _checks.component(self.compressor, Compressor, "compressor", "gravac.TopK()")
        _checks.one_of(self.values, "values", tuple(wire_format.VALUES))
        _checks.one_of(self.indices, "indices", tuple(wire_format.INDICES))

    @property
    def is_blind(self) -> bool:
        """Whether the compressor is blind."""
        return self.compressor.is_blind

    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """Return the compressor's state."""
        del ladder
        return self.compressor.init(n)

    def _wire_format(self, n: int) -> WireFormat:
        return WireFormat(self.values, self.indices, n)

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of the payloads, or of a dense mean if that is less."""
        k = self.compressor.count(n, factor)
        payload_bytes = self._wire_format(n).payload_bytes(k)
        traffic = _collectives.all_gather_traffic(k, payload_bytes, replicas)
        return dense_if_cheaper(traffic, n, replicas)

    def energies_traffic(
        self, n: int, factor: float, rungs: int, replicas: int
    ) -> Traffic:
        """Return 4 bytes an energy; only a dense step needs messages of their own."""
        if self.is_dense(n, factor, replicas):
            return super().energies_traffic(n, factor, rungs, replicas)
        return _collectives.carried_traffic(rungs + 1, replicas, is_gathered=True)

    def prepare(
        self, bucket: jax.Array, state: Any, rungs: Rungs, key: jax.Array, comm: Comm
    ) -> _Prepared:
        """Select once, for the rung that is taken."""
        del comm
        wire_format = self._wire_format(bucket.size)
        return _Prepared(
            *select_entries.select(
                self.compressor, wire_format, bucket, state, rungs, key
            )
        )

    def _own_energies(self, prepared: _Prepared) -> jax.Array:
        """Return what each rung would send, then the bucket: `[rungs + 1]` float32."""
        return jnp.append(prepared.selected.energies, prepared.selected.energy)

    def found_dense(
        self, bucket: jax.Array, prepared: _Prepared, mean: jax.Array, comm: Comm
    ) -> jax.Array:
        """Average the energies; XLA merges this with the mean of the bucket."""
        return comm.mean(self._own_energies(prepared))

    def send(
        self, bucket: jax.Array, prepared: _Prepared, k: int, comm: Comm
    ) -> tuple[jax.Array, jax.Array]:
        """Gather all payloads; the energies travel with them, in one collective."""
        selected, wire_format = prepared.selected, self._wire_format(bucket.size)
        own = self._own_energies(prepared)
        payload = Payload(*(x[:k] for x in selected.payload))
        buffers = comm.gather(wire_format.encode(payload, own))
        decode = lambda buffer: wire_format.decode(buffer, k)
        mean = mean_of_payloads(buffers, decode, comm.zeros(bucket))
        read = functools.partial(wire_format.figures, m=own.size)
        return mean, jnp.mean(jax.vmap(read)(buffers), axis=0)

    def conclude(
        self,
        bucket: jax.Array,
        state: Any,
        prepared: _Prepared,
        found: jax.Array,
        rungs: Rungs,
    ) -> tuple[Kept, Any]:
        """Keep what was not selected, and what rounding dropped."""
        selected = prepared.selected
        kept = Kept(selected.kept, selected.energies, selected.energy, found)
        return kept, prepared.compressor
