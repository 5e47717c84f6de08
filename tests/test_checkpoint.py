"""A run that was cut goes on as if it had not been, also on other replicas.

What does not fit is refused, by name. `test_checkpoint_faults.py` damages files and
kills processes.
"""

import functools
import itertools

import _examples
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from _harness import AXIS_TYPES, Scripted, assert_same, choices, make_mesh, on_host
from flax import nnx

import gravac_jax as gravac
from gravac_jax import checkpoint
from gravac_jax._checkpoint import labels, layout
from gravac_jax._controllers import CONTROLLERS
from gravac_jax._memory import MEMORIES
from gravac_jax._step import bucketing, norms
from gravac_jax._step.states import Round
from gravac_jax.checkpoint import CheckpointError

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
CHOICE = gravac.Fastest((FEW, TWO_BITS))
MOMENTUM = {"memory": gravac.Momentum(0.5)}
ADAM = {"memory": gravac.OwnOptimizer(optax.scale_by_adam(), keeps_norm=True)}
CHOOSES = {**ADAM, "send": gravac.Fastest((DENSE, TWO_BITS))}
PADDED = {"compress": True, "send": gravac.Bits(2, turns=4, row_entries=32)}

RECIPES = {
    "clip, decay": BITS | {"clip": gravac.ClipByGlobalNorm(1.0), "weight_decay": 0.01},
    "nothing compressed": {"compress": False, "send": FEW},
    "several buckets": CHOOSES,
    "several encodings": {"send": Scripted((DENSE, gravac.LowRank(4), FEW))},
    "search": {"send": gravac.GraVAC((DENSE, FEW), window=1, omega=0.5)},
    "delay": {"delay": 1, **MOMENTUM, **BITS},
    "rounds": {"every": 2, **MOMENTUM, **BITS},
    "Momentum": {**MOMENTUM, "send": FEW},
    "LowRank": {"send": gravac.LowRank(2)},
    "a padded bucket": ADAM | PADDED,
    "several padded buckets": ADAM | PADDED,
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


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean((hidden @ params["u"] - 1) ** 2)


class Run:
    """A training run on a mesh, or on simulated replicas."""

    def __init__(self, where=N, after=None, **recipe):
        sgd = optax.sgd(0.05, momentum=None if "memory" in recipe else 0.5)
        few = {"send": gravac.Fastest((DENSE, FEW))}
        few |= {"compress": lambda path, leaf: leaf.ndim == 2}
        self.tx = optax.chain(gravac.transform(**few | recipe), after or sgd)
        self.where = where
        self.step = gravac.data_parallel(self.train_step, where)

    def train_step(self, params, opt_state, batch, step_seconds):
        value, grads = gravac.value_and_grad(loss)(params, batch)
        updates, opt_state = self.tx.update(
            grads, opt_state, params, step_seconds=step_seconds
        )
        return optax.apply_updates(params, updates), opt_state, value

    def begin(self, params=PARAMS):
        state = gravac.place((params, self.tx.init(params)), self.where)
        # A restored state is committed to its device; jit compiles anew for another.
        return jax.device_put(state, placed(state))

    def train(self, state, first, last, checkpointer=None):
        """Return the state after these steps, saved at each."""
        for i in range(first, last):
            seconds = np.float32(0.01 * (1 + i % 3))
            *state, _ = self.step(*state, BATCHES[i], step_seconds=seconds)
            if checkpointer is not None:
                assert checkpointer.save(i + 1, tuple(state), state[0], data={"at": i})
        return tuple(state)

    def can_go_on(self, state):
        """Trace the next step."""
        jax.eval_shape(self.step, *state, BATCHES[3], step_seconds=np.float32(0.01))


@functools.cache
def run_of(recipe="Steps", where=None):
    where = where or (make_mesh() if recipe == "Momentum" else N)
    return Run(where, **(RECIPES | TOGETHER)[recipe])


@functools.cache
def after_three_steps(recipe):
    """The state of a run; not to be donated."""
    return run_of(recipe).train(run_of(recipe).begin(), 0, 3)


def saving(directory):
    return checkpoint.Checkpointer(directory, save_every=1, keep=None)


def shapes_of(tree):
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.tree.map(lambda x: shape(x) if isinstance(x, jax.Array) else x * 0, tree)


def restored(checkpointer, run, step=None, like=lambda state: state):
    state = like(run.begin())
    return checkpointer.restore(state, state[0], step)


def moved(directory, state, run, step=3):
    """Return a state that one run saved and another one restored."""
    with saving(directory) as checkpointer:
        checkpointer.save(step, jax.tree.map(jnp.copy, state), state[0])
        return restored(checkpointer, run, step).tree


def placed(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def ours(state):
    return optax.tree.get(state, "TransformState")


def filled(state):
    """Return the state with other numbers, but for counts, in all that it learns."""
    draw = lambda x: RNG.normal(size=x.shape).astype(np.float32)
    put = lambda x: x if x.dtype == np.int32 else jax.device_put(draw(x), x.sharding)
    kept = {x: optax.tree.get(state, x) for x in ("memory", "encodings", "controller")}
    return state[0], optax.tree.set(state[1], **jax.tree.map(put, kept))


# On as many replicas every bit is the same, wherever the run is cut.


@pytest.mark.parametrize(
    "recipe", choices(RECIPES | TOGETHER, lambda x: x in ("Steps", "Momentum"))
)
def test_a_run_cut_at_any_step_goes_on_bit_for_bit(tmp_path, monkeypatch, recipe):
    """The state that is being saved is donated to the next step."""
    if recipe.startswith("several"):
        monkeypatch.setattr(bucketing, "MAX_ENTRIES", 300)
    run = run_of(recipe)
    with saving(tmp_path) as checkpointer:
        state = run.train(run.begin(), 0, STEPS, checkpointer)
        for step in range(1, STEPS + 1):
            saved = restored(checkpointer, run, step, *[shapes_of] * (step % 2))
            assert (saved.step, saved.data) == (step, {"at": step - 1})
            assert_same(run.train(saved.tree, step, STEPS), state, f"cut at {step}")


def test_every_kind_of_leaf_is_restored(tmp_path):
    tree = {
        **{"int": 3, "float": float("inf"), "host": np.arange(3.0)},
        "bits": jnp.array([True, False]),
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "key": jax.random.key(7),
        "empty": jnp.zeros((0, 3)),
        "alike": {"a.b": 1, "a": {"b": 2}, "a/b": 3, "['a']['b']": 4},
    }
    fresh = shapes_of(tree)
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, tree, {})
        saved = checkpointer.restore(fresh, {}).tree
        checkpointer.save(2, tree["half"], {})
        assert_same(checkpointer.restore(tree["half"] * 0, {}).tree, tree["half"])
    bits = lambda tree: tree | {"key": jax.random.key_data(tree["key"])}
    assert_same(on_host(bits(saved)), on_host(bits(tree)))


@pytest.mark.slow
def test_an_optimizer_of_nnx(tmp_path):
    tx = optax.chain(gravac.transform(**BITS), optax.sgd(0.05))

    def begin():
        model = nnx.Linear(24, 16, rngs=nnx.Rngs(0))
        return gravac.place((model, nnx.Optimizer(model, tx, wrt=nnx.Param)), N)

    def train_step(model, optimizer, x):
        loss = lambda model, x: jnp.mean(model(x) ** 2)
        optimizer.update(model, gravac.value_and_grad(loss)(model, x)[1])
        return model, optimizer

    step = gravac.data_parallel(train_step, N)
    state, fresh = step(*begin(), BATCHES[0]), begin()
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, state, nnx.state(state[0], nnx.Param))
        saved = checkpointer.restore(fresh, nnx.state(fresh[0], nnx.Param))
    assert_same(jax.tree.leaves(saved.tree), jax.tree.leaves(state))
    model, _ = step(*saved.tree, BATCHES[1])
    assert np.isfinite(model(BATCHES[1])).all()


