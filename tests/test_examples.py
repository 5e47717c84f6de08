"""The examples run, at toy size."""

from pathlib import Path

import pytest
from _harness import printed

from gravac_jax import metrics

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments, cwd, launch=(), example="quickstart.py"):
    return printed(*launch, str(EXAMPLES / example), *arguments, cwd=cwd)


ROWS = ("807,04", " adapt", " dense")
TOY = ("--steps", "3", "--batch", "2", "--length", "16")


@pytest.mark.slow
def test_the_quickstart_draws_and_finds_the_same_in_two_processes(tmp_path, text):
    ladder = "Fastest((Dense(), Bits(2, turns=2)))"
    options = (*TOY, "--data", str(text), "--send", ladder)
    alone = run(*options, "--out", "a/b.png", cwd=tmp_path)
    assert "807,040 params, 4 replicas" in alone
    assert (tmp_path / "a/b.png").read_bytes().startswith(b"\x89PNG")
    launch = ("-m", "gravac_jax.launch", "-n", "2", "--devices", "2")
    written = ("--out", "launched.png", "--metrics", "lines")
    launched = run(*options, *written, cwd=tmp_path, launch=launch)
    # All but the last column, the time of a step.
    table = lambda x: [y.split()[:-1] for y in x.splitlines() if y[:6] in ROWS]
    assert [row[0] for row in table(alone)] == ["807,040", "adaptive", "dense"]
    assert table(alone) == table(launched)
    assert (tmp_path / "launched.png").exists()
    lines = {x.stem: metrics.read_jsonl(x) for x in (tmp_path / "lines").iterdir()}
    assert {name: len(x) for name, x in lines.items()} == {"adaptive": 3, "dense": 3}


@pytest.mark.slow
def test_fsdp_trains_on_two_slices(tmp_path, text):
    options = ("--steps", "3", "--batch", "1", "--length", "16")
    output = run(*options, "--data", str(text), cwd=tmp_path, example="fsdp.py")
    assert "2 slices of 4 devices" in output
    rows = {x.split()[0]: x.split() for x in output.splitlines() if x.strip()}
    few, dense = rows["Bits(2)"], rows["dense"]
    assert float(few[2]) > 10 > float(dense[2]) == 1
    assert 10 * float(few[3]) < float(dense[3])  # bytes
    # kB: a quarter of all leaves; those that go dense have a residual, too.
    assert (few[4], dense[4]) == ("862", "861")
