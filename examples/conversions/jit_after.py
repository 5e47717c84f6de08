"""An nnx transformer with logical axes, compressed over one axis and sharded over two.

python examples/conversions/jit_after.py
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from models import Transformer, cross_entropy, draw_tokens

import gravac_jax as gravac

RULES = (
    ("batch", "fsdp"),
    ("vocabulary", "tp"),
    ("embed", "fsdp"),
    ("heads", "tp"),
    ("mlp", "tp"),
)


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next tokens."""
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def train_step(model: Transformer, optimizer: nnx.Optimizer, tokens: jax.Array) -> Any:
    """Take one step in place, and return the loss."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def main(steps: int = 200) -> list[float]:
    """Train, and return the losses."""
    axes = ("dcn", "fsdp", "tp")
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, jax.device_count() // 4), axes, axis_types=auto)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        model = Transformer(64, 64, layers=2, rngs=nnx.Rngs(0))
        tx = optax.adamw(3e-3)
        tx = optax.chain(gravac.transform("dcn", shardings=nnx.state(model)), tx)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        model, optimizer = gravac.place((model, optimizer), mesh, "dcn")
        step = gravac.nnx_data_parallel(train_step, mesh, "dcn")
        rng = np.random.default_rng(0)
        losses = []
        for _ in range(steps):
            tokens = draw_tokens(rng, 8 * jax.device_count())
            tokens = jax.device_put(tokens, jax.P(("dcn", "fsdp")))
            losses.append(float(step(model, optimizer, tokens)))
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
