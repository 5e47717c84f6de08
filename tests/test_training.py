"""Every training loop and optimizer that the transform promises to serve, trains."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, choices, compilations, make_mesh, plain_step
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import gravac_jax as gravac
from gravac_jax import metrics

STEPS = 80
SHARE = 1 / 50  # of the first loss, which the last one must be below
# A planted linear map, so that the loss can fall to nothing.
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8 * N, 16)).astype(np.float32)
Y = X @ RNG.normal(size=(16, 4)).astype(np.float32) + 1

BITS = [gravac.Bits(bits, row_entries=32) for bits in (8, 2)]
EXCHANGE = gravac.transform(
    send=gravac.GraVAC((gravac.Dense(), *BITS), epsilon=0.25, window=10),
    compress=lambda path, leaf: leaf.ndim == 2,
)
SGD = optax.sgd(0.02, momentum=0.9)
DECAY = optax.add_decayed_weights(1e-4)
OPTIMIZERS = {
    "guarded adamw": gravac.guard(optax.chain(EXCHANGE, optax.adamw(0.1))),
    "injected": optax.inject_hyperparams(
        lambda learning_rate: optax.chain(EXCHANGE, optax.sgd(learning_rate))
    )(learning_rate=0.1),
    "clipped and masked": optax.chain(
        EXCHANGE,
        optax.clip_by_global_norm(5.0),
        optax.masked(DECAY, {"b": False, "w": True}),
        SGD,
    ),
}


def mean_squares(predicted, y):
    return jnp.mean((predicted - y) ** 2)


def plain(tx):
    """A training state, and a step from it and a batch to both and a loss."""
    params = {"b": jnp.zeros(4), "w": jnp.zeros((16, 4))}
    loss = lambda p, xy: mean_squares(xy[0] @ p["w"] + p["b"][None], xy[1])
    return (params, tx.init(params)), plain_step(tx, loss)


def linen(tx):
    module = nn.Dense(4)
    params = module.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=module.apply, params=params, tx=tx)

    def train_step(state, batch):
        x, y = batch
        loss = lambda p: mean_squares(state.apply_fn({"params": p}, x), y)
        value, grads = gravac.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return (state,), train_step


def nnx_objects(tx):
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    loss = lambda model, x, y: mean_squares(model(x), y)

    def train_step(model, optimizer, batch, **told):
        value, grads = gravac.value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads, **told)
        return model, optimizer, value

    return (model, optimizer), train_step


def nnx_split(tx):
    (model, optimizer), step = nnx_objects(tx)
    graph, state = nnx.split((model, optimizer))

    def train_step(state, batch):
        *objects, value = step(*nnx.merge(graph, state), batch)
        return nnx.state(tuple(objects)), value

    return (state,), train_step


LOOPS = {f.__name__: f for f in (plain, linen, nnx_objects, nnx_split)}


def sharded(state, train_step):
    mesh = make_mesh()
    step = gravac.data_parallel(train_step, mesh)
    hands_on_times = "told" in inspect.signature(train_step).parameters
    told = {"step_seconds": np.float32(0.5)} if hands_on_times else {}
    return gravac.place(state, mesh), lambda *state: step(*state, (X, Y), **told)


def pmapped(state, train_step):
    step = jax.pmap(train_step, "data")
    stack = lambda x: np.broadcast_to(x, (N, *np.shape(x)))
    split = lambda x: x.reshape(N, -1, *x.shape[1:])
    trees = jax.tree.map(stack, state), jax.tree.map(split, (X, Y))
    # Where pmap itself would put them; else it compiles again on the second call.
    sharding = jax.NamedSharding(make_mesh(), jax.P("data"))
    state, batch = jax.device_put(trees, sharding)
    return state, lambda *state: step(*state, batch)


def assert_trains(run, loop, tx):
    state, step = run(*loop(tx))
    losses, rungs = [], set()
    with compilations() as names:
        for _ in range(STEPS):
            *state, value = step(*state)
            losses.append(float(jnp.mean(value)))
            rungs.add(metrics.scalars(state)["gravac/rung"])
    assert len(names) == len(set(names)), "compiled again"
    assert losses[-1] < SHARE * losses[0]
    assert rungs == {1, 2}


CASES = {
    f"{x}, sgd": (sharded, f, optax.chain(EXCHANGE, SGD)) for x, f in LOOPS.items()
}
CASES |= {f"plain, {x}": (sharded, plain, tx) for x, tx in OPTIMIZERS.items()}
CASES["pmapped"] = pmapped, plain, optax.chain(EXCHANGE, SGD)
QUICK = "plain, sgd", "plain, guarded adamw"


@pytest.mark.parametrize("case", choices(CASES, QUICK.__contains__))
@pytest.mark.usefixtures("standard_promotion")  # for optax.adamw itself
def test_every_loop_and_optimizer_trains_in_one_program_whatever_the_rung(case):
    assert_trains(*CASES[case])
