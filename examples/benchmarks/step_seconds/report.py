"""Print tables from records of `step_seconds`, whose run.py has the definitions."""

import itertools
from pathlib import Path

from common.journal import Line, read
from common.report import Args, markdown, rate, spread

from step_seconds.methods import BASELINES

PARTS = ("compute", "selection", "wait", "exchange")


def text(path: Path) -> str:
    """Return a table for each number of hosts and bandwidth, in the file's order."""
    head, lines = read(path)
    place = lambda line: (line["hosts"], line["bandwidth_mbit"])
    groups = itertools.groupby(lines, place)
    return "\n\n".join(table_of(list(x), head["machine"]) for _, x in groups)


def table_of(lines: list[Line], machine: str) -> str:
    """Return one network's table: milliseconds (medians), megabytes, speed-ups."""
    line = lines[0]
    title = "### {hosts} hosts, {rate} ({network})\n\n{params:,} params, {steps} steps"
    bandwidth = rate(line["bandwidth_mbit"], " Mbit/s")
    title = title.format(**line, rate=bandwidth) + f", on {machine}"
    dense = {x["method"]: x for x in lines if x["method"] in BASELINES}
    columns = ["method", "step, ms (quartiles)", *PARTS]
    columns += ["MB to send", "counted", *(f"x {name}" for name in dense), "bound"]
    rows = [columns, *(cells(x, dense) for x in lines)]
    return f"{title}\n\n{markdown(rows)}"


def cells(line: Line, dense: dict[str, Line]) -> list[str]:
    """Return one row; a baseline's bound is its 1 + r, others have a share of it."""
    counted = line["interface_bytes"]
    own = line["mean_step_seconds"]
    speed_ups = [x["mean_step_seconds"] / own for x in dense.values()]
    bound = own / median(line, "slowest_compute")
    share = f"{1 / bound:.0%}"
    return [
        line["method"],
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
    print(text(args.file))
