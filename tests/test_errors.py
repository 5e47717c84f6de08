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

PARAMS = {"b": jnp.zeros(5), "w": jnp.zeros((8, 8))}
MESH = make_mesh()
ALONE = gravac.transform(None, compress=True)
STATE = ALONE.init(PARAMS)
TX = gravac.transform(compress=True)


# What is called, with what, and the remedy that its error must name, too.
DENSE, TWO = gravac.Dense(), gravac.Bits(2)
STAGES = partial(gravac.Scheduled, (gravac.TopK(4), gravac.TopK(16), gravac.TopK(100)))
ARGUMENTS = [
    (ValueError, gravac.TopK, {"factor": 0.01}, "write 100"),
    (ValueError, gravac.TopK, {"factor": 0}, "gravac.Dense()"),
    (ValueError, gravac.TopK, {"factor": -10}, "gravac.Dense()"),
    (ValueError, gravac.TopK, {"factor": np.nan}, "gravac.Dense()"),
    (TypeError, gravac.TopK, {"factor": "10"}, "number"),
    (TypeError, gravac.TopK, {"factor": True}, "number"),
    (ValueError, partial(gravac.TopK, 10), {"select": "random"}, "'exact'"),
    (ValueError, partial(gravac.TopK, 10), {"values": "uint16"}, "'bfloat16'"),
    (ValueError, partial(gravac.TopK, 10), {"indices": "bfloat16"}, "'uint16'"),
    (
        ValueError,
        partial(gravac.TopK.exponential, maximum=10),
        {"minimum": 0.01},
        "write 100",
    ),
    (ValueError, partial(gravac.TopK.geometric, 10), {"maximum": 0.5}, "write 2"),
    (ValueError, gravac.TopK.exponential, {"minimum": 100, "maximum": 10}, "below"),
    (
        ValueError,
        partial(gravac.TopK.geometric, 10, 100),
        {"multiplier": 1},
        "between 1.01",
    ),
    (ValueError, gravac.Bits, {"bits": 3}, "8 or 4 or 2 or 1"),
    (ValueError, partial(gravac.Bits, 2), {"mean_bits": 16}, "8 or 4 or 2 or 1"),
    (ValueError, partial(gravac.Bits, 2), {"turns": 0}, "at least 1"),
    (ValueError, partial(gravac.Bits, 2), {"row_entries": 100}, "multiple of 32"),
    (ValueError, gravac.LowRank, {"rank": 0}, "at least 1"),
    (ValueError, partial(gravac.LowRank, 4), {"values": "float16"}, "'bfloat16'"),
    (ValueError, gravac.Dense, {"values": "float16"}, "'bfloat16'"),
    (TypeError, gravac.Fastest, {"ladder": (1, 4, 16)}, "gravac.Bits(8)"),
    (TypeError, gravac.Fastest, {"ladder": [DENSE, TWO]}, "must be a tuple"),
    (TypeError, gravac.GraVAC, {"ladder": TWO}, "send=gravac.Bits(2)"),
    (TypeError, gravac.GraVAC, {"ladder": 0.7}, "(gravac.Dense(), "),
    (ValueError, gravac.Fastest, {"ladder": ()}, "2 encodings or more"),
    (ValueError, gravac.Fastest, {"ladder": (TWO,)}, "send=gravac.Bits(2)"),
    (ValueError, gravac.Fastest, {"ladder": (DENSE, TWO, TWO)}, "each of them once"),
    (ValueError, gravac.Accordion, {"ladder": (DENSE, TWO, TWO)}, "have 2 encodings,"),
    (ValueError, gravac.GraVAC, {"ladder": (TWO, DENSE)}, "begin with gravac.Dense()"),
    (ValueError, STAGES, {"starts": (5,)}, "each of 3 encodings but the first"),
    (ValueError, STAGES, {"starts": (7, 3)}, "rising"),
    (ValueError, STAGES, {"starts": (-1, 3)}, "counted from 0"),
    (ValueError, STAGES, {"starts": 5}, "tuple"),
    (TypeError, gravac.Fastest, {"rounds": [1]}, "(1, 4, 16)"),
    (ValueError, gravac.Fastest, {"rounds": (2, 4)}, "gravac.transform(every=8)"),
    (ValueError, gravac.GraVAC, {"epsilon": 1.5}, "between 0 and 1"),
    (
        ValueError,
        partial(gravac.adamw, 1e-3),
        {"b1": jnp.float32(0.9)},
        "inject_hyperparams(lambda",
    ),
    (ValueError, gravac.GraVAC, {"omega": -0.1}, "between 0 and 1"),
    (ValueError, gravac.GraVAC, {"window": 0}, "at least 1"),
    (ValueError, gravac.GraVAC, {"smoothing": 0}, "None"),
    (ValueError, gravac.GraVAC, {"gain": "power"}, "'norm'"),
    (TypeError, gravac.transform, {"send": 0.01}, "gravac.Bits(2)"),
    (TypeError, gravac.transform, {"send": (DENSE, TWO)}, "gravac.Fastest((gravac.De"),
    (TypeError, gravac.transform, {"memory": TWO}, "gravac.Residual()"),
    (TypeError, gravac.transform, {"memory": 0.9}, "gravac.Steps(optax.adam"),
    (TypeError, gravac.transform, {"network": 125e6}, "gravac.WireCost()"),
    (TypeError, gravac.transform, {"network": "probe.json"}, "probe.read(file)"),
    (TypeError, gravac.transform, {"axis_name": TWO}, "send=gravac.Bits(2)"),
    (TypeError, gravac.transform, {"axis_name": 0}, "None"),
    (TypeError, gravac.transform, {"axis_name": ()}, "None"),
    (TypeError, gravac.transform, {"axis_name": ("data", None)}, "None"),
    (ValueError, gravac.transform, {"dense_axis_name": "data"}, "another axis"),
    (
        ValueError,
        partial(gravac.transform, None),
        {"dense_axis_name": "x"},
        "another axis",
    ),
    (TypeError, gravac.transform, {"clip": 1.0}, "gravac.ClipByGlobalNorm(1.0)"),
    (ValueError, gravac.transform, {"every": 0}, "a function from the step"),
    (ValueError, gravac.transform, {"delay": "1"}, "1 (that of the step before)"),
    (ValueError, gravac.transform, {"check_every": True}, "0 for never"),
    (ValueError, gravac.WireCost, {"bytes_per_second": 0}, "gravac.WireCost"),
    (TypeError, partial(gravac.value_and_grad, jnp.sum), {"axis_name": 0}, "None"),
    (
        ValueError,
        partial(gravac.value_and_grad, jnp.sum),
        {"micro_batches": 0},
        "least 1",
    ),
    (TypeError, gravac.adamw, {"learning_rate": "1e-3"}, "schedule"),
    (TypeError, gravac.sgd, {"learning_rate": None}, "schedule"),
    (ValueError, gravac.Momentum, {"decay": "0.9"}, "such as 0.9"),
    (ValueError, gravac.Momentum, {"decay": 1.0}, "such as 0.9"),
    (ValueError, gravac.dgc, {"warm_up_steps": -1}, "before the last stage"),
    (ValueError, gravac.StepClock, {"steps": "0"}, "0 in a new run"),
    (ValueError, gravac.StepClock, {"steps": (0,)}, "0 in a new run"),
    (TypeError, gravac.value_and_grad, {"fun": 3.0}, "(loss_fn, axis_name)"),
    (TypeError, partial(gravac.state_specs, PARAMS), {"axis_name": 0}, "None"),
    (ValueError, partial(gravac.simulate, jnp.add), {"replicas": 2.5}, "at least 1"),
    (ValueError, partial(gravac.simulate, jnp.add), {"replicas": 0}, "at least 1"),
]


