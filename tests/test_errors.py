"""Every misuse is refused with what was received and what to do instead."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, N, make_mesh
from flax import nnx

import gravac_jax as gravac
from gravac_jax import adamw, flush, own_params, place, sgd, train_step, transform

PARAMS = {"b": jnp.zeros(5), "w": jnp.zeros((8, 8))}
NUMBER, SGD = jnp.zeros(()), optax.sgd(0.1)
MESH = make_mesh()
ALONE = transform(None, compress=True)
STATE = ALONE.init(PARAMS)
TX = transform(compress=True)
DENSE, TWO, OWN = gravac.Dense(), gravac.Bits(2), gravac.Residual()
V, T = ValueError, TypeError

TOP_K, BITS, LOW_RANK = partial(gravac.TopK, 2), partial(gravac.Bits, 2), gravac.LowRank
STAGES = partial(gravac.Scheduled, (gravac.TopK(4), gravac.TopK(16), gravac.TopK(100)))
GRAD = partial(gravac.value_and_grad, abs)
PLACE, MAPPED = partial(place, PARAMS, MESH), partial(gravac.data_parallel, abs)
GUESS, FASTEST, MOMENTUM = gravac.GraVAC, gravac.Fastest, gravac.Momentum
RUNG = partial(ALONE.update, PARAMS, STATE)
ADAMW = partial(adamw, 1)
PLAIN = type("Plain", (gravac.Encoding,), {"traffic": len, "exchange": len})

FIGURES = gravac.WireCost.__dataclass_fields__
NO_WIDTHS = 3, 2.0, np.float32(2), jnp.int32(2)
NO_FIGURES = -1e-3, "1 Gbit/s", np.nan, np.inf, True

# What is called, with what, and the remedy that its error must name, too.
ARGUMENTS = [
    (V, gravac.TopK, {"factor": 0.01}, "write 100"),
    (V, gravac.TopK, {"factor": 0}, "gravac.Dense()"),
    (V, gravac.TopK, {"factor": np.nan}, "gravac.Dense()"),
    (V, gravac.TopK, {"factor": True}, "number of at least 1"),
    (V, TOP_K, {"select": "random"}, "'exact'"),
    (V, TOP_K, {"values": "uint16"}, "'bfloat16'"),
    *((V, gravac.Bits, {"bits": x}, "8 or 4 or 2 or 1") for x in NO_WIDTHS),
    (V, BITS, {"turns": 0}, "at least 1"),
    (V, BITS, {"row_entries": 100}, "multiple of 32"),
    (V, LOW_RANK, {"rank": 0}, "at least 1"),
    (V, gravac.Dense, {"values": "float16"}, "'bfloat16'"),
    (T, FASTEST, {"ladder": (1, 4, 16)}, "gravac.Bits(8)"),
    (T, GUESS, {"ladder": TWO}, "send=gravac.Bits(2)"),
    (V, FASTEST, {"ladder": ()}, "2 encodings or more"),
    (V, FASTEST, {"ladder": (TWO,)}, "send=gravac.Bits(2)"),
    (V, FASTEST, {"ladder": (DENSE, TWO, TWO)}, "each of them once"),
    (T, transform, {"send": PLAIN()}, "each encoding a frozen dataclass"),
    (V, STAGES, {"starts": (-1, 3)}, "counted from 0"),
    (V, STAGES, {"starts": 5}, "tuple"),
    *((V, STAGES, {"starts": x}, "`starts` must be") for x in ((5,), (5, 3))),
    (V, GUESS, {"epsilon": 1.5}, "of at least 0 and at most 1"),
    (V, GUESS, {"omega": -0.1}, "of at least 0 and at most 1"),
    (V, GUESS, {"window": 0}, "at least 1"),
    (T, transform, {"send": 0.01}, "gravac.Bits(2)"),
    (T, transform, {"send": (DENSE, TWO)}, "gravac.Fastest((gravac.De"),
    (V, partial(gravac.adamw, 1), {"weight_decay": -5.0}, "of at least 0"),
    (T, transform, {"memory": 0.9}, "gravac.Residual() or gravac.OwnOptimizer("),
    (T, transform, {"network": "probe.json"}, "gravac.WireCost() or probe.read(file)"),
    (T, transform, {"axis_name": TWO}, "send=gravac.Bits(2)"),
    (T, transform, {"fast_axis_name": TWO}, "send=gravac.Bits(2)"),
    (V, transform, {"fast_axis_name": "data"}, "another axis"),
    (V, partial(transform, None), {"fast_axis_name": "x"}, "another axis"),
    (T, transform, {"clip": 1.0}, "gravac.ClipByGlobalNorm(1.0)"),
    (V, gravac.ClipByGlobalNorm, {"max_norm": 0}, "leave `clip` out"),
    *((V, gravac.WireCost, {x: y}, "") for x, y in product(FIGURES, NO_FIGURES)),
    (V, gravac.WireCost, {"bytes_per_second": 0}, ""),
    (V, transform, {"weight_decay": -1}, "at least 0"),
    (V, transform, {"every": 0}, "a function of the step"),
    (V, transform, {"delay": "1"}, "0 or 1"),
    (T, GRAD, {"axis_name": 0}, "None"),
    (V, GRAD, {"micro_batches": 0}, "at least 1"),
    (T, adamw, {"learning_rate": "1e-3"}, "schedule"),
    (V, ADAMW, {"b1": jnp.float32(0.9)}, "takes a lambda of the rate"),
    (V, ADAMW, {"b2": 2}, "of at least 0 and below 1"),
    (V, ADAMW, {"eps": 0}, "a number above 0"),
    *((T, sgd, {"learning_rate": None}, x) for x in ("schedule", "as in gravac.sgd(")),
    (V, partial(sgd, 1), {"momentum": 1.5}, "of at least 0 and below 1"),
    (V, MOMENTUM, {"decay": 1.0}, "of at least 0 and below 1"),
    *((T, x, {"nesterov": "no"}, "a bool") for x in (MOMENTUM, partial(sgd, 1))),
    (T, gravac.OwnOptimizer, {"optimizer": 0.9}, "optax.sgd(0.1)"),
    (T, partial(gravac.OwnOptimizer, SGD), {"keeps_norm": "yes"}, "a bool"),
    (T, partial(gravac.outer, TX), {"optimizer": 0.7}, "optax.sgd(0.7, momentum=0.9)"),
    (T, MOMENTUM, {"masking": "some"}, "a bool"),
    (V, gravac.dgc, {"warm_up_steps": -1}, "before the last stage"),
    (T, partial(gravac.dgc, warm_up_steps=9), {"send": TWO}, "gravac.TopK(1000)"),
    (T, gravac.value_and_grad, {"fun": 3.0}, "(loss_fn, axis_name)"),
    (V, partial(train_step, abs, TX, MESH), {"at": "mine"}, "'own' or 'shared'"),
    (T, partial(train_step, abs, TX, MESH), {"branches": 1}, "must be a bool"),
    *((V, RUNG, {"rung": x}, "must be a whole number") for x in (-1, 8, 1.0, True)),
    (V, PLACE, {"axis_name": "batch"}, "among ('data',), got 'batch': give"),
    (V, partial(MAPPED, MESH), {"fast_axis_name": "data"}, "another axis"),
    (T, partial(place, PARAMS, 2), {"axis_name": ["data"]}, "None"),
    (T, partial(gravac.nnx_data_parallel, mesh=2), {"train_step": 3}, "(step, m"),
]


def id_of(value) -> str | None:
    """A name that is the same in every process, as pytest-xdist needs it."""
    return str(value) if isinstance(value, (dict, str)) else None


def refused(error, call):
    with pytest.raises(error) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("error", "call", "given", "remedy"), ARGUMENTS, ids=id_of)
def test_a_wrong_argument_is_refused_by_name(error, call, given, remedy):
    said = str(refused(error, lambda: call(**given)))
    words = [*given, *map(repr, given.values()), remedy]
    assert [x for x in words if x not in said] == []


def init(leaf=NUMBER, compress=True):
    transform(None, compress=compress).init({**PARAMS, "x": leaf})


def update(grads=PARAMS, state=STATE, **more):
    ALONE.update({**PARAMS, **more} if more else grads, state)


def local(params, x):
    return jax.tree.map(lambda p: p + x, params)


def run(update=TX.update, tx=TX, grads=local, metrics=lambda x: ()):
    """Run a step on a mesh, with one part of it replaced."""

    def train_step(params, state, x):
        x = jnp.sum(x)
        updates, after = update(grads(params, x), state, params)
        return optax.apply_updates(params, updates), after, *metrics(x)

    state = place((PARAMS, tx.init(PARAMS)), MESH)
    try:
        gravac.data_parallel(train_step, MESH)(*state, np.ones(N, np.float32))
    finally:
        jax.tree.map(np.asarray, state)  # raises if the state was donated


def timed(**times):
    run(lambda grads, state, params: TX.update(grads, state, **times))


def summed(params, x):
    return jax.grad(lambda p: jnp.sum(p["w"]) * x + jnp.sum(p["b"]))(params)


def in_a_loop(params, x):
    grads_of = gravac.value_and_grad(lambda p, x: x * jnp.sum(p["w"]))
    add = lambda total, x: (jax.tree.map(jnp.add, total, grads_of(params, x)[1]), None)
    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x[None])[0]


def on_mesh(step, state, *batch):
    gravac.data_parallel(step, MESH)(place(state, MESH), *batch)


def averaged(metrics, batch):
    metrics.update(loss=jnp.mean(batch))
    return (metrics,)


def changing(model):
    model["mean"] = model["w"] * 2
    return model["w"]


def placed(tx):
    place((PARAMS, tx.init(PARAMS)), N)


def trained(loss, params=PARAMS, after=SGD):
    step = train_step(loss, optax.chain(TX, after), MESH)
    step(*step.init(params), np.ones(N, np.float32))


def in_an_nnx_step(misuse):
    """Run one step of `misuse(model, optimizer, batch)` on a mesh."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.chain(TX, SGD), wrt=nnx.Param)

    def train_step(model, optimizer, batch):
        misuse(model, optimizer, batch)
        return model, optimizer

    objects = place((model, optimizer), MESH)
    gravac.data_parallel(train_step, MESH)(*objects, np.ones((N, 8), np.float32))


