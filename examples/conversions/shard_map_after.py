"""An nnx model with BatchNorm and dropout, an nnx.Optimizer, and `jax.shard_map`.

python examples/conversions/shard_map_after.py
"""

from typing import Any

import jax
import optax
from flax import nnx
from models import DropoutMLP, batches, cross_entropy, draw_rows, run

import gravac_jax as gravac


def loss_fn(model: DropoutMLP, batch: Any) -> jax.Array:
    """Return the mean cross-entropy of a batch, over all devices."""
    x, y = batch
    return jax.lax.pmean(cross_entropy(model(x), y), "data")


def main(steps: int = 200) -> list[float]:
    """Train, and return the losses."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    model = DropoutMLP(nnx.Rngs(0))
    tx = optax.chain(gravac.transform("data"), optax.sgd(0.05, momentum=0.9))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def train_step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        kind, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_of(params: Any, batch: Any) -> Any:
            own = nnx.merge(kind, params, rest, copy=True)
            return loss_fn(own, batch), nnx.state(own, nnx.Not(nnx.Param))

        grad_fn = gravac.value_and_grad(loss_of, "data", has_aux=True)
        (loss, rest), grads = grad_fn(params, batch)
        optimizer.update(model, grads)
        nnx.update(model, rest)
        stats = nnx.state(model, nnx.BatchStat)
        nnx.update(model, jax.lax.pmean(stats, "data"))
        return nnx.state((model, optimizer)), loss

    state = gravac.place(state, mesh)
    specs = gravac.state_specs(state)
    step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=mesh,
            in_specs=(specs, jax.P("data")),
            out_specs=(specs, jax.P()),
        )
    )
    losses = []
    for batch in batches(draw_rows, 16, steps):
        batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(main)