def id_of(value) -> str | None:
    """A name that is the same in every process, as pytest-xdist needs it."""
    return str(value) if isinstance(value, dict) else None


@pytest.mark.parametrize(
    ("error", "function", "arguments", "remedy"), ARGUMENTS, ids=id_of
)
def test_a_wrong_argument_is_refused_by_name(error, function, arguments, remedy):
    with pytest.raises(error) as caught:
        function(**arguments)
    words = [*arguments, *map(repr, arguments.values()), remedy]
    assert [x for x in words if x not in str(caught.value)] == []


def misuse(words, call):
    """Return a misuse, and the words that its error must contain."""
    return pytest.param(words.split(" ... "), call, id=words)


def masked(mask):
    gravac.transform(None, compress=mask).init(PARAMS)


def with_leaf(leaf):
    ALONE.init({**PARAMS, "x": leaf})


def update(dtype):
    ALONE.update({**PARAMS, "b": jnp.zeros(5, dtype)}, STATE)


def update_with_state_of(**components):
    other = gravac.transform(None, compress=True, **components)
    ALONE.update(PARAMS, other.init(PARAMS))


def own_params(after):
    tx = optax.chain(ALONE, after)
    gravac.own_params(tx, PARAMS, tx.init(PARAMS))


def aux(out):
    gravac.value_and_grad(lambda w: out, None, has_aux=True)(0.0)


