import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import N, assert_same, collectives, trajectory
from jax.extend.core import jaxprs_in_params

import gravac_jax as gravac
from gravac_jax import _buckets, _payload

DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
LEAVES = st.builds(
    lambda shape, dtype, seed: (
        np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    ),
    SHAPES,
    DTYPES,
    st.integers(0, 9),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.tuples(inner, st.none())
    ),
    max_leaves=5,
)

MATRIX, BIAS = np.ones((3, 2), np.float32), np.full(4, 2.0, np.float32)
PARAMS = {"kernel": MATRIX, "bias": BIAS}


def chosen(compress, tree=None):
    """Per path, whether it is compressed."""
    tree = PARAMS if tree is None else tree
    plan = _buckets.plan(tree, compress)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(tree)]
    return dict(zip(paths, plan.is_compressed, strict=True))


@hypothesis.settings(deadline=None, max_examples=40)  # new shapes compile
@hypothesis.given(tree=TREES, data=st.data())
def test_any_tree_comes_back_as_it_was(tree, data):
    leaves, structure = jax.tree.flatten(tree)
    mask = [data.draw(st.booleans()) for _ in leaves]
    plan = _buckets.plan(tree, jax.tree.unflatten(structure, mask))
    buckets, dense = plan.pack(tree)
    assert tuple(bucket.size for bucket in buckets) == plan.sizes
    assert dense.size == plan.dense_size
    assert sum(plan.sizes) + plan.dense_size == sum(x.size for x in leaves)
    assert all(x.dtype == np.float32 for x in (*buckets, dense))
    back = plan.unpack(buckets, dense)
    assert jax.tree.structure(back) == structure
    for x, y in zip(leaves, jax.tree.leaves(back), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(y).tobytes() == x.tobytes()


def test_a_plan_can_be_made_from_shapes_alone():
    shapes = jax.eval_shape(lambda: PARAMS)
    assert _buckets.plan(shapes, True) == _buckets.plan(PARAMS, True)


def test_compressed_leaves_are_one_bucket_in_the_order_of_the_tree():
    (bucket,), dense = _buckets.plan(PARAMS, True).pack(PARAMS)
    assert bucket.tolist() == [2.0] * 4 + [1.0] * 6
    assert dense.size == 0


HUGE = {
    "embedding": jax.ShapeDtypeStruct((2**21, 3000), jnp.bfloat16),
    "empty": jax.ShapeDtypeStruct((0, 3), jnp.float32),
    "kernel": jax.ShapeDtypeStruct((2**16, 2**15 + 1), jnp.float32),
    "bias": jax.ShapeDtypeStruct((2**16,), jnp.float32),
}


def test_beyond_int32_there_are_more_buckets_and_each_is_within():
    plan = _buckets.plan(HUGE, gravac.matrices(0))
    total = sum(x.size for x in HUGE.values()) - 2**16
    assert sum(plan.sizes) == sum(n for _, n in plan.layout) == total > 2**32
    assert max(plan.sizes) <= 2**30
    assert len(plan.sizes) == -(-total // 2**30)
    assert max(plan.sizes) - min(plan.sizes) <= 1
    (buckets, dense), back = jax.eval_shape(
        lambda tree: (plan.pack(tree), plan.unpack(*plan.pack(tree))), HUGE
    )
    assert tuple(x.shape for x in buckets) == tuple((n,) for n in plan.sizes)
    assert dense.shape == (2**16,)
    assert back == HUGE


def test_a_step_of_a_huge_model_can_be_traced():
    tx = gravac.transform(axis_name=None, compress=gravac.matrices(0))
    state = jax.eval_shape(tx.init, HUGE)
    updates, after = jax.eval_shape(tx.update, HUGE, state)
    assert updates == HUGE
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(tree=TREES, most=st.integers(1, 9))
def test_any_tree_comes_back_from_several_buckets(tree, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_payload, "MAX_ENTRIES", most)
        plan = _buckets.plan(tree, True)
        buckets, dense = plan.pack(tree)
        assert all(0 < x.size <= most for x in buckets) or plan.sizes == (0,)
        assert_same(plan.unpack(buckets, dense), tree)


LEAVES_OF_A_MODEL = [np.zeros((n, 2), np.float32) for n in (5, 1, 3, 8, 0, 2)]


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"),
    [
        (None, (38,)),
        (1, (10, 2, 6, 16, 4)),
        (4 * 8, (10, 8, 16, 4)),
        (4 * 10, (10, 24, 4)),
        (4 * 38, (38,)),
        (4 * 1000, (38,)),
    ],
)
def test_buckets_are_filled_with_whole_leaves(bucket_bytes, sizes):
    plan = _buckets.plan(LEAVES_OF_A_MODEL, True, bucket_bytes)
    assert plan.sizes == sizes
    assert sum(plan.shapes, ()) == tuple(x.shape for x in LEAVES_OF_A_MODEL if x.size)
    (empty,) = _buckets.plan([], True, bucket_bytes).sizes
    assert empty == 0


@pytest.mark.parametrize("bucket_bytes", [1, 4 * 8])
def test_whole_leaves_come_back_from_their_buckets(bucket_bytes):
    rng = np.random.default_rng(0)
    tree = [rng.standard_normal(x.shape).astype("f4") for x in LEAVES_OF_A_MODEL]
    plan = _buckets.plan(tree, True, bucket_bytes)
    assert_same(plan.unpack(*plan.pack(tree)), jax.tree.map(jnp.asarray, tree))


def origins(jaxpr, known):
    """The arguments that each collective of `jaxpr` waits for, wherever it is."""
    found = []
    for eqn in jaxpr.eqns:
        inputs = [known.get(x, set()) for x in eqn.invars if not hasattr(x, "val")]
        mine = set().union(*inputs)
        inner = [str(x) for x in jaxprs_in_params(eqn.params)]
        if any("all_gather" in x or "psum" in x for x in [eqn.primitive.name, *inner]):
            found.append(mine)
        known.update({x: mine for x in eqn.outvars})
    return found


def test_a_bucket_of_its_own_waits_for_no_gradient_but_its_own():
    params = [np.ones((20, 20), np.float32) for _ in range(3)]
    waits = {}
    for bucket_bytes in (None, 1):
        tx = gravac.transform(
            compress=True, controller=gravac.Fixed(10), bucket_bytes=bucket_bytes
        )
        trace = jax.make_jaxpr(tx.update, axis_env=[("data", 4)])
        jaxpr = trace(params, tx.init(params)).jaxpr
        known = {x: {i} for i, x in enumerate(jaxpr.invars[:3])}
        waits[bucket_bytes] = [len(x) for x in origins(jaxpr, known)]
    # One for what is common, one for the exchange.
    assert waits[None] == [3, 3]
    assert sorted(waits[1]) == [1, 1, 1, 3]


@pytest.mark.parametrize(("bucket_bytes", "conditionals"), [(None, 1), (1, 0)])
def test_a_bucket_of_one_rung_that_does_not_wait_is_in_no_branch(
    bucket_bytes, conditionals
):
    params = [np.ones((20, 20), np.float32) for _ in range(2)]
    tx = gravac.transform(
        compress=True, controller=gravac.Fixed(10), bucket_bytes=bucket_bytes
    )
    run = trajectory(tx, params, "shard_map")
    text = run.text([np.ones((1, N, 20, 20), np.float32) for _ in params])
    found, _ = collectives(text)
    gathers = [x for x in found if x.kind == "all-gather"]
    assert [len(x.branches) for x in gathers] == [conditionals] * len(gathers)
    assert len(gathers) == (2 if bucket_bytes else 1)


def test_several_buckets_lose_nothing(monkeypatch):
    monkeypatch.setattr(_payload, "MAX_ENTRIES", 100)
    params = {"a": jnp.zeros((9, 17)), "b": jnp.zeros((11, 13))}
    controller = gravac.GraVAC(ladder=(1, 4, 16), window=3)
    tx = gravac.transform(None, compress=True, controller=controller)
    rng, state = np.random.default_rng(0), tx.init(params)
    assert len(state.local.memory) == 3
    came_in = went_out = jax.tree.map(np.asarray, params)
    step = jax.jit(tx.update)
    for _ in range(5):
        draw = lambda x: rng.integers(-99, 99, x.shape).astype(np.float32)
        grads = jax.tree.map(draw, params)
        updates, state = step(grads, state)
        came_in = jax.tree.map(np.add, came_in, grads)
        went_out = jax.tree.map(np.add, went_out, updates)
    left = _buckets.plan(params, True).unpack(
        tuple(x.residual for x in state.local.memory), jnp.zeros(0)
    )
    assert any(np.any(x) for x in jax.tree.leaves(left))
    assert_same(jax.tree.map(np.add, went_out, left), came_in)


def test_without_compressed_leaves_the_bucket_is_empty():
    plan = _buckets.plan(PARAMS, False)
    assert (plan.sizes, plan.dense_size) == ((0,), 10)
    assert plan.pack(PARAMS)[0][0].size == 0


def test_a_bool_is_for_all_leaves():
    assert set(chosen(True).values()) == {True}
    assert set(chosen(False).values()) == {False}


def test_a_predicate_sees_path_and_leaf():
    assert chosen(lambda path, x: path == "['bias']" and x.shape == (4,)) == {
        "['bias']": True,
        "['kernel']": False,
    }


def test_a_mask_has_a_bool_for_every_leaf():
    mask = {"kernel": True, "bias": False}
    assert chosen(mask) == {"['bias']": False, "['kernel']": True}


@pytest.mark.parametrize(
    "mask",
    [
        {"kernel": True},
        {"kernel": 1, "bias": 0},
        {"weight": True, "bias": False},
        [True, False],
    ],
)
def test_a_mask_of_another_shape_is_refused(mask):
    with pytest.raises(ValueError, match="`compress` must be"):
        _buckets.plan(PARAMS, mask)


@pytest.mark.parametrize(
    ("shape", "is_compressed"),
    [
        ((128, 128), True),
        ((4, 8, 512), True),
        ((128, 127), False),
        ((16_384,), False),
        ((), False),
    ],
)
def test_matrices_from_16384_entries_on_are_compressed(shape, is_compressed):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert gravac.matrices()("w", leaf) is is_compressed


@pytest.mark.parametrize(
    ("shape", "others", "is_compressed"),
    [
        ((3, 3, 4, 8), 100_000, True),
        ((3, 3, 4, 8), 10**6, False),
        ((128, 128), 10**9, True),
        ((128, 127), 10**9, False),
    ],
)
def test_in_a_small_model_a_thousandth_of_it_is_enough(shape, others, is_compressed):
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    buckets = _buckets.plan([leaf(*shape), leaf(others)], None)
    assert buckets.is_compressed == (is_compressed, False)


def test_the_smallest_matrix_is_a_setting():
    assert chosen(gravac.matrices(min_entries=6))["['kernel']"]
    assert not chosen(gravac.matrices(min_entries=7))["['kernel']"]


def test_a_run_that_compresses_nothing_says_so():
    with pytest.warns(UserWarning, match=r"compresses none of the 2 leaves \(8 e"):
        gravac.transform(axis_name=None).init([BIAS, BIAS])


@pytest.mark.parametrize("params", [{}, {"w": np.ones((128, 128), np.float32)}])
def test_a_run_that_compresses_something_or_has_nothing_is_silent(params):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gravac.transform(axis_name=None).init(params)
