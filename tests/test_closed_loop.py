"""The closed loop: that its script runs, and goes on where it was."""

import closed_loop
import journal
import numpy as np
import pytest
import traces


def test_a_target_is_reached_between_two_evaluations():
    losses, at = [3.0, 2.0, 2.5, 1.0], [20.0, 40.0, 60.0, 80.0]
    assert closed_loop.reached(losses, at, 2.25) == 35
    assert closed_loop.reached(losses, at, 2.0) == 40
    assert closed_loop.reached(losses, at, 1.0) == 80
    assert closed_loop.reached(losses, at, 3.5) == 20
    assert closed_loop.reached(losses, at, 0.5) is None


def test_seconds_are_those_of_the_all_gather_that_is_run():
    seconds = closed_loop.tables(replicas=4, entries=100_000, seed=0)
    assert (np.diff(seconds[1:]) < 0).all()
    assert (seconds == closed_loop.tables(4, 100_000, 0)).all()


@pytest.mark.slow
def test_the_loop_runs_and_goes_on_where_it_was(tmp_path):
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    out = tmp_path / "lines.jsonl"
    few = {"replicas": (2,), "steps": 40, "longest": 2.0, "seeds": 2}
    closed_loop.main(closed_loop.Args(tmp_path, out, networks=1, **few))
    _, first = journal.read(out)
    assert [x["kind"] for x in first] == ["fixed"] * 18 + ["network"]
    assert first[0]["steps"] is not None
    assert first[0]["target"] != first[9]["target"], "other batches"
    assert len(first[-1]["taken_seconds"]) == 2
    assert sum(first[-1]["taken"]) % closed_loop.EVERY == 0
    before = out.read_text()
    closed_loop.main(closed_loop.Args(tmp_path, out, networks=1, **few))
    assert out.read_text() == before


def test_the_network_is_slower_in_the_second_third(tmp_path):
    args = traces.Args(tmp_path, tmp_path, tmp_path, steps=9 * closed_loop.EVERY)
    table = traces.table_of(args, 30_000, traces.CONTROLLERS["Fastest"])
    dense = [float(table(i)[0]) for i in range(9)]
    assert dense[:3] == dense[6:]
    assert min(dense[3:6]) > 2 * max(dense[:3])


@pytest.mark.slow
def test_traces_are_drawn_and_not_made_again(tmp_path, monkeypatch):
    few = {name: traces.CONTROLLERS[name] for name in ("Fastest", "dense")}
    monkeypatch.setattr(traces, "CONTROLLERS", few)
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    out, picture = tmp_path / "lines.jsonl", tmp_path / "picture.png"
    args = traces.Args(tmp_path, out, picture, steps=6 * closed_loop.EVERY)
    traces.main(args)
    _, lines = journal.read(out)
    assert [
        len([x for x in lines if x["controller"] == name])
        for name in traces.CONTROLLERS
    ] == [6] * len(traces.CONTROLLERS)
    assert picture.stat().st_size > 10_000
    before = out.read_text()
    traces.main(args)
    assert out.read_text() == before
