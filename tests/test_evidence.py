"""The study of evidence: what a step was worth, and that its script runs."""

import dataclasses

import evidence
import evidence_report
import numpy as np
import pytest


def lines(losses, method):
    return [
        {"method": method, "step": 10 * (i + 1), "loss": x}
        for i, x in enumerate(losses)
    ]


def test_progress_is_the_dense_steps_that_a_step_is_worth():
    dense = lines([4.0, 3.0, 2.0, 1.0], "dense")
    assert evidence_report.progress(dense, dense) == 1
    # At 30 and 40 steps it has what dense has at 15 and 20.
    slow = lines([4.0, 4.0, 3.5, 3.0], "slow")
    assert evidence_report.progress(slow, dense) == 0.5


def test_the_whole_gradient_counts_what_goes_dense():
    line = {"raw_gain": 0.25}
    norm = evidence_report.predictors(0.5)["norm, whole gradient"]
    assert norm(line) == pytest.approx(np.sqrt(0.5 + 0.5 * 0.25))


@pytest.mark.parametrize("k", [1, 3, 10, 50])
def test_a_wait_is_that_of_random_walks_that_are_sent_at_a_threshold(k):
    squares = np.sort(np.random.default_rng(k).chisquare(1, 50))[::-1]
    found = evidence.wait(squares, k)
    if k == 50:
        assert found == 0
        return
    # By bisection: the threshold at which k are sent a step.
    low, high = 0.0, 1e6
    for _ in range(100):
        t = (low + high) / 2
        low, high = (t, high) if np.minimum(1, squares / t).sum() > k else (low, t)
    waiting = squares < t
    assert found == pytest.approx(t * waiting.sum() / squares.sum(), rel=1e-6)


@pytest.mark.slow
def test_the_study_runs_and_goes_on_where_it_was(tmp_path):
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    setting = dataclasses.replace(
        evidence.SETTING, steps=4, evaluations=2, evaluation_rows=128
    )
    out = tmp_path / "lines.jsonl"
    methods = ("dense", "fixed10", "momentum10")
    evidence.main(evidence.Args(tmp_path, out, methods[:1], setting=setting))
    first = out.read_text()
    evidence.main(evidence.Args(tmp_path, out, methods, setting=setting))
    assert out.read_text().startswith(first)
    table = evidence_report.table(out)
    assert table.row_count == len(methods)
    assert len(table.columns) == 3 + len(evidence_report.predictors(1.0))
