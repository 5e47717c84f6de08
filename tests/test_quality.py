"""The quality harness: its statistics, its files, and that it reproduces itself."""

import dataclasses
import io
import json
import math

import pytest
from common import journal
from quality import report, trial
from quality import run as quality
from quality.results import paired, results, tuned, tuning
from rich.console import Console

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

DENSE = {"payload_bytes": 400, "wire_bytes": 600}


def line(method, seed, step, loss, phase="test", learning_rate=0.5, **others):
    own = {"phase": phase, "method": method, "seed": seed, "step": step, "loss": loss}
    sent = {"dense_bytes": 400, "dense_wire_bytes": 600, **DENSE, "touches": 100.0}
    return {**own, "learning_rate": learning_rate, **sent, **others}


def record(tmp_path, lines, name="record.jsonl"):
    setting = {"task": "t", "replicas": 4, "steps": 10, "unit": "nats"}
    book = journal.Journal(tmp_path / name, setting)
    book.append(*lines)
    return book.path


def printed(files):
    console = Console(width=80, file=io.StringIO())
    for part in report.tables(files, None):
        console.print(part)
    return console.file.getvalue()


def row_names(text):
    return {x.split()[0] for x in text.splitlines() if x.split()}


def row(text, name):
    (found,) = [x.split() for x in text.splitlines() if x.split()[:1] == [name]]
    return found


def test_the_learning_rate_with_the_least_final_validation_loss_is_taken():
    lines = [
        line("a", 9, step, loss, "tune", rate)
        for rate, losses in {0.1: (3.0, 2.0), 0.2: (5.0, 1.5), 0.4: (1.0, None)}.items()
        for step, loss in zip((5, 10), losses, strict=True)
    ]
    assert tuning(lines) == {"a": {0.1: 2.0, 0.2: 1.5, 0.4: math.inf}}
    assert tuned(lines) == {"a": 0.2}
    assert results(lines) == []


def test_a_run_is_paired_with_the_dense_one_of_its_seed():
    lines = [line(m, seed, 10, 1.0) for m in ("dense", "a") for seed in (0, 1)]
    runs = results([*lines, line("a", 2, 10, 1.0)])
    own = [x for x in runs if x.method == "a"]
    assert [(x.seed, d.seed, d.method) for x, d in paired(own, runs)] == [
        (0, 0, "dense"),
        (1, 1, "dense"),
    ]


def test_the_table_has_gaps_factors_and_marks_too_few_touches(tmp_path):
    few = {"touches": 19.0, "payload_bytes": 40, "wire_bytes": 120}
    lines = [line("dense", 0, 10, 2.0), line("dense", 1, 10, 4.0)]
    lines += [line("a", 0, 10, 2.2, **few), line("a", 1, 10, 4.8, **few)]
    text = printed([record(tmp_path, lines)])
    gaps = "2 3.5000 15.00 (10.00-20.00) 46.57 10.0 5.0 19!"
    assert " ".join(row(text.split("gap to dense")[1], "a")[1:]) == gaps


def test_runs_that_have_not_ended_are_left_out(tmp_path):
    lines = [line("dense", 0, 10, 2.0), line("dense", 1, 5, 9.0)]
    lines += [line("whole", 0, 10, 3.0), line("cut", 0, 5, 2.0)]
    text = printed([record(tmp_path, lines)])
    assert row(text.split("gap to dense")[1], "whole")[3] == "50.00"
    assert "2 runs that have not ended are left out" in text
    assert row_names(text).isdisjoint({"cut"})


def test_nothing_is_compared_with_a_dense_run_that_diverged(tmp_path):
    lines = [line("dense", 0, 10, None), line("a", 0, 10, 2.0)]
    with pytest.raises(SystemExit, match="dense run of seed 0 diverged"):
        printed([record(tmp_path, lines)])


