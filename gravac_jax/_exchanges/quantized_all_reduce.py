"""Every replica averages a part of all entries, and both ways go in a few bits each."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._collectives import FLOAT32_BYTES, Comm, Traffic, mean_traffic
from gravac_jax._exchanges import uniform_quantizer
from gravac_jax._exchanges.base import Kept, dense_if_cheaper
from gravac_jax._exchanges.quantized import Local, Quantized
from gravac_jax._exchanges.uniform_quantizer import WIDTHS, WORD_BITS
from gravac_jax._selection.rungs import Rungs


class _Told(NamedTuple):
    lost: jax.Array  # [entries of a part], N times what rounding the mean dropped
    start: jax.Array  # [], where this replica's part begins in the bucket
    energies: jax.Array  # [rungs + 1], as they came with the second stage


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
      in the second stage, and 4 bytes a row each. A dense ring costs 64 / (b + m) times
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
      Traffic(entries=12800, payload_bytes=64500, wire_bytes=77400.0, messages=6)

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
        return self._row(n) * bits // 8 + FLOAT32_BYTES

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
    ) -> tuple[jax.Array, _Told]:
        """Average this replica's part, and gather the rounded means of all parts."""
        n, row_entries = bucket.size, self._row(bucket.size)
        bits, part = k // self._plane_words(n), self._part_rows(n, comm.replicas)
        mean_bits = self.mean_bits or bits
        rows = ((0, part * comm.replicas - self._rows(n)), (0, 0))
        codes, scales = (
            jnp.pad(local.coded.codes, rows),
            jnp.pad(local.coded.scales, rows[:1]),
        )
        received = comm.swap(_packed(codes, scales, bits, comm.replicas))
        unpacked = lambda x, bits: _unpacked(x, bits, (part, row_entries))
        sent = jax.vmap(lambda x: unpacked(x, bits))(received)
        mean = jnp.sum(sent, axis=0) / comm.replicas
        start = comm.replica() * part * row_entries
        begins = start + row_entries * jnp.arange(part)
        entries = jnp.clip(n - begins, 0, row_entries).astype(jnp.float32)
        place = jnp.arange(row_entries, dtype=jnp.float32)[None]
        mean = jnp.where(place < entries[:, None], mean, 0)
        coded = uniform_quantizer.encode(mean, entries, mean_bits)
        rounded = uniform_quantizer.decode(coded.codes, coded.scales, mean_bits)
        lost = comm.replicas * (mean - rounded).reshape(-1)

        packed = _packed(coded.codes, coded.scales, mean_bits, 1)[0]
        own = jax.lax.bitcast_convert_type(local.own, jnp.uint32)
        gathered = comm.gather(jnp.concatenate([packed, own]))
        parts, energies = jnp.split(gathered, [packed.size], axis=1)
        whole = jax.vmap(lambda x: unpacked(x, mean_bits))(parts)
        energies = jax.lax.bitcast_convert_type(energies, jnp.float32)
        return whole.reshape(-1)[:n], _Told(lost, start, jnp.mean(energies, axis=0))

    def told_dense(
        self, bucket: jax.Array, local: Local, mean: jax.Array, comm: Comm
    ) -> _Told:
        """Lose nothing, and average the energies."""
        return self._nothing_lost(bucket, comm, comm.mean(local.own))

    def told_silent(self, bucket: jax.Array, local: Local, comm: Comm) -> _Told:
        """Lose nothing, and return energies of zero."""
        return self._nothing_lost(bucket, comm, comm.zeros(local.own))

    def _nothing_lost(self, bucket: jax.Array, comm: Comm, energies: Any) -> _Told:
        entries = self._part_rows(bucket.size, comm.replicas) * self._row(bucket.size)
        lost, start = jnp.zeros(entries, jnp.float32), jnp.zeros((), jnp.int32)
        return _Told(comm.cast(lost), comm.cast(start), energies)

    def conclude(
        self, bucket: jax.Array, state: Any, local: Local, told: Any, rungs: Rungs
    ) -> tuple[Kept, Any]:
        """Keep what both roundings dropped."""
        residual = _added_at(local.kept, told.lost, told.start)
        return Kept(residual, local.own[:-1], local.own[-1], told.energies), state


def _packed(codes: jax.Array, scales: jax.Array, bits: int, parts: int) -> jax.Array:
    """Return the words of each part's rows, then their scales: `[parts, m]` uint32."""
    words = uniform_quantizer.pack(codes, bits).reshape(parts, -1)
    scales = jax.lax.bitcast_convert_type(scales, jnp.uint32).reshape(parts, -1)
    return jnp.concatenate([words, scales], axis=1)


def _unpacked(buffer: jax.Array, bits: int, shape: tuple[int, int]) -> jax.Array:
    """Return the numbers of one part, in rows of this shape, from `_packed`."""
    words, scales = jnp.split(buffer, [buffer.size - shape[0]])
    words = words.reshape(shape[0], bits, shape[1] // WORD_BITS)
    scales = jax.lax.bitcast_convert_type(scales, jnp.float32)
    codes = uniform_quantizer.unpack(words, bits)
    return uniform_quantizer.decode(codes, scales, bits)


def _added_at(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    """Return `x` with `part` added at `start`; what lies beyond its end is dropped."""
    size = min(part.size, x.size)
    begin = jnp.clip(start, 0, x.size - size)
    shifted = jnp.concatenate([jnp.zeros_like(part), part])
    mine = jax.lax.dynamic_slice(shifted, (part.size - (start - begin),), (size,))
    there = jax.lax.dynamic_slice(x, (begin,), (size,))
    return jax.lax.dynamic_update_slice(x, there + mine, (begin,))
