"""Print the table and draw the figure of a record of `paper`, beside the paper's.

    python examples/benchmarks paper.report FILE.jsonl --picture FILE.png

`reported.json` has Table 2 of Tyagi and Swany, 2023, on 32 V100: perplexity, or
accuracy in percent (top-5 for VGG-16), and the time to a target against that of Top-k
at 10. Dense is the target of Table 1. For Random-k on ResNet-101 it says "<= 20".
Floats are those of its communication volumes, values without indices: GraVAC's for both
epsilons are over DGC, Accordion's follow from Table 4 and the volume of dense steps.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from common.figures import picture as new_picture
from common.journal import Line, read
from common.report import markdown
from common.statistics import upper_bound
from matplotlib.axes import Axes
from training.methods import WIDE, in_words

import gravac_jax as gravac

PAPER = json.loads(Path(__file__).with_name("reported.json").read_text())
QUALITY = {
    "lstm_ptb": ("perplexity", 1),
    "resnet_cifar": ("accuracy", 100),
    "vgg_cifar": ("accuracy", 100),
    "transformer_lm": ("loss", 1),
}
NETWORKS_MBIT = (1000, 100)
LATENCY_SECONDS = 1e-4
MESSAGES = 3  # a replica's in a step, over N - 1
BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
STATIC = re.compile(r"fixed[0-9.]+|dense")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to show.

    Args:
      file: A record of `paper`.
      picture: The file for quality against bytes and the course of factors.
    """

    file: tyro.conf.Positional[Path]
    picture: Path | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """The runs of one workload.

    Attributes:
      workload: The training program.
      replicas: N.
      compute_ms: Milliseconds of a dense step of one replica alone.
      selection_ms: What a compressed step takes beyond that.
      runs: One line for each run.
      steps: Steps of a run, if they are not the preset's.
    """

    workload: str
    replicas: int
    compute_ms: float
    selection_ms: float
    runs: list[Line]
    steps: int | None = None

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Return the record of a file."""
        head, lines = read(path)
        configuration = head["configuration"]
        workload, replicas = configuration["workload"], configuration["replicas"]
        times = next(x for x in lines if x["phase"] == "time")
        runs = [x for x in lines if x["phase"] == "train"]
        return cls(workload, replicas, *own_ms(times), runs, configuration["steps"])

    @property
    def methods(self) -> list[str]:
        """The methods in the order of the file, those with entries of 8 bytes last."""
        found = dict.fromkeys(x["method"] for x in self.runs)
        return sorted(found, key=lambda method: method.startswith(WIDE))

    def of(self, method: str) -> list[Line]:
        """Return the runs of a method, one a seed."""
        return [x for x in self.runs if x["method"] == method]

    def mean(self, method: str, figure: Callable[[Line], float]) -> float:
        """Return the mean of a figure over the seeds of a method."""
        return float(np.mean([figure(x) for x in self.of(method)]))

    def gaps(self, method: str) -> list[float]:
        """Return the test loss over that of dense steps, less one, for each seed."""
        dense = {x["seed"]: x["test"]["loss"] for x in self.of("dense")}
        own = [x for x in self.of(method) if x["seed"] in dense]
        return [x["test"]["loss"] / dense[x["seed"]] - 1 for x in own]

    def place(self, method: str) -> tuple[float, float]:
        """Return dense bytes over the method's bytes, and its mean gap."""
        return self.mean(method, saved), float(np.mean(self.gaps(method)))

    @property
    def static_places(self) -> list[tuple[float, float]]:
        """The places of dense steps and static factors, from most bytes to least."""
        return sorted(self.place(x) for x in self.methods if STATIC.fullmatch(x))

    def frontier(self, method: str) -> float:
        """Return the gap of static factors that save as many bytes.

        Between two of them, of which dense steps are the first, it is linear in the
        logarithm of dense bytes over bytes; NaN beyond the last.
        """
        saves, gaps = zip(*self.static_places, strict=True)
        own, _ = self.place(method)
        if own > saves[-1]:
            return math.nan
        return float(np.interp(math.log(own), np.log(saves), gaps))

    def step_ms(self, line: Line, bandwidth_mbit: float) -> float:
        """Return the milliseconds of a run's mean step on a network of that bandwidth.

        Computation and selection as they were timed, bytes over bandwidth.
        """
        messages = MESSAGES * (self.replicas - 1)
        wire = gravac.WireCost(125e3 * bandwidth_mbit, LATENCY_SECONDS)
        sent_bytes = line["wire_bytes"] / line["steps"]
        share = 1 - line["dense_steps"] / line["steps"]
        own_ms = self.compute_ms + share * self.selection_ms
        return own_ms + 1e3 * wire.exchange_seconds(sent_bytes, messages)


def own_ms(times: Line) -> tuple[float, float]:
    """Return the milliseconds of computation and of selection in a step."""
    (_, dense, _), (_, compressed, _) = times["dense_ms"], times["fixed100_ms"]
    return dense, max(0.0, round(compressed - dense, 2))


def _narrow(method: str) -> str:
    """Return the name of the method with entries of 4 bytes."""
    return method.removeprefix(WIDE)


def saved(line: Line) -> float:
    """Return dense bytes over bytes, of a run."""
    return line["dense_wire_bytes"] / line["wire_bytes"]


