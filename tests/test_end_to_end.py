"""Times to a quality: what is made of steps and seconds, and that runs go on."""

import dataclasses
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
from pytorch import train
from step_seconds.timed import Timed, ladder_of
from step_seconds.worker import Link
from tasks import load

COMPUTE = 0.02
# A dense exchange takes 0.2 s at 100 Mbit/s, and a tenth of it at 1000.
STATIC = {"dense": 0.2, "dense16": 0.1, "fixed10": 0.1, "fixed100": 0.01}
TAKEN = [0, 6, 0, 0, 0, 0, 4, 0, 0]  # of the default: six at factor 10, four at 320


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
        at_320 = static["fixed100"]  # beyond what was measured
        mean = 0.6 * static["fixed10"] + 0.4 * at_320 + own_seconds
        lines.append(line(mbit, "sparse", mean, taken=TAKEN))
    return lines


def test_seconds_between_measured_factors_follow_the_bytes():
    timed = Timed(record(), 2)
    for factor, seconds in ((1, 0.22), (10, 0.12), (100, 0.03), (1000, 0.03)):
        assert timed.step(100.0, "sparse", factor) == pytest.approx(seconds)
    # 20 ms, and one over the factor of a second.
    assert timed.step(100.0, "sparse", 40) == pytest.approx(0.02 + 1 / 40)
    assert timed.step(1000.0, "sparse", 10) == pytest.approx(0.03)
    assert timed.step(100.0, "dgc100", 4) == pytest.approx(0.02 + 1 / 4)


def test_a_method_that_was_timed_has_its_own_seconds():
    lines = [*record(), line(100.0, "lowrank10", 0.07), line(None, "dense", 0.1)]
    timed = Timed(lines, 2)
    assert timed.links == [None, 1000.0, 100.0], "from fast to slow"
    assert timed.step(100.0, "lowrank10", 10) == 0.07
    assert timed.step(1000.0, "lowrank10", 10) == pytest.approx(0.03)
    assert timed.step(100.0, "dense16", 1) == pytest.approx(0.12)


def test_a_ladder_of_turns_has_the_seconds_of_two_bits_in_turn():
    seconds = {"dense": 0.22, "localallreducedadam16": 0.06, "fixed10": 0.5}
    seconds |= {"turns4allreducedadam16": 0.03, "localallreducedadam32": 0.01}
    seconds |= {"turns4allreducedadam32": 0.01, "turns8allreducedsgd16": 0.01}
    timed = Timed([line(100.0, *x) for x in seconds.items()], 2)
    step = lambda factor: timed.step(100.0, "localdefaultadam", factor)
    found = [step(factor) for factor in (1, 16, 32, 64, 256)]
    # Half of the bytes are a third of the way from a quarter of them to all.
    assert found == pytest.approx([0.22, 0.06, 0.04, 0.03, 0.03])


def test_rungs_of_one_bit_have_the_seconds_of_one_bit():
    seconds = {"dense": 0.22, "localallreduced16": 0.06, "turns4allreduced16": 0.01}
    seconds |= {"localallreduced32": 0.04, "turns4allreduced32": 0.025}
    timed = Timed([line(100.0, *x) for x in seconds.items()], 2)
    step = lambda factor: timed.step(100.0, "localdefaultgradients", factor)
    found = [step(factor) for factor in (1, 16, 32, 64, 128, 256)]
    assert found == pytest.approx([0.22, 0.06, 0.04, 0.03, 0.025, 0.025])


@pytest.mark.parametrize("own_seconds", [0.0, 0.003, -0.001])
def test_a_controller_costs_what_its_steps_take_beside_static_ones(own_seconds):
    timed = Timed(record(own_seconds), 2)
    for link in timed.links:
        assert timed.own_seconds(link, "sparse") == pytest.approx(own_seconds)
        assert timed.own_seconds(link, "fixed10") == 0
        assert timed.own_seconds(link, "gravac") == 0


def run(name, steps, seed=0, mbit=None, rung=0, rungs=1):
    """A run that reaches its target of 1 after so many steps, between evaluations."""
    counts = lambda n: np.eye(rungs, dtype=int)[rung] * n
    key = {"seed": seed, "method": name, "target": 1.0}
    return {
        **({} if mbit is None else {"bandwidth_mbit": mbit}),
        **key,
        "losses": [1.5, 0.5],
        "taken": [counts(steps - 10).tolist(), counts(steps + 10).tolist()],
        "wire_bytes": [1e6 * (steps - 10), 1e6 * (steps + 10)],
    }


RUNS = [
    *(run("dense", 100, seed) for seed in (0, 1)),
    *(run("dense16", 100, seed) for seed in (0, 1)),
    *(run("fixed10", 110 + 20 * seed, seed) for seed in (0, 1)),
    *(run("sparse", 100, seed, 100.0, 1, 9) for seed in (0, 1)),
    *(run("sparse", 100, seed, 1000.0, 0, 9) for seed in (0, 1)),
]


