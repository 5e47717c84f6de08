"""An nnx model with BatchNorm and dropout, an nnx.Optimizer, and `jax.shard_map`.

python examples/conversions/shard_map_before.py
"""

from typing import Any

import jax
import optax
from flax import nnx
from models import DropoutMLP, batches, cross_entropy, draw_rows, run


def loss_fn(model: DropoutMLP, batch: Any) -> jax.Array:
    """Return the mean cross-entropy of a batch, over all devices."""
    x, y = batch
    return jax.lax.pmean(cross_entropy(model(x), y), "data")


def main(steps: int = 200) -> list[float]:
    """Train, and return the losses."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    model = DropoutMLP(nnx.Rngs(0))
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
    losses = []
    for batch in batches(draw_rows, 16, steps):
        batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(main)
