"""Draw the figures of README and docs from docs/results.csv, into docs/figures.

python examples/benchmarks draw
"""

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

DOCS = Path(__file__).parents[2] / "docs"
INK, FAINT = "#222222", "#b8b6b0"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, RED = "#0072B2", "#D55E00"
PINK, YELLOW, SKY = "#CC79A7", "#E69F00", "#56B4E9"
STYLE: Any = {
    "font.size": 11,
    "svg.hashsalt": "gravac_jax",  # the same bytes each time
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.5,
    "legend.frameon": False,
    "lines.markersize": 5,
}

Row = dict[str, str]


def rows(question: str) -> list[Row]:
    """Return the rows of a question."""
    with (DOCS / "results.csv").open(newline="") as file:
        return [x for x in csv.DictReader(file) if x["question"] == question]


def numbers(found: list[Row], column: str) -> np.ndarray:
    """Return a column; what is not known is NaN."""
    return np.array([float(x[column] or "nan") for x in found])


@contextlib.contextmanager
def picture(name: str, size: tuple[float, float], *shape: int) -> Iterator[list[Any]]:
    """Yield the axes of a figure, then explain their lines below and write the file."""
    with plt.rc_context(STYLE):
        options = {"layout": "constrained", "squeeze": False}
        figure, axes = plt.subplots(*shape, figsize=size, **options)
        yield list(axes.flat)
        for side in (y for x in axes.flat for y in (x.xaxis, x.yaxis)):
            if side.get_scale() == "log":
                side.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
                side.set_minor_formatter(NullFormatter())
        explained = axes.flat[0].get_legend_handles_labels()  # all have the same lines
        figure.legend(*explained, loc="outside lower center", ncols=3)
        figure.savefig(DOCS / "figures" / name, metadata={"Date": None})
        plt.close(figure)


def speed_ups(found: list[Row], method: str) -> tuple[list[float], list[float]]:
    """Return r, and how many times as fast as dense the method reaches the loss.

    Speed-ups are means over the seeds that both have.
    """
    known = {x["r"]: [] for x in found}
    dense = {(x["r"], x["seed"]): x for x in found if x["method"] == "dense"}
    for x in found:
        if x["method"] == method:
            both = numbers([dense[x["r"], x["seed"]], x], "seconds")
            known[x["r"]].append(both[0] / both[1])
    return [float(r) for r in known], [float(np.mean(x)) for x in known.values()]


def time_to_quality() -> None:
    """Draw speed-ups over r: a GPT with AdamW, an LSTM with momentum SGD."""
    older = "transform(send={}, memory=OwnOptimizer(sgd))"
    longer = "Fastest up to Bits(2, turns=16)"
    tasks = {
        "a GPT, gravac.adamw": ("time-adamw", "adamw(send={})", "Fastest()"),
        "an LSTM, gravac.sgd": ("time-ptb-steps", older, longer),
    }
    lines = {
        "dense float16": (FAINT, "D-"),
        "Bits(2)": (SKY, "s-"),
        "Bits(2, turns=4)": (YELLOW, "o-"),
        "Bits(2, turns=8)": (PINK, "v-"),
        "Fastest": (RED, "^-"),
    }
    with picture("time_to_quality.svg", (9, 5), 1, 2) as axes:
        for axis, (title, task) in zip(axes, tasks.items(), strict=True):
            question, recipe, fastest = task
            found = rows(question)
            r, _ = speed_ups(found, "dense")
            axis.plot(r, np.add(1, r), "k:", label="the limit, 1 + r")
            for send, (color, style) in lines.items():
                method = recipe.format(fastest if send == "Fastest" else send)
                method = send if send.startswith("dense") else method
                axis.plot(*speed_ups(found, method), style, color=color, label=send)
            axis.axhline(1, color=INK, linewidth=1, label="dense float32")
            axis.set(xscale="log", yscale="log", title=title)
            axis.set(xlabel="r: dense exchange / computation")
        axes[0].set(ylabel="times as fast to the same loss")


