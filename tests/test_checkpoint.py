"""A run that was cut goes on as if it had not been, also on other replicas."""

import functools
import itertools

import _examples
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import AXIS_TYPES, Scripted, assert_same, choices, make_mesh, on_host
from flax import nnx

import gravac_jax as gravac
from gravac_jax import _buckets, _state, checkpoint
from gravac_jax._controllers import CONTROLLERS
from gravac_jax._memory import MEMORIES
from gravac_jax.checkpoint import _layout

N, STEPS, ROWS = 4, 5, 24
RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(STEPS + 3, ROWS, 24)).astype(np.float32)
PARAMS = {
    "b": np.zeros(16, np.float32),
    "u": RNG.normal(size=(16, 8)).astype(np.float32),
    "w": RNG.normal(size=(24, 16)).astype(np.float32),
}
ENTRIES = sum(x.size for x in PARAMS.values())
DENSE, FEW = gravac.Dense(), gravac.TopK(4)  # which has a state
TWO_BITS = gravac.Bits(2, row_entries=32)  # which compiles fast
BITS = {"send": TWO_BITS}
ADAM = {"memory": gravac.OwnOptimizer(optax.scale_by_adam())}
CHOOSES = {**ADAM, "send": gravac.Fastest((DENSE, TWO_BITS))}
IN_TURN = gravac.Bits(2, turns=4, row_entries=32)
PADDED = {**ADAM, "compress": True, "send": IN_TURN}

RECIPES = {
    "clip, decay, checks": BITS
    | {"clip": gravac.ClipByGlobalNorm(1.0), "weight_decay": 0.01, "check_every": 2},
    "nothing compressed": {"compress": False, "send": FEW},
    "several buckets": CHOOSES,
    "several encodings": {"send": Scripted((DENSE, gravac.LowRank(4), FEW))},
    "search": {"send": gravac.GraVAC((DENSE, FEW), window=1, omega=0.5)},
    "delay": {"delay": 1, "memory": gravac.Momentum(0.5), **BITS},
    "rounds": {"every": 2, "memory": gravac.Momentum(0.5), **BITS},
    "Momentum": {"memory": gravac.Momentum(0.5), "send": FEW},
    "LowRank": {"send": gravac.LowRank(2)},
    "a padded bucket": PADDED,
    "several padded buckets": PADDED,
    "Steps": CHOOSES,
    "by leaf, padded": PADDED
    | {"memory": gravac.OwnOptimizer(optax.contrib.muon(0.1), by_leaf=True)},
}
# Each memory and controller once: their states are kept apart.
FAMILIES = {"memory": MEMORIES, "send": CONTROLLERS}
TOGETHER = {}
for kinds in itertools.zip_longest(*map(_examples.one_of_each, FAMILIES.values())):
    recipe = {x: y for x, y in zip(FAMILIES, kinds, strict=True) if y is not None}
    TOGETHER[", ".join(type(x).__name__ for x in recipe.values())] = recipe
OPTIONS = (
    *("clip, decay, checks", "nothing compressed", "several buckets", "delay"),
    *("several padded buckets", "by leaf, padded", "several encodings", "Steps"),
)


def transform(**recipe):
    usual = {
        "send": gravac.Fastest((DENSE, FEW)),
        "compress": lambda path, leaf: leaf.ndim == 2,
    }
    return gravac.transform(**usual | recipe)


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean((hidden @ params["u"] - 1) ** 2)


