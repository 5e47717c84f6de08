"""Marked entries: which they are, in order, without sorting."""

import itertools
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import assert_same

from gravac_jax import _arrays
from gravac_jax._encodings import selection
from gravac_jax._encodings.selection import PAD, Marks

magnitude_bits, from_bits = map(jax.jit, (_arrays.magnitude_bits, _arrays.from_bits))
clear = jax.jit(selection.clear)
count = jax.jit(selection.count)
mark = jax.jit(selection.mark)
places = jax.jit(selection.places, static_argnums=1)
places_of_ranks = jax.jit(selection.places_of_ranks)
thin_by_each = jax.jit(jax.vmap(selection.thin, (None, None, 0)))

SIZES = (1, 32, 33, 97, 1000)


def masks_of(n):
    """Return `[masks, n]`: none, one, few, half, all but one and all are marked."""
    rng = np.random.default_rng(n)
    totals = (0, 1, n // 20, half(n), n - 1, n)
    return np.stack([rng.permutation(n) < total for total in totals])


def half(n):
    return (n + 1) // 2


def marks_of(mask):
    """Return what `mark` should return for masks `[..., n]`."""
    n = mask.shape[-1]
    mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -n % 32)])
    words = np.packbits(mask, axis=-1, bitorder="little").view("<u4")
    counts = np.bitwise_count(words).astype(np.int32)
    ends = np.cumsum(counts, axis=-1, dtype=np.int32)
    return Marks(words, ends - counts, ends[..., -1])


@pytest.mark.parametrize("n", SIZES)
def test_marks_say_which_entries_are_set_and_how_many_come_before_each_word(n):
    for mask in masks_of(n):
        before = [mask[:start].sum() for start in range(0, n, 32)]
        assert marks_of(mask).starts.tolist() == before
        assert_same(mark(mask), marks_of(mask))
        assert count(mask) == mask.sum()


@pytest.mark.parametrize("n", SIZES)
def test_the_first_k_places_rise_and_empty_slots_rise_from_pad(n):
    for mask in masks_of(n):
        for k in (half(n), n + 40):
            found = np.flatnonzero(mask)[:k]
            empty = PAD + np.arange(len(found), k)
            assert places(mark(mask), k).tolist() == [*found, *empty]


@pytest.mark.parametrize("n", SIZES)
def test_an_entry_is_found_by_its_rank(n):
    ranks = np.random.default_rng(n).permutation(n).astype(np.int32)
    for mask in masks_of(n):
        marks = mark(mask)
        if mask.any():
            mine = ranks % mask.sum(dtype=np.int32)
            found = places_of_ranks(marks, mine)
            assert np.array_equal(found, np.flatnonzero(mask)[mine])


@pytest.mark.parametrize("n", SIZES)
def test_marked_entries_are_cleared_and_no_bit_of_another_changes(n):
    x = np.random.default_rng(n).integers(0, 2**32, n, np.uint32).view(np.float32)
    for mask in masks_of(n):
        assert_same(clear(x, mark(mask)), np.where(mask, np.float32(0), x))


@pytest.mark.parametrize("n", SIZES)
def test_a_run_of_marks_that_begins_at_the_gap_and_wraps_around_is_removed(n):
    for mask in masks_of(n):
        marks, marked, total = mark(mask), np.flatnonzero(mask), mask.sum()
        gaps = np.arange(n, dtype=np.int32)  # those from the total on do not count
        ranks_from_gap = (gaps[:total] - gaps[:total, None]) % max(1, total)
        for k in {0, 1, total // 2, total, total + 3}:
            stays = np.zeros((n, n), bool)
            stays[:total, marked] = ranks_from_gap >= total - k
            thinned = thin_by_each(marks, np.int32(k), gaps)
            for received, expected in zip(thinned, marks_of(stays), strict=True):
                assert_same(received[: max(1, total)], expected[: max(1, total)])
            # Over all gaps every mark stays equally often.
            assert len(set(stays[:total, marked].sum(0).tolist())) <= 1


def test_nothing_is_sorted_and_only_words_are_scattered():
    n, k = 2**16, 1000
    program = jax.jit(lambda mask: selection.places(selection.mark(mask), k))
    assert updates(program, n) == [n // 32]
    # What this replaces scatters every entry, and is seen to.
    program = jax.jit(lambda mask: jnp.nonzero(mask, size=k)[0])
    assert n in updates(program, n)


def updates(program, n):
    """Return how many updates each scatter of a compiled program makes."""
    text = program.lower(jnp.zeros(n, bool)).compile().as_text()
    assert not re.search(r"\b(sort|top-?k)\b", text, re.I)
    shapes = re.findall(r"%?([\w.-]+)(?: =|:) \w+\[([\d,]*)\]", text)
    size = {name: math.prod(map(int, re.findall(r"\d+", x))) for name, x in shapes}
    return [size[name] for name in re.findall(r" scatter\(.*%([\w.-]+)\)", text)]


MAX = float(np.finfo(np.float32).max)
EDGES = [0.0, 2.0**-149, 3 * 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 1.0, MAX]
FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from([*EDGES, np.inf])
SIGNED = st.tuples(FLOATS, st.sampled_from([1, -1])).map(np.prod)


@hypothesis.settings(deadline=None)  # the first call compiles
@hypothesis.given(x=st.lists(SIGNED, min_size=8, max_size=8).map(np.float32))
def test_magnitude_bits_are_in_the_order_of_magnitudes_and_lead_back_to_them(x):
    bits = np.asarray(magnitude_bits(x))
    for i, j in itertools.product(range(8), repeat=2):
        assert (bits[i] < bits[j]) == (abs(x[i]) < abs(x[j]))
    assert_same(from_bits(bits), np.abs(x))
