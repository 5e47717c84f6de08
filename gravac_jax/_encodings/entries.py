"""Entries of a bucket: mark them, find them without sorting, take them, add them up.

A mask over n entries is packed into 32-bit words in one pass; everything after that
touches n / 32 words and k entries. A running count gives the word of each rank (each
word marks the slot at which its entries begin), and five halvings with a population
count give the bit within the word (rank and select: Jacobson, FOCS 1989; Vigna, WEA
2008).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

WORD_BITS = 32

# No bucket has more entries (`_buckets.py`). The index of an empty slot is PAD + slot:
# outside every bucket, never repeated, and within int32.
PAD = 2**30

MAX_UNROLLED = 16  # payloads; arbitrary


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
    return marks_of(jax.lax.optimization_barrier(pack(mask)))


def marks_of(words: jax.Array) -> Marks:
    """Return the marks that `words` (`[ceil(n / 32)]` uint32) hold."""
    counts = jax.lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    return Marks(words, ends - counts, ends[-1])


def count(mask: jax.Array) -> jax.Array:
    """Count the set entries of `mask` (`[n]` bool); faster than `jnp.sum`."""
    return count_bits(pack(mask))


def count_bits(words: jax.Array) -> jax.Array:
    """Count the set bits of `words` (uint32), `[]` int32."""
    counts = jax.lax.population_count(words).astype(jnp.int32)
    return jnp.sum(jax.lax.optimization_barrier(counts), dtype=jnp.int32)


def pack(mask: jax.Array) -> jax.Array:
    """Pack `mask` (`[n]` bool) into `[ceil(n / 32)]` uint32."""
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
    """Return at most `k` (`[]` int32) of the marks.

    The surplus is removed as one run that begins at the gap-th mark and wraps around to
    the front. If `gap` is uniform in [0, count), every marked entry has the same chance
    to stay.
    """
    total = marks.total
    excess = jnp.maximum(total - k, 0)
    wrapped = jnp.maximum(gap + excess - total, 0)  # removed from the front
    before = jnp.minimum(marks.starts, wrapped) + jnp.clip(
        marks.starts - gap, 0, excess - wrapped
    )
    # Places of the first mark of the run, and of the first one after it.
    ranks = jnp.stack([gap, jnp.where(wrapped > 0, wrapped, gap + excess)])
    ends = jnp.where(ranks < total, places_of_ranks(marks, ranks), PAD)
    begin, end = (_bits_below(marks, place) for place in ends)
    outside = jnp.where(wrapped > 0, begin & ~end, begin | ~end)
    words = jnp.where(excess > 0, marks.words & outside, marks.words)
    starts = marks.starts - before
    # Without the barrier XLA computes both again for every entry that needs its word.
    words, starts = jax.lax.optimization_barrier((words, starts))
    return Marks(words, starts, total - excess)


def _bits_below(marks: Marks, place: jax.Array) -> jax.Array:
    """Return words with the bits of all entries before `place` set."""
    words = jnp.arange(marks.words.size, dtype=jnp.int32)
    width = jnp.clip(place - words * WORD_BITS, 0, WORD_BITS)
    ones = (jnp.uint32(1) << (width % WORD_BITS).astype(jnp.uint32)) - 1
    return jnp.where(width == WORD_BITS, jnp.uint32(2**32 - 1), ones)


def places(marks: Marks, k: int) -> jax.Array:
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


class Payload(NamedTuple):
    """Selected entries of a bucket, followed by empty slots.

    Attributes:
      values: `[k]` float32; 0 in an empty slot.
      indices: `[k]` int32, the place of each value in the bucket, rising. `PAD` or
        above in an empty slot.
    """

    values: jax.Array
    indices: jax.Array


def take(bucket: jax.Array, indices: jax.Array) -> Payload:
    """Return the entries of `bucket` (`[n]`) at `indices` (`[k]`, as in a payload)."""
    values = bucket.at[indices].get(
        mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
    )
    return Payload(values, indices)


def mean_of_payloads(
    buffers: jax.Array,
    decode: Callable[[jax.Array], Payload],
    zeros: jax.Array,
) -> jax.Array:
    """Return the mean over replicas of the payloads in `buffers`.

    Payloads are added one after the other, in the order of the replicas and without
    repeated indices. So the sum does not depend on the order in which a device runs its
    threads, and replicas stay bit-identical. Each value is divided before it is added:
    k divisions, not n.

    Args:
      buffers: `[replicas, words]`, one encoded payload a row.
      decode: returns the payload of one row.
      zeros: `[n]` float32.

    Returns:
      `[n]` float32.
    """
    replicas = buffers.shape[0]

    def add(replica: jax.Array | int, total: jax.Array) -> jax.Array:
        buffer = jax.lax.dynamic_index_in_dim(buffers, replica, keepdims=False)
        payload = decode(buffer)
        return total.at[payload.indices].add(
            payload.values / replicas,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=True,
        )

    looped = lambda zeros: jax.lax.fori_loop(0, replicas, add, zeros)

    def unrolled(total: jax.Array) -> jax.Array:
        # A GPU would copy the total into a loop.
        for replica in range(replicas):
            total = add(replica, total)
        return total

    if replicas > MAX_UNROLLED:
        return looped(zeros)
    return jax.lax.platform_dependent(zeros, cpu=looped, default=unrolled)
