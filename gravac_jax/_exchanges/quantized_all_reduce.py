"""Every replica averages a part of all entries, and both ways go in a few bits each."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _checks
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._exchanges import quantizer
from gravac_jax._exchanges.message import Message, Section
from gravac_jax._exchanges.quantized import Quantized, Rounded
from gravac_jax._exchanges.quantizer import WIDTHS, row_bytes


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
      shapes: as for `Quantized`.
      mean_bits: bits of an entry in the second stage; None for those of the first.
        Entries of spared leaves have four at least, both ways.

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

    def _traffic(self, sent: Message, replicas: int) -> Traffic:
        """Return the cost of both stages, or of the only one."""
        if self._stages(sent.sections[0].bits, replicas) == 1:
            return super()._traffic(sent, replicas)
        owned = [(x, _owned_rows(x, replicas)) for x in sent.sections]
        first = sum(rows * row_bytes(x.length, x.bits) for x, rows in owned)
        second = sum(rows * row_bytes(x.length, x.bits_back) for x, rows in owned)
        return Traffic(
            entries=sent.words,
            payload_bytes=replicas * first + second,
            wire_bytes=float((replicas - 1) * (first + second)),
            messages=2 * (replicas - 1),
        )

    def _bits_back(self, bits: int) -> int:
        """Return the bits of the mean of entries that were sent in some bits."""
        return self.mean_bits or bits

    def _average(
        self, rounded: Sequence[Rounded], sections: Sequence[Section], comm: Comm
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Average the rows that this replica owns, and gather the rounded means."""
        if self._stages(sections[0].bits, comm.replicas) == 1:
            return super()._average(rounded, sections, comm)
        replicas = comm.replicas
        received = _arrays.together(comm.swap, [x.joined(replicas) for x in rounded])
        owned = [
            _round_mean(x, y, comm) for x, y in zip(received, sections, strict=True)
        ]
        back = _arrays.together(comm.gather, [x.joined()[0] for x in owned])
        means = map(_decoded_back, back, sections)
        kept = [
            _added_at(x.kept, replicas * y.kept, comm.replica() * y.kept.size)
            for x, y in zip(rounded, owned, strict=True)
        ]
        return list(zip(means, kept, strict=True))


def _owned_rows(section: Section, replicas: int) -> int:
    """Return how many rows of a section each replica owns."""
    return -(-section.rows // replicas)


def _round_mean(words: jax.Array, section: Section, comm: Comm) -> Rounded:
    """Round the mean over replicas of the rows that this replica owns.

    Args:
      words: `[replicas, words]` uint32, what each has sent of these rows.
      section: to which they belong.
      comm: the other replicas.
    """
    n, length, bits = section.entries, section.length, section.bits
    rows = _owned_rows(section, comm.replicas)
    parts = quantizer.split(words, rows, bits)
    mean = quantizer.mean(*parts, bits).reshape(rows, length)
    entries = jnp.full_like(mean, length, shape=(rows,))
    if n % length:
        mean, entries = _cut(mean, n - comm.replica() * rows * length)
    words, levels, lost = quantizer.round_rows(mean, entries, section.bits_back)
    return Rounded(words, levels, lost.reshape(-1))


def _decoded_back(words: jax.Array, section: Section) -> jax.Array:
    """Return the mean of a section from all of its owners, `[entries]`."""
    rows, bits = _owned_rows(section, len(words)), section.bits_back
    in_order = lambda x: x.reshape(1, -1, *x.shape[2:])
    words, scales = map(in_order, quantizer.split(words, rows, bits))
    return quantizer.mean(words, scales, bits).reshape(-1)[: section.entries]


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
