"""Print tables and draw a picture of `end_to_end`: speed-ups, as a share of 1 + r.

With r a dense exchange over computation, no method that computes the same gradients is
faster than dense steps by more than 1 + r. A baseline's 1 + r is its own step over a
step's computation, as `step_seconds` has measured both, so that a baseline in 16 bits
has another one; the speed-up over the better of both is given as a share of its 1 + r.

    python examples/benchmarks end_to_end.report --timed STEPS --runs RUNS --hosts 4
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common.figures import legend_below, picture
from common.journal import Line, read
from common.report import markdown, rate
from common.statistics import reached, upper_bound
from step_seconds.methods import BASELINES
from step_seconds.timed import Mbit, Timed
from training.methods import OWNERS, in_words

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
      live: Records of `adaptivity` on some of the networks, with the same seed and
        learning rate.
      picture: The file of a figure, PNG or SVG: speed-ups over the ratio.
      over: What speed-ups in the figure are over. Default: on each network the better
        dense baseline.
    """

    timed: Path
    runs: Path | None = None
    hosts: int = 4
    torch: Path | None = None
    torch_runs: Path | None = None
    live: tuple[Path, ...] = ()
    picture: Path | None = None
    over: str | None = None


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
    if any(x["method"] == "densehalf" for x in runs):
        return runs
    halved = lambda x: {"wire_bytes": [y / 2 for y in x["wire_bytes"]]}
    dense = [x for x in runs if x["method"] == "dense"]
    return [*runs, *({**x, **halved(x), "method": "densehalf"} for x in dense)]


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
    steps = [float(sum(x)) for x in taken]
    own = timed.own_seconds(link, name)
    seconds = [timed.steps(link, name, x) + own * sum(x) for x in taken]
    at = lambda figures: reached(run["losses"], figures, run["target"])
    found = map(at, (steps, seconds, run["wire_bytes"]))
    return tuple(math.inf if x is None else x for x in found)


def limit(timed: Timed, link: Mbit, baseline: str) -> float:
    """Return 1 + r, the largest speed-up over that baseline."""
    return timed.mean(link, baseline) / timed.median(link, "dense", "slowest_compute")


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
    static = [x for x in found if x in timed.static]
    best = sorted(static, key=lambda x: np.mean(found[x].seconds))[:1]
    head = ["method", "steps", "ms a step", "seconds (range)", "MB sent"]
    others = [*(x for x in BASELINES if x in found), *best, "fixed10", "accordion"]
    others = [x for x in dict.fromkeys(others) if x in found]
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


def floors(timed: Timed, link: Mbit) -> list[list[str]]:
    """Return the time of compute and bytes alone, as a share of a step."""
    table = [["method", "ms a step", "compute", "bytes / rate", "share of the floor"]]
    for (where, name), line in timed.lines.items():
        if where == link:
            compute = timed.median(link, "dense", "slowest_compute")
            sending = 8e-6 * line["wire_bytes"] / link if link else 0.0
            step = timed.mean(link, name)
            figures = [f"{1e3 * x:.1f}" for x in (step, compute, sending)]
            table.append([name, *figures, f"{(compute + sending) / step:.0%}"])
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
        fewer = [steps["dense"][seed] / x for seed, x in of_seed.items()]
        seeds = ("-" if math.isinf(x) else f"{x:.0f}" for x in of_seed.values())
        cells = [name, ", ".join(seeds)]
        for link in timed.links:
            seconds = [step.get((link, x), math.nan) for x in ("dense", name)]
            faster = (
                np.mean(fewer) * seconds[0] / seconds[1] if min(fewer) else math.nan
            )
            cells.append("-" if math.isnan(faster) else f"{faster:.2f}")
        table.append(cells)
    return table


def validation(timed: Timed, runs: list[Line], live: list[Line]) -> list[list[str]]:
    """Return what was computed for the first seed beside what real hosts took.

    Milliseconds of real hosts are those of all steps, also after the target.
    """
    pairs = (f"{x}: product, live" for x in ("steps", "seconds", "ms a step"))
    table = [["Mbit/s", "method", *pairs, "live / product: seconds, a step"]]
    first = [x for x in runs if x["seed"] == runs[0]["seed"]]
    for link, name in dict.fromkeys((x["bandwidth_mbit"], x["method"]) for x in live):
        if made := outcomes(first, timed, link).get(name):
            key = {"bandwidth_mbit": link, "method": name}
            lines = [x for x in live if key.items() <= x.items()]
            product = made.steps[0], made.seconds[0], 1e3 * made.step_seconds
            measured = _measured(lines, first[0]["target"])
            table.append([f"{link:g}", name, *_beside(product, measured)])
    return table


def _measured(lines: list[Line], target: float) -> Sequence[float]:
    """Return steps and seconds of a real run to the target, and its ms a step."""
    losses, steps = ([x[key] for x in lines] for key in ("held_out_loss", "step"))
    clock = np.cumsum([x["seconds"] for x in lines]).tolist()
    found = [reached(losses, figures, target) for figures in (steps, clock)]
    at_target = [math.nan if x is None else x for x in found]
    return *at_target, 1e3 * clock[-1] / steps[-1]


