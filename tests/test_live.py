"""Live runs and times to a quality: what they read, that they run, and go on."""

import journal
import live
import numpy as np
import pytest
import time_to_quality
from live_inside import Setting
from network import Network

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

TIMES = {"dense": 0.2, "fixed10": 0.1, "fixed100": 0.028, "fixed1000": 0.0208}


def timed(path, hosts=2):
    """A record as steptime.py writes it, of two bandwidths."""
    lines = journal.Journal(path, {})
    for mbit, slower in ((1000.0, 0.1), (100.0, 1.0)):
        for method, seconds in TIMES.items():
            quartiles = [0.0, seconds * slower, 1.0]
            both = {"hosts": hosts, "bandwidth_mbit": mbit, "method": method}
            lines.append({**both, "step_seconds": quartiles})
    return lines.lines


def args_of(tmp_path, **kwargs):
    paths = (tmp_path, tmp_path / "steps.jsonl", tmp_path / "out.jsonl")
    timed(paths[1])
    return time_to_quality.Args(*paths, hosts=2, **kwargs)


def test_seconds_between_measured_factors_follow_the_bytes(tmp_path):
    lines = timed(tmp_path / "steps.jsonl")
    fast, slow = time_to_quality.seconds_of(lines, hosts=2).values()
    for factor, seconds in ((1, 0.2), (10, 0.1), (100, 0.028), (1000, 0.0208)):
        assert slow(factor) == pytest.approx(seconds)
        assert fast(factor) == pytest.approx(seconds / 10)
    # 20 ms beside 0.8 s over the factor, by construction.
    assert slow(40) == pytest.approx(0.02 + 0.8 / 40)
    assert slow(5000) == slow(1000)


def test_a_table_compares_with_the_best_static_factor(tmp_path):
    args = args_of(
        tmp_path,
        factors=(1, 10),
        controllers=("Fastest",),
        seeds=2,
    )
    static = [
        {"seed": seed, "factor": factor, "seconds_to_target": steps}
        for seed in (0, 1)
        for factor, steps in ((1, 100.0), (10, 150.0))
    ]
    own = [
        {
            "seed": s,
            "controller": "Fastest",
            "bandwidth_mbit": m,
            "seconds_to_target": t,
        }
        for s in (0, 1)
        for m, t in ((1000.0, 1.8), (100.0, 30.0))
    ]
    table = time_to_quality.table(args, static + own)
    cells = [list(column.cells) for column in table.columns]
    rows = [row for row in zip(*cells, strict=True) if row[1] == "Fastest"]
    # The best is factor 10: 150 steps of 10 and of 100 ms.
    assert [row[2].split()[0] for row in rows] == ["1.200", "2.000"]
    assert [row[3].split()[0] for row in rows] == ["0.900", "1.500"]


@pytest.mark.slow
def test_times_to_a_quality_are_found_once(tmp_path):
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    args = args_of(
        tmp_path,
        factors=(1, 100),
        controllers=("Fastest", "Accordion"),
        seeds=1,
        steps=2 * time_to_quality.EVERY,
    )
    time_to_quality.main(args)
    _, lines = journal.read(args.out)
    assert len(lines) == 2 + 2 * 2
    assert lines[0]["seconds_to_target"] is not None
    for line in lines[2:]:
        assert np.sum(line["taken"]) % time_to_quality.EVERY == 0
    before = args.out.read_text()
    time_to_quality.main(args)
    assert args.out.read_text() == before


@pytest.mark.slow
def test_a_race_runs_and_is_drawn_again(tmp_path, capsys):
    if reason := Network.unavailable():
        pytest.skip(reason)
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    setting = Setting(
        methods=("dense", "fastest"), bandwidths_mbit=(1000, 20), steps=4, turn=2
    )
    out, picture = tmp_path / "race.jsonl", tmp_path / "race.png"
    args = live.Args(tmp_path, out, picture, setting=setting)
    live.main(args)
    _, lines = journal.read(out)
    assert len(lines) == 2 * 2 * 2
    assert {x["method"]: x["factors"] for x in lines}["dense"] == [1.0, 1.0]
    assert all(x["seconds"] > 0 for x in lines)
    assert picture.stat().st_size > 10_000
    before = out.read_text()
    live.main(args)
    assert out.read_text() == before
    assert "dense" in capsys.readouterr().out
