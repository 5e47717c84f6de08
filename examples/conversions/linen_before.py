"""A linen model with `linen.with_logical_partitioning`, sharded by `jax.jit`.

python examples/conversions/linen_before.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.linen import spmd
from models import LogicalMLP, batches, cross_entropy, draw_rows, run

RULES = (("batch", ("dcn", "fsdp")), ("embed", "fsdp"), ("mlp", "tp"))


def main(steps: int = 200) -> list[float]:
    """Train, and return the losses."""
    axes = ("dcn", "fsdp", "tp")
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, jax.device_count() // 4), axes, axis_types=auto)
    model, tx = LogicalMLP(jnp.float32), optax.adamw(3e-3)

    def init_fn(key: jax.Array) -> Any:
        return model.init(key, jnp.ones((8, 64)))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply(params, batch[0]), batch[1])

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with jax.set_mesh(mesh), linen.logical_axis_rules(RULES):
        key = jax.random.key(0)
        specs = linen.get_partition_spec(jax.eval_shape(init_fn, key))
        shardings = spmd.logical_to_mesh_sharding(specs, mesh, RULES)
        params = linen.unbox(jax.jit(init_fn, out_shardings=shardings)(key))
        opt_state = tx.init(params)
        step = jax.jit(train_step, donate_argnums=(0, 1))
        losses = []
        for batch in batches(draw_rows, 16, steps):
            batch = jax.device_put(batch, jax.P(("dcn", "fsdp")))
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(main)
