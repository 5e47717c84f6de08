"""Show what programs cost beyond that of a dense step.

python examples/benchmarks programs.report FILE.jsonl
"""

import dataclasses
from pathlib import Path

import tyro
from common.journal import Line, read
from common.report import markdown

HEAD = (
    "method",
    "kernels beyond dense",
    "passes beyond dense",
    "most turns of a loop",
    "conditionals",
    "temporaries, buckets",
    "collectives: MB, kernels beside",
    "compile, s",
)


@dataclasses.dataclass(frozen=True)
class Args:
    """What to show.

    Args:
      path: The record.
    """

    path: tyro.conf.Positional[Path]


def _collectives(line: Line) -> str:
    """Return the large collectives: megabytes, and kernels while they run."""
    large = [x for x in line["collectives"] if x["payload_bytes"] >= 1e5]
    beside = lambda x: "" if x["between"] is None else f", {_beside(x)}"
    said = [f"{x['payload_bytes'] / 1e6:.1f}{beside(x)}" for x in large]
    return "; ".join(said) or "none"


def _beside(x: Line) -> str:
    products = f" ({x['products']} products)" if x["products"] else ""
    return f"{x['between']}{products}"


def row(line: Line, dense: Line) -> list[str]:
    """Return a method's row, beside the dense step of the same size."""
    turns = [x for x in line["turns"] if x is not None]
    return [
        line["method"],
        f"{line['kernels'] - dense['kernels']}",
        f"{line['passes'] - dense['passes']:.1f}",
        f"{max(turns, default=0)}",
        f"{len(line['conditionals'])}",
        f"{line['temporaries']:.1f}",
        _collectives(line),
        f"{line['compile_seconds']:.0f}",
    ]


def _branches(line: Line) -> str:
    """Return the cost of each branch of each conditional."""
    bucket_bytes = 4 * line["entries"]
    cost = lambda x: f"{x['launches']} / {x['bytes'] / bucket_bytes:.1f}"
    return "; ".join(
        f"{line['method']}: " + ", ".join(map(cost, branches))
        for branches in line["conditionals"]
    )


def text(path: Path) -> str:
    """Return the tables of a record in Markdown."""
    head, lines = read(path)
    parts = [f"Programs for {head['configuration']['device']}"]
    for millions in sorted({x["millions"] for x in lines}):
        here = [x for x in lines if x["millions"] == millions]
        dense = next(x for x in here if x["method"] == "dense")
        parts += [
            f"{dense['entries']:,} entries; the dense step has {dense['kernels']}"
            f" kernels and {dense['passes']:.1f} passes.",
            markdown([HEAD, *(row(x, dense) for x in here)]),
        ]
        if ladders := [f"- {_branches(x)}" for x in here if x["conditionals"]]:
            head_of = "Branches of conditionals, kernels / passes each:"
            parts += [head_of, "\n".join(ladders)]
    return "\n\n".join(parts)


def main(args: Args) -> None:
    """Print the tables."""
    print(text(args.path))
