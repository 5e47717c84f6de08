"""Train in float16: one factor of the loss for all replicas, which skip the same steps.

`StepInfo.is_finite` says whether a gradient overflowed on any replica, and
`gravac.guard` skips such a step on all. Gradients are divided by the factor before the
transform, since residuals outlive it. With `delay=1` ask in place of `is_finite`
whether `StepInfo.bad_steps` has grown.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/loss_scale.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gravac_jax as gravac

GROWS_EVERY = 2000  # steps without an overflow

mesh = gravac.make_mesh()
rng = np.random.default_rng(0)
teacher = rng.normal(size=(32, 10))
exchange = gravac.transform(send=gravac.Bits(4))
tx = gravac.guard(optax.chain(exchange, optax.sgd(0.1, momentum=0.9)))


def make_batch(rows: int) -> dict[str, np.ndarray]:
    """Return inputs `[rows, 32]` float32, and the classes that a teacher gives them."""
    x = rng.normal(size=(rows, 32)).astype(np.float32)
    return {"x": x, "label": np.argmax(x @ teacher, axis=1)}


def half_loss(params: Any, batch: Any) -> jax.Array:
    """Return the loss, float32, of a model in float16."""
    half, x = jax.tree.map(lambda x: x.astype(jnp.float16), (params, batch["x"]))
    logits = (jax.nn.relu(x @ half["hidden"]) @ half["out"]).astype(jnp.float32)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(cross_entropy(logits, batch["label"]))


def next_scale(scale: Any, is_finite: jax.Array) -> Any:
    """Return the factor of the next step, and the steps since it last changed."""
    steps = jnp.where(is_finite, scale["steps"] + 1, 0)
    grows = steps == GROWS_EVERY
    by = jnp.where(is_finite, jnp.where(grows, 2.0, 1.0), 0.5)
    return {"factor": scale["factor"] * by, "steps": jnp.where(grows, 0, steps)}


def train_step(params: Any, opt_state: Any, scale: Any, batch: Any) -> Any:
    """Take one step of one replica."""
    scaled_loss = lambda *inputs: half_loss(*inputs) * scale["factor"]
    own = gravac.own_params(tx, params, opt_state)
    loss, grads = gravac.value_and_grad(scaled_loss)(own, batch)
    loss, grads = jax.tree.map(lambda x: x / scale["factor"], (loss, grads))
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    is_finite = optax.tree.get(opt_state, "StepInfo").is_finite  # of all replicas
    return params, opt_state, next_scale(scale, is_finite), loss


hidden, out = jax.random.split(jax.random.key(0))
params = {
    "hidden": jax.random.normal(hidden, (32, 64)) / 8,
    "out": jax.random.normal(out, (64, 10)) / 8,
}
scale = {"factor": jnp.float32(2.0**15), "steps": jnp.int32(0)}
state = gravac.place((params, tx.init(params), scale), mesh)
step = gravac.data_parallel(train_step, mesh)
overflowing = make_batch(64)
overflowing["x"][0] *= 1e5  # beyond float16, in a row of the first replica
scales = []
for batch in [make_batch(64), overflowing, make_batch(64)]:
    *state, loss = step(*state, batch)
    scales.append(float(state[2]["factor"]))  # 32768, 16384, 16384
    print(f"loss {loss:.3f}, factor {scales[-1]:g}")
