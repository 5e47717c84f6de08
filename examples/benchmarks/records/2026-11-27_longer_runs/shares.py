"""What do few bits keep of one replica's gradient?

    PYTHONPATH=examples python shares.py TASK DATA LEARNING_RATE

trains densely with two replicas and momentum SGD, and prints the share of the energy
that each width keeps, the mean over ten steps.
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


def gradients_of_one(task, learning_rate):
    """Yield one replica's gradient of each step, flat."""
    params = jax.jit(task.init)(jax.random.key(0))
    batches = pipeline.batches(task.train, rows=task.rows, replicas=REPLICAS, seed=0)
    momentum = optax.trace(0.9, nesterov=True)
    dense = optax.chain(optax.clip_by_global_norm(1.0), momentum)
    state = dense.init(params)

    @jax.jit
    def train(params, state, batch):
        grads = jax.vmap(jax.grad(task.loss), in_axes=(None, 0))(params, batch)
        mean = jax.tree.map(lambda x: x.mean(0), grads)
        mine = jax.tree.map(lambda x: x[0], grads)
        updates, state = dense.update(mean, state, params)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
        return params, state, mine

    for _ in range(LAST):
        split = lambda x: x.reshape(REPLICAS, -1, *x.shape[1:])
        batch = jax.tree.map(split, next(batches))
        params, state, mine = train(params, state, batch)
        yield np.concatenate([np.ravel(x) for x in jax.tree.leaves(mine)])


def main(name, data, learning_rate):
    """Print one line."""
    look = jax.jit(
        lambda x: EXCHANGE.bucket_shares(
            x, (1.0, *WIDTHS.values()), jax.random.key(0), Comm(None)
        )
    )
    gradients = gradients_of_one(load(name, Path(data)), float(learning_rate))
    seen = [look(x) for i, x in enumerate(gradients) if i >= FIRST]
    means = np.mean(seen, axis=0)[1:]
    shares = {x: round(float(y), 3) for x, y in zip(WIDTHS, means, strict=True)}
    sys.stdout.write(json.dumps({"task": name, **shares}) + "\n")


main(*sys.argv[1:])
