"""Every misuse is refused with what was received and what to do instead."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, make_mesh
from flax import nnx

import gravac_jax as gravac
from gravac_jax import flush, own_params, train_step, transform

PARAMS = {"b": jnp.zeros(5), "w": jnp.zeros((8, 8))}
NUMBER, SGD = jnp.zeros(()), optax.sgd(0.1)
MESH = make_mesh()
ALONE = transform(None, compress=True)
STATE = ALONE.init(PARAMS)
TX = transform(compress=True)
DENSE, TWO = gravac.Dense(), gravac.Bits(2)
V, T = ValueError, TypeError

TOP_K, BITS, LOW_RANK = partial(gravac.TopK, 2), partial(gravac.Bits, 2), gravac.LowRank
GEOMETRIC = partial(gravac.TopK.geometric, 10)
STAGES = partial(gravac.Scheduled, (gravac.TopK(4), gravac.TopK(16), gravac.TopK(100)))
GRAD, SIMULATE = partial(gravac.value_and_grad, abs), partial(gravac.simulate, abs)
PLACE, MESHED = partial(gravac.place, PARAMS, MESH), partial(gravac.data_parallel, abs)
GUESS, FASTEST = gravac.GraVAC, gravac.Fastest
ROUNDS = partial(transform, send=FASTEST(rounds=(1, 4)))

# What is called, with what, and the remedy that its error must name, too.
ARGUMENTS = [
    (V, gravac.TopK, {"factor": 0.01}, "write 100"),
    (V, gravac.TopK, {"factor": 0}, "gravac.Dense()"),
    (V, gravac.TopK, {"factor": np.nan}, "gravac.Dense()"),
    (V, gravac.TopK, {"factor": "10"}, "number of at least 1"),
    (V, gravac.TopK, {"factor": True}, "number of at least 1"),
    (V, TOP_K, {"select": "random"}, "'exact'"),
    (V, TOP_K, {"values": "uint16"}, "'bfloat16'"),
    (V, TOP_K, {"indices": "bfloat16"}, "'uint16'"),
    (V, partial(gravac.TopK.exponential, maximum=10), {"minimum": 0.01}, "write 100"),
    (V, GEOMETRIC, {"maximum": 0.5}, "write 2"),
    (V, gravac.TopK.exponential, {"minimum": 100, "maximum": 10}, "below"),
    (V, partial(GEOMETRIC, 100), {"multiplier": 1}, "at least 1.01"),
    (V, gravac.Bits, {"bits": 3}, "8 or 4 or 2 or 1"),
    (V, gravac.Bits, {"bits": 2.0}, "8 or 4 or 2 or 1"),
    (V, BITS, {"mean_bits": 16}, "8 or 4 or 2 or 1"),
    (V, BITS, {"turns": 0}, "at least 1"),
    (V, BITS, {"row_entries": 100}, "multiple of 32"),
    (V, LOW_RANK, {"rank": 0}, "at least 1"),
    (V, partial(LOW_RANK, 4), {"values": "float16"}, "'bfloat16'"),
    (V, gravac.Dense, {"values": "float16"}, "'bfloat16'"),
    (T, FASTEST, {"ladder": (1, 4, 16)}, "gravac.Bits(8)"),
    (T, GUESS, {"ladder": TWO}, "send=gravac.Bits(2)"),
    (V, FASTEST, {"ladder": ()}, "2 encodings or more"),
    (V, FASTEST, {"ladder": (TWO,)}, "send=gravac.Bits(2)"),
    (V, FASTEST, {"ladder": (DENSE, TWO, TWO)}, "each of them once"),
    (V, gravac.Accordion, {"ladder": (DENSE, TWO, TWO)}, "have 2 encodings,"),
    (V, GUESS, {"ladder": (TWO, DENSE)}, "begin with gravac.Dense()"),
    (V, STAGES, {"starts": (5,)}, "each of 3 encodings but the first"),
    (V, STAGES, {"starts": (7, 3)}, "rising"),
    (V, STAGES, {"starts": (-1, 3)}, "counted from 0"),
    (V, STAGES, {"starts": 5}, "tuple"),
    (T, FASTEST, {"rounds": [1]}, "(1, 4, 16)"),
    (V, FASTEST, {"rounds": (2, 4)}, "gravac.transform(every=8)"),
    (V, GUESS, {"epsilon": 1.5}, "of at least 0 and at most 1"),
    (
        V,
        partial(gravac.adamw, 1),
        {"b1": jnp.float32(0.9)},
        "inject_hyperparams(lambda",
    ),
    (V, GUESS, {"omega": -0.1}, "of at least 0 and at most 1"),
    (V, GUESS, {"window": 0}, "at least 1"),
    (V, GUESS, {"smoothing": 0}, "None"),
    (V, GUESS, {"gain": "power"}, "'norm'"),
    (T, transform, {"send": 0.01}, "gravac.Bits(2)"),
    (T, transform, {"send": (DENSE, TWO)}, "gravac.Fastest((gravac.De"),
    (
        T,
        transform,
        {"memory": 0.9},
        "gravac.Residual() or gravac.OwnOptimizer(optax.adam",
    ),
    (T, transform, {"network": "probe.json"}, "gravac.WireCost() or probe.read(file)"),
    (T, transform, {"axis_name": TWO}, "send=gravac.Bits(2)"),
    (T, transform, {"axis_name": ()}, "None"),
    (T, transform, {"axis_name": ("data", None)}, "None"),
    (V, transform, {"fast_axis_name": "data"}, "another axis"),
    (V, partial(transform, None), {"fast_axis_name": "x"}, "another axis"),
    (T, transform, {"clip": 1.0}, "gravac.ClipByGlobalNorm(1.0)"),
    (V, transform, {"every": 0}, "a function of the step"),
    (V, transform, {"delay": "1"}, "0 or 1"),
    (V, transform, {"check_every": True}, "0 for never"),
    (V, gravac.WireCost, {"bytes_per_second": 0}, "gravac.WireCost"),
    (T, GRAD, {"axis_name": 0}, "None"),
    (V, GRAD, {"micro_batches": 0}, "at least 1"),
    (T, gravac.adamw, {"learning_rate": "1e-3"}, "schedule"),
    (T, gravac.sgd, {"learning_rate": None}, "schedule"),
    (V, gravac.Momentum, {"decay": 1.0}, "of at least 0 and below 1"),
    (V, gravac.dgc, {"warm_up_steps": -1}, "before the last stage"),
    (V, gravac.StepClock, {"steps": (0,)}, "0 in a new run"),
    (T, gravac.value_and_grad, {"fun": 3.0}, "(loss_fn, axis_name)"),
    (T, partial(gravac.state_specs, PARAMS), {"axis_name": 0}, "None"),
    (V, SIMULATE, {"replicas": 2.5}, "at least 1"),
    (V, ROUNDS, {"every": 2}, "leave `every` out, or `rounds`"),
    (V, partial(train_step, abs, TX, MESH), {"at": "mine"}, "'own' or 'shared'"),
    (V, PLACE, {"axis_name": "batch"}, "('data',): give both"),
    (V, partial(MESHED, MESH), {"axis_name": "batch"}, "('data',): give both"),
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


def init(leaf=None, **how):
    params = PARAMS if leaf is None else {**PARAMS, "x": leaf}
    transform(None, **{"compress": True, **how}).init(params)


def update(grads=PARAMS, state=STATE, **more):
    ALONE.update({**PARAMS, **more} if more else grads, state)


def update_with_state_of(**components):
    other = transform(None, compress=True, **components)
    update(state=other.init(PARAMS))


def own_params_with(after):
    tx = optax.chain(ALONE, after)
    own_params(tx, PARAMS, tx.init(PARAMS))


def with_aux(out):
    gravac.value_and_grad(lambda w: out, None, has_aux=True)(0.0)


def in_parts(batch):
    gravac.value_and_grad(lambda w, x: w, None, micro_batches=3)(1.0, x=batch)


def local(params, x):
    return jax.tree.map(lambda p: p + x, params)


def local_update(x):
    return TX.update(local(PARAMS, x), STATE)


def run(update=TX.update, tx=TX, grads=local, metrics=lambda x: (), check_vma=True):
    """Run a step on a mesh, with one part of it replaced."""

    def train_step(params, state, x):
        x = jnp.sum(x)
        updates, after = update(grads(params, x), state, params)
        return optax.apply_updates(params, updates), after, *metrics(x)

    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)
    step = gravac.data_parallel(train_step, MESH, check_vma=check_vma)
    try:
        step(*state, np.ones(N, np.float32))
    finally:
        jax.tree.map(np.asarray, state)  # raises if the state was donated


def timed(**times):
    run(lambda grads, state, params: TX.update(grads, state, **times))


def grads_of(loss):
    return lambda params, x: gravac.value_and_grad(loss)(params, x)[1]


def summed(params, x):
    return jax.grad(lambda p: jnp.sum(p["w"]) * x + jnp.sum(p["b"]))(params)


def unplaced(run, where, placed_on=None):
    state = PARAMS, TX.init(PARAMS)
    state = gravac.place(state, placed_on) if placed_on else state
    step = lambda params, state, x: (params, TX.update(params, state)[1])
    run(step, where)(*state, jnp.zeros(N))


def unplaced_in_a_shard_map():
    grads = lambda x: jax.tree.map(lambda p: p + x.sum(), PARAMS)
    step = jax.shard_map(
        lambda state, x: TX.update(grads(x), state)[1],
        mesh=MESH,
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P(),
    )
    sharding = jax.NamedSharding(MESH, jax.P("data"))
    step(TX.init(PARAMS), jax.device_put(jnp.zeros(N), sharding))


def called(*args, step=lambda a, b, x: (a, b), **kwargs):
    gravac.simulate(step, N)(*gravac.place(args, N), **kwargs)


def batch(make, where, shape):
    step = make(lambda params, x: (params,), where)
    step(gravac.place(PARAMS, where), {"x": np.ones(shape)})


def on_mesh(step, state, *batch):
    gravac.data_parallel(step, MESH)(gravac.place(state, MESH), *batch)


def averaged(metrics, batch):
    metrics.update(loss=jnp.mean(batch))
    return (metrics,)


def loss_that_changes_its_arguments():
    def loss(model):
        model["mean"] = model["w"] * 2
        return model["w"]

    gravac.value_and_grad(loss, None)({"mean": jnp.zeros(()), "w": jnp.ones(())})


def moved(where):
    gravac.place(gravac.place(TX.init(PARAMS), MESH), where)


def placed(tx):
    gravac.place((PARAMS, tx.init(PARAMS)), N)


def trained(loss, params=PARAMS, after=SGD):
    step = train_step(loss, optax.chain(TX, after), MESH)
    step(*step.init(params), np.ones(N, np.float32))


def in_an_nnx_step(misuse, model=None):
    """Run one step of `misuse(model, optimizer, batch)` on a mesh."""
    model = model or nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(TX, SGD), wrt=nnx.Param)

    def train_step(model, optimizer, batch):
        misuse(model, optimizer, batch)
        return model, optimizer

    gravac.data_parallel(train_step, MESH)(
        *gravac.place((model, optimizer), MESH), np.ones((N, 8), np.float32)
    )


def with_dropout(misuse):
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    in_an_nnx_step(misuse, nnx.Sequential(*layers))


def own(of):
    """Take own params in an nnx step, with what `of` makes of the optimizer."""
    take = lambda model, x, _: own_params(x.tx, nnx.state(model), of(x))
    in_an_nnx_step(take)


def mean_of(model, x):
    return jnp.mean(model(x))


def grad_with_tx(model, optimizer, x):
    gravac.nnx_value_and_grad(mean_of, optimizer=optimizer.tx)(model, x)


def grad_of_model(model, optimizer, x):
    gravac.value_and_grad(mean_of)(model, x)


def update_of_variables(model, optimizer, x):
    optimizer.tx.update(local(nnx.state(model), x.sum()), optimizer.opt_state)


def update_summed(model, optimizer, x):
    optimizer.update(model, nnx.grad(mean_of)(model, x))


RISING = transform(compress=True, send=FASTEST((gravac.TopK(10), gravac.Bits(8))))
APART = lambda params, x, y: (params, x * y)
CHECKING = transform(None, compress=True, check_every=3)
SWAPPED = lambda grads, state, params: TX.update(grads, params)
OTHERS = {"all": ALONE, "rest": SGD}
TWICE, ROWS = optax.chain(TX, TX), np.ones(N, np.float32)
MAPPED = [(gravac.simulate, N), (gravac.data_parallel, MESH)]
AVERAGE = nnx.metrics.Average("loss")
CALLED = partial(called, NUMBER, NUMBER, jnp.zeros(N))
INTEGERS, COMPLEX = jnp.zeros(3, jnp.uint32), jnp.ones(2, complex)
LEAVES = {"uint32": INTEGERS, "complex64": COMPLEX, "str": "ones"}
GRADS = gravac.value_and_grad(jnp.sum, None)
FLUSH, OWN = (f"gravac.{x}(tx, params, opt_state)" for x in ("flush", "own_params"))

# The words that an error must contain, and the misuses that it answers.
VALUES = {
    "TopK(10)…Bits(8)…the order of their bytes": (run, RISING.update, RISING),
    "`at` must be 'own' or 'shared', got 'mine'": partial(timed, at="mine"),
    "a dict…tx.update(grads, opt_state, params)": (run, SWAPPED),
    "['b']…second transform": (run, TWICE.update, TWICE),
    "[1]…differs…such as (x, y)": (on_mesh, APART, NUMBER, ROWS, ROWS),
    "found 2…optax.chain": (train_step(jnp.add, TWICE, MESH).init, PARAMS),
    "found 0…optax.chain": (train_step(jnp.add, SGD, MESH).init, PARAMS),
    "outside axis_name='data'…axis of the mesh": (jax.pmap(local_update), jnp.ones(N)),
    "return its 2 state arguments…got 1": [
        partial(CALLED, step=lambda a, b, x: [a, b]),
        partial(CALLED, step=lambda a, b, x: a),
    ],
    "last argument….steps": (called, jnp.zeros(N), PARAMS, gravac.place(STATE, N)),
    "micro_batches=3…'x'…(4,)…divisor": (in_parts, jnp.ones(4)),
    "micro_batches=3…shape ()…close over": (in_parts, 2.0),
    "`shardings`…got 0 meshes, and ['bool']": partial(transform, shardings=True),
    "gravac.guard…found 0…gravac.transform()": [
        partial(gravac.guard(SGD).init, PARAMS),
        partial(gravac.guard(SGD).update, PARAMS, ()),
    ],
    "gravac.guard…found 2…gravac.transform()": (gravac.guard(TWICE).init, PARAMS),
    "gravac.flush…found 0…gravac.transform()": (flush, SGD, PARAMS, ()),
    "gravac.own_params…found 0…gravac.transform()": (own_params, SGD, PARAMS, ()),
    "(4, 3)…(5, 3)…call init again": partial(update, new=jnp.zeros(3)),
    "(4, 3)…(3, 3)…call init again": (update, jnp.zeros(5 + 8 * 8)),
    "call init again": [
        partial(update, state=optax.chain(ALONE, SGD).init(PARAMS)),
        partial(update_with_state_of, memory=gravac.Momentum(0.5)),
        partial(update_with_state_of, send=FASTEST((DENSE, TWO))),
    ],
    "(4, 96)…(96,)…gravac.state_specs": lambda: update(state=gravac.place(STATE, N)),
    "check_every…tx.update(grads, opt_state, params)": (CHECKING.update, PARAMS, STATE),
    "['b']…('data',)…lax.pmean…gravac.value_and_grad": partial(run, grads=summed),
    "not placed on 4…gravac.place…gravac.state_specs": [
        unplaced_in_a_shard_map,
        *[partial(unplaced, *where) for where in MAPPED],
    ],
    "2 replicas…4…gravac.place": partial(unplaced, *MAPPED[0], placed_on=2),
    "the last argument": partial(called, NUMBER, NUMBER, batch=jnp.zeros(N)),
    "shape ()…by keyword": (called, NUMBER, NUMBER, 3),
    "[0]…('data',)…lax.pmean": (on_mesh, lambda x, y: (x + y.mean(),), NUMBER, ROWS),
    ".total…('data',)…gravac.nnx_data_parallel…jax.lax.psum": [
        partial(on_mesh, averaged, AVERAGE, ROWS),
        partial(on_mesh, averaged, nnx.MultiMetric(x=AVERAGE), ROWS),
    ],
    "['bias']…summed…gravac.nnx_value_and_grad": (with_dropout, update_summed),
    "contrib.sam…opaque_mode=True…grad_fn": (placed, optax.contrib.sam(TX, SGD)),
    "['x']…(6, 4)…rows first": [partial(batch, *where, (6, 4)) for where in MAPPED],
    "['mean']…has_aux": loss_that_changes_its_arguments,
    **{
        f"compress…{mask}…pytree of bools": partial(init, compress=mask)
        for mask in [{"w": True}, {"b": 0, "w": 1}, {"a": True, "b": False}, [True] * 2]
    },
    "axis_name='data'…shard_map…axis_name=None": [
        partial(TX.update, PARAMS, STATE),
        partial(jax.jit(TX.update), PARAMS, STATE),
        partial(gravac.value_and_grad(jnp.sum), jnp.ones(3)),
    ],
    "axis_name='batch'…of the mesh": [
        partial(run, transform("batch", compress=True).update, check_vma=x)
        for x in (True, False)
    ],
    **{
        f"{name}…{shape}…None": partial(timed, **{name: jnp.ones(shape)})
        for name in ("step_seconds", "measured_step")
        for shape in [(1,), (N,)]
    },
    **{
        f"4 replicas…{n}…tx.init": [partial(moved, x) for x in (n, make_mesh((n,)))]
        for n in (1, 2, 8)
    },
    **{
        f"['x']…{shape}…multiple of 4": [partial(batch, *x, shape) for x in MAPPED]
        for shape in [(N + 1, 3), (2,), ()]
    },
    "MultiSteps…micro_batches": (placed, optax.MultiSteps(TX, 2)),
    "ApplyIfFinite…gravac.guard": (placed, optax.apply_if_finite(TX, 3)),
    "Conditionally…what comes after": [
        lambda: placed(optax.conditionally_transform(TX, lambda step: step > 3)),
        lambda: placed(optax.conditionally_mask(TX, lambda step: step > 3)),
    ],
    "TraceState…first": (placed, optax.chain(optax.sgd(0.1, momentum=0.9), TX)),
    "ScaleByAdamState…first": (placed, optax.chain(optax.adamw(0.1), TX)),
    "EmaState…first": (placed, optax.chain(optax.ema(0.9), TX)),
    "linear in the updates…gravac.adamw…clip=": [
        partial(own_params_with, make(0.1))
        for make in (
            *(optax.adam, optax.rmsprop, optax.lion, optax.adagrad, optax.lamb),
            partial(optax.rmsprop, centered=True),
            partial(optax.lbfgs, linesearch=None),
            lambda rate: optax.contrib.mechanize(optax.sgd(rate)),
            # The state does not tell of these.
            *(optax.clip, optax.clip_by_global_norm, optax.lars, optax.sign_sgd),
            lambda _: optax.contrib.normalize(),
        )
    ],
}
TYPES = {
    "`compress`…lambda path, leaf:…(leaf)": partial(init, compress=lambda leaf: True),
    "one number…a tuple…has_aux=True": (trained, lambda p, x: (jnp.sum(p["w"]), x)),
    "one number…shape (8, 8)…mean": partial(run, grads=grads_of(lambda p, x: p["w"])),
    "one number…a NoneType": partial(run, grads=grads_of(lambda params, x: None)),
    "['a']…float…jnp.asarray": (trained, lambda params, x: params["a"], {"a": 1.0}),
    "[0]['name']…str…outside": partial(run, metrics=lambda x: ({"name": "sgd"},)),
    "train_step(loss_fn, tx, mesh)…got GradientTran": (train_step, TX, jnp.add, MESH),
    "`tx`…got function": (train_step, jnp.add, lambda: TX, MESH),
    "gravac.simulate(train_step, replicas)…got 4": (gravac.simulate, 4, jnp.add),
    "data_parallel(train_step, mesh)…got Mesh": (gravac.data_parallel, MESH, jnp.add),
    "`optimizer`…nnx.Optimizer of…got GradientTr": (in_an_nnx_step, grad_with_tx),
    "uint32…count…gravac.nnx_value_and_grad": (with_dropout, grad_of_model),
    "got Optimizer…nnx.as_pure(optimizer.opt_state)": (own, lambda x: x),
    "got OptArray…nnx.as_pure(optimizer.opt_state)": [
        partial(own, lambda optimizer: optimizer.opt_state),
        partial(in_an_nnx_step, update_of_variables),
    ],
    "swapped…Mesh before dict…gravac.place(tree, mesh)": (gravac.place, MESH, PARAMS),
    "swapped…int before dict…gravac.place(tree, mesh)": (gravac.place, N, PARAMS),
    f"`tx`…{FLUSH}…got dict…optimizer.tx": (flush, PARAMS, TX, STATE),
    f"`tx`…{OWN}…got dict…optimizer.tx": (own_params, PARAMS, TX, STATE),
    "`tx`…guard(tx)…got function…optimizer.tx": (gravac.guard, transform),
    "`send`…the class TopK…gravac.Bits(2)": partial(transform, send=gravac.TopK),
    "Bits(2)…gravac.TopK(1000)": partial(gravac.dgc, send=TWO, warm_up_steps=10),
    "params hold a MaskedNode…['b']…compress=": [
        partial(optax.masked(ALONE, {"b": False, "w": True}).init, PARAMS),
        partial(optax.partition(OTHERS, {"b": "rest", "w": "all"}).init, PARAMS),
    ],
    "gradients hold a MaskedNode…['b']": partial(update, b=optax.MaskedNode()),
    "argument 0…uint32…['x']…float params": (GRADS, {"x": INTEGERS}),
    "(0,)…0 positional…by position": partial(GRADS, a=jnp.ones(3)),
    "['z']…complex…real and imaginary": (gravac.checksum, {"z": COMPLEX}, None),
    "Mesh, got 4…`fast_axis_name` out": partial(MESHED, 4, fast_axis_name="x"),
    "0 arguments…batch": called,
    **{
        f"params…{dtype}…['x']…float params": (init, leaf)
        for dtype, leaf in LEAVES.items()
    },
    **{
        f"gradients…{x}…['b']…float": partial(update, b=jnp.zeros(5, x))
        for x in ("int32", "bool", "complex64")
    },
    "has_aux=True…(loss, aux)": [partial(with_aux, x) for x in (0.0, (0.0, 1, 2))],
}


@pytest.mark.parametrize("words", [*VALUES, *TYPES])
def test_a_misuse_is_refused_with_what_was_received_and_a_remedy(words):
    error, given = (V, VALUES[words]) if words in VALUES else (T, TYPES[words])
    for misuse in given if isinstance(given, list) else [given]:
        call, *args = misuse if isinstance(misuse, tuple) else (misuse,)
        said = str(refused(error, partial(call, *args)))
        assert [x for x in words.split("…") if x not in said] == []


def in_a_loop(params, x):
    grads_of = gravac.value_and_grad(lambda p, x: x * jnp.sum(p["w"]))

    def add(total, x):
        return jax.tree.map(jnp.add, total, grads_of(params, x)[1]), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, x[None])[0]


PLATEAU = optax.contrib.reduce_on_plateau()
TOLD = optax.chain(TX, PLATEAU)
UNTIMED = gravac.simulate(lambda params, x: (params,), N)


def at_own(grads, state, params):
    return own_params(TOLD, params, state)


def told(grads, state, params):
    """Tell an optimizer what differs between replicas."""
    return TOLD.update(grads, state, params, value=grads["b"][0])


NOTES = {
    "micro_batches=": partial(run, grads=in_a_loop),
    "train_step(params, opt_state, batch, **times)": partial(
        UNTIMED, PARAMS, jnp.zeros(N), **gravac.StepClock().times()
    ),
    "value=jax.lax.pmean(loss": partial(run, told, TOLD),
    "params, opt_state, value=0.0)": partial(run, at_own, TOLD),
    "In a step of your own": partial(trained, lambda p, x: jnp.sum(x), after=PLATEAU),
}


@pytest.mark.parametrize("remedy", NOTES)
def test_an_error_of_jax_or_optax_in_a_step_has_a_note_with_the_remedy(remedy):
    with jax.numpy_dtype_promotion("standard"):  # Optax does
        notes = refused(TypeError, NOTES[remedy]).__notes__
    assert any(remedy in note for note in notes)


def test_an_error_shows_no_whole_arrays():
    large = {"w": jnp.zeros((1000, 1000))}
    for call in (
        partial(gravac.place, large, large),
        partial(transform, large),
        partial(transform, send=large),
        partial(gravac.data_parallel, jnp.add, large),
        partial(init, large["w"], compress=large),
    ):
        assert "\n" not in str(refused((T, V), call))


def test_what_keeps_nothing_may_come_first_and_what_is_linear_last():
    placed(optax.chain(optax.clip(1.0), TX, optax.adam(0.1)))
    sized = lambda g, _: {**g, "w": g["w"].reshape(64)[::-1].reshape(8, 8)}
    frozen = {"a": SGD, "b": optax.set_to_zero()}, {"b": "a", "w": "b"}
    injected = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9, nesterov=True)
    with jax.numpy_dtype_promotion("standard"):  # Optax does
        for after in injected, optax.partition(*frozen), optax.stateless(sized):
            own_params_with(after)
