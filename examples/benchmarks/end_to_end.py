"""Time to a held-out loss: steps of real training, seconds of measured steps.

Replicas are simulated, so that many runs can be made; the seconds of a step are those
that steptime.py has measured on an emulated network. All runs of a seed have the same
initial params and batches; the target is what dense steps reach at 80% of theirs, or
at the evaluation before.

A method that looks at no times makes one run for all networks. A controller is told the
seconds of its steps, with noise, and makes one for each; what it costs by itself,
beside a static factor like its own, is what steptime.py has measured, and is part of
them. end_to_end_report.py makes tables and pictures of both records.

    python examples/benchmarks/end_to_end.py --data-dir DIR --timed STEPS --out OUT
"""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))
import end_to_end_report as report
import journal
from closed_loop import AVERAGED, target_of
from journal import Journal, Line
from quality_run import OPTIMIZERS
from step_seconds import Timed, ladder_of
from tasks import load, pipeline
from training.methods import after, arguments

import gravac_jax as gravac

EVERY = 25  # steps from one evaluation to the next


@dataclasses.dataclass(frozen=True)
class Args:
    """What to train, how long, on which networks."""

    data_dir: Path
    """Where the task's files are."""
    timed: Path
    """A record of steptime.py, with "dense" and static factors."""
    out: Path
    """JSONL; runs that are in it are not made again."""
    task: str = "lstm-ptb"
    """What to train."""
    preset: str = "tiny"
    """Its size."""
    hosts: int = 4
    """Replicas: simulated here, hosts of the record."""
    methods: tuple[str, ...] = (
        "dense",
        "dense16",
        "fixed10",
        "fixed100",
        "fixed1000",
        "dgc100",
        "lowrankshort100",
        "default",
        "gravac0.7",
        "accordion",
    )
    """Names as in methods.py; the first is "dense", which sets the target."""
    seeds: int = 3
    """Paired."""
    steps: int = 500
    """Of a dense run."""
    longest: float = 2.0
    """Others run at most so many times as long."""
    noise: float = 0.1
    """Standard deviation of the logarithm of a time."""
    multiple: float = 2.0
    """The learning rate, in units of the task's own; constant after a short warm-up."""


def is_told(name: str) -> bool:
    """Whether the method's course depends on the seconds of its steps."""
    controller = arguments(name)["controller"]
    return isinstance(controller, gravac.Fastest | gravac.GraVAC)


