"""Show what programs cost beyond that of a dense step.

python examples/benchmarks programs.report FILE.jsonl
"""

from pathlib import Path

from common.journal import Line, read
from common.report import Args, markdown


def row(line: Line, dense: Line) -> list[str]:
    """Return a method's row, beside the dense step of the same size."""
    large = [x for x in line["collectives"] if x["payload_bytes"] >= 1e5]
    more = lambda name, digits: f"{line[name] - dense[name]:.{digits}f}"
    beside = lambda x: "" if x["between"] is None else f", {x['between']}"
    return [
        line["method"],
        f"{line['entries'] / 1e6:.1f}",
        more("kernels", 0),
        more("passes", 1),
        str(max(filter(None, line["turns"]), default=0)),
        str(len(line["conditionals"])),
        f"{line['temporaries']:.1f}",
        "; ".join(f"{x['payload_bytes'] / 1e6:.1f}{beside(x)}" for x in large),
        f"{line['compile_seconds']:.0f}",
    ]


def text(path: Path) -> str:
    """Return the table of a record, in Markdown."""
    lines = read(path)[1]
    dense = {x["millions"]: x for x in lines if x["method"] == "dense"}
    head = ["method", "million entries", "kernels beyond dense", "passes beyond dense"]
    head += ["most turns of a loop", "conditionals", "temporaries, buckets"]
    head += ["collectives: MB, kernels beside", "compile, s"]
    return markdown([head, *(row(x, dense[x["millions"]]) for x in lines)])


def main(args: Args) -> None:
    """Print the table."""
    print(text(args.file))
