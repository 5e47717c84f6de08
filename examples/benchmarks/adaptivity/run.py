"""Race controllers live: steps on an emulated network whose bandwidth changes.

Every method trains the same model from the same params on the same batches, a process
in each host. They take turns of a few steps, in rotating order, so that whatever else
the machine does falls on all alike; a turn's seconds are those of all its steps, until
the last result is there. `gravac.StepClock` measures the times of steps, and all
controllers are told. Losses are of averaged params, which take in a turn's last params.

The network needs root.

    python examples/benchmarks adaptivity --data-dir DIR --out FILE.jsonl --picture PNG
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from common import hosts
from common.figures import FAINT, legend_below, picture
from common.journal import Journal, Line, read
from common.report import show, table
from rich.table import Table
from step_seconds.methods import method
from training.methods import in_words

from adaptivity.worker import Setting

STYLES = ("k:", "C6:", "C0-", "C5--", "C1-", "C2-.", "C3-.", "C4-.")


@dataclasses.dataclass(frozen=True)
class Args:
    """What to train how, on which network.

    Args:
      data_dir: The folder of the task's files.
      out: The record, JSONL; a race that is in it is not run again.
      picture: The figure, PNG or SVG.
      hosts: The number of replicas, each in a host of its own.
      timeout_seconds: Time for all of it.
      setting: What all lines depend on.
    """

    data_dir: Path
    out: Path
    picture: Path
    hosts: int = 2
    timeout_seconds: float = 3600
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = Setting()  # noqa: RUF009


def race(args: Args) -> list[Line]:
    """Run what is missing, and return all lines.

    Raises:
      SystemExit: If there can be no network, a process died, or the time is over.
    """
    for name in args.setting.methods:
        method(name)
    setting = dataclasses.asdict(args.setting)
    journal = Journal(args.out, {"hosts": args.hosts, **setting})
    phases, steps = len(args.setting.bandwidths_mbit), args.setting.steps
    turns = steps // args.setting.turn * phases * len(args.setting.methods)
    if len(journal.lines) != turns:
        hosts.require_network()
        journal.drop(lambda _: True)  # a race that was cut off
        script = ["adaptivity.worker", str(args.data_dir), str(args.out)]
        script.append(json.dumps(setting))
        hosts.run(args.hosts, script, args.timeout_seconds)
    return read(args.out)[1]


def draw(lines: list[Line], setting: Setting, path: Path) -> None:
    """Draw factors, seconds and bytes over steps, and losses over seconds."""
    with picture(path, (7.5, 11), rows=4) as (figure, axes):
        above, middle, bytes_sent, below = axes[:, 0]
        dense_first = sorted(setting.methods, key=lambda name: name != "dense")
        for name, line in zip(dense_first, STYLES, strict=False):
            mine = [x for x in lines if x["method"] == name]
            style = {"label": in_words(name), "linewidth": 1.3}
            factors = [factor for x in mine for factor in x["factors"]]
            if len(set(factors)) > 1:
                above.plot(factors, line, drawstyle="steps", **style)
            seconds = np.array([x["seconds"] for x in mine])
            steps = [x["step"] - setting.turn / 2 for x in mine]
            middle.plot(steps, 1e3 * seconds / setting.turn, line, **style)
            mbytes = np.array([x["wire_bytes"] for x in mine]) / 1e6
            bytes_sent.plot(steps, mbytes / setting.turn, line, **style)
            losses = [x["held_out_loss"] for x in mine]
            below.plot(np.cumsum(seconds), losses, line, **style)
        for axis in (above, middle, bytes_sent):
            for i, mbit in enumerate(setting.bandwidths_mbit):
                if mbit < max(setting.bandwidths_mbit):
                    span = (i * setting.steps, (i + 1) * setting.steps)
                    axis.axvspan(*span, color=FAINT, alpha=0.35, zorder=0)
            axis.set(yscale="log", xlabel="step (gray: slow network)", xlim=(0, None))
        above.set(ylabel="factor of the\ncompressed leaves")
        middle.set(ylabel="milliseconds a step")
        bytes_sent.set(ylabel="megabytes sent a step")
        below.set(xlabel="seconds of the method's own steps")
        below.set(ylabel="held-out loss, nats", xlim=(0, None))
        highest = float(np.quantile([x["held_out_loss"] for x in lines], 0.9))
        below.set_ylim(top=highest)
        legend_below(figure)


def table_of(lines: list[Line], setting: Setting) -> Table:
    """Return milliseconds a step in every phase, and where each method ends."""
    rates = [f"{mbit:g} Mbit/s" for mbit in setting.bandwidths_mbit]
    columns = ("method", *rates, "seconds", "held-out loss", "last factors")
    rows = []
    for name in setting.methods:
        mine = [x for x in lines if x["method"] == name]
        cells, ends = [], []
        for i in range(len(rates)):
            phase = [x for x in mine if x["phase"] == i]
            each = [1e3 * x["seconds"] / setting.turn for x in phase]
            low, middle, high = np.percentile(each, (25, 50, 75))
            cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
            ends.append(f"{np.median(phase[-1]['factors']):.0f}")
        whole = sum(x["seconds"] for x in mine)
        loss = f"{mine[-1]['held_out_loss']:.3f}"
        rows.append([in_words(name), *cells, f"{whole:.1f}", loss, ", ".join(ends)])
    title = "Milliseconds a step: median over turns (quartiles)"
    return table(columns, rows, title)


def main(args: Args) -> None:
    """Race, then draw and print."""
    lines = race(args)
    draw(lines, args.setting, args.picture)
    show(table_of(lines, args.setting))