# The format.


def test_version_9_stores_these_names_and_shapes(tmp_path):
    """Checkpoints of earlier releases have them: a new name needs a new version."""
    state = filled(Run(**ADAM).begin())
    with saving(tmp_path) as checkpointer:
        checkpointer.save(1, state, state[0])
        checkpointer.wait()
        stored = checkpointer._orbax.load(1)
    shapes = {name: np.shape(x) for name, x in stored.items()}
    of_kind = lambda kind: {x for x in shapes if x.startswith(kind)}
    assert labels.VERSION == 9
    assert Round._fields == ("length", "next_length", "exchanges")
    decided = {"ladder", "decided", "next_rungs", "past_rungs", "controller", "info"}
    assert {x.replace("[", ".").split(".")[1] for x in of_kind("decided/")} == decided
    leaves = {"['b']": (N, 16), "['u']": (N, 16, 8), "['w']": (N, 24, 16)}
    vectors = itertools.product(("residual", "optimizer.mu", "optimizer.nu"), leaves)
    per_replica = {f"memory/.{x}{y}": leaves[y] for x, y in vectors}
    places = "replica", "encodings[0]['TopK'].reached", "encodings[0]['TopK'].threshold"
    per_replica |= {f"local/.local.{x}": (N,) for x in places}
    per_replica |= {"memory/.optimizer.count": (N,)}
    per_replica |= {f"local/.local.norms[{i}]": (N, 2, 1) for i in range(2)}
    assert {x: shapes[x] for x in of_kind(("memory", "local"))} == per_replica
    others = shapes.keys() - per_replica - of_kind("decided")
    assert {x.split("/")[0] for x in others} == {"tree", "steps", "loss", "info"}
    flat = np.asarray(ours(state).local.memory[0].residual)
    u, w = (stored[f"memory/.residual['{name}']"] for name in ("u", "w"))
    assert np.array_equal(u, flat[:, : 16 * 8].reshape(N, 16, 8))
    assert np.array_equal(w, flat[:, 16 * 8 :].reshape(N, 24, 16))


