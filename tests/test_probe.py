"""The probe: what it makes of times, what it refuses, and that it runs."""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import gravac_jax as gravac
from gravac_jax import probe
from gravac_jax._probe import findings, screen, verdict
from gravac_jax._probe.verdict import DENSE, GATHER, REDUCE, Call, Measured, Way
from gravac_jax._probe.ways import Plan

ALPHA, BETA = 2e-4, 12.5e6  # 100 Mbit/s
ROUNDS = 20
NOISE = 0.02
DENSE_CALL = Call(REDUCE, "data", 4e6, 2)
MODEL = """
import jax.numpy as jnp

def loss():
    fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
    return fn, {"w": jnp.ones((128, 128))}, jnp.ones((4, 128))

def two():
    return 1, 2

def small():
    return (lambda params, x: params.sum()), jnp.ones(3), jnp.ones(3)

def vector():
    return (lambda params, x: x), jnp.ones(3), jnp.ones(3)

def integers():
    return (lambda params, x: 1.0), 3, jnp.ones(3)

def rowless():
    return (lambda params, x: 1.0), jnp.ones(3), 1.0

def asking(more):
    return more

def broken():
    raise ValueError("no data here")

number = 3
"""


def took(call, alpha=ALPHA, beta=BETA):
    return alpha * call.messages + call.wire_bytes / beta


def calls(kind, messages, sizes=(1e3, 1e4, 1e5, 1e6, 4e6)):
    return [Call(kind, "data", x, messages) for x in sizes]


def measured(select=1e-3, compute=10e-3, beta=BETA, step=None, noise=NOISE):
    """What a million params on two replicas would give."""
    rng = np.random.default_rng(0)
    timed = [*calls(REDUCE, 2), *calls(GATHER, 1)]
    seconds = {x: took(x, beta=beta) for x in timed}
    seconds |= {"launch": 0.0, "one": 1e-3, "many": 1e-3, DENSE: 1e-4}
    seconds |= {f"all-gather {x}": 1e-4 + select for x in (10, 100)}
    if compute is not None:
        seconds["compute"] = compute
    if step is not None:
        seconds["step"] = step
    draw = lambda x: x * np.exp(rng.normal(0, noise, ROUNDS))
    ways = [Way(DENSE, 1.0, DENSE, (DENSE_CALL,))]
    for factor in (10, 100):
        own = Call(GATHER, "data", 8e6 / factor, 1)
        ways.append(Way("all-gather", float(factor), f"all-gather {factor}", (own,)))
    return Measured({x: draw(y) for x, y in seconds.items()}, tuple(ways), 1.0)


def test_alpha_and_beta_are_found_in_noise_and_beside_an_outlier():
    rng = np.random.default_rng(0)
    timed = calls(REDUCE, 2, sizes=np.geomspace(100, 1e7, 15))
    seconds = [took(x) * np.exp(rng.normal(0, NOISE)) for x in timed]
    seconds[3] *= 5
    seconds[9] /= 5
    cost = verdict.fit(timed, seconds)
    assert cost.latency_seconds == pytest.approx(ALPHA, rel=0.05)
    assert cost.bytes_per_second == pytest.approx(BETA, rel=0.05)


@pytest.mark.parametrize("seconds", [[4e-3, 3e-3, 2e-3], [1e-9, 1e-4, 10.0]])
def test_neither_alpha_nor_beta_is_negative(seconds):
    cost = verdict.fit(calls(REDUCE, 2, (1e3, 1e4, 1e5)), seconds)
    assert cost.latency_seconds >= 0
    assert cost.bytes_per_second > 0


def test_a_predicted_step_is_the_sum_of_its_parts():
    predicted = verdict.predict(measured())
    assert predicted.dense.step_seconds.middle == pytest.approx(
        10.1e-3 + took(DENSE_CALL), rel=2 * NOISE
    )
    ten, hundred = predicted.rows
    assert ten.step_seconds.middle == pytest.approx(
        11.1e-3 + ALPHA + 8e5 / BETA, rel=2 * NOISE
    )
    assert hundred.selection_seconds == pytest.approx(1e-3, rel=3 * NOISE)
    low, middle, high = hundred.speed_up
    true = (10.1e-3 + took(DENSE_CALL)) / (11.1e-3 + ALPHA + 8e4 / BETA)
    assert low < true < high
    assert low < middle < high


def test_several_collectives_in_one_cost_what_each_of_them_does():
    noiseless = measured(noise=0)
    two = Call(REDUCE, "data", 1e6, 4)  # of half the bytes each
    (dense, *_) = noiseless.ways
    several = dense._replace(calls=(two,))
    ways = (dense, several, several)
    predicted = verdict.predict(noiseless._replace(ways=ways))
    half = Call(REDUCE, "data", 5e5, 2)
    assert predicted.rows[0].exchange_seconds == pytest.approx(2 * took(half))


