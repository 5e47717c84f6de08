"""Print tables and draw figures from records of `quality`.

    python examples/benchmarks quality.report FILE.jsonl ... --figures FOLDER

Several files may be parts of one record, with other methods, seeds or learning rates to
try, and otherwise the same configuration.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from common.figures import legend_below, picture
from common.journal import Line, read
from common.report import markdown, show, table
from common.statistics import upper_bound
from training.methods import in_words

from quality.results import (
    Result,
    by_method,
    edges,
    ended,
    gaps,
    number,
    results,
    tuned,
    tuning,
)

MIN_TOUCHES = 20  # below, a run says nothing about its factor: most entries never moved

AXES = {
    "wire_bytes": "megabytes sent by a replica",
    "step": "steps",
}
STYLES = [("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (1, 3)), "v")]


@dataclasses.dataclass(frozen=True)
class Args:
    """What to read, and where to draw.

    Args:
      files: Records of `quality`.
      figures: The folder for the figures; none are drawn without it.
    """

    files: tyro.conf.Positional[tuple[Path, ...]]
    figures: Path | None = None


def tuning_table(lines: list[Line]) -> list[Any]:
    """Return what every learning rate gave; a best one at the edge is marked."""
    losses_of = tuning(lines)
    tried = sorted({rate for losses in losses_of.values() for rate in losses})
    best, outermost, rows = tuned(lines), edges(lines), []
    for name, losses in losses_of.items():
        mark = "!" if best[name] in outermost else "*"
        marks = {best[name]: mark}
        cells = [f"{losses[x]:.4f}{marks.get(x, ' ')}" for x in tried if x in losses]
        rows.append([name, *cells])
    made = table(("method", *(f"{x:g}" for x in tried)), rows)
    note = "* chosen; ! chosen, at the edge of what was tried\n"
    return ["Validation loss by learning rate", made, note]


def spread(figures: list[float]) -> str:
    """Return "mean (smallest-largest)"."""
    mean = math.fsum(figures) / len(figures)
    return f"{mean:.2f} ({min(figures):.2f}-{max(figures):.2f})"


def bound(found: Sequence[float], form: str) -> str:
    """Return the bound of paired gaps; nothing where a single seed has none."""
    most = upper_bound(found)
    return "" if math.isnan(most) else form.format(most)


def gap_table(runs: list[Result]) -> list[Any]:
    """Return what each method loses against dense, and what it saves."""
    columns = ("method", "seeds", "loss", "gap (range)", "95%\nbound")
    columns += ("payload\nfactor", "wire\nfactor", "touches")
    rows = []
    for name, own in by_method(runs).items():
        found = gaps(own, runs)
        is_compared = found and name != "dense"
        touches = statistics.median(x.final["touches"] for x in own)
        rows.append(
            [
                name,
                str(len(own)),
                f"{statistics.median(x.loss for x in own):.4f}",
                spread(found) if is_compared else "",
                bound(found, "{:.2f}") if is_compared else "",
                f"{statistics.median(x.payload_factor for x in own):.1f}",
                f"{statistics.median(x.wire_factor for x in own):.1f}",
                f"{touches:.0f}{'!' if touches < MIN_TOUCHES else ' '}",
            ]
        )
    note = (
        "loss: median. gap: mean (range); the bound is one-sided. "
        f"touches: steps x N / factor; ! below {MIN_TOUCHES}, where a run says nothing "
        "of its factor\n"
    )
    title = "Held-out loss at the end, and its gap to dense of the same seed, %"
    return [title, table(columns, rows), note]


def draw(runs: list[Result], axis: str, unit: str, path: Path) -> None:
    """Draw held-out loss against `axis`: mean over seeds, and the range as a band."""
    with picture(path, (8, 5.5)) as (figure, axes):
        ax = axes[0, 0]
        for (name, own), (line, marker) in zip(
            by_method(runs).items(), STYLES * 3, strict=False
        ):
            length = min(len(x.lines) for x in own)
            at = lambda key, own=own, length=length: np.array(
                [[number(y[key]) for y in x.lines[:length]] for x in own]
            )
            losses, place = at("loss"), at(axis).mean(0)
            place = place / 1e6 if axis.endswith("bytes") else place
            style = {"linestyle": line, "marker": marker, "markersize": 3}
            (drawn,) = ax.plot(place, losses.mean(0), label=in_words(name), **style)
            color = drawn.get_color()
            ax.fill_between(place, losses.min(0), losses.max(0), alpha=0.2, color=color)
        ax.set(xlabel=AXES[axis], ylabel=f"held-out loss, {unit}")
        if axis.endswith("bytes"):
            ax.set(xscale="log")
        legend_below(figure, title=_seeds_in_words(by_method(runs).values()))


def draw_gaps(files: Iterable[Path], path: Path) -> None:
    """Draw what methods are above dense over steps: means of paired seeds."""
    methods = by_method(results(read_all(files)[1]))
    dense = methods["dense"]
    until = lambda runs, end: [
        dataclasses.replace(x, lines=x.lines[:end]) for x in runs
    ]
    with picture(path, (8, 5)) as (figure, axes):
        axis = axes[0, 0]
        for (name, own), (line, marker) in zip(
            methods.items(), STYLES * 3, strict=False
        ):
            length = min(len(x.lines) for x in own + dense)
            above = [
                statistics.fmean(gaps(until(own, i + 1), until(dense, i + 1)))
                for i in range(length)
            ]
            steps = [x["step"] for x in own[0].lines[:length]]
            style = {"linestyle": line, "marker": marker, "markersize": 4}
            axis.plot(steps, above, label=in_words(name), **style)
        axis.set(xlabel="steps", ylabel="held-out loss above dense, %")
        legend_below(figure, title=_seeds_in_words(methods.values(), "mean"))


def text(files: Iterable[Path], at: int | None = None) -> str:
    """Return what each method loses against dense, in Markdown.

    Args:
      files: Parts of one record.
      at: The step after which runs are compared. Default: their last one.
    """
    configuration, lines = read_all(files)
    steps, outermost = at or configuration["steps"], edges(lines)
    runs = ended(results(x for x in lines if x["step"] <= steps), steps)
    rows = [["", "rate", "fewer bytes", "loss", "above dense: mean (each)", "bound"]]
    for name, own in by_method(runs).items():
        found, rate = gaps(own, runs), own[0].learning_rate
        mean, each = statistics.fmean(found), ", ".join(f"{x:+.1f}" for x in found)
        rows.append(
            [
                in_words(name),
                f"{rate:g}{' (edge)' if rate in outermost else ''}",
                f"{statistics.fmean(x.wire_factor for x in own):.1f}",
                f"{statistics.fmean(x.loss for x in own):.4f}",
                "" if name == "dense" else f"{mean:+.1f}% ({each})",
                "" if name == "dense" else bound(found, "{:.1f}%"),
            ]
        )
    dense = [x.lines for x in runs if x.method == "dense"]
    before = [[y for y in x if y["step"] <= 0.75 * steps][-1] for x in dense]
    pairs = zip(dense, before, strict=True)
    falls = [100 * (1 - x[-1]["loss"] / y["loss"]) for x, y in pairs]
    until = f", after {at} of them" if at else ""
    notes = (
        f"{_heading(configuration)}{until}. Dense steps fall by {min(falls):.1f}% to "
        f"{max(falls):.1f}% in the last {steps - before[0]['step']}."
    )
    return f"{markdown(rows)}\n\n{notes}"


def _heading(configuration: Line) -> str:
    return "{task}, {replicas} replicas, {steps} steps".format(**configuration)


def _seeds_in_words(
    methods: Iterable[list[Result]], drawn: str = "mean and range"
) -> str:
    counts = {len(x) for x in methods}
    if counts == {1}:
        return "one seed"
    up_to = "up to " if len(counts) > 1 else ""
    return f"{drawn} of {up_to}{max(counts)} seeds"


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


def tables(files: Iterable[Path], figures: Path | None = None) -> list[Any]:
    """Return all tables of a record, with their notes, and draw the figures."""
    configuration, lines = read_all(files)
    if not lines:
        raise SystemExit("there is nothing in the record yet")
    found: list[Any] = [_heading(configuration)]
    steps = configuration["steps"]
    tuned_lines = [x for x in lines if x["phase"] == "tune" and x["step"] == steps]
    if tuned_lines:
        found += tuning_table(tuned_lines)
    begun = results(lines)
    runs = ended(begun, steps)
    if unfinished := len(begun) - len(runs):
        found.append(f"{unfinished} runs that have not ended are left out")
    if not runs:
        return found
    found += gap_table(runs)
    if figures is not None:
        for axis in AXES:
            path = figures / f"loss_against_{axis}.png"
            draw(runs, axis, configuration["unit"], path)
            found.append(f"{path}")
    return found


def main(args: Args) -> None:
    """Read, print, draw."""
    show(*tables(args.files, args.figures))
