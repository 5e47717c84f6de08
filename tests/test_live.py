"""Live runs: that they run, go on and are drawn."""

import journal
import live
import pytest
from live_inside import Setting
from network import Network

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time


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
