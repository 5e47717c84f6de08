"""Steps by leaf: optimizers that look at whole matrices, such as Muon."""

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, ROWS, N

import gravac_jax as gravac
from gravac_jax import _buckets

RATE = 0.1
MUON = optax.contrib.muon(RATE, adam_learning_rate=RATE)
GRADIENTS = _harness.gaussian_gradients(5)


def mean_of_own_steps(gradients):
    """Return the mean of the steps of N Muons, each on the tree of the params."""
    totals = []
    with jax.numpy_dtype_promotion("standard"):
        for replica in range(N):
            state, total = MUON.init(PARAMS), jax.tree.map(np.float64, PARAMS)
            for step in range(len(gradients["w"])):
                own = jax.tree.map(lambda g, at=(step, replica): g[at], gradients)
                made, state = MUON.update(own, state, PARAMS)
                total = jax.tree.map(np.add, total, made)
            totals.append(total)
    return jax.tree.map(lambda *x: np.mean(x, axis=0), *totals)


@pytest.mark.parametrize(
    ("how", "delay"),
    [("vmap", 1), pytest.param("shard_map", 0, marks=pytest.mark.slow)],
)
def test_what_the_replicas_own_muons_made_is_sent_or_held(how, delay):
    memory = gravac.OwnOptimizer(MUON, by_leaf=True)
    tx = gravac.transform(compress=COMPRESS, memory=memory, send=ROWS, delay=delay)
    zeros = jax.tree.map(np.zeros_like, GRADIENTS)
    run = _harness.trajectory(tx, PARAMS, how)
    updates, states = run(GRADIENTS, params=zeros)
    last = _harness.at(states, -1).local.memory
    made = mean_of_own_steps(GRADIENTS)
    # The matrix is the only bucket, and the vector goes dense.
    for name, memory in zip(("w", "b"), last, strict=True):
        sent = updates[name].astype(np.float64).sum(0)
        held = memory.residual.mean(0, dtype=np.float64)
        found = sent + held[: sent.size].reshape(sent.shape)
        np.testing.assert_allclose(found, made[name], atol=2e-5)
        assert np.abs(sent).max() > RATE / 2


def test_alone_and_whole_it_is_the_optimizer():
    memory = gravac.OwnOptimizer(optax.lamb(RATE), by_leaf=True)
    tx = gravac.transform(None, compress=COMPRESS, memory=memory, send=gravac.Dense())
    params = {"w": np.ones((8, 8), np.float32), "b": np.ones(5, np.float32)}
    ours, state, update = dict(params), tx.init(params), jax.jit(tx.update)
    dense, lamb = dict(params), optax.lamb(RATE).init(params)
    for step in range(3):
        gradient = jax.tree.map(lambda g, at=step: g[at, 0], GRADIENTS)
        updates, state = update(gradient, state, ours)
        ours = optax.apply_updates(ours, updates)
        with jax.numpy_dtype_promotion("standard"):
            updates, lamb = optax.lamb(RATE).update(gradient, lamb, dense)
        dense = optax.apply_updates(dense, updates)
        assert np.abs(dense["w"] - params["w"]).max() > 0.01
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), ours, dense)


def test_the_optimizer_sees_paths_and_shapes():
    seen = []

    def look(updates, state, params):
        seen.append([{k: x.shape for k, x in d.items()} for d in (updates, params)])
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), look)
    params = {"hidden": {"kernel": jnp.ones((4, 6))}, "bias": jnp.ones(6)}
    memory, compress = gravac.OwnOptimizer(spy, by_leaf=True), gravac.matrices(1)
    tx = gravac.transform(None, compress=compress, memory=memory, send=gravac.Dense())
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    kernel, bias = {"['hidden']['kernel']": (4, 6)}, {"['bias']": (6,)}
    assert seen == [[kernel, kernel], [bias, bias]]
    jax.tree.map(np.testing.assert_array_equal, updates, params)