def test_parts_of_one_record_are_read_as_one_and_others_refused(tmp_path):
    one = record(tmp_path, [line("dense", 0, 10, 2.0)], "one")
    two = record(tmp_path, [line("a", 0, 10, 2.5)], "two")
    assert "25.00" in printed([one, two])
    text = two.read_text().replace('"steps": 10', '"steps": 20')
    two.write_text(text)
    with pytest.raises(SystemExit, match="two is of another configuration"):
        printed([one, two])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 2000)
    return path


TOY = trial.Setting(
    replicas=2, rows=2, steps=6, evaluations=3, multiples=(1.0,), evaluation_rows=8
)


def toy(text, out, **others):
    args = {"methods": ("dense", "allreduced16"), "seeds": 1, "setting": TOY, **others}
    quality.main(quality.Args(text, out, **args))
    return out.read_bytes()


@pytest.mark.slow
def test_the_same_command_writes_the_same_file_also_after_a_cut(
    tmp_path, text, monkeypatch
):
    whole = toy(text, tmp_path / "one.jsonl")
    assert toy(text, tmp_path / "two.jsonl") == whole
    steps = [json.loads(x)["step"] for x in whole.splitlines()[1:]]
    assert steps == [2, 4, 6] * 2

    cut, rate = tmp_path / "cut.jsonl", trial.learning_rate_at
    calls = iter(range(10**6))

    def interrupted(*arguments):
        if next(calls) == 9:  # in the second run
            raise KeyboardInterrupt
        return rate(*arguments)

    monkeypatch.setattr(trial, "learning_rate_at", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toy(text, cut)
    assert toy(text, cut) == whole


@pytest.mark.slow
def test_runs_side_by_side_are_what_each_of_them_is_alone(tmp_path, text):
    setting = dataclasses.replace(TOY, multiples=(0.5, 1.0))
    methods = {"methods": ("allreduced16",), "seeds": 3, "setting": setting}
    losses = {}
    for at_once in (1, 2):
        out = tmp_path / f"{at_once}.jsonl"
        toy(text, out, at_once=at_once, **methods)
        lines = [x for x in journal.read(out)[1] if x["step"] == TOY.steps]
        runs = ("phase", "method", "learning_rate", "seed")
        losses[at_once] = {tuple(x[y] for y in runs): x["loss"] for x in lines}
    assert len(set(losses[1].values())) == 2 + 3
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)


def test_runs_of_one_method_and_phase_go_side_by_side():
    made = [
        trial.Trial(phase, method, 1.0, seed, 6)
        for phase in ("tune", "test")
        for seed in range(3)
        for method in ("a", "b")
    ]
    groups = quality.side_by_side(made, 2)
    seeds = [(x[0].phase, x[0].method, [y.seed for y in x]) for x in groups]
    assert seeds[:4] == [
        *(("tune", "a", [0, 1]), ("tune", "b", [0, 1])),
        *(("tune", "a", [2]), ("tune", "b", [2])),
    ]
    assert quality.side_by_side(made, 1) == [[x] for x in made]


@pytest.mark.slow
def test_methods_of_a_seed_start_from_the_same_loss_and_see_the_same_batches(
    tmp_path, text
):
    out = tmp_path / "x.jsonl"
    toy(text, out, methods=("dense", "fixed1"))
    runs = {x.method: x.lines for x in results(journal.read(out)[1])}
    losses = {m: [x["training_loss"] for x in lines] for m, lines in runs.items()}
    assert losses["dense"] == losses["fixed1"]


@pytest.mark.slow
def test_a_published_recipe_sends_once_a_round(tmp_path, text):
    out = tmp_path / "x.jsonl"
    toy(text, out, methods=("dense", "diloco3"))
    dense, diloco = (x.final for x in results(journal.read(out)[1]))
    sent = dense["payload_bytes"] / diloco["payload_bytes"]
    assert sent == pytest.approx(3, rel=0.01)
    assert diloco["loss"] < 5.6  # of the first params