def replace(where):
    gravac.place(gravac.place(TX.init(PARAMS), MESH), where)


def run(update, tx=TX, check_vma=True):
    """Run one step of `update(params, state, x)` on a mesh; only x varies."""
    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)

    def train_step(params, state, x):
        updates, state = update(params, state, jnp.sum(x))
        return optax.apply_updates(params, updates), state

    step = gravac.data_parallel(train_step, MESH, check_vma=check_vma)
    try:
        step(*state, np.ones(N, np.float32))
    finally:
        jax.tree.map(np.asarray, state)  # raises if the state was donated


def run_summed():
    loss = lambda params, x: jnp.sum(params["w"]) * x + jnp.sum(params["b"])
    run(lambda params, state, x: TX.update(jax.grad(loss)(params, x), state))


def over_another_axis(check_vma):
    tx = gravac.transform("batch", compress=True)
    run(lambda params, state, x: tx.update(params, state), tx, check_vma)


def local(params, x):
    return jax.tree.map(lambda p: p + x, params)


def timed(**times):
    run(lambda params, state, x: TX.update(local(params, x), state, **times))


def unplaced(run, where):
    step = lambda params, state, x: (params, TX.update(params, state)[1])
    run(step, where)(PARAMS, TX.init(PARAMS), jnp.zeros(N))


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


def placed_on_two():
    state = gravac.place((PARAMS, TX.init(PARAMS)), 2)
    step = lambda params, state, x: (params, TX.update(params, state)[1])
    gravac.simulate(step, N)(*state, jnp.zeros(N))


def called(*args, step=lambda a, b, x: (a, b), **kwargs):
    gravac.simulate(step, N)(*gravac.place(args, N), **kwargs)


def batch(make, where, shape):
    step = make(lambda params, x: (params,), where)
    step(gravac.place(PARAMS, where), {"x": np.ones(shape)})


def state_that_differs():
    step = gravac.data_parallel(lambda old, x: (old + x.mean(),), MESH)
    step(gravac.place(jnp.zeros(()), MESH), np.ones(N, np.float32))


def loss_that_changes_its_arguments():
    def loss(model):
        model["mean"] = model["w"] * 2
        return model["w"]

    gravac.value_and_grad(loss, None)({"mean": jnp.zeros(()), "w": jnp.ones(())})


def place_chain(tx):
    gravac.place((PARAMS, tx.init(PARAMS)), N)


def in_an_nnx_step(misuse, model=None):
    """Run one step of `misuse(model, optimizer, batch)` on a mesh."""
    model = model or nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    tx = optax.chain(TX, optax.sgd(0.1))
    objects = gravac.place((model, nnx.Optimizer(model, tx, wrt=nnx.Param)), MESH)

    def train_step(model, optimizer, batch):
        misuse(model, optimizer, batch)
        return model, optimizer

    gravac.data_parallel(train_step, MESH)(*objects, np.ones((N, 8), np.float32))


def dropout():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))


def own(of):
    """Take own params in an nnx step, with what `of` makes of the optimizer."""
    in_an_nnx_step(
        lambda model, optimizer, _: gravac.own_params(
            optimizer.tx, nnx.state(model), of(optimizer)
        )
    )


