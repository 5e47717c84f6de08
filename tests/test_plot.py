"""Pictures of runs: what is in them, that names can be read, and what is refused."""

import importlib.util
import itertools

import numpy as np
import pytest
from matplotlib.text import Text

from gravac_jax import __main__ as tools
from gravac_jax import metrics, plot

LADDER = np.array([1.0, 10.0, 100.0])
STEPS = 50


def line(step, rung=1, **more):
    """What a step writes at a rung of the ladder."""
    gains = {f"gravac/gains/{i}": 1 / (i + 1) for i in range(3)}
    return {
        "step": step,
        "seconds": 0.5 * step,
        "loss": 4 / (step + 1),
        "gravac/factor": LADDER[rung],
        "gravac/gain": 1 / (rung + 1),
        **gains,
        "gravac/wire_bytes": 4e6 / LADDER[rung],
        "gravac/dense_wire_bytes": 4e6,
        **more,
    }


def run(name="one", **more):
    return plot.Run(name, [line(i, 1 + i // 25, **more) for i in range(STEPS)])


def write(path, lines):
    with metrics.JsonlWriter(path) as writer:
        for x in lines:
            own = ("step", "seconds")
            figures = {name: value for name, value in x.items() if name not in own}
            writer.write(x["step"], figures)
    return path


def labels(runs):
    """The panels of a picture, by what their height is."""
    return [x.get_ylabel().split("\n")[0] for x in plot.draw(runs).axes]


def test_panels_are_those_of_which_there_are_figures():
    every = ["loss", "factor", "factor", "bytes sent", "seconds a step"]
    assert labels([run()]) == every
    bare = plot.Run(
        "bare", [{"step": i, "seconds": 1.0, "loss": 1.0} for i in range(3)]
    )
    assert labels([bare]) == ["loss"]
    assert labels([bare, run()]) == every
    held = {"held_out_loss": 2.0}
    assert labels([run(**held)]) == ["loss", "held out loss", *every[1:]]


def test_the_factors_of_rungs_are_those_that_steps_have_used():
    np.testing.assert_array_equal(run().rung_factors, [np.nan, 10, 100])
    np.testing.assert_array_equal(run().rungs, [1] * 25 + [2] * 25)
    skipped = plot.Run("one", [line(0), line(1) | {"gravac/factor": np.inf}])
    np.testing.assert_array_equal(skipped.rungs, [1, np.nan])


def test_skipped_steps_have_no_factor_and_are_marked():
    skipped = {"gravac/factor": np.inf, "gravac/gain": 0.0, "gravac/is_finite": 0.0}
    lines = [line(i, **(skipped if i == 3 else {})) for i in range(9)]
    axis = plot.draw([plot.Run("one", lines)]).axes[1]
    assert axis.get_ylabel() == "factor\n(x: skipped)"
    (marked,) = [x for x in axis.lines if x.get_marker() == "x"]
    assert list(marked.get_xdata()) == [3]


def test_seconds_are_from_line_to_line_but_where_a_run_went_on():
    lines = [
        {"step": i, "seconds": x} for i, x in ((0, 0), (1, 2), (3, 8), (4, 1), (5, 4))
    ]
    seconds = plot.Run("one", lines).step_seconds
    np.testing.assert_array_equal(seconds, [np.nan, 2, 3, np.nan, 3])
    measured = plot.Run("one", [x | {"step_seconds": 9.0} for x in lines])
    np.testing.assert_array_equal(measured.step_seconds, [9] * 5)


def test_one_run_shows_the_parts_of_its_seconds():
    parts = {"compute_seconds": 0.3, "exchange_seconds": 0.2}
    texts = lambda runs: [x.get_text() for x in plot.draw(runs).axes[-1].texts]
    assert texts([run(**parts)]) == ["one", "compute", "exchange"]
    assert texts([run(**parts), run("other")])[:2] == ["one", "other"]


def test_bytes_stand_beside_those_of_dense_steps_once():
    texts = lambda runs: [x.get_text() for x in plot.draw(runs).axes[-2].texts]
    dense = plot.Run("dense", [line(i, 0) for i in range(STEPS)])
    assert texts([run()]) == ["dense steps", "one, 1/18.2"]
    assert texts([plot.Run("one", [line(i) for i in range(9)]), dense])[:2] == [
        "one, 1/10",
        "dense",
    ]


def unseen(figure):
    """The labels of ticks beyond the ends of their axis, which are not drawn."""
    for axis in (y for x in figure.axes for y in (x.xaxis, x.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if not low <= tick.get_loc() <= high:
                yield from (tick.label1, tick.label2)


def test_a_run_that_sends_nothing_has_no_bytes_to_draw():
    silent = {"gravac/wire_bytes": 0.0, "gravac/dense_wire_bytes": 0.0}
    assert plot.draw([run(name=r"_lr$\foo$", **silent)]).axes


def test_no_two_texts_overlap_and_none_is_cut_off():
    runs = [run(f"a run with a long name, {i}") for i in range(7)]
    figure = plot.draw(runs)
    figure.draw_without_rendering()
    ours = [x for x in figure.findobj(Text) if x.get_text() and x.get_visible()]
    shown = [x for x in ours if x not in unseen(figure)]
    boxes = [(x.get_text(), x.get_window_extent()) for x in shown]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        overlap = a.overlaps(b) and min(a.x1, b.x1) - max(a.x0, b.x0) > 1
        assert not overlap or min(a.y1, b.y1) - max(a.y0, b.y0) < 2, (one, other)
    outside = [text for text, x in boxes if x.x1 > figure.bbox.x1 + 1 or x.x0 < -1]
    assert not outside


def test_lines_differ_without_their_colors():
    axis = plot.draw([run(str(i)) for i in range(7)]).axes[0]
    looks = [(x.get_linestyle(), x.get_marker()) for x in axis.lines[:7]]
    assert len(set(looks)) == 7


def test_a_long_run_is_drawn_with_few_points():
    lines = [{"step": i, "seconds": 0.1 * i, "loss": 1.0} for i in range(20_000)]
    axis = plot.draw([plot.Run("long", lines)]).axes[0]
    assert len(axis.lines[0].get_xdata()) <= 600
    assert axis.lines[0].get_xdata()[-1] == 19_999


# The command.


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_command_draws_files_of_a_writer(tmp_path, capsys, suffix, start):
    paths = [write(tmp_path / f"{x}.jsonl", run().lines) for x in ("one", "two")]
    out = tmp_path / "made" / f"both.{suffix}"
    tools.main(["plot", *map(str, paths), "--out", str(out)])
    assert out.read_bytes().startswith(start)
    assert capsys.readouterr().out == f"The picture is in {out}\n"


def test_a_cut_line_is_left_out_with_a_note(tmp_path, capsys):
    path = write(tmp_path / "one.jsonl", run().lines)
    path.write_bytes(path.read_bytes()[:-9])
    plot.main([str(path), "--out", str(tmp_path / "one.png")])
    note = f"plot: {path}: the last line was cut off and is left out\n"
    assert capsys.readouterr().err.endswith(note)


def refused(tmp_path, path, out="one.png"):
    with pytest.raises(SystemExit) as end:
        plot.main([str(path), "--out", str(tmp_path / out)])
    assert not list(tmp_path.glob("*.png"))
    return str(end.value)


def test_what_cannot_be_drawn_is_named(tmp_path, capsys):
    path = tmp_path / "one.jsonl"
    assert f"there is no file {path}" in refused(tmp_path, path)
    path.write_text("")
    assert f"{path} has no whole line yet" in refused(tmp_path, path)
    path.write_text('{"step": 1}\n')
    assert f"{path}, line 1, is no line of metrics.J" in refused(tmp_path, path)
    path.write_text('{"step": 1, "seconds": 1}\n')
    assert "nothing to draw of one: no loss" in refused(tmp_path, path)
    refused(tmp_path, path, out="one.jpeg2")
    assert "--out must end with .png or .svg" in capsys.readouterr().err


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    paths = [tmp_path / x / "run.jsonl" for x in ("a", "b")]
    runs, _ = plot.read_runs([write(x, run().lines) for x in paths])
    assert [x.name for x in runs] == ["a/run", "b/run"]


def test_the_tools_are_listed_and_others_refused(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        tools.main(["--help"])
    listed = capsys.readouterr().out
    assert all(x in listed for x in ("launch", "plot", "probe"))
    for arguments in ([], ["mend"]):
        with pytest.raises(SystemExit):
            tools.main(arguments)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        tools.main(["probe"])
    assert "this version of gravac_jax has no probe" in capsys.readouterr().err


def test_a_tool_has_its_own_help(capsys):
    with pytest.raises(SystemExit):
        tools.main(["plot", "--help"])
    assert "RUN.jsonl" in capsys.readouterr().out
