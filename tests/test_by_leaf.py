"""Steps by leaf: optimizers that look at whole matrices, such as Muon."""

import functools

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, ROWS, N, at

import gravac_jax as gravac
from gravac_jax._step import bucketing

RATE = 0.1
MUON = optax.contrib.muon(RATE, adam_learning_rate=RATE)
BY_LEAF = functools.partial(gravac.OwnOptimizer, by_leaf=True)
GRADIENTS = _harness.gaussian_gradients(5)
ONES = jax.tree.map(np.ones_like, PARAMS)


def dense(optimizer, compress=COMPRESS):
    """Return a transform of one replica that sends all of an optimizer's steps."""
    memory = BY_LEAF(optimizer)
    return gravac.transform(None, compress=compress, memory=memory, send=gravac.Dense())


def descent(tx, replica, params=PARAMS):
    """Return what one replica's own optimizer makes of the params."""
    state, update = tx.init(params), jax.jit(tx.update)
    with jax.numpy_dtype_promotion("standard"):
        for step in range(len(GRADIENTS["w"])):
            updates, state = update(at(GRADIENTS, (step, replica)), state, params)
            params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    ("how", "delay"),
    [("vmap", 1), pytest.param("shard_map", 0, marks=pytest.mark.slow)],
)
def test_what_the_replicas_own_muons_made_is_sent_or_held(how, delay):
    chosen = {"compress": COMPRESS, "memory": BY_LEAF(MUON), "send": ROWS}
    tx = gravac.transform(delay=delay, **chosen)
    zeros = jax.tree.map(np.zeros_like, GRADIENTS)
    updates, states = _harness.trajectory(tx, PARAMS, how)(GRADIENTS, params=zeros)
    each = [descent(MUON, replica) for replica in range(N)]
    made = jax.tree.map(lambda *x: np.mean(x, axis=0, dtype=np.float64), *each)
    # The matrix is the only bucket, and the vector goes dense.
    for name, memory in zip(("w", "b"), at(states, -1).local.memory, strict=True):
        sent = updates[name].astype(np.float64).sum(0)
        held = memory.residual.mean(0, dtype=np.float64)
        found = sent + held[: sent.size].reshape(sent.shape)
        np.testing.assert_allclose(found, made[name], atol=2e-5)
        assert np.abs(sent).max() > RATE / 2


def test_alone_and_whole_it_is_the_optimizer():
    lamb = optax.lamb(RATE)
    found, expected = (descent(tx, 0, ONES) for tx in (dense(lamb), lamb))
    _harness.assert_close(found, expected, rtol=1e-5)
    assert np.abs(expected["w"] - 1).max() > 0.01


def test_the_optimizer_sees_paths_and_shapes():
    seen = []

    def look(updates, state, params):
        seen.append([{k: x.shape for k, x in d.items()} for d in (updates, params)])
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), look)
    params = {"hidden": {"kernel": jnp.ones((4, 6))}, "bias": jnp.ones(6)}
    tx = dense(spy, gravac.matrices(1))
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    kernel, bias = {"['hidden']['kernel']": (4, 6)}, {"['bias']": (6,)}
    assert seen == [[kernel, kernel], [bias, bias]]
    jax.tree.map(np.testing.assert_array_equal, updates, params)


@pytest.mark.parametrize("compress", [True, False])
def test_parts_without_leaves_are_not_shown_to_the_optimizer(compress):
    optimizers = {"b": optax.adam(RATE), "w": optax.sgd(RATE)}
    label = lambda leaves: {path: next(x for x in "bw" if x in path) for path in leaves}
    tx = dense(optax.partition(optimizers, label), compress)
    gradient = at(GRADIENTS, (0, 0))
    updates, _ = jax.jit(tx.update)(gradient, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["w"], -RATE * gradient["w"], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], -RATE * np.sign(gradient["b"]), rtol=1e-4)


IN_ROUNDS = {"send": gravac.Bits(2, turns=2), "every": 2, "weight_decay": 0.1}
WAYS = {
    "late, clipped": {"delay": 1, "clip": gravac.ClipByGlobalNorm(1.0)},
    "rounds, in turn, decay": IN_ROUNDS,
}


@pytest.mark.parametrize("way", _harness.choices(WAYS, lambda x: "late" in x))
def test_adam_by_leaf_is_adam(way):
    """In a whole train step, with a bad batch, micro-batches and a flush."""
    found = []
    batches = np.float32(np.random.default_rng(0).normal(size=(4, 4 * N, 8)))
    batches[2, 5] = np.nan
    loss = lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2) + jnp.sum(p["b"] ** 2)
    for by_leaf in (False, True):
        memory = gravac.OwnOptimizer(optax.adam(RATE), by_leaf=by_leaf)
        usual = {"compress": COMPRESS, "send": ROWS, "memory": memory}
        tx = gravac.transform(**usual | WAYS[way])
        step = gravac.train_step(loss, tx, N, micro_batches=2)
        state = step.init(ONES)
        for batch in batches:
            *state, _ = step(*state, batch)
        found.append(step.flush(*state)[0])
    assert np.abs(found[0]["w"] - 1).max() > RATE
    _harness.assert_close(found[1], found[0], rtol=1e-5)


def test_leaves_that_are_cut_or_lie_in_slices_are_refused(monkeypatch):
    monkeypatch.setattr(bucketing, "MAX_ENTRIES", 100)
    tx = gravac.transform(compress=True, memory=BY_LEAF(MUON))
    with pytest.raises(ValueError, match="whole leaves, and a leaf lies in two of 3"):
        tx.init({"u": jnp.ones((10, 9)), "w": jnp.ones((10, 11))})
    mesh = gravac.make_mesh(("dcn", "ici"), hosts=1)
    lies = {"w": jax.NamedSharding(mesh, jax.P("ici"))}
    with pytest.raises(ValueError, match="each device has slices of them"):
        gravac.transform("dcn", shardings=lies, memory=BY_LEAF(MUON))


def test_an_optimizer_of_leaves_is_named_where_it_is_not_asked_for():
    of_items = lambda tree: {path: x.ndim > 1 for path, x in tree.items()}
    masks = {"w": True}, of_items, lambda t: jax.tree.map(lambda x: x.ndim > 1, t)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE))
    of_leaves = MUON, optax.lamb(RATE), optax.centralize(), optax.sm3(RATE), clipped
    for optimizer in (*of_leaves, *(optax.adamw(RATE, mask=mask) for mask in masks)):
        with pytest.raises(ValueError, match=r"For Muon,.*\(..., by_leaf="):
            gravac.OwnOptimizer(optimizer)
    for of_entries in (optax.zero_nans(), optax.apply_if_finite(optax.adam(RATE), 9)):
        gravac.OwnOptimizer(of_entries)
    with pytest.raises(TypeError, match="`by_leaf`"):
        gravac.OwnOptimizer(MUON, by_leaf="yes")  # type: ignore[arg-type]
