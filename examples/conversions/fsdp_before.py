"""FSDP by annotations: params sharded over one axis of two, and a plain `jax.jit`.

python examples/conversions/fsdp_before.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from models import ResidualMLP, batches, cross_entropy, draw_rows, run, spec_of

AXES = ("data", "fsdp")
MAX_NORM = 1.0  # of a gradient


def train_step(state: TrainState, batch: Any) -> Any:
    """Take one step, as if on one device."""

    def loss_fn(params: Any) -> jax.Array:
        x, y = batch
        logits = state.apply_fn({"params": params}, x)
        return cross_entropy(logits, y)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def main(steps: int = 200) -> list[float]:
    """Train, and return the losses."""
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, -1)), AXES)
    model = ResidualMLP()
    tx = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(3e-3))

    def init_fn(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.ones((1, 64)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    key = jax.random.key(0)
    state_shardings = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.NamedSharding(mesh, spec_of(path, leaf)),
        jax.eval_shape(init_fn, key),
    )
    data_sharding = jax.NamedSharding(mesh, jax.P(AXES))
    state = jax.jit(init_fn, out_shardings=state_shardings)(key)
    p_train_step = jax.jit(
        train_step,
        in_shardings=(state_shardings, data_sharding),
        out_shardings=(state_shardings, None),
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
