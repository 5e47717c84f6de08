"""Every complaint says what was received and what to do, and changes nothing."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, assert_same, make_mesh

import gravac_jax as gravac

PARAMS = {"b": jnp.zeros(5), "w": jnp.zeros((8, 8))}
MESH = make_mesh()
ALONE = gravac.transform(None, compress=True)


@contextlib.contextmanager
def refused(complaint, state=()):
    """Raises `complaint`, with anything at each " ... ", and leaves `state` alone."""
    before = jax.tree.map(np.array, state)
    with pytest.raises((TypeError, ValueError)) as caught:
        yield
    text = f"{type(caught.value).__name__}: {caught.value}"
    for part in complaint.split(" ... "):
        assert part in text
        text = text.partition(part)[2]
    assert_same(jax.tree.map(np.array, state), before)


# What is built: the call, and what it received and what to do.

BUILDS = {
    "a density as a factor": (
        lambda: gravac.Fixed(0.1),
        "ValueError ... got 0.1 ... for a density of 0.1 write 10",
    ),
    "nothing as a factor": (
        lambda: gravac.Fixed(0),
        "ValueError ... got 0 ... factor 1 sends everything",
    ),
    "a density as a minimum": (
        lambda: gravac.exponential(0.01, 10),
        "ValueError ... `minimum` ... got 0.01 ... write 100",
    ),
    "a density as a maximum": (
        lambda: gravac.geometric(10, 0.5),
        "ValueError ... `maximum` ... got 0.5 ... write 2",
    ),
    "densities as a ladder": (
        lambda: gravac.GraVAC(ladder=(1, 0.1, 0.01)),
        "ValueError ... `ladder` ... got 0.1 ... write 10",
    ),
    "a negative factor": (
        lambda: gravac.Fixed(-10),
        "ValueError ... got -10 ... factor 1 sends everything",
    ),
    "no factor at all": (
        lambda: gravac.Fixed(float("nan")),
        "ValueError ... got nan ... factor 1 sends everything",
    ),
    "a factor in words": (
        lambda: gravac.Fixed("10"),
        "TypeError ... got '10' ... 10 sends one entry in ten",
    ),
    "a bool as a factor": (
        lambda: gravac.Fixed(True),
        "TypeError ... got True ... 10 sends one entry in ten",
    ),
    "a ladder out of order": (
        lambda: gravac.GraVAC(ladder=(1, 100, 10)),
        "ValueError ... got (1, 100, 10) ... Write (1, 10, 100)",
    ),
    "a ladder with repeats": (
        lambda: gravac.GraVAC(ladder=(1, 10, 10)),
        "ValueError ... got (1, 10, 10) ... Write (1, 10)",
    ),
    "an empty ladder": (
        lambda: gravac.GraVAC(ladder=()),
        "TypeError ... such as (1, 10, 100) ... got () ... gravac.exponential",
    ),
    "a ladder in words": (
        lambda: gravac.GraVAC(ladder="1, 10"),
        "TypeError ... such as (1, 10, 100) ... got '1, 10' ... gravac.exponential",
    ),
    "one factor as a ladder": (
        lambda: gravac.GraVAC(ladder=10),
        "TypeError ... such as (1, 10, 100) ... got 10 ... gravac.exponential",
    ),
    "a ladder that does not begin with 1": (
        lambda: gravac.GraVAC(ladder=(10, 100)),
        "ValueError ... GraVAC ... got (10, 100) ... Write (1, 10, 100)",
    ),
    "a ladder of 1 alone": (
        lambda: gravac.GraVAC(ladder=(1,)),
        "ValueError ... got (1,) ... Write (1, 10)",
    ),
    "a maximum below the minimum": (
        lambda: gravac.exponential(100, 10),
        "ValueError ... `minimum` must be below ... got 100 and 10",
    ),
    "a ladder that does not climb": (
        lambda: gravac.geometric(10, 100, multiplier=1),
        "ValueError ... `multiplier` ... got 1 ... from rung to rung",
    ),
    "an epsilon above 1": (
        lambda: gravac.GraVAC(epsilon=1.5),
        "ValueError ... `epsilon` ... between 0 and 1 ... got 1.5 ... a gain",
    ),
    "a window of 0": (
        lambda: gravac.GraVAC(window=0),
        "ValueError ... `window` ... at least 1 ... got 0 ... counts steps",
    ),
    "a negative omega": (
        lambda: gravac.GraVAC(omega=-0.1),
        "ValueError ... `omega` ... got -0.1 ... relative difference",
    ),
    "a smoothing of 0": (
        lambda: gravac.GraVAC(smoothing=0),
        "ValueError ... `smoothing` ... got 0 ... None means replicas / 100",
    ),
    "another gain": (
        lambda: gravac.GraVAC(gain="power"),
        "ValueError ... `gain` ... 'energy' or 'norm' ... got 'power'",
    ),
    "a controller as a memory": (
        lambda: gravac.transform(memory=gravac.Fixed(10)),
        "TypeError ... `memory` ... got Fixed(factor=10) ... gravac.Residual()",
    ),
    "a compressor as an exchange": (
        lambda: gravac.transform(exchange=gravac.TopK()),
        "TypeError ... `exchange` ... got TopK() ... gravac.AllGather()",
    ),
    "a class as a compressor": (
        lambda: gravac.transform(compressor=gravac.TopK),
        "TypeError ... `compressor` ... got the class TopK ... gravac.TopK()",
    ),
    "a density as a compressor": (
        lambda: gravac.transform(compressor=0.01),
        "TypeError ... `compressor` ... got 0.01 ... gravac.TopK()",
    ),
    "a factor as a controller": (
        lambda: gravac.transform(controller=100),
        "TypeError ... `controller` ... got 100 ... gravac.Fixed(factor=100)",
    ),
    "a bandwidth as a wire": (
        lambda: gravac.transform(wire=125e6),
        "TypeError ... `wire` ... got 125000000.0 ... gravac.WireCost()",
    ),
    "no bandwidth": (
        lambda: gravac.WireCost(bytes_per_second=0),
        "ValueError ... `bytes_per_second` ... got 0 ... gravac.WireCost",
    ),
    "a compressor among exchanges": (
        lambda: gravac.Cheapest((gravac.AllGather(), gravac.TopK())),
        "TypeError ... `exchanges` ... got TopK() ... gravac.AllGather()",
    ),
    "two networks": (
        lambda: gravac.transform(
            exchange=gravac.Cheapest((gravac.AllGather(),)), wire=gravac.WireCost(1e10)
        ),
        "ValueError ... `wire` ... that of the exchange ... 10000000000.0",
    ),
    "a choice of nothing": (
        lambda: gravac.Cheapest(()),
        "ValueError ... `exchanges` ... empty",
    ),
    "an exchange and a compressor": (
        lambda: gravac.transform(exchange=gravac.DenseMean(), compressor=gravac.TopK()),
        "TypeError ... not both ... DenseMean() ... TopK() ... short for",
    ),
    "a number as an axis": (
        lambda: gravac.transform(0),
        "TypeError ... `axis_name` ... None to run alone ... got 0",
    ),
    "no axes": (
        lambda: gravac.transform(()),
        "TypeError ... `axis_name` ... None to run alone ... got ()",
    ),
    "a tuple of something else": (
        lambda: gravac.transform(("data", None)),
        "TypeError ... `axis_name` ... None to run alone ... got ('data', None)",
    ),
    "gradients over a number": (
        lambda: gravac.value_and_grad(jnp.sum, 0),
        "TypeError ... `axis_name` ... None to run alone ... got 0",
    ),
    "no micro-batches": (
        lambda: gravac.value_and_grad(jnp.sum, micro_batches=0),
        "ValueError ... `micro_batches` ... whole number of at least 1 ... got 0",
    ),
    "micro-batches that do not divide": (
        lambda: gravac.value_and_grad(lambda w, x: w, None, micro_batches=3)(
            1.0, x=jnp.ones(4)
        ),
        "ValueError ... micro_batches=3 ... argument 'x' ... (4,) ... choose a divisor",
    ),
    "a batch without rows": (
        lambda: gravac.value_and_grad(lambda w, x: w, None, micro_batches=3)(1.0, 2.0),
        "ValueError ... micro_batches=3 ... of shape () ... close over",
    ),
    "leaders by lot": (
        lambda: gravac.LeaderIndices(leader="lot"),
        "ValueError ... `leader` ... 'turn' ... 'energy' ... got 'lot'",
    ),
    "a block of no entries": (
        lambda: gravac.Int8(block=0),
        "ValueError ... `block` ... whole number of at least 1 ... got 0",
    ),
    "one axis, fast and slow": (
        lambda: gravac.transform("data", dense_axis_name="data"),
        "ValueError ... `dense_axis_name` ... another axis ... got 'data' and 'data'",
    ),
    "a fast axis alone": (
        lambda: gravac.transform(None, dense_axis_name="ici"),
        "ValueError ... `dense_axis_name` ... another axis ... got 'ici' and None",
    ),
    "slices without an axis": (
        lambda: gravac.transform(sharded=True),
        "ValueError ... `sharded` ... give its name ... dense_axis_name='ici'",
    ),
    "leaves chosen twice": (
        lambda: gravac.transform(compress=True, sharded=True, dense_axis_name="ici"),
        "TypeError ... `compress` or `sharded`, not both ... got True and True",
    ),
    "a slice chosen by a function": (
        lambda: gravac.transform(sharded=gravac.matrices(), dense_axis_name="ici"),
        "TypeError ... `sharded` ... pytree of bools ... decide before",
    ),
    "indices as values": (
        lambda: gravac.AllGather(values=gravac.UInt16()),
        "TypeError ... `values` must be a ValueEncoding ... gravac.BFloat16()",
    ),
    "values as indices": (
        lambda: gravac.AllGather(indices=gravac.BFloat16()),
        "TypeError ... `indices` must be a IndexEncoding ... gravac.UInt16()",
    ),
    "a class for a leader's compressor": (
        lambda: gravac.LeaderIndices(gravac.TopK),
        "TypeError ... `compressor` must be a Compressor, got the class TopK",
    ),
    "specs over a number": (
        lambda: gravac.state_specs(PARAMS, 0),
        "TypeError ... `axis_name` ... None to run alone ... got 0",
    ),
    "a mesh without the axis, placed on": (
        lambda: gravac.place(PARAMS, MESH, "batch"),
        "ValueError ... axis_name='batch' ... ('data',) ... Give the same name",
    ),
    "a mesh without the axis, run on": (
        lambda: gravac.data_parallel(jnp.add, MESH, "batch"),
        "ValueError ... axis_name='batch' ... ('data',) ... Give the same name",
    ),
    "a ladder in a list": (
        lambda: gravac.GraVAC(ladder=[1, 10]),
        "TypeError ... `ladder` must be a tuple ... got [1, 10]",
    ),
    "half a replica": (
        lambda: gravac.simulate(jnp.add, 2.5),
        "ValueError ... `replicas` ... whole number of at least 1 ... got 2.5",
    ),
    "no replicas": (
        lambda: gravac.simulate(jnp.add, 0),
        "ValueError ... `replicas` ... whole number of at least 1 ... got 0",
    ),
    "a guard around no transform": (
        lambda: gravac.guard(optax.sgd(0.1)).init(PARAMS),
        "ValueError ... gravac.guard ... found 0 ... optax.chain(gravac.transform()",
    ),
    "a guard around two transforms": (
        lambda: gravac.guard(optax.chain(ALONE, ALONE)).init(PARAMS),
        "ValueError ... gravac.guard ... found 2 ... optax.chain(gravac.transform()",
    ),
    "optax.masked around the transform": (
        lambda: optax.masked(ALONE, {"b": False, "w": True}).init(PARAMS),
        "TypeError ... MaskedNode at ['b'] ... compress=...",
    ),
    "optax.partition around the transform": (
        lambda: optax.partition(
            {"all": ALONE, "rest": optax.sgd(0.1)}, {"b": "rest", "w": "all"}
        ).init(PARAMS),
        "TypeError ... MaskedNode at ['b'] ... compress=...",
    ),
    "integer params": (
        lambda: ALONE.init({**PARAMS, "count": jnp.zeros((), jnp.int32)}),
        "TypeError ... params ... int32 at ['count'] ... keep counters",
    ),
    "complex params": (
        lambda: ALONE.init({**PARAMS, "phase": jnp.zeros(3, jnp.complex64)}),
        "TypeError ... params ... complex64 at ['phase'] ... complex",
    ),
    "params that are no arrays": (
        lambda: ALONE.init({"w": "ones"}),
        "TypeError ... params ... str at ['w'] ... float params only",
    ),
    "a mask of too few leaves": (
        lambda: gravac.transform(None, compress={"w": True}).init(PARAMS),
        "ValueError ... `compress` ... the params' own structure, got {'w': True} for",
    ),
    "a mask of numbers": (
        lambda: gravac.transform(None, compress={"b": 0, "w": 1}).init(PARAMS),
        "ValueError ... `compress` ... a pytree of bools ... got {'b': 0, 'w': 1}",
    ),
    "a mask of another structure": (
        lambda: gravac.transform(None, compress={"a": True, "b": False}).init(PARAMS),
        "ValueError ... `compress` ... the params' own structure, got {'a': True",
    ),
}


@pytest.mark.parametrize("case", BUILDS)
def test_what_cannot_be_built_is_refused(case):
    build, complaint = BUILDS[case]
    with refused(complaint):
        build()


# What is called, inside a step and around it.


def placed(axis_name="data"):
    """A transform, and params and state on the mesh."""
    tx = gravac.transform(axis_name, compress=True)
    return tx, gravac.place((PARAMS, tx.init(PARAMS)), MESH)


def run(update, trees, check_vma=True):
    """One step of `update(params, state, x)`, in which x varies and params do not."""

    def train_step(params, state, x):
        updates, state = update(params, state, jnp.sum(x))
        return optax.apply_updates(params, updates), state

    step = gravac.data_parallel(train_step, MESH, check_vma=check_vma)
    return step(*trees, np.ones(N, np.float32))


def test_gradients_that_jax_has_summed_are_refused():
    tx, trees = placed()
    loss = lambda params, x: jnp.sum(params["w"]) * x + jnp.sum(params["b"])
    says = "ValueError ... at ['b'] ... ('data',) ... Remove any jax.lax.pmean"
    with refused(says + " ... gravac.value_and_grad(loss", trees):
        run(lambda params, state, x: tx.update(jax.grad(loss)(params, x), state), trees)


@pytest.mark.parametrize("check_vma", [True, False])
def test_another_axis_name_is_refused(check_vma):
    tx, trees = placed("batch")
    with refused("ValueError ... axis_name='batch' ... the name that your mesh", trees):
        run(lambda params, state, x: tx.update(params, state), trees, check_vma)


OUTSIDE = "axis_name='data' ... shard_map, pmap or vmap ... pass axis_name=None"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_call_outside_any_axis_is_refused(wrap):
    tx = gravac.transform(compress=True)
    state = tx.init(PARAMS)
    with refused(f"ValueError ... `update` ... {OUTSIDE}", state):
        wrap(tx.update)(PARAMS, state)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_taken_outside_any_axis_are_refused(wrap):
    grad = gravac.value_and_grad(lambda params: jnp.sum(params["w"]))
    with refused(f"ValueError ... value_and_grad ... {OUTSIDE}"):
        wrap(grad)(PARAMS)


def test_hidden_gradients_are_refused():
    state = ALONE.init(PARAMS)
    with refused(
        "TypeError ... gradients ... MaskedNode at ['b'] ... compress=", state
    ):
        ALONE.update({**PARAMS, "b": optax.MaskedNode()}, state)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_gradients_that_are_not_real_are_refused(dtype):
    state = ALONE.init(PARAMS)
    says = f"TypeError ... gradients must be real ... {dtype} at ['b'] ... float params"
    with refused(says, state):
        ALONE.update({**PARAMS, "b": jnp.zeros(5, dtype)}, state)


def test_params_that_changed_are_refused():
    state = ALONE.init(PARAMS)
    says = "ValueError ... residual': (69,) ... residual': (72,) ... call init again"
    with refused(says, state):
        ALONE.update({**PARAMS, "new": jnp.zeros(3)}, state)


def test_params_of_the_same_size_in_another_number_of_leaves_are_refused():
    state = ALONE.init(PARAMS)
    one_leaf = jnp.concatenate([x.ravel() for x in jax.tree.leaves(PARAMS)])
    with refused("ValueError ... layout': (2, 2)} ... layout': (1, 2)}", state):
        ALONE.update(one_leaf, state)


OTHERS = {
    "memory": {"memory": gravac.NoMemory()},
    "controller": {"controller": gravac.Fixed(4)},
    "ladder": {"controller": gravac.GraVAC(ladder=(1, 2, 3))},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_other_components_is_refused(other):
    state = gravac.transform(None, compress=True, **OTHERS[other]).init(PARAMS)
    with refused("ValueError ... does not fit ... call init again", state):
        ALONE.update(PARAMS, state)


def test_the_state_of_a_whole_chain_is_refused():
    state = optax.chain(ALONE, optax.sgd(0.1)).init(PARAMS)
    with refused("ValueError ... does not fit ... call init again", state):
        ALONE.update(PARAMS, state)


def test_a_state_that_was_not_placed_is_refused():
    tx = gravac.transform(compress=True)
    step = lambda params, state, x: (params, tx.update(params, state)[1])
    state = (PARAMS, tx.init(PARAMS))
    for run in (gravac.simulate(step, N), gravac.data_parallel(step, make_mesh())):
        with refused("ValueError ... not placed ... gravac.place", state):
            run(*state, jnp.zeros(N))


def test_a_state_placed_on_another_number_of_replicas_is_refused():
    tx = gravac.transform(compress=True)
    step = lambda params, state, x: (params, tx.update(params, state)[1])
    state = gravac.place((PARAMS, tx.init(PARAMS)), 2)
    with refused("ValueError ... placed on 2 replicas ... 4. Give gravac.place", state):
        gravac.simulate(step, N)(*state, jnp.zeros(N))


def test_an_unplaced_state_in_a_shard_map_of_ones_own_is_refused():
    tx = gravac.transform(compress=True)
    grads = lambda x: jax.tree.map(lambda p: p + x.astype(p.dtype).sum(), PARAMS)
    run = jax.shard_map(
        lambda state, x: tx.update(grads(x), state)[1],
        mesh=make_mesh(),
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P(),
    )
    sharding = jax.NamedSharding(make_mesh(), jax.P("data"))
    with refused("ValueError ... not placed ... gravac.state_specs"):
        run(tx.init(PARAMS), jax.device_put(jnp.zeros(N), sharding))


MISTAKES = {
    "a batch by name": (
        lambda step, state: step(*state, batch=jnp.zeros(N)),
        "the batch, the last argument, cannot be split",
    ),
    "nothing": (lambda step, state: step(), "TypeError ... got 0 arguments"),
    "a number as the batch": (
        lambda step, state: step(*state, 3),
        "ValueError ... has shape () ... by keyword",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_call_without_state_and_batch_is_refused(mistake):
    step = gravac.simulate(lambda a, b, x: (a, b), N)
    call, says = MISTAKES[mistake]
    with refused(says):
        call(step, gravac.place((jnp.zeros(()), jnp.zeros(())), N))


def test_a_step_that_does_not_return_its_state_is_refused():
    step = gravac.simulate(lambda a, b, x: a, N)
    with refused("ValueError ... return its 2 state arguments ... got 1 results"):
        step(*gravac.place((jnp.zeros(()), jnp.zeros(())), N), jnp.zeros(N))


def test_state_that_leaves_a_step_different_on_each_replica_is_refused():
    statistics = gravac.place(jnp.zeros(()), MESH)
    step = gravac.data_parallel(lambda old, x: (old + x.mean(),), MESH)
    says = "ValueError ... at [0] ... ('data',) ... comes first ... jax.lax.pmean"
    with refused(says, statistics):
        step(statistics, np.ones(N, np.float32))


def test_a_loss_that_changes_its_arguments_is_refused():
    def loss(model):
        model["mean"] = model["w"] * 2
        return model["w"]

    model = {"mean": jnp.zeros(()), "w": jnp.ones(())}
    says = "ValueError ... changes its arguments, at [\"[0]['mean']\"] ... has_aux"
    with refused(says, model):
        gravac.value_and_grad(loss, None)(model)


def test_differentiating_counters_is_refused():
    with refused("TypeError ... argument 0 ... uint32 at ['count'] ... float params"):
        gravac.value_and_grad(jnp.sum, None)({"count": jnp.zeros(3, jnp.uint32)})


UNDER = {
    "MultiSteps": (lambda tx: optax.MultiSteps(tx, 2), "micro_batches"),
    "ApplyIfFinite": (lambda tx: optax.apply_if_finite(tx, 3), "gravac.guard"),
}


@pytest.mark.parametrize("name", UNDER)
def test_a_transform_inside_of_what_keeps_gradients_is_refused(name):
    wrap, remedy = UNDER[name]
    state = wrap(gravac.transform(compress=True)).init(PARAMS)
    with refused(f"ValueError ... inside of an optax.{name} ... {remedy}", state):
        gravac.place((PARAMS, state), N)


BEFORE = {
    "TraceState": optax.sgd(0.1, momentum=0.9),
    "ScaleByAdamState": optax.adamw(0.1),
    "EmaState": optax.ema(0.9),
}


@pytest.mark.parametrize("name", BEFORE)
def test_a_transform_after_what_remembers_gradients_is_refused(name):
    state = optax.chain(BEFORE[name], gravac.transform(compress=True)).init(PARAMS)
    with refused(f"ValueError ... after a {name} ... Put it first", state):
        gravac.place((PARAMS, state), N)


def test_a_transform_after_what_remembers_nothing_is_placed():
    tx = optax.chain(optax.clip(1.0), gravac.transform(compress=True), optax.adam(0.1))
    gravac.place((PARAMS, tx.init(PARAMS)), N)


def test_a_number_for_a_mesh_is_refused():
    with refused("TypeError ... jax.sharding.Mesh, got 4 ... gravac.simulate"):
        gravac.data_parallel(lambda a, x: a, 4)


def test_differentiating_an_argument_given_by_name_is_refused():
    with refused("TypeError ... (0,) ... got 0 positional ... by position"):
        gravac.value_and_grad(jnp.sum, None)(a=jnp.ones(3))


def test_a_placed_state_in_an_unplaced_step_is_refused():
    state = gravac.init(ALONE, PARAMS, N)
    says = "ValueError ... residual': (4, 69) ... (69,) ... gravac.state_specs"
    with refused(says, state):
        ALONE.update(PARAMS, state)


@pytest.mark.parametrize("name", ["step_seconds", "measured_step"])
@pytest.mark.parametrize("shape", [(1,), (N,)])
def test_times_of_many_are_refused(shape, name):
    tx, trees = placed()
    extra = {name: jnp.ones(shape)}

    def update(params, state, x):
        grads = jax.tree.map(lambda p: p + x, params)
        return tx.update(grads, state, **extra)

    with refused(f"ValueError ... `{name}` ... {shape} ... of this replica", trees):
        run(update, trees)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_a_state_on_another_number_of_replicas_is_refused(replicas):
    _, trees = placed()
    says = f"ValueError ... placed on 4 replicas ... has {replicas} ... gravac.init"
    for where in (make_mesh((replicas,)), replicas):
        with refused(says, trees):
            gravac.place(trees, where)


@pytest.mark.parametrize("shape", [(N + 1, 3), (2,), ()])
@pytest.mark.parametrize("where", [MESH, N], ids=["mesh", "simulated"])
def test_a_batch_that_cannot_be_split_is_refused(where, shape):
    make = gravac.simulate if where == N else gravac.data_parallel
    step = make(lambda params, x: (params,), where)
    params = gravac.place(PARAMS, where)
    says = f"ValueError ... 4 replicas ... ['x'] has shape {shape} ... multiple of 4"
    with refused(says, params):
        step(params, {"x": np.ones(shape)})


def test_a_guard_that_lost_its_transform_is_refused():
    state = optax.sgd(0.1).init(PARAMS)
    with refused("ValueError ... gravac.guard ... found 0 ... optax.chain(", state):
        gravac.guard(optax.sgd(0.1)).update(PARAMS, state)
