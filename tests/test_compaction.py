import itertools
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import assert_same, choices

from gravac_jax._marking import compaction
from gravac_jax._marking.compaction import Marks
from gravac_jax._payload import PAD

clear = jax.jit(compaction.clear)
count = jax.jit(compaction.count)
find = jax.jit(compaction.find)
from_bits = jax.jit(compaction.from_bits)
is_marked = jax.jit(compaction.is_marked)
magnitude_bits = jax.jit(compaction.magnitude_bits)
mark = jax.jit(compaction.mark)
select = jax.jit(compaction.select, static_argnums=1)
thin_by_each = jax.jit(jax.vmap(compaction.thin, (None, None, 0)))

SIZES = (1, 31, 32, 33, 64, 97, 1000, 5000)

MAX = float(np.finfo(np.float32).max)
EDGES = [0.0, 2.0**-149, 3 * 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 1.0, MAX]
FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from([*EDGES, np.inf])
SIGNED = st.tuples(FLOATS, st.sampled_from([1, -1])).map(np.prod)
EIGHT = st.lists(SIGNED, min_size=8, max_size=8).map(np.float32)


def masks_of(n):
    """`[masks, n]`: none, one, few, half, all but one and all are marked."""
    rng = np.random.default_rng(n)
    totals = (0, 1, n // 20, half(n), n - 1, n)
    return np.stack([rng.permutation(n) < total for total in totals])


def half(n):
    return (n + 1) // 2


def selected(mask, k):
    entries = np.flatnonzero(mask)[:k]
    return [*entries, *(PAD + slot for slot in range(len(entries), k))]


def marks_of(mask):
    """What `mark` should return, of `[..., n]`."""
    n = mask.shape[-1]
    mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -n % 32)])
    words = np.packbits(mask, axis=-1, bitorder="little").view("<u4")
    counts = np.bitwise_count(words).astype(np.int32)
    ends = np.cumsum(counts, axis=-1, dtype=np.int32)
    return Marks(words, ends - counts, ends[..., -1])


def unpacked(words, n):
    octets = np.ascontiguousarray(words).astype("<u4").view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little")[..., :n].astype(bool)


@pytest.mark.parametrize("n", SIZES)
def test_marks_say_which_entries_are_set_and_how_many_before_each_word(n):
    for mask in masks_of(n):
        before = [mask[:start].sum() for start in range(0, n, 32)]
        assert marks_of(mask).starts.tolist() == before
        assert_same(mark(mask), marks_of(mask))
        assert count(mask) == mask.sum()


@pytest.mark.parametrize("n", SIZES)
def test_the_first_k_are_selected_and_empty_slots_rise_from_pad(n):
    for mask in masks_of(n):
        for k in (half(n), n + 40):
            assert select(mark(mask), k).tolist() == selected(mask, k)


@pytest.mark.parametrize("n", SIZES)
def test_a_marked_entry_is_found_by_its_rank(n):
    for mask in masks_of(n):
        ranks = np.random.default_rng(n).permutation(n).astype(np.int32)
        ranks %= max(1, mask.sum(dtype=np.int32))
        if mask.any():
            assert np.array_equal(find(mark(mask), ranks), np.flatnonzero(mask)[ranks])


@pytest.mark.parametrize("n", SIZES)
def test_an_entry_knows_whether_it_is_marked(n):
    asked = np.random.default_rng(n).integers(0, n, (3, n)).astype(np.int32)
    for mask in masks_of(n):
        assert np.array_equal(is_marked(mark(mask), asked), mask[asked])


@pytest.mark.parametrize("n", SIZES)
def test_marked_entries_are_cleared_and_no_bit_of_another_changes(n):
    x = np.random.default_rng(n).integers(0, 2**32, n, np.uint32).view(np.float32)
    for mask in masks_of(n):
        assert_same(clear(x, mark(mask)), np.where(mask, np.float32(0), x))


