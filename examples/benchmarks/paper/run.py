"""Train the paper's workloads, method by method: quality, bytes, factors.

Each run is one of a training program as it stands, from the same initial params and
with the same batches. All runs are in one process, each in a folder of its own: one
that is cut off goes on from its last checkpoint, and becomes a line of the record when
it is done. First of all, one replica is timed alone, dense and compressed: where
replicas are simulated, controllers are told these seconds of computation and selection.
Nothing else should run meanwhile.
"""

import dataclasses
import importlib
import shutil
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from common.journal import Journal, Line, configuration
from common.statistics import quartiles
from training import Options

from gravac_jax import metrics
from paper import report

Workload = Literal["lstm_ptb", "resnet_cifar", "vgg_cifar", "transformer_lm"]
COMPRESSORS = ("fixed", "topk", "sampled", "redsync", "randomk")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to train, how often, how long.

    Args:
      data_dir: The folder of the data set's files.
      out: The record, JSONL; runs that are in it are not made again.
      workload: The training program.
      preset: The program's hyper-parameters.
      methods: Names as in training/methods.py.
      seeds: The number of seeds of params and batches, which are 0, 1, ...
      replicas: The number of replicas, simulated on one device, or one on each of so
        many devices.
      steps: Steps other than the preset's; drops of a learning rate move along.
      bandwidth_mbit: The bandwidth of the network that controllers choose for, where
        replicas are simulated.
      bfloat16: Compute in bfloat16.
    """

    data_dir: Path
    out: Path
    workload: Workload = "lstm_ptb"
    preset: Literal["paper", "small"] = "small"
    methods: tuple[str, ...] = (
        "dense",
        *(f"{family}{factor}" for family in COMPRESSORS for factor in (10, 1000)),
        *("fixed100", "gravac0.7", "gravac0.9", "accordion", "default"),
    )
    seeds: int = 1
    replicas: int = 4
    steps: int | None = None
    bandwidth_mbit: float = 1000
    bfloat16: bool = False


TIMED = ("dense", "fixed100")
TIMED_STEPS, FIRST_TIMED = 50, 10


def course(factors: list[float]) -> list[list[float]]:
    """Return each change of the factor: its step, and the new factor."""
    starts = [i for i, x in enumerate(factors) if i == 0 or x != factors[i - 1]]
    return [[i, round(factors[i], 3)] for i in starts]


def add_up(lines: list[dict[str, float]]) -> Line:
    """Return what the steps of a run sent, and what its evaluations found."""
    total = lambda name: round(sum(x[f"gravac/{name}"] for x in lines))
    factors = [x["gravac/factor"] for x in lines]
    evaluations = [
        {"step": int(x["step"]) + 1} | {k: round(x[k], 6) for k in x if "held_out" in k}
        for x in lines
        if any("held_out" in name for name in x)
    ]
    # A local step has an infinite factor: it is counted as one that sent nothing.
    inverse = sum(1 / x for x in factors) / len(factors)
    return {
        "steps": len(lines),
        "wire_bytes": total("wire_bytes"),
        "dense_wire_bytes": total("dense_wire_bytes"),
        "dense_steps": int(lines[-1]["gravac/dense_steps"]),
        "bad_steps": int(lines[-1]["gravac/bad_steps"]),
        "mean_factor": round(1 / inverse, 3) if inverse else None,
        "course": course(factors),
        "evaluations": evaluations,
    }


class Program:
    """One training program with the hyper-parameters and options of the record."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self._module = importlib.import_module(f"{args.workload}.train")
        self.config = self._module.PRESETS[args.preset]

    def train(
        self, method: str, folder: Path, changes: Line, **options: Any
    ) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Train once, or go on with it.

        Args:
          method: The method's name.
          folder: The folder of the run.
          changes: What is changed in the preset.
          options: Further options of the program.

        Returns:
          The figures on the test data, and those of every step.

        Raises:
          SystemExit: If the run was stopped before its end.
        """
        config = dataclasses.replace(self.config, **changes)
        given = {"preset": self.args.preset, "bfloat16": self.args.bfloat16}
        chosen = Options(
            self.args.data_dir, method=method, out=folder, **given, **options
        )
        tested = self._module.train(config, chosen)
        lines = metrics.read_jsonl(folder / "metrics.jsonl")
        if len(lines) < config.steps:
            raise SystemExit(f"{folder} was stopped at step {len(lines)}; it can go on")
        jax.clear_caches()
        return tested, lines

    def time(self, folder: Path) -> Line:
        """Return milliseconds of a step of one replica alone, dense and compressed."""
        shutil.rmtree(folder, ignore_errors=True)  # seconds go on from where it was cut
        line: Line = {}
        changes = {"steps": TIMED_STEPS, "evaluate_every": TIMED_STEPS}
        for method in TIMED:
            _, lines = self.train(method, folder / method, changes, replicas=1)
            # The last step waits for the evaluation.
            ends = [x["seconds"] for x in lines[FIRST_TIMED:-1]]
            line[f"{method}_ms"] = quartiles(1e3 * np.diff(ends), digits=2)
        shutil.rmtree(folder)
        return line

    def run(self, method: str, seed: int, folder: Path, times: Line) -> Line:
        """Make one run of the record and return its line."""
        args = self.args
        compute_ms, selection_ms = report.own_ms(times)
        tested, lines = self.train(
            method,
            folder,
            {} if args.steps is None else {"steps": args.steps},
            replicas=args.replicas,
            seed=seed,
            save_every=self.config.evaluate_every,
            bandwidth_mbit=args.bandwidth_mbit,
            compute_ms=compute_ms,
            selection_ms=selection_ms,
        )
        shutil.rmtree(folder)
        # This is the peak of the process so far: to compare methods, start a process
        # for each. CPUs keep no such figure.
        memory = jax.local_devices()[0].memory_stats() or {}
        return {
            "phase": "train",
            "test": {k: round(x, 6) for k, x in tested.items()},
            **add_up(lines),
            "peak_device_bytes": memory.get("peak_bytes_in_use"),
        }


def main(args: Args) -> None:
    """Make the runs that are missing, and print the table."""
    program = Program(args)
    own = configuration(args, "methods", "seeds")
    journal = Journal(args.out, own | {"config": dataclasses.asdict(program.config)})
    runs = args.out.with_suffix(".runs")
    times = journal.once(lambda: program.time(runs / "time"), phase="time")
    for seed in range(args.seeds):
        for method in args.methods:
            folder = runs / f"{method}-{seed}"
            key = {"method": method, "seed": seed}
            if not journal.find(**key):
                journal.append({**key, **program.run(method, seed, folder, times)})
    print(report.text(args.out))
