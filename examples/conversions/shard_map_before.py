"""An nnx model with BatchNorm and dropout, an nnx.Optimizer, and `jax.shard_map`.

python examples/conversions/shard_map_before.py
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx


class MLP(nnx.Module):
    """Two dense layers, with BatchNorm and dropout between them."""

    def __init__(self, rngs: nnx.Rngs):
        """64 numbers in, 10 classes out."""
        self.inner = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.BatchNorm(256, momentum=0.9, rngs=rngs)
        self.middle = nnx.Linear(256, 256, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, 64]` to `[batch, 10]` logits."""
        x = nnx.relu(self.norm(self.inner(x)))
        return self.outer(self.dropout(nnx.relu(self.middle(x))))


def loss_fn(model: MLP, batch: Any) -> jax.Array:
    """The mean cross-entropy of a batch, over all devices."""
    x, y = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
    return jax.lax.pmean(losses.mean(), "data")


def draw(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise; the label is the largest of its first ten."""
    x = rng.normal(size=(rows, 64)).astype(np.float32)
    return x, x[:, :10].argmax(-1).astype(np.int32)


def main(steps: int = 200) -> list[float]:
    """Train; the losses."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    model = MLP(nnx.Rngs(0))
    tx = optax.sgd(0.05, momentum=0.9)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def train_step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        stats = nnx.state(model, nnx.BatchStat)
        nnx.update(model, jax.lax.pmean(stats, "data"))
        return nnx.state((model, optimizer)), loss

    step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=mesh,
            in_specs=(jax.P(), jax.P("data")),
            out_specs=(jax.P(), jax.P()),
        )
    )
    state = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        batch = draw(rng, 16 * jax.device_count())
        batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
        state, loss = step(state, batch)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
