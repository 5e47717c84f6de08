"""The figures of a run as arrays, from the lines that it wrote."""

import dataclasses
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gravac_jax._metrics.jsonl import read_jsonl


@dataclasses.dataclass(frozen=True)
class Run:
    """The figures of a run.

    Args:
      name: what it is called in the picture.
      lines: what `metrics.read_jsonl` returns; at least one.
    """

    name: str
    lines: Sequence[dict[str, float]]

    def figures(self, name: str) -> np.ndarray:
        """`[steps]` float64, NaN where there is none."""
        return np.array([x.get(name, np.nan) for x in self.lines], np.float64)

    def names(self, pattern: str) -> list[str]:
        """The names that match a pattern and have some figure, in order."""
        found = dict.fromkeys(name for line in self.lines for name in line)
        matched = [x for x in found if re.fullmatch(pattern, x)]
        return [x for x in matched if np.isfinite(self.figures(x)).any()]

    @property
    def gains(self) -> np.ndarray:
        """`[rungs, steps]` of every rung; no rungs where there are none."""
        names = self.names(r"gravac/gains/\d+")
        return np.array([self.figures(x) for x in names]).reshape(
            len(names), len(self.lines)
        )

    @property
    def step_seconds(self) -> np.ndarray:
        """`[steps]` as measured, or from one line to the next."""
        if self.names("step_seconds"):
            return self.figures("step_seconds")
        seconds, steps = np.diff(self.figures("seconds")), np.diff(self.figures("step"))
        # Where a run goes on, its clock begins anew.
        is_time = (seconds > 0) & (steps > 0)
        found = np.where(is_time, seconds, np.nan) / np.maximum(steps, 1)
        return np.concatenate([[np.nan], found])

    @property
    def rung_factors(self) -> np.ndarray:
        """`[rungs]` the factor of each, NaN of those that no step has used."""
        gains, factor = self.gains, self.figures("gravac/factor")
        # The gain of a step is that of the rung it has used.
        is_it = (gains == self.figures("gravac/gain")) & np.isfinite(factor)
        is_it &= is_it.sum(0) == 1
        return np.array([np.median(factor[x]) if x.any() else np.nan for x in is_it])

    @property
    def rungs(self) -> np.ndarray:
        """`[steps]` float64, the rung that each has used; NaN where it is not known."""
        factor = self.figures("gravac/factor")
        is_it = np.isclose(self.rung_factors[:, None], factor, rtol=0.01)
        return np.where(is_it.any(0), is_it.argmax(0), np.nan)


def read_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs of some files, and what should be known of these."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        runs = [Run(name, _lines(path)) for name, path in _named(paths)]
    return runs, [str(note.message) for note in notes]


def _lines(path: Path) -> list[dict[str, float]]:
    if not path.is_file():
        raise ValueError(
            f"there is no file {path}; give what metrics.JsonlWriter wrote"
        )
    lines = read_jsonl(path)
    if not lines:
        raise ValueError(f"{path} has no whole line yet; wait for the first steps")
    return lines


def _named(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Files by their names, with those of their folders where two are alike."""
    stems = [x.stem for x in paths]
    alike = len(set(stems)) < len(stems)
    return [(f"{x.parent.name}/{x.stem}" if alike else x.stem, x) for x in paths]
