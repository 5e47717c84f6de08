"""Time updates of a model with small leaves between two virtual CPU devices.

    python update.py NAME

It prints a line of JSON: the milliseconds of CPU time of an update, the median of the
last 20 of 40. `PYTHONPATH` says which checkout is timed; NAME is its name. `XLA_FLAGS`
makes the devices, of one thread each.
"""

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gravac_jax as gravac

UPDATES = 40
SMALL, LARGE = 512, 512 * 512
SIZES = [*[SMALL] * 3, *[LARGE] * 4, *[SMALL] * 4, *[LARGE] * 8, *[2 * LARGE] * 2]


def milliseconds(tx: optax.GradientTransformation) -> float:
    """Return the median CPU time of an update."""
    mesh = jax.make_mesh((2,), ("data",))
    zeros = {f"w{i:03}": jnp.zeros(size) for i, size in enumerate(SIZES)}
    specs = gravac.state_specs(tx.init(zeros))
    state = gravac.place(tx.init(zeros), mesh)
    draw = np.random.default_rng(0)
    drawn = {
        name: draw.standard_normal(2 * x.size).astype(np.float32)
        for name, x in zeros.items()
    }
    grads = jax.device_put(drawn, jax.NamedSharding(mesh, jax.P("data")))
    update = jax.jit(
        jax.shard_map(
            lambda state, x: tx.update(x, state),
            mesh=mesh,
            in_specs=(specs, jax.P("data")),
            out_specs=(jax.P(), specs),
        ),
        donate_argnums=0,
    )
    seconds = []
    for _ in range(UPDATES):
        start = time.process_time()
        _, state = jax.block_until_ready(update(state, grads))
        seconds.append(time.process_time() - start)
    return round(1e3 * statistics.median(seconds[UPDATES // 2 :]), 1)


def transform(factor: float, bits: int = 2) -> optax.GradientTransformation:
    """Return a transform that sends few bits of all leaves, or some in turn."""
    return gravac.transform(
        compress=True,
        controller=gravac.Fixed(factor),
        exchange=gravac.QuantizedAllReduce(least_bits=bits),
    )


found = {
    "two bits": milliseconds(transform(16)),
    "in 4 turns": milliseconds(transform(64)),
    "one bit": milliseconds(transform(32, bits=1)),
}
print(json.dumps({"name": sys.argv[1], "entries": sum(SIZES), **found}))