# Other numbers of replicas.


@pytest.mark.parametrize("old", [1, 3, 4, 8])
@pytest.mark.parametrize("new", [1, 3, 4, 8])
def test_redistributing_keeps_the_mean(old, new):
    x = RNG.integers(0, 9, (old, 5)).astype(np.float32)
    like = jax.eval_shape(lambda: jnp.zeros((new, 5)))
    received = np.asarray(layout.redistribute(jnp.asarray(x), like))
    # Slowly: every old replica gives an equal share to each place that it covers.
    places = np.repeat(x, new, axis=0).reshape(new, old, 5).mean(1, dtype=np.float64)
    np.testing.assert_allclose(received, places, rtol=2**-22, atol=0)
    np.testing.assert_allclose(received.mean(0), x.mean(0), rtol=2**-22, atol=0)
    narrow, like = (jnp.zeros((n, 5), jnp.bfloat16) for n in (old, new))
    assert layout.redistribute(narrow, like).dtype == jnp.bfloat16


WHERES = {"1": 1, "3": 3, "8": 8, "mesh of 2": make_mesh((2,))}
WHERES["mesh of 8"] = make_mesh((8,), axis_type=AXIS_TYPES[1])
MOVES = [("Momentum", where) for where in WHERES]
OTHERS = "Steps", "LowRank", "rounds", "a padded bucket", "search"
MOVES += [(recipe, "mesh of 8") for recipe in OTHERS]
MOVES += [("slices", shape) for shape in ("2, 4", "4, 2", "3, 1", "1, 8")]
# What a controller knows that is true on any devices, and on its own alone.
KNOWN = {
    "Steps": (["Averages"], ["Timing"]),
    "search": (["minimum", "candidate"], ["throughputs", "is_settled"]),
    "slices": (["Averages"], ["Timing"]),
}
QUICK = ("Momentum", "mesh of 8"), ("Steps", "mesh of 8"), ("slices", "4, 2")


