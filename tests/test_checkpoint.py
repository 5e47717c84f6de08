"""Training that was cut goes on as if it had not been; on other replicas, too."""

import functools
import itertools

import _examples
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import AXIS_TYPES, assert_same, choices, make_mesh
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import gravac_jax as gravac
from gravac_jax import checkpoint
from gravac_jax._checkpoint import portable
from gravac_jax._controllers import CONTROLLERS
from gravac_jax._error_feedback import MEMORIES
from gravac_jax._exchanges import EXCHANGES

N, STEPS, ROWS = 4, 5, 24
RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(STEPS + 3, ROWS, 24)).astype(np.float32)
PARAMS = {
    "b": np.zeros(16, np.float32),
    "u": RNG.normal(size=(16, 8)).astype(np.float32),
    "w": RNG.normal(size=(24, 16)).astype(np.float32),
}
LADDER = (1, 4, 16)


def one_of(kind):
    """Its members differ in no state."""
    return _examples.members((kind,))[0]


RECIPES = {
    "default": {},
    "without times": {"is_told": False},
    "clip, decay, checks": {
        "clip": gravac.ClipByGlobalNorm(1.0),
        "weight_decay": 0.01,
        "check_every": 2,
    },
    "nothing compressed": {"compress": False},
    "buckets": {"bucket_bytes": 400, "memory": gravac.Momentum(0.5)},
    **{kind.__name__: {"memory": one_of(kind)} for kind in MEMORIES},
    **{kind.__name__: {"exchange": one_of(kind)} for kind in EXCHANGES},
    **{kind.__name__: {"controller": one_of(kind)} for kind in CONTROLLERS},
}
QUICK = ("buckets",)


def transform(**recipe):
    masks = getattr(recipe.get("memory"), "masks", False)
    if masks:
        recipe |= {"exchange": gravac.AllGather(gravac.TopK())}
    usual = {
        "controller": gravac.Fastest(ladder=LADDER),
        "compress": lambda path, leaf: leaf.ndim == 2,
    }
    return gravac.transform(**usual | recipe)


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean((hidden @ params["u"] - 1) ** 2)


class Run:
    """A training run on a mesh or on simulated replicas."""

    def __init__(self, where=N, *, is_told=True, **recipe):
        keeps = {"memory", "momentum"} & set(recipe)
        after = optax.sgd(0.05, momentum=None if keeps else 0.5)
        self.tx = optax.chain(transform(**recipe), after)
        self.where, self.is_told = where, is_told
        drive = gravac.simulate if isinstance(where, int) else gravac.data_parallel
        self.step = drive(self.train_step, where)

    def train_step(self, params, opt_state, batch, step_seconds):
        value, grads = gravac.value_and_grad(loss)(params, batch)
        updates, opt_state = self.tx.update(
            grads, opt_state, params, step_seconds=step_seconds
        )
        return optax.apply_updates(params, updates), opt_state, value

    def begin(self):
        return gravac.place((PARAMS, self.tx.init(PARAMS)), self.where)

    def train(self, state, first, last, checkpointer=None):
        """The state after these steps, all that was taken, saved at each."""
        for i in range(first, last):
            seconds = np.float32(0.01 * (1 + i % 3) if self.is_told else np.nan)
            *state, _ = self.step(*state, BATCHES[i], step_seconds=seconds)
            if checkpointer is not None:
                assert checkpointer.save(i + 1, tuple(state), state[0], data={"at": i})
        return tuple(state)

    def copy(self, state):
        return jax.tree.map(jnp.copy, state)


def saving(directory):
    return checkpoint.Checkpointer(directory, save_every=1, keep=None)


def restored(checkpointer, run, step=None):
    state = run.begin()
    return checkpointer.restore(state, state[0], step)


def local(state):
    return optax.tree.get(state, "TransformState").local


def mean_held(state):
    """What all replicas hold back together, and their momentum, by field and bucket."""
    mean = lambda x: np.asarray(x, np.float64).mean(0)
    return [jax.tree.map(mean, x._asdict()) for x in local(state).memory]