def local_metrics(metrics):
    def eval_step(metrics, batch):
        metrics.update(loss=jnp.mean(batch))
        return (metrics,)

    step = gravac.data_parallel(eval_step, MESH)
    step(gravac.place(metrics, MESH), np.ones(N, np.float32))


def in_a_step(grads=None, update=None, metrics=lambda x: (), tx=TX):
    """Run a step with one part of it replaced."""
    grads = grads or local
    update = update or tx.update

    def train_step(params, state, x):
        updates, after = update(grads(params, jnp.sum(x)), state, params)
        return optax.apply_updates(params, updates), after, *metrics(jnp.sum(x))

    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)
    gravac.data_parallel(train_step, MESH)(*state, np.ones(N, np.float32))


def grads_of(loss, **how):
    return lambda params, x: gravac.value_and_grad(
        lambda params: loss(params, x), **how
    )(params)[1]


def trained(loss, params=PARAMS):
    step = gravac.train_step(loss, optax.chain(TX, SGD), MESH)
    step(*step.init(params), np.ones(N, np.float32))


def two_batches():
    def train_step(params, x, y):
        return params, x * y

    step = gravac.data_parallel(train_step, MESH)
    step(gravac.place(NUMBER, MESH), np.ones(N), np.ones(N, np.float32))


