"""An nnx transformer with logical axes, compressed over one axis and sharded over two.

python examples/conversions/jit_after.py
"""

from typing import Any

import jax
import optax
from flax import nnx
from models import Transformer, batches, cross_entropy, draw_tokens, run

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
        losses = []
        for tokens in batches(draw_tokens, 8, steps):
            tokens = jax.device_put(tokens, jax.P(("dcn", "fsdp")))
            losses.append(float(step(model, optimizer, tokens)))
    return losses


if __name__ == "__main__":
    run(main)
