"""Print the tables of a record of `quality`.

    python examples/benchmarks quality.report FILE.jsonl ...

Several files may be parts of one record, with other methods, seeds or learning rates to
try, and otherwise the same configuration.
"""

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path

import tyro
from common.journal import Line, read
from common.report import markdown
from common.statistics import upper_bound

from quality.results import (
    Result,
    by_method,
    ended,
    gaps,
    paired,
    results,
    tuned,
    tuning,
)


@dataclasses.dataclass(frozen=True)
class Args:
    """What to read.

    Args:
      files: Records of `quality`.
      at: The step after which runs are compared. Default: their last one.
    """

    files: tyro.conf.Positional[tuple[Path, ...]]
    at: int | None = None


def tuning_rows(lines: list[Line]) -> list[list[str]]:
    """Return what every learning rate gave; the heading is the first row."""
    losses_of, best = tuning(lines), tuned(lines)
    tried = sorted({rate for losses in losses_of.values() for rate in losses})
    rows = [["validation loss at the rate", *(f"{x:g}" for x in tried)]]
    for name, losses in losses_of.items():
        is_edge = best[name] in (min(losses), max(losses))
        mark = {best[name]: " (edge)" if is_edge else " (taken)"}
        said = lambda x, losses=losses, mark=mark: f"{losses[x]:.4f}{mark.get(x, '')}"
        rows.append([name, *(said(x) if x in losses else "" for x in tried)])
    return rows


def compared(
    name: str, found: list[float], sign: str = "", unit: str = ""
) -> list[str]:
    """Return the mean of gaps to dense with each of them, and their bound.

    Args:
      name: The method; of "dense" nothing is said.
      found: The gaps, one a seed.
      sign: "+" to show the sign of those above 0, too.
      unit: What follows the mean and the bound.
    """
    if name == "dense" or not found:
        return ["", ""]
    each = ", ".join(f"{x:{sign}.1f}" for x in found)
    bound = f"{upper_bound(found):.1f}{unit}" if len(found) > 1 else ""
    return [f"{statistics.fmean(found):{sign}.1f}{unit} ({each})", bound]


def accuracy_rows(runs: list[Result]) -> list[list[str]]:
    """Return what each method loses in points of accuracy; the heading is first."""
    rows = [["method", "accuracy, %", "points below dense: mean (each)", "bound"]]
    for name, own in by_method(runs).items():
        below = [y.accuracy - x.accuracy for x, y in paired(own, runs)]
        accuracy = f"{statistics.fmean(x.accuracy for x in own):.1f}"
        rows.append([name, accuracy, *compared(name, below)])
    return rows


def gap_rows(runs: list[Result]) -> list[list[str]]:
    """Return what each method loses against dense; the heading is the first row."""
    rows = [["method", "rate", "fewer bytes", "loss", "above dense: mean (each)"]]
    rows[0].append("bound")
    for name, own in by_method(runs).items():
        rows.append(
            [
                name,
                f"{own[0].learning_rate:g}",
                f"{statistics.fmean(x.wire_factor for x in own):.1f}",
                f"{statistics.fmean(x.loss for x in own):.4f}",
                *compared(name, gaps(own, runs), sign="+", unit="%"),
            ]
        )
    return rows


def text(files: Iterable[Path], at: int | None = None) -> str:
    """Return all tables, in Markdown.

    Args:
      files: Parts of one record.
      at: The step after which runs are compared. Default: their last one.

    Raises:
      SystemExit: If the files are of different configurations, or hold nothing.
    """
    configuration, lines = read_all(files)
    if not lines:
        raise SystemExit("there is nothing in the record yet")
    steps = at or configuration["steps"]
    parts = ["{task}, {replicas} replicas, {steps} steps".format(**configuration)]
    ends = [x for x in lines if x["step"] == configuration["steps"]]
    if tuning(ends):
        parts.append(markdown(tuning_rows(ends)))
    begun = results(x for x in lines if x["step"] <= steps)
    runs = ended(begun, steps)
    if unfinished := len(begun) - len(runs):
        parts.append(f"{unfinished} runs that have not ended are left out.")
    if runs:
        parts.append(markdown(gap_rows(runs)))
    if any("accuracy" in x.final for x in runs):
        parts.append(markdown(accuracy_rows(runs)))
    return "\n\n".join(parts)


def read_all(files: Iterable[Path]) -> tuple[Line, list[Line]]:
    """Return the configuration, without the learning rates to try, and all lines.

    Raises:
      SystemExit: If the files are of different configurations.
    """
    paths = list(files)
    heads, parts = zip(*map(read, paths), strict=True)
    own = [
        {k: x for k, x in head["configuration"].items() if k != "multiples"}
        for head in heads
    ]
    for path, configuration in zip(paths, own, strict=True):
        if configuration != own[0]:
            raise SystemExit(f"{path} is of another configuration than the first file")
    return own[0], [line for part in parts for line in part]


def main(args: Args) -> None:
    """Read and print."""
    print(text(args.files, args.at))
