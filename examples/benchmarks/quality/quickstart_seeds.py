"""Run the quickstart over several seeds, with gradients sent in several ways, paired.

Every line of the record is one run; the runs of a seed share initial params and
batches. Each run has four replicas, on virtual devices.
"""

import dataclasses
import statistics
from pathlib import Path

import jax
import quickstart
from common.journal import Journal, Line
from common.report import markdown
from rich.console import Console
from training.methods import DENSE
from training.sends import parse

REPLICAS = 4
FIGURES = ("payload_factor", "wire_factor", "network_ms", "step_ms")


@dataclasses.dataclass(frozen=True)
class Args:
    """Which runs to make.

    Args:
      out: The record, JSONL; runs that are in it are not made again.
      sends: What runs send besides dense gradients; one run for each.
      seeds: The number of seeds, which are 0, 1, ...
      steps: Steps of each run.
    """

    out: Path
    sends: tuple[str, ...] = ("Fastest()", "Fastest(least_progress=0.9)", "GraVAC()")
    seeds: int = 5
    steps: int = quickstart.Config.steps


def train(name: str, seed: int, steps: int) -> Line:
    """Make one run and return its figures.

    Raises:
      SystemExit: If it was stopped.
    """
    config = quickstart.Config(replicas=REPLICAS, seed=seed, steps=steps)
    send = parse("Dense()" if name == DENSE else name)
    run = quickstart.train(name, send, config, Console())
    if len(run.loss) < steps:
        raise SystemExit(f"{name} was stopped; what is complete is kept")
    rungs = run.figures["rung"]
    return {
        "held_out": round(run.held_out, 5),
        "payload_factor": round(run.smaller("payload"), 3),
        "wire_factor": round(run.smaller("wire"), 3),
        "network_ms": round(1e3 * statistics.mean(run.figures["network_seconds"]), 2),
        "step_ms": round(1e3 * run.step_seconds, 1),
        "rungs": [int(x) for x in rungs[:: max(1, steps // 24)]],
    }


def rows(lines: list[Line]) -> list[list[str]]:
    """Return medians over the seeds, and their range; the heading comes first."""
    dense = {x["seed"]: x["held_out"] for x in lines if x["run"] == DENSE}
    found = [["run", "n", "gap to dense, %", *FIGURES]]
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
        for name in (DENSE, *args.sends):
            make = lambda name=name, seed=seed: train(name, seed, args.steps)
            journal.once(make, seed=seed, run=name)
    print(f"{args.steps} steps: median over n paired seeds (smallest-largest)\n")
    print(markdown(rows(journal.lines)))
