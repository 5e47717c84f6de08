"""Print tables and draw a picture of `end_to_end`: speed-ups, as a share of 1 + r.

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
from common.figures import legend_below, picture
from common.journal import Line, read
from common.report import markdown, rate
from common.statistics import reached, upper_bound
from step_seconds.methods import BASELINES, HALF, ladder_of
from step_seconds.timed import Mbit, Timed
from training.methods import DENSE

STYLES = ("k-", "k--", "C0-o", "C1-s", "C2-^", "C3-v", "C4--o", "C5--s", "C6--^")
STYLES += ("C7-.", "C0--D", "C3-*", "C1-.P", "C2--x", "C4-d", "C5-.<")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to report on.

    Args:
      timed: A record of `step_seconds`.
      runs: A record of `end_to_end`; without it, the tables are of steps alone.
      hosts: The number of replicas of both.
      torch: A record of `pytorch`.
      torch_runs: A record of `pytorch.train`.
      picture: The file of a figure, PNG or SVG: speed-ups over the ratio.
    """

    timed: Path
    runs: Path | None = None
    hosts: int = 4
    torch: Path | None = None
    torch_runs: Path | None = None
    picture: Path | None = None


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
        outcome.seeds.append(run["seed"])
        for figures, mine in zip(
            (outcome.steps, outcome.seconds, outcome.wire_bytes),
            _at_target(run, timed, link),
            strict=True,
        ):
            figures.append(mine)
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
    return min(
        (x for x in BASELINES if x in found), key=lambda x: np.mean(found[x].seconds)
    )


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


def beyond(timed: Timed, torch: list[Line], hosts: int) -> list[list[str]]:
    """Return milliseconds of a step beyond its computation, by method and network."""
    table = [["Mbit/s", *map(rate, timed.links)]]
    excess = lambda x: f"{1e3 * (x['step_seconds'][1] - x['compute_seconds'][1]):.0f}"
    at = {("ours", *key): x for key, x in timed.lines.items()}
    for x in torch:
        if x["hosts"] == hosts:
            at["PyTorch", x["bandwidth_mbit"], x["method"]] = x
    for kind, name in dict.fromkeys((kind, name) for kind, _, name in at):
        lines = [at.get((kind, link, name)) for link in timed.links]
        table.append([f"{kind}: {name}", *(excess(x) if x else "-" for x in lines)])
    return table


def of_pytorch(
    timed: Timed, torch: list[Line], runs: list[Line], hosts: int
) -> list[list[str]]:
    """Return how many times as fast PyTorch's methods are as its own dense steps."""
    table = [["PyTorch, Mbit/s", "steps, each seed", *map(rate, timed.links)]]
    mine = (x for x in torch if x["hosts"] == hosts)
    step = {(x["bandwidth_mbit"], x["method"]): x["mean_step_seconds"] for x in mine}
    steps: dict[str, dict[int, float]] = {}
    for x in runs:
        found = reached(x["losses"], x["steps"], x["target"])
        of_seed = steps.setdefault(x["method"], {})
        of_seed[x["seed"]] = math.inf if found is None else found
    for name, of_seed in steps.items():
        fewer = [steps[DENSE][seed] / x for seed, x in of_seed.items()]
        seeds = ("-" if math.isinf(x) else f"{x:.0f}" for x in of_seed.values())
        cells = [name, ", ".join(seeds)]
        for link in timed.links:
            seconds = [step.get((link, x), math.nan) for x in (DENSE, name)]
            faster = (
                np.mean(fewer) * seconds[0] / seconds[1] if min(fewer) else math.nan
            )
            cells.append("-" if math.isnan(faster) else f"{faster:.2f}")
        table.append(cells)
    return table


def own_costs(timed: Timed) -> list[list[str]]:
    """Return what controllers take beyond steps at their encodings, by network."""
    table = [["own ms a step, by Mbit/s", *map(rate, timed.links)]]
    for name in dict.fromkeys(name for _, name in timed.lines):
        own = [1e3 * timed.own_seconds(link, name) for link in timed.links]
        if any(own):
            table.append([name, *(f"{ms:.1f}" for ms in own)])
    return table


def draw(timed: Timed, runs: list[Line], path: Path) -> None:
    """Draw speed-ups over the better dense baseline, by the exchange's ratio."""
    at = [limit(timed, link, DENSE) - 1 for link in timed.links]
    found = [outcomes(runs, timed, link) for link in timed.links]
    baselines = [better_baseline(x) for x in found]
    ceilings = list(map(lambda *x: limit(timed, *x), timed.links, baselines))
    with picture(path, (7.5, 5.5)) as (figure, (axis,)):
        axis.plot(at, ceilings, "k:", label="the limit: free communication")
        for name, style in zip(found[0], STYLES * 3, strict=False):
            pairs = zip(found, baselines, strict=True)
            ups = [np.mean(speed_ups(x[name], x[base])) for x, base in pairs]
            axis.plot(at, ups, style, label=name, linewidth=1, markersize=4)
        axis.set(xscale="log", yscale="log")
        axis.set(xlabel="time of a dense exchange over time of computation")
        axis.set(ylabel="times as fast to the same loss\nas the better dense baseline")
        legend_below(figure)


def read_all(args: Args) -> tuple[Timed, list[Line]]:
    """Return the seconds of steps, and the runs."""
    _, lines = read(args.timed)
    runs = read(args.runs)[1] if args.runs else []
    has_float16 = any(x["method"] == HALF for x in lines)
    return Timed(lines, args.hosts), with_float16(runs) if has_float16 else runs


def text(args: Args) -> str:
    """Return all tables, as Markdown."""
    timed, runs = read_all(args)
    parts = []
    for link in timed.links:
        ratio = limit(timed, link, "dense") - 1
        parts.append(
            f"### {args.hosts} hosts, {rate(link, ' Mbit/s')}: r = {ratio:.2f}"
        )
        if runs:
            parts.append(markdown(rows(timed, runs, link)))
    parts.append(markdown(own_costs(timed)))
    if args.torch:
        _, torch = read(args.torch)
        parts.append(markdown(beyond(timed, torch, args.hosts)))
        if args.torch_runs:
            _, trained = read(args.torch_runs)
            parts.append(markdown(of_pytorch(timed, torch, trained, args.hosts)))
    if args.picture:
        draw(timed, runs, args.picture)
    return "\n\n".join(parts)


def main(args: Args) -> None:
    """Print all tables, and draw the picture if it is asked for."""
    print(text(args))