# As many replicas: bit for bit, wherever it is cut.


@pytest.mark.parametrize("recipe", choices(RECIPES, lambda x: x in QUICK))
def test_cut_at_any_step_a_run_goes_on_bit_for_bit(tmp_path, recipe):
    run = Run(**RECIPES[recipe])
    with saving(tmp_path) as checkpointer:
        state = run.train(run.begin(), 0, STEPS, checkpointer)
        for step in range(1, STEPS + 1):
            saved = restored(checkpointer, run, step)
            assert (saved.step, saved.data) == (step, {"at": step - 1})
            assert_same(run.train(saved.tree, step, STEPS), state, f"cut at {step}")


@pytest.mark.parametrize("axis_type", choices(AXIS_TYPES, lambda x: x == AXIS_TYPES[0]))
def test_on_a_mesh_too(tmp_path, axis_type):
    run = Run(make_mesh(axis_type=axis_type), momentum=0.5)
    with saving(tmp_path) as checkpointer:
        state = run.train(run.begin(), 0, 3, checkpointer)
        state = run.train(state, 3, STEPS)
        saved = restored(checkpointer, run)
        placed = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
        assert placed(saved.tree) == placed(run.begin())
        assert_same(run.train(saved.tree, 3, STEPS), state)


def test_a_residual_is_written_in_the_shape_of_its_leaf(tmp_path):
    run = Run()
    state = run.train(run.begin(), 0, 2)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(2, state, state[0])
        checkpointer.wait()
        saved = checkpointer._orbax.load(2)["1"]["0"]
    flat = np.asarray(local(state).memory[0].residual)
    assert set(saved["memory"]["residual"]) == {"u", "w"}
    u, w = saved["memory"]["residual"]["u"], saved["memory"]["residual"]["w"]
    assert np.array_equal(u, flat[:, : 16 * 8].reshape(N, 16, 8))
    assert np.array_equal(w, flat[:, 16 * 8 :].reshape(N, 24, 16))


def test_nothing_is_there_before_the_first(tmp_path):
    run = Run()
    with saving(tmp_path) as checkpointer:
        assert restored(checkpointer, run) is None
        assert checkpointer.steps == []


def test_what_is_saved_is_due_and_the_newest_are_kept(tmp_path):
    run = Run()
    with checkpoint.Checkpointer(tmp_path, save_every=2, keep=2) as checkpointer:
        state = run.begin()
        kept = [i for i in range(1, 9) if checkpointer.save(i, state, state[0])]
        assert kept == [2, 4, 6, 8]
        checkpointer.wait()
        assert checkpointer.steps == [6, 8]
        assert not checkpointer.save(8, state, state[0]), "it is there"


def test_the_state_may_be_donated_while_it_is_written(tmp_path):
    run = Run()
    with saving(tmp_path) as checkpointer:
        state = run.train(run.begin(), 0, 1)
        expected = jax.tree.map(np.array, state)
        checkpointer.save(1, state, state[0])
        run.train(state, 1, STEPS)
        saved = restored(checkpointer, run)
    assert_same(jax.tree.map(np.asarray, saved.tree), expected)


# Other numbers of replicas.


