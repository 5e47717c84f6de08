"""The CPU time of updates between two virtual CPU devices."""

import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gravac_jax as gravac

UPDATES = 40


def milliseconds(tx: optax.GradientTransformation, sizes: Sequence[int]) -> float:
    """Return the CPU time of an update: the mean of the last 20 of 40.

    In turns, some parts may take several times as long as others. `XLA_FLAGS` makes the
    devices, of one thread each.

    Args:
      tx: a transform over an axis "data".
      sizes: the entries of each leaf, in the order of the tree.
    """
    mesh = jax.make_mesh((2,), ("data",))
    zeros = {f"w{i:03}": jnp.zeros(size) for i, size in enumerate(sizes)}
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
    return round(1e3 * statistics.fmean(seconds[UPDATES // 2 :]), 1)
