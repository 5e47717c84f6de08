"""The examples run, at toy size."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from gravac_jax import metrics

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(
    *arguments: str,
    cwd: Path,
    launch: tuple[str, ...] = (),
    example: str = "quickstart.py",
) -> str:
    command = [sys.executable, *launch, str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    return str(path)


ROWS = ("807,04", " adapt", " dense")
TOY = ("--steps", "3", "--batch", "2", "--length", "16")


@pytest.mark.slow
def test_the_quickstart_compares_adaptive_with_dense_and_draws(tmp_path, text):
    output = run(*TOY, "--data", text, "--out", "a/b.png", cwd=tmp_path)
    assert "807,040 params, 4 replicas" in output
    rows = [line.split() for line in output.splitlines()]
    assert [row[0] for row in rows if row[-2:-1] == ["3"]] == ["adaptive", "dense"]
    assert (tmp_path / "a/b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_quickstart_compares_static_factors_on_request(tmp_path, text):
    options = ("--controller", "fixed", "--ladder", "1", "50", "--compare")
    output = run(*TOY, "--data", text, *options, "--replicas", "2", cwd=tmp_path)
    names = ("fixed", "dense", "factor 10", "factor 100")
    starts = [output.index(f"\n {name} ") for name in names]
    assert all(a < b for a, b in itertools.pairwise(starts))


@pytest.mark.slow
def test_the_quickstart_finds_the_same_in_two_processes(tmp_path, text):
    options = (*TOY, "--data", text, "--ladder", "1", "10", "100")
    alone = run(*options, "--replicas", "2", "--out", "alone.png", cwd=tmp_path)
    launch = ("-m", "gravac_jax.launch", "-n", "2")
    written = ("--out", "launched.png", "--metrics", "lines")
    launched = run(*options, *written, cwd=tmp_path, launch=launch)
    both = [
        # All but the last column, the time of a step.
        [line.split()[:-1] for line in output.splitlines() if line[:6] in ROWS]
        for output in (alone, launched)
    ]
    assert [row[0] for row in both[0]] == ["807,040", "adaptive", "dense"]
    assert both[0] == both[1]
    assert (tmp_path / "launched.png").exists()
    lines = {x.stem: metrics.read_jsonl(x) for x in (tmp_path / "lines").iterdir()}
    assert {name: len(x) for name, x in lines.items()} == {"adaptive": 3, "dense": 3}


@pytest.mark.slow
def test_fsdp_trains_on_two_slices(tmp_path, text):
    options = ("--steps", "3", "--batch", "1", "--length", "16")
    output = run(*options, "--data", text, cwd=tmp_path, example="fsdp.py")
    assert "2 slices of 4 devices" in output
    rows = [line.split() for line in output.splitlines()]
    (adaptive,), (dense,) = (
        [row for row in rows if row[:1] == [name]] for name in ("adaptive", "dense")
    )
    assert float(adaptive[2]) > float(dense[2]) == 1
    assert float(adaptive[3]) < float(dense[3])  # bytes
    assert adaptive[4] == dense[4] == "852"  # kB: a quarter of the matrices


@pytest.mark.slow
def test_the_quickstart_refuses_replicas_that_a_job_does_not_have(tmp_path):
    launch = ["-m", "gravac_jax.launch", "-n", "1", "--devices", "2"]
    command = [sys.executable, *launch, str(EXAMPLES / "quickstart.py")]
    done = subprocess.run(
        [*command, "--replicas", "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "--replicas 4 in a job of 2 devices" in done.stderr


@pytest.mark.slow
def test_the_quickstart_ends_cleanly_on_ctrl_c(tmp_path, text):
    script = f"""
import os, signal, sys; sys.path.insert(0, {str(EXAMPLES)!r})
import quickstart
batches = quickstart.draw
def interrupted(*arguments, **options):
    for i, batch in enumerate(batches(*arguments, **options)):
        if i == 5:
            os.kill(os.getpid(), signal.SIGINT)
        yield batch
quickstart.draw = interrupted
from pathlib import Path
few = dict(steps=50, batch=2, length=16, ladder=(1, 10), replicas=2)
config = quickstart.Config(**few, data=Path({text!r}))
runs = quickstart.main(config)
assert [len(run.loss) for run in runs] == [6], runs
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "stopped at step 6" in done.stdout
    assert "Traceback" not in done.stderr
    assert (tmp_path / "runs/quickstart.png").exists()
