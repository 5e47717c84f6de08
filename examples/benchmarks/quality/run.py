"""Compare the held-out loss of methods per step and per byte, on simulated replicas.

Every method gets the same task, initial params and batches per seed, and the same
budget to tune its learning rate: one run for each of a few multiples of the task's own
rate, judged by the validation loss of a seed that is used for nothing else. The runs
that count then report the test loss. One JSONL line per evaluation; a run that was cut
off is made again. The same command writes the same file.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

import jax
import tyro
from common.journal import Journal, Line
from rich.console import Console
from rich.progress import Progress

from quality import report
from quality.results import tuned
from quality.trial import Bench, Setting, Trial, method_of, run

TUNING_SEED = 1_000_000  # far from the seeds that count: 0, 1, ...


@dataclasses.dataclass(frozen=True)
class Args:
    """What to compare, on what, for how long.

    Args:
      data_dir: The folder of the task's files.
      out: The record, JSONL; runs that are in it are not made again.
      methods: Names as in training/methods.py; gaps are to "dense". Two are controls:
        "nudged dense", whose first params are moved by a millionth, and "alone", one
        replica of these, which exchanges nothing.
      seeds: The number of runs that count; their seeds are 0, 1, ...
      setting: What all runs of the record share.
    """

    data_dir: Path
    out: Path
    methods: tuple[str, ...] = ("dense", "own Fastest()", "own Bits(2)", "TopK(100)")
    seeds: int = 5
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = Setting()  # noqa: RUF009


def trials(args: Args, learning_rate: float, lines: list[Line]) -> list[Trial]:
    """Return the runs that can be planned from the lines so far: tuning, then seeds."""
    setting = args.setting
    tuning = [
        Trial("tune", name, round(learning_rate * x, 9), TUNING_SEED, setting.steps)
        for name in args.methods
        for x in setting.multiples
    ]
    if len(setting.multiples) == 1:
        best, tuning = {x.method: x.learning_rate for x in tuning}, []
    elif all(is_done(x, lines) for x in tuning):
        best = tuned(lines)
    else:
        return tuning
    return tuning + [
        Trial("test", name, best[name], seed, setting.steps)
        for seed in range(args.seeds)
        for name in args.methods
    ]


def is_done(trial: Trial, lines: list[Line]) -> bool:
    """Return whether the last evaluation of the run is there."""
    return any(trial.owns(x) and x["step"] == trial.steps for x in lines)


def make_runs(args: Args, console: Console) -> None:
    """Make what is missing in the file.

    Raises:
      ValueError: If the task's files cannot be read, or hold too little.
    """
    bench = Bench(args.setting, args.data_dir)
    unit, learning_rate = bench.task.unit, bench.task.learning_rate
    own = {"unit": unit, "learning_rate": learning_rate, "data": bench.digest()}
    if jax.default_backend() != "cpu":
        own["device"] = jax.devices()[0].device_kind
    journal = Journal(args.out, {**dataclasses.asdict(args.setting), **own})
    with Progress(console=console, transient=True) as progress:
        for _ in ("tune", "test"):  # the second is planned from what the first finds
            planned = trials(args, learning_rate, journal.lines)
            missing = [x for x in planned if not is_done(x, journal.lines)]
            for trial in missing:
                bar = progress.add_task(trial.name, total=trial.steps)
                tick = functools.partial(progress.advance, bar)
                run(trial, bench, journal, tick)
                progress.remove_task(bar)
                loss = journal.lines[-1]["loss"]
                console.print(f"{trial.name}: {loss} {unit}", markup=False)


def check(args: Args) -> None:
    """Refuse what would be found out only hours later.

    Raises:
      SystemExit: For an unknown method, and counts or multiples that are not positive.
    """
    for name in args.methods:
        method_of(name)
    setting = args.setting
    counts = args.seeds, setting.replicas, setting.steps, setting.evaluations
    if min(counts) < 1:
        raise SystemExit("seeds, replicas, steps and evaluations must be at least 1")
    if not setting.multiples or min(setting.multiples) <= 0:
        raise SystemExit("--multiples must be above 0")


def main(args: Args) -> None:
    """Make the runs that are missing, then print the tables."""
    check(args)
    try:
        make_runs(args, Console())
    except ValueError as error:  # DataError, or too little data for a batch
        raise SystemExit(str(error)) from None
    print(report.text([args.out]))
