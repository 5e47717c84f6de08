"""Everybody sends its own selection to everybody."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks, _comm, _payload, _selection
from gravac_jax._codec import Codec
from gravac_jax._comm import Comm
from gravac_jax._compressors import Threshold
from gravac_jax._compressors.base import Compressor
from gravac_jax._encoding import BFloat16, UInt16
from gravac_jax._encoding.base import IndexEncoding, ValueEncoding
from gravac_jax._exchanges.base import Exchange, Exchanged, Traffic, in_branch
from gravac_jax._exchanges.dense import (
    VALUE_BYTES,
    cheaper,
    dense_exchange,
    mean_of_energies,
    with_mean_energies,
)
from gravac_jax._payload import Payload


@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
    """All-gathers what a compressor selects, and adds it up in replica order.

    The bucket is compressed once, for the rung that was decided; what the other rungs
    would have sent is read from that payload, for smaller factors with a sample of the
    rest. A rung that would send every entry, or more bytes than a dense mean, is a
    dense mean instead: so the buffers of all replicas together never hold more than
    twice the bytes of a bucket, but for the energies of all rungs that go along.

    Cost:
      (N - 1) alpha + (N - 1) b k beta, with b bytes an entry: 4, or 8 with values and
      indices of 32 bits; against a dense ring's 2 (N - 1) / N 4 n beta. Below a factor
      of N b / 8 it is dense.

    Args:
      compressor: chooses the entries.
      values: how their values travel. Default: `BFloat16()`, whose rounding stays in
        the residual; `Float32()` does not round.
      indices: how their indices travel. Default: `UInt16()`, places within 65,536
        entries.

    Raises:
      TypeError: if one of them is of another kind.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(gravac.TopK()).traffic(1000, factor=100, replicas=4)
      Traffic(entries=10, payload_bytes=44, wire_bytes=132, messages=3)

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018; Tyagi and Swany, GraVAC, 2023.
    """

    compressor: Compressor = dataclasses.field(default_factory=Threshold)
    values: ValueEncoding = dataclasses.field(default_factory=BFloat16)
    indices: IndexEncoding = dataclasses.field(default_factory=UInt16)

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
            exchanged = dense_exchange(bucket, rung, len(ladder), comm)
            return with_mean_energies(exchanged, rung, comm), state
        codec, slots = self._codec(n), _selection.slots(counts, n, rung, looks)
        selected, state = _selection.select(
            self.compressor, codec, bucket, state, slots, key
        )

        own = jnp.append(selected.energies, selected.energy)

        def gathered_mean(k: int) -> tuple[jax.Array, jax.Array]:
            payload = Payload(*(x[:k] for x in selected.payload))
            buffers = comm.gather(codec.encode(payload, selected.exponents, own))
            decode = lambda buffer: codec.decode(buffer, k)
            mean = _payload.add_up(buffers, decode, comm.zeros(bucket))
            read = functools.partial(codec.figures, m=own.size)
            return mean, jnp.mean(jax.vmap(read)(buffers), axis=0)

        # The energies travel with the entries: one collective less to wait for.
        mean, mean_energies = in_branch(
            rung,
            counts,
            n,
            sparse=gathered_mean,
            dense=lambda: (comm.mean(bucket), comm.mean(own)),
            nothing=lambda: (comm.zeros(bucket), comm.zeros(own)),
        )
        return Exchanged(
            mean, selected.residual, selected.energies, selected.energy, mean_energies
        ), state

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """What the encodings say; a dense mean's, where that is not more."""
        k = self.compressor.count(n, factor)
        payload_bytes = self._codec(n).payload_bytes(k)
        wire_bytes = _comm.gather_wire_bytes(payload_bytes, replicas)
        messages = _comm.gather_messages(replicas)
        traffic = Traffic(k, payload_bytes, wire_bytes, messages)
        return cheaper(traffic, n, replicas)

    def energies_traffic(
        self, n: int, factor: float, rungs: int, replicas: int
    ) -> Traffic:
        """4 bytes a rung and 4 more; a message of their own in dense steps alone."""
        if self.traffic(n, factor, replicas).entries == n:
            return mean_of_energies(rungs, replicas)
        payload_bytes = VALUE_BYTES * (rungs + 1)
        return Traffic(
            entries=0,
            payload_bytes=payload_bytes,
            wire_bytes=_comm.gather_wire_bytes(payload_bytes, replicas),
            messages=0,
        )
