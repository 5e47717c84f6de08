"""Fit the law of progress, and say how wrong it is on workloads it was not fitted on.

The law: a step is worth 1 / (1 + c sqrt(waiting steps)) dense steps. c is fitted to the
runs of all workloads but one at own params, and tried on that one. Runs are those of
`controllers.progress`, `quality` and `end_to_end` in few bits, in turns or in rounds.

    python examples/benchmarks controllers.fit examples/benchmarks/records
"""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from common.figures import FAINT, legend_below, picture
from common.journal import Line, read
from common.report import markdown
from common.statistics import reached
from matplotlib import colormaps

from controllers.progress import DILOCO, LADDER, OPTIMIZERS, runs_of, worths
from gravac_jax._controllers.progress import WAITING_COST, progress
from gravac_jax._selection.waiting import (
    ROUNDING_WAITS,
    shares_by_chance,
    waiting_steps,
)

SMALL = "2026-11-25_progress/small.jsonl"
GPT, LSTM = "GPT, AdamW", "LSTM, momentum SGD"
NAMES = {x: f"small net, {y}" for x, y in OPTIMIZERS.items()}
BITS = {4.0: "8 bits", 8.0: "4 bits", 16.0: "2 bits", 32.0: "1 bit"}
METHOD = re.compile(r"(?:(local)|(every|turns)(\d+))?allreduced(?:adam)?(\d+)")
LEAST = 0.9  # progress, asked of Fastest
PAST_PLATEAU = 300  # steps, before which curves of the quality records say little


@dataclasses.dataclass(frozen=True)
class Law:
    """A law of progress.

    Args:
      cost: c.
      rounding: What rounding leaves to the next exchange, as a part of what a choice by
        chance leaves.
    """

    cost: float
    rounding: float

    def waiting(self, share: Any, steps: Any) -> Any:
        """Return the steps that an entry waits."""
        return waiting_steps(share, steps, counted=self.rounding)

    def worth(self, waiting: Any, cost: float | None = None) -> Any:
        """Return what a step is worth, at another c if one is given."""
        return 1 / (1 + (self.cost if cost is None else cost) * np.sqrt(waiting))


NOW = Law(cost=WAITING_COST, rounding=ROUNDING_WAITS)
BEFORE = Law(cost=0.15, rounding=1.0)  # until 2026-11-27


@dataclasses.dataclass(frozen=True)
class Workloads:
    """What a law is compared with, besides the small network.

    Args:
      levels: The records of what widths keep of a gradient, by task.
      tasks: The tasks of workloads.
      quality: Files of `quality` that are parts of one record, and its workload.
      races: Records of `end_to_end`, and the workload of each.
    """

    levels: tuple[str, ...]
    tasks: Mapping[str, str]
    quality: Mapping[tuple[str, ...], str]
    races: Mapping[str, str] = dataclasses.field(default_factory=dict)


