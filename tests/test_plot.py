"""Pictures of runs, and the command that draws them."""

import numpy as np
import pytest

from gravac_jax import metrics, plot

NAMES = ["Dense()", "TopK(10)", "TopK(100)"]
STEPS = 50
PANELS = ["loss", "rung", "bytes sent so far", "seconds per step"]


def line(step, rung=1, **more):
    """The figures of a step at a rung of the ladder."""
    return {
        "step": step,
        "seconds": 0.5 * step,
        "loss": 4 / (step + 1),
        "gravac/rung": rung,
        **{f"gravac/gains/{name}": 1 / (i + 1) for i, name in enumerate(NAMES)},
        "gravac/wire_bytes": 4e6 / 10**rung,
        "gravac/dense_wire_bytes": 4e6,
        **more,
    }


def run(name="one", rung=1, **more):
    return plot.Run(name, [line(i, rung, **more) for i in range(STEPS)])


def panels_of(runs):
    """The panels of a picture, by the label of their vertical axis."""
    axes = plot.draw(runs).axes
    return [label for x in axes if (label := x.get_ylabel().split("\n")[0]) != "gain"]


def test_a_picture_has_a_panel_for_each_loss_and_for_the_gains_of_each_run():
    assert panels_of([run()]) == PANELS
    assert panels_of([run(held_out_loss=2.0)]) == ["loss", "held out loss", *PANELS[1:]]
    bare = plot.Run("bare", [{"step": i, "seconds": i} for i in range(3)])
    assert panels_of([bare, run("a"), run("b")]) == [*PANELS[:2], *PANELS[1:]]


def test_gains_are_drawn_by_encoding_where_known_with_the_one_taken():
    lines = [line(i, rung=1 + (i > 20)) for i in range(STEPS)]
    for x in lines[:21]:
        x["gravac/gains/TopK(100)"] = 0.0  # it was not taken yet
    lines[30]["gravac/rung"] = 3  # a local step
    for x in lines[40:]:  # resumed on a ladder without a dense rung
        del x["gravac/gains/Dense()"]
        x["gravac/rung"] = 1 + (x["step"] == 45)  # a local step
    (axis,) = [x for x in plot.draw([plot.Run("one", lines)]).axes if x.collections][:1]
    assert [x.get_text() for x in axis.get_yticklabels()] == NAMES
    drawn = axis.collections[0].get_array().filled(np.nan)
    np.testing.assert_allclose(drawn[:2], [[1] * 40 + [np.nan] * 10, [0.5] * STEPS])
    np.testing.assert_allclose(drawn[2], [np.nan] * 21 + [1 / 3] * 29)
    taken = [1] * 21 + [2] * 9 + [np.nan] + [2] * 14 + [np.nan] + [2] * 4
    np.testing.assert_array_equal(axis.lines[0].get_ydata(), taken)


def test_a_point_of_a_loss_is_the_median_of_a_hundredth_of_the_run():
    lines = [{"step": i, "seconds": i, "loss": float(i % 10)} for i in range(1000)]
    lines[5]["loss"] = np.nan
    (drawn,) = plot.draw([plot.Run("one", lines)]).axes[0].lines
    parts = np.array_split(np.delete(np.arange(1000), 5), 100)
    np.testing.assert_array_equal(drawn.get_xdata(), [np.median(x) for x in parts])
    np.testing.assert_array_equal(drawn.get_ydata(), [np.median(x % 10) for x in parts])


def test_bytes_are_drawn_step_by_step_beside_dense_ones():
    lines = [line(i) for i in range(STEPS)]
    lines[30]["gravac/wire_bytes"] = 0.0  # a local step
    _, _, sent, *_ = plot.draw([plot.Run("one", lines)]).axes
    own, dense = (x.get_ydata() for x in sent.lines)
    np.testing.assert_allclose(dense, 4e6 * np.arange(1, STEPS + 1))
    np.testing.assert_allclose(own, 4e5 * np.cumsum(np.arange(STEPS) != 30))


def test_seconds_are_those_from_line_to_line_except_where_a_run_resumed():
    times = ((0, 0), (1, 2), (3, 8), (4, 1), (5, 4))
    lines = [{"step": i, "seconds": x} for i, x in times]
    seconds = plot.Run("one", lines).seconds_per_step()
    np.testing.assert_array_equal(seconds, [np.nan, 2, 3, np.nan, 3])


def test_the_legend_names_all_runs_and_how_much_less_they_sent():
    runs = [run("adaptive"), run("dense", rung=0), plot.Run("bare", [line(0)])]
    (legend,) = plot.draw(runs).legends
    fewer = "(10 times fewer bytes than dense)"
    expected = [f"adaptive {fewer}", "dense", f"bare {fewer}", "bytes of dense steps"]
    assert [x.get_text() for x in legend.get_texts()] == expected


def test_the_command_draws_the_files_of_a_writer(tmp_path, capsys):
    paths = [tmp_path / x / "run.jsonl" for x in ("a", "b")]
    for path in paths:
        with metrics.JsonlWriter(path) as writer:
            for i in range(STEPS):
                writer.write(i, {"loss": 1 / (i + 1)})
    paths[0].write_bytes(paths[0].read_bytes()[:-9])
    out = tmp_path / "made" / "both.svg"
    with pytest.warns(UserWarning, match="the last line was cut off"):
        plot.main([*map(str, paths), "--out", str(out)])
    assert out.stat().st_size > 10_000
    assert capsys.readouterr().out == f"The picture is in {out}\n"


def test_files_that_cannot_be_drawn_are_refused(tmp_path):
    path, out = tmp_path / "run.jsonl", tmp_path / "one.png"
    for text, complaint in (
        (None, "No such file"),
        ("", "run has no whole line yet"),
        ('{"step": 1}\n', "line 1 is not a line of metrics.JsonlWriter"),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(SystemExit, match=complaint):
            plot.main([str(path), "--out", str(out)])
        assert not out.exists()
