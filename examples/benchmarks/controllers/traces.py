"""Trace what two controllers decide, side by side, on a network that changes.

The model and the simulated clock are those of `controllers`; after a third of the steps
the network has a tenth of its bandwidth, after two thirds all of it again.

    python examples/benchmarks controllers.traces --data-dir D --out FILE --picture PNG
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common.figures import FAINT, legend_below, picture
from common.journal import Journal, Line, configuration
from common.training import size
from rich.progress import track

import gravac_jax as gravac
from controllers import run

CONTROLLERS = {
    "GraVAC": gravac.GraVAC(),
    "Fastest": gravac.Fastest(),
    "dense": gravac.Fixed(1),
    "factor 40": gravac.Fixed(40),
}
STYLES = ("C1--", "C0-", "k:", "C2-.")  # one for each controller


@dataclasses.dataclass(frozen=True)
class Args:
    """The network, and how long.

    Args:
      data_dir: The folder with tiny-shakespeare's input.txt.
      out: The record, JSONL; controllers that are in it are not run again.
      picture: The figure, PNG or SVG.
      steps: Steps of every run.
      replicas: The number of simulated replicas.
      compute_seconds: The computation of a step, whatever the network.
      bytes_per_second: The bandwidth in the first and the last third.
      slower: How many times slower the network is in between.
    """

    data_dir: Path
    out: Path
    picture: Path
    steps: int = 1500
    replicas: int = 4
    compute_seconds: float = 0.01
    bytes_per_second: float = 30e6
    slower: float = 10.0


def table_of(args: Args, entries: int, controller: Any) -> Callable[[int], np.ndarray]:
    """Return a function from the stretch to the seconds of a step at each rung."""
    stretches = args.steps // run.EVERY

    def table(stretch: int) -> np.ndarray:
        is_slow = stretches // 3 <= stretch < 2 * stretches // 3
        wire = gravac.WireCost(
            bytes_per_second=args.bytes_per_second / (args.slower if is_slow else 1),
            latency_seconds=1e-5,
            compute_seconds=args.compute_seconds,
            selection_seconds=0.05 * args.compute_seconds,
        )
        return run.seconds(wire, entries, controller.ladder, args.replicas)

    return table


def trace(bench: run.Bench, args: Args, name: str) -> list[Line]:
    """Make one run, and return a line for every stretch."""
    controller = CONTROLLERS[name]
    table = table_of(args, size(bench.params()), controller)
    lines = []
    for loss, clock, rungs in bench.losses(
        controller, args.replicas, table, args.steps, noise=1
    ):
        factors = [controller.ladder[rung] for rung in rungs]
        line = {"controller": name, "loss": loss, "clock": clock, "factors": factors}
        lines.append(line)
    return lines


def draw(lines: list[Line], args: Args) -> None:
    """Draw factors over steps, above, and losses over seconds, below."""
    with picture(args.picture, (7.5, 7), rows=2) as (figure, axes):
        above, below = axes[:, 0]
        for name, line in zip(CONTROLLERS, STYLES, strict=False):
            mine = [x for x in lines if x["controller"] == name]
            factors = [factor for x in mine for factor in x["factors"]]
            if len(set(factors)) > 1:
                above.plot(factors, line, label=name, linewidth=1.3, drawstyle="steps")
            seconds, losses = ([x[key] for x in mine] for key in ("clock", "loss"))
            below.plot(seconds, losses, line, label=name)
        changes = [args.steps * i // 3 for i in (1, 2)]
        slower = f"{args.slower:g} times slower network"
        above.axvspan(*changes, color=FAINT, alpha=0.35, label=slower)
        above.set(yscale="log", xlabel="step", ylabel="factor of the compressed leaves")
        below.set(xlabel="seconds on the simulated clock")
        below.set(ylabel="held-out loss, nats a byte")
        below.set_xlim(0, max(x["clock"] for x in lines if x["controller"] != "dense"))
        # The fall at the beginning is the same for all.
        below.set_ylim(top=float(np.quantile([x["loss"] for x in lines], 0.85)))
        legend_below(figure)


def main(args: Args) -> None:
    """Make the runs that are missing, then draw the figure."""
    journal = Journal(args.out, configuration(args))
    bench = run.Bench(run.Args(args.data_dir, args.out))
    missing = [name for name in CONTROLLERS if not journal.find(controller=name)]
    for name in track(missing, "runs", transient=True):
        journal.append(*trace(bench, args, name))
    draw(journal.lines, args)
    for name in CONTROLLERS:
        last = journal.find(controller=name)[-1]
        print(f"{name}: {last['loss']:.3f} after {last['clock']:.1f} s")
