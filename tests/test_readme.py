"""The README's code runs as it stands there, and its commands are complete."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_every_python_block_runs_in_order():
    names: dict = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert float(names["info"].wire_bytes) > 0


def test_the_diff_is_a_valid_loop_and_stays_under_six_lines_of_change():
    (diff,) = blocks("diff")
    after = [line[2:] for line in diff.splitlines() if not line.startswith("-")]
    compile("\n".join(after), "README.md", "exec")
    assert sum(line.startswith("+") for line in diff.splitlines()) < 6


def test_the_first_commands_set_up_their_own_environment_and_others_use_it():
    first, second, *others = blocks("bash")
    assert all(x.startswith("python3 -m venv .venv && ") for x in (first, second))
    assert others
    assert all(x.startswith(".venv/bin/") for x in others)
    assert all(len(x.splitlines()) == 1 for x in blocks("bash"))
