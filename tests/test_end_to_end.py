"""Times to a quality: what is made of steps and seconds, and that runs go on."""

import importlib

import jax
import numpy as np
import pytest
from _task_files import write_all
from common import journal
from common.training import size
from end_to_end import report
from end_to_end import run as end_to_end
from pytorch import run as pytorch
from step_seconds.timed import Timed
from step_seconds.worker import Link
from tasks import load

COMPUTE = 0.02
HALF, TEN, HUNDRED = 'Dense("bfloat16")', "TopK(10)", "TopK(100)"
# A dense exchange takes 0.2 s at 100 Mbit/s, and a tenth of it at 1000.
STATIC = {"dense": 0.2, HALF: 0.1, TEN: 0.1, HUNDRED: 0.01}
ADAPTIVE = "Fastest((Dense(), TopK(10), TopK(100)))"
TAKEN = {TEN: 6, HUNDRED: 4}  # its steps that are timed


def line(mbit, name, seconds, **others):
    return {
        "hosts": 2,
        "bandwidth_mbit": mbit,
        "method": name,
        "mean_step_seconds": seconds,
        "step_seconds": [0.0, seconds, 1.0],
        "compute_seconds": [0.0, COMPUTE, 1.0],
        "slowest_compute_seconds": [0.0, COMPUTE, 1.0],
        "wire_bytes": 1e6,
        "steps": 10,
        **others,
    }


def record(own_seconds=0.003):
    """Lines as `step_seconds` writes them, of two bandwidths."""
    lines = []
    for mbit, slower in ((100.0, 1.0), (1000.0, 0.1)):
        static = {x: COMPUTE + slower * y for x, y in STATIC.items()}
        lines += [line(mbit, *x) for x in static.items()]
        mean = 0.6 * static[TEN] + 0.4 * static[HUNDRED] + own_seconds
        lines.append(line(mbit, ADAPTIVE, mean, taken=TAKEN))
    return lines


def test_a_rung_has_the_seconds_of_steps_that_always_send_the_same():
    timed = Timed([*record(), line(None, "dense", 0.1)], 2)
    assert timed.links == [None, 1000.0, 100.0], "from fast to slow"
    for rung, seconds in (("Dense()", 0.22), (TEN, 0.12), (HUNDRED, 0.03)):
        assert timed.step(100.0, ADAPTIVE, rung) == pytest.approx(seconds)
    assert timed.step(1000.0, ADAPTIVE, TEN) == pytest.approx(0.03)
    assert timed.step(100.0, HALF, HALF) == pytest.approx(0.12)
    with pytest.raises(SystemExit, match=r"no steps of Bits\(8\) are timed"):
        timed.step(100.0, "adamw Fastest()", "Bits(8)")
    with pytest.raises(SystemExit, match=r"no steps of adamw Bits\(2\) are timed"):
        timed.step(100.0, "adamw Bits(2)", "Bits(2)")


def test_a_rung_has_the_seconds_of_its_own_recipe_if_these_are_timed():
    names = {"dense": 0.22, "Bits(1)": 0.05, "adamw Bits(1)": 0.06, "own Bits(1)": 0.07}
    timed = Timed([line(100.0, *x) for x in names.items()], 2)
    step = lambda name: timed.step(100.0, name, "Bits(1)")
    assert step("adamw Fastest()") == 0.06
    assert step("Fastest()") == step("muon Fastest()") == 0.05
    one_bit = "1-bit adam Scheduled((Dense(), Bits(1)), starts=(200,))"
    taken = timed.steps(100.0, one_bit, {"Dense()": 200, "Bits(1)": 300})
    assert taken == pytest.approx(200 * 0.22 + 300 * 0.05)


@pytest.mark.parametrize("own_seconds", [0.0, 0.003, -0.001])
def test_a_controller_costs_what_its_steps_take_beside_static_ones(own_seconds):
    timed = Timed(record(own_seconds), 2)
    for link in timed.links:
        assert timed.own_seconds(link, ADAPTIVE) == pytest.approx(own_seconds)
        assert timed.own_seconds(link, TEN) == 0
        assert timed.own_seconds(link, "GraVAC()") == 0


def run(name, steps, seed=0, mbit=None, rung=None):
    """A run that reaches its target of 1 after so many steps, between evaluations."""
    return {
        **({} if mbit is None else {"bandwidth_mbit": mbit}),
        **{"seed": seed, "method": name, "target": 1.0, "losses": [1.5, 0.5]},
        "taken": [{rung or name: steps - 10}, {rung or name: steps + 10}],
        "wire_bytes": [1e6 * (steps - 10), 1e6 * (steps + 10)],
    }


RUNS = [
    *(run("dense", 100, seed) for seed in (0, 1)),
    *(run(HALF, 100, seed) for seed in (0, 1)),
    *(run(TEN, 110 + 20 * seed, seed) for seed in (0, 1)),
    *(run(ADAPTIVE, 100, seed, 100.0, TEN) for seed in (0, 1)),
    *(run(ADAPTIVE, 100, seed, 1000.0, "Dense()") for seed in (0, 1)),
]


