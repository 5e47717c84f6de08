"""Time the exchange of 4.2 million entries between two virtual devices on a CPU.

It prints a line of JSON: milliseconds of CPU time of an update, the median of 15, by
factor. `PYTHONPATH` says which checkout is timed; the argument is its name.
"""

import json
import os
import statistics
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np

import gravac_jax as gravac

N, UPDATES, WIDTHS = 2**22, 15, (4.0, 8.0, 16.0, 32.0)
CONTROLLERS = {f"fixed {x:g}": gravac.Fixed(x) for x in WIDTHS}
CONTROLLERS["ladder at 16"] = gravac.Scheduled(lambda _: 16.0, (1.0, *WIDTHS))


def milliseconds(controller: gravac.Controller) -> float:
    """Return the median CPU time of an update."""
    mesh = jax.make_mesh((2,), ("data",))
    tx = gravac.transform(compress=True, controller=controller)
    zeros = {"w": jnp.zeros(N)}
    specs = gravac.state_specs(tx.init(zeros))
    state = gravac.place(tx.init(zeros), mesh)
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    draw = np.random.default_rng(0).standard_normal(2 * N).astype(np.float32)
    grads = jax.device_put(draw, sharding)
    update = jax.jit(
        jax.shard_map(
            lambda state, x: tx.update({"w": x}, state),
            mesh=mesh,
            in_specs=(specs, jax.P("data")),
            out_specs=(jax.P(), specs),
        ),
        donate_argnums=0,
    )
    seconds = []
    for _ in range(UPDATES + 1):
        start = time.process_time()
        _, state = jax.block_until_ready(update(state, grads))
        seconds.append(time.process_time() - start)
    return round(1e3 * statistics.median(seconds[1:]), 1)


made = {name: milliseconds(controller) for name, controller in CONTROLLERS.items()}
print(json.dumps({"of": sys.argv[1], **made}))