def in_slices(slow, fast):
    """Return the state of a run whose compiler shards the model."""
    mesh = make_mesh((slow, fast), ("dcn", "ici"))
    specs = {"b": jax.P(), "u": jax.P(), "w": jax.P(None, "ici")}
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    params = jax.tree.map(put, PARAMS, specs)
    tx = gravac.transform("dcn", shardings=params, **MOMENTUM, send=CHOICE)
    return gravac.place((params, (tx.init(params),)), mesh, "dcn")


@pytest.mark.parametrize("move", choices(MOVES, QUICK.__contains__, "-".join))
def test_on_other_replicas_the_mean_of_what_is_kept_stays_the_same(tmp_path, move):
    recipe, where = move
    if recipe == "slices":
        state, fresh = filled(in_slices(2, 4)), in_slices(*map(int, where.split(",")))
    else:
        run, other = run_of(recipe), run_of(recipe, WHERES[where])
        state, fresh = after_three_steps(recipe), other.begin()
    with saving(tmp_path) as checkpointer:
        checkpointer.save(3, jax.tree.map(jnp.copy, state), state[0])
        there = checkpointer.restore(fresh, fresh[0]).tree
        checkpointer.save(4, there, there[0])
        checkpointer.wait()
        before, after = (checkpointer._orbax.load(i) for i in (3, 4))
    for name in (x for x in before if x.startswith(("memory/", "local/.local.norms"))):
        x, y = (np.asarray(z[name], np.float64) for z in (before, after))
        if "norms" in name:
            x = np.asarray(norms.of_others(jnp.asarray(x), len(x), len(y)))
        assert x.shape[1:] == y.shape[1:]
        rounding = np.abs(x).max() * 2**-22
        assert rounding > 0 or "['w']" not in name
        np.testing.assert_allclose(y.mean(0), x.mean(0), rtol=0, atol=rounding)
        assert ".nu" not in name or (y >= 0).all()
    assert_same(on_host(there[0]), on_host(state[0]))
    shared = lambda x: on_host((ours(x).steps, ours(x).decided, ours(x).info))
    assert_same(shared(there), shared(state))
    assert placed(there) == placed(fresh)
    stays = state if where == "2, 4" else fresh  # on the same mesh, all that it knows
    assert_same(ours(there).local.encodings, ours(stays).local.encodings)
    get = lambda tree, name: on_host(optax.tree.get(tree, name))
    for names, like in zip(KNOWN.get(recipe, ()), (state, stays), strict=False):
        for name in names:
            assert_same(get(there, name), get(like, name), name)
        assert any(np.any(x) for x in jax.tree.leaves(get(state, names[0])))
    if recipe != "slices":
        other.can_go_on(there)
    if move == QUICK[0]:
        back = moved(tmp_path / "back", there, run)
        assert_same(on_host(ours(back).local.memory), on_host(ours(state).local.memory))


# Other buckets, another ladder, another controller.


def test_the_number_of_buckets_may_change(tmp_path, monkeypatch):
    one, several = run_of("a padded bucket"), run_of("several padded buckets")
    state = after_three_steps("a padded bucket")
    with monkeypatch.context() as patch:
        patch.setattr(bucketing, "MAX_ENTRIES", 300)
        cut = moved(tmp_path / "cut", state, several)
        several.can_go_on(cut)
    back = moved(tmp_path / "back", cut, one)
    *buckets, _ = ours(cut).local.memory
    assert len(buckets) > 1
    sizes = [n for n, _ in layout.layout_of(ours(cut), cut[0]).buckets]
    pairs = list(zip((x.residual for x in buckets), sizes, strict=False))
    whole = np.asarray(ours(state).local.memory[0].residual)
    assert np.any(whole)
    joined = np.concatenate([x[:, :n] for x, n in pairs], axis=1)
    assert np.array_equal(joined, whole[:, :ENTRIES])
    assert whole.shape[1] > ENTRIES
    assert not any(np.any(x[:, n:]) for x, n in [*pairs, (whole, ENTRIES)])
    assert_same(on_host(ours(back).local.memory), on_host(ours(state).local.memory))