def test_what_is_larger_than_all_that_was_timed_costs_its_bytes():
    noiseless = measured(noise=0)
    large = Call(REDUCE, "data", 4e7, 2)
    (dense, *_) = noiseless.ways
    ways = (dense, dense._replace(calls=(large,)))
    predicted = verdict.predict(noiseless._replace(ways=ways))
    assert predicted.rows[0].exchange_seconds == pytest.approx(took(large), rel=1e-3)


def test_what_others_send_is_added_up():
    one = measured(noise=0)
    many = one.seconds | {"many": np.full(ROUNDS, 3e-3)}  # 2 ms for 1,000 entries
    (dense, *_) = one.ways
    ways = (dense, dense._replace(added=500.0))
    predicted = verdict.predict(Measured(many, ways, 1e3))
    assert predicted.rows[0].selection_seconds == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("situation", "said", "pays"),
    [
        ({}, "compression pays here: with all-gather at factor 100 a step is", "yes"),
        (
            {"select": 0.5},
            "compression will not pay here: with all-gather at factor 100, the",
            "no",
        ),
        (
            {"beta": 1e12, "compute": 1.0},
            "compression will not pay here: even without any exchange a step is",
            "no",
        ),
        ({"select": 0.28}, "too close to call: with all-gather at factor 100", None),
        ({"select": 0.32}, "too close to call: with all-gather at factor 100", None),
        (
            {"compute": None},
            "compression pays here: with all-gather at factor 100 an exchange is",
            "yes",
        ),
    ],
)
def test_the_verdict_is_a_plain_sentence(situation, said, pays):
    predicted = verdict.predict(measured(**situation))
    assert findings.verdict(predicted).startswith(said)
    assert predicted.rows[-1].pays == (pays or "too close")


def test_a_dense_step_that_was_timed_whole_is_not_predicted():
    # With its all-reduce half hidden behind the backward pass.
    predicted = verdict.predict(measured(step=0.17))
    assert predicted.dense.step_seconds.middle == pytest.approx(0.17, rel=2 * NOISE)
    assert predicted.ceiling.middle == pytest.approx(17, rel=3 * NOISE)
    assert predicted.dense.step_seconds.high < 0.18


@pytest.mark.parametrize(
    ("selects", "factor"), [((0.0, 0.0), 10), ((9.0, 9.0), None), ((0.5, 0.0), 17)]
)
def test_the_break_even_factor_is_where_steps_become_faster(selects, factor):
    times = measured(noise=0)
    seconds = dict(times.seconds)
    for name, select in zip(("all-gather 10", "all-gather 100"), selects, strict=True):
        seconds[name] = np.full(ROUNDS, 1e-4 + select)
    rows = verdict.predict(times._replace(seconds=seconds)).rows
    found = findings.break_evens(rows)["all-gather"]
    assert found == (factor and pytest.approx(factor, rel=0.2))


def test_a_controller_can_start_from_the_file(tmp_path):
    params = jax.ShapeDtypeStruct((1000, 1000), np.float32)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    plan = Plan(mesh, params, (10.0, 100.0), ("all-gather",))
    times = measured(noise=0)
    report = findings.report(plan, times, verdict.predict(times))
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(report))
    wire = probe.read(path)
    assert wire == gravac.WireCost(**json.loads(path.read_text())["wire"])
    assert wire.bytes_per_second == pytest.approx(BETA)
    assert wire.latency_seconds == pytest.approx(ALPHA)
    assert wire.compute_seconds == pytest.approx(10e-3)
    assert wire.selection_seconds == pytest.approx(1e-3)
    gravac.transform(wire=wire)


