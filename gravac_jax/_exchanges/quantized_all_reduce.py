"""Every replica averages a part of all entries, and both ways go in a few bits each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._collectives import FLOAT32_BYTES, Comm, Traffic, mean_traffic
from gravac_jax._exchanges import quantizer
from gravac_jax._exchanges.base import dense_if_cheaper
from gravac_jax._exchanges.quantized import Local, Quantized, Told
from gravac_jax._exchanges.quantizer import SCALES, WIDTHS, WORD_BITS


@dataclasses.dataclass(frozen=True)
class QuantizedAllReduce(Quantized):
    """All-reduces all entries in 8, 4, 2 or 1 bits, whatever the number of replicas.

    Every replica owns an equal part of the rows. In the first stage it receives this
    part from all replicas, as `Quantized` rounds it, and averages it. In the second it
    rounds the mean and sends it to all. What that rounding drops, N times, stays in the
    owner's residual, and comes with what it sends next.

    Prefer `Quantized` for few replicas: it rounds once. It sends N / 2 times as much.

    Law:
      As for `Quantized`; the mean is that of bucket - residual, to rounding. Energies
      are those of the first stage.

    Cost:
      2 (N - 1) alpha + (N - 1) / N (b + m) n / 8 beta with b bits an entry and m bits
      in the second stage, and 8 bytes a row each. A dense ring costs 64 / (b + m) times
      as much.

    Args:
      row_entries: as for `Quantized`.
      mean_bits: bits of an entry in the second stage; None for those of the first.

    Raises:
      ValueError: if `row_entries` is not a positive multiple of 32, or `mean_bits` is
        not a width.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.QuantizedAllReduce()
      >>> exchange.traffic(409_600, factor=32, replicas=4)
      Traffic(entries=12800, payload_bytes=65000, wire_bytes=78000.0, messages=6)

    References:
      Tang et al., 1-bit Adam, ICML 2021, whose servers also keep what they drop.
    """

    mean_bits: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mean_bits is not None:
            _checks.one_of(self.mean_bits, "mean_bits", WIDTHS)

    def _part_rows(self, n: int, replicas: int) -> int:
        return -(-self._rows(n) // replicas)

    def _row_bytes(self, n: int, bits: int) -> int:
        return self._row(n) * bits // 8 + FLOAT32_BYTES * SCALES

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of both stages, or of a dense mean if that is less."""
        if factor == 1:
            return mean_traffic(n, replicas)
        bits, part = self.bits(factor), self._part_rows(n, replicas)
        first = self._row_bytes(n, bits) * part
        second = self._row_bytes(n, self.mean_bits or bits) * part
        traffic = Traffic(
            entries=bits * self._plane_words(n),
            payload_bytes=replicas * first + second,
            wire_bytes=float((replicas - 1) * (first + second)),
            messages=2 * (replicas - 1),
        )
        return dense_if_cheaper(traffic, n, replicas)

    def send(
        self, bucket: jax.Array, local: Local, k: int, comm: Comm
    ) -> tuple[jax.Array, Any]:
        """Average this replica's part, and gather the rounded means of all parts."""
        n, length = bucket.size, self._row(bucket.size)
        bits, rows = k // self._plane_words(n), self._part_rows(n, comm.replicas)
        coded, kept = self._encode(bucket, k)
        missing = ((0, rows * comm.replicas - self._rows(n)), (0, 0))
        codes, scales = (jnp.pad(x, missing) for x in (coded.codes, coded.scales))
        received = comm.swap(_packed(codes, scales, bits, comm.replicas))
        sent = jax.vmap(lambda x: _unpacked(x, bits, (rows, length)))(received)
        start = comm.replica() * rows * length
        mean, entries = _cut(jnp.sum(sent, axis=0) / comm.replicas, n - start)

        mean_bits = self.mean_bits or bits
        again = quantizer.encode(mean, entries, mean_bits)
        rounded = quantizer.decode(again.codes, again.scales, mean_bits)
        lost = comm.replicas * (mean - rounded).reshape(-1)
        packed = _packed(again.codes, again.scales, mean_bits, 1)[0]
        own = local.own(jnp.sum(coded.sent))
        figures = jax.lax.bitcast_convert_type(own, jnp.uint32)
        gathered = comm.gather(jnp.concatenate([packed, figures]))
        parts, figures = jnp.split(gathered, [packed.size], axis=1)
        whole = jax.vmap(lambda x: _unpacked(x, mean_bits, (rows, length)))(parts)
        energies = jax.lax.bitcast_convert_type(figures, jnp.float32)
        told = Told(_added_at(kept, lost, start), own, jnp.mean(energies, axis=0))
        return whole.reshape(-1)[:n], told


def _cut(x: jax.Array, left: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return rows with 0 beyond the first `left` entries, and the entries of each."""
    rows, length = x.shape
    entries = jnp.clip(left - length * jnp.arange(rows), 0, length)
    is_entry = jnp.arange(length)[None] < entries[:, None]
    return jnp.where(is_entry, x, 0), entries.astype(jnp.float32)


def _packed(codes: jax.Array, scales: jax.Array, bits: int, parts: int) -> jax.Array:
    """Return the words of each part's rows, then their scales: `[parts, m]` uint32."""
    words = quantizer.pack(codes, bits).reshape(parts, -1)
    scales = jax.lax.bitcast_convert_type(scales, jnp.uint32).reshape(parts, -1)
    return jnp.concatenate([words, scales], axis=1)


def _unpacked(buffer: jax.Array, bits: int, shape: tuple[int, int]) -> jax.Array:
    """Return the numbers of one part, in rows of this shape, from `_packed`."""
    words, scales = jnp.split(buffer, [buffer.size - SCALES * shape[0]])
    words = words.reshape(shape[0], bits, shape[1] // WORD_BITS)
    scales = jax.lax.bitcast_convert_type(scales, jnp.float32).reshape(-1, SCALES)
    codes = quantizer.unpack(words, bits)
    return quantizer.decode(codes, scales, bits)


def _added_at(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    """Return `x` with `part` added at `start`; what lies beyond its end is dropped."""
    size = min(part.size, x.size)
    begin = jnp.clip(start, 0, x.size - size)
    shifted = jnp.concatenate([jnp.zeros_like(part), part])
    mine = jax.lax.dynamic_slice(shifted, (part.size - (start - begin),), (size,))
    there = jax.lax.dynamic_slice(x, (begin,), (size,))
    return jax.lax.dynamic_update_slice(x, there + mine, (begin,))