class Run:
    """A training run on a mesh, or on simulated replicas."""

    def __init__(self, where=N, **recipe):
        after = optax.sgd(0.05, momentum=None if "memory" in recipe else 0.5)
        self.tx = optax.chain(transform(**recipe), after)
        self.where = where
        self.step = gravac.data_parallel(self.train_step, where)

    def train_step(self, params, opt_state, batch, step_seconds):
        value, grads = gravac.value_and_grad(loss)(params, batch)
        updates, opt_state = self.tx.update(
            grads, opt_state, params, step_seconds=step_seconds
        )
        return optax.apply_updates(params, updates), opt_state, value

    def begin(self):
        state = gravac.place((PARAMS, self.tx.init(PARAMS)), self.where)
        # A restored state is committed to its device; jit compiles anew for another.
        return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))

    def train(self, state, first, last, checkpointer=None):
        """Return the state after these steps, saved at each."""
        for i in range(first, last):
            seconds = np.float32(0.01 * (1 + i % 3))
            *state, _ = self.step(*state, BATCHES[i], step_seconds=seconds)
            if checkpointer is not None:
                assert checkpointer.save(i + 1, tuple(state), state[0], data={"at": i})
        return tuple(state)


@functools.cache
def run_of(recipe="Steps", where=N):
    return Run(where, **(RECIPES | TOGETHER)[recipe])


@functools.cache
def after_three_steps(recipe="Momentum"):
    """A run, that of `Momentum` on a mesh, and its state; not to be donated."""
    run = run_of(recipe, make_mesh() if recipe == "Momentum" else N)
    return run, run.train(run.begin(), 0, 3)


def saving(directory):
    return checkpoint.Checkpointer(directory, save_every=1, keep=None)


def restored(checkpointer, run, step=None):
    state = run.begin()
    return checkpointer.restore(state, state[0], step)


def moved(directory, state, run, step=3):
    """Return a state that one run saved and another one restored."""
    with saving(directory) as checkpointer:
        checkpointer.save(step, jax.tree.map(jnp.copy, state), state[0])
        return restored(checkpointer, run, step).tree


def placed(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def local(state):
    return optax.tree.get(state, "TransformState").local


def filled(state):
    """Return the state with other numbers in its memory."""
    draw = lambda x: RNG.normal(size=x.shape).astype(x.dtype)
    put = lambda x: jax.device_put(draw(x), x.sharding)
    memory = jax.tree.map(put, local(state).memory)
    return state[0], optax.tree.set(state[1], memory=memory)


# On as many replicas every bit is the same, wherever the run is cut.


@pytest.mark.parametrize(
    "recipe", choices([*OPTIONS, *TOGETHER], lambda x: x == "Steps")
)
def test_a_run_cut_at_any_step_goes_on_bit_for_bit(tmp_path, monkeypatch, recipe):
    if recipe.startswith("several"):
        monkeypatch.setattr(_buckets, "MAX_ENTRIES", 300)
    run = run_of(recipe)
    with saving(tmp_path) as checkpointer:
        state = run.train(run.begin(), 0, STEPS, checkpointer)
        for step in range(1, STEPS + 1):
            saved = restored(checkpointer, run, step)
            assert (saved.step, saved.data) == (step, {"at": step - 1})
            assert_same(run.train(saved.tree, step, STEPS), state, f"cut at {step}")


def test_on_a_mesh_too_and_the_state_may_be_donated_while_it_is_written(tmp_path):
    run, state = after_three_steps()
    with saving(tmp_path) as checkpointer:
        state = jax.tree.map(jnp.copy, state)
        expected = on_host(state)
        checkpointer.save(3, state, state[0])
        state = run.train(state, 3, STEPS)
        saved = restored(checkpointer, run)
        assert placed(saved.tree) == placed(run.begin())
        assert_same(on_host(saved.tree), expected)
        assert_same(run.train(saved.tree, 3, STEPS), state)


def test_every_kind_of_leaf_is_restored(tmp_path):
    tree = {
        "int": 3,
        "float": float("inf"),
        "bits": jnp.array([True, False]),
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "host": np.arange(3.0),
        "key": jax.random.key(7),
        "empty": jnp.zeros((0, 3)),
    }
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, tree, {})
        zeros = jax.tree.map(lambda x: x * 0 if isinstance(x, np.ndarray) else x, tree)
        zeros |= {"int": 0, "float": 0.0, "key": jax.random.key(0)}
        saved = checkpointer.restore(zeros, {}).tree
    bits = lambda tree: tree | {"key": jax.random.key_data(tree["key"])}
    assert_same(on_host(bits(saved)), on_host(bits(tree)))