def changing_network() -> None:
    """Draw a run on a network that falls from 1 Gbit/s to 100 Mbit/s and recovers."""
    lines = {
        ("dense", "shared"): ("dense float32", INK, ":"),
        ("dense float16", "shared"): ("dense float16", FAINT, "-"),
        ("Bits(2)", "own"): ("Bits(2), own params", RED, "-"),
        ("Fastest up to Bits(1)", "own"): ("Fastest, own params", BLUE, "-"),
        ("Fastest up to Bits(1)", "shared"): ("Fastest, shared params", SKY, "--"),
    }
    found = rows("changing-network")
    with picture("changing_network.svg", (8, 8), 3) as (above, middle, below):
        for (method, at), (label, color, style) in lines.items():
            mine = [x for x in found if (x["method"], x["at"]) == (method, at)]
            look = {"label": label, "color": color, "linestyle": style}
            steps = numbers(mine, "steps") - 30  # each row is a mean of 60 steps
            above.plot(steps, numbers(mine, "ms_step"), **look)
            middle.plot(steps, numbers(mine, "byte_factor"), **look)
            below.plot(numbers(mine, "seconds"), numbers(mine, "value"), **look)
        for axis in (above, middle):
            axis.axvspan(600, 1200, color=FAINT, alpha=0.35, zorder=0)
            axis.set(yscale="log", xlim=(0, 1800), xlabel="step (gray: 100 Mbit/s)")
        above.set(ylabel="milliseconds a step", yticks=(25, 50, 100))
        middle.set(ylabel="times fewer bytes", yticks=(1, 2, 5, 10, 20))
        below.set(xlabel="seconds of the method's own steps", ylim=(1.7, 2.3))
        below.set(ylabel="held-out loss, nats a byte", xlim=(0, None))


def above_dense(found: list[Row], method: str) -> tuple[float, np.ndarray]:
    """Return how many times fewer bytes a method sends, and its gaps in percent.

    Each gap is to the dense run of the same seed; each method has one learning rate.
    """
    dense, mine = ([x for x in found if x["method"] == y] for y in ("dense", method))
    base = {x["seed"]: float(x["value"]) for x in dense}
    gaps = [float(x["value"]) / base[x["seed"]] - 1 for x in mine]
    return numbers(mine, "byte_factor").mean(), 100 * np.array(gaps)


def quality() -> None:
    """Draw the loss above dense over bytes, at the end of 1,500 steps."""
    tasks = {"a GPT": ("quality-adamw", "adamw"), "an LSTM": ("quality-lstm", "sgd")}
    sends = ["Bits(2)", *(f"Bits(2, turns={n})" for n in (2, 4, 8))]
    with picture("quality.svg", (9, 4.5), 1, 2) as axes:
        for axis, (title, (question, recipe)) in zip(axes, tasks.items(), strict=True):
            alike = {"steps": "1500", "replicas": "4", "note": ""}.items()
            found = [x for x in rows(question) if alike <= x.items()]
            drawn = [above_dense(found, f"{recipe}(send={x})") for x in sends]
            means = [(factor, gaps.mean()) for factor, gaps in drawn]
            label = "Bits(2), in 1, 2, 4 and 8 turns; a dash is a seed"
            axis.plot(*zip(*means, strict=True), "o-", color=SKY, label=label)
            for factor, gaps in drawn:
                axis.plot([factor] * gaps.size, gaps, "_", color=SKY)
            axis.axhline(0, color=INK, linewidth=1, label="dense")
            axis.set(xscale="log", title=f"{title}, gravac.{recipe}")
            axis.set(xlabel="times fewer bytes", xticks=(10, 20, 50, 100))
        axes[0].set(ylabel="test loss above dense, percent")


def main() -> None:
    """Draw all figures."""
    (DOCS / "figures").mkdir(exist_ok=True)
    time_to_quality()
    changing_network()
    quality()
