"""Time one whole `tx.update` of 10 million entries in few bits, on one device.

python update.py CHECKOUT prints one JSON line for each exchange: quartiles of the
milliseconds of one pass that adds the gradient to the residual, and of an update into
the memory of old updates.
"""

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp

import gravac_jax as gravac

N, TURNS = 10_000_000, 15
EXCHANGES = {
    "one bit gathered": (gravac.Quantized(), 32),
    "two bits gathered": (gravac.Quantized(), 16),
    "two bits both ways": (gravac.QuantizedAllReduce(), 16),
}
gradient = jax.random.normal(jax.random.key(0), (N,)) ** 3 * 1e-3
one_pass = jax.jit(lambda x, residual: x + residual, donate_argnums=1)


def milliseconds(run):
    """Return what a run takes."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return (time.perf_counter() - start) * 1e3


for name, (exchange, factor) in EXCHANGES.items():
    tx = gravac.transform(
        axis_name=None,
        compress=True,
        exchange=exchange,
        controller=gravac.Fixed(factor),
    )
    update = jax.jit(
        lambda old, x, state, tx=tx: tx.update(x, state),
        donate_argnums=(0, 2),
        keep_unused=True,
    )
    held = {"sum": jnp.zeros_like(gradient)}
    held["update"] = (jnp.zeros_like(gradient), tx.init(gradient))

    def add(held=held):
        """Add the gradient to a vector, in place."""
        held["sum"] = one_pass(gradient, held["sum"])
        return held["sum"]

    def step(held=held, update=update):
        """Take an update."""
        held["update"] = update(held["update"][0], gradient, held["update"][1])
        return held["update"]

    taken = [(milliseconds(add), milliseconds(step)) for _ in range(TURNS + 3)][3:]
    passes, updates = (statistics.quantiles(x, n=4) for x in zip(*taken, strict=True))
    row = {"checkout": sys.argv[1], "exchange": name, "pass": passes, "update": updates}
    print(json.dumps(row), flush=True)