def test_an_outcome_has_steps_seconds_and_bytes_of_every_seed():
    found = report.outcomes(RUNS, Timed(record(), 2), 100.0)
    assert found["fixed10"].steps == pytest.approx([110, 130])
    assert found["fixed10"].seconds == pytest.approx([110 * 0.12, 130 * 0.12])
    assert found["fixed10"].wire_bytes == pytest.approx([110e6, 130e6])
    # At factor 10, and 3 ms of its own.
    assert found["sparse"].seconds == pytest.approx([100 * 0.123] * 2)
    assert found["sparse"].step_seconds == pytest.approx(0.123)
    fast = report.outcomes(RUNS, Timed(record(), 2), 1000.0)
    assert fast["sparse"].seconds == pytest.approx([100 * 0.043] * 2)


def test_float16_means_stand_in_with_the_losses_of_dense_steps():
    lines = [*record(), line(100.0, "densehalf", 0.13)]
    found = report.outcomes(report.with_float16(RUNS), Timed(lines, 2), 100.0)
    assert found["densehalf"].steps == found["dense"].steps
    assert found["densehalf"].seconds == pytest.approx([100 * 0.13] * 2)
    assert found["densehalf"].wire_bytes == pytest.approx([50e6] * 2)


def test_a_target_that_was_never_reached_is_no_number():
    never = run("fixed10", 50) | {"losses": [2.0, 1.5]}
    found = report.outcomes([*RUNS[:4], never], Timed(record(), 2), 100.0)
    assert np.isinf(found["fixed10"].seconds).all()
    rows = report.rows(Timed(record(), 2), [*RUNS[:4], never], 100.0)
    (row,) = (x for x in rows if x[0] == "fixed10")
    assert set(row[1:5]) | set(row[6:]) == {"-"}


def test_seeds_are_paired_by_their_numbers():
    timed, runs = Timed(record(), 2), [run("dense", 100, 0), run("dense", 200, 1)]
    found = report.outcomes([*runs, run("fixed10", 100, 1)], timed, 100.0)
    both = report.speed_ups(found["fixed10"], found["dense"])
    assert both == pytest.approx([200 * 0.22 / (100 * 0.12)])


def test_a_real_run_stands_beside_what_was_computed():
    real = {"method": "fixed10", "bandwidth_mbit": 100.0, "seconds": 6.0}
    live = [{**real, "step": 50 * i, "held_out_loss": 2 - i / 2} for i in (1, 3)]
    table = report.validation(Timed(record(), 2), RUNS, live)
    # 110 steps of 0.12 s; the target of 1 lies in the middle of the second turn.
    beside = ["110, 100", "13.2, 9.0", "120.0, 80.0", "0.68, 0.67"]
    assert table[1] == ["100", "fixed10", *beside]


def test_a_real_run_that_missed_the_target_is_no_number():
    real = {"method": "fixed10", "bandwidth_mbit": 100.0, "seconds": 6.0, "step": 40}
    table = report.validation(Timed(record(), 2), RUNS, [real | {"held_out_loss": 2}])
    assert table[1][2:] == ["110, -", "13.2, -", "120.0, 150.0", "-, 1.25"]


def test_a_share_is_of_the_limit_of_the_better_baseline():
    timed = Timed(record(), 2)
    assert report.limit(timed, 100.0, "dense") == pytest.approx(11)
    assert report.limit(timed, 100.0, "dense16") == pytest.approx(6)
    head, *rows = report.rows(timed, RUNS, 100.0)
    table = {x[0]: dict(zip(head, x, strict=True)) for x in rows}
    assert head[-2] == "of 6.00"  # dense16 is there sooner
    assert table["dense"]["x dense16"] == "0.55"
    assert table["dense16"]["of 6.00"] == "17%"
    # 0.12 over 0.123 of the baseline's time.
    assert table["sparse"]["of 6.00"] == "16%"
    assert table["sparse"]["x fixed10"] == f"{(110 + 130) / 2 * 0.12 / 12.3:.2f}"


def test_a_floor_is_computation_and_bytes_at_the_rate():
    table = {x[0]: x for x in report.floors(Timed(record(), 2), 100.0)}
    assert table["fixed10"][1:] == ["120.0", "20.0", "80.0", "83%"]


def test_what_is_beyond_computation_stands_beside_that_of_others():
    ddp = [line(100.0, "topk10", 0.15), line(100.0, "topk10", 0.15, hosts=4)]
    table = {x[0]: x[1:] for x in report.beyond(Timed(record(), 2), ddp, 2)}
    assert table["Mbit/s"] == ["1000", "100"]
    assert table["PyTorch: topk10"] == ["-", "130"]
    assert table["ours: fixed10"] == ["10", "100"]


def test_rounds_take_an_exchange_in_their_last_step():
    seconds = {"dense": 0.22, "localallreducedadam16": 0.06}
    timed = Timed([line(100.0, *x) for x in seconds.items()], 2)
    # 20 ms of computation, and a tenth of what the exchange of each takes beyond it.
    assert timed.step(100.0, "diloco10", 1) == pytest.approx(0.02 + 0.2 / 10)
    assert timed.step(100.0, "diloco10momentum0.5", 1) == pytest.approx(0.02 + 0.2 / 10)
    every = timed.step(100.0, "every10allreducedadam16", 16)
    assert every == pytest.approx(0.02 + 0.04 / 10)


