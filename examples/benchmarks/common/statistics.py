"""Medians, bounds, paired gaps, and the place where a curve reaches its target."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from scipy import special

T = TypeVar("T")


def quartiles(figures: Any, digits: int = 6) -> list[float]:
    """Return the first quartile, the median and the third quartile, rounded."""
    found = np.quantile(figures, (0.25, 0.5, 0.75))
    return [round(float(x), digits) for x in found]


def upper_bound(gaps: Sequence[float]) -> float:
    """Return the one-sided 95% bound on the mean of paired gaps, by Student's t.

    It is NaN for one gap, which says nothing of its spread, and infinite if a run
    diverged.
    """
    if len(gaps) < 2:
        return math.nan
    if not all(map(math.isfinite, gaps)):
        return math.inf
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return statistics.mean(gaps) + float(special.stdtrit(len(gaps) - 1, 0.95)) * error


def target_of(losses: Sequence[float]) -> float:
    """Return the loss that a run has reached after 80% of its evaluations."""
    return losses[len(losses) * 4 // 5 - 1]


def reached(
    losses: Sequence[float], at: Sequence[float], target: float
) -> float | None:
    """Return where losses first reach a target, between two of `at`; None if never."""
    below = [i for i, x in enumerate(losses) if x <= target]
    if not below or not below[0]:
        return at[0] if below else None
    (x, y), (high, low) = ([z[below[0] - 1], z[below[0]]] for z in (at, losses))
    return x + (y - x) * (high - target) / (high - low)


def in_turn(things: Sequence[T], turn: int) -> list[T]:
    """Return the things in the order of a turn, which another one begins each time.

    Whatever else the machine does then falls on all of them alike.
    """
    first = turn % len(things)
    return [*things[first:], *things[:first]]
