"""The probe: its statistics and verdicts, what it refuses, and real runs."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from _harness import make_mesh

import gravac_jax as gravac
from gravac_jax import __main__ as tools
from gravac_jax import _buckets, _info, probe
from gravac_jax.probe import _measure, _results, _steps, _timing
from gravac_jax.probe._results import Range, Results, Row
from gravac_jax.probe._steps import Step

ALL_REDUCES = (_measure.SMALL_ALL_REDUCE, _measure.LARGE_ALL_REDUCE)
BESIDE = (_measure.LAUNCH, *ALL_REDUCES, _measure.NO_EXCHANGE)
MODEL = """
import jax.numpy as jnp
params, batch = {"w": jnp.ones((128, 128))}, jnp.ones((4, 128))
def loss():
    return lambda params, x: jnp.mean((x @ params["w"]) ** 2), params, batch
def infinite():
    return lambda params, x: jnp.inf * params["w"].sum(), params, batch
def two():
    return 1, 2
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The name of a user's module in the working directory."""
    (tmp_path / "model_of_the_user.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    return "model_of_the_user"


def results(dense=0.1, step=0.01, speed_up=(9, 10, 11), headroom=(19, 20, 21)):
    """Return results of a dense step and of one all-gather."""
    same = lambda x: Range(x, x, x)
    rows = [
        Row("dense", 1.0, 4e6, same(dense), same(1.0)),
        Row("dense rung", 1.0, 4e6, same(dense), same(100.0)),
        Row("all-gather", 100.0, 4e4, same(step), Range(*speed_up)),
    ]
    wire = {"latency_seconds": 1e-4, "bytes_per_second": 1e8, "compute_seconds": 0.01}
    headroom = headroom and Range(*headroom)
    return Results("2 cpu", 1, 10**6, "data", 2, 5, wire, headroom, rows)


@pytest.mark.parametrize("n", [5, 6, 17, 50])
def test_the_interval_covers_the_median_nine_times_in_ten(n):
    draws = np.random.default_rng(0).exponential(size=(2000, n))
    ranges = [_measure.median_range(x) for x in draws]
    covered = np.mean([low <= np.log(2) <= high for low, _, high in ranges])
    assert covered > 0.9 - 3 * np.sqrt(0.9 * 0.1 / 2000)
    if n > 5:  # one sample less on each side would be too little
        assert covered < 0.99


def test_what_slows_a_whole_round_does_not_blur_a_speed_up():
    slow = np.random.default_rng(0).uniform(1, 10, size=9)
    seconds = {("dense", 1): 0.2 * slow, ("leader", 10): 0.1 * slow}
    steps = [Step(*key, 1e6, 2, lambda: None) for key in seconds]
    _, row = _measure.compare(seconds, steps)
    assert row.speed_up == pytest.approx((2, 2, 2))
    assert row.step_seconds.low < row.step_seconds.high


def test_latency_bandwidth_and_selection_are_those_of_the_cost_model():
    wire = gravac.WireCost(12.5e6, 2e-4, compute_seconds=0.03, selection_seconds=0.004)
    large = wire.exchange_seconds(4e6 * 2 * 3 / 4, messages=6)  # four replicas
    seconds = [1e-4, 1e-4 + 6 * 2e-4, 1e-4 + large, 0.03]
    times = {x: np.full(5, y) for x, y in zip(BESIDE, seconds, strict=True)}
    sent = {("few-bits", 16.0): (2e5, 6), ("leader", 100.0): (1e5, 12)}
    for key, exchange in sent.items():
        times[key] = np.full(5, 0.03 + 0.004 + wire.exchange_seconds(*exchange))
    steps = [Step(*key, *exchange, lambda: None) for key, exchange in sent.items()]
    found = _measure.network(times, steps, 10**6, 4)
    assert found["bytes_per_second"] == pytest.approx(12.5e6)
    assert found["latency_seconds"] == pytest.approx(2e-4)
    assert found["selection_seconds"] == pytest.approx(0.004)


@pytest.mark.parametrize("name", _steps.EXCHANGES)
def test_messages_are_those_of_the_whole_step(name):
    exchange, ladder = _steps.EXCHANGES[name], (1.0, 16.0)
    model = _steps.stand_in(20_000)
    trainer = _steps.Trainer(make_mesh((4,)), model)
    plan = _buckets.plan(model.params, True, exchange.padded_size)
    shaped = [exchange.shaped(shapes) for shapes in plan.shapes]
    table = _info.tables(plan, shaped, gravac.Fastest(ladder), 4, rides=True)
    messages = [trainer._messages(exchange, factor, 2) for factor in ladder]
    assert messages == table.messages[:2].tolist()


@pytest.mark.parametrize("factors", [(), (16.0, 64.0)])
def test_few_bits_are_timed_at_their_usual_factors_or_those_asked_for(factors):
    trainer = _steps.Trainer(make_mesh((2,)), _steps.stand_in(20_000))
    steps = trainer.compressed("few-bits", factors)
    assert [x.factor for x in steps] == [1, *(factors or (4, 8, 16, 32))]
    sent = [x.wire_bytes for x in steps]
    assert sent == sorted(sent, reverse=True)


def test_noise_gives_no_negative_network():
    seconds = [3e-3, 2e-3, 1e-3, 0.03]  # the smaller program takes longer
    step = Step("leader", 100.0, 1e5, 4, lambda: None)
    times = {x: np.full(5, y) for x, y in zip(BESIDE, seconds, strict=True)}
    times["leader", 100.0] = np.zeros(5)
    wire = gravac.WireCost(**_measure.network(times, [step], 10**6, 2))
    assert (wire.latency_seconds, wire.selection_seconds) == (0, 0)


def test_every_program_is_timed_in_every_round():
    calls = []
    runs = {x: lambda x=x: calls.append(x) for x in "abc"}
    seconds = _timing.in_rounds(runs, meet=lambda: None, budget_seconds=0)
    assert [x.shape for x in seconds.values()] == [(_timing.MIN_ROUNDS,)] * 3
    rounds = "".join(calls[3 * _timing.WARM_UP_CALLS :])
    # Each is timed after a call of its own, and each round starts with another one.
    assert rounds == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc" + "bbccaa"


@pytest.mark.parametrize(
    ("situation", "said"),
    [
        ({}, r"pays here: with all-gather at factor 100, the fastest, a step is 10.00"),
        ({"speed_up": (1.01, 1.1, 1.2)}, "too close to call: with all-gather at"),
        ({"speed_up": (0.5, 0.9, 1.04)}, "will not pay here: with all-gather at"),
        (
            {"headroom": (1.01, 1.02, 1.03)},
            "will not pay here: even without an exchange a step is 1.02",
        ),
        ({"headroom": None}, "if computing a gradient takes less than 1.8 s: with"),
    ],
)
def test_the_verdict_says_whether_compression_pays(situation, said):
    assert re.search(said, _results.verdict(results(**situation)))


def test_a_controller_can_start_from_the_file(tmp_path):
    path = tmp_path / "probe.json"
    _results.write(path, results())
    wire = probe.read(path)
    assert wire == gravac.WireCost(1e8, 1e-4, compute_seconds=0.01)
    gravac.transform(wire=wire)


@pytest.mark.parametrize("text", [None, "", "[]", '{"wire": {"speed": 1}}'])
def test_a_file_that_no_probe_wrote_is_refused(tmp_path, text):
    path = tmp_path / "probe.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"probe\.json holds no measured network"):
        probe.read(path)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "one of the arguments --params --loss is required"),
        ("--params 100", "must be 16384 or more"),
        ("--params 1e6 --mesh a=3", "must have all 8 devices"),
        ("--params 1e6 --json no/probe.json", "there is no directory for this"),
        ("--params 1e6 --headroom", "give --loss"),
        ("--loss no_module:loss", "got no_module:loss .*No module named"),
        ("--loss {}:two", r"must return \(loss_fn, params, batch\), got \(1, 2\)"),
    ],
)
def test_wrong_arguments_are_refused(model, capsys, argv, said):
    with pytest.raises(SystemExit) as refused:
        probe.main(argv.format(model).split())
    assert refused.value.code == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_probe(model):
    argv = f"--loss {model}:infinite --exchanges all-gather --factors 10"
    with pytest.raises(ValueError, match="not finite"):
        probe.main(argv.split())


