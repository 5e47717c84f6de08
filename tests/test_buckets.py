"""Leaves are packed into buckets and come back, and small ones go dense."""

import collections

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import assert_same

import gravac_jax as gravac
from gravac_jax import _xla
from gravac_jax._step import bucketing

DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
_drawn = lambda x, dtype, seed: np.random.default_rng(seed).normal(size=x).astype(dtype)
LEAVES = st.builds(_drawn, SHAPES, DTYPES, st.integers(0, 9))
_grown = lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    | st.tuples(inner, st.none())
)
TREES = st.recursive(LEAVES, _grown, max_leaves=5)

MATRIX, BIAS = np.ones((3, 2), np.float32), np.full(4, 2.0, np.float32)
PARAMS = {"kernel": MATRIX, "bias": BIAS}


@hypothesis.settings(deadline=None, max_examples=25)  # new shapes compile
@hypothesis.given(tree=TREES, data=st.data(), most=st.integers(1, 9))
def test_any_tree_comes_back_as_it_was(tree, data, most):
    leaves, structure = jax.tree.flatten(tree)
    mask = [data.draw(st.booleans()) for _ in leaves]
    for most_entries, many in ((bucketing.MAX_ENTRIES, -1), (most, most)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bucketing, "MAX_ENTRIES", most_entries)
            patch.setattr("gravac_jax._arrays.MANY_ALIKE", many)
            plan = bucketing.plan(tree, jax.tree.unflatten(structure, mask))
            parts = plan.pack(tree)
            back = plan.unpack(parts)
        *sizes, _ = plan.sizes
        assert max(sizes) <= most_entries
        assert all(sizes) or sizes == [0]
        assert tuple(x.size for x in parts) == plan.sizes
        assert sum(plan.entries) == sum(x.size for x in leaves)
        pieces = collections.Counter(x.leaf for part in plan.parts for x in part)
        for i, x in enumerate(leaves):  # only what is larger than a bucket is cut
            assert pieces[i] == max(1, -(-x.size // most_entries))
        assert all(x.dtype == np.float32 for x in parts)
        assert_same(back, tree)


def test_many_leaves_are_joined_apart_from_what_reads_them():
    plan = bucketing.plan([BIAS] * 300, True)
    assert 'inlineable = "false"' in jax.jit(plan.pack).lower([BIAS] * 300).as_text()


def test_compressed_leaves_are_one_bucket_of_the_smallest_first():
    tree = PARAMS | {"a": np.full((2, 3), 3.0, np.float32)}  # as large as the kernel
    bucket, dense = bucketing.plan(tree, True).pack(tree)
    assert dense.tolist() == [0.0]
    assert bucket.tolist() == [2.0] * 4 + [3.0] * 6 + [1.0] * 6


HUGE = {
    "embedding": jax.ShapeDtypeStruct((2**21, 3000), jnp.bfloat16),
    "empty": jax.ShapeDtypeStruct((0, 3), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((2**16, 2**15 + 1), jnp.float32),
    "bias": jax.ShapeDtypeStruct((2**16,), jnp.float32),
}


def test_a_model_beyond_int32_has_several_buckets():
    plan = bucketing.plan(HUGE, gravac.matrices(0))
    total = sum(x.size for x in HUGE.values()) - 2**16
    *sizes, dense_size = plan.sizes
    assert sum(sizes) == total > 2**32
    assert sum(n for _, n in plan.layout) == total + dense_size
    assert max(sizes) <= 2**30
    assert len(sizes) == 3 + 6
    (*buckets, dense), back = jax.eval_shape(
        lambda tree: (plan.pack(tree), plan.unpack(plan.pack(tree))), HUGE
    )
    assert tuple(x.shape for x in buckets) == tuple((n,) for n in sizes)
    assert dense.shape == (2**16,)
    assert back == HUGE


@pytest.mark.parametrize("compress", [True, {"kernel": True, "bias": False}])
def test_zeros_make_rows_whole_and_are_no_part_of_a_leaf(compress):
    plan = bucketing.plan(PARAMS, compress, gravac.Bits(2).padded_size)
    bucket, dense = plan.pack(PARAMS)
    n = MATRIX.size + BIAS.size * (compress is True)
    assert plan.sizes[:-1] == (bucket.size,) == (32,)
    assert not np.any(bucket[n:])
    assert sum(entries for _, entries in plan.layout) == bucket.size + dense.size
    assert next(n for leaf, n in plan.layout if leaf == bucketing.NO_LEAF) == 32 - n
    assert_same(plan.unpack((bucket.at[n:].set(7.0), dense)), PARAMS)
    assert_same(_xla.zero_after(bucket.at[n:].set(7.0), plan.entries[0]), bucket)


@pytest.mark.parametrize("row_entries", [32, 4096])
@pytest.mark.parametrize("n", [0, 1, 31, 512, 5000, 409_600, 2048 * 12_491])
def test_a_padded_bucket_has_whole_rows(n, row_entries):
    encoding = gravac.Bits(2, row_entries=row_entries)
    padded = encoding.padded_size(n)
    assert n <= padded < n + row_entries
    assert padded % encoding._row(padded) == 0
    if n >= 256 * row_entries:  # TPUs would lay out rows anew that are no whole tiles
        assert encoding._row(padded) == row_entries


@pytest.mark.slow
@pytest.mark.parametrize("compress", [gravac.matrices(0), False])
def test_a_step_of_a_huge_model_can_be_traced(compress):
    tx = gravac.transform(axis_name=None, compress=compress)
    state = jax.eval_shape(tx.init, HUGE)
    updates, after = jax.eval_shape(tx.update, HUGE, state)
    assert updates == HUGE
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize(
    ("compress", "expected"),
    [
        (True, (True, True)),
        (False, (False, False)),
        (lambda path, x: path == "['bias']" and x.shape == (4,), (False, True)),
        ({"kernel": True, "bias": False}, (True, False)),
        (gravac.matrices(min_entries=6), (True, False)),
        (gravac.matrices(min_entries=7), (False, False)),
    ],
)
def test_leaves_are_chosen_by_a_bool_a_function_or_a_mask(compress, expected):
    bias, kernel = bucketing.plan(PARAMS, compress).is_compressed
    assert (kernel, bias) == expected


@pytest.mark.parametrize(
    ("shape", "others", "is_compressed"),
    [
        ((3, 3, 4, 8), 100_000, True),
        ((3, 3, 4, 8), 10**6, False),
        ((128, 128), 10**9, True),
        ((4, 8, 512), 10**9, True),
        ((128, 127), 10**9, False),
    ],
)
def test_a_matrix_is_compressed_if_large_for_its_model(shape, others, is_compressed):
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    buckets = bucketing.plan([leaf(*shape), leaf(others)], None)
    assert buckets.is_compressed == (is_compressed, False)


@pytest.mark.parametrize(
    ("sizes", "dense"),
    [
        ([1, 7680], 1),  # a temperature beside small matrices
        ([40, 8, 7680, 1], 2),  # 32 of a model so small that its 4,096th is less
        ([768] * 2 + [8_000_000], 2),  # gains and biases
        ([768] * 9 + [8_000_000], 2),  # no more than a 4,096th
        ([3, 64], 0),  # not half of the bytes of a model this small
    ],
)
def test_the_smallest_leaves_go_dense_beside_few_bits(sizes, dense):
    leaves = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]
    plan = bucketing.plan(leaves, None, suits_small_leaves=True)
    kept = sorted(n for n, x in zip(sizes, plan.is_compressed, strict=True) if not x)
    assert kept == sorted(sizes)[:dense]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("params", [{}, {"w": np.ones((128, 128), np.float32)}])
def test_a_model_that_is_compressed_or_empty_does_not_warn(params):
    gravac.transform(axis_name=None).init(params)