class Bench:
    """The task, and one compiled step for each method."""

    def __init__(self, args: Args):
        self.args = args
        self.task = load(args.task, args.data_dir, preset=args.preset)
        self.loss, self.init = jax.jit(self.task.loss), jax.jit(self.task.init)
        rows = pipeline.evaluation(self.task.test, 128)
        self.held_out = list(itertools.islice(rows, 8))
        self.compiled = functools.cache(self._compiled)

    def _compiled(self, name: str) -> tuple[Any, Any]:
        rate = self.args.multiple * self.task.learning_rate
        ramp = optax.linear_schedule(0, rate, max(1, self.args.steps // 20))
        chosen = arguments(name)
        tx = optax.chain(
            gravac.transform(**chosen),
            *after(chosen, OPTIMIZERS["sgd"](), 1.0),
            optax.scale_by_learning_rate(ramp),
        )

        def train_step(
            params: Any, opt_state: Any, clock: Any, batch: Any, *, seconds: jax.Array
        ) -> Any:
            last, key, average = clock
            _, grads = gravac.value_and_grad(self.task.loss)(params, batch)
            rung = opt_state[0].rung
            updates, opt_state = tx.update(grads, opt_state, params, step_seconds=last)
            params = optax.apply_updates(params, updates)
            key, now = jax.random.split(key)
            noise = jnp.exp(self.args.noise * jax.random.normal(now))
            mix = lambda x, y: x + AVERAGED * (y - x)
            average = jax.tree.map(mix, average, params)
            clock = seconds[rung] * noise, key, average
            sent_bytes = optax.tree.get(opt_state, "StepInfo").wire_bytes
            return params, opt_state, clock, (rung, sent_bytes)

        return tx, gravac.simulate(train_step, self.args.hosts)

    def run(
        self, name: str, seconds: np.ndarray, seed: int, target: float | None
    ) -> Line:
        """Train until the target is reached; without one, all steps of a dense run.

        Args:
          name: the method's.
          seconds: `[rungs]`, of a step at each, as the controller is told.
          seed: of params, batches and noise.
          target: the held-out loss to reach.

        Returns:
          At every evaluation the held-out `losses`, the steps `taken` at each rung so
          far, and the `wire_bytes` of all of them.
        """
        args, (tx, step) = self.args, self.compiled(name)
        params = self.init(jax.random.key(seed))
        now = jnp.float32(jnp.nan), jax.random.key(1000 + seed)
        clock = (*now, jax.tree.map(jnp.copy, params))
        state = (*gravac.place((params, tx.init(params)), args.hosts), clock)
        stream = pipeline.batches(
            self.task.train, rows=self.task.rows, replicas=args.hosts, seed=seed
        )
        table = jnp.asarray(seconds, jnp.float32)
        losses, taken, sent_bytes = [], [], []
        counts, total = np.zeros(len(seconds), int), 0.0
        longest = args.steps if target is None else round(args.longest * args.steps)
        for _ in range(longest // EVERY):
            seen = []
            for batch in itertools.islice(stream, EVERY):
                *state, figures = step(*state, batch, seconds=table)
                seen.append(figures)
            rungs, sent = map(np.asarray, zip(*jax.device_get(seen), strict=True))
            counts = counts + np.bincount(rungs.astype(int), minlength=len(counts))
            total += float(sent.sum(dtype=np.float64))
            held_out = [self.loss(state[2][2], batch) for batch in self.held_out]
            losses.append(float(np.mean(jax.device_get(held_out))))
            taken.append(counts.tolist())
            sent_bytes.append(total)
            if target is not None and losses[-1] <= target:
                break
        return {"losses": losses, "taken": taken, "wire_bytes": sent_bytes}


def race(args: Args, console: Console) -> list[Line]:
    """Make the runs that are missing.

    Raises:
      SystemExit: if the first method is not "dense", or one has no times.
    """
    if args.methods[:1] != ("dense",):
        raise SystemExit(f'--methods must begin with "dense", got {args.methods}')
    head, lines = journal.read(args.timed)
    timed = Timed(lines, args.hosts)
    own = dataclasses.asdict(args)
    for name in ("data_dir", "out", "timed", "seeds", "methods"):
        del own[name]
    own["timed"] = head["configuration"]
    runs, bench = Journal(args.out, own), Bench(args)
    for seed in track(range(args.seeds), "seeds", console=console, transient=True):
        target = None
        for name in args.methods:
            for link in timed.links if is_told(name) else timed.links[:1]:
                key = {"seed": seed, "method": name}
                if is_told(name):
                    key["bandwidth_mbit"] = link
                steps = [timed.step(link, name, x) for x in ladder_of(name)]
                seconds = np.array(steps) + timed.own_seconds(link, name)
                run = functools.partial(bench.run, name, seconds, seed)
                target = _made(runs, key, target, run)["target"]
    return runs.lines


def _made(runs: Journal, key: Line, target: float | None, run: Any) -> Line:
    """The line of a run, which is made if it is missing."""
    for line in runs.lines:
        if key.items() <= line.items():
            return line
    found = run(target)
    goal = target_of(found["losses"]) if target is None else target
    runs.append({**key, "target": goal, **found})
    return runs.lines[-1]


def main(args: Args) -> None:
    """Make the runs that are missing, then print the tables."""
    race(args, Console())
    print(report.text(report.Args(args.timed, args.out, args.hosts)))


if __name__ == "__main__":
    main(tyro.cli(Args))