@pytest.mark.parametrize("text", [None, "", "[]", '{"wire": {"speed": 1}}'])
def test_a_file_of_no_probe_is_refused(tmp_path, text):
    path = tmp_path / "probe.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        ValueError, match=r"probe\.json has no measured network .*--json"
    ):
        probe.read(path)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A module of the user's, importable from here alone."""
    (tmp_path / "model_of_the_user.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "model_of_the_user"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "one of the arguments --params --loss is required"),
        (["--params", "many"], "from 16384 on, as 66e6, got many"),
        (["--params", "100"], "from 16384 on, as 66e6, got 100"),
        (["--params", "1e6", "--rungs", "0.1"], "factors above 1, .*got 0.1"),
        (["--params", "1e6", "--seconds", "0"], "a number above 0, got 0"),
        (["--params", "1e6", "--mesh", "data"], "as dcn=2,ici=8, got data"),
        (["--params", "1e6", "--mesh", "a=3"], "must have all 8 devices, got 3"),
        (["--params", "1e6", "--mesh", "a=1,b=8"], "one replica, and nothing to"),
        (["--params", "1e6", "--json", "no/probe.json"], "no/probe.json cannot be"),
        (["--params", "1e6", "--json", "."], "it is a directory"),
        (["--params", "1e6", "--headroom"], "--headroom .* give --loss"),
        (["--loss", "nothing"], "must be package.module:function, got nothing"),
        (["--loss", "no_module:loss"], "--loss no_module:loss cannot be called"),
        (["--loss", "{}:other"], "no attribute 'other'"),
        (["--loss", "{}:number"], "cannot be called .*is not a callable"),
        (["--loss", "{}:two"], r"must return \(loss_fn, params, batch\), got \(1, 2\)"),
        (["--loss", "{}:small"], "none of `params` is compressed"),
        (["--loss", "{}:vector"], "must be one number, got"),
        (["--loss", "{}:integers"], "must be arrays of floats, got 3"),
        (["--loss", "{}:rowless"], "must be arrays of rows, got 1.0"),
        (["--loss", "{}:asking"], "cannot be called .*missing a required argument"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_timed(model, capsys, argv, said):
    with pytest.raises(SystemExit) as refused:
        probe.main([x.format(model) for x in argv])
    assert refused.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(said, error), error


def test_what_goes_wrong_in_the_user_s_function_is_shown_as_it_is(model):
    with pytest.raises(ValueError, match="no data here"):
        probe.main(["--loss", f"{model}:broken"])


def test_nothing_of_the_table_is_cut_where_there_is_no_terminal(capsys):
    row = lambda exchange, factor: {
        "exchange": exchange,
        "factor": factor,
        "wire_bytes": 1.234e9,
        "selection_seconds": 1.234,
        "exchange_seconds": 12.34,
        "step_seconds": [12.3, 12.34, 12.4],
        "speed_up": [10.12, 11.12, 12.12],
        "pays": "too close",
    }
    screen.show(
        {
            "params": 10**9,
            "devices": "64 gpu",
            "processes": 8,
            "rounds": 9,
            "axes": {},
            "ceiling": None,
            "compute_seconds": 1.0,
            "dense": row("dense", 1),
            "rows": [row("all-gather-8", 1000)],
            "break_even": {"all-gather-8": 10.0},
            "verdict": "compression pays here",
            "notes": [],
        }
    )
    said = capsys.readouterr().out
    assert "…" not in said
    assert "11.12 (10.12-12.12)  too close" in said


def test_without_rich_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "gravac_jax._probe.screen", raising=False)
    monkeypatch.delattr("gravac_jax._probe.screen", raising=False)
    monkeypatch.setitem(sys.modules, "rich.box", None)
    with pytest.raises(ImportError, match=r"pip install gravac_jax\[tools\]"):
        probe.main(["--params", "1e6"])


def test_it_probes_these_devices(model, tmp_path, capsys):
    path = tmp_path / "probe.json"
    argv = ["--loss", f"{model}:loss", "--headroom", "--seconds", "0.1", "--rungs"]
    argv += ["50", "10", "--exchanges", "all-gather", "--json", str(path)]
    probe.main(argv)
    said = " ".join(capsys.readouterr().out.split())
    report = json.loads(path.read_text())
    assert report["verdict"] in said
    assert "there is no network between them" in said
    assert "8 replicas over data: all-reduce" in said
    ways = [(x["exchange"], x["factor"]) for x in report["rows"]]
    assert ways == [("dense rung", 1), ("all-gather", 10), ("all-gather", 50)]
    # Four bytes an entry from seven others, beside the evidence.
    sent = [x["wire_bytes"] for x in report["rows"]]
    assert sent[1] - sent[2] == pytest.approx(
        7 * 4 * 16384 * (1 / 10 - 1 / 50), rel=0.01
    )
    assert report["ceiling"][0] > 0
    assert probe.read(path).compute_seconds == report["compute_seconds"]


@pytest.mark.slow
def test_it_probes_two_axes_and_all_exchanges(tmp_path):
    path = tmp_path / "probe.json"
    argv = ["--params", "2e5", "--seconds", "0.1", "--mesh", "dcn=2,ici=4"]
    probe.main([*argv, "--json", str(path)])
    report = json.loads(path.read_text())
    assert list(report["axes"]) == ["dcn", "ici", "dcn+ici"]
    assert {x["exchange"] for x in report["rows"]} == {
        *("dense rung", "all-gather", "all-gather-8"),
        *("leader", "low-rank", "dense-16"),
    }
    assert "exchange is" in report["verdict"]
    assert report["compute_seconds"] is None


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_it_probes_processes_of_one_job(model, tmp_path):
    path = tmp_path / "probe.json"
    launch = [sys.executable, "-m", "gravac_jax.launch", "-n", "2", "-m"]
    launch += ["gravac_jax.probe", "--loss", f"{model}:loss", "--seconds", "0.5"]
    launch += ["--exchanges", "all-gather", "--json", str(path)]
    done = subprocess.run(
        launch, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["processes"] == 2
    assert done.stdout.count(report["verdict"].split(":")[0]) == 1
    assert "no network" not in done.stdout
