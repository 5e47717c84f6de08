"""Print tables from records of `step_seconds`, whose run.py has the definitions."""

import dataclasses
import itertools
from pathlib import Path

import tyro
from common.journal import Line, read
from common.report import rate, show, spread, table
from rich.table import Table

from step_seconds.methods import BASELINES

PARTS = ("compute", "selection", "wait", "exchange")


@dataclasses.dataclass(frozen=True)
class Args:
    """Which record to read.

    Args:
      file: A record of `step_seconds`.
    """

    file: tyro.conf.Positional[Path]


def tables(path: Path) -> list[Table]:
    """Return a table for each number of hosts and bandwidth, in the file's order."""
    head, lines = read(path)
    place = lambda line: (line["hosts"], line["bandwidth_mbit"])
    groups = itertools.groupby(lines, place)
    return [table_of(list(group), head["machine"]) for _, group in groups]


def table_of(lines: list[Line], machine: str) -> Table:
    """Return one network's table: milliseconds (medians), megabytes, speed-ups."""
    line, hosts = lines[0], lines[0]["hosts"]
    bandwidth = rate(line["bandwidth_mbit"], " Mbit/s")
    title = (
        f"{hosts} hosts, {bandwidth} ({line['network']})\n{line['params']:,} params,"
        f" {line['steps']} steps, {hosts} processes on {machine}"
    )
    dense = {x["method"]: x for x in lines if x["method"] in BASELINES}
    columns = ["method", "factor", "step, ms (quartiles)", *PARTS]
    columns += ["MB to send", "counted", *(f"x {name}" for name in dense), "bound"]
    return table(columns, (cells(line, dense) for line in lines), title)


def cells(line: Line, dense: dict[str, Line]) -> list[str]:
    """Return one row; a baseline's bound is its 1 + r, others have a share of it."""
    counted = line["interface_bytes"]
    own = line["mean_step_seconds"]
    speed_ups = [x["mean_step_seconds"] / own for x in dense.values()]
    bound = own / median(line, "slowest_compute")
    share = f"{1 / bound:.0%}"
    return [
        line["method"],
        f"{line['factor']:.4g}",
        spread([1e3 * x for x in line["step_seconds"]], 1),
        *(f"{1e3 * median(line, part):.1f}" for part in PARTS),
        f"{line['wire_bytes'] / 1e6:.3f}",
        "-" if counted is None else f"{counted / 1e6:.3f}",
        *(f"{x:.2f}" for x in speed_ups),
        f"{share} of {bound:.2f}" if line["method"] in dense else share,
    ]


def median(line: Line, part: str) -> float:
    """Return the median seconds of a part of the step."""
    return line[f"{part}_seconds"][1]


def main(args: Args) -> None:
    """Print all tables of a record."""
    show(*tables(args.file))
