"""What two controllers decide, side by side, on a network that changes.

The model and the simulated clock of closed_loop.py; after a third of the steps the
network has a tenth of its bandwidth, after two thirds all of it again.

    python examples/benchmarks/traces.py --data-dir DIR --out FILE.jsonl --picture FILE
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))
import closed_loop
from journal import Journal, Line

import gravac_jax as gravac

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CONTROLLERS = {
    "GraVAC": gravac.GraVAC(),
    "Fastest": gravac.Fastest(),
    "dense": gravac.Fixed(1),
    "factor 40": gravac.Fixed(40),
}
STYLES = ("C1--", "C0-", "k:", "C2-.")  # of these


@dataclasses.dataclass(frozen=True)
class Args:
    """The network, and how long."""

    data_dir: Path
    """The folder with tiny-shakespeare's input.txt."""
    out: Path
    """JSONL; controllers that are in it are not run again."""
    picture: Path
    """PNG or SVG."""
    steps: int = 1500
    """Of every run."""
    replicas: int = 4
    """Simulated."""
    compute_seconds: float = 0.01
    """Of a step, whatever the network."""
    bytes_per_second: float = 30e6
    """Of the network in its first and last third."""
    slower: float = 10.0
    """So many times slower is it in between."""


def table_of(args: Args, entries: int, controller: Any) -> Any:
    """From the stretch to the seconds of a step at each rung."""
    stretches = args.steps // closed_loop.EVERY

    def table(stretch: int) -> np.ndarray:
        is_slow = stretches // 3 <= stretch < 2 * stretches // 3
        wire = gravac.WireCost(
            bytes_per_second=args.bytes_per_second / (args.slower if is_slow else 1),
            latency_seconds=1e-5,
            compute_seconds=args.compute_seconds,
            selection_seconds=0.05 * args.compute_seconds,
        )
        return closed_loop.seconds(wire, entries, controller.ladder, args.replicas)

    return table


def trace(bench: closed_loop.Bench, args: Args, name: str) -> list[Line]:
    """One run, a line for every stretch."""
    controller = CONTROLLERS[name]
    entries = sum(x.size for x in jax.tree.leaves(bench.params()))
    table = table_of(args, entries, controller)
    lines = []
    for loss, clock, rungs in bench.losses(
        controller, args.replicas, table, args.steps, noise=1
    ):
        factors = [controller.ladder[rung] for rung in rungs]
        line = {"controller": name, "loss": loss, "clock": clock, "factors": factors}
        lines.append(line)
    return lines


def draw(lines: list[Line], args: Args) -> None:
    """Factors over steps, above; losses over seconds, below."""
    figure, (above, below) = plt.subplots(2, figsize=(7, 6), layout="constrained")
    for name, style in zip(CONTROLLERS, STYLES, strict=False):
        mine = [x for x in lines if x["controller"] == name]
        factors = [factor for x in mine for factor in x["factors"]]
        if len(set(factors)) > 1:
            above.plot(factors, style, label=name, linewidth=1, drawstyle="steps")
        seconds, losses = ([x[key] for x in mine] for key in ("clock", "loss"))
        below.plot(seconds, losses, style, label=name)
    changes = [args.steps * i // 3 for i in (1, 2)]
    above.axvspan(*changes, color="0.9", label=f"{args.slower:g} times slower")
    above.set(yscale="log", xlabel="step", ylabel="factor")
    below.set(xlabel="seconds on the simulated clock", ylabel="held-out nats a byte")
    below.set_xlim(0, max(x["clock"] for x in lines if x["controller"] != "dense"))
    # The fall at the beginning is the same for all.
    below.set_ylim(top=float(np.quantile([x["loss"] for x in lines], 0.85)))
    for axes in (above, below):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.picture, dpi=150)
    plt.close(figure)


def main(args: Args) -> None:
    """Make the runs that are missing, then the figure."""
    own = dataclasses.asdict(args)
    for name in ("data_dir", "out", "picture"):
        del own[name]
    journal = Journal(args.out, own)
    bench = closed_loop.Bench(closed_loop.Args(args.data_dir, args.out))
    done = {x["controller"] for x in journal.lines}
    console = Console()
    missing = [name for name in CONTROLLERS if name not in done]
    for name in track(missing, "runs", console=console, transient=True):
        for line in trace(bench, args, name):
            journal.append(line)
    draw(journal.lines, args)
    for name in CONTROLLERS:
        last = [x for x in journal.lines if x["controller"] == name][-1]
        console.print(f"{name}: {last['loss']:.3f} after {last['clock']:.1f} s")


if __name__ == "__main__":
    main(tyro.cli(Args))
