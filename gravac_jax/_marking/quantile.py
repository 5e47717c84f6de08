"""The magnitude that k entries reach, by counting instead of sorting."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _tree
from gravac_jax._marking import compaction

SMALLEST = 1  # bits of the smallest denormal: every entry but a zero reaches it
BEYOND = 0x7F800000  # bits of infinity: no finite entry reaches it
OCTAVE = 2**23  # bits from one power of two to the next
ALL = 2**31 - 1

SAMPLE_ENTRIES = 2**16  # of a bucket, arbitrary: 1% off in the count at factor 10
FEWER_ENTRIES = 2**14  # of the sample, for counts of which these hold at least
FEWEST_ENTRIES = 2**6  # so many, arbitrary: 1% off in the energy
SPREAD = 4  # standard deviations of a count in the sample
SURVIVORS_SHARE = 32  # one entry in so many may lie within the bracket; arbitrary


class Cut(NamedTuple):
    """Where the k largest begin, for one k or several.

    Attributes:
      bits: int32, the k-th largest magnitude in bits, which at least k entries reach
        and, but for ties, no more; `SMALLEST` where fewer than k are not zero.
      ties: int32, how many entries of exactly this magnitude are among the k; `ALL` if
        all are.
    """

    bits: jax.Array
    ties: jax.Array


class _Search(NamedTuple):
    low: jax.Array  # at least k entries reach it,
    low_count: jax.Array  # so many
    high: jax.Array  # fewer do
    high_count: jax.Array
    tries: jax.Array


def kth(
    bits: jax.Array,
    k: jax.Array,
    low: jax.Array | int = 0,
    high: jax.Array | int = BEYOND,
) -> Cut:
    """Where the k largest begin, for several k at once.

    Counts fall like a power of the magnitude in the tails of gradients, and magnitude
    bits grow like its logarithm, so log counts are interpolated linearly: five to seven
    tries do on gradients. From the eighth on every second try halves the bracket, so
    that the search ends after 70 whatever comes.

    Args:
      bits: `[n]` int32, magnitude bits.
      k: `[m]` int32, in [1, n].
      low: tried first: a threshold that more than k are likely to reach,
      high: then one that fewer are. If they do not, only time is lost.

    Returns:
      The cuts, `[m]`.
    """

    def is_open(s: _Search) -> jax.Array:
        return (s.low_count != k) & (s.high - s.low > 1)

    def interpolate(s: _Search) -> jax.Array:
        log = lambda count: jnp.log(count.astype(jnp.float32) + 0.5)
        share = (log(s.low_count) - log(k)) / (log(s.low_count) - log(s.high_count))
        share = jnp.where((s.tries > 7) & (s.tries % 2 == 0), 0.5, share)
        width = s.high - s.low
        step = (share * width.astype(jnp.float32)).astype(jnp.int32)
        return s.low + jnp.clip(step, 1, width - 1)

    def narrow(s: _Search) -> _Search:
        asked = jnp.where(s.tries == 0, low, jnp.where(s.tries == 1, high, 0))
        is_inside = (asked > s.low) & (asked < s.high)
        middle = jnp.where(is_inside, asked, interpolate(s)).astype(jnp.int32)
        middle = jnp.where(is_open(s), middle, s.low)
        count = jax.vmap(lambda t: compaction.count(bits >= t))(middle)
        is_reached = count >= k
        return _Search(
            low=jnp.where(is_reached, middle, s.low),
            low_count=jnp.where(is_reached, count, s.low_count),
            high=jnp.where(is_reached, s.high, middle),
            high_count=jnp.where(is_reached, s.high_count, count),
            tries=s.tries + 1,
        )

    # The zeros of the counts would not vary over the axis of replicas: bits do.
    zero = jnp.zeros_like(k) + 0 * bits[0]
    start = _Search(zero, zero + bits.size, zero + BEYOND, zero, zero[0])
    found = jax.lax.while_loop(lambda s: jnp.any(is_open(s)), narrow, start)
    is_tied = (found.low_count > k) & (found.low > 0)
    ties = jnp.where(is_tied, k - found.high_count, ALL)
    # Where the search happened to stop depends on how logarithms are rounded.
    reached = jax.vmap(lambda t: jnp.min(jnp.where(bits >= t, bits, BEYOND)))(found.low)
    return Cut(jnp.maximum(reached, SMALLEST), ties)


def _kth(bits: jax.Array, k: jax.Array) -> Cut:
    return jax.tree.map(lambda x: x[0], kth(bits, k[None]))


class Bracket(NamedTuple):
    """What a sample says of the k-th magnitude, in bits.

    Attributes:
      low: `[]` int32, below it, very likely.
      middle: `[]` int32, about it.
      high: `[]` int32, above it, very likely.
      slope: `[]` float32, near it the magnitude falls like the count to this power.
    """

    low: jax.Array
    middle: jax.Array
    high: jax.Array
    slope: jax.Array


def thresholds(
    sampled: jax.Array, n: int, counts: tuple[int, ...], looks: jax.Array | bool = True
) -> jax.Array:
    """What a sample says of the magnitudes that many counts of entries reach.

    Args:
      sampled: `[m]` float32, of a bucket of `n` entries.
      n: static.
      counts: static.
      looks: `[]` bool, whether they will be used; static True if always.

    Returns:
      `[counts]` int32, magnitude bits.
    """
    every = compaction.magnitude_bits(sampled)
    fewer = every[:: max(1, every.size // FEWER_ENTRIES)]
    are_few = np.array([j * fewer.size >= FEWEST_ENTRIES * n for j in counts], bool)
    found = jnp.zeros(len(counts), jnp.int32)
    for bits, chosen in (fewer, are_few), (every, ~are_few):
        if (places := np.flatnonzero(chosen)).size:
            ranks = [round(counts[i] * bits.size / n) for i in places]
            reached = _reached_if(looks, bits, jnp.asarray(ranks, jnp.int32))
            found = found.at[places].set(reached)
    return found


def bracket(bucket: jax.Array, k: jax.Array, key: jax.Array) -> Bracket:
    """What a sample of `bucket` (`[n]`) says of its k-th magnitude."""
    sampled = bucket.at[sample_places(bucket.size, key)].get(mode="promise_in_bounds")
    return bracket_from(sampled, bucket.size, k)


def bracket_from(
    sampled: jax.Array, n: int, k: jax.Array, is_used: jax.Array | bool = True
) -> Bracket:
    """What a sample says of the k-th magnitude.

    Args:
      sampled: `[m]` float32, of a bucket of `n` entries.
      n: static.
      k: `[]` int32.
      is_used: `[]` bool; if not, the bracket is beyond all entries.
    """
    bits = compaction.magnitude_bits(sampled)
    share = bits.size / n
    rank = k.astype(jnp.float32) * share
    # A sample that is the whole bucket errs in nothing.
    spread = SPREAD * jnp.sqrt(rank * (1 - share)) + float(share < 1)
    floats = jnp.stack([rank + spread, rank, rank - spread])
    ranks = jnp.round(floats).astype(jnp.int32)
    low, middle, high = _reached_if(is_used, bits, ranks)
    high = jnp.where(ranks[-1] < 1, BEYOND, high)
    # Bits of magnitudes are their logarithm, nearly.
    fall = (middle - low).astype(jnp.float32) / OCTAVE
    slope = fall / jnp.maximum(jnp.log2(floats[0] / floats[1]), 1e-6)
    return Bracket(low, middle, high, slope)


def _reached_if(
    is_used: jax.Array | bool, bits: jax.Array, ranks: jax.Array
) -> jax.Array:
    """Magnitude bits that so many of `bits` reach; beyond all if nobody uses them."""

    def reached() -> jax.Array:
        found = kth(bits, jnp.clip(ranks, 1, bits.size)).bits
        return jnp.where(ranks > bits.size, SMALLEST, found)

    # A constant would not vary over the axis of replicas: bits do.
    beyond = jnp.full(ranks.size, BEYOND) + 0 * bits[0]
    if isinstance(is_used, bool):
        return reached() if is_used else beyond
    return jax.lax.cond(is_used, reached, lambda: beyond)


def sample_places(n: int, key: jax.Array, entries: int = SAMPLE_ENTRIES) -> jax.Array:
    """int32, the places of about `entries` of n entries, evenly spaced."""
    # An odd distance does not fall into step with the rows of matrices, most of which
    # are multiples of powers of two.
    stride = max(1, n // entries) | 1
    start = _tree.draws(key)[0] % min(stride, n)
    places = stride * jnp.arange(max(1, n // stride), dtype=jnp.int32)
    return places + start.astype(jnp.int32)


def kth_between(bits: jax.Array, k: jax.Array, low: jax.Array, high: jax.Array) -> Cut:
    """`kth` of one k in two passes, if at least k reach `low` and fewer `high`.

    The entries between are compacted and searched alone; where there are too many of
    these, or the bracket missed, all entries are.
    """
    capacity = -(-bits.size // SURVIVORS_SHARE)
    above = compaction.count(bits >= high)
    between = compaction.mark((bits >= low) & (bits < high))
    survivors = bits.at[compaction.select(between, capacity)].get(
        mode="fill", fill_value=0
    )
    rank = k - above
    is_caught = (rank > 0) & (rank <= between.total) & (between.total <= capacity)
    cut = _kth(survivors, jnp.clip(rank, 1, capacity))
    return _tree.only_if(~is_caught, lambda _: _kth(bits, k), cut)


def largest(bits: jax.Array, k: jax.Array | int) -> jax.Array:
    """`[n]` bool: the k largest of `bits`; of equal ones the earlier."""
    return reaching(bits, _kth(bits, jnp.asarray(k, jnp.int32)))


def reaching(bits: jax.Array, cut: Cut) -> jax.Array:
    """`[n]` bool: what reaches the cut, and of ties the earlier entries."""

    def place_of_last_tie(_: jax.Array) -> jax.Array:
        ties = compaction.mark(bits == cut.bits)
        return compaction.find(ties, cut.ties[None] - 1)[0]

    entries = jnp.arange(bits.size, dtype=jnp.int32)
    none_is_too_many = cut.ties * 0 + bits.size
    last = _tree.only_if(cut.ties < ALL, place_of_last_tie, none_is_too_many)
    return (bits > cut.bits) | ((bits == cut.bits) & (entries <= last))
