"""Buckets of a real training run, for what can only be said of gradients."""

import functools

import jax
import numpy as np
import optax
import quickstart
from _harness import residual
from flax import nnx

import gravac_jax as gravac
from gravac_jax._step import bucketing

STEPS = (1, 10, 30)


@functools.cache
def buckets() -> list[np.ndarray]:
    """Return error-fed gradients `[n]` of the quickstart's model, early and late.

    Trained on the source code of Python's library by the largest hundredth of entries.
    """
    text, _ = quickstart.read_text(None)
    graph, params = nnx.split(quickstart.ByteModel(nnx.Rngs(0)), nnx.Param)
    plan = bucketing.plan(params, bucketing.matrices())
    send = gravac.TopK(100, select="exact", values="float32")
    tx = optax.chain(gravac.transform(None, send=send), optax.sgd(0.1, momentum=0.9))
    loss_of = quickstart.loss_of_model(graph)

    @jax.jit
    def step(params, opt_state, batch):
        gradient = jax.grad(loss_of)(params, batch)
        bucket = plan.pack(gradient)[0] + residual(opt_state)
        updates, opt_state = tx.update(gradient, opt_state)
        return optax.apply_updates(params, updates), opt_state, bucket

    state, found = (params, tx.init(params)), []
    batches = quickstart.draw(text, 4, 64, seed=0)
    for i in range(max(STEPS) + 1):
        *state, bucket = step(*state, next(batches))
        if i in STEPS:
            found.append(np.asarray(bucket))
    return found
