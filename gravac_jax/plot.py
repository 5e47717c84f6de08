"""Draw runs that `metrics.JsonlWriter` recorded, one over the other.

    python -m gravac_jax.plot runs/adaptive.jsonl runs/dense.jsonl --out runs/both.png

The picture has panels for the losses, the gain of every rung of each run, the bytes
sent beside those of dense steps, and the seconds of a step.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from gravac_jax.metrics import GAINS, read_jsonl

__all__ = ["Run", "draw", "main"]

_POINTS = 100  # of losses and seconds, each a median over a hundredth of the run
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclasses.dataclass(frozen=True)
class Run:
    """The figures of a run.

    Args:
      name: Name of the run in the picture.
      lines: Lines of the run, as `metrics.read_jsonl` returns them.
    """

    name: str
    lines: Sequence[dict[str, float]]

    def figures(self, name: str) -> np.ndarray:
        """Return a figure of every step: `[steps]` float64, NaN where it is missing."""
        return np.array([line.get(name, np.nan) for line in self.lines], np.float64)

    def names(self, pattern: str) -> list[str]:
        """Return the names of figures that match a regular expression."""
        names = dict.fromkeys(name for line in self.lines for name in line)
        return [name for name in names if re.fullmatch(pattern, name)]

    def seconds_per_step(self) -> np.ndarray:
        """Return `[steps]` float64: the time from line to line."""
        seconds, steps = np.diff(self.figures("seconds")), np.diff(self.figures("step"))
        # The clock of a run that resumes starts at 0 again.
        return np.append(np.nan, _or_nan(seconds) / _or_nan(steps))

    def bytes_so_far(self, name: str) -> np.ndarray:
        """Return `[steps]` float64: the sum of `wire` or `dense_wire` bytes."""
        return _or_nan(np.nancumsum(self.figures(f"gravac/{name}_bytes")))


def _or_nan(x: np.ndarray) -> np.ndarray:
    """Return NaN for what is not above 0: nothing was sent, or is known."""
    return np.where(x > 0, x, np.nan)


def draw(runs: Sequence[Run]) -> Figure:
    """Draw runs over one another.

    Args:
      runs: At least one run; later runs are drawn over earlier ones.

    Returns:
      A figure with a panel for each loss, the gains of each run that has several rungs,
      the bytes and the seconds.

    Raises:
      ValueError: If a run has no lines.

    Example:
      >>> from gravac_jax import plot
      >>> lines = [{"step": i, "seconds": i, "loss": 1 / (i + 1)} for i in range(9)]
      >>> [axis.get_ylabel()[:6] for axis in plot.draw([plot.Run("one", lines)]).axes]
      ['loss', 'bytes ', 'second']
    """
    if empty := [run.name for run in runs if not run.lines]:
        raise ValueError(f"{empty[0]} has no whole line yet; wait for the first steps")
    losses = dict.fromkeys(name for run in runs for name in run.names(".*loss"))
    panels: list[tuple[Any, ...]] = [
        *((_draw_medians, runs, name) for name in losses),
        *((_draw_gains, run) for run in runs if len(run.names(GAINS + ".*")) > 1),
        (_draw_bytes, runs),
        (_draw_medians, runs),
    ]
    figure = Figure((8, 1 + 1.8 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True)
    for axis, (draw_panel, *of) in zip(axes, panels, strict=True):
        axis.set_prop_cycle(color=4 * _COLORS, linestyle=7 * ("-", "--", "-.", ":"))
        draw_panel(axis, *of)
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    medians = f"losses and seconds: medians over 1/{_POINTS} of a run"
    figure.supxlabel(f"step ({medians})", size="medium")
    figure.align_ylabels()
    figure.legend(handles=axes[-2].lines, loc="outside upper center")
    return figure


def _draw_medians(axis: Axes, runs: Sequence[Run], name: str = "") -> None:
    """Draw a loss, or the seconds of a step."""
    for run in runs:
        steps = run.figures("step")
        y = run.figures(name) if name else run.seconds_per_step()
        parts = np.array_split(np.flatnonzero(np.isfinite(y)), _POINTS)
        points = [(steps[x], y[x]) for x in parts if len(x)]
        axis.plot(*np.reshape([np.median(x, axis=1) for x in points], (-1, 2)).T)
    axis.set_ylabel(re.sub("[_/]", " ", name) or "seconds per step")


def _draw_gains(axis: Axes, run: Run) -> None:
    """Draw the gain of every rung, when it is known, and which one was taken."""
    every = -(-len(run.lines) // 300)  # 300 columns are enough for 8 inches
    names = run.names(GAINS + ".*")
    gains = np.array([run.figures(name)[::every] for name in names])
    steps, rungs = run.figures("step")[::every], np.arange(len(names))
    norm = PowerNorm(0.5, 0, 1)  # most gains that differ are below 0.2
    image = axis.pcolormesh(steps, rungs, _or_nan(gains), cmap="cividis", norm=norm)
    axis.figure.colorbar(image, ax=axis, label="gain", ticks=(0, 0.1, 0.5, 1))
    # A run that resumes may have another ladder; a local step takes no rung of it.
    ladders = [[names.index(x) for x in y if x in names] for y in run.lines[::every]]
    row = lambda ladder, rung: ladder[int(rung)] if rung < len(ladder) else np.nan
    taken = list(map(row, ladders, run.figures("gravac/rung")[::every]))
    axis.plot(steps, taken, ".", color=_COLORS[2], ms=2)
    axis.set_title(f"{run.name}: last known gain of every rung", size="medium")
    axis.set_ylabel("rung\n(dots: taken)")
    axis.set_yticks(rungs, [x.removeprefix(GAINS) for x in names], size="small")


def _draw_bytes(axis: Axes, runs: Sequence[Run]) -> None:
    """Draw the bytes of each run, and those of as many dense steps as the longest."""
    for run in runs:
        dense, sent = run.bytes_so_far("dense_wire"), run.bytes_so_far("wire")
        fewer = f" ({dense[-1] / sent[-1]:.3g} times fewer bytes than dense)"
        label = run.name + (fewer if dense[-1] > 1.01 * sent[-1] else "")
        axis.plot(run.figures("step"), sent, label=label)
    longest = max(runs, key=lambda run: run.lines[-1]["step"])
    steps, dense = longest.figures("step"), longest.bytes_so_far("dense_wire")
    axis.plot(steps, dense, "-", c="0.75", lw=4, zorder=0, label="bytes of dense steps")
    axis.set(yscale="log", ylabel="bytes sent so far")
    axis.yaxis.set_major_formatter(EngFormatter("B"))
    axis.yaxis.set_minor_formatter("")


def main(arguments: list[str] | None = None) -> None:
    """Draw the files that the command line names.

    Args:
      arguments: Arguments of the command line; by default those of this process.

    Raises:
      SystemExit: If there is nothing to draw or the picture cannot be written, with the
        reason.
    """
    about = "Draw runs that gravac_jax.metrics.JsonlWriter recorded."
    parser = argparse.ArgumentParser("python -m gravac_jax.plot", description=about)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="FILE.png, or .svg")
    options = parser.parse_args(arguments)
    try:
        name = lambda x: f"{x.absolute().parent.name}/{x.stem}".replace("$", r"\$")
        figure = draw([Run(name(x), read_jsonl(x)) for x in options.runs])
        out = options.out.with_suffix(options.out.suffix or ".png")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except (ValueError, OSError) as error:
        raise SystemExit(f"{parser.prog}: {error}") from None
    sys.stdout.write(f"The picture is in {out}\n")


if __name__ == "__main__":
    main()
