"""Every replica averages a part of all entries, and both ways go in a few bits each."""

import dataclasses

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _checks
from gravac_jax._collectives import FLOAT32_BYTES, Comm, Traffic
from gravac_jax._exchanges import quantizer
from gravac_jax._exchanges.base import Exchanged
from gravac_jax._exchanges.quantized import Quantized
from gravac_jax._exchanges.quantizer import SCALES, WIDTHS
from gravac_jax._exchanges.rounding import Energies


@dataclasses.dataclass(frozen=True)
class QuantizedAllReduce(Quantized):
    """All-reduces entries in 8, 4 or 2 bits, whatever the number of replicas.

    Factors, and parts in turn, are those of `Quantized`.

    Every replica owns as many of the rows. In the first stage it receives these from
    all replicas, as `Quantized` rounds them, and averages them. In the second it rounds
    the mean and sends it to all. What that rounding drops, N times, stays in the
    owner's residual, and comes with what it sends next.

    A part in turn has a row for each replica at least.

    Two replicas exchange in one stage, as `Quantized` does, unless `mean_bits` is less
    than the bits of a rung: a gather sends as many bytes in half the messages, and
    rounds once. With more replicas `Quantized` sends N / 2 times as much.

    Law:
      As for `Quantized`; the mean is that of bucket - residual, to rounding. Energies
      are those of the first stage.

    Cost:
      2 (N - 1) alpha + (N - 1) / N (b + m) n / 8 beta with b bits an entry and m bits
      in the second stage, and 8 bytes a row each. A dense ring costs 64 / (b + m) times
      as much. In one stage, that of `Quantized`.

    Args:
      row_entries: as for `Quantized`.
      least_bits: as for `Quantized`.
      mean_bits: bits of an entry in the second stage; None for those of the first.

    Raises:
      ValueError: if `row_entries` is not a positive multiple of 32, or `least_bits` or
        `mean_bits` is not a width.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.QuantizedAllReduce()
      >>> exchange.traffic(409_600, factor=16, replicas=4)
      Traffic(entries=25600, payload_bytes=129000, wire_bytes=154800.0, messages=6)

    References:
      Tang et al., 1-bit Adam, ICML 2021, whose servers also keep what they drop.
    """

    mean_bits: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mean_bits is not None:
            _checks.one_of(self.mean_bits, "mean_bits", WIDTHS)

    def stages(self, factor: float, replicas: int) -> int:
        """Return 1 with up to two replicas, if a gather sends no more bits; else 2."""
        return self._stages(self.bits(factor), replicas)

    def _stages(self, bits: int, replicas: int) -> int:
        return 1 if replicas <= 2 and bits <= (self.mean_bits or bits) else 2

    def _least_rows(self, replicas: int) -> int:
        return replicas if self._stages(self.least_bits, replicas) == 2 else 1

    def _part_rows(self, n: int, replicas: int) -> int:
        return -(-self._rows(n) // replicas)

    def _row_bytes(self, n: int, bits: int) -> int:
        return self._row(n) * bits // 8 + FLOAT32_BYTES * SCALES

    def _traffic(self, n: int, bits: int, replicas: int) -> Traffic:
        """Return the cost of both stages, or of the only one."""
        if self._stages(bits, replicas) == 1:
            return super()._traffic(n, bits, replicas)
        part = self._part_rows(n, replicas)
        first = self._row_bytes(n, bits) * part
        second = self._row_bytes(n, self.mean_bits or bits) * part
        return Traffic(
            entries=bits * self._plane_words(n),
            payload_bytes=replicas * first + second,
            wire_bytes=float((replicas - 1) * (first + second)),
            messages=2 * (replicas - 1),
        )

    def _send_all(
        self, bucket: jax.Array, energy: jax.Array, bits: int, comm: Comm
    ) -> Exchanged:
        """Average this replica's part, and gather the rounded means of all parts."""
        if self._stages(bits, comm.replicas) == 1:
            return super()._send_all(bucket, energy, bits, comm)
        n, length = bucket.size, self._row(bucket.size)
        rows = self._part_rows(n, comm.replicas)
        words, levels, kept = self._round(bucket, bits)
        comm = Energies.on(comm, (jnp.sum(levels.sent), energy))
        mine = _join(words, levels.scales, rows, comm.replicas)
        mean = _mean(*_split(comm.swap(mine), rows, bits), bits).reshape(rows, length)
        start = comm.replica() * rows * length
        entries = jnp.full_like(mean, length, shape=(rows,))
        if n % length:
            mean, entries = _cut(mean, n - start)

        mean_bits = self.mean_bits or bits
        words, again, lost = quantizer.round_rows(mean, entries, mean_bits)
        parts = comm.gather(_join(words, again.scales, rows, 1).reshape(-1))
        whole = _whole(parts, rows, mean_bits).reshape(-1)[:n]
        kept = _added_at(kept, comm.replicas * lost.reshape(-1), start)
        return comm.exchanged(whole, kept)


def _join(words: jax.Array, scales: jax.Array, rows: int, parts: int) -> jax.Array:
    """Return the words and scales of parts of `rows`, uint32: `[parts, ...]`.

    Rows that are missing in the last parts become 0.
    """

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(-1)
        whole = rows * parts * (flat.size // len(x))
        return jnp.pad(flat, (0, whole - flat.size)).reshape(parts, -1)

    return jnp.concatenate([cut(words), cut(_arrays.to_words(scales))], axis=1)


def _split(joined: jax.Array, rows: int, bits: int) -> tuple[jax.Array, jax.Array]:
    """Undo `_join`: return words `[parts, rows, bits, ...]` and scales."""
    parts = len(joined)
    words, scales = jnp.split(joined, [joined.shape[1] - SCALES * rows], axis=1)
    scales = _arrays.from_words(scales).reshape(parts, rows, SCALES)
    return words.reshape(parts, rows, bits, -1), scales


def _mean(words: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """Return the mean over replicas of the part that each has sent."""
    return _arrays.kernel(lambda: quantizer.mean(words, scales, bits), scales)


def _whole(joined: jax.Array, rows: int, bits: int) -> jax.Array:
    """Return what all parts stand for, `[parts * rows, ...]`."""
    parts = _split(joined, rows, bits)
    words, scales = (x.reshape(1, -1, *x.shape[2:]) for x in parts)
    return _mean(words, scales, bits)


def _cut(x: jax.Array, left: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return rows with 0 beyond the first `left` entries, and the entries of each."""
    rows, length = x.shape
    entries = jnp.clip(left - length * jnp.arange(rows), 0, length)
    is_entry = jnp.arange(length)[None] < entries[:, None]
    return jnp.where(is_entry, x, 0), entries.astype(jnp.float32)


def _added_at(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    """Return `x` with `part` added at `start`; what lies beyond its end is dropped."""
    size = min(part.size, x.size)
    begin = jnp.clip(start, 0, x.size - size)
    mine = part
    if x.size % part.size:
        shifted = jnp.concatenate([jnp.zeros_like(part), part])
        mine = jax.lax.dynamic_slice(shifted, (part.size - (start - begin),), (size,))
    there = jax.lax.dynamic_slice(x, (begin,), (size,))
    return jax.lax.dynamic_update_slice(x, there + mine, (begin,))
