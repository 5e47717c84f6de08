"""How much of an optimizer's step do a few bits keep? Compare levels on real steps.

    PYTHONPATH=examples python levels.py TASK DATA LEARNING_RATE STEPS sgd|adam

trains densely with four replicas, then rounds the next step of one of them, by levels
at equal distances (the best for a Gaussian), by those of `gravac.Quantized`, and by top
entries of all and of each row, and prints the share of the energy that each keeps.
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

DISTANCES = {1: 1.5958, 2: 0.9957, 4: 0.3352, 8: 0.0308}  # Max (1960), table I
REPLICAS, ROW, WARM_UP = 4, 4096, 50
KINDS = {"sgd": optax.trace(0.9, nesterov=True), "adam": optax.scale_by_adam()}


def step_of_one(task, learning_rate, steps, kind):
    """Return the matrices of one replica's step after so many dense steps, flat."""
    params = jax.jit(task.init)(jax.random.key(0))
    batches = pipeline.batches(task.train, rows=task.rows, replicas=REPLICAS, seed=0)
    dense = optax.chain(optax.clip_by_global_norm(1.0), kind)
    states = dense.init(params), kind.init(params)

    @jax.jit
    def train(params, states, batch, rate):
        grads = jax.vmap(jax.grad(task.loss), in_axes=(None, 0))(params, batch)
        mean = jax.tree.map(lambda x: x.mean(0), grads)
        updates, shared = dense.update(mean, states[0], params)
        mine = jax.tree.map(lambda x: x[0], grads)
        step, own = kind.update(mine, states[1], params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return params, (shared, own), step

    for i in range(steps):
        split = lambda x: x.reshape(REPLICAS, -1, *x.shape[1:])
        batch = jax.tree.map(split, next(batches))
        rate = learning_rate * min(1, (i + 1) / WARM_UP)
        params, states, step = train(params, states, batch, rate)
    matrices = [np.ravel(x) for x in jax.tree.leaves(step) if x.ndim > 1]
    return np.concatenate(matrices)


def equal_distances(rows, bits):
    """Return the share that levels at equal distances keep."""
    rows = rows[rows.any(1)]
    size = np.abs(rows).mean(1, keepdims=True) * np.sqrt(np.pi / 2)
    half = 2 ** (bits - 1)
    q = np.clip(np.floor(rows / (DISTANCES[bits] * size)), -half, half - 1) + 0.5
    return float(((rows * q).sum(1) ** 2 / (q * q).sum(1)).sum() / (rows**2).sum())


def main(task, data, learning_rate, steps, kind):
    """Print one line."""
    found = load(task, Path(data))
    x = step_of_one(found, float(learning_rate), int(steps), KINDS[kind])
    x = x[: x.size // ROW * ROW].astype(np.float64)
    exchange, ladder = gravac.Quantized(ROW), (1, 4, 8, 16, 32)
    seen, _ = exchange.exchange(
        np.float32(x), (), 4, ladder=ladder, key=jax.random.key(0), comm=Comm(None)
    )
    squares = np.sort(x**2)[::-1]
    line = {"kurtosis": np.mean(x**4) / np.mean(x**2) ** 2}
    for i, bits in enumerate((8, 4, 2, 1)):
        line[f"{bits} bits"] = float(seen.energies[i + 1] / seen.energy)
        line[f"{bits} bits, equal"] = equal_distances(x.reshape(-1, ROW), bits)
    in_rows = np.sort((x**2).reshape(-1, ROW), axis=1)[:, ::-1]
    for factor in (10, 20, 50, 100):
        line[f"top 1/{factor}"] = squares[: x.size // factor].sum() / squares.sum()
        of_each = in_rows[:, : ROW // factor].sum() / squares.sum()
        line[f"top 1/{factor} of each row"] = of_each
    line = {name: round(float(value), 3) for name, value in line.items()}
    sys.stdout.write(json.dumps({"task": task, "optimizer": kind, **line}) + "\n")


main(*sys.argv[1:])
