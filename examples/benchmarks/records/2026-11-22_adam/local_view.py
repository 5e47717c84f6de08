"""Adam on every replica, its steps exchanged with error feedback, at a local view.

python examples/benchmarks/records/2026-11-22_adam/local_view.py --data-dir DIR
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.flatten_util import ravel_pytree

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from quality_run import Bench, Setting, Trial, learning_rate_at

B1, B2, EPS = 0.9, 0.999, 1e-8
SEED = 1_000_000  # the harness's for tuning: validation loss
LEAST = 16_384  # entries of a matrix that is not sent whole


@dataclasses.dataclass(frozen=True)
class Args:
    """Which variants, how fast and how long."""

    data_dir: Path
    """Where the text is."""
    variants: tuple[str, ...] = ("lowrank", "topk", "average")
    """lowrank at factor 25, topk at factor 100, or whole averages every 25 steps."""
    learning_rates: tuple[float, ...] = (0.003, 0.006)
    """Of every variant."""
    steps: int = 1000
    """Of every run."""
    replicas: int = 4
    """Simulated."""


class Sender:
    """What one replica sends of what it holds, `[n]`, and what it learns."""

    def __init__(self, params: Any, variant: str):
        self.leaves, self.treedef = jax.tree.flatten(params)
        self.unravel = ravel_pytree(params)[1]
        self.variant = variant

    def init(self) -> Any:
        """Random directions, of matrices."""
        key = jax.random.key(1)
        draw = lambda i, x: jax.random.normal(jax.random.fold_in(key, i), x)
        return [draw(i, self._right(x)) for i, x in enumerate(self.leaves)]

    def _right(self, x: jax.Array) -> tuple[int, int]:
        if x.ndim < 2 or x.size < LEAST:
            return 0, 0
        columns = x.shape[-1]
        rows = x.size // columns
        return columns, max(1, round(rows * columns / (25 * (rows + columns))))

    def send(self, held: jax.Array, right: Any, count: jax.Array) -> Any:
        """What is sent, and new directions."""
        if self.variant == "average":
            return jnp.where(count % 25 == 0, held, 0), right
        if self.variant == "topk":
            least = jax.lax.top_k(jnp.abs(held), held.size // 100)[0][-1]
            return jnp.where(jnp.abs(held) >= least, held, 0), right
        sent, learned = [], []
        for x, q in zip(jax.tree.leaves(self.unravel(held)), right, strict=True):
            if not q.size:
                sent.append(x)
                learned.append(q)
                continue
            matrix = x.reshape(-1, x.shape[-1])
            p = jnp.linalg.qr(jax.lax.pmean(matrix @ q, "data"))[0]
            own = matrix.T @ p
            sent.append((p @ own.T).reshape(x.shape))
            learned.append(jax.lax.pmean(own, "data"))
        return ravel_pytree(jax.tree.unflatten(self.treedef, sent))[0], learned


def run(bench: Bench, variant: str, rate: float, args: Args) -> float:
    """The validation loss at the end."""
    params = bench.init(jax.random.key(SEED))
    x, unravel = ravel_pytree(params)
    sender = Sender(params, variant)

    def step(x: Any, state: Any, batch: Any, rate: Any) -> Any:
        held, mean, square, count, right = state
        count = count + 1
        # The local view: params as they would be, had all of one's own steps arrived.
        g = jax.grad(lambda y: bench.task.loss(unravel(y), batch))(x - held)
        g = g * jnp.minimum(1, 1 / jnp.linalg.norm(g))
        mean = B1 * mean + (1 - B1) * g
        square = B2 * square + (1 - B2) * g * g
        size = jnp.sqrt(square / (1 - B2**count)) + EPS
        held = held + rate * mean / (1 - B1**count) / size
        sent, right = sender.send(held, right, count)
        x = x - jax.lax.pmean(sent, "data")
        return x, (held - sent, mean, square, count, right)

    mapped = jax.jit(
        jax.vmap(step, (None, 0, 0, None), (None, 0), axis_name="data"),
        donate_argnums=(0, 1),
    )
    zeros = jnp.zeros((3, args.replicas, x.size))
    many = lambda x: jnp.stack([x] * args.replicas)
    state = (*zeros, jnp.zeros(args.replicas), jax.tree.map(many, sender.init()))
    stream = bench.batches(SEED)
    trial = Trial("tune", "", rate, SEED, args.steps)
    for i in range(args.steps):
        split = lambda x: x.reshape(args.replicas, -1, *x.shape[1:])
        now = jnp.float32(learning_rate_at(i, trial, bench.setting.schedule))
        x, state = mapped(x, state, jax.tree.map(split, next(stream)), now)
    return bench.evaluate(unravel(x), "tune")


def main(args: Args) -> None:
    """Run each variant and print a line of JSON."""
    setting = Setting(
        task="transformer-bytes", steps=args.steps, replicas=args.replicas
    )
    bench = Bench(setting, args.data_dir)
    for variant in args.variants:
        for rate in args.learning_rates:
            loss = run(bench, variant, rate, args)
            line = {"variant": variant, "learning_rate": rate, "loss": round(loss, 4)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
