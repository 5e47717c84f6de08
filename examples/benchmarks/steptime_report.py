"""Tables from the records of steptime.py, whose docstring has the definitions.

python examples/benchmarks/steptime_report.py FILE.jsonl
"""

import itertools
import sys
from pathlib import Path

from journal import Line, read
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Table
from steptime_methods import BASELINES

PARTS = ("compute", "selection", "wait", "exchange")
WIDTH = 132  # where the output is no terminal


def tables(path: Path) -> Group:
    """A table for each number of hosts and bandwidth, in the order of the file."""
    head, lines = read(path)
    place = lambda line: (line["hosts"], line["bandwidth_mbit"])
    groups = itertools.groupby(lines, place)
    return Group(*(table(list(group), head["machine"]) for _, group in groups))


def table(lines: list[Line], machine: str) -> Table:
    """One row per method: milliseconds (medians), megabytes, speed-ups."""
    line, hosts = lines[0], lines[0]["hosts"]
    bandwidth = rate(line["bandwidth_mbit"], " Mbit/s")
    title = (
        f"{hosts} hosts, {bandwidth} ({line['network']})\n{line['params']:,} params,"
        f" {line['steps']} steps, {hosts} processes on {machine}"
    )
    dense = {x["method"]: x for x in lines if x["method"] in BASELINES}
    result = Table(box=SIMPLE, title=title, pad_edge=False, collapse_padding=True)
    result.add_column("method", no_wrap=True)
    times = ("step, ms (quartiles)", *PARTS)
    sizes = ("MB to send", "counted")
    for column in ("factor", *times, *sizes, *(f"x {name}" for name in dense), "bound"):
        result.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        result.add_row(*cells(line, dense))
    return result


def cells(line: Line, dense: dict[str, Line]) -> list[str]:
    """One row; the bound of a baseline is its 1 + r, and all have their share of it."""
    low, middle, high = (1e3 * x for x in line["step_seconds"])
    counted = line["interface_bytes"]
    own = line["mean_step_seconds"]
    speed_ups = [x["mean_step_seconds"] / own for x in dense.values()]
    bound = own / median(line, "slowest_compute")
    share = f"{1 / bound:.0%}"
    return [
        line["method"],
        f"{line['factor']:.4g}",
        f"{middle:.1f} ({low:.1f}-{high:.1f})",
        *(f"{1e3 * median(line, part):.1f}" for part in PARTS),
        f"{line['wire_bytes'] / 1e6:.3f}",
        "-" if counted is None else f"{counted / 1e6:.3f}",
        *(f"{x:.2f}" for x in speed_ups),
        f"{share} of {bound:.2f}" if line["method"] in dense else share,
    ]


def median(line: Line, part: str) -> float:
    """Seconds."""
    return line[f"{part}_seconds"][1]


def rate(bandwidth_mbit: float | None, unit: str = "") -> str:
    """As a title has it."""
    return "no limit" if bandwidth_mbit is None else f"{bandwidth_mbit:g}{unit}"


def show(path: Path) -> None:
    """Print all tables of a record."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(tables(path))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("give one FILE.jsonl of steptime.py")
    show(Path(sys.argv[1]))
