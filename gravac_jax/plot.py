"""Draws what runs wrote with `metrics.JsonlWriter`, over one another.

    python -m gravac_jax plot runs/adaptive.jsonl runs/dense.jsonl --out runs/both.png

Loss, factor, the gain of every rung, bytes beside those of dense steps, and how long
steps took; what no run has is left out. Lines differ in style and marker and are named
where they end, and light is more gain, so that it can be read in gray.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gravac_jax._metrics.runs import Run as Run
from gravac_jax._metrics.runs import read_runs

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator
except ImportError as error:
    raise ImportError(
        f"gravac_jax.plot needs {error.name}: pip install 'gravac_jax[tools]'"
    ) from error

__all__ = ["Run", "draw", "main"]

_PROGRAM = "python -m gravac_jax plot"
_POINTS = 600  # of a line: more cannot be seen
_SMOOTH = 30  # a line's figures are those of a thirtieth of its points; arbitrary
_COLUMNS = 300  # of a heat map
_NAME = 20  # letters of a name
# By Okabe and Ito: colors that everybody can tell, from dark to light.
_COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw(runs: Sequence[Run]) -> Figure:
    """The picture of some runs.

    Args:
      runs: at least one, in the order in which their lines lie over one another.

    Returns:
      A figure with a panel for each thing that some run has figures of.

    Raises:
      ValueError: if there is nothing to draw.

    Example:
      >>> from gravac_jax import plot
      >>> lines = [{"step": i, "seconds": i, "loss": 1 / (i + 1)} for i in range(9)]
      >>> [axis.get_ylabel() for axis in plot.draw([plot.Run("one", lines)]).axes]
      ['loss', 'seconds a step']
    """
    panels = _panels([_short(run) for run in runs])
    if not panels:
        raise ValueError(
            f"there is nothing to draw of {', '.join(run.name for run in runs)}: no "
            "loss, no gravac/factor, no times. metrics.Recorder writes all of them."
        )
    height = max(1.5, 0.2 * len(runs))  # inches; a name takes 0.15
    figure = Figure((8, 0.6 + height * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis)
        _name_ends(axis, gap=0.15 / height)
    smooth = f"mean and median over 1/{_SMOOTH} of a run"
    axes[-1].set_xlabel(f"step (loss and seconds: {smooth})")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    return figure


def _panels(runs: Sequence[Run]) -> list[Callable[[Axes], None]]:
    """What draws each panel, from above."""
    has = lambda name: any(run.names(name) for run in runs)
    panels: list[Callable[[Axes], None]] = []
    for name in dict.fromkeys(x for run in runs for x in run.names(".*loss")):
        panels.append(functools.partial(_loss, runs=runs, name=name))
    if has("gravac/factor"):
        panels.append(functools.partial(_factor, runs=runs))
    for run in runs:
        if len(run.gains) > 1:
            panels.append(functools.partial(_gains, run=run))
    if has("gravac/wire_bytes"):
        panels.append(functools.partial(_bytes, runs=runs))
    if any(np.isfinite(run.step_seconds).any() for run in runs):
        panels.append(functools.partial(_seconds, runs=runs))
    return panels


def _loss(axis: Axes, runs: Sequence[Run], name: str) -> None:
    for i, run in enumerate(runs):
        _line(axis, i, run.name, run.figures("step"), run.figures(name), np.mean)
    axis.set_ylabel(name.replace("_", " "))


def _factor(axis: Axes, runs: Sequence[Run]) -> None:
    has_skipped = False
    for i, run in enumerate(runs):
        steps, factor = run.figures("step"), run.figures("gravac/factor")
        _line(axis, i, run.name, steps, factor)
        at = steps[run.figures("gravac/is_finite") == 0]
        has_skipped |= len(at) > 0
        axis.plot(
            at, np.full(len(at), 0.94), "kx", transform=axis.get_xaxis_transform()
        )
    axis.set(yscale="log", ylabel="factor\n(x: skipped)" if has_skipped else "factor")
    axis.set_ylim(0.7, max(15, 1.5 * axis.get_ylim()[1]))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())


def _gains(axis: Axes, run: Run) -> None:
    steps, gains = run.figures("step"), run.gains
    every = -(-len(steps) // _COLUMNS)
    image = axis.pcolormesh(
        steps[::every],
        np.arange(len(gains)),
        gains[:, ::every],
        shading="nearest",
        cmap="cividis",
        norm=PowerNorm(0.5, 0, 1),  # most of what differs is below 0.2
        rasterized=True,
    )
    for width, color in ((3, "black"), (1.2, "white")):
        used = run.rungs[::every]
        axis.step(steps[::every], used, color=color, linewidth=width, where="mid")
    labels = [f"{x:.3g}" if np.isfinite(x) else "" for x in run.rung_factors]
    axis.set_yticks(np.arange(len(gains)), labels)
    axis.set_title(run.name, loc="left", size=8, parse_math=False)
    axis.set_ylabel("factor\nof a rung")
    place = axis.inset_axes((1.02, 0, 0.02, 1))
    axis.figure.colorbar(
        image, cax=place, label="gain;\nline: used", ticks=(0, 0.1, 0.5, 1)
    )


def _bytes(axis: Axes, runs: Sequence[Run]) -> None:
    total = lambda run, what: _sent(run, what)[-1]
    known = {i: x for i, x in enumerate(runs) if total(x, "wire")}
    times = {i: total(x, "dense_wire") / total(x, "wire") for i, x in known.items()}
    if times and all(x > 1.01 for x in times.values()):  # no run is dense
        longest = max(known.values(), key=lambda run: run.lines[-1]["step"])
        dense = _sent(longest, "dense_wire")
        axis.plot(
            longest.figures("step"), dense, color="0.5", lw=3, label="dense steps"
        )
    for i, run in known.items():
        name = f"{run.name}, 1/{times[i]:.3g}" if times[i] > 1.01 else run.name
        _line(axis, i, name, run.figures("step"), _sent(run, "wire"))
    axis.set(yscale="log", ylabel="bytes sent\nso far")
    axis.yaxis.set_major_formatter(EngFormatter("B"))
    axis.yaxis.set_minor_locator(NullLocator())


def _sent(run: Run, what: str) -> np.ndarray:
    return np.cumsum(np.nan_to_num(run.figures(f"gravac/{what}_bytes")))


def _seconds(axis: Axes, runs: Sequence[Run]) -> None:
    for i, run in enumerate(runs):
        _line(axis, i, run.name, run.figures("step"), run.step_seconds, np.median)
    if len(runs) == 1:
        (run,) = runs
        parts = [x for x in run.names(r".*_seconds") if x != "step_seconds"]
        for i, name in enumerate(parts, start=1):
            label = name.removesuffix("_seconds").replace("_", " ")
            _line(axis, i, label, run.figures("step"), run.figures(name), np.median)
    axis.set_ylim(0)
    axis.set_ylabel("seconds a step")
    axis.yaxis.set_major_formatter(EngFormatter("s"))


def _line(
    axis: Axes,
    i: int,
    name: str,
    steps: np.ndarray,
    figures: np.ndarray,
    middle: Callable[..., Any] | None = None,
) -> None:
    """Draw the `i`-th line, of which a point is the `middle` of those up to it."""
    known = np.isfinite(figures)
    steps, figures = steps[known], figures[known]
    if not len(steps):
        return
    at = np.unique(np.linspace(0, len(steps) - 1, _POINTS).round().astype(int))
    window = max(1, len(steps) // _SMOOTH)
    if middle is None:
        points = figures[at]
    else:
        points = [middle(figures[max(0, x + 1 - window) : x + 1]) for x in at]
    axis.plot(
        steps[at],
        points,
        color=_COLORS[i % len(_COLORS)],
        linestyle=_STYLES[i % len(_STYLES)],
        marker=_MARKERS[i % len(_MARKERS)],
        markevery=(0.04 * (i % 4), 0.16),
        markersize=4,
        linewidth=1.2,
        label=name,
    )


def _name_ends(axis: Axes, gap: float) -> None:
    """Write the name of every line at its end; names stay `gap` of the axis apart."""
    lines = [x for x in axis.lines if not str(x.get_label()).startswith("_")]
    axis.autoscale_view()  # now, so that the limits are what they will be
    to_axis = axis.transData + axis.transAxes.inverted()
    ends = [to_axis.transform(np.column_stack(x.get_data())[-1])[1] for x in lines]
    for line, height in zip(lines, _apart(np.array(ends), gap), strict=True):
        sample = axis.add_artist(Line2D((1.015, 1.03, 1.045), (height,) * 3))
        sample.update_from(line)
        sample.set(transform=axis.transAxes, clip_on=False, markevery=[1])
        name = str(line.get_label())
        place = {"va": "center", "transform": axis.transAxes}
        axis.text(1.055, height, name, size=8, parse_math=False, **place)


def _apart(heights: np.ndarray, gap: float) -> np.ndarray:
    """Heights moved apart, up and then down below the top, in the same order."""
    order = np.argsort(heights, kind="stable")
    placed = heights[order].clip(0.05)
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    below_top = 1 - gap * np.arange(len(placed))[::-1]
    found = np.empty_like(placed)
    found[order] = np.minimum(placed, below_top)
    return found


def _short(run: Run) -> Run:
    """The run under a name that fits: its ends, which tell it from others."""
    name, half = run.name, _NAME // 2
    fits = len(name) <= _NAME
    return run if fits else Run(f"{name[: half - 1]}…{name[-half:]}", run.lines)


def main(arguments: list[str] | None = None) -> None:
    """Draw the files that the command line names.

    Args:
      arguments: of the command line; default: those of this process.

    Raises:
      SystemExit: if there is nothing to draw, with a line that says why.
    """
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Draw what runs wrote with gravac_jax.metrics.JsonlWriter. Of one"
        " run, other figures whose names end in _seconds are drawn as parts of a step.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN.jsonl", help="a file for each run")
    add("--out", type=Path, required=True, help="the picture: FILE.png or FILE.svg")
    options = parser.parse_args(arguments)
    formats = Figure().canvas.get_supported_filetypes()
    if options.out.suffix.removeprefix(".") not in formats:
        parser.error(f"--out must end with .png or .svg, got {options.out}")
    try:
        runs, notes = read_runs(options.runs)
        sys.stderr.writelines(f"{_PROGRAM}: {note}\n" for note in notes)
        figure = draw(runs)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.out, dpi=150)
    except (ValueError, OSError) as error:
        raise SystemExit(f"{_PROGRAM}: {error}") from None
    sys.stdout.write(f"The picture is in {options.out}\n")


if __name__ == "__main__":
    main()
