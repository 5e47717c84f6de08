"""Controllers live: steps on an emulated network whose bandwidth changes.

Every method trains the same model from the same params on the same batches, a process
in each host. They take turns of a few steps, in rotating order, so that whatever else
the machine does falls on all alike; a turn's seconds are those of all its steps, until
the last result is there. Times of steps are measured by `gravac.StepClock`, and all
controllers are told. Losses are of averaged params, which take in a turn's last ones.

Needs root, for the network.

    python examples/benchmarks/live.py --data-dir DIR --out FILE.jsonl --picture FILE
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
import journal
from journal import Journal, Line
from live_inside import Setting
from network import Network, NetworkError
from steptime_methods import method

from gravac_jax.launch import ProcessDiedError

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INSIDE = Path(__file__).with_name("live_inside.py")
STYLES = ("k:", "C0-", "C1--", "C2-.", "C3-.", "C4-.", "C5-.", "C6-.")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to train how, on which network."""

    data_dir: Path
    """Where the task's files are."""
    out: Path
    """JSONL; a race that is in it is not run again."""
    picture: Path
    """PNG or SVG."""
    hosts: int = 2
    """Replicas, each in a host of its own."""
    timeout_seconds: float = 3600
    """For all of it."""
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Setting
    )


def race(args: Args) -> list[Line]:
    """Run what is missing.

    Raises:
      SystemExit: if there can be no network, a process died, or the time is over.
    """
    for name in args.setting.methods:
        method(name)
    setting = dataclasses.asdict(args.setting)
    lines = Journal(args.out, {"hosts": args.hosts, **setting})
    phases, steps = len(args.setting.bandwidths_mbit), args.setting.steps
    turns = steps // args.setting.turn * phases * len(args.setting.methods)
    if len(lines.lines) == turns:
        return lines.lines
    lines.drop(lambda _: True)  # a race that was cut off
    if reason := Network.unavailable():
        raise SystemExit(reason)
    script = [str(INSIDE), str(args.data_dir), str(args.out), json.dumps(setting)]
    try:
        with Network(args.hosts) as network:
            network.launch(script).wait(args.timeout_seconds)
    except (NetworkError, ProcessDiedError, TimeoutError) as error:
        raise SystemExit(str(error)) from None
    return journal.read(args.out)[1]


def draw(lines: list[Line], setting: Setting, picture: Path) -> None:
    """Factors, seconds and bytes of steps over steps; held-out losses over seconds."""
    figure, axes = plt.subplots(4, figsize=(7, 10), layout="constrained")
    above, middle, bytes_sent, below = axes
    for name, style in zip(setting.methods, STYLES, strict=False):
        mine = [x for x in lines if x["method"] == name]
        factors = [factor for x in mine for factor in x["factors"]]
        if len(set(factors)) > 1:
            above.plot(factors, style, label=name, linewidth=1, drawstyle="steps")
        seconds = np.array([x["seconds"] for x in mine])
        steps = [x["step"] - setting.turn / 2 for x in mine]
        middle.plot(steps, 1e3 * seconds / setting.turn, style, label=name)
        mbytes = np.array([x["wire_bytes"] for x in mine]) / 1e6
        bytes_sent.plot(steps, mbytes / setting.turn, style, label=name)
        losses = [x["held_out_loss"] for x in mine]
        below.plot(np.cumsum(seconds), losses, style, label=name)
    for axis in (above, middle, bytes_sent):
        for i, mbit in enumerate(setting.bandwidths_mbit):
            if mbit < max(setting.bandwidths_mbit):
                span = (i * setting.steps, (i + 1) * setting.steps)
                axis.axvspan(*span, color="0.9", zorder=0)
        axis.set(yscale="log", xlabel="step", xlim=(0, None))
    above.set(ylabel="factor")
    middle.set(ylabel="milliseconds a step")
    middle.yaxis.set_minor_formatter(matplotlib.ticker.ScalarFormatter())
    bytes_sent.set(ylabel="Mbyte sent a step")
    below.set(xlabel="seconds of the method's own steps")
    below.set(ylabel="held-out loss, nats", xlim=(0, None))
    below.set_ylim(top=float(np.quantile([x["held_out_loss"] for x in lines], 0.9)))
    above.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
    below.legend(loc="upper right", ncols=2, frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def table(lines: list[Line], setting: Setting) -> Table:
    """Milliseconds a step in every phase, and where each method ends."""
    found = Table(
        box=SIMPLE, title="Milliseconds a step: median over turns (quartiles)"
    )
    found.add_column("method")
    for mbit in setting.bandwidths_mbit:
        found.add_column(f"{mbit:g} Mbit/s", justify="right")
    for title in ("seconds", "held-out loss", "factor at the end of each phase"):
        found.add_column(title, justify="right")
    for name in setting.methods:
        mine = [x for x in lines if x["method"] == name]
        phases = [
            [x for x in mine if x["phase"] == i]
            for i in range(len(setting.bandwidths_mbit))
        ]
        cells, ends = [], []
        for phase in phases:
            each = [1e3 * x["seconds"] / setting.turn for x in phase]
            low, middle, high = np.percentile(each, (25, 50, 75))
            cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
            ends.append(f"{np.median(phase[-1]['factors']):.0f}")
        whole = sum(x["seconds"] for x in mine)
        loss = f"{mine[-1]['held_out_loss']:.3f}"
        found.add_row(name, *cells, f"{whole:.1f}", loss, ", ".join(ends))
    return found


def main(args: Args) -> None:
    """Race, then draw and tell."""
    lines = race(args)
    draw(lines, args.setting, args.picture)
    Console().print(table(lines, args.setting))


if __name__ == "__main__":
    main(tyro.cli(Args))
