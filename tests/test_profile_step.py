"""The profile of a step: what it reads in a program, and that it runs."""

import re

import profile_step
import pytest

PROGRAM = """
  %add_fusion.1 = f32[8,35]{1,0} fusion(%a), {op_name="jit(a)/jit(_where)/add"}
  ROOT %dot.2 = f32[16]{0} dot(%a), {op_name="jit(a)/jvp(Model)/head/dot_general"}
  %copy.3 = f32[2]{0} copy(%c)
"""


def test_shapes_and_origins_are_read_from_a_program():
    assert profile_step.described(PROGRAM) == {
        "add_fusion.1": ("f32[8,35]", "jit(_where)/add"),
        "dot.2": ("f32[16]", "jvp(Model)/head/dot_general"),
        "copy.3": ("f32[2]", ""),
    }


def test_what_belongs_to_the_model_is_in_the_total_alone():
    spent = {"add_fusion.1": 1.0, "dot.2": 5.0, "copy.3": 2.0}
    table = profile_step.table("fixed10", spent, PROGRAM, rows=5)
    assert table.title == "fixed10: 8.0 ms, of which 3.0 beside the model"
    assert list(table.columns[1].cells) == ["copy.3", "add_fusion.1"]


@pytest.mark.slow
def test_a_profile_runs(tmp_path, capsys):
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    names = ("dense", "fixed100", "default")
    sizes = {"warm_up_steps": 3, "steps": 2, "task": "lstm-bytes"}
    profile_step.main(profile_step.Args(tmp_path, methods=names, **sizes))
    printed = capsys.readouterr().out
    totals = re.findall(r"(\w+): ([\d.]+) ms, of which ([\d.]+) beside", printed)
    assert [x[0] for x in totals] == list(names)
    assert all(0 < float(own) < float(whole) for _, whole, own in totals)