NUMBER, SGD = jnp.zeros(()), optax.sgd(0.1)
RISING = gravac.Fastest((gravac.TopK(10), gravac.Bits(8)))
WRONG_VALUES = [
    misuse(
        "every=2 ... Fastest(rounds=(1, 4)) ... Leave `every` out",
        lambda: gravac.transform(every=2, send=gravac.Fastest(rounds=(1, 4))),
    ),
    misuse(
        "4 replicas ... TopK(10) ... Bits(8) ... the order of their bytes",
        lambda: in_a_step(tx=gravac.transform(compress=True, send=RISING)),
    ),
    misuse("`at` ... 'own' or 'shared' ... 'mine'", lambda: timed(at="mine")),
    misuse(
        "`at` ... 'own' or 'shared' ... 'mine'",
        lambda: gravac.train_step(jnp.add, TX, MESH, at="mine"),
    ),
    misuse(
        "a dict ... tx.update(grads, opt_state, params)",
        lambda: in_a_step(update=lambda grads, state, params: TX.update(grads, params)),
    ),
    misuse(
        "['b'] ... second transform ... one is enough",
        lambda: in_a_step(tx=optax.chain(TX, TX)),
    ),
    misuse("[1] ... differs ... such as (x, y)", two_batches),
    misuse(
        "found 2 ... optax.chain",
        lambda: gravac.train_step(jnp.add, optax.chain(TX, TX), MESH).init(PARAMS),
    ),
    misuse(
        "found 0 ... optax.chain",
        lambda: gravac.train_step(jnp.add, SGD, MESH).init(PARAMS),
    ),
    misuse(
        "outside axis_name='data' ... name that your mesh has",
        lambda: jax.pmap(lambda x: TX.update(local(PARAMS, x), STATE))(jnp.ones(N)),
    ),
    misuse(
        "return its 2 state arguments ... got 1 ... tuple",
        lambda: called(NUMBER, NUMBER, jnp.zeros(N), step=lambda a, b, x: [a, b]),
    ),
    misuse(
        "return its 2 state arguments ... got 1 ... None",
        lambda: called(NUMBER, NUMBER, jnp.zeros(N), step=lambda a, b, x: None),
    ),
    misuse(
        "the batch, the last argument ... .steps",
        lambda: called(jnp.zeros(N), PARAMS, gravac.place(STATE, N)),
    ),
    misuse(
        "micro_batches=3 ... 'x' ... (4,) ... divisor",
        lambda: gravac.value_and_grad(lambda w, x: w, None, micro_batches=3)(
            1.0, x=jnp.ones(4)
        ),
    ),
    misuse(
        "micro_batches=3 ... shape () ... Close over",
        lambda: gravac.value_and_grad(lambda w, x: w, None, micro_batches=3)(1.0, 2.0),
    ),
    misuse(
        "`shardings` must be the params ... got 0 meshes, and ['bool']",
        lambda: gravac.transform(shardings=True),
    ),
    misuse(
        "'batch' ... ('data',) ... same name",
        lambda: gravac.place(PARAMS, MESH, "batch"),
    ),
    misuse(
        "'batch' ... ('data',) ... same name",
        lambda: gravac.data_parallel(jnp.add, MESH, "batch"),
    ),
    *[
        misuse(f"{name} ... found {found} ... gravac.transform()", call)
        for name, found, call in [
            ("gravac.guard", 0, lambda: gravac.guard(SGD).init(PARAMS)),
            ("gravac.guard", 0, lambda: gravac.guard(SGD).update(PARAMS, ())),
            ("gravac.guard", 2, lambda: gravac.guard(optax.chain(TX, TX)).init(PARAMS)),
            ("gravac.flush", 0, lambda: gravac.flush(SGD, PARAMS, ())),
            ("gravac.own_params", 0, lambda: gravac.own_params(SGD, PARAMS, ())),
        ]
    ],
    misuse(
        "(4, 3) ... (5, 3) ... call init again",
        lambda: ALONE.update({**PARAMS, "new": jnp.zeros(3)}, STATE),
    ),
    misuse(
        "(4, 3) ... (3, 3) ... call init again",
        lambda: ALONE.update(jnp.zeros(5 + 8 * 8), STATE),
    ),
    misuse(
        "call init again",
        lambda: ALONE.update(PARAMS, optax.chain(ALONE, optax.sgd(0.1)).init(PARAMS)),
    ),
    misuse(
        "(4, 96) ... (96,) ... gravac.state_specs",
        lambda: ALONE.update(PARAMS, gravac.place(ALONE.init(PARAMS), N)),
    ),
    misuse(
        "check_every ... tx.update(grads, opt_state, params)",
        lambda: gravac.transform(None, compress=True, check_every=3).update(
            PARAMS, STATE
        ),
    ),
    misuse(
        "['b'] ... ('data',) ... jax.lax.pmean ... gravac.value_and_grad", run_summed
    ),
    misuse("not placed ... gravac.place", lambda: unplaced(gravac.simulate, N)),
    misuse("not placed ... gravac.place", lambda: unplaced(gravac.data_parallel, MESH)),
    misuse("not placed ... gravac.state_specs", unplaced_in_a_shard_map),
    misuse("2 replicas ... 4 ... gravac.place", placed_on_two),
    misuse("the last argument", lambda: called(NUMBER, NUMBER, batch=jnp.zeros(N))),
    misuse("shape () ... by keyword", lambda: called(NUMBER, NUMBER, 3)),
    misuse(
        "return its 2 state arguments ... got 1",
        lambda: called(NUMBER, NUMBER, jnp.zeros(N), step=lambda a, b, x: a),
    ),
    misuse("[0] ... ('data',) ... jax.lax.pmean", state_that_differs),
    *[
        misuse(
            f"{path} ... ('data',) ... gravac.nnx_data_parallel ... jax.lax.psum",
            partial(local_metrics, metrics),
        )
        for path, metrics in [
            ("[0].total", nnx.metrics.Average("loss")),
            ("[0].x.total", nnx.MultiMetric(x=nnx.metrics.Average("loss"))),
        ]
    ],
    misuse(
        "['layers'][0]['bias'] ... summed ... gravac.nnx_value_and_grad",
        lambda: in_an_nnx_step(
            lambda model, optimizer, x: optimizer.update(
                model, nnx.grad(lambda model: jnp.sum(model(x)))(model)
            ),
            dropout(),
        ),
    ),
    misuse(
        "optax.contrib.sam ... opaque_mode=True ... grad_fn",
        lambda: place_chain(optax.contrib.sam(optax.chain(TX, SGD), SGD)),
    ),
    *[
        misuse(
            "['x'] ... (6, 4) ... rows first ... (rows, steps, ...)",
            partial(*call, (6, 4)),
        )
        for call in [(batch, gravac.simulate, N), (batch, gravac.data_parallel, MESH)]
    ],
    misuse("['mean'] ... has_aux", loss_that_changes_its_arguments),
    *[
        misuse(f"compress ... {mask} ... pytree of bools", partial(masked, mask))
        for mask in (
            {"w": True},
            {"b": 0, "w": 1},
            {"a": True, "b": False},
            [True, False],
        )
    ],
    *[
        misuse("call init again", partial(update_with_state_of, **other))
        for other in (
            {"memory": gravac.Momentum(0.5)},
            {"send": gravac.TopK(4)},
            {"send": gravac.Fastest((gravac.Dense(), gravac.Bits(2)))},
        )
    ],
    *[
        misuse("axis_name='data' ... shard_map ... axis_name=None", call)
        for call in (
            lambda: TX.update(PARAMS, STATE),
            lambda: jax.jit(TX.update)(PARAMS, STATE),
            lambda: gravac.value_and_grad(jnp.sum)(jnp.ones(3)),
        )
    ],
    *[
        misuse(
            "axis_name='batch' ... name that your mesh", partial(over_another_axis, x)
        )
        for x in (True, False)
    ],
    *[
        misuse(
            f"{name} ... {shape} ... None", partial(timed, **{name: jnp.ones(shape)})
        )
        for name in ("step_seconds", "measured_step")
        for shape in [(1,), (N,)]
    ],
    *[
        misuse(f"4 replicas ... {replicas} ... tx.init", partial(replace, where))
        for replicas in (1, 2, 8)
        for where in (replicas, make_mesh((replicas,)))
    ],
    *[
        misuse(
            f"4 replicas ... ['x'] ... {shape} ... multiple of 4", partial(*call, shape)
        )
        for call in [(batch, gravac.simulate, N), (batch, gravac.data_parallel, MESH)]
        for shape in [(N + 1, 3), (2,), ()]
    ],
    *[
        misuse(f"{name} ... {remedy}", partial(place_chain, tx))
        for name, remedy, tx in [
            ("MultiSteps", "micro_batches", optax.MultiSteps(TX, 2)),
            ("ApplyIfFinite", "gravac.guard", optax.apply_if_finite(TX, 3)),
            (
                "ConditionallyTransform",
                "around what comes after",
                optax.conditionally_transform(TX, lambda step: step > 3),
            ),
            ("TraceState", "first", optax.chain(optax.sgd(0.1, momentum=0.9), TX)),
            ("ScaleByAdamState", "first", optax.chain(optax.adamw(0.1), TX)),
            ("EmaState", "first", optax.chain(optax.ema(0.9), TX)),
        ]
    ],
    *[
        misuse("linear in the updates ... gravac.adamw", partial(own_params, after))
        for after in (
            optax.adam(1e-3),
            optax.rmsprop(1e-3),
            optax.rmsprop(1e-3, centered=True),
            optax.lion(1e-3),
            optax.adagrad(1e-3),
            optax.lamb(1e-3),
            optax.contrib.mechanize(optax.sgd(0.1)),
            optax.lbfgs(0.1, linesearch=None),
        )
    ],
]