LABELS = {"['b']": "adam", "['w']": "sgd"}


def test_parts_without_leaves_are_not_shown_to_the_optimizer():
    optimizers = {"adam": optax.adam(RATE), "sgd": optax.sgd(RATE)}
    label = lambda leaves: {path: LABELS[path] for path in leaves}
    memory = gravac.OwnOptimizer(optax.partition(optimizers, label), by_leaf=True)
    gradient = jax.tree.map(lambda g: g[0, 0], GRADIENTS)
    for compress in (True, False):  # nothing goes dense, nothing is compressed
        chosen = {"compress": compress, "send": gravac.Dense()}
        tx = gravac.transform(axis_name=None, memory=memory, **chosen)
        updates, _ = jax.jit(tx.update)(gradient, tx.init(PARAMS), PARAMS)
        np.testing.assert_allclose(updates["w"], -RATE * gradient["w"], rtol=1e-6)
        signs = -RATE * np.sign(gradient["b"])
        np.testing.assert_allclose(updates["b"], signs, rtol=1e-4)


WAYS = {
    "late, clipped": {"delay": 1, "clip": gravac.ClipByGlobalNorm(1.0)},
    "rounds, in turn, decay": {
        "send": gravac.Bits(2, turns=2),
        "every": 2,
        "weight_decay": 0.1,
    },
}


@pytest.mark.parametrize("way", _harness.choices(WAYS, lambda x: "late" in x))
def test_adam_by_leaf_is_adam(way):
    """In a whole train step, with a bad batch, micro-batches and a flush."""
    found = []
    batches = np.float32(np.random.default_rng(0).normal(size=(4, 4 * N, 8)))
    batches[2, 5] = np.nan
    for by_leaf in (False, True):
        memory = gravac.OwnOptimizer(optax.adam(RATE), by_leaf=by_leaf)
        usual = {"compress": COMPRESS, "send": ROWS}
        tx = gravac.transform(memory=memory, **usual | WAYS[way])
        loss = lambda params, x: (
            jnp.mean((x @ params["w"] - 1) ** 2) + jnp.sum(params["b"] ** 2)
        )
        step = gravac.train_step(loss, tx, N, micro_batches=2)
        state = step.init(jax.tree.map(np.ones_like, PARAMS))
        for batch in batches:
            *state, _ = step(*state, batch)
        found.append(step.flush(*state)[0])
    assert np.abs(found[0]["w"] - 1).max() > RATE
    for name, x in found[0].items():
        np.testing.assert_allclose(found[1][name], x, rtol=1e-5)


def test_a_leaf_that_is_cut_is_refused(monkeypatch):
    monkeypatch.setattr(_buckets, "MAX_ENTRIES", 100)
    memory = gravac.OwnOptimizer(MUON, by_leaf=True)
    tx = gravac.transform(compress=True, memory=memory)
    with pytest.raises(ValueError, match="whole leaves, and a leaf lies in two of 2"):
        tx.init({"u": jnp.ones((10, 9)), "w": jnp.ones((10, 10))})


def test_slices_are_refused():
    memory = gravac.OwnOptimizer(MUON, by_leaf=True)
    mesh = gravac.make_mesh(("dcn", "ici"), hosts=1)
    lies = jax.NamedSharding(mesh, jax.P("ici"))
    with pytest.raises(ValueError, match="each device has slices of them"):
        gravac.transform("dcn", shardings={"w": lies}, memory=memory)


def test_an_optimizer_of_leaves_is_named_where_it_is_not_asked_for():
    for mask in ({"w": True}, lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)):
        for optimizer in (MUON, optax.adamw(RATE, mask=mask)):
            with pytest.raises(ValueError, match=r"For Muon .*\(..., by_leaf="):
                gravac.OwnOptimizer(optimizer)
    with pytest.raises(TypeError, match="`by_leaf`"):
        gravac.OwnOptimizer(MUON, by_leaf="yes")  # type: ignore[arg-type]
