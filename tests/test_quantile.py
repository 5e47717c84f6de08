"""Thresholds are found where sorting has them, by counting alone."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gravac_jax._encodings import selection
from gravac_jax._encodings.selection import ALL, BEYOND, SMALLEST

bracket = jax.jit(selection.bracket)
bracket_by_each = jax.jit(jax.vmap(selection.bracket, (None, None, 0)))
kth = jax.jit(selection.kth)
kth_between = jax.jit(selection.kth_between)
k_largest = jax.jit(selection.k_largest)
at_or_above = jax.jit(selection.at_or_above)
at_or_above_each = jax.jit(jax.vmap(selection.at_or_above, (None, 0)))
sample_places = jax.jit(jax.vmap(selection.sample_places, (None, 0)), static_argnums=0)

N = 400
RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal(N)
CASES = {
    "normal": NORMAL,
    "heavy tails": RNG.standard_t(1.5, N),
    "all equal": np.full(N, -2.5),
    "zeros of both signs": np.copysign(0, NORMAL),
    "mostly zeros": np.where(RNG.random(N) < 0.2, NORMAL, 0),
    "two values": np.where(NORMAL < 0.5, 1, -3),
    "one huge entry": np.where(np.arange(N) == 17, 2.0**127, NORMAL),
    "denormals": NORMAL * 2.0**-140,
    "many ties": np.round(4 * NORMAL),
    "both ends of the range": np.where(NORMAL < 0.5, 2.0**-149, -(2.0**127)),
}
KS = np.int32([1, 2, 37, 123, N // 2, N - 1, N])

# The same number of entries below each power of two, in bits: no interpolation of
# logarithms comes near to it.
STEEP = np.repeat(2 ** np.arange(30), 4)
CRUEL = {
    "powers of two": STEEP,
    "powers of two from above": BEYOND - 1 - STEEP,
    "both ends": np.repeat([1, BEYOND - 1], 60),
}

INTEGERS = st.integers(0, 4) | st.integers(0, 2**30) | st.integers(0, BEYOND - 1)
HINTS = st.integers(-(2**31), 2**31 - 1)


def bits_of(x):
    return np.abs(np.float32(x)).view(np.int32)


def is_largest(bits, k):
    # Python sorts stably: of equal ones the earlier comes first.
    order = sorted(range(len(bits)), key=lambda i: -int(bits[i]))[:k]
    chosen = np.zeros(len(bits), bool)
    chosen[[i for i in order if bits[i]]] = True
    return chosen


def check(bits, ks, cuts):
    """Each cut is where the k largest begin, and `at_or_above` marks the k largest."""
    for k, bound, ties in zip(ks, *map(np.asarray, cuts), strict=True):
        value = sorted(bits, reverse=True)[k - 1]
        if value == 0:
            assert (bound, ties) == (SMALLEST, ALL)
        elif sum(bits >= bound) > k:
            assert (bound, ties) == (value, k - sum(bits > value))
        else:
            assert sum(bits >= bound) == k
            assert ties == ALL
    expected = [is_largest(bits, k) for k in ks]
    assert np.array_equal(at_or_above_each(bits, cuts), expected)


@pytest.mark.parametrize("case", CASES)
def test_cuts_are_where_sorting_has_them_whatever_the_hints(case):
    bits = bits_of(CASES[case])
    lowest, middle, highest = map(int, np.sort(bits)[[0, N // 2, -1]])
    for low, high in [
        (0, BEYOND),
        (middle, middle + 1),
        (lowest, highest),
        (highest, lowest),
        (highest + 1, highest + 2),
        (-ALL, -5),
        (BEYOND, ALL),
    ]:
        check(bits, KS, kth(bits, KS, np.int32(low), np.int32(high)))
    for k in KS:
        assert np.array_equal(k_largest(bits, k), is_largest(bits, k))


@hypothesis.settings(deadline=None)  # the first call compiles
@hypothesis.given(
    bits=st.lists(INTEGERS, min_size=30, max_size=30).map(np.int32),
    ks=st.lists(st.integers(1, 30), min_size=3, max_size=3).map(np.int32),
    low=HINTS.map(np.int32),
    high=HINTS.map(np.int32),
)
def test_it_finds_the_kth_of_any_integers_from_any_hint(bits, ks, low, high):
    check(bits, ks, kth(bits, ks, low, high))


@pytest.mark.parametrize("case", CRUEL)
def test_the_search_ends_after_70_tries_whatever_comes(case, monkeypatch):
    bits = np.int32(CRUEL[case])
    ks = np.int32([1, 2, 59, 60, 61, 119, 120])
    assert tries(monkeypatch, bits, ks) <= 70
    check(bits, ks, kth(bits, ks))


def tries(monkeypatch, *arguments):
    made = []

    def count(mask):
        made.append(mask)
        assert len(made) < 1000
        return jnp.sum(mask, dtype=jnp.int32)

    with monkeypatch.context() as patch, jax.disable_jit():
        patch.setattr(selection, "count", count)
        selection.kth(*map(jnp.asarray, arguments))
    return len(made)


WIDE = 2048  # entries, of which 64 may lie within a bracket
SORTED = {
    "different": np.sort(bits_of(RNG.standard_t(3, WIDE)))[::-1],
    "tied": np.sort(bits_of(np.round(64 * RNG.standard_normal(WIDE))))[::-1],
}
BETWEEN_K = 300
# Of the entry that is the low end, and of that which is the high end.
RANKS = {
    "good": (330, 270),
    "full": (334, 270),
    "low end exact": (300, 236),
    "too high": (250, 200),
    "too low": (420, 370),
    "one too wide": (335, 270),
    "upside down": (270, 330),
    "empty": (300, 300),
}


def between(entries, ranks):
    low, high = (SORTED[entries][rank - 1] for rank in RANKS[ranks])
    return np.random.default_rng(1).permutation(SORTED[entries]), low, high


@pytest.mark.parametrize("entries", SORTED)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_k_largest_are_found_whether_or_not_the_bracket_catches(entries, ranks):
    bits, low, high = between(entries, ranks)
    cut = kth_between(bits, np.int32(BETWEEN_K), low, high)
    assert np.array_equal(at_or_above(bits, cut), is_largest(bits, BETWEEN_K))


@pytest.mark.parametrize("k", [30, 3000])
def test_the_kth_of_many_lies_within_the_bracket_of_a_sample(k):
    bucket = np.random.default_rng(2).standard_normal(300_000).astype(np.float32)
    true = np.sort(bits_of(bucket))[-k]
    keys = jax.random.split(jax.random.key(0), 20)
    found = bracket_by_each(bucket, np.int32(k), keys)
    assert (found.low <= true).all()
    assert (true <= found.high).all()
    # And it is of use: few entries lie within.
    low, high = int(found.low[0]), int(found.high[0])
    inside = (bits_of(bucket) >= low) & (bits_of(bucket) < high)
    assert np.sum(inside) < 30 * np.sqrt(k)


@pytest.mark.parametrize("n", [1, 1000])
def test_the_bracket_of_a_bucket_that_is_its_own_sample_has_no_width(n):
    bucket = np.random.default_rng(n).permutation(n).astype(np.float32) + 1
    reached = lambda bound: np.sum(bits_of(bucket) >= bound)
    for k in {1, 2, n // 2, n - 1, n} & {*range(1, n + 1)}:
        found = bracket(bucket, np.int32(k), jax.random.key(0))
        assert reached(found.middle) == k
        assert found.low == found.middle == found.high
        assert found.slope == 0


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_the_slope_is_about_the_power_by_which_magnitudes_fall(power):
    falling = np.arange(1, 200_001, dtype=np.float32) ** -np.float32(power)
    shuffled = np.random.default_rng(4).permutation(falling)
    found = bracket(shuffled, np.int32(8000), jax.random.key(0))
    # Bits grow by 1.44 times as much as the logarithm, or by 0.72 times.
    assert 0.7 * power < found.slope < 1.5 * power


@pytest.mark.parametrize("n", [1, 65537, 200_000])
def test_sampled_places_rise_within_the_bucket(n):
    for places in np.asarray(sample_places(n, jax.random.split(jax.random.key(1), 5))):
        assert (np.diff(places) > 0).all()
        assert 0 <= places[0] <= places[-1] < n
        assert len(places) == n if n < 2 * 65536 else len(places) > 40_000


def test_over_many_keys_the_sample_does_not_prefer_the_front():
    n, stride = 200_000, 3
    keys = jax.random.split(jax.random.key(2), 300)
    places = np.asarray(sample_places(n, keys))
    assert abs(places.mean() - n / 2) < stride
    # Every entry has its turn, all about as often.
    assert (np.bincount(places[:, 0], minlength=stride) > 300 / stride / 1.5).all()
    assert np.unique(places).size >= n - stride
