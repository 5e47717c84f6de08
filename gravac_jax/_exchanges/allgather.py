"""Everybody sends its own selection to everybody."""

import dataclasses
from typing import Any

import jax

from gravac_jax import _checks, _comm, _payload, _selection
from gravac_jax._codec import Codec
from gravac_jax._comm import Comm
from gravac_jax._compressors import Threshold
from gravac_jax._compressors.base import Compressor
from gravac_jax._encoding import Float32, Int32
from gravac_jax._encoding.base import IndexEncoding, ValueEncoding
from gravac_jax._exchanges.base import Exchange, Exchanged, Traffic, in_branch
from gravac_jax._exchanges.dense import cheaper, dense_exchange
from gravac_jax._payload import Payload


@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
    """All-gathers what a compressor selects, and adds it up in replica order.

    The bucket is compressed once, for the rung that was decided; what the other rungs
    would have sent is read from that payload, for smaller factors with a sample of the
    rest. A rung that would send every entry, or more bytes than a dense mean, is a
    dense mean instead: so the buffers of all replicas together never hold more than
    twice the bytes of a bucket.

    Cost:
      (N - 1) alpha + (N - 1) b k beta, with b bytes an entry, 8 by default and 4 with
      16-bit values and indices; against a dense ring's 2 (N - 1) / N 4 n beta. Below
      a factor of N b / 8 it is dense.

    Args:
      compressor: chooses the entries.
      values: how their values travel.
      indices: how their indices travel.

    Raises:
      TypeError: if one of them is of another kind.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(gravac.TopK()).traffic(1000, factor=100, replicas=4)
      Traffic(entries=10, payload_bytes=80, wire_bytes=240, messages=3)

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018; Tyagi and Swany, GraVAC, 2023.
    """

    compressor: Compressor = dataclasses.field(default_factory=Threshold)
    values: ValueEncoding = dataclasses.field(default_factory=Float32)
    indices: IndexEncoding = dataclasses.field(default_factory=Int32)

    def __post_init__(self) -> None:
        _checks.component(self.compressor, Compressor, "compressor", "gravac.TopK()")
        _checks.component(self.values, ValueEncoding, "values", "gravac.BFloat16()")
        _checks.component(self.indices, IndexEncoding, "indices", "gravac.UInt16()")

    @property
    def is_blind(self) -> bool:
        """If the compressor is."""
        return self.compressor.is_blind

    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """The compressor's state."""
        del ladder
        return self.compressor.init(n)

    def _codec(self, n: int) -> Codec:
        return Codec(self.values, self.indices, n)

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
        """Mark once; then one branch per rung, and one that sends nothing."""
        n = bucket.size
        counts = self.entries(n, ladder, comm.replicas)
        if min(counts) == n:
            return dense_exchange(bucket, rung, len(ladder), comm), state
        codec, slots = self._codec(n), _selection.slots(counts, n, rung, looks)
        selected, state = _selection.select(
            self.compressor, codec, bucket, state, slots, key
        )

        def gathered_mean(k: int) -> jax.Array:
            payload = Payload(*(x[:k] for x in selected.payload))
            buffers = comm.gather(codec.encode(payload, selected.exponents))
            decode = lambda buffer: codec.decode(buffer, k)
            return _payload.add_up(buffers, decode, comm.zeros(bucket))

        mean = in_branch(
            rung,
            counts,
            n,
            sparse=gathered_mean,
            dense=lambda: comm.mean(bucket),
            nothing=lambda: comm.zeros(bucket),
        )
        return Exchanged(
            mean, selected.residual, selected.energies, selected.energy
        ), state

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """What the encodings say; a dense mean's, where that is not more."""
        k = self.compressor.count(n, factor)
        payload_bytes = self._codec(n).payload_bytes(k)
        wire_bytes = _comm.gather_wire_bytes(payload_bytes, replicas)
        messages = _comm.gather_messages(replicas)
        traffic = Traffic(k, payload_bytes, wire_bytes, messages)
        return cheaper(traffic, n, replicas)
