"""Find the time to a held-out loss: steps of real training, seconds of measured steps.

Replicas are simulated, so that many runs can be made; the seconds of a step are those
that `step_seconds` has measured on an emulated network. All runs of a seed have the
same initial params and batches; the target is what dense steps reach at 80% of theirs,
or at the evaluation before.

A method that looks at no times makes one run for all networks. A controller is told the
seconds of its steps, with noise, and makes one run for each network; what it costs by
itself, beside steps that always send the same, is what `step_seconds` has measured, and
is part of these seconds. `end_to_end.report` prints the tables again.

    python examples/benchmarks end_to_end --data-dir DIR --timed STEPS --out OUT
"""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.journal import Journal, Line, configuration, read
from common.statistics import target_of
from common.training import EVERY, averaged, held_out, train_step
from rich.console import Console
from rich.progress import track
from step_seconds.methods import ladder_of
from step_seconds.timed import Timed
from tasks import load, pipeline
from training.methods import DENSE, OPTIMIZERS, method

import gravac_jax as gravac
from end_to_end import report


@dataclasses.dataclass(frozen=True)
class Args:
    """What to train, how long, on which networks.

    Args:
      data_dir: The folder of the task's files.
      timed: A record of `step_seconds`, with "dense", each method, and for controllers
        methods that always send what they may choose.
      out: The record, JSONL; runs that are in it are not made again.
      task: What to train.
      hosts: The number of replicas, simulated here, and hosts of the timing record.
      methods: Names as in training/methods.py; the first is "dense", which sets the
        target.
      seeds: The number of paired seeds, which are 0, 1, ...
      steps: Steps of a dense run.
      longest: Others run at most this many times as long.
      noise: The standard deviation of the logarithm of a time.
      multiple: The learning rate, in units of the task's own; constant after a short
        warm-up.
      optimizer: What follows the exchange of methods that do not exchange its steps.
    """

    data_dir: Path
    timed: Path
    out: Path
    task: str = "lstm-ptb"
    hosts: int = 4
    methods: tuple[str, ...] = (
        *("dense", "own Fastest()", "own Bits(2)", "own Bits(1, turns=4)"),
        "own TopK(100)",
    )
    seeds: int = 3
    steps: int = 500
    longest: float = 2.0
    noise: float = 0.1
    multiple: float = 2.0
    optimizer: Literal["sgd", "adam"] = "sgd"


class Bench:
    """The task, and one compiled step for each method."""

    def __init__(self, args: Args):
        self.args = args
        self.task = load(args.task, args.data_dir)
        self.init = jax.jit(self.task.init)
        self.held_out = held_out(self.task, self.task.test)
        self.compiled = functools.cache(self._compiled)

    def _compiled(self, name: str) -> tuple[Any, Any]:
        rate = self.args.multiple * self.task.learning_rate
        ramp = optax.linear_schedule(0, rate, max(1, self.args.steps // 20))
        chosen = method(name)
        tx = chosen.optimizer(OPTIMIZERS[self.args.optimizer], ramp)
        step = train_step(tx, self.task.loss, chosen.is_own)

        def timed_step(
            params: Any, opt_state: Any, clock: Any, batch: Any, *, seconds: jax.Array
        ) -> Any:
            last, key, average = clock
            params, opt_state, _ = step(params, opt_state, batch, step_seconds=last)
            info = optax.tree.get(opt_state, "StepInfo")
            # Seconds of a local step are those of any step of a round.
            rung = jnp.minimum(info.rung, len(seconds) - 1)
            key, now = jax.random.split(key)
            noise = jnp.exp(self.args.noise * jax.random.normal(now))
            clock = seconds[rung] * noise, key, averaged(average, params)
            return params, opt_state, clock, (rung, info.wire_bytes)

        return tx, gravac.data_parallel(timed_step, self.args.hosts)

    def run(
        self, name: str, seconds: np.ndarray, seed: int, target: float | None
    ) -> Line:
        """Train until the target is reached; without one, all steps of a dense run.

        Args:
          name: The method's name.
          seconds: `[rungs]`, the seconds of a step at each, as the controller is told.
          seed: The seed of params, batches and noise.
          target: The held-out loss to reach.

        Returns:
          The `target`; and at every evaluation the held-out `losses`, the steps `taken`
          at each encoding so far, and the `wire_bytes` of all of them.
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
            losses.append(self.held_out(state[2][2])["loss"])
            taken.append(dict(zip(ladder_of(name), counts.tolist(), strict=True)))
            sent_bytes.append(total)
            if target is not None and losses[-1] <= target:
                break
        goal = target_of(losses) if target is None else target
        return {
            "target": goal,
            "losses": losses,
            "taken": taken,
            "wire_bytes": sent_bytes,
        }


def race(args: Args) -> None:
    """Make the runs that are missing.

    Raises:
      SystemExit: If the first method is not "dense", or one has no times.
    """
    if args.methods[:1] != (DENSE,):
        raise SystemExit(f'--methods must begin with "dense", got {args.methods}')
    head, lines = read(args.timed)
    timed = Timed(lines, args.hosts)
    own = configuration(args, "timed", "seeds", "methods")
    journal = Journal(args.out, own | {"timed": head["configuration"]})
    bench, console = Bench(args), Console()
    for seed in track(range(args.seeds), "seeds", console=console, transient=True):
        target = None
        for name in args.methods:
            is_told = method(name).is_told
            for link in timed.links if is_told else timed.links[:1]:
                key = {"seed": seed, "method": name}
                if is_told:
                    key["bandwidth_mbit"] = link
                steps = [timed.step(link, name, x) for x in ladder_of(name)]
                seconds = np.array(steps) + timed.own_seconds(link, name)
                make = functools.partial(bench.run, name, seconds, seed, target)
                target = journal.once(make, **key)["target"]


def main(args: Args) -> None:
    """Make the runs that are missing, then print the tables."""
    race(args)
    print(report.text(args.timed, args.out, args.hosts))
