"""Compaction: from a mask over n entries to the indices of k, without sorting.

The mask is packed into 32-bit words, one pass over the entries; what follows touches
n / 32 words and k entries. The word of each rank comes from a running count (each word
marks the slot at which its entries begin), the bit in the word from five halvings with
a population count (rank and select: Jacobson, FOCS 1989; Vigna, WEA 2008).

Magnitudes are compared as the bits of floats without their sign: integers in the same
order, denormals included, which float comparisons may flush to zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax._payload import PAD

WORD_BITS = 32


class Marks(NamedTuple):
    """Which entries of a vector are marked.

    Attributes:
      words: `[ceil(n / 32)]` uint32, bit b of word w stands for entry 32 w + b.
      starts: `[ceil(n / 32)]` int32, how many marked entries come before each word.
      total: `[]` int32, how many are marked.
    """

    words: jax.Array
    starts: jax.Array
    total: jax.Array


def magnitude_bits(x: jax.Array) -> jax.Array:
    """int32, the shape of `x` (float32): in the order of |x|."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits & jnp.int32(0x7FFFFFFF)


def from_bits(bits: jax.Array) -> jax.Array:
    """float32 magnitudes; the inverse of `magnitude_bits` but for the sign."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def mark(mask: jax.Array) -> Marks:
    """Pack `mask` (`[n]` bool) and count."""
    # Without the barrier XLA computes the words anew wherever they are needed.
    return marks_of(jax.lax.optimization_barrier(pack(mask)))


def marks_of(words: jax.Array) -> Marks:
    """Count the marked entries of `words`."""
    counts = jax.lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    return Marks(words, ends - counts, ends[-1])


def count(mask: jax.Array) -> jax.Array:
    """`[]` int32, how many of `mask` (`[n]` bool) are set; faster than `jnp.sum`."""
    return count_bits(pack(mask))


def count_bits(words: jax.Array) -> jax.Array:
    """`[]` int32, how many bits of `words` (uint32) are set."""
    counts = jax.lax.population_count(words).astype(jnp.int32)
    return jnp.sum(jax.lax.optimization_barrier(counts), dtype=jnp.int32)


def pack(mask: jax.Array) -> jax.Array:
    """`[ceil(n / 32)]` uint32, the bits of `mask` (`[n]` bool)."""
    n = mask.shape[0]
    whole = n // WORD_BITS * WORD_BITS
    weights = jnp.uint32(1) << jnp.arange(WORD_BITS, dtype=jnp.uint32)
    pack_rows = lambda x: jnp.sum(
        jnp.where(x.reshape(-1, WORD_BITS), weights[None], jnp.uint32(0)),
        axis=1,
        dtype=jnp.uint32,
    )
    if whole == n:
        return pack_rows(mask)
    rest = jnp.pad(mask[whole:], (0, -n % WORD_BITS))
    return jnp.concatenate([pack_rows(mask[:whole]), pack_rows(rest)])


def thin(marks: Marks, k: jax.Array | int, gap: jax.Array | int) -> Marks:
    """At most `k` (`[]` int32) of the marks.

    A run of as many as there are too many is taken away: from the gap-th mark on, going
    round to the front. With `gap` drawn uniformly from [0, count) every marked entry
    has the same chance to stay.
    """
    total = marks.total
    excess = jnp.maximum(total - k, 0)
    wrapped = jnp.maximum(gap + excess - total, 0)  # so many are taken from the front
    before = jnp.minimum(marks.starts, wrapped) + jnp.clip(
        marks.starts - gap, 0, excess - wrapped
    )
    # Places of the first mark of the run, and of the first one after it.
    ranks = jnp.stack([gap, jnp.where(wrapped > 0, wrapped, gap + excess)])
    ends = jnp.where(ranks < total, find(marks, ranks), PAD)
    begin, end = (_bits_below(marks, place) for place in ends)
    outside = jnp.where(wrapped > 0, begin & ~end, begin | ~end)
    words = jnp.where(excess > 0, marks.words & outside, marks.words)
    starts = marks.starts - before
    # Else XLA computes both anew for every entry that asks for its word.
    words, starts = jax.lax.optimization_barrier((words, starts))
    return Marks(words, starts, total - excess)


def _bits_below(marks: Marks, place: jax.Array) -> jax.Array:
    """`[words]` uint32, the bits of the entries before `place`."""
    words = jnp.arange(marks.words.size, dtype=jnp.int32)
    width = jnp.clip(place - words * WORD_BITS, 0, WORD_BITS)
    ones = (jnp.uint32(1) << (width % WORD_BITS).astype(jnp.uint32)) - 1
    return jnp.where(width == WORD_BITS, jnp.uint32(2**32 - 1), ones)


def select(marks: Marks, k: int) -> jax.Array:
    """`[k]` int32, the indices of the first `k` marked entries, rising.

    Where there are fewer, `PAD` and above follow.
    """
    slots = jnp.arange(k, dtype=jnp.int32)
    zeros = jnp.zeros(k, jnp.int32)
    # How many words have their first entry at each slot.
    begins = zeros.at[marks.starts].add(1, mode="drop", indices_are_sorted=True)
    mine = jnp.cumsum(begins, dtype=jnp.int32) - 1
    rank = slots - marks.starts.at[mine].get(mode="promise_in_bounds")
    bit = _select_in_word(marks.words.at[mine].get(mode="promise_in_bounds"), rank)
    return jnp.where(slots < marks.total, mine * WORD_BITS + bit, PAD + slots)


def is_marked(marks: Marks, places: jax.Array) -> jax.Array:
    """bool, the shape of `places`: whether each of these entries is marked."""
    words = marks.words.at[places // WORD_BITS].get(mode="promise_in_bounds")
    return (words >> (places % WORD_BITS).astype(jnp.uint32)) & 1 == 1


def clear(x: jax.Array, marks: Marks, rest: jax.Array | int = 0) -> jax.Array:
    """`x` (`[n]`) with `rest`, zeros by default, where it is marked."""
    bits = jnp.arange(WORD_BITS, dtype=jnp.uint32)
    is_marked = (marks.words[:, None] >> bits[None]) & 1
    return jnp.where(is_marked.reshape(-1)[: x.shape[0]] == 1, rest, x)


def find(marks: Marks, ranks: jax.Array) -> jax.Array:
    """int32, the indices of the marked entries of these few `ranks` (`[m]`)."""
    is_before = marks.starts[None] <= ranks[:, None]
    word = jnp.maximum(jnp.sum(is_before, axis=1, dtype=jnp.int32) - 1, 0)
    rank = ranks - marks.starts[word]
    return word * WORD_BITS + _select_in_word(marks.words[word], rank)


def _select_in_word(word: jax.Array, rank: jax.Array) -> jax.Array:
    """int32, the place of the rank-th set bit of each `word`."""
    rank, place = rank.astype(jnp.uint32), jnp.zeros_like(word)
    for width in (16, 8, 4, 2, 1):
        low = word & jnp.uint32((1 << width) - 1)
        below = jax.lax.population_count(low)
        is_above = rank >= below
        rank = jnp.where(is_above, rank - below, rank)
        place = jnp.where(is_above, place + width, place)
        word = jnp.where(is_above, word >> width, low)
    return place.astype(jnp.int32)
