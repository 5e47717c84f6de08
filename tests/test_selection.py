"""The largest entries are found where sorting has them, marked, and read in order."""

import itertools
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import AS_USERS, assert_same

from gravac_jax import _arrays
from gravac_jax._encodings import selection
from gravac_jax._encodings.selection import PAD, Marks

magnitude_bits = jax.jit(_arrays.magnitude_bits)
from_bits = jax.jit(lambda bits: bits.view(jnp.float32))
mark, clear = map(jax.jit, (selection.mark, selection.clear))
places = jax.jit(selection.places_of_first, static_argnums=1)
places_of_ranks = jax.jit(selection.places_of_ranks)
thin_by_each = jax.jit(jax.vmap(selection.thin, (None, None, 0)))
kth = jax.jit(selection.kth)
k_largest = jax.jit(selection.k_largest, static_argnums=1)
each_key = jax.vmap(selection.bracket, (None, None, 0))
bracket_by_each = jax.jit(each_key, static_argnums=1)
sample_places = jax.jit(jax.vmap(selection.sample_places, (None, 0)), static_argnums=0)
settings = hypothesis.settings(deadline=None)  # the first call compiles

# Marks. ----------------------------------------------------------------------------

every_size = pytest.mark.parametrize("n", [1, 32, 33, 97, 1000])