@pytest.mark.parametrize(
    ("old", "new"), list(itertools.product([1, 2, 3, 4, 7, 8], repeat=2))
)
def test_dealing_keeps_the_mean_and_signs(old, new):
    x = RNG.integers(0, 9, (old, 5)).astype(np.float32)
    dealt = np.asarray(portable.deal(jnp.asarray(x), new, None))
    # Slowly: every old replica gives an equal share to each place that it covers.
    places = np.repeat(x, new, axis=0).reshape(new, old, 5).mean(1, dtype=np.float64)
    np.testing.assert_allclose(dealt, places, rtol=2**-22, atol=0)
    np.testing.assert_allclose(dealt.mean(0), x.mean(0), rtol=2**-22, atol=0)
    assert (dealt >= 0).all()
    if old % new == 0:
        groups = x.reshape(new, old // new, 5).sum(1) * np.float32(new / old)
        np.testing.assert_allclose(dealt, groups, rtol=2**-22, atol=0)
    if new % old == 0:
        assert np.array_equal(dealt, np.repeat(x, new // old, axis=0))


WHERES = {
    "1": 1,
    "3": 3,
    "8": 8,
    "mesh of 2": make_mesh((2,)),
    "mesh of 8": make_mesh((8,), axis_type=AXIS_TYPES[1]),
}
MOVED = {
    "momentum": {"memory": gravac.Momentum(0.5)},
    "adam": {"memory": gravac.Adam()},
    "low rank": {"exchange": gravac.LowRank()},
    "buckets": {"bucket_bytes": 400},
}


@functools.cache
def four(recipe):
    run = Run(make_mesh(), **MOVED[recipe])
    return run, run.train(run.begin(), 0, 3)


# Each recipe goes to a mesh of 8, and momentum everywhere.
MOVES = [("momentum", where) for where in WHERES]
MOVES += [(recipe, "mesh of 8") for recipe in MOVED if recipe != "momentum"]


@pytest.mark.parametrize(
    "move", choices(MOVES, lambda x: x == ("momentum", "mesh of 8"), "-".join)
)
def test_on_others_the_mean_of_what_is_held_is_what_it_was(tmp_path, move):
    recipe, where = move
    _, state = four(recipe)
    other = Run(WHERES[where], **MOVED[recipe])
    with saving(tmp_path) as checkpointer:
        checkpointer.save(3, state, state[0])
        moved = restored(checkpointer, other).tree
    assert_same(jax.tree.map(np.asarray, moved[0]), jax.tree.map(np.asarray, state[0]))
    before, after = mean_held(state), mean_held(moved)
    for one, two in zip(before, after, strict=True):
        for name, x in one.items():
            scale = np.abs(x).max()
            np.testing.assert_allclose(two[name], x, rtol=0, atol=scale * 2**-22)
        assert "second_moment" not in two or (two["second_moment"] >= 0).all()
    counts = ("skipped_steps", "dense_steps")
    for name in ("steps", "rung", *counts):
        values = [int(optax.tree.get(x, name)) for x in (state, moved)]
        assert values[0] == values[1]
    other.train(moved, 3, STEPS)


def test_there_and_back_is_where_it_was(tmp_path):
    run, state = four("momentum")
    many = Run(8, **MOVED["momentum"])
    with saving(tmp_path) as checkpointer:
        checkpointer.save(3, state, state[0])
        eight = restored(checkpointer, many).tree
        checkpointer.save(4, eight, eight[0])
        back = restored(checkpointer, run).tree
    assert_same(
        jax.tree.map(np.asarray, local(back).memory),
        jax.tree.map(np.asarray, local(state).memory),
    )


def test_what_is_known_of_seconds_is_not_carried_to_others(tmp_path):
    run, state = four("momentum")
    assert optax.tree.get(state, "Timing").times > 0
    with saving(tmp_path) as checkpointer:
        checkpointer.save(3, state, state[0])
        same = restored(checkpointer, run).tree
        other = restored(checkpointer, Run(2, **MOVED["momentum"])).tree
    assert optax.tree.get(same, "Timing").times == optax.tree.get(state, "Timing").times
    assert optax.tree.get(other, "Timing").times == 0
    averages = [optax.tree.get(x, "Averages") for x in (state, other)]
    assert_same(*jax.tree.map(np.asarray, averages))


def test_gravac_fills_its_table_and_searches_anew_on_others(tmp_path):
    controller = gravac.GraVAC(ladder=LADDER, window=1, omega=0.5)
    run, other = (Run(n, controller=controller) for n in (N, 2))
    state = run.train(run.begin(), 0, STEPS)
    assert optax.tree.get(state, "throughputs").any()
    with saving(tmp_path) as checkpointer:
        checkpointer.save(3, state, state[0])
        moved = restored(checkpointer, other).tree
    assert not optax.tree.get(moved, "throughputs").any()
    assert not optax.tree.get(moved, "is_settled")
    for name in ("minimum", "candidate"):
        assert optax.tree.get(moved, name) == optax.tree.get(state, name)


# Other buckets, another ladder, another controller.


BUCKETED = {"Momentum": gravac.Momentum(0.5), "Adam": gravac.Adam()}


@pytest.mark.parametrize("memory", choices(BUCKETED, lambda x: x == "Adam"))
def test_buckets_may_be_others(tmp_path, memory):
    memory = BUCKETED[memory]
    one, several = Run(memory=memory), Run(memory=memory, bucket_bytes=400)
    state = one.train(one.begin(), 0, 3)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(3, state, state[0])
        cut = restored(checkpointer, several).tree
        checkpointer.save(4, several.copy(cut), cut[0])
        back = restored(checkpointer, one, 4).tree
    assert len(local(cut).memory) == 2
    whole = lambda x, name: np.concatenate(
        [np.asarray(getattr(bucket, name)) for bucket in local(x).memory], axis=-1
    )
    for name in ("residual", "velocity", "first_moment"):
        if hasattr(local(state).memory[0], name):
            assert np.array_equal(whole(cut, name), whole(state, name))
    assert_same(
        jax.tree.map(np.asarray, local(back).memory),
        jax.tree.map(np.asarray, local(state).memory),
    )
    several.train(cut, 3, STEPS)


OTHERS = {
    "longer": gravac.Fastest(ladder=(1, 4, 16, 32)),
    "as long": gravac.Fastest(ladder=(1, 4, 17)),
    "controller": gravac.GraVAC(ladder=LADDER),
    "both": gravac.Fixed(8),
}


@pytest.mark.parametrize("other", choices(OTHERS, lambda x: x == "as long"))
def test_with_another_ladder_or_controller_it_begins_anew_and_says_so(tmp_path, other):
    run, changed = Run(), Run(controller=OTHERS[other])
    state = run.train(run.begin(), 0, 3)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(3, state, state[0])
        with pytest.warns(UserWarning, match="the controller begins anew"):
            moved = restored(checkpointer, changed).tree
    fresh = optax.tree.get(changed.begin(), "TransformState")
    ours = optax.tree.get(moved, "TransformState")
    for name in ("rung", "controller", "past_rungs", "ladder"):
        assert_same(getattr(ours, name), getattr(fresh, name), name)
    assert ours.steps == 3
    assert ours.info.dense_steps == optax.tree.get(state, "dense_steps")
    assert_same(
        jax.tree.map(np.asarray, ours.local.memory),
        jax.tree.map(np.asarray, local(state).memory),
    )
    changed.train(moved, 3, STEPS)


# Without a transform before.


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


# Training states of Flax, and none that are placed.


def test_a_train_state_of_linen(tmp_path):
    module, x = nn.Dense(16), BATCHES[0]
    params = module.init(jax.random.key(0), x)["params"]
    tx = optax.chain(transform(), optax.sgd(0.05))
    begin = lambda n: gravac.place(
        TrainState.create(apply_fn=module.apply, params=params, tx=tx), n
    )

    def train_step(state, x):
        loss = lambda p, x: jnp.mean(state.apply_fn({"params": p}, x) ** 2)
        value, grads = gravac.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    state, _ = gravac.simulate(train_step, N)(begin(N), x)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, state, state.params)
        fresh = begin(N)
        saved = checkpointer.restore(fresh, fresh.params)
    assert_same(saved.tree, state)


def test_an_optimizer_of_nnx(tmp_path):
    tx = optax.chain(transform(), optax.sgd(0.05))

    def begin(n):
        model = nnx.Linear(24, 16, rngs=nnx.Rngs(0))
        return gravac.place((model, nnx.Optimizer(model, tx, wrt=nnx.Param)), n)

    def train_step(model, optimizer, x):
        loss = lambda model, x: jnp.mean(model(x) ** 2)
        value, grads = gravac.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return model, optimizer, value

    *state, _ = gravac.simulate(train_step, N)(*begin(N), BATCHES[0])
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, tuple(state), nnx.state(state[0], nnx.Param))
        fresh = begin(N)
        saved = checkpointer.restore(fresh, nnx.state(fresh[0], nnx.Param))
    assert_same(jax.tree.leaves(saved.tree), jax.tree.leaves(tuple(state)))
    model, _, _ = gravac.simulate(train_step, N)(*saved.tree, BATCHES[1])
    assert np.isfinite(model(BATCHES[1])).all()


@pytest.mark.slow
def test_alone_there_is_nothing_to_place(tmp_path):
    tx = gravac.transform(
        axis_name=None, compress=True, controller=gravac.Fixed(4), momentum=0.5
    )
    state = tx.init(PARAMS)
    _, state = tx.update(PARAMS, state)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, state, PARAMS)
        saved = checkpointer.restore(tx.init(PARAMS), PARAMS)
    assert_same(saved.tree, state)


