"""The benchmarks: what they share, and that each of them runs and goes on."""

import csv
import math
import re
import shlex

import draw
import jax
import matplotlib
import pytest
import tyro
from accelerator import run as accelerator
from common import journal
from common.statistics import reached, target_of, upper_bound
from training.sends import parse

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

RESULTS = draw.DOCS / "results.csv"
CONFIGURATION = {"steps": 10, "methods": ("a", "b")}


@pytest.fixture
def book(tmp_path):
    """A record of two lines."""
    found = journal.Journal(tmp_path / "record.jsonl", CONFIGURATION)
    found.append({"seed": 0, "loss": 2.0}, {"seed": 1, "loss": 1.0})
    return found


def test_a_line_is_made_once(book):
    assert book.once(lambda: {"loss": 3.0}, seed=2) == {"seed": 2, "loss": 3.0}
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


def test_a_target_is_reached_between_two_evaluations():
    losses, at = [3.0, 2.0, 2.5, 1.0], [20.0, 40.0, 60.0, 80.0]
    wanted = {2.25: 35, 2.0: 40, 1.0: 80, 3.5: 20, 0.5: None}
    assert {x: reached(losses, at, x) for x in wanted} == wanted
    assert target_of([5.0, 4.0, 3.0, 2.0, 1.0]) == 2


@pytest.mark.slow
def test_the_devices_are_timed_once(tmp_path, capsys):
    smallest = (
        '--methods dense --alone "Bits(2)" lax.top_k --millions 1 --rows 1 --steps 1'
        f" --entries 1e4 --out {tmp_path / 'out.jsonl'}"
    )
    args = tyro.cli(accelerator.Args, args=shlex.split(smallest))
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw itself needs it
        accelerator.main(args)
    before, printed = args.out.read_text(), capsys.readouterr().out
    assert len(before.splitlines()) == 1 + 4
    accelerator.main(args)
    assert args.out.read_text() == before
    assert capsys.readouterr().out == printed


def test_the_figures_of_the_results_are_drawn_from_them(tmp_path, monkeypatch):
    page = RESULTS.with_suffix(".md").read_text()
    shown = set(re.findall(r"\(figures/(.*?)\)", page))
    known = {x: (draw.DOCS / "figures" / x).read_text() for x in shown}
    monkeypatch.setattr(draw, "DOCS", tmp_path)
    (tmp_path / "results.csv").write_bytes(RESULTS.read_bytes())
    draw.main()
    drawn = {x.name: x.read_text() for x in (tmp_path / "figures").iterdir()}
    assert set(drawn) == shown
    assert min(map(len, drawn.values())) > 20_000
    version = f"Matplotlib v{matplotlib.__version__}"  # others draw other lines
    assert all(x == known[name] for name, x in drawn.items() if version in known[name])


def test_a_speed_up_is_a_mean_over_paired_seeds():
    rows = ("dense", "0", "10"), ("dense", "1", "12"), ("a", "0", "5"), ("a", "1", "3")
    names = "method", "seed", "seconds"
    found = [{**dict(zip(names, x, strict=True)), "r": "3"} for x in rows]
    assert draw.speed_ups(found, "a") == ([3.0], [3.0])


def test_results_name_encodings_that_exist():
    with RESULTS.open(newline="") as file:
        found = {x["method"] for x in csv.DictReader(file)}
    sends = {y for x in found for y in re.findall(r"(?:Bits|TopK|Dense)\([^()]*\)", x)}
    assert sends == {repr(parse(x)) for x in sends}
    assert len(sends) > 20