FIVE = Workloads(
    levels=("2026-11-24_steps/levels.jsonl",),
    tasks={GPT: "transformer-bytes", LSTM: "lstm-bytes"},
    quality={
        ("2026-11-24_steps/adamw.jsonl",): GPT,
        ("2026-11-25_rounds/adamw.jsonl",): GPT,
        ("2026-11-24_steps/lstm.jsonl",): LSTM,
    },
)
LONGER = "2026-11-27_longer_runs"
VGG, CNN = "VGG, two hosts", "CNN, two hosts"
VGG_4, CNN_4 = "VGG, four replicas", "CNN, four replicas"
PTB, GPT_2 = "LSTM on PTB, two hosts", "GPT, AdamW, two hosts"
MARKERS = "osD^v<>Php*"
ALL = Workloads(
    levels=(*FIVE.levels, f"{LONGER}/shares.jsonl"),
    tasks={
        **FIVE.tasks,
        **dict.fromkeys((VGG, VGG_4), "vgg-cifar10"),
        **dict.fromkeys((CNN, CNN_4), "resnet-cifar10"),
        PTB: "lstm-ptb",
        GPT_2: "transformer-bytes",
    },
    quality={
        **FIVE.quality,
        (f"{LONGER}/vgg_4.jsonl",): VGG_4,
        (f"{LONGER}/resnet_4.jsonl", f"{LONGER}/resnet_4_few_bits.jsonl"): CNN_4,
    },
    races={
        f"{LONGER}/vgg_2_runs.jsonl": VGG,
        f"{LONGER}/resnet_2_runs.jsonl": CNN,
        f"{LONGER}/ptb_2_runs.jsonl": PTB,
        f"{LONGER}/gpt_2_runs.jsonl": GPT_2,
    },
)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a step of one kind of run is worth.

    Args:
      workload: The model and its optimizer.
      choice: The rung and the length of rounds, in words.
      is_own: Whether gradients are taken at each replica's own params.
      waiting: Steps that an entry waits, by the share that is sent of it.
      worth: Dense steps that a step is worth, the mean over seeds.
      spread: The least and the most of the seeds.
    """

    workload: str
    choice: str
    is_own: bool
    waiting: float
    worth: float
    spread: tuple[float, float]


def made(workload: str, what: tuple[str, bool], wait: float, worths: Any) -> Run:
    """Return a run from what its seeds were worth."""
    spread = min(worths), max(worths)
    return Run(workload, *what, wait, float(np.mean(worths)), spread)


def words(factor: float, how: str | None = None, steps: int = 1) -> str:
    """Return a choice in words."""
    width = "whole" if factor == 1 else BITS[factor]
    if steps == 1:
        return width
    how_often = f" in {steps} turns" if how == "turns" else f", every {steps} steps"
    return width + how_often


def small(path: Path, law: Law) -> list[Run]:
    """Return the runs of the small network.

    Its shares are from before rounding counted a tenth in them.
    """
    lines = [x for x in runs_of(path) if x["params"] != DILOCO]
    runs = []
    for optimizer, name in NAMES.items():
        ours = [x for x in lines if x["optimizer"] == optimizer]
        of = lambda x: (x["params"], x["factor"], x["steps"])
        for kind in dict.fromkeys(map(of, ours)):
            where, factor, steps = kind
            if factor == steps == 1:
                continue
            found = [x for x in ours if of(x) == kind]
            share = np.mean([x["shares"][LADDER.index(factor)] for x in found])
            what = words(factor, "every", steps), where == "own"
            runs.append(
                made(name, what, law.waiting(share, steps), worths(ours, *kind))
            )
    return runs


def of_methods(records: Path, workloads: Workloads, law: Law) -> list[Run]:
    """Return the runs of methods of few bits, in records of `quality` and of races."""
    levels = "".join((records / x).read_text() for x in workloads.levels)
    # The first record of levels says "1 bits".
    levels = levels.replace('"1 bits"', '"1 bit"')
    shares = {x["task"]: x for x in map(json.loads, levels.splitlines())}
    files = [(x, y, _along) for x, y in workloads.quality.items()]
    files += [((x,), y, _in_race) for x, y in workloads.races.items()]
    runs = []
    for names, workload, worth in files:
        lines = [x for name in names for x in read(records / name)[1]]
        lines = [x for x in lines if x.get("phase") != "tune"]
        for method in dict.fromkeys(x["method"] for x in lines):
            if not (matched := METHOD.fullmatch(method)):
                continue
            local, how, steps, factor = matched.groups()
            steps, factor = int(steps or 1), float(factor)
            share = shares[workloads.tasks[workload]][BITS[factor]]
            # Steps that are exchanged are taken at each replica's own params.
            is_own = bool(local or how) or "adam" in method
            found = [worth(lines, method, seed) for seed in _seeds(lines, method)]
            what = words(factor, how, steps), is_own
            runs.append(made(workload, what, law.waiting(share, steps), found))
    return runs


def _seeds(lines: list[Line], method: str) -> list[int]:
    found = {x["seed"] for x in lines if x["method"] == method}
    return sorted(found & {x["seed"] for x in lines if x["method"] == "dense"})


def _along(lines: list[Line], method: str, seed: int) -> float:
    """Return where dense steps had a run's loss over where it had it, in the mean."""
    ours = [x for x in lines if x["seed"] == seed]
    of = lambda name: [(x["step"], x["loss"]) for x in ours if x["method"] == name]
    (at, dense), mine = zip(*of("dense"), strict=True), of(method)
    found = [(step, reached(dense, at, loss)) for step, loss in mine]
    inside = [x / step for step, x in found if x and PAST_PLATEAU <= step < at[-1]]
    return float(np.mean(inside))


