"""Tables for the terminal and for Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

WIDTH = 160  # columns, where the output is no terminal


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None
) -> Table:
    """Return a table whose first column is on the left and all others on the right."""
    made = Table(box=SIMPLE, title=title, pad_edge=False, collapse_padding=True)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the heading is the first row."""
    head, *rest = rows
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(x) + " |" for x in [head, rule, *rest])


def show(*things: Any) -> None:
    """Print tables and texts."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    for thing in things:
        console.print(thing)


def spread(figures: Sequence[float], digits: int) -> str:
    """Return "middle (low-high)" of three quartiles."""
    low, middle, high = figures
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def rate(bandwidth_mbit: float | None, unit: str = "") -> str:
    """Return a bandwidth as a title has it."""
    return "no limit" if bandwidth_mbit is None else f"{bandwidth_mbit:g}{unit}"
