"""Tables in Markdown, and figures in words."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class Args:
    """Which record to read.

    Args:
      file: A record of this benchmark.
    """

    file: tyro.conf.Positional[Path]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the heading is the first row."""
    head, *rest = rows
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(x) + " |" for x in [head, rule, *rest])


def spread(figures: Sequence[float], digits: int) -> str:
    """Return "middle (low-high)" of three quartiles."""
    low, middle, high = figures
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def rate(bandwidth_mbit: float | None, unit: str = "") -> str:
    """Return a bandwidth as a title has it."""
    return "no limit" if bandwidth_mbit is None else f"{bandwidth_mbit:g}{unit}"
