"""What a choice of rungs costs: a train step with a ladder beside one with one rung.

The quickstart's model on one device. GraVAC is held on a rung in the middle of its
ladder by a gate that lets all pass and a window that never ends; beside it `Fixed` at
the same factor, and no compression. All take turns in one run.

    python examples/benchmarks/bench_ladder.py --out FILE.jsonl
"""

import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import journal
import optax
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

import gravac_jax as gravac

sys.path.insert(0, str(Path(__file__).parents[1]))
import quickstart

LADDER = gravac.geometric(10, 1000)
HELD_RUNG = 2
TRANSFORMS = {
    f"{len(LADDER) - 1} rungs": gravac.transform(
        axis_name=None,
        controller=gravac.GraVAC(epsilon=0.0, ladder=LADDER, window=2**30),
    ),
    "one rung": gravac.transform(
        axis_name=None, controller=gravac.Fixed(LADDER[HELD_RUNG])
    ),
    "dense": optax.identity(),
}


@dataclasses.dataclass(frozen=True)
class Args:
    """How long to time."""

    out: Path
    """JSONL, appended to."""
    steps: int = 60
    """Of each."""
    compilations: int = 3
    """Of each."""
    batch: int = 8
    """Sequences per step."""
    length: int = 64
    """Bytes per sequence."""


def train_step(tx: optax.GradientTransformation, graph: Any) -> Any:
    """The whole step of a training loop."""
    loss_of = quickstart.loss_of_model(graph)

    def step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def main(args: Args) -> None:
    """Compile and time them in turn."""
    text, _ = quickstart.read_text(None)
    graph, params = nnx.split(quickstart.ByteModel(nnx.Rngs(0)), nnx.Param)
    batches = quickstart.draw(text, args.batch, args.length, seed=0)
    chains = {
        name: optax.chain(tx, optax.sgd(0.1, momentum=0.9))
        for name, tx in TRANSFORMS.items()
    }
    compile_seconds = {name: [] for name in chains}
    compiled = {}
    first = jnp.asarray(next(batches))
    for _ in range(args.compilations):
        for name, tx in chains.items():
            start = time.perf_counter()
            jitted = jax.jit(train_step(tx, graph), donate_argnums=(0, 1))
            compiled[name] = jitted.lower(params, tx.init(params), first).compile()
            compile_seconds[name].append(time.perf_counter() - start)

    own = lambda tree: jax.tree.map(jnp.copy, tree)
    states = {name: (own(params), tx.init(params)) for name, tx in chains.items()}
    seconds = {name: [] for name in chains}
    for i in range(args.steps):
        batch = jnp.asarray(next(batches))
        for name, step in compiled.items():
            start = time.perf_counter()
            *states[name], _ = jax.block_until_ready(step(*states[name], batch))
            if i > 2:
                seconds[name].append(time.perf_counter() - start)

    record = journal.Journal(args.out, {"ladder": LADDER, "held": LADDER[HELD_RUNG]})
    table = Table("", "step ms", "over one rung", "compile s", "over one rung")
    median = lambda x: statistics.median(x)
    for name in chains:
        ends = lambda x: [min(x), median(x), max(x)]
        record.append(
            {
                "method": name,
                "params": sum(x.size for x in jax.tree.leaves(params)),
                "seconds": ends(seconds[name]),
                "compile_seconds": ends(compile_seconds[name]),
            }
        )
        over = [
            median(x[name]) / median(x["one rung"]) for x in (seconds, compile_seconds)
        ]
        table.add_row(
            name,
            f"{1e3 * median(seconds[name]):.1f}",
            f"{over[0]:.2f}",
            f"{median(compile_seconds[name]):.1f}",
            f"{over[1]:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
