"""Buckets of a real training run, for what can only be said of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quickstart
from flax import nnx

from gravac_jax import _buckets
from gravac_jax._selection import TopK, entries

FACTOR = 100
STEPS = (1, 10, 30)


@functools.cache
def buckets() -> list[np.ndarray]:
    """Return error-fed gradients `[n]` of the quickstart's model, early and late.

    Trained on the source code of Python's library by top-k at factor 100.
    """
    text, _ = quickstart.read_text(None)
    graph, params = nnx.split(quickstart.ByteModel(nnx.Rngs(0)), nnx.Param)
    plan = _buckets.plan(params, _buckets.matrices())
    tx, top = optax.sgd(0.1, momentum=0.9), TopK()
    k = top.count(plan.sizes[0], FACTOR)
    loss_of = quickstart.loss_of_model(graph)

    @jax.jit
    def step(params, opt_state, residual, batch):
        gradient, dense = plan.pack(jax.grad(loss_of)(params, batch))
        bucket = gradient + residual
        payload, _ = top.compress(bucket, (), k=k, key=jax.random.key(0))
        residual = entries.drop(bucket, payload.indices)
        sent = plan.unpack((bucket - residual, dense))
        updates, opt_state = tx.update(sent, opt_state)
        return optax.apply_updates(params, updates), opt_state, residual, bucket

    state = params, tx.init(params), jnp.zeros(plan.sizes[0])
    found, batches = [], quickstart.draw(text, 16, 64, seed=0)
    for i in range(max(STEPS) + 1):
        *state, bucket = step(*state, next(batches))
        if i in STEPS:
            found.append(np.asarray(bucket))
    return found
