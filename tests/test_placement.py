"""place, init and state_specs find what differs per replica in any training state."""

import functools
import re

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import AXIS_TYPES, N, assert_same, choices, make_mesh
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import gravac_jax as gravac

TX = optax.chain(
    gravac.transform(compress=True, send=gravac.TopK(4)), optax.sgd(0.1, momentum=0.9)
)
SIZE = 15  # entries of a dense layer from 4 to 3
loss_of = lambda params, x: jnp.sum((x @ params["w"] + params["b"][None]) ** 2)
train_step = _harness.plain_step(TX, loss_of)


def bare():
    params = {"b": jnp.ones(3), "w": jnp.ones((4, 3))}
    return params, TX.init(params)


def linen():
    module = nn.Dense(3)
    params = module.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=module.apply, params=params, tx=TX)


def nnx_pair():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def nnx_split():
    return nnx.split(nnx_pair())[1]


TREES = {f.__name__: f for f in (bare, linen, nnx_pair, nnx_split)}
PLACES = {
    "auto": lambda: make_mesh(axis_type=AXIS_TYPES[0]),
    "explicit": lambda: make_mesh(axis_type=AXIS_TYPES[1]),
    "simulated": lambda: N,
}


# The replica's number, the residuals of the bucket and of the leaves that go dense,
# and two leaves of the encoding's state.
LOCAL_LEAVES = 5


def pairs(tree, placed):
    """Return for each leaf whether it differs per replica, and both its forms."""
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    paths, leaves = zip(*jax.tree.leaves_with_path(tree), strict=True)
    is_local = [bool(re.search(r"\blocal\b", jax.tree_util.keystr(x))) for x in paths]
    assert sum(is_local) == LOCAL_LEAVES
    return list(zip(is_local, leaves, jax.tree.leaves(placed), strict=True))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tree", TREES)
def test_leaves_that_differ_get_an_axis_of_replicas_and_the_rest_stays(tree, place):
    tree, where = TREES[tree](), PLACES[place]()
    placed = gravac.place(tree, where)
    specs = jax.tree.leaves(gravac.state_specs(tree))
    assert jax.tree.leaves(gravac.state_specs(placed)) == specs
    for (is_local, x, y), spec in zip(pairs(tree, placed), specs, strict=True):
        assert spec == (jax.P("data") if is_local else jax.P())
        if is_local:
            assert y.shape == (N, *x.shape)
        else:
            assert np.array_equal(y, x, equal_nan=True)
        assert y.dtype == jnp.result_type(x)
        if where != N:
            assert y.sharding.is_equivalent_to(jax.NamedSharding(where, spec), y.ndim)


def test_a_state_may_be_placed_again_and_moved_from_mesh_to_mesh():
    params, opt_state = gravac.place(bare(), make_mesh())
    residual = np.arange(N * SIZE, dtype=np.float32).reshape(N, SIZE)
    state = params, optax.tree.set(opt_state, residual=residual)
    for place in ("auto", "explicit", "simulated", "auto"):
        state, before = gravac.place(state, PLACES[place]()), state
        assert_same(state, before)
        for _, x, y in pairs(state, gravac.place(state, PLACES[place]())):
            assert_same(y, x)
            assert y.sharding.is_equivalent_to(x.sharding, x.ndim)


@functools.cache
def step_on(place):
    where = PLACES[place]()
    return where, gravac.data_parallel(train_step, where)


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
@pytest.mark.parametrize("place", choices(PLACES, lambda x: x != "explicit"))
def test_a_step_numbers_replicas_and_spares_the_arrays_of_the_caller(place, make):
    tree, (where, step) = jax.tree.map(make, bare()), step_on(place)
    expected = jax.tree.map(np.array, tree)
    placed = gravac.place(tree, where)
    assert optax.tree.get(placed, "replica").tolist() == [-1] * N
    _, opt_state, _ = step(*placed, np.ones((N, 4), np.float32))
    assert optax.tree.get(opt_state, "replica").tolist() == list(range(N))
    assert _harness.residual(placed[1]).is_deleted()
    assert_same(tree, expected)  # raises where they are deleted


@pytest.mark.parametrize("place", choices(PLACES, lambda x: x != "explicit"))
def test_shapes_are_placed_as_arrays_are_and_under_jit_the_same_arrays(place):
    tree, where = bare(), PLACES[place]()
    shapes = jax.eval_shape(lambda: tree)
    assert gravac.state_specs(shapes) == gravac.state_specs(tree)
    placed, lie = gravac.place(tree, where), gravac.place(shapes, where)
    traced = jax.jit(lambda tree: gravac.place(tree, where))(tree)
    assert_same(traced, placed)
    for x, y, z in zip(*map(jax.tree.leaves, (lie, placed, traced)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if where != N:
            assert x.sharding == y.sharding
            # XLA shards no array without entries.
            assert not x.size or z.sharding.is_equivalent_to(y.sharding, y.ndim)


def test_numpy_s_float64_which_jax_trains_in_float32_is_nothing_to_warn_of(recwarn):
    params = {"w": np.ones((8, 8))}
    assert gravac.place((params, TX.init(params)), N)[0]["w"].dtype == jnp.float32
    assert not recwarn.list


@pytest.mark.parametrize("devices", [1, 2])
def test_random_streams_are_placed_where_the_mesh_is_set(devices):
    """There JAX makes keys whose spec has a dimension that they do not have."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))
        placed = gravac.place(dropout, mesh)
    key = placed.rngs.key.get_value()
    assert key.sharding.is_fully_replicated
    assert key == dropout.rngs.key.get_value()
