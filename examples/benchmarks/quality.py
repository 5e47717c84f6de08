"""Held-out loss of methods against steps and bytes, from simulated replicas.

Every method gets the same task, initial params and batches per seed, and the same
budget to tune its learning rate: one run for each of a few multiples of the task's own,
judged by the validation loss of a seed that is used for nothing else. The runs that
count then report the test loss. One JSONL line per evaluation; a run that was cut off
goes on from its last evaluation, and the same command writes the same file.

    python examples/benchmarks/quality.py --data-dir DIR --out FILE.jsonl
"""

import dataclasses
import functools
import shutil
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))
import quality_report
from journal import Journal, Line
from quality_results import tuned
from quality_run import Bench, Setting, Trial, run
from training.methods import arguments

TUNING_SEED = 1_000_000  # far from the seeds that count: 0, 1, ...


@dataclasses.dataclass(frozen=True)
class Args:
    """What to compare, on what, for how long."""

    data_dir: Path
    """Where the task's files are."""
    out: Path
    """JSONL; runs that are in it are not made again."""
    methods: tuple[str, ...] = ("dense", "default", "fixed10", "fixed100", "fixed1000")
    """Names as in methods.py; gaps are to "dense"."""
    seeds: int = 5
    """Seeds 0, 1, ... of the runs that count."""
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = Setting()  # noqa: RUF009


def trials(args: Args, learning_rate: float, lines: list[Line]) -> list[Trial]:
    """The runs that can be planned from the lines so far: tuning, then seeds."""
    setting = args.setting
    tuning = [
        Trial("tune", name, round(learning_rate * x, 9), TUNING_SEED, setting.steps)
        for name in args.methods
        for x in setting.multiples
    ]
    if not all(is_done(x, lines) for x in tuning):
        return tuning
    best = tuned(lines)
    length = {"dense": setting.steps}
    longer = round(setting.steps * setting.horizon)
    return tuning + [
        Trial("test", name, best[name], seed, length.get(name, longer))
        for seed in range(args.seeds)
        for name in args.methods
    ]


def is_done(trial: Trial, lines: list[Line]) -> bool:
    """Whether the last evaluation of the run is there."""
    return any(trial.owns(x) and x["step"] == trial.steps for x in lines)


def make_runs(args: Args, console: Console) -> None:
    """Make what is missing in the file.

    Raises:
      ValueError: if the task's files cannot be read, or hold too little.
    """
    bench = Bench(args.setting, args.data_dir)
    unit, learning_rate = bench.task.unit, bench.task.learning_rate
    own = {"unit": unit, "learning_rate": learning_rate, "data": bench.digest()}
    journal = Journal(args.out, {**dataclasses.asdict(args.setting), **own})
    checkpoints = args.out.with_suffix(".checkpoints")
    with Progress(console=console, transient=True) as progress:
        for _ in ("tune", "test"):  # the second is planned from what the first finds
            for trial in trials(args, learning_rate, journal.lines):
                if is_done(trial, journal.lines):
                    continue
                bar = progress.add_task(trial.name, total=trial.steps)
                tick = functools.partial(progress.advance, bar)
                run(trial, bench, journal, checkpoints, tick)
                progress.remove_task(bar)
                console.print(f"{trial.name}: {journal.lines[-1]['loss']} {unit}")
    shutil.rmtree(checkpoints, ignore_errors=True)


def check(args: Args) -> None:
    """Refuse what would be found out only hours later.

    Raises:
      SystemExit: for an unknown method, counts below 1, and a horizon that the
        schedule forbids.
    """
    for name in args.methods:
        arguments(name)
    setting = args.setting
    counts = {
        "--seeds": args.seeds,
        "--replicas": setting.replicas,
        "--steps": setting.steps,
        "--evaluations": setting.evaluations,
        "--evaluation-rows": setting.evaluation_rows,
    }
    for flag, count in counts.items():
        if count < 1:
            raise SystemExit(f"{flag} must be at least 1, got {count}")
    if not setting.multiples or min(setting.multiples) <= 0 or setting.horizon < 1:
        raise SystemExit("--multiples must be above 0, and --horizon from 1 on")
    if setting.horizon != 1 and setting.schedule == "cosine":
        raise SystemExit(
            f"--horizon {setting.horizon:g} compares runs of different lengths, which "
            "--schedule cosine gives different learning rates: use --schedule constant"
        )


def main(args: Args) -> None:
    """Make the runs that are missing, then print the tables."""
    check(args)
    console = Console()
    try:
        make_runs(args, console)
    except ValueError as error:  # DataError, or too little data for a batch
        raise SystemExit(str(error)) from None
    quality_report.show([args.out], console)


if __name__ == "__main__":
    main(tyro.cli(Args))