WRONG_TYPES = [
    misuse(
        "`compress` ... lambda path, leaf: ... (leaf)",
        lambda: gravac.transform(None, compress=lambda leaf: True).init(PARAMS),
    ),
    misuse(
        "one number ... a tuple ... has_aux=True",
        lambda: trained(lambda params, x: (jnp.sum(params["w"]), x)),
    ),
    misuse(
        "one number ... shape (8, 8) ... mean",
        lambda: in_a_step(grads=grads_of(lambda params, x: params["w"] * x)),
    ),
    misuse(
        "one number ... a NoneType",
        lambda: in_a_step(grads=grads_of(lambda params, x: None)),
    ),
    misuse(
        "['a'] ... float ... jnp.asarray",
        lambda: trained(lambda params, x: params["a"], {"a": 1.0}),
    ),
    misuse(
        "[0]['name'] ... str ... outside of the step",
        lambda: in_a_step(metrics=lambda x: ({"loss": x, "name": "sgd"},)),
    ),
    misuse(
        "gravac.train_step(loss_fn, tx, mesh) ... got GradientTransformation",
        lambda: gravac.train_step(TX, jnp.add, MESH),
    ),
    misuse(
        "`tx` ... gravac.train_step(loss_fn, tx, mesh) ... got function",
        lambda: gravac.train_step(jnp.add, lambda: TX, MESH),
    ),
    misuse(
        "gravac.simulate(train_step, replicas) ... got 4",
        lambda: gravac.simulate(4, jnp.add),
    ),
    misuse(
        "gravac.data_parallel(train_step, mesh) ... got Mesh",
        lambda: gravac.data_parallel(MESH, jnp.add),
    ),
    misuse(
        "`optimizer` ... nnx.Optimizer of the model ... got GradientTransformation",
        lambda: in_an_nnx_step(
            lambda model, optimizer, x: gravac.nnx_value_and_grad(
                lambda model: jnp.mean(model(x)), optimizer=optimizer.tx
            )(model)
        ),
    ),
    misuse(
        "uint32 ... count ... gravac.nnx_value_and_grad",
        lambda: in_an_nnx_step(
            lambda model, _, x: gravac.value_and_grad(lambda model: model(x).mean())(
                model
            ),
            dropout(),
        ),
    ),
    *[
        misuse(f"{what} ... nnx.as_pure(optimizer.opt_state)", partial(own, of))
        for what, of in [
            ("got Optimizer", lambda optimizer: optimizer),
            ("got OptArray", lambda optimizer: optimizer.opt_state),
        ]
    ],
    misuse(
        "got OptArray ... nnx.as_pure(optimizer.opt_state)",
        lambda: in_an_nnx_step(
            lambda model, optimizer, x: optimizer.tx.update(
                local(nnx.state(model), x.sum()), optimizer.opt_state
            )
        ),
    ),
    *[
        misuse(f"swapped ... {call} ... {got}", misused)
        for call, got, misused in [
            (
                "gravac.place(tree, mesh)",
                "Mesh before dict",
                lambda: gravac.place(MESH, PARAMS),
            ),
            (
                "gravac.place(tree, mesh)",
                "int before dict",
                lambda: gravac.place(N, PARAMS),
            ),
        ]
    ],
    *[
        misuse(f"`tx` ... {call} ... got {got} ... optax.chain ... optimizer.tx", tried)
        for call, got, tried in [
            (
                "gravac.flush(tx, params, opt_state)",
                "dict",
                lambda: gravac.flush(PARAMS, TX, STATE),
            ),
            (
                "gravac.own_params(tx, params, opt_state)",
                "dict",
                lambda: gravac.own_params(PARAMS, TX, STATE),
            ),
            ("gravac.guard(tx)", "function", lambda: gravac.guard(gravac.transform)),
        ]
    ],
    misuse(
        "`send` ... the class TopK ... gravac.Bits(2)",
        lambda: gravac.transform(send=gravac.TopK),
    ),
    misuse(
        "`warm_up_steps` lead to a gravac.TopK ... Bits(2) ... gravac.TopK(1000)",
        lambda: gravac.dgc(send=gravac.Bits(2), warm_up_steps=10),
    ),
    misuse(
        "Mesh ... got 4 ... dense_axis_name",
        lambda: gravac.data_parallel(jnp.add, 4, dense_axis_name="ici"),
    ),
    misuse(
        "MaskedNode ... ['b'] ... compress=",
        lambda: optax.masked(ALONE, {"b": False, "w": True}).init(PARAMS),
    ),
    misuse(
        "MaskedNode ... ['b'] ... compress=",
        lambda: optax.partition(
            {"all": ALONE, "rest": optax.sgd(0.1)}, {"b": "rest", "w": "all"}
        ).init(PARAMS),
    ),
    misuse(
        "argument 0 ... uint32 ... ['x'] ... float params only",
        lambda: gravac.value_and_grad(jnp.sum, None)({"x": jnp.zeros(3, jnp.uint32)}),
    ),
    misuse(
        "(0,) ... 0 positional ... by position",
        lambda: gravac.value_and_grad(jnp.sum, None)(a=jnp.ones(3)),
    ),
    misuse(
        "['z'] ... complex ... real and imaginary",
        lambda: gravac.checksum({"z": jnp.ones(2, complex)}, None),
    ),
    misuse(
        "gradients ... MaskedNode ... ['b'] ... compress=",
        lambda: ALONE.update({**PARAMS, "b": optax.MaskedNode()}, STATE),
    ),
    misuse("0 arguments ... batch", called),
    *[
        misuse(
            f"params ... {dtype} ... ['x'] ... float params", partial(with_leaf, leaf)
        )
        for dtype, leaf in [
            ("int32", jnp.zeros((), jnp.int32)),
            ("complex64", jnp.zeros(3, jnp.complex64)),
            ("str", "ones"),
        ]
    ],
    *[
        misuse(
            f"gradients ... {dtype} ... ['b'] ... float params", partial(update, dtype)
        )
        for dtype in ("int32", "bool", "complex64")
    ],
    *[
        misuse("has_aux=True ... (loss, aux)", partial(aux, out))
        for out in [0.0, (0.0, 1, 2)]
    ],
]


