"""Tables from the lines of evidence.py: what a step was worth, and what predicted it.

python examples/benchmarks/evidence_report.py FILE.jsonl...
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from journal import Line, read

Run = list[Line]


@dataclasses.dataclass(frozen=True)
class Args:
    """Which records."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Of evidence.py."""


def progress(run: Run, dense: Run) -> float:
    """How many dense steps a step was worth, over the second half of a run.

    The step at which the dense run had reached the loss, over the step at which this
    run did; both losses are the best so far.
    """
    best = lambda lines: np.minimum.accumulate([x["loss"] for x in lines])
    steps = np.array([x["step"] for x in dense])
    reached = np.interp(-best(run), -best(dense), steps)
    worth = reached / [x["step"] for x in run]
    return float(np.mean(worth[len(worth) // 2 :]))


def predictors(compressed: float) -> dict[str, Callable[[Line], float]]:
    """What a controller might look at, by name; each from one line.

    Args:
      compressed: the share of the gradient's energy that is in compressed leaves.
    """
    sent = lambda x: 1 - compressed * (1 - x["raw_gain"])
    return {
        "norm, whole gradient": lambda x: np.sqrt(sent(x)),
        "norm, compressed leaves": lambda x: np.sqrt(x["raw_gain"]),
        "energy, compressed leaves": lambda x: x["raw_gain"],
        "gain, error-fed": lambda x: x["gain"],
        "residual to gradient": lambda x: x["residual_energy"] / x["gradient_energy"],
        "cosine to dense, a step": lambda x: (
            x["sent_followed"] / np.sqrt(x["sent_energy"] * x["followed_energy"])
        ),
        "cosine to dense, a window": lambda x: (
            x["window_inner"] / np.sqrt(x["window_sent"] * x["window_dense"])
        ),
        "delivered in a window": lambda x: np.sqrt(
            x["window_sent"] / x["window_dense"]
        ),
    }


def table(path: Path) -> Table:
    """The runs of one file; means over the second half of each."""
    head, lines = read(path)
    runs: dict[str, Run] = {}
    for line in lines:
        runs.setdefault(line["method"], []).append(line)
    last = head["configuration"]["steps"]
    runs = {name: run for name, run in runs.items() if run[-1]["step"] == last}
    dense = runs["dense"]
    half = lambda run: run[len(run) // 2 :]
    share = np.mean([x["gradient_energy"] / x["whole_energy"] for x in half(dense)])
    columns = predictors(float(share))
    title = f"{head['configuration']['task']}: compressed leaves have {share:.2f}"
    made = Table("method", "loss", "progress", *columns, title=title)
    for name, run in runs.items():
        means = [np.mean([f(x) for x in half(run)]) for f in columns.values()]
        figures = [run[-1]["loss"], progress(run, dense), *means]
        made.add_row(name, *(f"{x:.3g}" for x in figures))
    return made


def main(args: Args) -> None:
    """Print a table for each file."""
    for path in args.files:
        Console(width=140).print(table(path))


if __name__ == "__main__":
    main(tyro.cli(Args))
