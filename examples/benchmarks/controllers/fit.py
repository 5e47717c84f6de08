"""Fit the law of progress, and say how wrong it is on workloads it was not fitted on.

The law: a step is worth 1 / (1 + c sqrt(waiting steps)) dense steps. c is fitted to the
runs of all workloads but one, and tried on that one. Runs are those of
`controllers.progress` and of the quality records that have rungs of the default ladder
or rounds, at each replica's own params.

    python examples/benchmarks controllers.fit examples/benchmarks/records
"""

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from common.figures import FAINT, legend_below, picture
from common.journal import Line, read
from common.report import markdown
from common.statistics import reached

from controllers.progress import DILOCO, LADDER, OPTIMIZERS, runs_of, worths
from gravac_jax._controllers.progress import WAITING_COST, progress
from gravac_jax._selection.waiting import shares_by_chance, waiting_steps

SMALL = "2026-11-25_progress/small.jsonl"
LEVELS = "2026-11-24_steps/levels.jsonl"
GPT, LSTM = "GPT, AdamW", "LSTM, momentum SGD"
QUALITY = {
    "2026-11-24_steps/adamw.jsonl": GPT,
    "2026-11-25_rounds/adamw.jsonl": GPT,
    "2026-11-24_steps/lstm.jsonl": LSTM,
}
TASKS = {GPT: "transformer-bytes", LSTM: "lstm-bytes"}
NAMES = {x: f"small net, {y}" for x, y in OPTIMIZERS.items()}
BITS = {4.0: "8 bits", 8.0: "4 bits", 16.0: "2 bits", 32.0: "1 bits"}
METHOD = re.compile(r"(?:local|every(\d+))allreduced(?:adam)?(\d+)")
SHARED = re.compile(r"allreduced(\d+)")
LEAST = 0.9  # progress, asked of Fastest
PAST_PLATEAU = 300  # steps, before which curves of the quality records say little


@dataclasses.dataclass(frozen=True)
class Run:
    """What a step of one kind of run is worth.

    Args:
      workload: The model and its optimizer.
      choice: The rung and the length of rounds, in words.
      is_own: Whether gradients are taken at each replica's own params.
      waiting: Steps that an entry waits, by the share that a rung sends.
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


def words(factor: float, steps: int) -> str:
    """Return a choice in words."""
    width = "whole" if factor == 1 else BITS[factor].replace("1 bits", "1 bit")
    return width if steps == 1 else f"{width}, every {steps} steps"


def small(path: Path) -> list[Run]:
    """Return the runs of the small network."""
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
            wait = float(waiting_steps(jnp.float32(share), steps))
            what = words(factor, steps), where == "own"
            runs.append(made(name, what, wait, worths(ours, *kind)))
    return runs


def quality(records: Path) -> list[Run]:
    """Return the runs of the quality records."""
    text = (records / LEVELS).read_text().splitlines()
    shares = {x["task"]: x for x in map(json.loads, text)}
    runs = []
    for name, workload in QUALITY.items():
        _, lines = read(records / name)
        for method in dict.fromkeys(x["method"] for x in lines):
            matched = METHOD.fullmatch(method)
            shared = SHARED.fullmatch(method)
            if not (matched or shared):
                continue
            steps = int(matched[1] or 1) if matched else 1
            factor = float(matched[2] if matched else shared[1])  # type: ignore[index]
            share = shares[TASKS[workload]][BITS[factor]]
            wait = float(waiting_steps(jnp.float32(share), steps))
            worths = [_worth(lines, method, seed) for seed in _seeds(lines, method)]
            # Steps that are exchanged are taken at each replica's own params.
            what = words(factor, steps), bool(matched)
            runs.append(made(workload, what, wait, worths))
    return runs


def _seeds(lines: list[Line], method: str) -> list[int]:
    found = {x["seed"] for x in lines if x["method"] == method}
    return sorted(found & {x["seed"] for x in lines if x["method"] == "dense"})


def _worth(lines: list[Line], method: str, seed: int) -> float:
    """Return where dense steps had a run's loss over where it had it, in the mean."""
    ours = [x for x in lines if x["seed"] == seed]
    of = lambda name: [(x["step"], x["loss"]) for x in ours if x["method"] == name]
    (at, dense), mine = zip(*of("dense"), strict=True), of(method)
    found = [(step, reached(dense, at, loss)) for step, loss in mine]
    inside = [x / step for step, x in found if x and PAST_PLATEAU <= step < at[-1]]
    return float(np.mean(inside))


