"""The style of all figures: one paper, one ink, and colours that all readers can tell.

The paper is a light gray that stands out from a white page and does not glare on a
dark one.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogFormatter, LogLocator, NullFormatter

PAPER, INK, FAINT = "#f2f1ee", "#222222", "#b8b6b0"
# Okabe and Ito's colours, which colour-blind readers can tell apart, then two grays.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
COLORS += ("#6b6b6b", "#8a6d3b")
STYLE: Any = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.alpha": 0.5,
    "legend.frameon": False,
}

WIDEST = 120  # letters of a legend's row


@contextlib.contextmanager
def picture(
    path: Path, size: tuple[float, float], rows: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, one below the other, and write it at the end."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, figsize=size, layout="constrained", squeeze=False
        )
        yield figure, axes[:, 0]
        for axis in axes.flat:
            _plain_numbers(axis.xaxis)
            _plain_numbers(axis.yaxis)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
        plt.close(figure)


def _plain_numbers(axis: Any) -> None:
    """Write 100 where a logarithmic axis would have a power of ten, or no number."""
    if not isinstance(axis.get_major_formatter(), LogFormatter):
        return
    low, high = axis.get_view_interval()
    between = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=between))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.12g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Any, columns: int = 3, **options: Any) -> None:
    """Explain all lines of a figure below it, each once."""
    found: dict[str, Any] = {}
    for axis in figure.axes:
        lines, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, lines, strict=True))
    # Long names in three columns would be wider than the figure.
    columns = min(columns, max(1, int(WIDEST / max(map(len, found), default=1))))
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
        **options,
    )