def test_each_bucket_keeps_its_own_numbers(tmp_path):
    with_numbers = optax.inject_hyperparams(optax.scale_by_adam)(b1=0.5)
    run = Run(memory=gravac.OwnOptimizer(with_numbers))
    state = filled(run.begin())
    found = ours(moved(tmp_path, state, run)).local.memory
    numbers = optax.tree.get_all_with_path(found, "b1")
    assert len({float(number[0]) for _, number in numbers}) == 2
    assert_same(on_host(found), on_host(ours(state).local.memory))


LADDERS = {
    "longer": (CHOOSES["send"], gravac.Fastest((DENSE, FEW, TWO_BITS))),
    "as long": (CHOOSES["send"], gravac.Fastest((DENSE, FEW))),
    "controller": (CHOOSES["send"], gravac.GraVAC((DENSE, TWO_BITS))),
    "encoding": (TWO_BITS, FEW),
    "and back": (FEW, TWO_BITS),
}


CHANGED = choices([*LADDERS, "longer, late"], ("encoding", "and back").__contains__)


@pytest.mark.parametrize("other", CHANGED)
def test_with_another_ladder_or_controller_decisions_begin_anew(tmp_path, other):
    other, delay = other.removesuffix(", late"), int(other.endswith(", late"))
    run, changed = (Run(**ADAM, send=x, delay=delay) for x in LADDERS[other])
    state = run.train(run.begin(), 0, 3)
    with pytest.warns(UserWarning, match="encodings keep, begin anew"):
        there = moved(tmp_path, state, changed)
    begun, received, saved = map(ours, (changed.begin(), there, state))
    for name in ("decided", "next_rungs", "controller", "past_rungs", "ladder"):
        assert_same(getattr(received, name), getattr(begun, name), name)
    for name in ("gains", "encodings", "told"):
        assert_same(*(optax.tree.get(x, name) for x in (received, begun)), name)
    assert (received.steps, received.info.dense_steps) == (3, saved.info.dense_steps)
    ofs = lambda x: (x.memory, x.norms)
    kept = lambda state: on_host((state[0], state[1][1:], *ofs(ours(state).local)))
    assert_same(kept(there), kept(state))
    changed.can_go_on(there)


# What does not fit is refused, and nothing changes.

TURNED = PARAMS | {"w": np.zeros((16, 24), np.float32)}
HALVES = jax.tree.map(lambda x: x.astype(np.float16), PARAMS)
UNFIT = [
    ({"params": TURNED}, r"\[0\]\['w'\] is float32\(24, 16\) .* and float32\(16, 24\)"),
    ({"params": HALVES}, r"\['b'\] is float32\(16,\) .* and float16\(16,\) here"),
    ({"after": optax.adam(0.1)}, "count is missing"),
    ({"memory": None}, r"velocity\['w'\] is \(24, 16\) for each .*gravac.flush"),
]


@pytest.fixture(scope="module")
def of_momentum(tmp_path_factory):
    """A directory with a checkpoint of a run that has just begun."""
    state = Run(**MOMENTUM, send=FEW).begin()
    directory = tmp_path_factory.mktemp("momentum")
    with saving(directory) as checkpointer:
        checkpointer.save(1, state, state[0])
    return directory


@pytest.mark.parametrize(("recipe", "complaint"), UNFIT)
def test_what_does_not_fit_is_refused_by_name(of_momentum, recipe, complaint):
    recipe = MOMENTUM | {"send": FEW, "params": PARAMS} | recipe
    params = recipe.pop("params")
    state = Run(**recipe).begin(params)
    before = on_host(state)
    with saving(of_momentum) as reader:
        for partial in (False, True):
            with pytest.raises(ValueError, match=complaint):
                reader.restore(state, state[0], partial=partial)
    assert_same(on_host(state), before)


