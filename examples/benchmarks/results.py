"""The paper's workloads, method by method: quality, bytes, factors.

Each run is one of a training program as it stands, from the same initial params and
with the same batches. All of them are in one process, in a folder each: one that is cut
off goes on from its last checkpoint, and is one line of the record when it is done.
First of all one replica is timed alone, dense and compressed: where replicas are
simulated, that is what controllers are told of seconds that are not the network's, and
nothing else should run meanwhile. `results_report.py` makes tables and figures.

    python examples/benchmarks/results.py --data-dir DIR --out FILE.jsonl
"""

import dataclasses
import importlib
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import results_report
import tyro
from journal import Journal, Line, quartiles

sys.path.insert(0, str(Path(__file__).parents[1]))
from training import Options

from gravac_jax import metrics

WORKLOADS = ("lstm_ptb", "resnet_cifar", "vgg_cifar", "transformer_lm")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to train, how often, how long."""

    data_dir: Path
    """Where the data set's files are."""
    out: Path
    """JSONL; runs that are in it are not made again."""
    workload: Literal[*WORKLOADS] = "lstm_ptb"
    """The training program."""
    preset: Literal["paper", "small"] = "small"
    """Its hyper-parameters."""
    methods: tuple[str, ...] = (
        "dense",
        "fixed10",
        "fixed100",
        "fixed1000",
        "topk10",
        "topk1000",
        "sampled10",
        "sampled1000",
        "redsync10",
        "redsync1000",
        "randomk10",
        "randomk1000",
        "gravac0.7",
        "gravac0.9",
        "accordion",
        "default",
    )
    """Names as in training/methods.py."""
    seeds: int = 1
    """Seeds 0, 1, ... of params and batches."""
    replicas: int = 4
    """Simulated on one device, or one on each of so many."""
    steps: int | None = None
    """Other than the preset's; drops of a learning rate move along."""
    bandwidth_mbit: float = 1000
    """Of the network that controllers choose for, where replicas are simulated."""
    bfloat16: bool = False
    """Compute in bfloat16."""


TIMED = ("dense", "fixed100")
TIMED_STEPS, FIRST_TIMED = 50, 10


def course(factors: list[float]) -> list[list[float]]:
    """Each change of the factor: the step from which on it is another, and it."""
    starts = [i for i, x in enumerate(factors) if i == 0 or x != factors[i - 1]]
    return [[i, round(factors[i], 3)] for i in starts]


def add_up(lines: list[dict[str, float]]) -> Line:
    """What the steps of a run sent, and what its evaluations found."""
    total = lambda name: round(sum(x[f"gravac/{name}"] for x in lines))
    factors = [x["gravac/factor"] for x in lines]
    evaluations = [
        {"step": int(x["step"]) + 1} | {k: round(x[k], 6) for k in x if "held_out" in k}
        for x in lines
        if any("held_out" in name for name in x)
    ]
    # A step that was skipped has no factor: it is counted as one that sent nothing.
    inverse = sum(1 / x for x in factors) / len(factors)
    return {
        "steps": len(lines),
        "wire_bytes": total("wire_bytes"),
        "dense_wire_bytes": total("dense_wire_bytes"),
        "dense_steps": int(lines[-1]["gravac/dense_steps"]),
        "skipped_steps": int(lines[-1]["gravac/skipped_steps"]),
        "mean_factor": round(1 / inverse, 3) if inverse else None,
        "course": course(factors),
        "evaluations": evaluations,
    }


def trained(
    program: Any, config: Any, options: Options
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """What the test data say of a run, and its steps' figures.

    Raises:
      SystemExit: if it was stopped before its end.
    """
    tested, folder = program.train(config, options), options.out
    lines = metrics.read_jsonl(folder / "metrics.jsonl")
    if len(lines) < config.steps:
        raise SystemExit(f"{folder} was stopped at step {len(lines)}; it can go on")
    return tested, lines


def timed(program: Any, args: Args, folder: Path) -> Line:
    """Milliseconds of a step of one replica alone, dense and compressed."""
    config = program.PRESETS[args.preset]
    config = dataclasses.replace(config, steps=TIMED_STEPS, evaluate_every=TIMED_STEPS)
    shutil.rmtree(folder, ignore_errors=True)  # seconds go on from where it was cut
    line: Line = {"phase": "time"}
    for method in TIMED:
        options = Options(
            args.data_dir,
            preset=args.preset,
            method=method,
            replicas=1,
            bfloat16=args.bfloat16,
            out=folder / method,
        )
        _, lines = trained(program, config, options)
        # The last one waits for the evaluation.
        ends = [x["seconds"] for x in lines[FIRST_TIMED:-1]]
        line[f"{method}_ms"] = quartiles(1e3 * np.diff(ends), digits=2)
        jax.clear_caches()
    shutil.rmtree(folder)
    return line


def run(
    program: Any, method: str, seed: int, args: Args, folder: Path, times: Line
) -> Line:
    """Train once, or go on with it."""
    config = program.PRESETS[args.preset]
    steps = config.steps if args.steps is None else args.steps
    config = dataclasses.replace(config, steps=steps)
    compute_ms, selection_ms = results_report.own_ms(times)
    options = Options(
        args.data_dir,
        preset=args.preset,
        method=method,
        replicas=args.replicas,
        seed=seed,
        bfloat16=args.bfloat16,
        out=folder,
        save_every=config.evaluate_every,
        bandwidth_mbit=args.bandwidth_mbit,
        compute_ms=compute_ms,
        selection_ms=selection_ms,
    )
    tested, lines = trained(program, config, options)
    tested = {k: round(x, 6) for k, x in tested.items()}
    # Of the process so far: start one a method to compare. CPUs keep no such figure.
    memory = jax.local_devices()[0].memory_stats() or {}
    peak = memory.get("peak_bytes_in_use")
    found = {"test": tested, **add_up(lines), "peak_device_bytes": peak}
    return {"phase": "train", **found}


def main(args: Args) -> None:
    """Make the runs that are missing, and print the table."""
    program = importlib.import_module(f"{args.workload}.train")
    own = dataclasses.asdict(args)
    for name in ("data_dir", "out", "methods", "seeds"):
        del own[name]
    own["config"] = dataclasses.asdict(program.PRESETS[args.preset])
    journal = Journal(args.out, own)
    runs = args.out.with_suffix(".runs")
    if not any(line["phase"] == "time" for line in journal.lines):
        journal.append(timed(program, args, runs / "time"))
    times = next(line for line in journal.lines if line["phase"] == "time")
    for seed in range(args.seeds):
        for method in args.methods:
            key = {"method": method, "seed": seed}
            if any(key.items() <= line.items() for line in journal.lines):
                continue
            folder = runs / f"{method}-{seed}"
            journal.append({**key, **run(program, method, seed, args, folder, times)})
            shutil.rmtree(folder)
            jax.clear_caches()
    print(results_report.text(args.out))


if __name__ == "__main__":
    main(tyro.cli(Args))