def law(cost: float, waiting: Any) -> Any:
    """Return what a step is worth by the law."""
    return 1 / (1 + cost * np.sqrt(waiting))


def fitted(runs: Iterable[Run]) -> float:
    """Return the c with the least squared error of the worth, all workloads alike."""
    found = [x for x in runs if x.is_own]
    count = {
        y: sum(x.workload == y for x in found) for y in {x.workload for x in found}
    }
    wait, worth = (
        np.array([getattr(x, k) for x in found]) for k in ("waiting", "worth")
    )
    weight = np.array([1 / count[x.workload] for x in found])
    costs = np.linspace(0, 1, 1001)
    errors = [(weight * (law(c, wait) - worth) ** 2).sum() for c in costs]
    return float(costs[int(np.argmin(errors))])


def text(records: Path) -> str:
    """Return the tables of the record."""
    runs = all_runs(records)
    workloads = list(dict.fromkeys(x.workload for x in runs))
    rows = [
        f"c fitted to all workloads: {fitted(runs):.3f}; `Fastest` has"
        f" {WAITING_COST:g}.",
        "",
        "| left out | c of it alone | c of the others | its runs | error of what they"
        " predict: root mean square, mean, worst | error with"
        f" c = {WAITING_COST:g}, the same |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in workloads:
        own = [x for x in runs if x.workload == name and x.is_own]
        cost = fitted(x for x in runs if x.workload != name)
        errors = [_errors(own, c) for c in (cost, WAITING_COST)]
        alone = fitted(own)
        rows.append(
            f"| {name} | {alone:.3f} | {cost:.3f} | {len(own)} | {errors[0]} |"
            f" {errors[1]} |"
        )
    rows += ["", *_least_progress(runs)]
    rows += [
        "",
        f"| workload | sent | params | waiting steps | worth (seeds) | law, c ="
        f" {WAITING_COST:g} |",
        "|---|---|---|--:|--:|--:|",
    ]
    for x in runs:
        low, high = x.spread
        predicted = law(WAITING_COST, x.waiting)
        where = "own" if x.is_own else "shared"
        rows.append(
            f"| {x.workload} | {x.choice} | {where} | {x.waiting:.2f} |"
            f" {x.worth:.2f} ({low:.2f} to {high:.2f}) | {predicted:.2f} |"
        )
    return "\n".join(rows)


def _least_progress(runs: list[Run]) -> list[str]:
    """Return what the narrowest allowed rung of each workload predicts and realised."""
    rows = [
        f"| workload | the narrowest rung that `least_progress={LEAST:g}` allows |"
        " predicted | realised: mean (seeds) |",
        "|---|---|--:|--:|",
    ]
    every_step = [x for x in runs if x.is_own and "every" not in x.choice]
    for name in dict.fromkeys(x.workload for x in every_step):
        predicted = lambda x: law(WAITING_COST, x.waiting)
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


def _errors(runs: list[Run], cost: float) -> str:
    errors = np.array([law(cost, x.waiting) - x.worth for x in runs])
    worst = errors[np.argmax(np.abs(errors))]
    square = np.sqrt(np.mean(errors**2))
    return f"{square:.3f}, {np.mean(errors):+.3f}, {worst:+.2f}"


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


def all_runs(records: Path) -> list[Run]:
    """Return all runs, workload by workload."""
    return [*small(records / SMALL), *quality(records)]


def draw(records: Path, path: Path) -> None:
    """Draw what steps are worth against the steps that entries wait, and the law."""
    runs = all_runs(records)
    workloads = list(dict.fromkeys(x.workload for x in runs))
    with picture(path, (8, 5)) as (figure, axes):
        axis = axes[0, 0]
        for i, name in enumerate(workloads):
            for is_own, shape in ((True, "o"), (False, "x")):
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
                    axis.errorbar(
                        wait, worth, spread, fmt=shape, color=f"C{i}", label=label, ms=5
                    )
        wait = np.geomspace(1e-3, 200, 200)
        label = f"1 / (1 + {WAITING_COST:g} sqrt(waiting))"
        axis.plot(wait, law(WAITING_COST, wait), color="k", label=label)
        axis.axhline(1, color=FAINT)
        axis.set(xscale="log", xlabel="steps that an entry of the gradient waits")
        axis.set(ylabel="what a step is worth, in dense steps", ylim=(0, 1.2))
        legend_below(figure, 2)


def main(records: str = "examples/benchmarks/records") -> None:
    """Print the tables."""
    print(text(Path(records)))