@pytest.mark.parametrize("n", choices(SIZES, lambda n: n < 5000))
def test_a_run_of_marks_from_the_gap_on_and_round_to_the_front_goes(n):
    for mask in masks_of(n):
        marks, entries, total = mark(mask), np.flatnonzero(mask), mask.sum()
        gaps = np.arange(n, dtype=np.int32)  # those from the total on do not count
        ranks_from_gap = (gaps[:total] - gaps[:total, None]) % max(1, total)
        for k in {0, 1, total // 2, total, total + 3} if n < 5000 else {total // 2}:
            stays = np.zeros((n, n), bool)
            stays[:total, entries] = ranks_from_gap >= total - k
            assert (stays[:total].sum(1) == min(k, total)).all()
            thinned = thin_by_each(marks, np.int32(k), gaps)
            for received, expected in zip(thinned, marks_of(stays), strict=True):
                assert_same(received[: max(1, total)], expected[: max(1, total)])


@pytest.mark.parametrize("n", [33, 97, 1000])
def test_over_all_gaps_every_mark_stays_equally_often(n):
    for mask in masks_of(n):
        total = mask.sum()
        for k in {1, total // 3, total - 1} & {*range(1, total)}:
            gaps = np.arange(n, dtype=np.int32)
            thinned = thin_by_each(mark(mask), np.int32(k), gaps)
            stays = unpacked(np.asarray(thinned.words)[:total], n)
            assert np.array_equal(stays.sum(0), np.where(mask, k, 0))


def test_members_of_a_batch_get_what_they_get_alone():
    n = 97

    def everything(mask):
        marks = compaction.mark(mask)
        x = jnp.arange(n, dtype=jnp.float32)
        return {
            "marks": marks,
            "count": compaction.count(mask),
            "select": compaction.select(marks, half(n)),
            "find": compaction.find(marks, marks.total[None] // 2),
            "is marked": compaction.is_marked(marks, jnp.arange(n)),
            "clear": compaction.clear(x, marks),
            "thin": compaction.thin(marks, marks.total // 2, marks.total // 3),
        }

    alone = jax.jit(everything)
    expected = [alone(mask) for mask in masks_of(n)]
    batch = jax.jit(jax.vmap(everything))(masks_of(n))
    assert_same(batch, jax.tree.map(lambda *x: np.stack(x), *expected))


def test_nothing_is_sorted_and_only_words_are_scattered():
    n, k = 2**16, 1000
    program = jax.jit(lambda mask: compaction.select(compaction.mark(mask), k))
    assert updates(program, n) == [n // 32]
    # What this is instead of scatters every entry, and is seen to.
    program = jax.jit(lambda mask: jnp.nonzero(mask, size=k)[0])
    assert n in updates(program, n)


def updates(program, n):
    """How many updates each scatter of a compiled program makes."""
    # As users compile it; the tests' own flags (conftest.py) make loops of scatters.
    shipped = {"xla_cpu_use_fusion_emitters": True}
    text = program.lower(jnp.zeros(n, bool)).compile(shipped).as_text()
    assert not re.search(r"\b(sort|top-?k)\b", text, re.I)
    shapes = re.findall(r"%?([\w.-]+)(?: =|:) \w+\[([\d,]*)\]", text)
    size = {name: math.prod(map(int, re.findall(r"\d+", x))) for name, x in shapes}
    return [size[name] for name in re.findall(r" scatter\(.*%([\w.-]+)\)", text)]


@hypothesis.settings(deadline=None)  # the first call compiles
@hypothesis.given(x=EIGHT)
def test_magnitude_bits_are_in_the_order_of_magnitudes(x):
    bits, magnitudes = magnitude_bits(x).tolist(), np.abs(x).tolist()
    for i, j in itertools.product(range(8), repeat=2):
        assert (bits[i] < bits[j]) == (magnitudes[i] < magnitudes[j])


@hypothesis.settings(deadline=None)  # the first call compiles
@hypothesis.given(x=EIGHT)
def test_magnitudes_come_back_from_their_bits(x):
    assert_same(from_bits(magnitude_bits(x)), np.abs(x))