def test_an_outcome_has_steps_seconds_and_bytes_of_every_seed():
    found = report.outcomes(RUNS, Timed(record(), 2), 100.0)
    assert found[TEN].steps == pytest.approx([110, 130])
    assert found[TEN].seconds == pytest.approx([110 * 0.12, 130 * 0.12])
    assert found[TEN].wire_bytes == pytest.approx([110e6, 130e6])
    # With 3 ms of its own.
    assert found[ADAPTIVE].seconds == pytest.approx([100 * 0.123] * 2)
    assert found[ADAPTIVE].step_seconds == pytest.approx(0.123)
    fast = report.outcomes(RUNS, Timed(record(), 2), 1000.0)
    assert fast[ADAPTIVE].seconds == pytest.approx([100 * 0.043] * 2)


def test_float16_means_stand_in_with_the_losses_of_dense_steps():
    lines = [*record(), line(100.0, "dense float16", 0.13)]
    found = report.outcomes(report.with_float16(RUNS), Timed(lines, 2), 100.0)
    assert found["dense float16"].steps == found["dense"].steps
    assert found["dense float16"].seconds == pytest.approx([100 * 0.13] * 2)
    assert found["dense float16"].wire_bytes == pytest.approx([50e6] * 2)


def test_a_target_that_was_never_reached_is_no_number():
    never = run(TEN, 50) | {"losses": [2.0, 1.5]}
    found = report.outcomes([*RUNS[:4], never], Timed(record(), 2), 100.0)
    assert np.isinf(found[TEN].seconds).all()
    rows = report.rows(Timed(record(), 2), [*RUNS[:4], never], 100.0)
    (row,) = (x for x in rows if x[0] == TEN)
    assert set(row[1:5]) | set(row[6:]) == {"-"}


def test_seeds_are_paired_by_their_numbers():
    timed, runs = Timed(record(), 2), [run("dense", 100, 0), run("dense", 200, 1)]
    found = report.outcomes([*runs, run(TEN, 100, 1)], timed, 100.0)
    both = report.speed_ups(found[TEN], found["dense"])
    assert both == pytest.approx([200 * 0.22 / (100 * 0.12)])


def test_a_share_is_of_the_limit_of_the_better_baseline():
    timed = Timed(record(), 2)
    assert report.limit(timed, 100.0, "dense") == pytest.approx(11)
    assert report.limit(timed, 100.0, HALF) == pytest.approx(6)
    head, *rows = report.rows(timed, RUNS, 100.0)
    table = {x[0]: dict(zip(head, x, strict=True)) for x in rows}
    assert head[-2] == "of 6.00"  # 16 bits are there sooner
    assert table["dense"][f"x {HALF}"] == "0.55"
    assert table[HALF]["of 6.00"] == "17%"
    # 0.12 over 0.123 of the baseline's time.
    assert table[ADAPTIVE]["of 6.00"] == "16%"
    assert table[ADAPTIVE][f"x {TEN}"] == f"{(110 + 130) / 2 * 0.12 / 12.3:.2f}"


# LSTMs of PyTorch add two biases in each of two layers of four gates, 128 wide.
SECOND_BIASES = 2 * 4 * 128


@pytest.mark.slow
def test_models_in_pytorch_have_the_params_of_the_tasks(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    models = importlib.import_module("pytorch.models")
    data_dir = write_all(tmp_path)
    for name, build in models.BUILDERS.items():
        if name == "lstm-ptb":  # its vocabulary comes from the data
            continue
        ours = jax.eval_shape(load(name, data_dir).init, jax.random.key(0))
        more = SECOND_BIASES if name == "lstm-bytes" else 0
        count = sum(x.numel() for x in build().parameters())
        assert count == size(ours) + more, name
    with pytest.raises(SystemExit, match="no model of vit-cifar10"):
        models.build("vit-cifar10")


@pytest.mark.slow
def test_runs_are_made_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(end_to_end, "EVERY", 4)
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    timed = journal.Journal(tmp_path / "steps.jsonl", {})
    timed.append(*record())
    args = end_to_end.Args(
        tmp_path,
        timed.path,
        tmp_path / "out.jsonl",
        task="lstm-bytes",
        hosts=2,
        methods=("dense", ADAPTIVE, TEN),
        seeds=1,
        steps=2 * end_to_end.EVERY,
    )
    end_to_end.main(args)
    _, lines = journal.read(args.out)
    names = [x["method"] for x in lines]
    assert names == ["dense", ADAPTIVE, ADAPTIVE, TEN]
    for x in lines:
        evaluations = range(1, len(x["losses"]) + 1)
        assert [sum(y.values()) for y in x["taken"]] == [
            end_to_end.EVERY * n for n in evaluations
        ]
        assert x["wire_bytes"] == sorted(x["wire_bytes"])
    before = args.out.read_text()
    end_to_end.main(args)
    assert args.out.read_text() == before
    assert f"| {TEN} |" in capsys.readouterr().out


def test_pytorch_is_timed_on_the_networks_of_the_record():
    lines = [*record(), line(70.0, "dense", 0.1, hosts=4, ratio=0.1)]
    assert pytorch.networks(lines) == {
        2: {Link(100.0): 100.0, Link(1000.0): 1000.0},
        4: {Link(ratio=0.1): 70.0},
    }
