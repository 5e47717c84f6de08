"""Find the largest entries of a bucket without sorting it, and mark them.

The magnitude that k entries reach is found by counting. A mask over n entries is packed
into 32-bit words in one pass; everything after that touches n / 32 words and k entries.
A running count gives the word of each rank (each word marks the slot at which its
entries begin), and five halvings with a population count give the bit within the word
(rank and select: Jacobson, FOCS 1989; Vigna, WEA 2008).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _xla

SMALLEST = 1  # bits of the smallest denormal: every entry but a zero reaches it
BEYOND = 0x7F800000  # bits of infinity: no finite entry reaches it
OCTAVE = 2**23  # bits from one power of two to the next

SAMPLE_ENTRIES = 2**16  # of a bucket; arbitrary: a count is 1% off at factor 10
SHARE_ENTRIES = 2**14  # of a bucket, from which shares are estimated; arbitrary
SPREAD = 4  # standard deviations of a count in the sample
WORD_BITS = 32

# No bucket has more entries (`bucketing.py`). The index of an empty slot is PAD + slot:
# outside every bucket, never repeated, and within int32.
PAD = 2**30


# Which magnitude is the k-th largest. -----------------------------------------------


def kth(bits: jax.Array, k: jax.Array) -> jax.Array:
    """Return the k-th largest of `bits` (`[n]`) for each `k` (`[m]`, int32): `[m]`.

    The search tries the highest bit first, and keeps each that k entries still reach.
    """

    def narrow(i: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | jnp.int32(2**30) >> i
        return jnp.where(jax.vmap(lambda x: count(bits >= x))(tried) >= k, tried, found)

    # Plain zeros would not be marked as varying over the replicas; bits are.
    return jax.lax.fori_loop(0, 31, narrow, jnp.zeros_like(k) + 0 * bits[0])


class Bracket(NamedTuple):
    """Bounds of the k-th largest magnitude, in bits, estimated from a sample.

    Attributes:
      low: `[]` int32, four standard deviations of the count below the estimate.
      middle: `[]` int32, the estimate.
      high: `[]` int32, four standard deviations above; `BEYOND` if the sample is too
        small to tell.
      slope: `[]` float32: near the k-th entry, the magnitude falls like the count to
        this power.
    """

    low: jax.Array
    middle: jax.Array
    high: jax.Array
    slope: jax.Array


def bracket(bucket: jax.Array, k: int, key: jax.Array) -> Bracket:
    """Estimate the k-th largest magnitude of `bucket` (`[n]`) from a sample of it."""
    places = sample_places(bucket.size, key)
    bits = _arrays.magnitude_bits(bucket.at[places].get(mode="promise_in_bounds"))
    share = bits.size / bucket.size
    rank = k * share
    # A sample that is the whole bucket has no error.
    spread = SPREAD * math.sqrt(rank * (1 - share)) + (share < 1)
    last, middle, first = (round(x) for x in (rank + spread, rank, rank - spread))
    ranks = jnp.clip(jnp.array([last, middle, first], jnp.int32), 1, bits.size)
    # A sort takes an accelerator less time than 31 passes.
    at_ranks = lambda bits, ranks: jnp.sort(bits)[bits.size - ranks]
    found = jax.lax.platform_dependent(bits, ranks, cpu=kth, default=at_ranks)
    low, middle, high = jnp.maximum(found, SMALLEST)
    low = jnp.where(last > bits.size, SMALLEST, low)
    high = jnp.where(first < 1, BEYOND, high)
    # Bits of magnitudes are nearly their logarithm.
    fall = (middle - low).astype(jnp.float32) / OCTAVE
    return Bracket(low, middle, high, fall / max(math.log2(1 + spread / rank), 1e-6))


def sample_places(n: int, key: jax.Array, entries: int = SAMPLE_ENTRIES) -> jax.Array:
    """Return the places of about `entries` of n entries, evenly spaced: int32."""
    # An odd stride does not fall into step with the rows of matrices, whose lengths are
    # mostly multiples of powers of two.
    stride = max(1, n // entries) | 1
    start = _arrays.draws(key)[0] % min(stride, n)
    places = stride * jnp.arange(max(1, n // stride), dtype=jnp.int32)
    return places + start.astype(jnp.int32)


def k_largest(bits: jax.Array, k: int) -> jax.Array:
    """Return a mask of the k largest of `bits`, of equal ones the earlier: `[n]`.

    Zeros are not among them.
    """
    bound = jnp.maximum(kth(bits, jnp.full(1, k, jnp.int32))[0], SMALLEST)
    room = k - count(bits > bound)
    ties = mark(bits == bound)
    place = lambda _: places_of_ranks(ties, room[None] - 1)[0]
    last = _xla.only_if(ties.total > room, place, 0 * room + bits.size)
    at = jnp.arange(bits.size, dtype=jnp.int32)
    return (bits > bound) | ((bits == bound) & (at <= last))


def energies_of_largest(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return running sums of the squares of a sample, the largest first, from 0 on."""
    places = sample_places(x.size, key, SHARE_ENTRIES)
    squares = jnp.sort(jnp.square(x.at[places].get(mode="promise_in_bounds")))
    return jnp.append(jnp.zeros(1, jnp.float32), jnp.cumsum(squares[::-1]))


def share_of_largest(sums: jax.Array, k: int, n: int) -> jax.Array:
    """Return the share of the energy of n entries that the k largest have."""
    # The sample may hold less than one of the k entries: interpolate linearly.
    ranks = jnp.arange(sums.size, dtype=jnp.float32)
    reached = jnp.interp(jnp.float32(k) * ((sums.size - 1) / n), ranks, sums)
    return jnp.minimum(reached / jnp.maximum(sums[-1], _arrays.SMALLEST_NORMAL), 1.0)


