"""Time an update in two bits between two virtual CPU devices.

    python update.py NAME ENTRIES

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

import gravac_jax as gravac

UPDATES, LEAVES = 40, 8


def milliseconds(n: int, controller: gravac.Controller) -> float:
    """Return the median CPU time of an update of `n` entries in eight leaves."""
    mesh = jax.make_mesh((2,), ("data",))
    tx = gravac.transform(compress=True, controller=controller)
    sizes = [n // LEAVES] * (LEAVES - 1)
    sizes.append(n - sum(sizes))
    zeros = {f"w{i}": jnp.zeros(size) for i, size in enumerate(sizes)}
    specs = gravac.state_specs(tx.init(zeros))
    state = gravac.place(tx.init(zeros), mesh)
    draw = np.random.default_rng(0)
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    drawn = {
        name: draw.standard_normal(2 * x.size).astype(np.float32)
        for name, x in zeros.items()
    }
    grads = jax.device_put(drawn, sharding)
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


name, entries = sys.argv[1], int(sys.argv[2])
ladder = gravac.Scheduled(lambda _: 16.0, (1.0, 4.0, 8.0, 16.0, 32.0))
found = {
    "one rung": milliseconds(entries, gravac.Fixed(16)),
    "a ladder": milliseconds(entries, ladder),
}
print(json.dumps({"of": name, "entries": entries, **found}))