def _beside(product: Sequence[float], live: Sequence[float]) -> list[str]:
    """Return cells of pairs, and of the ratios of seconds and of ms a step."""
    said = lambda x, digits: f"{x:.{digits}f}" if math.isfinite(x) else "-"
    pairs = [*zip(product, live, strict=True)]
    ratios = (said(real / made, 2) for made, real in pairs[1:])
    cells = zip(pairs, (0, 1, 1), strict=True)
    both = [", ".join(said(x, digits) for x in pair) for pair, digits in cells]
    return [*both, ", ".join(ratios)]


def own_costs(timed: Timed) -> list[list[str]]:
    """Return what controllers take beyond static factors like theirs, by network."""
    table = [["own ms a step, by Mbit/s", *map(rate, timed.links)]]
    for name in dict.fromkeys(name for _, name in timed.lines):
        own = [1e3 * timed.own_seconds(link, name) for link in timed.links]
        if any(own):
            table.append([name, *(f"{ms:.1f}" for ms in own)])
    return table


def briefly(name: str) -> str:
    """Return what a reader calls a method where all exchange the same."""
    owner = f"({'|'.join(OWNERS.values())}) steps"
    added = rf"^{owner} |, {owner}$|^gradients |, own params$"
    return re.sub(added, "", in_words(name))


def styles_of(labels: Iterable[str], styles: Sequence[str] = STYLES) -> dict[str, str]:
    """Return a style for each label; styles come again if there are too few."""
    return dict(zip(dict.fromkeys(labels), itertools.cycle(styles), strict=False))


def draw_panel(
    axis: Any,
    timed: Timed,
    runs: list[Line],
    over: str | None = None,
    words: Callable[[str], str] = in_words,
    styles: dict[str, str] | None = None,
) -> None:
    """Draw speed-ups over a baseline, or the better one, by the exchange's ratio."""
    ratio = lambda link: limit(timed, link, "dense") - 1
    at = [ratio(link) for link in timed.links]
    found = [outcomes(runs, timed, link) for link in timed.links]
    baselines = [over or better_baseline(x) for x in found]
    ceilings = map(lambda *x: limit(timed, *x), timed.links, baselines)
    axis.plot(at, list(ceilings), "k:", label="the limit: free communication")
    if over == "dense":
        hidden = [(1 + r) / max(1, r) for r in at]
        axis.plot(at, hidden, "k--", label="dense, if it were hidden as far as it fits")
    if styles is None:  # black is for the limits
        styles = styles_of(map(words, found[0]), STYLES[2:] if over else STYLES)
    for name in found[0]:
        if name == over:
            continue
        pairs = zip(found, baselines, strict=True)
        ups = [np.mean(speed_ups(x[name], x[base])) for x, base in pairs]
        width = 2.5 if "default" in name or name == "sparse" else 1
        label = words(name)
        axis.plot(at, ups, styles[label], label=label, linewidth=width, markersize=4)
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="time of a dense exchange over time of computation",
        ylabel="times as fast to the same loss\nas "
        + (in_words(over) if over else "the better dense baseline"),
    )


def draw(timed: Timed, runs: list[Line], path: Path, over: str | None = None) -> None:
    """Draw one task."""
    with picture(path, (7.5, 5.5)) as (figure, axes):
        draw_panel(axes[0, 0], timed, runs, over)
        legend_below(figure)


def draw_beside(records: dict[str, Args], path: Path, leave_out: str) -> None:
    """Draw several tasks side by side, each under its title, over dense float32.

    Args:
      records: The files of each task, by its title.
      path: The figure.
      leave_out: A regular expression of the methods that are not drawn.
    """
    every = [read_all(args) for args in records.values()]
    is_drawn = lambda run: not re.fullmatch(leave_out, run["method"])
    tasks = [(timed, list(filter(is_drawn, runs))) for timed, runs in every]
    names = [x["method"] for _, runs in tasks for x in runs if x["method"] != "dense"]
    styles = styles_of(map(briefly, names), STYLES[2:])  # black is for the limits
    with picture(path, (11, 6), columns=len(records)) as (figure, axes):
        for axis, title, task in zip(axes[0], records, tasks, strict=True):
            draw_panel(axis, *task, "dense", briefly, styles)
            axis.set(title=title)
        legend_below(figure)


def read_all(args: Args) -> tuple[Timed, list[Line]]:
    """Return the seconds of steps, and the runs."""
    _, lines = read(args.timed)
    runs = read(args.runs)[1] if args.runs else []
    has_float16 = any(x["method"] == "densehalf" for x in lines)
    return Timed(lines, args.hosts), with_float16(runs) if has_float16 else runs


def draw_record(args: Args, picture: Path) -> None:
    """Draw the figure of a record."""
    draw(*read_all(args), picture, args.over)


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
        parts.append(markdown(floors(timed, link)))
    parts.append(markdown(own_costs(timed)))
    if args.torch:
        _, torch = read(args.torch)
        parts.append(markdown(beyond(timed, torch, args.hosts)))
        if args.torch_runs:
            _, trained = read(args.torch_runs)
            parts.append(markdown(of_pytorch(timed, torch, trained, args.hosts)))
    if args.live:
        live = [x for path in args.live for x in read(path)[1]]
        parts.append(markdown(validation(timed, runs, live)))
    if args.picture:
        draw(timed, runs, args.picture, args.over)
    return "\n\n".join(parts)


def main(args: Args) -> None:
    """Print all tables, and draw the picture if it is asked for."""
    print(text(args))
