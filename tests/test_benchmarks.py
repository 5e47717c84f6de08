"""The benchmarks: what they share, and that each of them runs and goes on."""

import dataclasses
import importlib
import importlib.util
import math
from pathlib import Path

import _task_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import remake
import tyro
from common import journal
from common.network import Network
from common.statistics import reached, target_of, upper_bound
from controllers import fit, progress, run, small, traces
from tasks.cifar import Images

import gravac_jax as gravac
from gravac_jax._controllers.progress import progress as progress_of
from gravac_jax._selection.waiting import (
    ROUNDING_WAITS,
    share_by_chance,
    waiting_steps,
)

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


def test_seconds_are_those_of_the_all_gather_that_is_run():
    args = traces.Args(Path(), Path(), Path())
    seconds = traces.table_of(args, 100_000, traces.CONTROLLERS["Fastest"])(0)
    assert (np.diff(seconds[1:]) < 0).all()


def test_the_network_is_slower_in_the_second_third(tmp_path):
    args = traces.Args(tmp_path, tmp_path, tmp_path, steps=9 * small.EVERY)
    table = traces.table_of(args, 30_000, traces.CONTROLLERS["Fastest"])
    dense = [float(table(i)[0]) for i in range(9)]
    assert dense[:3] == dense[6:]
    assert min(dense[3:6]) > 2 * max(dense[:3])


WORTH = run.Worth(
    progress=np.float32([[1, 1, 1, 0.95, 0.9]] * 3) * np.float32([[1], [0.9], [0.8]]),
    shares=np.tile(np.float32([1, 0.99, 0.95, 0.7, 0.2]), (3, 5, 1)),
    deviations=np.full((3, 5, 5), 0.02, np.float32),
    gains=np.tile(np.float32([1, 0.99, 0.9, 0.6, 0.3]), (3, 5, 1)),
    norms=np.ones(24, np.float32),
    diloco=0.5,
)


def test_patches_are_squares_of_an_image():
    images = Images(_task_files.records(2, (10,)))
    patches, labels = small.patches_of(images)
    square = images[1]["image"][8:12, 20:24].ravel()
    np.testing.assert_array_equal(patches[1, 2, 5], square)
    assert patches.shape == (2, 8, 8, 48)
    assert labels.tolist() == [images[0]["label"], images[1]["label"]]


def test_a_record_of_one_kind_of_runs_says_nothing_of_diloco():
    measured = remake.RECORDS / "2026-11-27_second_model/images.jsonl"
    choices = run.Args(measured, Path(), highest=32).choices
    worth = run.worth_of(progress.runs_of(measured), "adam", choices)
    assert np.isnan(worth.diloco)
    assert worth.progress.shape == (1, 5)


def test_a_product_with_neighbours_is_a_convolution():
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (2, 4, 4, 3))
    kernel = jax.random.normal(keys[1], (3, 3, 3, 5))
    layout = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=layout
    )
    found = small.neighbours(x) @ kernel.reshape(-1, 5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_fixed_choice_in_closed_loop_takes_the_seconds_of_its_steps(monkeypatch):
    args = run.Args(remake.RECORDS / fit.SMALL, Path(), networks=6)
    networks = run.drawn(args)
    fixed = run.best_fixed(WORTH, networks, args)
    for name, controller, choice in (
        ("Accordion", gravac.Fixed(16), (0, 3)),
        ("Fastest, rounds", gravac.Every(4, gravac.Fixed(32)), (1, 4)),
    ):
        rung = run.LADDER.index(controller.ladder[0])
        monkeypatch.setitem(run.CONTROLLERS, name, AtRung(controller, rung))
        line = run.measured(name, WORTH, networks, args)
        expected = fixed[:, *choice] / fixed[:, 0, 0]
        np.testing.assert_allclose(line["over_dense"], expected, rtol=1e-3)
        worth = WORTH.progress[choice]
        np.testing.assert_allclose(line["progress"], worth, rtol=1e-3)


@dataclasses.dataclass(frozen=True)
class AtRung(gravac.Controller):
    """A fixed controller's rounds, at a rung of the whole ladder."""

    controller: gravac.Controller
    rung: int
    ladder: tuple[float, ...] = run.LADDER

    def init(self):
        return jnp.int32(self.rung), ()

    def decide(self, evidence, state):
        return jnp.int32(self.rung), state

    def round_steps(self, step, state):
        return self.controller.round_steps(step, state)


def test_a_law_is_fitted_to_what_it_has_made():
    waits = np.geomspace(0.01, 30, 20)
    for cost in (0.05, 0.2):
        worths = fit.NOW.worth(waits, cost)
        runs = [
            fit.Run("a", "", True, wait, worth, (worth, worth))
            for wait, worth in zip(waits, worths, strict=True)
        ]
        assert fit.fitted(runs, fit.NOW) == pytest.approx(cost)


def test_it_is_the_law_of_the_controller():
    share, steps = np.float32(0.3), 5
    rounded = share_by_chance(waiting_steps(share, steps, counted=ROUNDING_WAITS))
    worth = fit.NOW.worth(fit.NOW.waiting(share, steps))
    assert worth == pytest.approx(float(progress_of(rounded)), rel=1e-5)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    return tmp_path


# The smallest run of a benchmark, and how many lines it leaves.
RUNS = {
    "selection_speed": (
        "--sizes 2e4 --factors 100 --steps 3 --methods lax.top_k Threshold",
        3,
    ),
    "controllers.progress": (
        "--replicas 2 --steps 40 --seeds 1 --rounds 1 --ladder 1 32",
        4,
    ),
    "controllers.traces": ("--steps 60 --picture picture.png", 6),
    "accelerator": (
        "--methods dense --alone allreduced16 --millions 1 --rows 1 --steps 1"
        " --entries 1e4",
        4,
    ),
    "adaptivity": (
        "--methods dense allreduced16 --bandwidths-mbit 1000 20 --steps 2 --turn 1"
        " --picture picture.png",
        8,
    ),
}
# Each optimizer or controller is another program to compile.
FEWER = [
    (progress, "OPTIMIZERS", ["adam"]),
    (traces, "CONTROLLERS", ["GraVAC", "dense"]),
]
NEEDS_NO_DATA = {"selection_speed", "accelerator"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs_and_makes_nothing_twice(name, text, monkeypatch, capsys):
    if name == "adaptivity" and (reason := Network.unavailable()):
        pytest.skip(reason)
    monkeypatch.chdir(text)
    for of, table, names in FEWER:
        monkeypatch.setattr(of, table, {x: getattr(of, table)[x] for x in names})
    options, count = RUNS[name]
    has_torch = name == "selection_speed" and importlib.util.find_spec("torch")
    arguments = [*options.split(), *["torch.topk"] * bool(has_torch)]
    arguments += ["--out", "out.jsonl"]
    if name not in NEEDS_NO_DATA:
        arguments += ["--data-dir", str(text)]
    module = importlib.import_module(name if "." in name else f"{name}.run")
    args = tyro.cli(module.Args, args=arguments)
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw itself needs it
        module.main(args)
    before, printed = Path("out.jsonl").read_text(), capsys.readouterr().out
    assert len(before.splitlines()) == 1 + count + bool(has_torch)
    module.main(args)
    assert Path("out.jsonl").read_text() == before
    assert printed
    if "picture" in options:
        assert Path("picture.png").stat().st_size > 10_000
