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
from common.report import markdown
from step_seconds.methods import ladder_of

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
        ladder_of(name)
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
    """Draw seconds and bytes over steps, and losses over seconds."""
    with picture(path, (7.5, 9), rows=3) as (figure, axes):
        above, middle, below = axes
        dense_first = sorted(setting.methods, key=lambda name: name != "dense")
        for name, line in zip(dense_first, STYLES, strict=False):
            mine = [x for x in lines if x["method"] == name]
            style = {"label": name, "linewidth": 1.3}
            seconds = np.array([x["seconds"] for x in mine])
            steps = [x["step"] - setting.turn / 2 for x in mine]
            above.plot(steps, 1e3 * seconds / setting.turn, line, **style)
            mbytes = np.array([x["wire_bytes"] for x in mine]) / 1e6
            middle.plot(steps, mbytes / setting.turn, line, **style)
            losses = [x["held_out_loss"] for x in mine]
            below.plot(np.cumsum(seconds), losses, line, **style)
        for axis in (above, middle):
            for i, mbit in enumerate(setting.bandwidths_mbit):
                if mbit < max(setting.bandwidths_mbit):
                    span = (i * setting.steps, (i + 1) * setting.steps)
                    axis.axvspan(*span, color=FAINT, alpha=0.35, zorder=0)
            axis.set(yscale="log", xlabel="step (gray: slow network)", xlim=(0, None))
        above.set(ylabel="milliseconds a step")
        middle.set(ylabel="megabytes sent a step")
        below.set(xlabel="seconds of the method's own steps")
        below.set(ylabel="held-out loss, nats", xlim=(0, None))
        highest = float(np.quantile([x["held_out_loss"] for x in lines], 0.9))
        below.set_ylim(top=highest)
        legend_below(figure)


def table_of(lines: list[Line], setting: Setting) -> str:
    """Return milliseconds a step in every phase, and where each method ends."""
    rates = [f"{mbit:g} Mbit/s" for mbit in setting.bandwidths_mbit]
    rows = [["method", *rates, "seconds", "held-out loss", "sent at last"]]
    for name in setting.methods:
        mine = [x for x in lines if x["method"] == name]
        cells, ends = [], []
        for i in range(len(rates)):
            phase = [x for x in mine if x["phase"] == i]
            each = [1e3 * x["seconds"] / setting.turn for x in phase]
            low, middle, high = np.percentile(each, (25, 50, 75))
            cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
            ends.append(phase[-1]["last"])
        whole = sum(x["seconds"] for x in mine)
        loss = f"{mine[-1]['held_out_loss']:.3f}"
        rows.append([name, *cells, f"{whole:.1f}", loss, ", ".join(ends)])
    title = "Milliseconds a step: median over turns (quartiles)"
    return f"{title}\n\n{markdown(rows)}"


def main(args: Args) -> None:
    """Race, then draw and print."""
    lines = race(args)
    draw(lines, args.setting, args.picture)
    print(table_of(lines, args.setting))
