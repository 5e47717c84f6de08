"""The probe: its statistics and verdicts, what it refuses, and real runs."""

import argparse
import json
import re

import numpy as np
import pytest
from _harness import printed

import gravac_jax as gravac
from gravac_jax import probe
from gravac_jax.probe import Range

BESIDE = "launch", "small all-reduce", "large all-reduce", "no exchange"
MODEL = """
import jax.numpy as jnp
params, batch = {"w": jnp.ones((128, 128))}, jnp.ones((4, 128))
def loss():
    return lambda params, x: jnp.mean((x @ params["w"]) ** 2), params, batch
def infinite():
    return lambda params, x: jnp.inf * params["w"].sum(), params, batch
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Return the name of a user's module in the working directory."""
    (tmp_path / "model_of_the_user.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    return "model_of_the_user"


def results(headroom=(19, 20, 21), speed_up=(9, 10, 11), pays="yes"):
    """Return results of a dense step and of one that sends few entries."""
    dense = {"step_seconds": Range(0.1, 0.1, 0.1)}
    top_k = {"step_seconds": Range(0.01, 0.01, 0.01), "speed_up": Range(*speed_up)}
    rows = [dense, {"encoding": "TopK(100)", "pays": pays, **top_k}]
    return {"headroom": headroom and Range(*headroom), "rows": rows}


@pytest.mark.parametrize("n", [5, 6, 17, 50])
def test_the_interval_covers_the_median_nine_times_in_ten(n):
    draws = np.random.default_rng(0).exponential(size=(2000, n))
    ranges = [probe.median_range(x) for x in draws]
    covered = np.mean([low <= np.log(2) <= high for low, _, high in ranges])
    assert covered > 0.9 - 3 * np.sqrt(0.9 * 0.1 / 2000)
    if n > 5:  # one sample less on each side would be too little
        assert covered < 0.99


def test_what_slows_a_whole_round_does_not_blur_a_speed_up():
    slow = np.random.default_rng(0).uniform(1, 10, size=9)
    seconds = {"dense": 0.2 * slow, "Bits(2)": 0.1 * slow}
    _, row = probe.compare(seconds, dict.fromkeys(seconds, 1e6))
    assert row["speed_up"] == pytest.approx((2, 2, 2))
    assert row["step_seconds"].low < row["step_seconds"].high


def test_a_step_pays_if_all_of_its_interval_does():
    expected = [(0.1, "yes"), (0.195, "no"), ([0.1] * 4 + [0.2] * 5, "too close")]
    for times, pays in expected:
        seconds = {"dense": np.full(9, 0.2), "Bits(2)": np.full(9, times)}
        assert probe.compare(seconds, {"Bits(2)": 1e6})[0]["pays"] == pays


def test_latency_bandwidth_and_selection_are_those_of_the_cost_model():
    sent = {"dense": 6e6, "Bits(2)": 2e5, "TopK(100)": 1e5}
    exchange = {x: y / 12.5e6 + 6 * 2e-4 for x, y in sent.items()}
    seconds = [1e-4, 1e-4 + 6 * 2e-4, 1e-4 + exchange["dense"], 0.03]
    times = {x: np.full(5, y) for x, y in zip(BESIDE, seconds, strict=True)}
    times |= {x: np.full(5, 0.03 + 0.004 + y) for x, y in exchange.items()}
    found = probe.network(times, sent, messages=6)
    assert found == pytest.approx(vars(gravac.WireCost(12.5e6, 2e-4, 0.03, 0.004)))
    times |= {x: np.zeros(5) for x in (*BESIDE[1:], "Bits(2)", "TopK(100)")}
    noise = gravac.WireCost(**probe.network(times, sent, messages=6))
    assert (noise.latency_seconds, noise.selection_seconds) == (0, 0)


def test_every_program_is_timed_in_every_round():
    calls = []
    runs = {x: lambda x=x: calls.append(x) for x in "abc"}
    seconds = probe.in_rounds(runs, meet=lambda: None, seconds=0)
    assert [x.shape for x in seconds.values()] == [(probe.MIN_ROUNDS,)] * 3
    rounds = "".join(calls[3 * probe.WARM_UP_CALLS :])
    # Each is timed after a call of its own, and each round starts with another one.
    assert rounds == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc" + "bbccaa"


def test_the_verdict_says_whether_compression_pays():
    for situation, said in (
        ({}, r"pays here: with TopK\(100\) a step is 10.00"),
        ({"pays": "too close"}, r"too close to call: with TopK\(100\)"),
        ({"pays": "no"}, r"will not pay here: with TopK\(100\)"),
        ({"headroom": (1.01, 1.02, 1.03)}, "will not pay here: even without an exch"),
        ({"headroom": None}, "if computing a gradient takes less than 1.8 s: with"),
    ):
        assert re.search(said, probe.verdict(results(**situation)))


def test_wrong_arguments_are_refused(capsys):
    for argv, said in (
        ("", "one of the arguments --params --loss is required"),
        ("--params 1e6 --mesh a=3", "must have all 8 devices"),
        *((f"--params 1e6 --json {x}", "no file in") for x in (".", "no/a.json")),
        ("--params 1e6 --mesh a", "invalid mesh_axes value: 'a'"),
        *((f"--loss {x}", f"got '{x}'") for x in ("nosuch:f", "json:nosuch")),
        ("--params 1e6 --send Bits(3)", r"got 'Bits\(3\)' \(`bits` must be 8 or"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            probe.main(argv.split())
        assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_encodings_are_given_as_python_shows_them():
    turns = gravac.Bits(1, turns=4)
    for x in (*probe.SEND, turns, gravac.TopK(30.5, select="exact")):
        assert probe.encoding(repr(x)) == x
    parse = lambda *argv: probe._parser().parse_args(["--params", "1e6", *argv]).send
    assert tuple(parse()) == probe.SEND
    assert parse("--send", "Bits(1, turns=4)") == [turns]


def test_what_is_no_encoding_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in (
        *("", "Bits", "Bits(", "Bits(2).traffic", "gravac.Bits(2)", "Bits(1 + 1)"),
        *("Bits(*[2])", "Bits(**{'bits': 2})", "[Bits(2)]", "Encoding()", "TopK('1')"),
        *("Fixed(4)", "open('made', 'w')", "TopK(open('made', 'w'))"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            probe.encoding(text)
        assert f"such as 'Bits(2)' 'TopK(100)', got {text!r}" in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_it_times_the_steps_of_a_loss(model, tmp_path, capsys):
    path = tmp_path / "probe.json"
    argv = f"--loss {model}:loss --seconds 0.1 --send TopK(50) TopK(10) TopK(50)"
    probe.main([*argv.split(), "--json", str(path)])
    said, report = capsys.readouterr().out, json.loads(path.read_text())
    assert report["verdict"] in said
    assert [x["encoding"] for x in report["rows"]] == ["dense", "TopK(50)", "TopK(10)"]
    # Four bytes an entry to seven others, beside the evidence.
    dense, fifty, ten = (x["wire_bytes"] for x in report["rows"])
    assert ten - fifty == pytest.approx(7 * 4 * 16384 * (1 / 10 - 1 / 50), rel=0.01)
    assert f" ({dense / ten:.3g}x)" in said
    assert dense == 4 * 16384 * 2 * 7 / 8
    assert report["headroom"][0] > 0
    assert probe.read(path).compute_seconds == report["network"]["compute_seconds"]
    path.write_text("no JSON")
    with pytest.raises(ValueError, match="not what the probe writes"):
        probe.read(path)
    assert "Without an exchange a step takes" in said
    with pytest.raises(ValueError, match="not finite"):
        probe.main(f"--loss {model}:infinite --send TopK(10)".split())


@pytest.mark.slow
def test_it_times_the_usual_encodings_on_two_axes(tmp_path):
    path = tmp_path / "probe.json"
    probe.main(f"--params 2e5 --seconds 0.1 --mesh dcn=2,ici=4 --json {path}".split())
    report = json.loads(path.read_text())
    assert (report["axis"], report["replicas"]) == ("dcn", 2)
    assert report["params"] == pytest.approx(2e5, rel=0.01)
    assert [x["encoding"] for x in report["rows"]] == ["dense", *map(repr, probe.SEND)]
    assert "an exchange is" in report["verdict"]


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_it_times_the_processes_of_one_job(model, tmp_path):
    path = tmp_path / "probe.json"
    argv = "-m gravac_jax.launch -n 2 -m gravac_jax.probe --send TopK(10)"
    argv += f" --loss {model}:loss --seconds 0.5 --json {path}"
    said = printed(*argv.split(), timeout=300)
    report = json.loads(path.read_text())
    assert report["processes"] == 2
    assert said.count(report["verdict"]) == 1