# Two axes, and params in slices.


def two_axes(slow, fast):
    """A mesh, params of which some are sliced, a step, and the state before it."""
    mesh = make_mesh((slow, fast), ("dcn", "ici"))
    is_sliced = {"b": False, "u": False, "w": True}
    specs = {"b": jax.P(), "u": jax.P(), "w": jax.P(None, "ici")}
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    params = jax.tree.map(put, PARAMS, specs)
    exchange = gravac.transform(
        "dcn",
        dense_axis_name="ici",
        sharded=is_sliced,
        controller=gravac.Fixed(4),
        momentum=0.5,
    )
    tx = optax.chain(exchange, optax.sgd(0.05))

    def train_step(params, opt_state, batch):
        def whole_loss(params, x):
            gather = lambda x: jax.lax.all_gather(x, "ici", axis=1, tiled=True)
            return loss({**params, "w": gather(params["w"])}, x)

        value, grads = gravac.value_and_grad(whole_loss, ("dcn", "ici"))(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    step = gravac.data_parallel(train_step, mesh, "dcn", "ici")
    return step, (params, gravac.init(tx, params, mesh, "dcn", "ici"))


SHAPES = [(2, 4), (4, 2), (2, 2), (3, 1), (1, 8)]


@pytest.mark.parametrize("shape", choices(SHAPES, lambda x: x == (4, 2)))
def test_slices_of_another_count_hold_the_same(tmp_path, shape):
    step, state = two_axes(2, 4)
    for i in range(3):
        *state, _ = step(*state, BATCHES[i])
    other_step, fresh = two_axes(*shape)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(3, tuple(state), state[0])
        checkpointer.wait()
        there = checkpointer._orbax.load(3)["1"]["0"]["memory"]
        moved = checkpointer.restore(fresh, fresh[0]).tree
        checkpointer.save(4, moved, moved[0])
        checkpointer.wait()
        here = checkpointer._orbax.load(4)["1"]["0"]["memory"]
    assert there["residual"]["w"].shape == (2, 24, 16)
    assert here["residual"]["w"].shape == (shape[0], 24, 16)
    for name in ("residual", "velocity"):
        x, y = (np.asarray(kept[name]["w"], np.float64) for kept in (there, here))
        assert np.abs(x).max() > 0
        np.testing.assert_allclose(
            y.mean(0), x.mean(0), rtol=0, atol=np.abs(x).max() * 2**-22
        )
    if shape == (2, 4):
        again = step(*moved, BATCHES[3])
        assert_same(
            jax.tree.map(np.asarray, again),
            jax.tree.map(np.asarray, step(*state, BATCHES[3])),
        )
    else:
        other_step(*moved, BATCHES[3])