# Which entries are marked. ----------------------------------------------------------


class Marks(NamedTuple):
    """The marked entries of a vector.

    Attributes:
      words: `[ceil(n / 32)]` uint32, bit b of word w stands for entry 32 w + b.
      starts: `[ceil(n / 32)]` int32, how many marked entries come before each word.
      total: `[]` int32, how many are marked.
    """

    words: jax.Array
    starts: jax.Array
    total: jax.Array


def mark(mask: jax.Array) -> Marks:
    """Pack `mask` (`[n]` bool) and count the marked entries."""
    # Without the barrier XLA computes the words again wherever they are needed.
    return marks_of(_xla.once(pack(mask)))


def marks_of(words: jax.Array) -> Marks:
    """Return the marks that `words` (`[ceil(n / 32)]` uint32) hold."""
    counts = jax.lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    return Marks(words, ends - counts, ends[-1])


def count(mask: jax.Array) -> jax.Array:
    """Count the set entries of `mask` (`[n]` bool); faster than `jnp.sum`."""
    counts = jax.lax.population_count(pack(mask)).astype(jnp.int32)
    return jnp.sum(_xla.once(counts), dtype=jnp.int32)


def pack(mask: jax.Array) -> jax.Array:
    """Pack `mask` (`[n]` bool) into `[ceil(n / 32)]` uint32."""
    rows = jnp.pad(mask, (0, -mask.size % WORD_BITS)).reshape(-1, WORD_BITS)
    weights = jnp.uint32(1) << jnp.arange(WORD_BITS, dtype=jnp.uint32)
    bits = jnp.where(rows, weights[None], jnp.uint32(0))
    return jnp.sum(bits, axis=1, dtype=jnp.uint32)


def thin(marks: Marks, k: jax.Array | int, gap: jax.Array | int) -> jax.Array:
    """Return the words of at most `k` (`[]` int32) of the marks.

    The surplus is removed as one run that begins at the gap-th mark and wraps around to
    the front. If `gap` is uniform below `marks.total`, every marked entry has the same
    chance to stay.
    """
    excess = jnp.maximum(marks.total - k, 0)
    wrapped = jnp.maximum(gap + excess - marks.total, 0)  # removed from the front
    # Places of the first mark of the run, and of the first one after it.
    ranks = jnp.stack([gap, jnp.where(wrapped > 0, wrapped, gap + excess)])
    ends = jnp.where(ranks < marks.total, places_of_ranks(marks, ranks), PAD)
    begin, end = (_bits_below(marks, place) for place in ends)
    outside = jnp.where(wrapped > 0, begin & ~end, begin | ~end)
    return jnp.where(excess > 0, marks.words & outside, marks.words)


def _bits_below(marks: Marks, place: jax.Array) -> jax.Array:
    """Return words with the bits of all entries before `place` set."""
    words = jnp.arange(marks.words.size, dtype=jnp.int32)
    width = jnp.clip(place - words * WORD_BITS, 0, WORD_BITS)
    ones = (jnp.uint32(1) << (width % WORD_BITS).astype(jnp.uint32)) - 1
    return jnp.where(width == WORD_BITS, jnp.uint32(2**32 - 1), ones)


def places_of_first(marks: Marks, k: int) -> jax.Array:
    """Return the indices of the first `k` marked entries, rising: `[k]` int32.

    If fewer are marked, `PAD` and above fill the rest.
    """
    slots = jnp.arange(k, dtype=jnp.int32)
    zeros = jnp.zeros(k, jnp.int32)
    # The number of words whose first entry is at each slot.
    begins = zeros.at[marks.starts].add(1, mode="drop", indices_are_sorted=True)
    mine = jnp.cumsum(begins, dtype=jnp.int32) - 1
    rank = slots - marks.starts.at[mine].get(mode="promise_in_bounds")
    bit = _select_in_word(marks.words.at[mine].get(mode="promise_in_bounds"), rank)
    return jnp.where(slots < marks.total, mine * WORD_BITS + bit, PAD + slots)


def clear(x: jax.Array, marks: Marks, rest: jax.Array | int = 0) -> jax.Array:
    """Return `x` (`[n]`) with `rest`, by default 0, at the marked entries."""
    bits = jnp.arange(WORD_BITS, dtype=jnp.uint32)
    is_marked = (marks.words[:, None] >> bits[None]) & 1
    return jnp.where(is_marked.reshape(-1)[: x.shape[0]] == 1, rest, x)


def places_of_ranks(marks: Marks, ranks: jax.Array) -> jax.Array:
    """Return the indices of the marked entries of a few `ranks` (`[m]`), int32."""
    is_before = marks.starts[None] <= ranks[:, None]
    word = jnp.maximum(jnp.sum(is_before, axis=1, dtype=jnp.int32) - 1, 0)
    rank = ranks - marks.starts[word]
    return word * WORD_BITS + _select_in_word(marks.words[word], rank)


def _select_in_word(word: jax.Array, rank: jax.Array) -> jax.Array:
    """Return the place of the rank-th set bit of each `word`, int32."""
    rank, place = rank.astype(jnp.uint32), jnp.zeros_like(word)
    for width in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << width) - 1)
        below = jax.lax.population_count(low)
        is_above = rank >= below
        rank = jnp.where(is_above, rank - below, rank)
        place = jnp.where(is_above, place + width, place)
        word = jnp.where(is_above, word >> width, low)
    return place.astype(jnp.int32)
