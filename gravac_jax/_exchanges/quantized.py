"""Every replica sends every entry in a few bits, or a part of them in turn."""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _checks, _collectives
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._exchanges import message, quantizer
from gravac_jax._exchanges.base import Exchanged, dense_if_cheaper
from gravac_jax._exchanges.message import Message, Section
from gravac_jax._exchanges.quantizer import WIDTHS, Levels, row_bytes
from gravac_jax._exchanges.rounding import Energies, RoundingExchange
from gravac_jax._selection.entries import WORD_BITS
from gravac_jax._selection.waiting import (
    ROUNDING_WAITS,
    share_by_chance,
    waiting_steps,
)

SMALL_BUCKET_ROWS = 16  # rows of a bucket that is too small for rows of full length
QUICK_ROW = 1024  # entries; CPUs took a third longer over rows of 4,000 than of 4,096
SPARED_BITS = 4  # of an entry of a spared leaf, at least
SPARED_BYTES = 1 / 3  # the most that spared leaves add to a message


class Rounded(NamedTuple):
    """Entries, rounded row by row.

    Attributes:
      words: `[rows, ...]` uint32.
      levels: those of the rows.
      kept: `[n]` float32, what rounding drops.
    """

    words: jax.Array
    levels: Levels
    kept: jax.Array

    def joined(self, parts: int = 1) -> jax.Array:
        """Return words and scales, cut into parts of rows: `[parts, ...]` uint32."""
        return quantizer.join(self.words, self.levels.scales, parts)


