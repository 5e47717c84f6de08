"""Run the quickstart over several seeds and controllers, paired.

Every line of the record is one run; the runs of a seed share initial params and
batches. Each run has four replicas, on virtual devices.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import jax
import quickstart
from common.journal import Journal, Line
from common.report import show, table
from rich.console import Console

import gravac_jax as gravac

REPLICAS = 4
FIGURES = ("payload_factor", "wire_factor", "network_ms", "step_ms")


@dataclasses.dataclass(frozen=True)
class Args:
    """Which runs to make.

    Args:
      out: The record, JSONL; runs that are in it are not made again.
      seeds: The number of seeds, which are 0, 1, ...
      least_progress: What a step must be worth to Fastest; one run for each.
      epsilons: The smallest gain that GraVAC may send; one run for each.
      factors: Static factors; one run for each.
      steps: Steps of each run.
    """

    out: Path
    seeds: int = 5
    least_progress: tuple[float, ...] = (0.0, 0.9)
    epsilons: tuple[float, ...] = (gravac.GraVAC.epsilon,)
    factors: tuple[float, ...] = ()
    steps: int = quickstart.Config.steps


def controllers(args: Args) -> dict[str, Any]:
    """Return the controller of every run of one seed, by name."""
    return {
        "dense": gravac.Fixed(factor=1),
        **{
            f"Fastest, progress {x:g}": gravac.Fastest(least_progress=x)
            for x in args.least_progress
        },
        **{f"GraVAC, epsilon {x:g}": gravac.GraVAC(epsilon=x) for x in args.epsilons},
        **{f"factor {x:g}": gravac.Fixed(factor=x) for x in args.factors},
    }


def train(name: str, controller: Any, seed: int, steps: int) -> Line:
    """Make one run and return its figures.

    Raises:
      SystemExit: If it was stopped.
    """
    config = quickstart.Config(replicas=REPLICAS, seed=seed, steps=steps)
    run = quickstart.train(name, controller, config, Console())
    if len(run.loss) < steps:
        raise SystemExit(f"{name} was stopped; what is complete is kept")
    seconds, factors = run.figures["network_seconds"], run.figures["factor"]
    return {
        "held_out": round(run.held_out, 5),
        "payload_factor": round(run.smaller("payload"), 3),
        "wire_factor": round(run.smaller("wire"), 3),
        "network_ms": round(1e3 * statistics.mean(seconds), 2),
        "step_ms": round(1e3 * run.step_seconds, 1),
        "factors": [round(x) for x in factors[:: max(1, steps // 24)]],
    }


def rows(lines: list[Line]) -> list[list[str]]:
    """Return medians over the seeds of each run, with their range."""
    dense = {x["seed"]: x["held_out"] for x in lines if x["run"] == "dense"}
    found = []
    for name in dict.fromkeys(x["run"] for x in lines):
        mine = [x for x in lines if x["run"] == name]
        gaps = [100 * (x["held_out"] / dense[x["seed"]] - 1) for x in mine]
        figures = [gaps, *([x[key] for x in mine] for key in FIGURES)]
        spreads = (
            f"{statistics.median(x):.4g} ({min(x):.4g}-{max(x):.4g})" for x in figures
        )
        found.append([name, str(len(mine)), *spreads])
    return found


def main(args: Args) -> None:
    """Make the runs that are missing, and print the table."""
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    journal = Journal(args.out, {"steps": args.steps})
    for seed in range(args.seeds):
        for name, controller in controllers(args).items():
            key = {"seed": seed, "run": name, "controller": repr(controller)}
            if not journal.find(**key):
                journal.append({**key, **train(name, controller, seed, args.steps)})
    title = f"{args.steps} steps: median over n paired seeds (smallest-largest)"
    columns = ("run", "n", "gap to dense, %", *FIGURES)
    show(table(columns, rows(journal.lines), title))
