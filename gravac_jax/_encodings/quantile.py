"""The magnitude that k entries reach, by counting instead of sorting."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._encodings import entries

SMALLEST = 1  # bits of the smallest denormal: every entry but a zero reaches it
BEYOND = 0x7F800000  # bits of infinity: no finite entry reaches it
OCTAVE = 2**23  # bits from one power of two to the next
ALL = 2**31 - 1  # stands for "every tie is among the k"

SAMPLE_ENTRIES = 2**16  # of a bucket; arbitrary: a count is 1% off at factor 10
SPREAD = 4  # standard deviations of a count in the sample
SURVIVORS_SHARE = 32  # at most one entry in 32 may lie within a bracket; arbitrary


class Cut(NamedTuple):
    """The border of the k largest, for one k or several.

    Attributes:
      bits: int32, magnitude bits of the k-th largest entry. At least k entries reach
        it and, apart from ties, no more; `SMALLEST` if fewer than k are not zero.
      ties: int32, how many entries of exactly this magnitude are among the k; `ALL` if
        all of them are.
    """

    bits: jax.Array
    ties: jax.Array


class _Search(NamedTuple):
    low: jax.Array  # at least k entries reach it
    low_count: jax.Array  # how many
    high: jax.Array  # fewer than k entries reach it
    high_count: jax.Array  # how many
    tries: jax.Array


def kth(
    bits: jax.Array,
    k: jax.Array,
    low: jax.Array | int = 0,
    high: jax.Array | int = BEYOND,
) -> Cut:
    """Find the border of the k largest, for several k at once.

    In the tail of a gradient counts fall like a power of the magnitude, and magnitude
    bits grow like its logarithm. So log counts are interpolated linearly: five to seven
    tries are enough on gradients. From the eighth on every second try halves the
    bracket, so that the search ends after at most 70.

    Args:
      bits: `[n]` int32, magnitude bits.
      k: `[m]` int32, in [1, n].
      low: the first try, a threshold that more than k entries are likely to reach.
      high: the second try, a threshold that fewer are likely to reach. A wrong guess
        only costs time.

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
        count = jax.vmap(lambda t: entries.count(bits >= t))(middle)
        is_reached = count >= k
        return _Search(
            low=jnp.where(is_reached, middle, s.low),
            low_count=jnp.where(is_reached, count, s.low_count),
            high=jnp.where(is_reached, s.high, middle),
            high_count=jnp.where(is_reached, s.high_count, count),
            tries=s.tries + 1,
        )

    # Plain zeros would not be marked as varying over the replicas; bits are.
    zero = jnp.zeros_like(k) + 0 * bits[0]
    start = _Search(zero, zero + bits.size, zero + BEYOND, zero, zero[0])
    found = jax.lax.while_loop(lambda s: jnp.any(is_open(s)), narrow, start)
    is_tied = (found.low_count > k) & (found.low > 0)
    ties = jnp.where(is_tied, k - found.high_count, ALL)
    # Where the search stops depends on how logarithms round; this does not.
    reached = jax.vmap(lambda t: jnp.min(jnp.where(bits >= t, bits, BEYOND)))(found.low)
    return Cut(jnp.maximum(reached, SMALLEST), ties)


def _kth(bits: jax.Array, k: jax.Array) -> Cut:
    return jax.tree.map(lambda x: x[0], kth(bits, k[None]))


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


def bracket(bucket: jax.Array, k: jax.Array, key: jax.Array) -> Bracket:
    """Estimate the k-th largest magnitude of `bucket` (`[n]`) from a sample of it."""
    places = sample_places(bucket.size, key)
    sampled = bucket.at[places].get(mode="promise_in_bounds")
    bits = _arrays.magnitude_bits(sampled)
    share = bits.size / bucket.size
    rank = k.astype(jnp.float32) * share
    # A sample that is the whole bucket has no error.
    spread = SPREAD * jnp.sqrt(rank * (1 - share)) + float(share < 1)
    floats = jnp.stack([rank + spread, rank, rank - spread])
    ranks = jnp.round(floats).astype(jnp.int32)
    low, middle, high = _reached(bits, ranks)
    high = jnp.where(ranks[-1] < 1, BEYOND, high)
    # Bits of magnitudes are nearly their logarithm.
    fall = (middle - low).astype(jnp.float32) / OCTAVE
    slope = fall / jnp.maximum(jnp.log2(floats[0] / floats[1]), 1e-6)
    return Bracket(low, middle, high, slope)


def _reached(bits: jax.Array, ranks: jax.Array) -> jax.Array:
    """Return magnitude bits that `ranks` of `bits` reach."""

    def searched(bits: jax.Array, k: jax.Array) -> jax.Array:
        return kth(bits, k).bits

    def at_ranks(bits: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.maximum(jnp.sort(bits)[bits.size - k], SMALLEST)

    k = jnp.clip(ranks, 1, bits.size)
    # A sort takes an accelerator less time than its host to read how a search goes.
    found = jax.lax.platform_dependent(bits, k, cpu=searched, default=at_ranks)
    return jnp.where(ranks > bits.size, SMALLEST, found)


def sample_places(n: int, key: jax.Array, entries: int = SAMPLE_ENTRIES) -> jax.Array:
    """Return the places of about `entries` of n entries, evenly spaced: int32."""
    # An odd stride does not fall into step with the rows of matrices, whose lengths are
    # mostly multiples of powers of two.
    stride = max(1, n // entries) | 1
    start = _arrays.draws(key)[0] % min(stride, n)
    places = stride * jnp.arange(max(1, n // stride), dtype=jnp.int32)
    return places + start.astype(jnp.int32)


def kth_between(bits: jax.Array, k: jax.Array, low: jax.Array, high: jax.Array) -> Cut:
    """Find the border of the k largest in two passes, given a bracket.

    The entries between `low` and `high` are compacted and searched alone. If there are
    too many of them, or the bracket missed, all entries are searched.
    """
    capacity = -(-bits.size // SURVIVORS_SHARE)
    above = entries.count(bits >= high)
    between = entries.mark((bits >= low) & (bits < high))
    survivors = bits.at[entries.places(between, capacity)].get(
        mode="fill", fill_value=0
    )
    rank = k - above
    is_caught = (rank > 0) & (rank <= between.total) & (between.total <= capacity)
    cut = _kth(survivors, jnp.clip(rank, 1, capacity))
    return _arrays.only_if(~is_caught, lambda _: _kth(bits, k), cut)


def k_largest(bits: jax.Array, k: jax.Array | int) -> jax.Array:
    """Return a mask of the k largest of `bits`, of equal ones the earlier: `[n]`."""
    return at_or_above(bits, _kth(bits, jnp.asarray(k, jnp.int32)))


def at_or_above(bits: jax.Array, cut: Cut) -> jax.Array:
    """Return a mask of the entries that reach the cut, of ties the earlier: `[n]`."""

    def place_of_last_tie(_: jax.Array) -> jax.Array:
        ties = entries.mark(bits == cut.bits)
        return entries.places_of_ranks(ties, cut.ties[None] - 1)[0]

    places = jnp.arange(bits.size, dtype=jnp.int32)
    none_is_too_many = cut.ties * 0 + bits.size
    last = _arrays.only_if(cut.ties < ALL, place_of_last_tie, none_is_too_many)
    return (bits > cut.bits) | ((bits == cut.bits) & (places <= last))