def check(error, words, call):
    with pytest.raises(error) as caught:
        call()
    assert [x for x in words if x not in str(caught.value)] == []


@pytest.mark.parametrize(("words", "call"), WRONG_VALUES)
def test_a_wrong_value_is_refused_with_what_was_received_and_a_remedy(words, call):
    check(ValueError, words, call)


@pytest.mark.parametrize(("words", "call"), WRONG_TYPES)
def test_a_wrong_type_is_refused_with_what_was_received_and_a_remedy(words, call):
    check(TypeError, words, call)


def in_a_loop(params, state, x):
    grads_of = gravac.value_and_grad(lambda p, x: x * jnp.sum(p["w"]))

    def add(total, x):
        return jax.tree.map(jnp.add, total, grads_of(params, x)[1]), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return TX.update(jax.lax.scan(add, zeros, x[None])[0], state)


PLATEAU = optax.chain(TX, optax.contrib.reduce_on_plateau())


@pytest.mark.parametrize(
    ("remedy", "call"),
    {
        "micro_batches=": lambda: run(in_a_loop),
        "train_step(params, opt_state, batch, **times)": lambda: gravac.simulate(
            lambda params, x: (params,), N
        )(PARAMS, jnp.zeros(N), **gravac.StepClock().times()),
        "value=jax.lax.pmean(loss": lambda: run(
            lambda params, state, x: PLATEAU.update(local(params, x), state, value=x),
            PLATEAU,
        ),
        "params, opt_state, value=0.0)": lambda: run(
            lambda params, state, x: gravac.own_params(PLATEAU, params, state),
            PLATEAU,
        ),
        "In a step of your own": lambda: gravac.train_step(
            lambda params, x: jnp.sum(params["w"]) * jnp.sum(x), PLATEAU, MESH
        )(*gravac.place((PARAMS, PLATEAU.init(PARAMS)), MESH), np.ones(N)),
    }.items(),
)
def test_an_error_of_jax_or_optax_in_a_step_has_a_note_with_the_remedy(remedy, call):
    promotes = jax.numpy_dtype_promotion("standard")  # Optax does
    with promotes, pytest.raises(TypeError) as caught:
        call()
    assert any(remedy in note for note in caught.value.__notes__)


class Silent(gravac.Encoding):
    """Does not estimate what it would send."""

    def traffic(self, bucket, replicas):
        return gravac.Bits(2).traffic(bucket, replicas)

    def exchange(self, x, state, **others):
        raise AssertionError("nobody asks for it")

    def __repr__(self):
        return "Silent()"


def test_an_encoding_that_estimates_nothing_is_refused_on_a_ladder_that_asks():
    tx = gravac.transform(None, send=gravac.GraVAC((DENSE, Silent())), compress=True)
    with pytest.raises(NotImplementedError, match=r"Silent\(\) .* a method `share`"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_an_error_shows_no_whole_arrays():
    large = {"w": jnp.zeros((1000, 1000))}
    for call in (
        lambda: gravac.place(large, large),
        lambda: gravac.transform(large),
        lambda: gravac.transform(send=large),
        lambda: gravac.data_parallel(jnp.add, large),
        lambda: gravac.transform(None, compress=large).init(large),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_transform_may_come_after_a_clip_that_keeps_nothing():
    place_chain(optax.chain(optax.clip(1.0), TX, optax.adam(0.1)))