def _in_race(lines: list[Line], method: str, seed: int) -> float:
    """Return the dense steps to the target over those of a run."""

    def steps(name: str) -> float:
        (line,) = (x for x in lines if (x["seed"], x["method"]) == (seed, name))
        at = [sum(x) for x in line["taken"]]
        found = reached(line["losses"], at, line["target"])
        if found is None:
            raise ValueError(f"{name} of seed {seed} did not reach its target")
        return found

    return steps("dense") / steps(method)


def fitted(runs: Iterable[Run], law: Law) -> float:
    """Return the c with the least error of the worth."""
    runs, costs = list(runs), np.linspace(0, 1, 1001)
    return float(costs[int(np.argmin([error(runs, law, c) for c in costs]))])


def error(runs: Iterable[Run], law: Law, cost: float) -> float:
    """Return the root mean square error at own params, all workloads alike."""
    found = [x for x in runs if x.is_own]
    count = Counter(x.workload for x in found)
    wait, worth = (
        np.array([getattr(x, k) for x in found]) for k in ("waiting", "worth")
    )
    weight = np.array([1 / count[x.workload] for x in found]) / len(count)
    return float(np.sqrt((weight * (law.worth(wait, cost) - worth) ** 2).sum()))


def text(records: Path, workloads: Workloads = ALL, law: Law = NOW) -> str:
    """Return the tables of the record."""
    runs = all_runs(records, workloads, law)
    names = list(dict.fromkeys(x.workload for x in runs))
    rows = [
        f"c fitted to all workloads: {fitted(runs, law):.3f}; `Fastest` has"
        f" {law.cost:g}.",
        "",
        "| left out | c of it alone | c of the others | its runs | error of what they"
        " predict: root mean square, mean, worst | error with"
        f" c = {law.cost:g}, the same |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in names:
        own = [x for x in runs if x.workload == name and x.is_own]
        cost = fitted((x for x in runs if x.workload != name), law)
        errors = [_errors(own, law, c) for c in (cost, law.cost)]
        rows.append(
            f"| {name} | {fitted(own, law):.3f} | {cost:.3f} | {len(own)} |"
            f" {errors[0]} | {errors[1]} |"
        )
    rows += ["", *_least_progress(runs, law)]
    rows += [
        "",
        f"| workload | sent | params | waiting steps | worth (seeds) | law, c ="
        f" {law.cost:g} |",
        "|---|---|---|--:|--:|--:|",
    ]
    for x in runs:
        low, high = x.spread
        predicted = law.worth(x.waiting)
        where = "own" if x.is_own else "shared"
        rows.append(
            f"| {x.workload} | {x.choice} | {where} | {x.waiting:.2f} |"
            f" {x.worth:.2f} ({low:.2f} to {high:.2f}) | {predicted:.2f} |"
        )
    return "\n".join(rows)


def _least_progress(runs: list[Run], law: Law) -> list[str]:
    """Return what the narrowest allowed rung of each workload predicts and realised."""
    rows = [
        f"| workload | the narrowest rung that `least_progress={LEAST:g}` allows |"
        " predicted | realised: mean (seeds) |",
        "|---|---|--:|--:|",
    ]
    every_step = [x for x in runs if x.is_own and "every" not in x.choice]
    predicted = lambda x: law.worth(x.waiting)
    for name in dict.fromkeys(x.workload for x in every_step):
        allowed = [
            x for x in every_step if x.workload == name and predicted(x) >= LEAST
        ]
        taken = min(allowed, key=predicted)
        low, high = taken.spread
        rows.append(
            f"| {name} | {taken.choice} | {predicted(taken):.2f} |"
            f" {taken.worth:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return rows


def _errors(runs: list[Run], law: Law, cost: float) -> str:
    errors = np.array([law.worth(x.waiting, cost) - x.worth for x in runs])
    worst = errors[np.argmax(np.abs(errors))]
    square = np.sqrt(np.mean(errors**2))
    return f"{square:.3f}, {np.mean(errors):+.3f}, {worst:+.2f}"


def of_rounding(records: Path) -> str:
    """Return how wrong the law is, by how much of what is rounded counts as waiting."""
    rows = [["rounding waits", "best c", "its error", f"error with c = {NOW.cost:g}"]]
    for part in (0, 0.05, 0.1, 0.2, 0.5, 1):
        law = dataclasses.replace(NOW, rounding=part)
        runs = all_runs(records, ALL, law)
        best = fitted(runs, law)
        errors = (f"{error(runs, law, c):.3f}" for c in (best, NOW.cost))
        rows.append([f"{part:g}", f"{best:.2f}", *errors])
    return markdown(rows)


def selections(path: Path) -> str:
    """Return what a step of a selection is worth, by the law with and without its rest.

    Args:
      path: A record of `controllers.progress` with factors of a selection.
    """
    head, lines = read(path)[0]["configuration"], runs_of(path)
    ladder = head["ladder"]
    rows = [
        [
            "optimizer",
            "factor",
            "share",
            "worth (seeds)",
            "law by the share alone",
            "law",
        ]
    ]
    for optimizer, name in OPTIMIZERS.items():
        ours = [x for x in lines if x["optimizer"] == optimizer]
        for factor in head["sparse_factors"]:
            found = [x for x in ours if x["factor"] == factor]
            at = ladder.index(factor)
            share = jnp.float32(np.mean([x["shares"][at] for x in found]))
            chance = shares_by_chance(share[None], (1,), round(factor))[0]
            worth = worths(ours, "own", factor, 1)
            predicted = [float(progress(x)) for x in (share, chance)]
            said = f"{np.mean(worth):.2f} ({min(worth):.2f} to {max(worth):.2f})"
            figures = (f"{x:.2f}" for x in predicted)
            rows.append([name, f"{factor:g}", f"{share:.2f}", said, *figures])
    return markdown(rows)


def all_runs(records: Path, workloads: Workloads, law: Law) -> list[Run]:
    """Return all runs, workload by workload."""
    return [*small(records / SMALL, law), *of_methods(records, workloads, law)]


def draw(records: Path, path: Path, workloads: Workloads, law: Law) -> None:
    """Draw what steps are worth against the steps that entries wait, and the law."""
    runs = all_runs(records, workloads, law)
    names = list(dict.fromkeys(x.workload for x in runs))
    with picture(path, (8, 5)) as (figure, axes):
        axis = axes[0, 0]
        for i, name in enumerate(names):
            for is_own, shape in ((True, MARKERS[i]), (False, "x")):
                ours = [x for x in runs if (x.workload, x.is_own) == (name, is_own)]
                wait, worth = (
                    [x.waiting for x in ours],
                    np.array([x.worth for x in ours]),
                )
                spread = np.abs(
                    np.array([x.spread for x in ours]).reshape(-1, 2).T - worth
                )
                label = name if is_own else f"{name}, shared params"
                if ours:
                    style = {"fmt": shape, "color": colormaps["tab20"](i), "ms": 5}
                    axis.errorbar(wait, worth, spread, label=label, **style)
        wait = np.geomspace(1e-5, 200, 200)
        label = f"1 / (1 + {law.cost:g} sqrt(waiting))"
        axis.plot(wait, law.worth(wait), color="k", label=label)
        axis.axhline(1, color=FAINT)
        counted = f"; rounding counts {law.rounding:g}" if law.rounding < 1 else ""
        what = f"steps that an entry of the gradient waits{counted}"
        axis.set(xscale="log", xlabel=what, xlim=(1e-3, None))
        axis.set(ylabel="what a step is worth, in dense steps", ylim=(0, None))
        legend_below(figure, 2)


def main(records: str = "examples/benchmarks/records") -> None:
    """Print the tables."""
    print(of_rounding(Path(records)), text(Path(records)), sep="\n\n")
