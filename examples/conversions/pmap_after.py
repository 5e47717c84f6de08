"""A linen model with BatchNorm, a TrainState, and `jax.pmap`.

python examples/conversions/pmap_after.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, linen
from flax.training import common_utils, train_state

import gravac_jax as gravac


class CNN(linen.Module):
    """One convolution, normalized, and two dense layers."""

    @linen.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        """`[batch, 16, 16, 1]` images to `[batch, 10]` logits."""
        x = linen.Conv(8, (3, 3), use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not is_training, momentum=0.9)(x)
        x = linen.avg_pool(linen.relu(x), (2, 2), strides=(2, 2))
        x = linen.relu(linen.Dense(64)(x.reshape(len(x), -1)))
        return linen.Dense(10)(x)


class TrainState(train_state.TrainState):
    """With the running means of BatchNorm."""

    batch_stats: Any


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over a batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def train_step(state: TrainState, batch: Any) -> Any:
    """One step on each device, with the mean of their gradients."""

    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(
            variables, batch["image"], is_training=True, mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch["label"]), updated["batch_stats"]

    grad_fn = gravac.value_and_grad(loss_fn, "batch", has_aux=True)
    (loss, batch_stats), grads = grad_fn(state.params)
    batch_stats = jax.lax.pmean(batch_stats, axis_name="batch")
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    return state, jax.lax.pmean({"loss": loss}, axis_name="batch")


def eval_step(state: TrainState, batch: Any) -> Any:
    """How many of a batch are right."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], is_training=False)
    is_right = jnp.argmax(logits, -1) == batch["label"]
    return jax.lax.pmean({"accuracy": jnp.mean(is_right)}, axis_name="batch")


def create_train_state(key: jax.Array) -> TrainState:
    """Params, running means and optimizer before the first step."""
    model = CNN()
    variables = model.init(key, jnp.ones((1, 16, 16, 1)), is_training=False)
    sgd = optax.sgd(0.05, momentum=0.9, nesterov=True)
    tx = optax.chain(gravac.transform("batch"), sgd)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=tx,
    )


def draw(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """Noise; the label is where a coarse view of it is brightest."""
    image = rng.normal(size=(rows, 16, 16, 1)).astype(np.float32)
    coarse = image.reshape(rows, 4, 4, 4, 4).mean((2, 4)).reshape(rows, 16)
    return {"image": image, "label": coarse[:, :10].argmax(-1).astype(np.int32)}


def main(steps: int = 200) -> list[float]:
    """Train; the losses."""
    rng = np.random.default_rng(0)
    state = jax_utils.replicate(create_train_state(jax.random.key(0)))
    p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)
    p_eval_step = jax.pmap(eval_step, axis_name="batch")
    losses = []
    for _ in range(steps):
        batch = common_utils.shard(draw(rng, 16 * jax.device_count()))
        state, metrics = p_train_step(state, batch)
        losses.append(float(jax_utils.unreplicate(metrics)["loss"]))
    metrics = p_eval_step(state, common_utils.shard(draw(rng, 1024)))
    accuracy = float(jax_utils.unreplicate(metrics)["accuracy"])
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy {accuracy:.3f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
