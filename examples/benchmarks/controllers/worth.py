"""Say and draw what a step is worth at each factor, in several records side by side.

The records are those of `controllers.progress`. A step is worth the dense steps to the
target over the steps that the run took to it.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from common.figures import FAINT, legend_below, picture
from common.journal import Line
from common.report import markdown

from controllers.progress import OPTIMIZERS, runs_of, worths

FIRST = 16  # the lowest factor that is shown: below it the records have the same rungs


def by_factor(
    lines: list[Line], optimizer: str, params: str
) -> dict[float, list[float]]:
    """Return what a step of each factor is worth, for each seed."""
    ours = [x for x in lines if x["optimizer"] == optimizer]
    factors = sorted({x["factor"] for x in ours if x["factor"] >= FIRST})
    return {f: worths(ours, params, f, 1) for f in factors}


def table(records: Mapping[str, Path]) -> str:
    """Return a table of all records: means, and the least and the most of the seeds."""
    lines = {words: runs_of(path) for words, path in records.items()}
    factors = _factors(lines)
    rows = [["optimizer", "params", "sent", *(f"factor {x:g}" for x in factors)]]
    for optimizer, words in OPTIMIZERS.items():
        for params in ("own", "shared"):
            for sent, found in lines.items():
                mine = by_factor(found, optimizer, params)
                said = [_said(mine.get(f, [])) for f in factors]
                if any(said):
                    rows.append([words, params, sent, *said])
    return markdown(rows)


def _factors(lines: Mapping[str, list[Line]]) -> list[float]:
    return sorted({f for x in lines.values() for f in by_factor(x, "adam", "own")})


def _said(found: list[float]) -> str:
    if not found:
        return ""
    return f"{np.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def draw(records: Mapping[str, Path], path: Path) -> None:
    """Draw what a step at own params is worth over the factor, by optimizer."""
    lines = {words: runs_of(path) for words, path in records.items()}
    factors = _factors(lines)
    with picture(path, (11, 4), columns=3) as (figure, axes):
        for axis, (optimizer, words) in zip(axes[0], OPTIMIZERS.items(), strict=True):
            for i, (sent, found) in enumerate(lines.items()):
                mine = by_factor(found, optimizer, "own")
                mean = np.array([np.mean(x) for x in mine.values()])
                ends = [
                    [min(x) for x in mine.values()],
                    [max(x) for x in mine.values()],
                ]
                spread = np.abs(np.array(ends) - mean)
                axis.errorbar(
                    list(mine),
                    mean,
                    spread,
                    fmt="os"[i] + "-",
                    color=f"C{i}",
                    label=sent,
                )
            axis.axhline(1, color=FAINT)
            axis.set_xscale("log", base=2)
            axis.set_xticks(factors, [f"{x:g}" for x in factors])
            axis.set(xlabel="factor", title=words, ylim=(0, 1.15))
        axes[0, 0].set(ylabel="what a step is worth, in dense steps")
        legend_below(figure)