def rows(record: Record) -> list[list[str]]:
    """Return a row a method, means over seeds; the heading is the first row.

    Methods of the paper that were not run have "-", beside runs of the preset's length.
    """
    name, unit = QUALITY[record.workload]
    titles = [
        *("method", "seeds", f"test {name}", "loss above dense", "95% bound"),
        *("dense bytes over bytes", "static factors there, above dense", "mean factor"),
        *(f"step at {x} Mbit/s, ms (static 10 over it)" for x in NETWORKS_MBIT),
        "paper, full size",
    ]
    table, paper = [titles], PAPER[record.workload]
    have_run = set(map(_narrow, record.methods))
    missing = [x for x in paper if x not in have_run and record.steps is None]
    for method in [*record.methods, *missing]:
        cells = ["-"] * (len(titles) - 2)
        if runs := record.of(method):
            gaps = record.gaps(method)
            is_apart = STATIC.fullmatch(method) or method != _narrow(method)
            static = math.nan if is_apart else record.frontier(method)
            bound = math.nan if method == "dense" else upper_bound(gaps)
            cells = [
                f"{len(runs)}",
                f"{record.mean(method, lambda x: unit * x['test'][name]):.4g}",
                f"{np.mean(gaps):+.1%}" if method != "dense" else "",
                "" if math.isnan(bound) else f"{bound:.1%}",
                f"{record.mean(method, saved):.1f}",
                "" if math.isnan(static) else f"{static:+.1%}",
                f"{record.mean(method, lambda x: x['mean_factor'] or math.nan):.1f}",
            ]
            for mbit in NETWORKS_MBIT:
                own = record.mean(method, lambda x, mbit=mbit: record.step_ms(x, mbit))
                cells.append(f"{own:.0f}{_over(record, mbit, own)}")
        table.append([method, *cells, paper.get(_narrow(method), "")])
    return table


def _over(record: Record, mbit: float, own: float) -> str:
    """Return how many times as long a step of static factor 10 takes, if it was run."""
    if not record.of("fixed10"):
        return ""
    return f" ({record.mean('fixed10', lambda x: record.step_ms(x, mbit)) / own:.1f})"


def text(path: Path) -> str:
    """Return the table, and what its times are made of."""
    record = Record.read(path)
    return (
        f"{markdown(rows(record))}\n\n{record.replicas} replicas, "
        f"{record.runs[0]['steps']} steps. A step of one replica alone takes "
        f"{record.compute_ms:.1f} ms, and {record.selection_ms:.1f} ms more at static "
        "factor 100, of which the selection stands for that of all methods but dense "
        f"ones; {1e3 * LATENCY_SECONDS:g} ms a message, of {MESSAGES} (N - 1) a step, "
        "as a mean and an all-gather have. Static factors that send as much are on the "
        "figure's line between two of them. `wide` entries have 8 bytes, as the "
        "paper's code sends them, others 4. The paper's times are those to a target, "
        "over that of Top-k at 10."
    )


def draw(path: Path, picture: Path) -> None:
    """Draw loss against bytes, and the factors that were chosen."""
    record = Record.read(path)
    changing = [x for x in record.methods if len(record.of(x)[0]["course"]) > 1]
    panels = 2 if changing else 1
    size = (6.5 * panels, 6)
    with new_picture(picture, size, columns=panels) as (_, axes):
        _draw_frontier(record, axes[0, 0])
        if changing:
            _draw_courses(record, changing, axes[0, 1])


def _draw_frontier(record: Record, axis: Axes) -> None:
    percent = lambda places: zip(*((x, 100 * gap) for x, gap in places), strict=True)
    static = percent(record.static_places)
    axis.plot(*static, "k.-", label="dense, then sparse at static factors")
    others = [x for x in record.methods if not STATIC.fullmatch(_narrow(x))]
    wide = [x for x in record.methods if _narrow(x) != x and x not in others]
    if wide:
        line = percent(sorted(map(record.place, wide)))
        axis.plot(*line, ".:", color="gray", label="the same, 8 bytes an entry")
    markers = "osD^v<>Pphd*X"
    for method, marker in zip(others, markers * 2, strict=False):
        size = 12 if method == "default" else 6
        style = {"marker": "*" if method == "default" else marker, "markersize": size}
        axis.plot(
            *percent([record.place(method)]),
            linestyle="",
            label=in_words(method),
            **style,
        )
    axis.set(xscale="log", xlabel="times fewer bytes than dense steps")
    axis.set(ylabel="test loss above dense of the same seed, %")
    axis.legend(fontsize="x-small", ncols=2, **BELOW)


def _draw_courses(record: Record, methods: list[str], axis: Axes) -> None:
    for method in methods:
        line = record.of(method)[0]
        steps, factors = zip(*line["course"], strict=True)
        ends, last = (*steps, line["steps"]), (*factors, factors[-1])
        axis.step(ends, last, where="post", label=in_words(method), linewidth=1)
    axis.set(
        yscale="log",
        xlabel="step",
        ylabel="factor of the compressed leaves, first seed",
    )
    axis.legend(fontsize="x-small", ncols=2, **BELOW)


def main(args: Args) -> None:
    """Print the table, and draw the figure if it is asked for."""
    print(text(args.file))
    if args.picture:
        draw(args.file, args.picture)