def test_params_alone_are_restored_into_shapes_on_other_devices(of_momentum):
    lies = jax.NamedSharding(make_mesh((2,)), jax.P())
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies)
    shapes = jax.tree.map(shape, PARAMS)
    for part in ((shapes,), (shapes, None)):
        with saving(of_momentum) as reader:
            params = reader.restore(part, shapes, partial=True).tree[0]
            with pytest.raises(ValueError, match="missing here"):
                reader.restore(part, shapes)
        assert_same(on_host(params), PARAMS)
        assert placed(params) == dict.fromkeys(PARAMS, lies)
    on_two = shapes_of(Run(2, **MOMENTUM, send=FEW).begin())
    complaint = pytest.raises(ValueError, match="shapes suffice if")
    with saving(of_momentum) as reader, complaint:
        reader.restore(on_two, on_two[0])
    nowhere = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), on_two)
    with saving(of_momentum) as reader, pytest.raises(ValueError, match="shardings"):
        reader.restore(nowhere, nowhere[0])


def test_other_formats_are_refused_with_a_way_on(tmp_path, of_momentum, monkeypatch):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"params": PARAMS}))
        manager.wait_until_finished()
    monkeypatch.setattr(labels, "VERSION", 10)
    newer = r"version 9, and this .* reads 10.*gravac.flush"
    rows = (of_momentum, newer), (tmp_path, r"begin with its params, step\.init")
    for directory, words in rows:
        with saving(directory) as reader, pytest.raises(CheckpointError, match=words):
            restored(reader, run_of())  # of another memory, too


def refused():
    begin = lambda where=N: Run(where, **MOMENTUM, send=FEW).begin()
    state, fewer = begin(), {**PARAMS, "w": PARAMS["w"][:3]}
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, gravac.transform(**BITS), wrt=nnx.Param)
    of_pmap = jax.tree.map(lambda x: jnp.stack([x] * N), begin(1))
    # Not placed, it goes through pmap as if it were the same on all devices.
    numbers = jax.pmap(lambda i: i[None], "r", out_axes=None)(jnp.arange(N))
    rows = [
        ((1, state, fewer), "not the params"),
        ((1, PARAMS, state), r"save\(step, \(params.*restore\(\(params"),
        ((1, (state, state), PARAMS), "one state of gravac.transform"),
        ((1, nnx.split(optimizer)[1], PARAMS), "the nnx.Optimizer itself"),
        ((1, of_pmap, PARAMS), "gravac.data_parallel"),
        ((1, optax.tree.set(begin(1), replica=numbers), PARAMS), "of jax.pmap"),
        ((1, jax.device_get(state), PARAMS), "gravac.place makes it"),
        ((1, (PARAMS, Run(**BITS).tx.init(PARAMS)), PARAMS), "gravac.place makes it"),
        ((1, state, PARAMS, {1, 2}), "JSON serializable"),
        *(((x, state, PARAMS), r"save\(step, tree") for x in (-1, 1.5, "5", PARAMS)),
    ]
    for leaf in (True, "text", jnp.zeros(3, jnp.int4), 2**64):
        word = getattr(leaf, "dtype", type(leaf).__name__)
        rows.append(((1, {"x": leaf}, {}), rf"'x'\]` is a {word}, which cannot"))
    return rows


def test_what_cannot_be_saved_is_refused_and_nothing_written(tmp_path):
    with saving(tmp_path) as checkpointer:
        for arguments, complaint in refused():
            with pytest.raises((TypeError, ValueError), match=complaint):
                checkpointer.save(*arguments)
    assert not list(tmp_path.rglob("*_METADATA"))


def test_bad_numbers_are_refused_before_anything_is_made(tmp_path):
    for bad in ({"save_every": 1.5}, {"save_every": True}, {"keep": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            checkpoint.Checkpointer(tmp_path / "new", **bad)
        assert not (tmp_path / "new").exists()
