"""What do few bits keep of one replica's gradient, or of its optimizer's step?

    PYTHONPATH=examples python shares.py TASK DATA LEARNING_RATE sgd|adam

trains densely with two replicas, and prints the share of the energy that each width
keeps, the mean over ten steps. With `sgd` it is that of the gradient.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from tasks import load, pipeline

import gravac_jax as gravac
from gravac_jax import Comm

REPLICAS, FIRST, LAST = 2, 90, 100
WIDTHS = {"8 bits": 4.0, "4 bits": 8.0, "2 bits": 16.0, "1 bit": 32.0}
EXCHANGE = gravac.QuantizedAllReduce(least_bits=1)
KINDS = {"sgd": optax.trace(0.9, nesterov=True), "adam": optax.scale_by_adam()}


def steps_of_one(task, learning_rate, kind):
    """Yield what one replica would exchange in each step, flat."""
    params = jax.jit(task.init)(jax.random.key(0))
    batches = pipeline.batches(task.train, rows=task.rows, replicas=REPLICAS, seed=0)
    dense = optax.chain(optax.clip_by_global_norm(1.0), KINDS[kind])
    states = dense.init(params), KINDS[kind].init(params)

    @jax.jit
    def train(params, states, batch):
        grads = jax.vmap(jax.grad(task.loss), in_axes=(None, 0))(params, batch)
        mean = jax.tree.map(lambda x: x.mean(0), grads)
        mine = jax.tree.map(lambda x: x[0], grads)
        updates, shared = dense.update(mean, states[0], params)
        step, own = KINDS[kind].update(mine, states[1], params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
        return params, (shared, own), mine if kind == "sgd" else step

    for _ in range(LAST):
        split = lambda x: x.reshape(REPLICAS, -1, *x.shape[1:])
        batch = jax.tree.map(split, next(batches))
        params, states, step = train(params, states, batch)
        yield np.concatenate([np.ravel(x) for x in jax.tree.leaves(step)])


def main(name, data, learning_rate, kind):
    """Print one line."""
    look = jax.jit(
        lambda x: EXCHANGE.bucket_shares(
            x, (1.0, *WIDTHS.values()), jax.random.key(0), Comm(None)
        )
    )
    steps = steps_of_one(load(name, Path(data)), float(learning_rate), kind)
    seen = [look(x) for i, x in enumerate(steps) if i >= FIRST]
    means = np.mean(seen, axis=0)[1:]
    shares = {x: round(float(y), 3) for x, y in zip(WIDTHS, means, strict=True)}
    sys.stdout.write(json.dumps({"task": name, "optimizer": kind, **shares}) + "\n")


main(*sys.argv[1:])
