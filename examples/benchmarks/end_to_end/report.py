"""Print tables of `end_to_end`: speed-ups, as a share of 1 + r.

With r a dense exchange over computation, no method that computes the same gradients is
faster than dense steps by more than 1 + r. A baseline's 1 + r is its own step over a
step's computation, as `step_seconds` has measured both, so that a baseline in 16 bits
has another one; the speed-up over the better of both is given as a share of its 1 + r.

    python examples/benchmarks end_to_end.report --timed STEPS --runs RUNS --hosts 4
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
from common.journal import Line, read
from common.report import markdown, rate
from common.statistics import reached, upper_bound
from step_seconds.methods import BASELINES, HALF, ladder_of
from step_seconds.timed import Mbit, Timed
from training.methods import DENSE


@dataclasses.dataclass(frozen=True)
class Args:
    """What to report on.

    Args:
      timed: A record of `step_seconds`.
      runs: A record of `end_to_end`.
      hosts: The number of replicas of both.
    """

    timed: Path
    runs: Path
    hosts: int = 4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a method needs on a network; infinite where it missed the target.

    Attributes:
      seeds: The seeds of its runs.
      steps: Steps to the target, for each seed.
      seconds: Seconds to the target, for each seed.
      wire_bytes: What one replica sent to the target, for each seed.
    """

    seeds: list[int]
    steps: list[float]
    seconds: list[float]
    wire_bytes: list[float]

    @property
    def step_seconds(self) -> float:
        """The mean seconds of a step, over all runs."""
        seconds = sum(self.seconds)
        return seconds / sum(self.steps) if math.isfinite(seconds) else math.nan


def with_float16(runs: list[Line]) -> list[Line]:
    """Add runs of float16 means: those of dense steps, at half of the bytes.

    They are timed and not made, which favours them: the cost of 11 bits is left out.
    """
    halved = lambda x: {"wire_bytes": [y / 2 for y in x["wire_bytes"]]}
    dense = [x for x in runs if x["method"] == DENSE]
    return [*runs, *({**x, **halved(x), "method": HALF} for x in dense)]


def outcomes(runs: list[Line], timed: Timed, link: Mbit) -> dict[str, Outcome]:
    """Return the outcome of each method on a network."""
    found: dict[str, Outcome] = {}
    for run in runs:
        if run.get("bandwidth_mbit", link) != link:
            continue
        outcome = found.setdefault(run["method"], Outcome([], [], [], []))
        mine = run["seed"], *_at_target(run, timed, link)
        for figures, x in zip(vars(outcome).values(), mine, strict=True):
            figures.append(x)
    return found


def _at_target(run: Line, timed: Timed, link: Mbit) -> tuple[float, ...]:
    """Return steps, seconds and bytes; infinite where the target was missed."""
    name, taken = run["method"], run["taken"]
    steps = [float(sum(x.values())) for x in taken]
    own = timed.own_seconds(link, name)
    seconds = [
        timed.steps(link, name, x) + own * n for x, n in zip(taken, steps, strict=True)
    ]
    at = lambda figures: reached(run["losses"], figures, run["target"])
    found = map(at, (steps, seconds, run["wire_bytes"]))
    return tuple(math.inf if x is None else x for x in found)


def limit(timed: Timed, link: Mbit, baseline: str) -> float:
    """Return 1 + r, the largest speed-up over that baseline."""
    return timed.mean(link, baseline) / timed.median(link, DENSE, "slowest_compute")


def better_baseline(found: dict[str, Outcome]) -> str:
    """Return the dense baseline that reaches the target sooner."""
    seconds = lambda name: np.mean(found[name].seconds)
    return min((x for x in BASELINES if x in found), key=seconds)


def speed_ups(mine: Outcome, other: Outcome) -> list[float]:
    """Return how many times as fast it is to the target, for seeds that both have."""
    theirs = dict(zip(other.seeds, other.seconds, strict=True))
    own = zip(mine.seeds, mine.seconds, strict=True)
    found = [theirs[seed] / x for seed, x in own if seed in theirs]
    is_known = all(map(math.isfinite, mine.seconds + other.seconds))
    return found if found and is_known else [math.nan]


def rows(timed: Timed, runs: list[Line], link: Mbit) -> list[list[str]]:
    """Return the table of a network; the heading is the first row."""
    found = outcomes(runs, timed, link)
    baseline = better_baseline(found)
    ceiling = limit(timed, link, baseline)
    has_one = lambda x: x not in BASELINES and len(ladder_of(x)) == 1
    static = sorted(filter(has_one, found), key=lambda x: np.mean(found[x].seconds))
    head = ["method", "steps", "ms a step", "seconds (range)", "MB sent"]
    others = [*(x for x in BASELINES if x in found), *static[:1]]
    head += [f"x {name}" for name in others]
    table = [[*head, f"of {ceiling:.2f}", "share, 95% bound"]]
    for name, x in found.items():
        share = np.divide(speed_ups(x, found[baseline]), ceiling)
        cells = [
            name,
            f"{np.mean(x.steps):.0f}",
            f"{1e3 * x.step_seconds:.1f}",
            f"{np.mean(x.seconds):.1f} ({min(x.seconds):.1f} to {max(x.seconds):.1f})",
            f"{np.mean(x.wire_bytes) / 1e6:.0f}",
            *(f"{np.mean(speed_ups(x, found[other])):.2f}" for other in others),
            f"{share.mean():.0%}",
            f"{-upper_bound([-y for y in share]):.0%}",
        ]
        is_number = lambda x: "inf" not in x and "nan" not in x
        table.append([x if is_number(x) else "-" for x in cells])
    return table


def text(timed_path: Path, runs_path: Path, hosts: int) -> str:
    """Return all tables, as Markdown.

    Args:
      timed_path: A record of `step_seconds`.
      runs_path: A record of `end_to_end`.
      hosts: The number of replicas of both.
    """
    _, lines = read(timed_path)
    runs, timed = read(runs_path)[1], Timed(lines, hosts)
    if any(x["method"] == HALF for x in lines):
        runs = with_float16(runs)
    parts = []
    for link in timed.links:
        ratio = limit(timed, link, DENSE) - 1
        title = f"### {hosts} hosts, {rate(link, ' Mbit/s')}: r = {ratio:.2f}"
        parts += [title, markdown(rows(timed, runs, link))]
    return "\n\n".join(parts)


def main(args: Args) -> None:
    """Print all tables."""
    print(text(args.timed, args.runs, args.hosts))
