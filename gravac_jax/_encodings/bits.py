"""Send every entry in a few bits, or a part of the entries in turn.

A bucket is cut into rows, each with its own scales (`levels.py`). What goes in one step
is a message of sections: small leaves that are spared, which are the first of the
bucket; and of the others the part whose turn it is, or all.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _network, _refuse, _xla
from gravac_jax._encodings import levels
from gravac_jax._encodings.base import Bucket, Encoding, Sent
from gravac_jax._encodings.levels import WIDTHS, WORD_BITS, Rounded
from gravac_jax._network import Comm, Traffic

SMALL_BUCKET_ROWS = 16  # rows of a bucket that is too small for rows of full length
MANY_ROWS = 256  # of which the last may be padded: a full one is 0.4% of the bytes
SMALL_LEAF = 16_384  # entries of a leaf that is not spared
SPARED_BITS = 4  # of an entry of a spared leaf, at least
SPARED_BYTES = 1 / 3  # the most that spared leaves add to a message
LOOKED_AT_ROWS = 256  # at least, of a bucket that has as many; arbitrary
# An entry that is not sent is missing; a rounded entry is there, too large as often as
# too small. Fitted to eleven workloads, with 0.15 for `compression_gain.WAITING_COST`.
ROUNDING_WAITS = 1 / 10


class Section(NamedTuple):
    """A section of a message.

    Attributes:
      entries: the number of its entries.
      length: the entries of a row, which share scales; a multiple of 32.
      bits: the bits of an entry, as a replica sends it, and as its mean comes back.
    """

    entries: int
    length: int
    bits: int

    def rows(self, owners: int = 1) -> int:
        """Return how many rows each of some owners has; the last may be padded."""
        return -(-self.entries // (self.length * owners))

    def owner_bytes(self, owners: int) -> int:
        """Return the bytes of what one owner has of it."""
        scales = levels.SCALES * _network.FLOAT32_BYTES
        return self.rows(owners) * (self.length * self.bits // 8 + scales)


class Message(NamedTuple):
    """What goes in one step of a bucket of `n` entries; static.

    Attributes:
      n: entries of the bucket.
      part: entries of the part that is due.
      spared: entries of leaves that go in every step.
      sections: that of the part that is due, and that of spared leaves, if any.
    """

    n: int
    part: int
    spared: int
    sections: tuple[Section, ...]

    @property
    def turns(self) -> int:
        """How many parts take turns. The last may overlap the one before."""
        return -(-(self.n - self.spared) // self.part) if self.n else 1

    def starts(self, step: jax.Array | int) -> list[jax.Array | int]:
        """Return the first entry of each section."""
        turn = self.spared + step % self.turns * self.part
        due = 0 if self.part == self.n else jnp.minimum(turn, self.n - self.part)
        return [due, 0][: len(self.sections)]

    def traffic(self, replicas: int) -> Traffic:
        """Return the cost of words and scales, in two stages or in one."""
        owners = _owners(replicas)
        part_bytes = sum(x.owner_bytes(owners) for x in self.sections)
        if owners == 1:
            return _network.all_gather_traffic(part_bytes, replicas)
        return _network.two_stage_traffic(part_bytes, replicas)


@dataclasses.dataclass(frozen=True, repr=False)
class Bits(Encoding):
    """All-reduces every entry in 8, 4, 2 bits or 1, whatever the number of replicas.

    Nothing is selected and no index travels. It suits what has entries of like size,
    such as the steps of Adam, of which a sparse encoding would send little.

    Each replica owns an equal share of the rows. In the first stage it receives these
    from all replicas and averages them. In the second it rounds the mean and sends it
    to all. What that rounding drops, N times, stays in the owner's residual, and comes
    with what it sends next. Two replicas exchange in one stage: a gather sends as many
    bytes in half the messages, and rounds once.

    With `turns`, each step sends a part of the bucket, and all parts take their turns:
    `Bits(2, turns=4)` sends a quarter in each step, and every entry in four steps. That
    is as rare as in rounds of four steps (`gravac.transform(every=4)`), but every step
    sends the same few bytes, which a delay hides behind computation. What waits for its
    turn waits in the memory, so take gradients at own params, as `gravac.train_step`
    does.

    In turns, and in one bit, small leaves are spared: they go in every step, in four
    bits at least. These are leaves of fewer than 16,384 entries, the smallest first, as
    long as they add a third at most to what a step sends. With it, a VGG in turns lost
    less than half as much.

    Law:
      What is sent of a row is orthogonal to what is held back of it, so the gain of a
      row is the squared cosine between both: at least 1 / `row_entries`, and 0.64,
      0.87, 0.96 of a Gaussian at 1, 2 and 4 bits. Products round, so sent + held back
      is the bucket within one unit in the last place of the larger. In turns, the part
      that is due and spared leaves obey this law, and the rest of the bucket is held
      back. What is due in a step that `gravac.guard` skips waits for its next turn. The
      mean is that of bucket - residual, to rounding. The energy is that of the first
      stage.

      A code stands for no zero. What has no gradient, or a small one, moves in each
      step with the small entries of its row, and is moved back later: it is never
      farther off than the root mean square of what a row sends. Params in bfloat16
      round both ways, and such an entry stays off by about one unit in the last place.
      In float32 it came back to 3e-6. A leaf that goes dense does not move.

    Cost:
      2 (N - 1) alpha + (N - 1) / N b n / 4 beta with b bits an entry, and 8 bytes a row
      each way; with two replicas alpha + b n / 8 beta. A dense ring costs 32 / b times
      as much. In turns, n is the entries of a part, which has a row for each replica at
      least. Spared leaves come on top.

    Args:
      bits: of an entry: 8, 4, 2 or 1.
      turns: in how many steps every entry goes once.
      row_entries: entries that share a scale, a multiple of 32. They are fewer, down to
        a quarter, if a bucket then divides into whole rows, and in buckets of fewer
        than 16 such rows. `gravac.transform` fills up the last row with zeros.

    Raises:
      ValueError: if `bits` is not one of these widths, `turns` not a positive number,
        or `row_entries` not a positive multiple of 32.

    Example:
      >>> import gravac_jax as gravac
      >>> bucket = gravac.Bucket(409_600)
      >>> gravac.Bits(2).traffic(bucket, replicas=4).wire_bytes
      154800.0
      >>> gravac.Bits(2, turns=4).traffic(bucket, replicas=4).wire_bytes
      43344.0

    References:
      Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et
      al., Error feedback fixes SignSGD, ICML 2019, whose scale is this one; Tang et
      al., 1-bit Adam, ICML 2021, whose servers also keep what they drop. For parts in
      turn: Douillard et al., Streaming DiLoCo, arXiv 2501.18512.
    """

    suits_small_leaves = True
    bits: int
    turns: int = 1
    row_entries: int = dataclasses.field(default=4096, kw_only=True)

    def __post_init__(self) -> None:
        _refuse.one_of(self.bits, "bits", WIDTHS)
        _refuse.count(self.turns, "turns", "parts that go one by one")
        _refuse.count(self.row_entries, "row_entries", "entries with one scale")
        if self.row_entries % WORD_BITS:
            raise ValueError(
                f"`row_entries` must be a multiple of {WORD_BITS}, got"
                f" {self.row_entries}."
            )

    @property
    def sends_whole_entries(self) -> bool:
        """Whether entries are either sent or held back: no, a part of each is sent."""
        return False

    @property
    def needs_own_params(self) -> bool:
        """Whether gradients should be taken at own params: in one bit, and in turns.

        At the shared params a step in two bits was worth 0.77 dense ones, and a step in
        one bit 0.43.
        """
        return self.bits == 1 or self.turns > 1

    # What goes in one step. ---------------------------------------------------------

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
        its entries, in two bits. Many rows have their full length, of whole tiles on
        TPUs: rows of 2,048 took twice the passes over a bucket.
        """
        if n >= MANY_ROWS * self.row_entries:
            row = self.row_entries
        elif n % (row := self._row(n)):
            row = min(self._lengths(n), key=lambda x: -(-n // x) * (x + WORD_BITS))
        return -(-n // row) * row

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def message(self, bucket: Bucket, replicas: int) -> Message:
        """Return what goes in one step: all entries, or those of some whole rows."""
        n, row = bucket.n, self._row(bucket.n)
        plain = self._with_spared(n, 0, replicas)
        if plain.part == n and self.bits > 1:
            return plain
        sizes = map(math.prod, bucket.shapes)
        small = itertools.takewhile(lambda size: size < SMALL_LEAF, sizes)
        unit = row if n >= MANY_ROWS * row else WORD_BITS
        ends = {-(-end // unit) * unit for end in itertools.accumulate(small)}
        spared = sorted(end for end in ends if end < n)
        longer = [self._with_spared(n, end, replicas) for end in spared]
        bytes_of = lambda message: message.traffic(replicas).payload_bytes
        most = (1 + SPARED_BYTES) * bytes_of(plain)
        return [plain, *(x for x in longer if bytes_of(x) <= most)][-1]

    def _with_spared(self, n: int, spared: int, replicas: int) -> Message:
        """Return what goes in one step if so many entries are spared."""
        row, owners = self._row(n), _owners(replicas)
        rows = -(-(n - spared) // row)
        part = min(n - spared, max(-(-rows // self.turns), owners) * row)
        sections = [Section(part, self._row(part), self.bits)]
        if spared:
            rows = -(-SMALL_BUCKET_ROWS // owners) * owners
            bits = max(self.bits, SPARED_BITS)
            sections.append(Section(spared, self._row(spared, rows), bits))
        return Message(n, part, spared, tuple(sections))

    def traffic(self, bucket: Bucket, replicas: int) -> Traffic:
        """Return the cost of what goes in one step."""
        return self.message(bucket, replicas).traffic(replicas)

    # The exchange. ------------------------------------------------------------------

    def exchange(
        self,
        x: jax.Array,
        state: Any,
        *,
        bucket: Bucket,
        key: jax.Array,
        step: jax.Array | int,
        comm: Comm,
    ) -> tuple[Sent, Any]:
        """Send all entries, or those whose turn it is."""
        message = self.message(bucket, comm.replicas)
        starts, sections = message.starts(step), message.sections
        if message.part < message.n:
            # The bucket is made once, for all sections and for what is not due.
            x = _xla.once(x)
        cut = lambda section, at: jax.lax.dynamic_slice(x, (at,), (section.entries,))
        parts = list(map(cut, sections, starts))
        # Spared leaves are not read again, so that the bucket can be overwritten.
        parts[1:] = map(_xla.once, parts[1:])
        owners = _owners(comm.replicas)
        round_ = lambda s, x: levels.round_rows(*_in_rows(x, s.length), s.bits, owners)
        rounded = list(map(round_, sections, parts))
        energy = _arrays.total(jnp.sum(x.sent) for x in rounded)
        comm.tell(energy)
        averaged = self._average(rounded, sections, comm)
        mean, residual = jnp.zeros_like(averaged[0][0], shape=x.shape), x
        put = jax.lax.dynamic_update_slice
        for start, (part_mean, held) in zip(starts, averaged, strict=True):
            mean = put(mean, part_mean, (start,))
            residual = put(residual, held, (start,))
        return Sent(mean, residual, energy), state

    def _average(
        self, rounded: Sequence[Rounded], sections: Sequence[Section], comm: Comm
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Return the mean of each section, and what this replica holds back of it."""
        of_each = functools.partial(zip, sections, strict=True)
        held = [_flat(x.dropped, section) for section, x in of_each(rounded)]
        if _owners(comm.replicas) == 1:
            theirs = _arrays.together(comm.gather, [x.message[0] for x in rounded])
            means = [levels.mean(x, s.rows(), s.bits) for s, x in of_each(theirs)]
        else:
            theirs = _arrays.together(comm.swap, [x.message for x in rounded])
            mine = [_round_mean(x, section, comm) for section, x in of_each(theirs)]
            back = _arrays.together(comm.gather, [x.message[0] for x in mine])
            given = lambda s: (s.rows(comm.replicas), s.bits, s.rows())
            means = [levels.in_order(x, *given(s)) for s, x in of_each(back)]
            for i, x in enumerate(mine):
                owed = comm.replicas * x.dropped.reshape(-1)
                held[i] = _added_at(held[i], owed, comm.replica() * owed.size)
        return list(zip(map(_flat, means, sections), held, strict=True))

    # What it would send. ------------------------------------------------------------

    def look(self, x: jax.Array, state: Any, bucket: Bucket, key: jax.Array) -> Any:
        """Return two functions that estimate each share of the energy once.

        They return the share that rounding keeps, of rows of a length in some bits; and
        the share that so many entries at the front have.
        """
        least = _arrays.SMALLEST_NORMAL  # of nothing, such as padded rows, all is sent
        whole = lambda x: _arrays.energy(x) + least
        few_rows = functools.cache(lambda length: _few_rows(x, length, key))

        def kept(length: int, bits: int) -> jax.Array:
            rows, entries = few_rows(length)
            return (levels.sent_energy(rows, entries, bits) + least) / whole(rows)

        of_first = lambda entries: _arrays.energy(x[:entries]) / whole(x)
        return functools.cache(kept), functools.cache(of_first)

    def _shares(self, looked: Any, message: Message) -> tuple[Any, Any]:
        """Return what rounding keeps of a row's energy, and what spared leaves have."""
        kept, of_first = looked
        spared = of_first(message.spared) if message.spared else 0.0
        return kept(self._row(message.n), self.bits), spared

    def share(self, looked: Any, bucket: Bucket, replicas: int) -> jax.Array:
        """Return the share of the energy that a step sends.

        It is exact for fewer than 512 whole rows, if none are spared or take turns. A
        part that is due is taken for as large as all others, and spared leaves as sent.
        Where all rows that are looked at are zeros, it is 1.
        """
        message = self.message(bucket, replicas)
        kept, small = self._shares(looked, message)
        return small + (1 - small) * kept * message.part / (bucket.n - message.spared)

    def waits(self, looked: Any, bucket: Bucket, replicas: int) -> jax.Array:
        """Return the steps that an entry waits: half of the turns, and for rounding.

        What rounding leaves to the next exchange counts a tenth.
        """
        message = self.message(bucket, replicas)
        kept, small = self._shares(looked, message)
        again = ROUNDING_WAITS * (1 - kept) / kept
        return (1 - small) * ((message.turns - 1) / 2 + message.turns * again)


def _owners(replicas: int) -> int:
    """Return among how many replicas rows are divided: one, if there is no need."""
    return 1 if replicas <= 2 else replicas


def _few_rows(x: jax.Array, length: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return all rows of a bucket, or a few of many, and the entries of each.

    These are all rows of a bucket with fewer than 512 whole ones. Of a larger one they
    are 256 to 383 rows at equal distances, so that a look costs little.
    """
    whole = x.size // length
    apart = whole // LOOKED_AT_ROWS
    if apart < 2:
        return _in_rows(x, length)
    rows = whole // apart
    groups = x[: rows * apart * length].reshape(rows, apart, length)
    first = (_arrays.draws(key)[0] % apart).astype(jnp.int32)
    some = jax.lax.dynamic_index_in_dim(groups, first, axis=1, keepdims=False)
    # Else XLA would find them in the leaves again, for everything that reads them.
    return _xla.once(some), jnp.full(rows, length, jnp.float32)


def _in_rows(part: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Return entries in rows, padded by zeros, and the entries of each row."""
    n, rows = part.size, -(-part.size // length)
    padded = jnp.pad(part, (0, rows * length - n)).reshape(rows, length)
    entries = np.minimum(n - length * np.arange(rows), length)
    return padded, jnp.asarray(entries, jnp.float32)


def _flat(rows: jax.Array, section: Section) -> jax.Array:
    """Return the entries of a section from its rows."""
    return rows.reshape(-1)[: section.entries]


def _round_mean(messages: jax.Array, section: Section, comm: Comm) -> Rounded:
    """Round the mean over replicas of the rows that this replica owns.

    Args:
      messages: `[replicas, words]` uint32, what each has sent of these rows.
      section: to which they belong.
      comm: the other replicas.
    """
    n, length, rows = section.entries, section.length, section.rows(comm.replicas)
    mean = levels.mean(messages, rows, section.bits)
    entries = jnp.full_like(mean, length, shape=(rows,))
    if n % length:
        left = n - comm.replica() * rows * length
        inside = jnp.clip(left - length * jnp.arange(rows), 0, length)
        is_entry = jnp.arange(length)[None] < inside[:, None]
        mean, entries = jnp.where(is_entry, mean, 0), inside.astype(jnp.float32)
    return levels.round_rows(mean, entries, section.bits)


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
