"""Every kind of optimizer that the transform promises to serve, trains, with NNX, too.

Loops with linen, split NNX objects and pmap are those of the documents and conversions.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, choices, compilations, make_mesh, plain_step
from flax import nnx

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
    "sgd": optax.chain(EXCHANGE, SGD),
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


def nnx_objects(tx):
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    loss = lambda model, x, y: mean_squares(model(x), y)

    def train_step(model, optimizer, batch, **told):
        value, grads = gravac.value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads, **told)
        return model, optimizer, value

    return (model, optimizer), train_step


CASES = {f"plain, {x}": (plain, tx) for x, tx in OPTIMIZERS.items()}
CASES["nnx, sgd"] = nnx_objects, OPTIMIZERS["sgd"]
QUICK = "plain, sgd", "plain, guarded adamw"


@pytest.mark.parametrize("case", choices(CASES, QUICK.__contains__))
@pytest.mark.usefixtures("standard_promotion")  # for optax.adamw itself
def test_every_loop_and_optimizer_trains_in_one_program_whatever_the_rung(case):
    loop, tx = CASES[case]
    mesh = make_mesh()
    state, train_step = loop(tx)
    state, step = gravac.place(state, mesh), gravac.data_parallel(train_step, mesh)
    losses, rungs = [], set()
    with compilations() as names:
        for _ in range(STEPS):
            *state, value = step(*state, (X, Y), step_seconds=np.float32(0.5))
            losses.append(float(value))
            rungs.add(metrics.scalars(state)["gravac/rung"])
    assert len(names) == len(set(names)), "compiled again"
    assert losses[-1] < SHARE * losses[0]
    assert rungs == {1, 2}