def own(of):
    """Take own params in an nnx step, with what `of` makes of the optimizer."""
    in_an_nnx_step(lambda model, x, _: own_params(x.tx, nnx.state(model), of(x)))


def linear(make):
    """Take own params where what `make` returns comes after the exchange."""
    tx = optax.chain(ALONE, make(0.1))
    own_params(tx, PARAMS, tx.init(PARAMS))


DECAYING = transform(None, compress=True, weight_decay=0.1)
DROPPING = optax.GradientTransformation(*ALONE)._replace(
    update=lambda grads, state, params=None: CHAINED.update(grads, state, params)
)
CHAINED, TWICE = optax.chain(ALONE, SGD), optax.chain(TX, TX)
MEMBERS = jax.jit(jax.vmap(TX.init))(jax.tree.map(lambda x: jnp.stack([x] * N), PARAMS))
PARTS = {"w": jax.device_put(jnp.ones(N), jax.NamedSharding(MESH, jax.P("data")))}
WITH_MOMENTUM = transform(None, compress=True, memory=MOMENTUM())
AVERAGE = nnx.metrics.Average("loss")
PAIR = gravac.data_parallel(lambda a, b, x: [a, b], N)
KEEPING = [gravac.data_parallel(lambda x, batch: (x,), where) for where in (N, MESH)]
MASK = {"w": True}
SPECS = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
IN_A_SHARD_MAP = jax.shard_map(
    lambda state, x: TX.update(local(PARAMS, x.sum()), state)[1], mesh=MESH, **SPECS
)
INTEGERS, COMPLEX = jnp.zeros(3, jnp.uint32), jnp.ones(2, complex)
GRADS, ROWS = gravac.value_and_grad(jnp.sum, None), np.ones(N, np.float32)
CHANGING = gravac.value_and_grad(changing, None)
SWAPPED = lambda grads, state, params: TX.update(grads, params)
OF_VARIABLES = lambda model, x, batch: x.tx.update(
    local(nnx.state(model, nnx.Param), batch.sum()), x.opt_state
)
MEAN = lambda model, x: jnp.mean(model(x))

