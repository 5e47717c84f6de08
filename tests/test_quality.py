"""The quality harness: its statistics, its files, and that it reproduces itself."""

import json
import math

import pytest
from common import journal
from quality import report, trial
from quality import run as quality
from quality.results import paired, results, tuned, tuning

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time


def line(method, seed, step, loss, phase="test", learning_rate=0.5, **others):
    own = {"phase": phase, "method": method, "seed": seed, "step": step, "loss": loss}
    sent = {"dense_wire_bytes": 600, "wire_bytes": 600}
    return {**own, "learning_rate": learning_rate, **sent, **others}


def record(tmp_path, lines, name="record.jsonl"):
    setting = {"task": "t", "replicas": 4, "steps": 10, "unit": "nats"}
    book = journal.Journal(tmp_path / name, setting)
    book.append(*lines)
    return book.path


def rows(text):
    """Return the rows of all tables by the name of the method; a later one counts."""
    cells = [x.strip("| ").split(" | ") for x in text.splitlines() if x[:1] == "|"]
    return {name: others for name, *others in cells}


def test_the_learning_rate_with_the_least_final_validation_loss_is_taken():
    losses = {0.1: (3.0, 2.0), 0.2: (5.0, 1.5), 0.4: (1.0, None)}.items()
    lines = [line("a", 9, 5, early, "tune", rate) for rate, (early, _) in losses]
    lines += [line("a", 9, 10, last, "tune", rate) for rate, (_, last) in losses]
    assert tuning(lines) == {"a": {0.1: 2.0, 0.2: 1.5, 0.4: math.inf}}
    assert tuned(lines) == {"a": 0.2}
    assert results(lines) == []


def test_a_run_is_paired_with_the_dense_one_of_its_seed():
    lines = [line(m, seed, 10, 1.0) for m in ("dense", "a") for seed in (0, 1)]
    runs = results([*lines, line("a", 2, 10, 1.0)])
    own = [x for x in runs if x.method == "a"]
    pairs = [(x.seed, d.seed, d.method) for x, d in paired(own, runs)]
    assert pairs == [(0, 0, "dense"), (1, 1, "dense")]


def test_the_table_has_the_gaps_of_paired_seeds_and_what_was_saved(tmp_path):
    lines = [line("dense", 0, 10, 2.0), line("dense", 1, 10, 4.0)]
    lines += [line("a", i, 10, x, wire_bytes=120) for i, x in enumerate((2.2, 4.8))]
    table = rows(report.text([record(tmp_path, lines)]))
    assert table["a"] == ["0.5", "5.0", "3.5000", "+15.0% (+10.0, +20.0)", "46.6%"]


def test_runs_are_compared_after_the_same_step_and_others_left_out(tmp_path):
    lines = [line("dense", 0, 10, 2.0), line("dense", 1, 5, 9.0)]
    lines += [line("whole", 0, 10, 3.0), line("cut", 0, 5, 2.0)]
    path = record(tmp_path, lines)
    text = report.text([path])
    assert rows(text)["whole"][3] == "+50.0% (+50.0)"
    assert "2 runs that have not ended are left out" in text
    assert "cut" not in rows(text)
    earlier = [line("dense", 0, 5, 1.0), line("cut", 0, 5, 2.0)]
    path = record(tmp_path, [*earlier, *lines[:1]], "earlier")
    assert rows(report.text([path], at=5))["cut"][3] == "+100.0% (+100.0)"


def test_nothing_is_compared_with_a_dense_run_that_diverged(tmp_path):
    lines = [line("dense", 0, 10, None), line("a", 0, 10, 2.0)]
    with pytest.raises(SystemExit, match="dense run of seed 0 diverged"):
        report.text([record(tmp_path, lines)])


def test_parts_of_one_record_are_read_as_one_and_others_refused(tmp_path):
    one = record(tmp_path, [line("dense", 0, 10, 2.0)], "one")
    two = record(tmp_path, [line("a", 0, 10, 2.5)], "two")
    assert "+25.0%" in report.text([one, two])
    two.write_text(two.read_text().replace('"steps": 10', '"steps": 20'))
    with pytest.raises(SystemExit, match="two is of another configuration"):
        report.text([one, two])


TOY = trial.Setting(
    replicas=2, rows=2, steps=6, evaluations=3, multiples=(1.0,), evaluation_rows=8
)


def toy(text, out, **others):
    args = {"methods": ("dense", "own Bits(2)"), "seeds": 1, "setting": TOY, **others}
    quality.main(quality.Args(text, out, **args))
    return out.read_bytes()


@pytest.mark.slow
def test_methods_see_the_same_batches_and_rounds_send_once_each(tmp_path, text):
    out, rounds = tmp_path / "x.jsonl", "every 4 own Dense()"
    toy(text, out, methods=("dense", "Dense()", rounds))
    found = {x.method: x for x in results(journal.read(out)[1])}
    losses = {m: [y["training_loss"] for y in x.lines] for m, x in found.items()}
    assert losses["dense"] == losses["Dense()"]
    dense, rounds = found["dense"].final, found[rounds].final
    sent = dense["wire_bytes"] / rounds["wire_bytes"]
    assert sent == pytest.approx(6, rel=0.01)  # one exchange in six steps
    assert rounds["loss"] < 5.6  # of the first params


@pytest.mark.slow
def test_the_same_command_writes_the_same_file_even_if_cut(tmp_path, text, monkeypatch):
    whole = toy(text, tmp_path / "one.jsonl")
    assert [json.loads(x)["step"] for x in whole.splitlines()[1:]] == [2, 4, 6] * 2

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
