"""The quickstart over several seeds and settings, paired, as a record.

Every line of the JSONL is one run; seeds share initial params and batches across runs.
A run that is already in the file is not made again.

    python examples/benchmarks/quickstart_seeds.py --seeds 5 --out FILE.jsonl
"""

import dataclasses
import importlib.metadata
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

import gravac_jax as gravac

sys.path.insert(0, str(Path(__file__).parents[1]))
import quickstart

REPLICAS = 4


@dataclasses.dataclass(frozen=True)
class Args:
    """Which runs to make."""

    out: Path
    """JSONL, appended to."""
    seeds: int = 5
    """Seeds 0, 1, ..."""
    least_progress: tuple[float, ...] = (0.0, 0.9)
    """What a step must be worth to Fastest; one run for each."""
    policies: tuple[Literal["geometric", "exponential"], ...] = ("geometric",)
    """Scaling policies from 10 to 1000; a run of GraVAC for each and each epsilon."""
    epsilons: tuple[float, ...] = (gravac.GraVAC.epsilon,)
    """Smallest gains that may be sent."""
    factors: tuple[float, ...] = ()
    """One static run for each."""
    steps: int = quickstart.Config.steps
    """Steps of each run."""


def versions() -> dict[str, str]:
    """What the figures depend on."""
    names = ("jax", "optax", "flax", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return found | {"python": platform.python_version(), "machine": machine()}


def machine() -> str:
    """Processor and cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{len(names) or '?'} cores, {name}; {jax.devices()[0].platform}"


def controllers(args: Args) -> dict[str, Any]:
    """Every run of one seed, by name."""
    runs: dict[str, Any] = {"dense": gravac.Fixed(factor=1)}
    for x in args.least_progress:
        runs[f"Fastest, progress {x:g}"] = gravac.Fastest(least_progress=x)
    for policy in args.policies:
        ladder = getattr(gravac, policy)(10, 1000)
        for x in args.epsilons:
            controller = gravac.GraVAC(epsilon=x, ladder=ladder)
            runs[f"{policy}, epsilon {x:g}"] = controller
    return runs | {f"factor {x:g}": gravac.Fixed(factor=x) for x in args.factors}


def make_runs(args: Args, console: Console) -> list[dict[str, Any]]:
    """Make what is missing in the file, and return all of it."""
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    records = [json.loads(line) for line in lines]
    done = {(r["seed"], r.get("controller"), r["steps"]) for r in records}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for name, controller in controllers(args).items():
            if (seed, repr(controller), args.steps) in done:
                continue
            config = quickstart.Config(replicas=REPLICAS, seed=seed, steps=args.steps)
            run = quickstart.train(name, controller, config, console)
            if len(run.loss) < args.steps:
                raise SystemExit(f"{name} was stopped; what is complete is kept")
            factors, seconds = run.figures["factor"], run.figures["network_seconds"]
            record = {
                "seed": seed,
                "run": name,
                "controller": repr(controller),
                "steps": args.steps,
                "held_out": round(run.held_out, 5),
                "payload_factor": round(run.smaller("payload"), 3),
                "wire_factor": round(run.smaller("wire"), 3),
                "network_ms": round(1e3 * statistics.mean(seconds), 2),
                "step_ms": round(1e3 * run.step_seconds, 1),
                "factors": [round(x) for x in factors[:: max(1, args.steps // 24)]],
                "gravac_jax": gravac.__version__,
                **versions(),
            }
            records.append(record)
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            console.print(f"seed {seed}, {name}: {run.held_out:.4f}")
    return records


def summary(records: list[dict[str, Any]], steps: int) -> Table:
    """Medians over the seeds of all runs of this length, with the range."""
    records = [r for r in records if r["steps"] == steps]
    dense = {r["seed"]: r for r in records if r["run"] == "dense"}
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        title=f"{steps} steps: median over n paired seeds (smallest-largest)",
    )
    table.add_column("run", no_wrap=True)
    titles = "n", "gap to dense, %", "payload factor", "wire factor", "network ms"
    for title in (*titles, "ms / step"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in dict.fromkeys(r["run"] for r in records):
        rows = [r for r in records if r["run"] == name]
        gaps = [100 * (r["held_out"] / dense[r["seed"]]["held_out"] - 1) for r in rows]
        table.add_row(
            name,
            str(len(rows)),
            spread(gaps, 2),
            spread([r["payload_factor"] for r in rows], 1),
            spread([r["wire_factor"] for r in rows], 1),
            spread([r["network_ms"] for r in rows], 1),
            spread([r["step_ms"] for r in rows], 0),
        )
    return table


def spread(figures: list[float], digits: int) -> str:
    """Median (smallest-largest)."""
    middle, low, high = statistics.median(figures), min(figures), max(figures)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def main(args: Args) -> None:
    """Make the runs and print the table."""
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    console = Console()
    console.print(summary(make_runs(args, console), args.steps))


if __name__ == "__main__":
    main(tyro.cli(Args))
