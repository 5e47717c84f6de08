"""Make every file of tables and every figure of the records again, from their lines.

`git diff` then shows where a record and its lines disagree; tests/test_records.py asks
the same.

    python examples/benchmarks remake
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adaptivity.run
import adaptivity.worker
import controllers.fit
import controllers.run
import controllers.traces
import controllers.worth
import end_to_end.report
import paper.report
import programs.report
import quality.report
import quality.results
import scale.run
from common import figures
from common.journal import read
from matplotlib.ticker import EngFormatter, ScalarFormatter

RECORDS = Path(__file__).with_name("records")
# What an end-to-end record may have besides steps and live runs.
BESIDE = ("runs", "torch", "torch_runs")
Make = Callable[[Path], object]


def _losses(*names: str) -> Make:
    """Draw held-out loss against bytes."""

    def make(path: Path) -> None:
        configuration, found = quality.report.read_all(RECORDS / x for x in names)
        runs = quality.results.results(found)
        quality.report.draw(runs, "wire_bytes", configuration["unit"], path)

    return make


def _longer(folder: str) -> dict[str, Make]:
    """Say and draw what longer runs lose, and how well the law predicts it."""
    cnn = ("resnet_4", "resnet_4_few_bits")
    # Runs that were cut off are compared at the last steps of some and of all methods.
    parts = {"vgg_4": (("vgg_4",), (2400, 2700)), "resnet_4": (cnn, (1050, 1200))}
    made: dict[str, Make] = {}
    for name, (files, last) in parts.items():
        paths = [RECORDS / folder / f"{x}.jsonl" for x in files]
        gaps = functools.partial(quality.report.draw_gaps, paths)
        made[f"{folder}/{name}.png"] = gaps
        for at in last:
            made[f"{folder}/{name}_{at}.md"] = _text(quality.report.text, paths, at)
    made[f"{folder}/law.md"] = _text(controllers.fit.text, RECORDS)
    made[f"{folder}/rounding.md"] = _text(controllers.fit.of_rounding, RECORDS)
    made[f"{folder}/law.png"] = _law(controllers.fit.ALL, controllers.fit.NOW)
    return made


def _quality(
    folder: str, *names: str, ends: tuple[str, ...] = ("",)
) -> dict[str, Make]:
    """Make a table and a figure of each workload, of a file for each of the `ends`."""
    made: dict[str, Make] = {}
    for name in names:
        lines = [f"{folder}/{name}{end}.jsonl" for end in ends]
        paths = [RECORDS / x for x in lines]
        made[f"{folder}/{name}.md"] = _text(quality.report.text, paths)
        made[f"{folder}/{name}.png"] = _losses(*lines)
    return made


def _growth(path: Path) -> None:
    """Draw bytes, and milliseconds at 1 Gbit/s, over the number of replicas."""
    lines = read(RECORDS / "2026-11-21_growth/growth.jsonl")[1]
    with figures.picture(path, (11, 4.6), columns=2) as (figure, (axes,)):
        sent, taken = axes
        for name in dict.fromkeys(x["exchange"] for x in lines):
            mine = [x for x in lines if x["exchange"] == name]
            timed = [x for x in mine if "step_seconds" in x]
            seconds = [x["step_seconds"][1] + x["wire_bytes"] / 125e6 for x in timed]
            replicas = [x["replicas"] for x in mine]
            kilobytes = [x["wire_bytes"] / 1e3 for x in mine]
            sent.plot(replicas, kilobytes, marker="o", ms=4, label=name)
            at = replicas[: len(timed)]
            taken.plot(at, [1e3 * x for x in seconds], marker="o", ms=4, label=name)
        sent.set(ylabel="kilobytes that one replica sends in a step")
        taken.set(
            ylabel="milliseconds of one replica's work\nand of its bytes at 1 Gbit/s"
        )
        for axis in axes:
            axis.set(xlabel="replicas", yscale="log")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(ScalarFormatter())
            axis.yaxis.set_major_formatter(EngFormatter(sep=""))
        figures.legend_below(figure, columns=4)


def _traces(path: Path) -> None:
    out = RECORDS / "2026-11-22_controllers/traces.jsonl"
    args = controllers.traces.Args(data_dir=Path(), out=out, picture=path)
    controllers.traces.draw(read(out)[1], args)


def _law(workloads: controllers.fit.Workloads, law: controllers.fit.Law) -> Make:
    return lambda path: controllers.fit.draw(RECORDS, path, workloads, law)


def _networks(folder: str) -> Make:
    lines = RECORDS / folder / "networks.jsonl"
    return lambda path: controllers.run.draw(read(lines)[1], path)


def _worth(folder: str, model: str) -> dict[str, Make]:
    """Say and draw what a step of a small model is worth."""
    records = {
        "two bits, in turns": RECORDS / folder / f"{model}.jsonl",
        "one bit, in turns above 32": RECORDS / folder / f"{model}_one_bit.jsonl",
    }
    return {
        f"{folder}/worth.md": _text(controllers.worth.table, records),
        f"{folder}/worth.png": functools.partial(controllers.worth.draw, records),
    }


def _closed_loop(folder: str, *names: str) -> dict[str, Make]:
    """Make the tables of controllers on networks drawn at random."""
    table = lambda path: controllers.run.table(read(path)[1])
    lines = lambda name: RECORDS / folder / f"{name}.jsonl"
    return {f"{folder}/{name}.md": _text(table, lines(name)) for name in names}


def _live(name: str) -> Make:
    def make(path: Path) -> None:
        head, lines = read(RECORDS / _LIVE / f"{name}.jsonl")
        fields = {x.name for x in dataclasses.fields(adaptivity.worker.Setting)}
        own = {k: x for k, x in head["configuration"].items() if k in fields}
        adaptivity.run.draw(lines, adaptivity.worker.Setting(**own), path)

    return make


def _end_to_end(folder: str, over: str | None = None) -> dict[str, Make]:
    """Make tables for each task and number of hosts; where it was trained, a figure."""
    made: dict[str, Make] = {}
    for steps in sorted((RECORDS / folder).glob("*_steps.jsonl")):
        which = steps.stem.removesuffix("_steps")
        hosts = int(which.rpartition("_")[2])
        beside = {kind: steps.with_name(f"{which}_{kind}.jsonl") for kind in BESIDE}
        there = {kind: path for kind, path in beside.items() if path.exists()}
        live = tuple(sorted(steps.parent.glob(f"{which}_live*.jsonl")))
        args = end_to_end.report.Args(steps, hosts=hosts, over=over, live=live, **there)
        made[f"{folder}/{which}.md"] = _text(end_to_end.report.text, args)
        if args.runs:
            make = functools.partial(end_to_end.report.draw_record, args)
            made[f"{folder}/{which}.png"] = make
    return made


def _time_to_quality(path: Path) -> None:
    """Draw two tasks side by side."""
    titles = {"gpt": "a GPT, AdamW", "ptb": "an LSTM on PTB, momentum SGD"}
    files = lambda task: (
        RECORDS / _TIME_TO_QUALITY / f"{task}_2_{kind}.jsonl"
        for kind in ("steps", "runs")
    )
    records = {
        title: end_to_end.report.Args(*files(task), hosts=2)
        for task, title in titles.items()
    }
    crowding = r"turns(2|8).*|delayed(adam1|allreduced.*|turns[48].*)|diloco10.*"
    crowding += r"|localfixed1000|localallreduced16"
    end_to_end.report.draw_beside(records, path, leave_out=crowding)


def _text(text: Callable[..., str], *arguments: Any) -> Make:
    return lambda path: path.write_text(text(*arguments) + "\n")


def _paper(folder: str) -> dict[str, Make]:
    """Make a table and a figure for each workload."""
    made: dict[str, Make] = {}
    for lines in sorted((RECORDS / folder).glob("*.jsonl")):
        made[f"{folder}/{lines.stem}.md"] = _text(paper.report.text, lines)
        make = functools.partial(paper.report.draw, lines)
        made[f"{folder}/{lines.stem}.png"] = make
    return made


def _programs(folder: str) -> dict[str, Make]:
    """Make the tables of each device."""
    return {
        f"{folder}/{lines.stem}.md": _text(programs.report.text, lines)
        for lines in sorted((RECORDS / folder).glob("[hv]*.jsonl"))  # h100, v5e
    }


def _scale() -> dict[str, Make]:
    """Make the tables and the figure of the model of many hosts."""
    args = functools.partial(scale.run.Args, picture=Path(), out=Path())
    return {
        f"{_SCALE}/scale.md": lambda path: path.write_text(scale.run.text(args())),
        f"{_SCALE}/scale.png": lambda path: scale.run.draw(args(), path),
    }


_CLOSED_LOOP = "2026-11-25_closed_loop"
_EXCHANGES = "2026-11-21_exchanges"
_IN_TURN = "2026-11-25_in_turn"
_SPARSE = "2026-11-26_sparse_progress"
_LAYERS = "2026-11-27_vgg_layers"
_SPARED = "2026-11-27_spared_leaves"
_LIVE = "2026-11-25_live"
_PROGRESS = controllers.fit.FIVE, controllers.fit.BEFORE
_LONGER = controllers.fit.LONGER
_LSTM = "2026-11-21_quality_lstm"
_SCALE = "2026-11-25_scale"
_SECOND_MODEL = "2026-11-27_second_model"
_STEPS = "2026-11-24_steps"
_TIME_TO_QUALITY = "2026-11-25_time_to_quality"
_TURNS = "2026-11-25_turns"
MADE: dict[str, Make] = {
    **{
        f"{_EXCHANGES}/{name}.png": _losses(f"{_EXCHANGES}/{name}.jsonl")
        for name in ("lstm", "resnet", "transformer")
    },
    f"{_LSTM}/loss_against_wire_bytes.png": _losses(
        f"{_LSTM}/dense_default.jsonl", f"{_LSTM}/fixed.jsonl"
    ),
    **{
        f"{_STEPS}/{name}.png": _losses(f"{_STEPS}/{name}.jsonl")
        for name in ("adamw", "lstm")
    },
    "2026-11-25_rounds/adamw.png": _losses("2026-11-25_rounds/adamw.jsonl"),
    **{
        f"{_TURNS}/{name}.png": _losses(f"{_TURNS}/{name}.jsonl")
        for name in ("adamw", "lstm")
    },
    "2026-11-21_growth/growth.png": _growth,
    "2026-11-22_controllers/traces.png": _traces,
    **{f"{_LIVE}/{name}.png": _live(name) for name in ("live", "today", "hundred")},
    "2026-11-25_progress/law.md": _text(controllers.fit.text, RECORDS, *_PROGRESS),
    "2026-11-25_progress/law.png": _law(*_PROGRESS),
    f"{_SPARSE}/law.md": _text(
        controllers.fit.selections, RECORDS / _SPARSE / "small.jsonl"
    ),
    **_closed_loop(_CLOSED_LOOP, "networks", "delayed"),
    f"{_CLOSED_LOOP}/networks.png": _networks(_CLOSED_LOOP),
    **_worth(_IN_TURN, "small"),
    **_closed_loop(_IN_TURN, "networks", "up_to_32"),
    **_worth(_SECOND_MODEL, "images"),
    **_closed_loop(_SECOND_MODEL, "networks"),
    f"{_SECOND_MODEL}/networks.png": _networks(_SECOND_MODEL),
    **_end_to_end("2026-11-23_end_to_end"),
    **_end_to_end("2026-11-24_delay"),
    **_end_to_end(_TIME_TO_QUALITY, "dense"),
    **_end_to_end("2026-11-27_very_slow", "dense"),
    **_end_to_end("2026-11-27_four_hosts", "dense"),
    **_end_to_end(_LAYERS, "dense"),
    **_end_to_end(_SPARED, "dense"),
    **_end_to_end("2026-11-27_spared_in_time", "dense"),
    **_end_to_end("2026-11-27_one_bit_in_turns", "dense"),
    **_end_to_end(_LONGER, "dense"),
    **_longer(_LONGER),
    **_closed_loop(_LONGER, "networks_images", "networks_text", "networks_one_bit"),
    f"{_TIME_TO_QUALITY}/both.png": _time_to_quality,
    **_paper("2026-11-23_results"),
    **_quality("2026-11-26_grid", "gpt", "adamw_16", "muon_16", "vgg", "resnet"),
    **_quality("2026-11-27_two_thousand_steps", "lstm"),
    **_quality(_LAYERS, "vgg"),
    **_quality(_SPARED, "vgg"),
    **_quality("2026-11-28_new_models", "images", "words", ends=("", "_in_bits")),
    **_programs("2026-11-25_programs"),
    **_programs("2026-11-25_slices"),
    **_scale(),
}


def main() -> None:
    """Make all of it again."""
    for name, make in MADE.items():
        make(RECORDS / name)
        print(name)
