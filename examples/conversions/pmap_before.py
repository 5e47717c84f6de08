"""A linen model with BatchNorm, a TrainState, and `jax.pmap`.

python examples/conversions/pmap_before.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import jax_utils
from flax.training import common_utils
from models import CNN, TrainState, batches, cross_entropy, draw_images, run


def train_step(state: TrainState, batch: Any) -> Any:
    """Take one step on each device, with the mean of their gradients."""

    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(
            variables, batch["image"], is_training=True, mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch["label"]), updated["batch_stats"]

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, batch_stats), grads = grad_fn(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    batch_stats = jax.lax.pmean(batch_stats, axis_name="batch")
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    return state, jax.lax.pmean({"loss": loss}, axis_name="batch")


def create_train_state(key: jax.Array) -> TrainState:
    """Return params, running means and optimizer before the first step."""
    model = CNN()
    variables = model.init(key, jnp.ones((1, 16, 16, 1)), is_training=False)
    tx = optax.sgd(0.05, momentum=0.9, nesterov=True)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=tx,
    )


def main(steps: int = 200) -> list[float]:
    """Train, and return the losses."""
    state = jax_utils.replicate(create_train_state(jax.random.key(0)))
    p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)
    losses = []
    for batch in batches(draw_images, 16, steps):
        batch = common_utils.shard(batch)
        state, metrics = p_train_step(state, batch)
        losses.append(float(jax_utils.unreplicate(metrics)["loss"]))
    return losses


if __name__ == "__main__":
    run(main)