def masks_of(n):
    """Return `[masks, n]`: none, one, few, half, all but one and all are marked."""
    rng = np.random.default_rng(n)
    totals = (0, 1, n // 20, (n + 1) // 2, n - 1, n)
    return np.stack([rng.permutation(n) < total for total in totals])


def words_of(mask):
    """Return masks `[..., n]` as words of 32 bits."""
    mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
    return np.packbits(mask, axis=-1, bitorder="little").view("<u4")


@every_size
def test_marks_are_read_in_order(n):
    rng = np.random.default_rng(n)
    x = rng.integers(0, 2**32, n, np.uint32).view(np.float32)
    for mask in masks_of(n):
        marks, marked, total = mark(mask), np.flatnonzero(mask), mask.sum()
        before = np.int32([mask[:start].sum() for start in range(0, n, 32)])
        assert_same(marks, Marks(words_of(mask), before, np.int32(total)))
        for k in ((n + 1) // 2, n + 40):  # empty slots rise from PAD
            empty = PAD + np.arange(min(total, k), k)
            assert places(marks, k).tolist() == [*marked[:k], *empty]
        ranks = rng.permutation(n).astype(np.int32) % max(1, np.int32(total))
        if total:
            assert np.array_equal(places_of_ranks(marks, ranks), marked[ranks])
        assert_same(clear(x, marks), np.where(mask, np.float32(0), x))


@every_size
def test_a_run_of_marks_that_begins_at_the_gap_and_wraps_around_is_removed(n):
    for mask in masks_of(n):
        marks, marked, total = mark(mask), np.flatnonzero(mask), mask.sum()
        gaps = np.arange(n, dtype=np.int32)  # those from the total on do not count
        ranks_from_gap = (gaps[:total] - gaps[:total, None]) % max(1, total)
        for k in {0, 1, total // 2, total, total + 3}:
            stays = np.zeros((max(1, total), n), bool)
            stays[:total, marked] = ranks_from_gap >= total - k
            thinned = thin_by_each(marks, np.int32(k), gaps)
            assert_same(thinned[: len(stays)], words_of(stays))
            # Over all gaps every mark stays equally often.
            assert len(set(stays[:total, marked].sum(0).tolist())) <= 1


def test_nothing_is_sorted_and_only_words_are_scattered():
    n, k = 2**16, 1000
    program = jax.jit(lambda mask: selection.places_of_first(selection.mark(mask), k))
    assert updates(program, n) == [n // 32]
    # What this replaces scatters every entry, and is seen to.
    assert n in updates(jax.jit(lambda mask: jnp.nonzero(mask, size=k)[0]), n)


def updates(program, n):
    """Return how many updates each scatter of a compiled program makes."""
    text = program.lower(jnp.zeros(n, bool)).compile(AS_USERS).as_text()
    assert not re.search(r"\b(sort|top-?k)\b", text, re.I)
    shapes = re.findall(r"%?([\w.-]+)(?: =|:) \w+\[([\d,]*)\]", text)
    size = {name: math.prod(map(int, re.findall(r"\d+", x))) for name, x in shapes}
    return [size[name] for name in re.findall(r" scatter\(.*%([\w.-]+)\)", text)]


# The k largest. --------------------------------------------------------------------

EDGES = [0.0, 2.0**-149, 3 * 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 1.0]
FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from([*EDGES, np.inf])


@settings
@hypothesis.given(x=st.lists(FLOATS, min_size=8, max_size=8).map(np.float32))
def test_magnitude_bits_are_in_the_order_of_magnitudes_and_lead_back_to_them(x):
    bits = np.asarray(magnitude_bits(x))
    for i, j in itertools.product(range(8), repeat=2):
        assert (bits[i] < bits[j]) == (abs(x[i]) < abs(x[j]))
    assert_same(from_bits(bits), np.abs(x))


N = 400
RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal(N)
CASES = {
    "heavy tails": RNG.standard_t(1.5, N),
    "all equal": np.full(N, -2.5),
    "zeros of both signs": np.copysign(0, NORMAL),
    "mostly zeros": np.where(RNG.random(N) < 0.2, NORMAL, 0),
    "one huge entry": np.where(np.arange(N) == 17, 2.0**127, NORMAL),
    "denormals": NORMAL * 2.0**-140,
    "many ties": np.round(4 * NORMAL),
    "both ends of the range": np.where(NORMAL < 0.5, 2.0**-149, -(2.0**127)),
}
KS = (1, 2, 37, 123, N // 2, N - 1, N)


def bits_of(x):
    return np.abs(np.float32(x)).view(np.int32)


def is_largest(bits, k):
    # Python sorts stably: of equal ones the earlier comes first.
    order = sorted(range(len(bits)), key=lambda i: -int(bits[i]))[:k]
    return np.isin(np.arange(len(bits)), [i for i in order if bits[i]])


@pytest.mark.parametrize("case", CASES)
def test_the_k_largest_are_those_that_sorting_has_first(case):
    bits = bits_of(CASES[case])
    assert np.array_equal(kth(bits, np.int32(KS)), np.sort(bits)[[-k for k in KS]])
    for k in KS:
        assert np.array_equal(k_largest(bits, k), is_largest(bits, k))


# Samples. ---------------------------------------------------------------------------


@pytest.mark.parametrize("k", [30, 3000])
def test_the_kth_of_many_lies_within_the_bracket_of_a_sample(k):
    bucket = np.random.default_rng(2).standard_normal(300_000).astype(np.float32)
    true = np.sort(bits_of(bucket))[-k]
    found = bracket_by_each(bucket, k, jax.random.split(jax.random.key(0), 20))
    assert (found.low <= true).all()
    assert (true <= found.high).all()
    # And it is of use: few entries lie within.
    low, high = int(found.low[0]), int(found.high[0])
    assert np.sum((bits_of(bucket) >= low) & (bits_of(bucket) < high)) < 30 * np.sqrt(k)


@pytest.mark.parametrize("n", [1, 1000])
def test_the_bracket_of_a_bucket_that_is_its_own_sample_has_no_width(n):
    bucket = np.random.default_rng(n).permutation(n).astype(np.float32) + 1
    for k in {1, 2, n // 2, n - 1, n} & {*range(1, n + 1)}:
        low, middle, high, slope = bracket_by_each(bucket, k, jax.random.key(0)[None])
        assert np.sum(bits_of(bucket) >= middle) == k
        assert low == middle == high
        assert slope == 0


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_the_slope_is_about_the_power_by_which_magnitudes_fall(power):
    falling = np.arange(1, 200_001, dtype=np.float32) ** -np.float32(power)
    shuffled = np.random.default_rng(4).permutation(falling)
    found = bracket_by_each(shuffled, 8000, jax.random.key(0)[None])
    # Bits grow by 1.44 times as much as the logarithm, or by 0.72 times.
    assert 0.7 * power < found.slope[0] < 1.5 * power


@pytest.mark.parametrize("n", [1, 65537, 200_000])
def test_sampled_places_rise_within_the_bucket_and_do_not_prefer_its_front(n):
    places = np.asarray(sample_places(n, jax.random.split(jax.random.key(2), 300)))
    assert (np.diff(places) > 0).all()
    assert places.min() >= 0
    assert places.max() < n
    stride = 3 if n == 200_000 else 1
    assert places.shape[1] == n // stride
    assert abs(places.mean() - (n - 1) / 2) < stride
    # Every entry has its turn, all about as often.
    assert (np.bincount(places[:, 0], minlength=stride) > 300 / stride / 1.5).all()
    assert np.count_nonzero(np.bincount(places.ravel())) >= n - stride
