"""Draw runs that `metrics.JsonlWriter` recorded, one over the other.

    python -m gravac_jax plot runs/adaptive.jsonl runs/dense.jsonl --out runs/both.png

The picture has panels for the losses, the factor, the gain of every rung of each run,
what the controller of each run predicted of its choices, the bytes sent beside those of
dense steps, and the seconds of a step.
"""

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from gravac_jax.metrics import read_jsonl
from gravac_jax.metrics._explain import HOME, PROGRESS, SECONDS
from gravac_jax.metrics._scalars import GAINS

__all__ = ["Run", "draw", "main"]

_PROGRAM = "python -m gravac_jax plot"
_POINTS = 100  # of losses and seconds, each a median over a hundredth of the run
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINESTYLES = ("-", "--", "-.", ":")


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
        """Return `[steps]` float64: as recorded, or the time from line to line."""
        if self.names("step_seconds"):
            return self.figures("step_seconds")
        seconds, steps = np.diff(self.figures("seconds")), np.diff(self.figures("step"))
        # The clock of a run that resumes starts at 0 again.
        return np.append(np.nan, np.where(seconds > 0, seconds, np.nan) / steps)

    def byte_factors(self) -> np.ndarray:
        """Return `[steps]` float64: how many times fewer bytes than a dense step."""
        dense, sent = (self.figures(f"gravac/{x}wire_bytes") for x in ("dense_", ""))
        return dense / np.where(sent > 0, sent, np.nan)

    def costs(self) -> dict[str, np.ndarray]:
        """Return the predicted seconds for a dense step's progress, by choice.

        `[steps]` float64 each, NaN where nothing was predicted yet.
        """
        costs = {}
        for name in self.names(PROGRESS + ".*"):
            choice, progress = name.removeprefix(PROGRESS), self.figures(name)
            known = np.where(progress > 0, progress, np.nan)
            costs[choice] = self.figures(SECONDS + choice) / known
        return costs

    def bytes_so_far(self, name: str) -> np.ndarray:
        """Return `[steps]` float64: the sum of `wire` or `dense_wire` bytes."""
        total = np.nancumsum(self.figures(f"gravac/{name}_bytes"))
        return np.where(total > 0, total, np.nan)


def draw(runs: Sequence[Run]) -> Figure:
    """Draw runs over one another.

    Args:
      runs: At least one run; later runs are drawn over earlier ones.

    Returns:
      A figure with a panel for each loss, the factor, the gains of each run that has
      several rungs, the predictions of each run that has any, the bytes and the
      seconds.

    Raises:
      ValueError: If a run has no lines.

    Example:
      >>> from gravac_jax import plot
      >>> lines = [{"step": i, "seconds": i, "loss": 1 / (i + 1)} for i in range(9)]
      >>> [axis.get_ylabel()[:6] for axis in plot.draw([plot.Run("one", lines)]).axes]
      ['loss', 'factor', 'bytes ', 'second']
    """
    if empty := [run.name for run in runs if not run.lines]:
        raise ValueError(f"{empty[0]} has no whole line yet; wait for the first steps")
    losses = dict.fromkeys(name for run in runs for name in run.names(".*loss"))
    with_rungs = [run for run in runs if len(run.names(GAINS + ".*")) > 1]
    explained = [run for run in runs if run.costs()]
    panels = len(losses) + len(with_rungs) + len(explained) + 3
    figure = Figure((8, 1 + 1.8 * panels), layout="constrained")
    axes = iter(figure.subplots(panels, sharex=True))
    for axis in figure.axes:
        axis.set_prop_cycle(color=4 * _COLORS, linestyle=7 * _LINESTYLES)
    for name in losses:
        figures = [run.figures(name) for run in runs]
        _draw_medians(next(axes), re.sub("[_/]", " ", name), runs, figures)
    _draw_factors(next(axes), runs)
    for run in with_rungs:
        _draw_gains(next(axes), run)
    for run in explained:
        _draw_costs(next(axes), run)
    of_bytes = next(axes)
    _draw_bytes(of_bytes, runs)
    seconds = [run.seconds_per_step() for run in runs]
    _draw_medians(next(axes), "seconds per step", runs, seconds)
    medians = f"losses and seconds: medians over 1/{_POINTS} of a run"
    figure.supxlabel(f"step ({medians})", size="medium")
    figure.align_ylabels()
    dense, *sent = of_bytes.lines
    figure.legend(handles=[*sent, dense], loc="outside upper center")
    return figure