# The words that an error must contain, and the misuses that it answers.
VALUES = {
    "nothing to wait for in None": (gravac.StepClock().record, None),
    "`carries`…'swap', got 'x'": partial(gravac.Traffic(8, 1, 1, 1, "x").figures, 9, N),
    "must begin with gravac.Dense": partial(GUESS, ladder=gravac.Fastest().ladder[1:]),
    'got (Dense("bfloat16")': partial(GUESS, ladder=(gravac.Dense("bfloat16"), TWO)),
    "`min_entries` must be a whole number…'few'": (gravac.matrices, "few"),
    "a dict…tx.update(grads, opt_state, params)": (run, SWAPPED),
    "`mesh` must be…got {'b'…": (place, MESH, PARAMS),
    "['b']…second transform": (run, TWICE.update, TWICE),
    "return its 2 state arguments…got 1": (PAIR, NUMBER, ROWS, ROWS),
    "last argument….steps": (PAIR, ROWS, PARAMS, place(STATE, N)),
    "`shardings`…got 0 meshes, and ['bool']": partial(transform, shardings=True),
    "gravac.guard…found 0…gravac.transform()": (gravac.guard(SGD).init, PARAMS),
    "gravac.train_step…found 2…chain": (train_step(abs, TWICE, MESH).init, PARAMS),
    "gravac.flush…found 0…gravac.transform()": (flush, SGD, PARAMS, ()),
    "gravac.own_params…found 0…gravac.transform()": (own_params, SGD, PARAMS, ()),
    "wrapper…got tuple…transform…GradientTransformationExtraArgs": [
        (jax.eval_shape, partial(do, DROPPING), PARAMS, CHAINED.init(PARAMS))
        for do in (flush, own_params)
    ],
    "(4, 3)…(5, 3)…call init again": partial(update, new=jnp.zeros(3)),
    "call init again": [
        (update, PARAMS, CHAINED.init(PARAMS)),
        (update, PARAMS, WITH_MOMENTUM.init(PARAMS)),
    ],
    "(4, 96)…(96,)…gravac.state_specs": (update, PARAMS, place(STATE, N)),
    "weight_decay…tx.update(grads, opt_st…": (DECAYING.update, PARAMS, STATE),
    "['b'] does not vary over ('data',)…gravac.value_and_grad…remove any…lax.pmean": (
        partial(run, grads=summed)
    ),
    "not placed on 4…gravac.place…gravac.state_specs": [
        (step, TX.init(PARAMS), ROWS) for step in (jax.jit(IN_A_SHARD_MAP), *KEEPING)
    ],
    "2 replicas…4…gravac.place": (KEEPING[0], place(TX.init(PARAMS), 2), ROWS),
    "shape ()…by keyword": (PAIR, NUMBER, ROWS, 3),
    ".total…differs…(x, y)…nnx_data_parallel": (on_mesh, averaged, AVERAGE, ROWS),
    "contrib.sam…opaque_mode=True…grad_fn": (placed, optax.contrib.sam(TX, SGD)),
    "['mean']…has_aux": (CHANGING, {"mean": NUMBER, "w": NUMBER}),
    f"compress…{MASK}…pytree of bools": partial(init, compress=MASK),
    "compress…[1, 1, 1]…pytree of bools": partial(init, compress=[1, 1, 1]),
    "axis_name='data'…shard_map…not in a plain jit…axis_name=None": [
        (TX.update, PARAMS, STATE),
        (jax.jit(TX.update), PARTS, STATE),
        (gravac.value_and_grad(jnp.sum), jnp.ones(3)),
        *((x, PARAMS) for x in (gravac.checksum, gravac.resync)),
        (gravac.norm_of_mean, PARAMS, "data"),
        (jax.pmap(lambda x: TX.update(local(PARAMS, x), STATE)), jnp.ones(N)),
    ],
    "axis_name='batch'…the same axis": (run, transform("batch", compress=True).update),
    "step_seconds…(1,)…None": partial(timed, step_seconds=jnp.ones(1)),
    "steps_ago…(4,)…None": partial(timed, steps_ago=jnp.ones(N)),
    "4 replicas…2…tx.init": [
        (place, place(TX.init(PARAMS), MESH), x) for x in (2, make_mesh((2,)))
    ],
    "[0]…(6, 4)…rows first, a multiple of 4": (KEEPING[0], PARAMS, (np.ones((6, 4)),)),
    "[0]…(0, 4)…a multiple of 4 above 0": (KEEPING[1], PARAMS, (np.ones((0, 4)),)),
    "['w']…P('data',)…'data'…jax.device_put(x": (place, PARTS, MESH),
    "(4,) members…tx.init…vmap the loss": [
        (place, MEMBERS, MESH),
        (train_step(abs, TX, MESH), PARAMS, MEMBERS, ROWS),
    ],
    "MultiSteps…micro_batches": (placed, optax.MultiSteps(TX, 2)),
    "ApplyIfFinite…gravac.guard": (placed, optax.apply_if_finite(TX, 3)),
    "ConditionallyT…comes after": (placed, optax.conditionally_transform(TX, jnp.any)),
    "ConditionallyM…comes after": (placed, optax.conditionally_mask(TX, jnp.any)),
    "TraceState…first": (placed, optax.chain(optax.sgd(0.1, momentum=0.9), TX)),
    "linear in the updates…gravac.adamw…clip=": [
        (linear, make)
        for make in (
            *(optax.adam, optax.rmsprop, optax.lion, optax.adagrad, optax.lamb),
            partial(optax.rmsprop, centered=True),
            partial(optax.rmsprop, bias_correction=True),
            optax.contrib.schedule_free_adamw,
            partial(optax.lbfgs, linesearch=None),
            lambda rate: optax.contrib.mechanize(optax.sgd(rate)),
            # The state does not tell of these.
            *(optax.clip, optax.clip_by_global_norm, optax.lars, optax.sign_sgd),
            lambda _: optax.contrib.normalize(),
        )
    ],
}
TYPES = {
    "function init…['f']…eqx.filter": (place, {**PARAMS, "f": init}, MESH),
    "['a']…float…jnp.asarray": (trained, lambda params, x: params["a"], {"a": 1.0}),
    "[0]['name']…str…outside": partial(run, metrics=lambda x: ({"name": "sgd"},)),
    "train_step(loss_fn, tx, mesh)…got GradientTran": (train_step, TX, jnp.add, MESH),
    "`tx`…got function": (train_step, jnp.add, lambda: TX, MESH),
    "data_parallel(train_step, mesh)…got Mesh": (gravac.data_parallel, MESH, jnp.add),
    "`optimizer`…nnx.Optimizer of…got GradientTr": (
        in_an_nnx_step,
        lambda model, x, y: gravac.nnx_value_and_grad(MEAN, optimizer=x.tx)(model, y),
    ),
    "uint32…count…gravac.nnx_value_and_grad": (
        in_an_nnx_step,
        lambda model, _, batch: gravac.value_and_grad(MEAN)(model, batch),
    ),
    "`optimizer`…built-in function abs…nnx.Optimizer": partial(
        gravac.nnx_flush, abs, abs, MESH
    ),
    "got Optimizer…nnx.as_pure(optimizer.opt_state)": (own, lambda x: x),
    "got OptArray…nnx.as_pure(optimizer.opt_state)": [
        (own, lambda optimizer: optimizer.opt_state),
        (in_an_nnx_step, OF_VARIABLES),
    ],
    "`tx`…flush(tx, params, opt_state)…got dict": (flush, PARAMS, TX, STATE),
    "`tx`…own_params(tx, params, opt_state)…got dict": (own_params, PARAMS, TX, STATE),
    "`tx`…guard(tx)…got function…optimizer.tx": (gravac.guard, transform),
    "`send`…the class TopK…gravac.Bits(2)": partial(transform, send=gravac.TopK),
    "params hold a MaskedNode…compress=": (optax.masked(ALONE, COMPRESS).init, PARAMS),
    "gradients hold a MaskedNode…['b']": partial(update, b=optax.MaskedNode()),
    "leaves of the params…uint32…['x']…float params": (GRADS, {"x": INTEGERS}),
    "Mesh, got 4…along one axis…'data' and fast_axis_name='x'": partial(
        MAPPED, 4, fast_axis_name="x"
    ),
    "Mesh, got 4…along one axis…('data',) and": partial(MAPPED, 4, ("data",)),
    "Mesh, got 4…along one axis…got None and": partial(MAPPED, 4, None),
    "0 arguments…batch": PAIR,
    "two-element tuple": (gravac.value_and_grad(jnp.sum, None, has_aux=True), ROWS),
    "params…uint32…['x']…float params": (init, INTEGERS),
    "params…str…['x']…float params": (init, "ones"),
    "params…16 bits…float8…['x']": (init, jnp.ones(3, jnp.float8_e4m3fn)),
    "gradients…bool…['b']…float": partial(update, b=jnp.zeros(5, bool)),
    "gradients…complex64…['b']…float": partial(update, b=COMPLEX),
}