def test_it_is_one_of_the_tools(capsys):
    with pytest.raises(SystemExit, match="0"):
        tools.main(["probe", "--help"])
    assert capsys.readouterr().out.count("--headroom") >= 2


@pytest.mark.slow
def test_it_times_the_steps_of_a_loss(model, tmp_path, capsys):
    path = tmp_path / "probe.json"
    argv = f"--loss {model}:loss --seconds 0.1 --factors 50 10 --exchanges all-gather"
    probe.main([*argv.split(), "--json", str(path)])
    said, report = capsys.readouterr().out, json.loads(path.read_text())
    assert report["verdict"] in said
    assert "have no network" in said
    ten_times = report["rows"][0]["wire_bytes"] / report["rows"][2]["wire_bytes"]
    assert f" ({ten_times:.3g}x)" in said
    rows = [(x["exchange"], x["factor"]) for x in report["rows"]]
    assert rows[:2] == [("dense", 1), ("dense rung", 1)]
    assert rows[2:] == [("all-gather", 10), ("all-gather", 50)]
    # Four bytes an entry to seven others, beside the evidence.
    *_, ten, fifty = (x["wire_bytes"] for x in report["rows"])
    assert ten - fifty == pytest.approx(7 * 4 * 16384 * (1 / 10 - 1 / 50), rel=0.01)
    assert report["headroom"][0] > 0
    assert probe.read(path).compute_seconds == report["wire"]["compute_seconds"]


@pytest.mark.slow
def test_headroom_times_no_exchange(model, tmp_path):
    path = tmp_path / "probe.json"
    argv = f"--loss {model}:loss --headroom --seconds 0.1 --json {path}"
    probe.main(argv.split())
    report = json.loads(path.read_text())
    assert [x["exchange"] for x in report["rows"]] == ["dense"]
    assert "without an exchange a step is" in report["verdict"]


@pytest.mark.slow
def test_it_times_all_exchanges_on_two_axes(tmp_path):
    path = tmp_path / "probe.json"
    argv = f"--params 2e5 --seconds 0.1 --factors 100 --mesh dcn=2,ici=4 --json {path}"
    probe.main(argv.split())
    report = json.loads(path.read_text())
    assert (report["axis"], report["replicas"]) == ("dcn", 2)
    assert report["params"] == pytest.approx(2e5, rel=0.01)
    assert {x["exchange"] for x in report["rows"]} == {
        *("dense", "dense rung", "few-bits", "all-gather", "leader", "low-rank"),
        "dense-16",
    }
    assert "an exchange is" in report["verdict"]


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_it_times_the_processes_of_one_job(model, tmp_path):
    path = tmp_path / "probe.json"
    argv = "-m gravac_jax.launch -n 2 -m gravac_jax probe --exchanges all-gather"
    argv += f" --loss {model}:loss --seconds 0.5 --json {path}"
    done = subprocess.run(
        [sys.executable, *argv.split()], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["processes"] == 2
    assert done.stdout.count(report["verdict"]) == 1
    assert "no network" not in done.stdout
