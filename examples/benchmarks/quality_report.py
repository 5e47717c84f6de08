"""Tables and figures from the records of quality.py.

    python examples/benchmarks/quality_report.py FILE.jsonl ... --figures FOLDER

Several files may be parts of one record: same configuration, other methods or seeds.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tyro
from journal import Line, read
from quality_results import (
    Result,
    by_method,
    gap,
    number,
    paired,
    results,
    tuned,
    tuning,
    upper_bound,
)
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MIN_TOUCHES = 20  # below, a run says nothing about its factor: most entries never moved

AXES = {
    "wire_bytes": "megabytes sent by a replica",
    "payload_bytes": "megabytes of payload of a replica",
    "step": "steps",
}
STYLES = [("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (1, 3)), "v")]


@dataclasses.dataclass(frozen=True)
class Args:
    """What to read, and where to draw."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Records of quality.py."""
    figures: Path | None = None
    """Folder for the figures; none are drawn without it."""


def new_table(first: str, *others: str) -> Table:
    """An empty table with one left column."""
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    for other in others:
        table.add_column(other, justify="right", no_wrap=True)
    return table


def tuning_table(lines: list[Line]) -> Group:
    """What every learning rate gave; a best one at the edge is marked."""
    table = tuning(lines)
    tried = sorted({rate for losses in table.values() for rate in losses})
    best = tuned(lines)
    out = new_table("method", *(f"{x:g}" for x in tried))
    for name, losses in table.items():
        marks = {best[name]: "!" if best[name] in (min(tried), max(tried)) else "*"}
        cells = [f"{losses[x]:.4f}{marks.get(x, ' ')}" for x in tried if x in losses]
        out.add_row(name, *cells)
    note = "* chosen; ! chosen, at the edge of what was tried"
    return Group("Validation loss by learning rate", out, note, "")


def spread(figures: list[float]) -> str:
    """Mean (smallest-largest)."""
    mean = math.fsum(figures) / len(figures)
    return f"{mean:.2f} ({min(figures):.2f}-{max(figures):.2f})"


def gap_table(runs: list[Result]) -> Group:
    """What each method loses against dense, and what it saves."""
    out = new_table(
        *("method", "seeds", "loss", "gap (range)", "95%\nbound"),
        *("payload\nfactor", "wire\nfactor", "touches"),
    )
    for name, own in by_method(runs).items():
        gaps = [100 * gap(x, dense) for x, dense in paired(own, runs)]
        is_compared = gaps and name != "dense"
        touches = statistics.median(x.final["touches"] for x in own)
        out.add_row(
            name,
            str(len(own)),
            f"{statistics.median(x.loss for x in own):.4f}",
            spread(gaps) if is_compared else "",
            f"{upper_bound(gaps):.2f}" if is_compared else "",
            f"{statistics.median(x.payload_factor for x in own):.1f}",
            f"{statistics.median(x.wire_factor for x in own):.1f}",
            f"{touches:.0f}{'!' if touches < MIN_TOUCHES else ' '}",
        )
    note = (
        "loss: median. gap: mean (range), when dense ends; the bound is one-sided. "
        f"touches: steps x N / factor; ! below {MIN_TOUCHES}, where a run says nothing "
        "of its factor"
    )
    title = "Held-out loss at the end, and its gap to dense of the same seed, %"
    return Group(title, out, note, "")


def target_table(runs: list[Result]) -> Group:
    """Steps and bytes until a run is as good as dense is at 80% of its steps."""
    out = new_table("method", "reached", "steps", "megabytes sent")
    reached: dict[str, list[Line | None]] = {}
    ends: dict[str, Line] = {}
    for x, dense in paired(runs, runs):
        at = 0.8 * dense.final["step"]
        target = next(y["loss"] for y in dense.lines if y["step"] >= at)
        reached.setdefault(x.method, []).append(x.first_at(number(target)))
        ends[x.method] = x.final
    for name, found in reached.items():
        out.add_row(
            name,
            f"{sum(x is not None for x in found)} of {len(found)}",
            censored([x and x["step"] for x in found], ends[name]["step"], 0),
            censored(
                [x and x["wire_bytes"] / 1e6 for x in found],
                ends[name]["wire_bytes"] / 1e6,
                1,
            ),
        )
    note = (
        "medians, at the first evaluation that is as good; a run that never is counts "
        "as later than all others, > as later than its end"
    )
    return Group("To the loss of dense at 80% of its steps", out, note, "")


def censored(figures: list[float | None], end: float, digits: int) -> str:
    """The median, where None is larger than any; `>end` if that is a None."""
    ordered = sorted(math.inf if x is None else x for x in figures)
    middle = statistics.median_high(ordered)
    return f"{middle:.{digits}f}" if middle < math.inf else f">{end:.{digits}f}"


def draw(runs: list[Result], axis: str, unit: str, path: Path) -> None:
    """Held-out loss against `axis`: mean over seeds, and the range as a band."""
    fig, ax = plt.subplots(figsize=(8, 5), layout="constrained")
    for (name, own), (line, marker) in zip(
        by_method(runs).items(), STYLES * 3, strict=False
    ):
        length = min(len(x.lines) for x in own)
        losses = np.array([[number(y["loss"]) for y in x.lines[:length]] for x in own])
        place = np.array([[y[axis] for y in x.lines[:length]] for x in own]).mean(0)
        place = place / 1e6 if axis.endswith("bytes") else place
        (drawn,) = ax.plot(
            place,
            losses.mean(0),
            linestyle=line,
            marker=marker,
            markersize=3,
            label=name,
        )
        ax.fill_between(
            place, losses.min(0), losses.max(0), alpha=0.2, color=drawn.get_color()
        )
    ax.set(xlabel=AXES[axis], ylabel=f"held-out loss, {unit}")
    if axis.endswith("bytes"):
        ax.set(xscale="log")
    ax.grid(alpha=0.3)
    ax.legend(title=f"{max(len(x) for x in by_method(runs).values())} seeds")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def read_all(files: Iterable[Path]) -> tuple[Line, list[Line]]:
    """The configuration and all lines.

    Raises:
      SystemExit: if the files are of different configurations.
    """
    heads, parts = zip(*(read(path) for path in files), strict=True)
    for path, head in zip(files, heads, strict=True):
        if head["configuration"] != heads[0]["configuration"]:
            raise SystemExit(f"{path} is of another configuration than the first file")
    return heads[0]["configuration"], [line for part in parts for line in part]


def show(files: Iterable[Path], console: Console, figures: Path | None = None) -> None:
    """Print the tables, draw the figures."""
    files = list(files)
    configuration, lines = read_all(files)
    if not lines:
        raise SystemExit("there is nothing in the record yet")
    console.print(
        "{task} ({preset}), {replicas} replicas, {steps} steps".format(**configuration)
    )
    steps = configuration["steps"]
    tuned_lines = [x for x in lines if x["phase"] == "tune" and x["step"] == steps]
    if tuned_lines:
        console.print(tuning_table(tuned_lines))
    begun = results(lines)
    runs = [x for x in begun if x.final["step"] >= steps]
    if unfinished := len(begun) - len(runs):
        console.print(f"{unfinished} runs that have not ended are left out")
    if not runs:
        return
    console.print(gap_table(runs))
    console.print(target_table(runs))
    if figures is not None:
        for axis in AXES:
            path = figures / f"loss_against_{axis}.png"
            draw(runs, axis, configuration["unit"], path)
            console.print(f"{path}")


def main(args: Args) -> Any:
    """Read, print, draw."""
    show(args.files, Console(), args.figures)


if __name__ == "__main__":
    main(tyro.cli(Args))