@pytest.mark.parametrize("words", [*VALUES, *TYPES])
def test_a_misuse_is_refused_with_what_was_received_and_a_remedy(words):
    error, given = (V, VALUES[words]) if words in VALUES else (T, TYPES[words])
    for misuse in given if isinstance(given, list) else [given]:
        call, *args = misuse if isinstance(misuse, tuple) else (misuse,)
        said = str(refused(error, partial(call, *args)))
        assert [x for x in words.split("…") if x not in said] == []


TOLD = optax.chain(TX, optax.contrib.reduce_on_plateau())

DIFFERENT = lambda grads, *state: TOLD.update(grads, *state, value=grads["b"][0])
SKIPPED = lambda grads, *state: jax.lax.cond(
    True, lambda: TX.update(grads, *state), lambda: (grads, state[0])
)
NESTED = jax.shard_map(jnp.sum, mesh=MESH, in_specs=jax.P("data"), out_specs=jax.P())
CENTRED = jax.vmap(lambda x: x - jax.lax.pmean(x, "rows"), axis_name="rows")
NOTES = {
    "micro_batches=": partial(run, grads=in_a_loop),
    "value=jax.lax.pmean(loss": partial(run, DIFFERENT, TOLD),
    "zeros like the params": partial(run, SKIPPED),
    "call its function": partial(trained, lambda p, x: NESTED(x)),
    "axis of a jax.vmap": partial(trained, lambda p, x: CENTRED(x).sum()),
}


@pytest.mark.parametrize("remedy", NOTES)
def test_an_error_of_jax_or_optax_in_a_step_has_a_note_with_the_remedy(remedy):
    with jax.numpy_dtype_promotion("standard"):  # Optax does
        notes = refused((AssertionError, T, V), NOTES[remedy]).__notes__
    assert any(remedy in note for note in notes)


def test_an_error_shows_no_whole_arrays():
    large = {"w": jnp.zeros((1000, 1000))}
    for call in (
        partial(place, large, large),
        partial(transform, large),
        partial(transform, send=large),
        partial(gravac.data_parallel, jnp.add, large),
        partial(init, compress=large),
    ):
        message = str(refused((T, V), call))
        assert len(message.partition("\n")[0]) == len(message) < 400