@dataclasses.dataclass(frozen=True)
class Quantized(RoundingExchange):
    """All-gathers entries in 8, 4 or 2 bits, with two scales for every row.

    A rung of factor 4 sends 8 bits an entry in place of 32, factor 8 sends 4 bits, and
    factor 16 sends 2; between them, the next fewer. Nothing is selected and no index
    travels. It suits what has entries of like size, such as the steps of Adam, of which
    a sparse exchange would send little.

    Factors above 16 send two bits of a part of the bucket, and the parts take turns: at
    factor 64 a quarter goes in each step, and every entry in four steps. That is as
    rare as in rounds of four steps (`gravac.Every`), but every step sends the same few
    bytes, which a delay hides behind computation. What waits for its turn waits in the
    memory, so take gradients at own params, as `gravac.train_step` does; a memory that
    forgets loses it. With `least_bits=1`, factor 32 sends one bit of all entries, and
    parts take turns above.

    In turns, and in one bit, small leaves are spared: they go in every step, in four
    bits at least. These are leaves of fewer than 16,384 entries, the smallest first, as
    long as they add a third at most to what a step sends. In turns, a VGG lost less
    than half as much with it, in the mean of three seeds (record
    2026-11-27_spared_leaves).

    Law:
      What is sent of a row is orthogonal to what is kept of it, so the gain of a row is
      the squared cosine between both: at least 1 / `row_entries`, and 0.64, 0.87, 0.96
      of a Gaussian at 1, 2 and 4 bits. Products round, so sent + kept is the bucket
      within one unit in the last place of the larger. In turns, the part that is due
      and spared leaves obey this law, and the rest of the bucket is kept. What is due
      in a step that `gravac.guard` skips waits for its next turn. `Traffic.entries`
      counts words of 32 bits; an entry that is spared counts as one of the part.

    Cost:
      (N - 1) alpha + (N - 1) b n / 8 beta with b bits an entry, and 8 bytes a row.
      A dense ring costs 2 (N - 1) / N 4 n beta: 64 / (N b) times as much. Widths for
      which that is below 1 are dense. In turns, n is the entries of a part, which has
      whole rows. Spared leaves come on top, with an n and a b of their own.

    Args:
      row_entries: entries that share a scale, a multiple of 32. They are fewer, down to
        a quarter, if a bucket then divides into whole rows, and in buckets of fewer
        than 16 such rows. `gravac.transform` fills up the last row with zeros.
      least_bits: the fewest bits of an entry: 1, 2, 4 or 8. For the same bytes, two
        bits of half of the entries lost as much as one bit of all for a GPT, far less
        for LSTMs, whose steps have a few large entries, and far more for gradients of
        convolutional nets.
      shapes: shapes of the arrays of a bucket, one after the other. `gravac.transform`
        fills in those of the params, of which the smallest come first.

    Raises:
      ValueError: if `row_entries` is not a positive multiple of 32, or `least_bits` is
        not a width.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.Quantized()
      >>> exchange.traffic(409_600, factor=16, replicas=4)
      Traffic(entries=25600, payload_bytes=103200, wire_bytes=309600, messages=3)
      >>> exchange.traffic(409_600, factor=64, replicas=4)
      Traffic(entries=6400, payload_bytes=25800, wire_bytes=77400, messages=3)

    References:
      Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et
      al., Error feedback fixes SignSGD, ICML 2019, whose scale is this one. For parts
      in turn: Douillard et al., Streaming DiLoCo, arXiv 2501.18512.
    """

    row_entries: int = 4096
    least_bits: int = 2
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(
        default=(), kw_only=True, repr=False
    )

    def __post_init__(self) -> None:
        _checks.positive_integer(
            self.row_entries, "row_entries", "entries that share a scale"
        )
        if self.row_entries % WORD_BITS:
            raise ValueError(
                f"row_entries must be a multiple of {WORD_BITS}, got"
                f" {self.row_entries}: codes of a row share words of 32 bits."
            )
        _checks.one_of(self.least_bits, "least_bits", WIDTHS)

    @property
    def sends_whole_entries(self) -> bool:
        """Whether entries are either sent or kept: no, all are sent rounded."""
        return False

    @property
    def suits_small_leaves(self) -> bool:
        """Whether small leaves are compressed if `compress` does not say: yes."""
        return True

    def shaped(self, shapes: tuple[tuple[int, ...], ...]) -> "Quantized":
        """Return this exchange with these `shapes`."""
        return dataclasses.replace(self, shapes=shapes)

    def _lengths(self, n: int, rows: int = SMALL_BUCKET_ROWS) -> Sequence[int]:
        """Return the entries that a row may have, the most first.

        Few entries have shorter rows, so that a few replicas can own equal parts.
        """
        part = -(-n // (rows * WORD_BITS)) * WORD_BITS
        longest = min(self.row_entries, max(part, WORD_BITS))
        return range(longest, max(longest // 4, WORD_BITS) - 1, -WORD_BITS)

    def _row(self, n: int, rows: int = SMALL_BUCKET_ROWS) -> int:
        """Return the entries of a row: at best as many as divide `n` without a rest."""
        lengths = self._lengths(n, rows)
        return next((x for x in lengths if n % x == 0), lengths[0])

    def padded_size(self, n: int) -> int:
        """Return the size of a bucket that holds `n` entries in few and whole rows.

        It is n, if these have whole rows. The scales of a row weigh as much as 32 of
        its entries, in two bits.
        """
        if n % self._row(n) == 0:
            return n
        cost = lambda row: -(-n // row) * (row + WORD_BITS)
        lengths = self._lengths(n)
        quick = [row for row in lengths if row % QUICK_ROW == 0]
        row = min(quick or lengths, key=cost)
        return -(-n // row) * row

    def bits(self, factor: float) -> int:
        """Return the bits of an entry at `factor`: as many as it allows, if enough."""
        allowed = next((b for b in WIDTHS if b * factor <= WORD_BITS), 0)
        return max(allowed, self.least_bits)

    def turns(self, factor: float) -> int:
        """Return in how many steps every entry goes once."""
        return max(1, math.ceil(factor * self.least_bits / WORD_BITS))

    def _least_rows(self, replicas: int) -> int:
        """Return of how many rows a part must be, or it would send padding."""
        del replicas
        return 1

    def _bits_back(self, bits: int) -> int:
        """Return the bits of the mean of entries that were sent in some bits."""
        return bits

    def _message(self, n: int, factor: float, replicas: int) -> Message:
        """Return what goes in one step: all entries, or those of some whole rows."""
        sent = lambda spared: self._sections(n, spared, factor, replicas)
        plain, row = sent(0), self._row(n)
        if plain.is_whole and self.bits(factor) > 1:
            return plain
        # If the part is all entries, spared leaves end where one of its rows does.
        is_fine = not plain.is_whole and row % (4 * WORD_BITS) == 0
        unit = row // 4 if is_fine else row
        ends = {-(-end // unit) * unit for end in message.small_ends(self.shapes)}
        spared = sorted(end for end in ends if end < n)
        traffic = lambda x: self._traffic(x, replicas)
        most = (1 + SPARED_BYTES) * traffic(plain).payload_bytes
        size = lambda end: traffic(sent(end)).payload_bytes
        fitting = bisect.bisect_right(spared, most, key=size)
        chosen = sent(spared[fitting - 1]) if fitting else plain
        # Else a few leaves would make the step a dense one.
        dense = _collectives.mean_traffic(n, replicas).wire_bytes
        return chosen if traffic(chosen).wire_bytes <= dense else plain

    def _sections(self, n: int, spared: int, factor: float, replicas: int) -> Message:
        """Return what goes in one step if so many entries are spared."""
        row, bits, turns = self._row(n), self.bits(factor), self.turns(factor)
        back, least = self._bits_back(bits), self._least_rows(replicas)

        def part_of(entries: int) -> int:
            rows = -(-entries // row)
            return min(entries, max(-(-rows // turns), least) * row)

        part = n if part_of(n) == n else part_of(n - spared)
        sections = [Section(part, self._row(part), bits, back)]
        if spared:
            rows = -(-SMALL_BUCKET_ROWS // least) * least
            both = (max(x, SPARED_BITS) for x in (bits, back))
            sections.append(Section(spared, self._row(spared, rows), *both))
        return Message(n, tuple(sections))

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of the packed words, or of a dense mean if that is less."""
        if factor == 1:
            return _collectives.mean_traffic(n, replicas)
        traffic = self._traffic(self._message(n, factor, replicas), replicas)
        return dense_if_cheaper(traffic, n, replicas)

    def _traffic(self, sent: Message, replicas: int) -> Traffic:
        """Return the cost of a message."""
        sizes = [x.rows * row_bytes(x.length, x.bits) for x in sent.sections]
        return _collectives.all_gather_traffic(sent.words, sum(sizes), replicas)

    def _energies(
        self, rows: jax.Array, entries: jax.Array, each: Sequence[int]
    ) -> list[jax.Array]:
        """Return the energy of some rows that rungs would send."""
        widths = [words * WORD_BITS // rows.shape[1] for words in each]

        def look(rows: jax.Array) -> list[jax.Array]:
            return [jnp.sum(quantizer.fit(rows, entries, x).sent) for x in widths]

        return quantizer.by_blocks(look, rows)

    def shares(
        self, gradient: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Return the shares of a choice by chance in which entries wait as long.

        What rounding leaves to the next exchange counts a tenth (`waiting_steps`).
        """
        share, spared, sent, messages = self._look(gradient, ladder, key, comm)
        turns = jnp.asarray([x.turns for x in messages], jnp.float32)
        some = jnp.maximum(spared, _arrays.SMALLEST_NORMAL)
        of_spared = jnp.where(spared > 0, sent / some, 1)
        at_once = waiting_steps(of_spared, counted=ROUNDING_WAITS)
        in_turn = waiting_steps(share, turns, counted=ROUNDING_WAITS)
        return share_by_chance(spared * at_once + (1 - spared) * in_turn)

    def bucket_shares(
        self, bucket: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Return the share of a bucket's energy that each rung would send.

        The part that is due is taken for as large as all others.
        """
        share, spared, sent, messages = self._look(bucket, ladder, key, comm)
        # A part of all entries has spared ones, too.
        due = [min(1, x.part / max(x.n - x.spared, 1)) for x in messages]
        return sent + (1 - spared) * share * jnp.asarray(due, jnp.float32)

    def _look(
        self, x: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> tuple[jax.Array, jax.Array, jax.Array, list[Message]]:
        """Look at what each rung would send.

        Rows of spared leaves are looked at like others.

        Returns:
          The share of an entry's energy that it would send; the shares of the energy of
          `x` that spared leaves have, and that is sent of them; `[rungs]` each. And
          what goes in one step.
        """
        n, replicas = x.size, comm.replicas
        counts, messages = [], []
        for factor in ladder:
            is_dense = self.is_dense(n, factor, replicas)
            plane_words = self._rows(n) * self._row(n) // WORD_BITS
            counts.append(n if is_dense else self.bits(factor) * plane_words)
            # A dense step has all entries in one part.
            messages.append(self._message(n, 1 if is_dense else factor, replicas))
        energy = jnp.maximum(_arrays.energy(x), _arrays.SMALLEST_NORMAL)
        own, sent = zip(*(self._of_spared(x, y) for y in messages), strict=True)
        share = self._shares(x, counts, key)
        return share, jnp.stack(own) / energy, jnp.stack(sent) / energy, messages

    def _of_spared(self, x: jax.Array, sent: Message) -> tuple[jax.Array, jax.Array]:
        """Return the energy of spared leaves, and that of what is sent of them."""
        if not sent.spared:
            nothing = jnp.zeros_like(x, shape=())
            return nothing, nothing
        section, leaves = sent.sections[-1], x[: sent.spared]
        words = section.bits * section.length // WORD_BITS
        rows = self._in_rows(leaves, section.length)
        return _arrays.energy(leaves), self._energies(*rows, [words])[0]

    def _send(
        self, bucket: jax.Array, factor: float, step: jax.Array | int, comm: Comm
    ) -> Exchanged:
        """Send all entries in some bits, or in the fewest those whose turn it is."""
        sent = self._message(bucket.size, factor, comm.replicas)
        starts, energy = sent.starts(step), _arrays.energy(bucket)
        if sent.spared or not sent.is_whole:
            # The bucket is made once, for all sections and for what is not due.
            bucket = jax.lax.optimization_barrier(bucket)
        parts = [
            jax.lax.dynamic_slice(bucket, (start,), (section.entries,))
            for start, section in zip(starts, sent.sections, strict=True)
        ]
        # Spared leaves are not read again, so that the bucket can be overwritten.
        parts[1:] = map(jax.lax.optimization_barrier, parts[1:])
        averaged, comm = self._send_sections(parts, sent, energy, comm)
        mean, kept = jnp.zeros_like(averaged[0][0], shape=bucket.shape), bucket
        put = jax.lax.dynamic_update_slice
        for start, (own_mean, own_kept) in zip(starts, averaged, strict=True):
            mean, kept = put(mean, own_mean, (start,)), put(kept, own_kept, (start,))
        return comm.exchanged(mean, kept)

    def _send_sections(
        self,
        parts: Sequence[jax.Array],
        sent: Message,
        energy: jax.Array,
        comm: Comm,
    ) -> tuple[list[tuple[jax.Array, jax.Array]], Energies]:
        """Average the sections of a message over replicas.

        Returns:
          The mean of each, and what is kept of it; and the energies that travelled.
        """
        rounded = list(map(self._round, parts, sent.sections))
        first, *others = [x.levels.sent for x in rounded]
        counted = [first[sent.overridden_rows :], *others]
        comm = Energies.on(comm, (_arrays.total(map(jnp.sum, counted)), energy))
        return self._average(rounded, sent.sections, comm), comm

    def _round(self, part: jax.Array, section: Section) -> Rounded:
        """Round the entries of a section."""
        rows = self._in_rows(part, section.length)
        words, levels, kept = quantizer.round_rows(*rows, section.bits)
        return Rounded(words, levels, kept.reshape(-1)[: part.size])

    def _average(
        self, rounded: Sequence[Rounded], sections: Sequence[Section], comm: Comm
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Gather all words and scales in one message.

        Returns:
          The mean of each section, and what this replica keeps of it.
        """
        own = [x.joined()[0] for x in rounded]
        theirs = _arrays.together(comm.gather, own)

        def decoded(words: jax.Array, section: Section) -> jax.Array:
            parts = quantizer.split(words, section.rows, section.bits)
            mean = quantizer.mean(*parts, section.bits)
            return mean.reshape(-1)[: section.entries]

        means = map(decoded, theirs, sections)
        return [(mean, x.kept) for mean, x in zip(means, rounded, strict=True)]
