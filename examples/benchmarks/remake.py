"""Every file of tables and every figure that is made of recorded lines, made again.

`git diff` then shows where a record and its lines disagree; tests/test_records.py asks
the same.

    python examples/benchmarks/remake.py
"""

import functools
from collections.abc import Callable
from pathlib import Path

import end_to_end_report
import growth
import live
import quality_report
import quality_results
import results_report
import traces
from journal import read
from live_inside import Setting

RECORDS = Path(__file__).with_name("records")
BESIDE = ("runs", "torch", "live")  # what an end-to-end record may have besides steps
Make = Callable[[Path], object]


def _losses(*names: str) -> Make:
    """Held-out loss against bytes, as quality_report.py draws it."""

    def make(path: Path) -> None:
        configuration, found = quality_report.read_all([RECORDS / x for x in names])
        runs = quality_results.results(found)
        quality_report.draw(runs, "wire_bytes", configuration["unit"], path)

    return make


def _growth(path: Path) -> None:
    args = growth.Args(RECORDS / "2026-11-21_growth/growth.jsonl")
    growth.draw_picture(read(args.out)[1], args, path)


def _traces(path: Path) -> None:
    out = RECORDS / "2026-11-22_controllers/traces.jsonl"
    args = traces.Args(data_dir=Path(), out=out, picture=path)
    traces.draw(read(out)[1], args)


def _live(path: Path) -> None:
    head, lines = read(RECORDS / "2026-11-23_live/live.jsonl")
    own = {k: v for k, v in head["configuration"].items() if k != "hosts"}
    live.draw(lines, Setting(**own), path)


def _end_to_end(folder: str) -> dict[str, Make]:
    """Tables for each task and number of hosts in a folder; if trained, a figure."""
    made: dict[str, Make] = {}
    for steps in sorted((RECORDS / folder).glob("*_steps.jsonl")):
        which = steps.stem.removesuffix("_steps")
        hosts = int(which.rpartition("_")[2])
        beside = {kind: steps.with_name(f"{which}_{kind}.jsonl") for kind in BESIDE}
        there = {kind: path for kind, path in beside.items() if path.exists()}
        args = end_to_end_report.Args(steps, hosts=hosts, **there)
        name = f"{folder}/{which}"
        made[f"{name}.md"] = _text(functools.partial(end_to_end_report.text, args))
        if args.runs:
            made[f"{name}.png"] = functools.partial(_speed_ups, args)
    return made


def _speed_ups(args: end_to_end_report.Args, path: Path) -> None:
    end_to_end_report.draw(*end_to_end_report.read(args), path)


def _text(text: Callable[[], str]) -> Make:
    return lambda path: path.write_text(text() + "\n")


def _results(folder: str) -> dict[str, Make]:
    """A table and a figure for each workload in a folder."""
    made: dict[str, Make] = {}
    for lines in sorted((RECORDS / folder).glob("*.jsonl")):
        name = f"{folder}/{lines.stem}"
        made[f"{name}.md"] = _text(functools.partial(results_report.text, lines))
        made[f"{name}.png"] = functools.partial(results_report.draw, lines)
    return made


MADE: dict[str, Make] = {
    "2026-11-21_exchanges/lstm.png": _losses("2026-11-21_exchanges/lstm.jsonl"),
    "2026-11-21_exchanges/resnet.png": _losses("2026-11-21_exchanges/resnet.jsonl"),
    "2026-11-21_exchanges/transformer.png": _losses(
        "2026-11-21_exchanges/transformer.jsonl"
    ),
    "2026-11-21_growth/growth.png": _growth,
    "2026-11-21_quality_lstm/loss_against_wire_bytes.png": _losses(
        "2026-11-21_quality_lstm/dense_default.jsonl",
        "2026-11-21_quality_lstm/fixed.jsonl",
    ),
    "2026-11-22_controllers/traces.png": _traces,
    "2026-11-23_live/live.png": _live,
    **_end_to_end("2026-11-23_end_to_end"),
    **_results("2026-11-23_results"),
}


def main() -> None:
    """Make all of it again."""
    for name, make in MADE.items():
        make(RECORDS / name)
        print(name)


if __name__ == "__main__":
    main()
