"""Every kind of optimizer that the transform promises to serve, trains.

Loops of Flax, and under pmap, are those of the documents and conversions.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, choices, compilations, make_mesh, plain_step

import gravac_jax as gravac
from gravac_jax import metrics

STEPS = 80
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
CLIP = optax.clip_by_global_norm(5.0)
DECAY = optax.masked(optax.add_decayed_weights(1e-4), {"b": False, "w": True})
OPTIMIZERS = {
    "sgd": optax.chain(EXCHANGE, SGD),
    "guarded adamw": gravac.guard(optax.chain(EXCHANGE, optax.adamw(0.1))),
    "injected": optax.inject_hyperparams(
        lambda learning_rate: optax.chain(EXCHANGE, optax.sgd(learning_rate))
    )(learning_rate=0.1),
    "clipped and masked": optax.chain(EXCHANGE, CLIP, DECAY, SGD),
}


def mean_squares(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2)


QUICK = "sgd", "guarded adamw"


@pytest.mark.parametrize("optimizer", choices(OPTIMIZERS, QUICK.__contains__))
@pytest.mark.usefixtures("standard_promotion")  # for optax.adamw itself
def test_every_optimizer_trains_in_one_program_whatever_the_rung(optimizer):
    tx, mesh = OPTIMIZERS[optimizer], make_mesh()
    params = {"b": jnp.zeros(4), "w": jnp.zeros((16, 4))}
    state = gravac.place((params, tx.init(params)), mesh)
    step = gravac.data_parallel(plain_step(tx, mean_squares), mesh)
    losses, rungs = [], set()
    with compilations() as names:
        for _ in range(STEPS):
            *state, value = step(*state, (X, Y), step_seconds=np.float32(0.5))
            losses.append(float(value))
            rungs.add(metrics.scalars(state)["gravac/rung"])
    assert len(names) == len(set(names)), "compiled again"
    assert losses[-1] < losses[0] / 50
    assert rungs == {1, 2}
