"""Training whose replicas come and go: 4, then 2, then 8, then 3, through checkpoints.

Every run takes the same batches from the same params, at a static factor. One keeps its
four replicas; one is saved and restored on other numbers of them, by
`gravac_jax.checkpoint`; a third one does so too, and forgets what is held back, as
most checkpoints of other libraries do.

    python examples/benchmarks/elastic.py --data-dir DIR --out FILE.jsonl
"""

import dataclasses
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from journal import Journal, Line, read
from tasks import load, pipeline

import gravac_jax as gravac
from gravac_jax import checkpoint

METHODS = ("uninterrupted", "elastic", "residual dropped")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to train, and who comes and goes."""

    data_dir: Path
    """Where the task's files are."""
    out: Path
    """JSONL; runs that are in it are not made again."""
    task: str = "lstm-ptb"
    """What to train."""
    replicas: tuple[int, ...] = (4, 2, 8, 3)
    """One after the other, each for as many steps."""
    rows: int = 24
    """Of a batch, of all replicas together."""
    steps: int = 600
    """In all."""
    factor: float = 100
    """The static factor."""
    multiple: float = 4.0
    """The learning rate, in units of the task's own."""
    every: int = 25
    """Steps from one evaluation to the next."""
    seeds: int = 3
    """Paired."""


class Bench:
    """The task, and a compiled step for each number of replicas."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.task = load(args.task, args.data_dir)
        rate = args.multiple * self.task.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, rate, args.steps // 20, args.steps
        )
        self.tx = optax.chain(
            gravac.transform(controller=gravac.Fixed(args.factor)),
            optax.clip_by_global_norm(1.0),
            optax.sgd(schedule, momentum=0.9, nesterov=True),
        )
        self.steps = {n: gravac.simulate(self.train_step, n) for n in args.replicas}
        self.init, self.loss = jax.jit(self.task.init), jax.jit(self.task.loss)
        rows = pipeline.evaluation(self.task.test, 64)
        self.held_out = list(itertools.islice(rows, 8))

    def train_step(self, params: Any, opt_state: Any, batch: Any) -> Any:
        """One replica's."""
        loss, grads = gravac.value_and_grad(self.task.loss)(params, batch)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def begin(self, replicas: int, seed: int) -> Any:
        """Before the first step."""
        params = self.init(jax.random.key(seed))
        return gravac.place((params, self.tx.init(params)), replicas)

    def evaluate(self, params: Any) -> float:
        """Mean held-out loss."""
        losses = [self.loss(params, batch) for batch in self.held_out]
        return float(np.mean(jax.device_get(losses), dtype=np.float64))

    def move(self, state: Any, replicas: int, seed: int) -> Any:
        """The same training on another number of replicas."""
        with (
            tempfile.TemporaryDirectory() as directory,
            checkpoint.Checkpointer(directory, save_every=1) as checkpointer,
        ):
            checkpointer.save(1, state, state[0])
            fresh = self.begin(replicas, seed)
            return checkpointer.restore(fresh, fresh[0]).tree


def forget(state: Any) -> Any:
    """What is held back is gone."""
    (params, opt_state) = state
    residual = jnp.zeros_like(optax.tree.get(opt_state, "residual"))
    return params, optax.tree.set(opt_state, residual=residual)


def run(bench: Bench, method: str, seed: int, journal: Journal) -> None:
    """One run; a line for each evaluation, and one for each move."""
    args = bench.args
    replicas = args.replicas[:1] if method == METHODS[0] else args.replicas
    length = -(-args.steps // len(replicas))
    batches = pipeline.batches(bench.task.train, rows=args.rows, replicas=1, seed=seed)
    state = bench.begin(replicas[0], seed)
    own = {"method": method, "seed": seed}
    for i in track(range(args.steps), f"{method}, seed {seed}", transient=True):
        n = replicas[i // length]
        if i and i % length == 0:
            state = bench.move(state, n, seed)
            state = forget(state) if method == METHODS[2] else state
        *state, _ = bench.steps[n](*state, next(batches))
        state = tuple(state)
        if (i + 1) % args.every == 0:
            loss = round(bench.evaluate(state[0]), 6)
            journal.append({**own, "step": i + 1, "replicas": n, "loss": loss})


def losses(lines: list[Line], method: str, step: int) -> np.ndarray:
    """Of all seeds, in order."""
    mine = [x for x in lines if x["method"] == method and x["step"] == step]
    return np.asarray([x["loss"] for x in sorted(mine, key=lambda x: x["seed"])])


def report(lines: list[Line], console: Console) -> None:
    """The gap to the uninterrupted run, in percent: mean and range over seeds."""
    table = Table(title="Held-out loss", box=SIMPLE, pad_edge=False)
    table.add_column("step")
    for method in METHODS:
        table.add_column(method, justify="right")
    steps = sorted({x["step"] for x in lines})
    for step in steps[:: -max(1, len(steps) // 8)][::-1]:
        reference = losses(lines, METHODS[0], step)
        row = [f"{step}", f"{reference.mean():.3f}"]
        for method in METHODS[1:]:
            gaps = 100 * (losses(lines, method, step) / reference - 1)
            spread = f"({gaps.min():+.2f} to {gaps.max():+.2f})"
            row.append(f"{gaps.mean():+.2f}% {spread}")
        table.add_row(*row)
    console.print(table)


def main(args: Args) -> None:
    """Make what is missing, and print the table."""
    shared = dataclasses.asdict(args)
    for name in ("data_dir", "out", "seeds"):
        del shared[name]
    journal, console = Journal(args.out, shared), Console()
    bench = Bench(args)
    for seed in range(args.seeds):
        for method in METHODS:
            mine = lambda x, m=method, s=seed: (x["method"], x["seed"]) == (m, s)
            if any(mine(x) and x["step"] == args.steps for x in journal.lines):
                continue
            journal.drop(mine)
            run(bench, method, seed, journal)
    report(read(args.out)[1], console)


if __name__ == "__main__":
    main(tyro.cli(Args))