def _draw_medians(
    axis: Axes, label: str, runs: Sequence[Run], figures: list[np.ndarray]
) -> None:
    for run, y in zip(runs, figures, strict=True):
        known = np.flatnonzero(np.isfinite(y))
        parts = np.array_split(known, _POINTS)
        steps = run.figures("step")
        points = [(np.median(steps[x]), np.median(y[x])) for x in parts if len(x)]
        axis.plot(*np.reshape(points, (-1, 2)).T)
    axis.set_ylabel(label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_factors(axis: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        steps, factors = run.figures("step"), run.figures("gravac/factor")
        sends = np.isfinite(factors)  # a local step sends nothing
        (line,) = axis.plot(steps[sends], factors[sends])
        thin = {"color": line.get_color(), "lw": 0.7, "alpha": 0.7}
        axis.plot(steps[sends], run.byte_factors()[sends], "-", **thin)
    axis.set(yscale="log", ylabel="factor\n(thin: times fewer bytes)")
    axis.set_ylim(0.7, max(120, 1.5 * axis.get_ylim()[1]))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")


def _draw_gains(axis: Axes, run: Run) -> None:
    """Draw the gain of every rung, when it is known, and which one was taken."""
    every = -(-len(run.lines) // 300)  # 300 columns are enough for 8 inches
    names = run.names(GAINS + ".*")
    gains = np.array([run.figures(name) for name in names])[:, ::every]
    steps, rungs = run.figures("step")[::every], np.arange(len(gains))
    norm = PowerNorm(0.5, 0, 1)  # most gains that differ are below 0.2
    known = np.where(gains > 0, gains, np.nan)
    image = axis.pcolormesh(steps, rungs, known, cmap="cividis", norm=norm)
    axis.figure.colorbar(image, ax=axis, label="gain", ticks=(0, 0.1, 0.5, 1))
    taken = run.figures("gravac/rung")[::every]
    shown = np.where(taken < len(rungs), taken, np.nan)
    axis.plot(steps, shown, ".", color=_COLORS[2], ms=2)
    axis.set_title(f"{run.name}: last known gain of every rung", size="medium")
    axis.set_ylabel("rung\n(dots: taken)")
    axis.set_yticks(rungs, [name.removeprefix(GAINS) for name in names], size="small")


def _draw_costs(axis: Axes, run: Run) -> None:
    """Draw the predicted cost of every choice, and which one was taken."""
    steps, costs = run.figures("step"), run.costs()
    for name, cost in costs.items():
        axis.plot(steps, 1e3 * cost, lw=1, label=name)
    table, home = 1e3 * np.array(list(costs.values())), run.figures(HOME)
    taken = [table[int(x), i] if x >= 0 else np.nan for i, x in enumerate(home)]
    axis.plot(steps, taken, "-", color="0.6", lw=4, alpha=0.5, zorder=0, label="taken")
    axis.legend(fontsize="x-small", ncols=3)
    axis.set_title(f"{run.name}: predicted by the controller", size="medium")
    axis.set(yscale="log", ylabel="ms for a dense\nstep's progress")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")


def _draw_bytes(axis: Axes, runs: Sequence[Run]) -> None:
    longest = max(runs, key=lambda run: run.lines[-1]["step"])
    steps, dense = longest.figures("step"), longest.bytes_so_far("dense_wire")
    axis.plot(steps, dense, "-", color="0.75", lw=4, label="bytes of dense steps")
    for run in runs:
        axis.plot(run.figures("step"), run.bytes_so_far("wire"), label=_label(run))
    axis.set(yscale="log", ylabel="bytes sent so far")
    axis.yaxis.set_major_formatter(EngFormatter("B"))
    axis.yaxis.set_minor_formatter("")


def _label(run: Run) -> str:
    """Return the name of a run, and how many times fewer bytes than dense it sent."""
    dense, sent = run.bytes_so_far("dense_wire")[-1], run.bytes_so_far("wire")[-1]
    if dense > 1.01 * sent:
        return f"{run.name} ({dense / sent:.3g} times fewer bytes than dense)"
    return run.name


def main(arguments: list[str] | None = None) -> None:
    """Draw the files that the command line names.

    Args:
      arguments: Arguments of the command line; by default those of this process.

    Raises:
      SystemExit: If there is nothing to draw or the picture cannot be written, with the
        reason.
    """
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Draw runs that gravac_jax.metrics.JsonlWriter recorded.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.jsonl")
    parser.add_argument(
        "--out", type=Path, required=True, help="the picture, such as FILE.png or .svg"
    )
    options = parser.parse_args(arguments)
    try:
        names = [f"{path.absolute().parent.name}/{path.stem}" for path in options.runs]
        figure = draw(list(map(Run, names, map(read_jsonl, options.runs))))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.out, dpi=150)
    except (ValueError, OSError) as error:
        raise SystemExit(f"{_PROGRAM}: {error}") from None
    sys.stdout.write(f"The picture is in {options.out}\n")


if __name__ == "__main__":
    main()
