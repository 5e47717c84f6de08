"""Is the probe right? Its predicted steps beside timed ones, on an emulated network.

At each bandwidth the probe runs, `python -m gravac_jax probe --loss ...`, and before
and after it every rung takes steps as people run them, by `gravac.data_parallel`, in
turns, a process in each host. A step's seconds are those on the slowest host, medians.
The probe has held its promise where a predicted step is within 20% of the timed one,
and where its verdict is that of the timed steps, or "too close".

Needs root, for the network.

    python examples/benchmarks/probe_check.py --data-dir DIR --out FILE.jsonl
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from journal import Journal, Line
from network import Network
from probe_check_inside import Setting
from steptime import run
from steptime_report import WIDTH, rate
from tasks import DataError, load

INSIDE = Path(__file__).with_name("probe_check_inside.py")
WITHIN = 0.2


@dataclasses.dataclass(frozen=True)
class Args:
    """What to predict and to time, on which networks."""

    data_dir: Path
    """Where the task's files are."""
    out: Path
    """JSONL; what is in it is not timed again."""
    hosts: int = 2
    """Replicas, each in a host of its own."""
    bandwidths_mbit: tuple[float, ...] = (100, 300, 1000, 0)
    """Of each host's link in each direction; 0 for no limit."""
    timeout_seconds: float = 3600
    """For all of it."""
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Setting
    )


def measure(args: Args) -> list[Line]:
    """Time what is missing in the file.

    Raises:
      SystemExit: if there can be no network, or the data are not there.
    """
    try:
        load(args.setting.task, args.data_dir, preset=args.setting.preset)
    except DataError as error:
        raise SystemExit(str(error)) from None
    setting = dataclasses.asdict(args.setting)
    journal = Journal(args.out, {"hosts": args.hosts, **setting})
    found = {x["bandwidth_mbit"] or 0 for x in journal.lines}
    missing = [x for x in args.bandwidths_mbit if x not in found]
    if missing:
        if reason := Network.unavailable():
            raise SystemExit(reason)
        figures = [json.dumps(setting), json.dumps(missing)]
        script = [str(INSIDE), str(args.data_dir), str(args.out), *figures]
        run(Network(args.hosts), script, args.timeout_seconds)
    return Journal(args.out, {"hosts": args.hosts, **setting}).lines


def is_right(line: Line) -> bool:
    """Whether the verdict is that of the timed steps, or none."""
    is_faster = line["speed_up"] > line["least_speed_up"]
    return line["pays"] == "too close" or (line["pays"] == "yes") == is_faster


def off(line: Line) -> float:
    """How far the predicted step is from the timed one."""
    return line["predicted_seconds"][1] / line["step_seconds"][1] - 1


def tables(lines: list[Line]) -> Group:
    """One row for each bandwidth and rung, and how many are right."""
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    columns = ("Mbit/s", "exchange", "factor", "timed, ms (quartiles)")
    for column in (*columns, "predicted (90%)", "off", "times dense", "predicted"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("pays", justify="right")
    for line in lines:
        times = [line["step_seconds"], line["predicted_seconds"]]
        factor = line["factor"]
        steps = [[1e3 * x for x in seconds] for seconds in times]
        table.add_row(
            rate(line["bandwidth_mbit"]),
            line["exchange"],
            f"{factor:g}",
            *(f"{x[1]:.1f} ({x[0]:.1f}-{x[2]:.1f})" for x in steps),
            f"{off(line):+.0%}",
            f"{line['speed_up']:.2f}",
            "{1:.2f} ({0:.2f}-{2:.2f})".format(*line["predicted_speed_up"]),
            line["pays"] + " (wrong)" * (not is_right(line)) if factor > 1 else "",
        )
    near = sum(abs(off(x)) <= WITHIN for x in lines)
    compressed = [x for x in lines if x["factor"] > 1]
    right = sum(map(is_right, compressed))
    return Group(
        table,
        f"{near} of {len(lines)} steps within {WITHIN:.0%};"
        f" {right} of {len(compressed)} verdicts right, or too close to call",
    )


def main(args: Args) -> None:
    """Measure, and print the table."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(tables(measure(args)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