# The format.


def test_version_8_stores_these_names_and_shapes(tmp_path):
    """Checkpoints of earlier releases have them: a new name needs a new version."""
    state = filled(Run(**ADAM).begin())
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, state, state[0])
        checkpointer.wait()
        stored = checkpointer._orbax.load(1)["1"]["0"]
    assert set(stored) == {
        *("version", "replicas", "steps", "ladder", "decided", "ahead", "past_rungs"),
        *("controller", "info", "replica", "memory", "encodings"),
    }
    assert (stored["version"], stored["replicas"]) == (8, N)
    assert _state.Round._fields == ("length", "next_length", "exchanges")
    assert jax.tree.map(np.shape, stored["encodings"]) == {
        "0": {"TopK": {"reached": (N,), "threshold": (N,)}}
    }
    per_leaf = {"b": (N, 16), "u": (N, 16, 8), "w": (N, 24, 16)}
    assert jax.tree.map(np.shape, stored["memory"]) == {
        "residual": per_leaf,
        "optimizer": {"mu": per_leaf, "nu": per_leaf, "count": (N,)},
    }
    flat = np.asarray(local(state).memory[0].residual)
    u, w = (stored["memory"]["residual"][name] for name in ("u", "w"))
    assert np.array_equal(u, flat[:, : 16 * 8].reshape(N, 16, 8))
    assert np.array_equal(w, flat[:, 16 * 8 :].reshape(N, 24, 16))


def test_checkpoints_are_saved_when_due_and_the_newest_are_kept(tmp_path):
    state = run_of().begin()
    with checkpoint.Checkpointer(tmp_path, save_every=2, keep=2) as checkpointer:
        assert restored(checkpointer, run_of()) is None
        saved = [i for i in range(1, 9) if checkpointer.save(i, state, state[0])]
        assert saved == [2, 4, 6, 8]
        checkpointer.wait()
        assert checkpointer.steps == [6, 8]
        assert not checkpointer.save(8, state, state[0]), "it exists already"


# Other numbers of replicas.


