"""A linen model with logical axes, in the shape of large training codes.

A TrainState made by a jitted function with shardings, params in float32 and computation
in bfloat16, gradients added up over parts of a batch by a scan, and a jitted step with
shardings that donates its state.

python examples/conversions/train_state_before.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen
from flax.linen import spmd
from flax.training.train_state import TrainState
from models import LogicalMLP, batches, cross_entropy, draw_rows, run

AXES = ("dcn", "fsdp", "tp")
RULES = (("batch", ("dcn", "fsdp")), ("embed", "fsdp"), ("mlp", "tp"))
PARTS = 2  # of a batch, computed one after the other
DTYPE = jnp.bfloat16  # of the computation


def train_step(state: TrainState, batch: Any) -> Any:
    """Take one step."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch[0])
        return cross_entropy(logits.astype(jnp.float32), batch[1])

    def add(total: Any, part: Any) -> Any:
        found = jax.value_and_grad(loss_fn)(state.params, part)
        return jax.tree.map(jnp.add, total, found), None

    split = lambda x: x.reshape(-1, PARTS, *x.shape[1:]).swapaxes(0, 1)
    zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), state.params))
    total, _ = jax.lax.scan(add, zeros, jax.tree.map(split, batch))
    loss, grads = jax.tree.map(lambda x: x / PARTS, total)
    return state.apply_gradients(grads=grads), {"loss": loss}


def main(steps: int = 200) -> list[float]:
    """Train, and return the losses."""
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, jax.device_count() // 4), AXES, axis_types=auto)
    model, tx = LogicalMLP(DTYPE), optax.adamw(3e-3)

    def init_fn(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.ones((8, 64)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    with jax.set_mesh(mesh), linen.logical_axis_rules(RULES):
        key = jax.random.key(0)
        specs = linen.get_partition_spec(jax.eval_shape(init_fn, key))
        shardings = spmd.logical_to_mesh_sharding(specs, mesh, RULES)
        state = jax.jit(init_fn, out_shardings=shardings)(key)
        state = linen.unbox(state)
        data_sharding = jax.NamedSharding(mesh, jax.P(("dcn", "fsdp")))
        p_train_step = jax.jit(
            train_step,
            in_shardings=(shardings, data_sharding),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )
        losses = []
        for batch in batches(draw_rows, 16, steps):
            batch = jax.device_put(batch, data_sharding)
            state, metrics = p_train_step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses


if __name__ == "__main__":
    run(main)
