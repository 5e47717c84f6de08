"""Plain functions under `jax.jit`, on a mesh of Explicit axes, compressed.

python examples/conversions/explicit_after.py
"""

from typing import Any

import jax
import optax
from models import batches, cross_entropy, draw_rows, run

import gravac_jax as gravac


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Return the mean cross-entropy of a batch."""
    x, y = batch
    return cross_entropy(jax.nn.relu(x @ params["up"]) @ params["down"], y)


def main(steps: int = 200) -> list[float]:
    """Train, and return the losses."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    draw = jax.nn.initializers.lecun_normal()
    keys = jax.random.split(jax.random.key(0))
    params = {"up": draw(keys[0], (64, 256)), "down": draw(keys[1], (256, 10))}
    tx = optax.chain(gravac.transform(), optax.sgd(0.05, momentum=0.9))
    state = gravac.place((params, tx.init(params)), mesh)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        own = jax.reshard(params, jax.P(reduced=frozenset({"data"})))
        loss, grads = jax.value_and_grad(loss_fn)(own, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    with jax.set_mesh(mesh):
        losses = []
        for batch in batches(draw_rows, 16, steps):
            batch = jax.device_put(batch, jax.P("data"))
            state, loss = step(*state, batch)
            losses.append(float(loss))
    return losses


if __name__ == "__main__":
    run(main)
