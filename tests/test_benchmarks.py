"""The benchmarks: what they share, and that each of them runs and goes on."""

import importlib
import math
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro
from common import journal
from common.network import Network
from common.statistics import reached, target_of, upper_bound

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

CONFIGURATION = {"steps": 10, "methods": ("a", "b")}


@pytest.fixture
def book(tmp_path):
    """A record of two lines."""
    found = journal.Journal(tmp_path / "record.jsonl", CONFIGURATION)
    found.append({"seed": 0, "loss": 2.0}, {"seed": 1, "loss": 1.0})
    return found


def test_a_line_is_made_once(book):
    makes = lambda: {"loss": 3.0}
    assert book.once(makes, seed=2) == {"seed": 2, "loss": 3.0}
    assert book.once(lambda: pytest.fail("made again"), seed=2)["loss"] == 3
    assert journal.read(book.path)[1] == book.lines
    assert len(book.lines) == 3


def test_a_journal_forgets_a_last_line_that_was_cut_off(book):
    whole = book.path.read_text()
    book.path.write_text(whole[:-5])
    again = journal.Journal(book.path, CONFIGURATION)
    assert [x["seed"] for x in again.lines] == [0]
    again.append({"seed": 1, "loss": 1.0})
    assert book.path.read_text() == whole


def test_a_journal_of_another_configuration_is_refused_and_kept(book):
    before = book.path.read_bytes()
    message = "configuration steps 10, and this would be 20"
    with pytest.raises(SystemExit, match=message):
        journal.Journal(book.path, {**CONFIGURATION, "steps": 20})
    assert book.path.read_bytes() == before


def test_the_bound_is_students():
    # By hand: mean 2, deviation 1, error 1 / sqrt(3), t(0.95, 2) = 2.919986.
    assert upper_bound([1.0, 2.0, 3.0]) == pytest.approx(2 + 2.919986 / math.sqrt(3))
    assert math.isnan(upper_bound([1.0]))
    assert upper_bound([1.0, math.inf]) == math.inf


def test_the_bound_covers_the_mean_of_19_in_20_samples():
    samples = np.random.default_rng(0).normal(1.0, 2.0, (2000, 5)).tolist()
    covered = np.mean([upper_bound(x) >= 1.0 for x in samples])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_a_target_is_reached_between_two_evaluations():
    losses, at = [3.0, 2.0, 2.5, 1.0], [20.0, 40.0, 60.0, 80.0]
    wanted = {2.25: 35, 2.0: 40, 1.0: 80, 3.5: 20, 0.5: None}
    assert {x: reached(losses, at, x) for x in wanted} == wanted
    assert target_of([5.0, 4.0, 3.0, 2.0, 1.0]) == 2


@pytest.fixture
def text(tmp_path):
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    return tmp_path


# The smallest run of a benchmark, and how many lines it leaves.
RUNS = {
    "accelerator": (
        '--methods dense --alone "Bits(2)" lax.top_k --millions 1 --rows 1 --steps 1'
        " --entries 1e4",
        4,
    ),
    "adaptivity": (
        '--methods dense "own Bits(2)" --bandwidths-mbit 1000 20 --steps 2 --turn 1'
        " --picture picture.png",
        8,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs_and_makes_nothing_twice(name, text, monkeypatch, capsys):
    if name == "adaptivity" and (reason := Network.unavailable()):
        pytest.skip(reason)
    monkeypatch.chdir(text)
    options, count = RUNS[name]
    arguments = [*shlex.split(options), "--out", "out.jsonl"]
    if name == "adaptivity":
        arguments += ["--data-dir", str(text)]
    module = importlib.import_module(f"{name}.run")
    args = tyro.cli(module.Args, args=arguments)
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw itself needs it
        module.main(args)
    before, printed = Path("out.jsonl").read_text(), capsys.readouterr().out
    assert len(before.splitlines()) == 1 + count
    module.main(args)
    assert Path("out.jsonl").read_text() == before
    assert printed
    if "picture" in options:
        assert Path("picture.png").stat().st_size > 10_000