@pytest.mark.parametrize(
    ("old", "new"), list(itertools.product([1, 3, 4, 8], repeat=2))
)
def test_redistributing_keeps_the_mean_and_the_sign(old, new):
    x = RNG.integers(0, 9, (old, 5)).astype(np.float32)
    like = jax.eval_shape(lambda: jnp.zeros((new, 5)))
    received = np.asarray(_layout.redistribute(jnp.asarray(x), like, True))
    # Slowly: every old replica gives an equal share to each place that it covers.
    places = np.repeat(x, new, axis=0).reshape(new, old, 5).mean(1, dtype=np.float64)
    np.testing.assert_allclose(received, places, rtol=2**-22, atol=0)
    np.testing.assert_allclose(received.mean(0), x.mean(0), rtol=2**-22, atol=0)
    assert (received >= 0).all()
    if new % old == 0:
        assert np.array_equal(received, np.repeat(x, new // old, axis=0))
    narrow, like = (jnp.zeros((n, 5), jnp.bfloat16) for n in (old, new))
    assert _layout.redistribute(narrow, like, True).dtype == jnp.bfloat16


WHERES = {
    "1": 1,
    "3": 3,
    "8": 8,
    "mesh of 2": make_mesh((2,)),
    "mesh of 8": make_mesh((8,), axis_type=AXIS_TYPES[1]),
}
MOVES = [("Momentum", where) for where in WHERES]
MOVES += [
    (recipe, "mesh of 8")
    for recipe in ("Steps", "LowRank", "rounds", "a padded bucket")
]


@pytest.mark.parametrize(
    "move", choices(MOVES, lambda x: x == ("Momentum", "mesh of 8"), "-".join)
)
def test_on_other_replicas_the_mean_of_what_is_kept_stays_the_same(tmp_path, move):
    recipe, where = move
    run, state = after_three_steps(recipe)
    other = run_of(recipe, WHERES[where])
    there = moved(tmp_path / "there", state, other)
    assert_same(on_host(there[0]), on_host(state[0]))
    before, after = local(state).memory, local(there).memory
    kept = jax.tree.leaves_with_path(before)
    for (path, x), y in zip(kept, jax.tree.leaves(after), strict=True):
        x, y = (np.asarray(z, np.float64).mean(0) for z in (x, y))
        np.testing.assert_allclose(y, x, rtol=0, atol=np.abs(x).max() * 2**-22)
        assert "nu" not in jax.tree_util.keystr(path) or (y >= 0).all()
    shared = lambda ours: on_host((ours.steps, ours.decided, ours.info))
    assert_same(*(shared(optax.tree.get(x, "TransformState")) for x in (there, state)))
    assert placed(there) == placed(other.begin())
    jax.eval_shape(other.step, *there, BATCHES[3], step_seconds=np.float32(0.01))
    if where == "mesh of 8" and recipe == "Momentum":  # and back
        back = moved(tmp_path / "back", there, run)
        assert_same(on_host(local(back).memory), on_host(local(state).memory))


# What a controller knows that is true on any devices, and on its own alone.
KNOWN = {
    "Steps": (["Averages"], ["Timing"]),
    "search": (["minimum", "candidate"], ["throughputs", "is_settled"]),
}


@pytest.mark.parametrize("recipe", choices(KNOWN, lambda x: x == "Steps"))
def test_what_a_controller_knows_of_times_begins_anew_on_other_devices(
    tmp_path, recipe
):
    anywhere, here = KNOWN[recipe]
    run, other = run_of(recipe), run_of(recipe, 2)
    state = run.train(run.begin(), 0, STEPS)
    there = moved(tmp_path, state, other)
    get = lambda tree, name: on_host(optax.tree.get(tree, name))
    for name in anywhere:
        assert_same(get(there, name), get(state, name), name)
    for name in here:
        assert_same(get(there, name), get(other.begin(), name), name)
    assert any(np.any(x) for x in jax.tree.leaves(get(state, here[0])))


# Other buckets, another ladder, another controller.


@pytest.mark.parametrize(
    ("recipe", "cut_recipe", "n"),
    [
        ("Steps", "several buckets", ENTRIES - PARAMS["b"].size),
        pytest.param(
            *("a padded bucket", "several padded buckets", ENTRIES),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_number_of_buckets_may_change(tmp_path, monkeypatch, recipe, cut_recipe, n):
    one, several = run_of(recipe), run_of(cut_recipe)
    state = one.train(one.begin(), 0, 3)
    with monkeypatch.context() as patch:
        patch.setattr(_buckets, "MAX_ENTRIES", 300)
        cut = moved(tmp_path / "cut", state, several)
        jax.eval_shape(several.step, *cut, BATCHES[3], step_seconds=np.float32(0.01))
    back = moved(tmp_path / "back", cut, one)
    *buckets, _ = local(cut).memory
    assert len(buckets) == 2
    parts = [np.asarray(bucket.residual) for bucket in buckets]
    whole = np.asarray(local(state).memory[0].residual)
    assert np.any(whole)
    filled = np.concatenate([x[:, : n // 2] for x in parts], axis=1)
    assert np.array_equal(filled, whole[:, :n])
    assert not any(np.any(x[:, n // 2 :]) for x in parts)
    assert not np.any(whole[:, n:])
    assert (whole.shape[1] > n) == (recipe == "a padded bucket")
    assert_same(on_host(local(back).memory), on_host(local(state).memory))


@pytest.mark.parametrize("compress", [True, {"empty": False, "w": True}])
def test_a_leaf_without_entries_is_restored(tmp_path, compress):
    params = {"empty": jnp.zeros((0, 3)), "w": jnp.ones((24, 16))}
    tx = transform(compress=compress, send=FEW)
    state = gravac.place((params, tx.init(params)), N)
    there = gravac.place((params, tx.init(params)), 2)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, state, params)
        assert_same(checkpointer.restore(state, params).tree, state)
        assert_same(checkpointer.restore(there, params).tree, there)


@pytest.mark.slow
def test_what_an_optimizer_keeps_by_leaf_moves_with_its_leaf(tmp_path):
    memory = gravac.OwnOptimizer(optax.lamb(0.1), by_leaf=True)
    only_w = {"b": False, "u": False, "w": True}
    some, every = (Run(memory=memory, compress=x, **BITS) for x in (only_w, True))
    state = some.train(some.begin(), 0, 3)
    there = moved(tmp_path, state, every)
    momenta, same = {}, {}
    for found, run in ((momenta, state), (same, there)):
        for part in on_host(local(run).memory):
            found |= optax.tree.get(part, "mu", {})
    assert "['w']" in momenta
    assert_same(same, momenta)
    jax.eval_shape(every.step, *there, BATCHES[3], step_seconds=np.float32(0.01))


OTHERS = {
    "longer": (CHOOSES["send"], gravac.Fastest((DENSE, FEW, TWO_BITS))),
    "as long": (CHOOSES["send"], gravac.Fastest((DENSE, FEW))),
    "controller": (CHOOSES["send"], gravac.GraVAC((DENSE, TWO_BITS))),
    "both": (CHOOSES["send"], gravac.Bits(4, row_entries=32)),
    "encoding": (TWO_BITS, FEW),
    "and back": (FEW, TWO_BITS),
}


@pytest.mark.parametrize("delay", choices([0, 1], lambda x: x == 0))
@pytest.mark.parametrize(
    "other", choices(OTHERS, lambda x: x in ("encoding", "and back"))
)
def test_with_another_ladder_or_controller_decisions_begin_anew(tmp_path, other, delay):
    run, changed = (Run(**ADAM, send=x, delay=delay) for x in OTHERS[other])
    state = run.train(run.begin(), 0, 3)
    with pytest.warns(UserWarning, match="encodings keep, begin anew"):
        there = moved(tmp_path, state, changed)
    fresh, ours, theirs = (
        optax.tree.get(x, "TransformState") for x in (changed.begin(), there, state)
    )
    for name in ("decided", "ahead", "controller", "past_rungs", "ladder"):
        assert_same(getattr(ours, name), getattr(fresh, name), name)
    assert_same(ours.info.gains, fresh.info.gains)
    assert_same(ours.local.encodings, fresh.local.encodings)
    assert_same(ours.local.told, fresh.local.told)
    assert ours.steps == 3
    assert ours.info.dense_steps == theirs.info.dense_steps
    kept = lambda state, ours: on_host((state[0], state[1][1:], ours.local.memory))
    assert_same(kept(there, ours), kept(state, theirs))
    jax.eval_shape(changed.step, *there, BATCHES[3], step_seconds=np.float32(0.01))


@pytest.mark.slow
def test_a_round_under_way_and_the_next_one_keep_their_lengths(tmp_path):
    before, after = (Run(**ADAM, **BITS, every=x) for x in (3, 2))
    state = moved(tmp_path, before.train(before.begin(), 0, 2), after)
    ends = []
    for i in range(2, 8):
        state = after.train(state, i, i + 1)
        if not optax.tree.get(state, "StepInfo").local_steps:
            ends.append(i + 1)
    assert ends == [3, 6, 8]


SGD = optax.sgd(0.1, momentum=0.5)
PLAIN = {"alone": [SGD], "in a chain": [optax.add_decayed_weights(0.1), SGD]}


@pytest.mark.parametrize("name", PLAIN)
def test_a_run_that_had_no_transform_begins_with_empty_residuals(tmp_path, name):
    after = PLAIN[name]
    plain = after[0] if len(after) == 1 else optax.chain(*after)
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    _, state = plain.update(grads, plain.init(PARAMS), PARAMS)
    tx = optax.chain(transform(), *after)
    fresh = gravac.place((PARAMS, tx.init(PARAMS)), N)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(7, (PARAMS, state), PARAMS)
        with pytest.warns(UserWarning, match="empty residuals"):
            _, (ours, *others) = checkpointer.restore(fresh, PARAMS).tree
    assert_same(ours, fresh[1][0])
    assert_same(jax.tree.leaves(others), jax.tree.leaves(state))


# A state of Flax, and a state that is not placed.


@pytest.mark.slow
def test_an_optimizer_of_nnx(tmp_path):
    tx = optax.chain(transform(**BITS), optax.sgd(0.05))

    def begin():
        model = nnx.Linear(24, 16, rngs=nnx.Rngs(0))
        return gravac.place((model, nnx.Optimizer(model, tx, wrt=nnx.Param)), N)

    def train_step(model, optimizer, x):
        loss = lambda model, x: jnp.mean(model(x) ** 2)
        value, grads = gravac.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return model, optimizer, value

    step = gravac.simulate(train_step, N)
    *state, _ = step(*begin(), BATCHES[0])
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, tuple(state), nnx.state(state[0], nnx.Param))
        fresh = begin()
        saved = checkpointer.restore(fresh, nnx.state(fresh[0], nnx.Param))
    assert_same(jax.tree.leaves(saved.tree), jax.tree.leaves(tuple(state)))
    model, _, _ = step(*saved.tree, BATCHES[1])
    assert np.isfinite(model(BATCHES[1])).all()


@pytest.mark.slow
def test_a_transform_that_runs_alone(tmp_path):
    memory = gravac.Momentum(0.5)
    tx = gravac.transform(None, compress=True, memory=memory, send=FEW)
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS))
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, state, PARAMS)
        saved = checkpointer.restore(tx.init(PARAMS), PARAMS)
    assert_same(saved.tree, state)


# Two axes, and params in slices.


def in_slices(slow, fast):
    """Return the state of a run whose compiler shards the model."""
    mesh = make_mesh((slow, fast), ("dcn", "ici"))
    specs = {"b": jax.P(), "u": jax.P(), "w": jax.P(None, "ici")}
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    params = jax.tree.map(put, PARAMS, specs)
    memory = gravac.Momentum(0.5)
    tx = gravac.transform("dcn", shardings=params, memory=memory, **BITS)
    return gravac.place((params, (tx.init(params),)), mesh, "dcn")


@pytest.mark.parametrize(
    "shape", choices([(2, 4), (4, 2), (3, 1), (1, 8)], lambda x: x == (4, 2), str)
)
def test_the_number_of_slices_may_change(tmp_path, shape):
    state, fresh = filled(in_slices(2, 4)), in_slices(*shape)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(3, state, state[0])
        there = checkpointer.restore(fresh, fresh[0]).tree
        checkpointer.save(4, there, there[0])
        checkpointer.wait()
        stored = [checkpointer._orbax.load(i)["1"]["0"]["memory"] for i in (3, 4)]
    for name in ("residual", "velocity"):
        x, y = (np.asarray(kept[name]["w"], np.float64) for kept in stored)
        assert (x.shape, y.shape) == ((2, 24, 16), (shape[0], 24, 16))
        rounding = np.abs(x).max() * 2**-22
        assert rounding > 0
        np.testing.assert_allclose(y.mean(0), x.mean(0), rtol=0, atol=rounding)
    assert placed(there) == placed(fresh)
