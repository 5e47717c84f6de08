"""Times to a quality: what is made of steps and seconds, and that runs go on."""

import numpy as np
import pytest
from common import journal
from end_to_end import report
from end_to_end import run as end_to_end
from step_seconds.timed import Timed

COMPUTE = 0.02
HALF, TEN, HUNDRED = 'Dense("bfloat16")', "TopK(10)", "TopK(100)"
# A dense exchange takes 0.2 s at 100 Mbit/s, and a tenth of it at 1000.
STATIC = {"dense": 0.2, HALF: 0.1, TEN: 0.1, HUNDRED: 0.01}
ADAPTIVE = "Fastest((Dense(), TopK(10), TopK(100)))"
TAKEN = {TEN: 6, HUNDRED: 4}  # its steps that are timed


def line(mbit, name, seconds, **others):
    compute = [0.0, COMPUTE, 1.0]
    return {
        **{"hosts": 2, "bandwidth_mbit": mbit, "method": name, "steps": 10},
        **{"mean_step_seconds": seconds, "step_seconds": [0.0, seconds, 1.0]},
        **{"compute_seconds": compute, "slowest_compute_seconds": compute},
        **{"wire_bytes": 1e6, **others},
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
    rungs = (100.0, "Dense()"), (100.0, TEN), (100.0, HUNDRED), (1000.0, TEN)
    seconds = [timed.step(link, ADAPTIVE, rung) for link, rung in rungs]
    assert seconds == pytest.approx([0.22, 0.12, 0.03, 0.03])
    for name, rung, missing in (
        ("adamw Fastest()", "Bits(8)", r"Bits\(8\)"),
        ("adamw Bits(2)", "Bits(2)", r"adamw Bits\(2\)"),
    ):
        with pytest.raises(SystemExit, match=f"no steps of {missing} are timed"):
            timed.step(100.0, name, rung)


def test_a_rung_has_the_seconds_of_its_own_recipe_if_these_are_timed():
    names = {"dense": 0.22, "Bits(1)": 0.05, "adamw Bits(1)": 0.06, "own Bits(1)": 0.07}
    timed = Timed([line(100.0, *x) for x in names.items()], 2)
    step = lambda name: timed.step(100.0, name, "Bits(1)")
    assert step("adamw Fastest()") == 0.06
    assert step("Fastest()") == step("muon Fastest()") == 0.05
    scheduled = "Scheduled((Dense(), Bits(1)), starts=(200,))"
    taken = timed.steps(100.0, scheduled, {"Dense()": 200, "Bits(1)": 300})
    assert taken == pytest.approx(200 * 0.22 + 300 * 0.05)


def run(name, steps, seed=0, mbit=None, rung=None):
    """A run that reaches its target of 1 after so many steps, between evaluations."""
    return {
        **({} if mbit is None else {"bandwidth_mbit": mbit}),
        **{"seed": seed, "method": name, "target": 1.0, "losses": [1.5, 0.5]},
        "taken": [{rung or name: steps - 10}, {rung or name: steps + 10}],
        "wire_bytes": [1e6 * (steps - 10), 1e6 * (steps + 10)],
    }


SEEDS = 0, 1
RUNS = [
    *(run(name, 100, seed) for name in ("dense", HALF) for seed in SEEDS),
    *(run(TEN, 110 + 20 * seed, seed) for seed in SEEDS),
    *(run(ADAPTIVE, 100, seed, 100.0, TEN) for seed in SEEDS),
    *(run(ADAPTIVE, 100, seed, 1000.0, "Dense()") for seed in SEEDS),
]
FLOAT16 = [line(mbit, "dense float16", 0.13) for mbit in (100.0, 1000.0)]
TIMED = Timed([*record(), *FLOAT16], 2)


def test_an_outcome_has_steps_seconds_and_bytes_of_every_seed():
    for name, mbit, steps, step_seconds, wire_bytes in (
        (TEN, 100.0, [110, 130], 0.12, 1e6),
        (ADAPTIVE, 100.0, [100, 100], 0.123, 1e6),  # with 3 ms of its own
        (ADAPTIVE, 1000.0, [100, 100], 0.043, 1e6),
        ("dense float16", 100.0, [100, 100], 0.13, 0.5e6),  # with the losses of dense
    ):
        found = report.outcomes(report.with_float16(RUNS), TIMED, mbit)[name]
        assert found.step_seconds == pytest.approx(step_seconds)
        assert found.steps == pytest.approx(steps)
        assert found.seconds == pytest.approx([x * step_seconds for x in steps])
        assert found.wire_bytes == pytest.approx([x * wire_bytes for x in steps])


def test_a_target_that_was_never_reached_is_no_number():
    runs = [*RUNS[:4], run(TEN, 50) | {"losses": [2.0, 1.5]}]
    assert np.isinf(report.outcomes(runs, TIMED, 100.0)[TEN].seconds).all()
    (row,) = (x for x in report.rows(TIMED, runs, 100.0) if x[0] == TEN)
    assert set(row[1:5]) | set(row[6:]) == {"-"}


def test_seeds_are_paired_by_their_numbers():
    runs = [run("dense", 100, 0), run("dense", 200, 1), run(TEN, 100, 1)]
    found = report.outcomes(runs, TIMED, 100.0)
    both = report.speed_ups(found[TEN], found["dense"])
    assert both == pytest.approx([200 * 0.22 / (100 * 0.12)])


def test_a_share_is_of_the_limit_of_the_better_baseline():
    limits = [report.limit(TIMED, 100.0, x) for x in ("dense", HALF)]
    assert limits == pytest.approx([11, 6])
    head, *rows = report.rows(TIMED, RUNS, 100.0)
    table = {x[0]: dict(zip(head, x, strict=True)) for x in rows}
    assert head[-2] == "of 6.00"  # 16 bits are there sooner
    assert table["dense"][f"x {HALF}"] == "0.55"
    assert table[HALF]["of 6.00"] == "17%"
    # 0.12 over 0.123 of the baseline's time.
    assert table[ADAPTIVE]["of 6.00"] == "16%"
    assert table[ADAPTIVE][f"x {TEN}"] == f"{(110 + 130) / 2 * 0.12 / 12.3:.2f}"


@pytest.mark.slow
def test_runs_are_made_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(end_to_end, "EVERY", 4)
    (tmp_path / "input.txt").write_bytes(bytes(range(32, 127)) * 2000)
    timed = journal.Journal(tmp_path / "steps.jsonl", {})
    timed.append(*record())
    asked = {"methods": ("dense", ADAPTIVE, TEN), "seeds": 1, "steps": 8}
    where = tmp_path, timed.path, tmp_path / "out.jsonl"
    args = end_to_end.Args(*where, task="lstm-bytes", hosts=2, **asked)
    end_to_end.main(args)
    _, lines = journal.read(args.out)
    assert [x["method"] for x in lines] == ["dense", ADAPTIVE, ADAPTIVE, TEN]
    for x in lines:
        steps = [sum(y.values()) for y in x["taken"]]
        assert steps == [4 * (n + 1) for n in range(len(x["losses"]))]
        assert x["wire_bytes"] == sorted(x["wire_bytes"])
    before = args.out.read_text()
    end_to_end.main(args)
    assert args.out.read_text() == before
    assert f"| {TEN} |" in capsys.readouterr().out