def test_steps_of_1_bit_adam_are_dense_ones_and_then_those_of_one_bit():
    seconds = {"dense": 0.22, "localallreducedadam32": 0.06}
    timed = Timed([line(100.0, *x) for x in seconds.items()], 2)
    assert ladder_of("onebitadam200") == (1, 32)
    taken = timed.steps(100.0, "onebitadam200", (200, 300))
    assert taken == pytest.approx(200 * 0.22 + 300 * 0.06)


def test_pytorch_is_compared_with_its_own_dense_steps():
    ddp = {"dense": 0.4, "fp16": 0.2, "powersgd1": 0.1}
    torch = [line(mbit, *x) for mbit in (100.0, 1000.0) for x in ddp.items()]
    steps = {"dense": (50, 100), "fp16": (50, 100), "powersgd1": (100, 100)}
    runs = [
        {
            "method": name,
            "seed": seed,
            "target": 1.0,
            "losses": [2.0, 1.0],
            "steps": [25, taken],
        }
        for name, each in steps.items()
        for seed, taken in enumerate(each)
    ]
    never = {"method": "topk100", "seed": 0, "target": 1.0, "losses": [2.0]}
    torch.append(line(100.0, "topk100", 0.1))
    runs.append(never | {"steps": [25]})
    head, *rows = report.of_pytorch(Timed(record(), 2), torch, runs, 2)
    assert head[1:] == ["steps, each seed", "1000", "100"]
    table = {x[0]: x[1:] for x in rows}
    assert table["fp16"] == ["50, 100", "2.00", "2.00"]
    # Four times as fast a step, and twice as many steps for the first seed.
    assert table["powersgd1"] == ["100, 100", "3.00", "3.00"]
    assert table["topk100"] == ["-", "-", "-"]


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
def test_pytorch_is_trained_once_to_the_loss_of_its_dense_steps(tmp_path, capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    args = train.Args(
        tmp_path,
        tmp_path / "out.jsonl",
        task="transformer-bytes",
        methods=("dense", "fp16", "powersgd1", "topk100", "postlocal4"),
        seeds=1,
        steps=2 * end_to_end.EVERY,
        longest=1.0,
        multiple=0.01,
        optimizer="adam",
    )
    train.main(args)
    _, lines = journal.read(args.out)
    assert [x["method"] for x in lines] == list(args.methods)
    dense = lines[0]
    assert dense["losses"][1] < dense["losses"][0]
    for x in lines:
        assert x["target"] == dense["losses"][0]
        assert x["steps"] == [
            end_to_end.EVERY * (i + 1) for i in range(len(x["losses"]))
        ]
        assert x["losses"][-1] < dense["losses"][0] + 1
    before = args.out.read_text()
    train.main(args)
    assert args.out.read_text() == before
    assert "powersgd1" in capsys.readouterr().out


@pytest.mark.slow
def test_runs_are_made_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(end_to_end, "EVERY", 4)
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    timed = journal.Journal(tmp_path / "steps.jsonl", {})
    in_bits = [line(mbit, "allreduced16", 0.03) for mbit in (100.0, 1000.0)]
    timed.append(*record(), *in_bits)
    args = end_to_end.Args(
        tmp_path,
        timed.path,
        tmp_path / "out.jsonl",
        task="lstm-bytes",
        hosts=2,
        methods=("dense", "default", "accordion"),
        seeds=1,
        steps=2 * end_to_end.EVERY,
    )
    end_to_end.main(args)
    _, lines = journal.read(args.out)
    names = [x["method"] for x in lines]
    assert names == ["dense", "default", "default", "accordion"]
    for x in lines:
        evaluations = range(1, len(x["losses"]) + 1)
        assert [sum(y) for y in x["taken"]] == [
            end_to_end.EVERY * n for n in evaluations
        ]
        assert x["wire_bytes"] == sorted(x["wire_bytes"])
    before = args.out.read_text()
    end_to_end.main(args)
    assert args.out.read_text() == before
    assert "| accordion |" in capsys.readouterr().out
    own = {"methods": ("dense", "accordion"), "out": tmp_path / "faster.jsonl"}
    end_to_end.main(dataclasses.replace(args, others=4.0, **own))
    _, (dense, other) = journal.read(own["out"])
    assert dense == lines[0]
    assert other["losses"] != lines[-1]["losses"]


def test_pytorch_is_timed_on_the_networks_of_the_record():
    lines = [*record(), line(70.0, "dense", 0.1, hosts=4, ratio=0.1)]
    assert pytorch.networks(lines) == {
        2: {Link(100.0): 100.0, Link(1000.0): 1000.0},
        4: {Link(ratio=0.1): 70.0},
    }
