"""The probe: its statistics and verdicts, what it refuses, and real runs."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from _harness import choices, make_mesh

import gravac_jax as gravac
from gravac_jax import __main__ as tools
from gravac_jax import _buckets, _info, probe
from gravac_jax._encodings.ladder import Ladder
from gravac_jax._network import Traffic
from gravac_jax.probe import Range

BESIDE = "launch", "small all-reduce", "large all-reduce", "no exchange"
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


def sends(wire_bytes, messages):
    return Traffic(0, 0, wire_bytes, messages)


def results(dense=0.1, step=0.01, speed_up=(9, 10, 11), headroom=(19, 20, 21)):
    """Return results of a dense step and of one that sends few entries."""
    rows = [
        ("dense", 4e6, dense, (1, 1, 1)),
        ("Dense()", 4e6, dense, (100, 100, 100)),
        ("TopK(100)", 4e4, step, speed_up),
    ]
    return {
        "headroom": headroom and Range(*headroom),
        "rows": [
            {
                "encoding": name,
                "wire_bytes": sent,
                "step_seconds": Range(seconds, seconds, seconds),
                "speed_up": Range(*times),
                "pays": Range(*times).pays,
            }
            for name, sent, seconds, times in rows
        ],
    }


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
    sent = dict.fromkeys(seconds, sends(1e6, 2))
    _, row = probe.compare(seconds, sent)
    assert row["speed_up"] == pytest.approx((2, 2, 2))
    assert row["step_seconds"].low < row["step_seconds"].high


def test_latency_bandwidth_and_selection_are_those_of_the_cost_model():
    sent = {"dense": (6e6, 6), "Bits(2)": (2e5, 6), "TopK(100)": (1e5, 12)}
    exchange = lambda wire_bytes, messages: wire_bytes / 12.5e6 + messages * 2e-4
    seconds = [1e-4, 1e-4 + 6 * 2e-4, 1e-4 + exchange(*sent["dense"]), 0.03]
    times = {x: np.full(5, y) for x, y in zip(BESIDE, seconds, strict=True)}
    for name, figures in sent.items():
        times[name] = np.full(5, 0.03 + 0.004 + exchange(*figures))
    found = probe.network(times, {x: sends(*y) for x, y in sent.items()})
    assert gravac.WireCost(**found).compute_seconds == pytest.approx(0.03)
    assert found["bytes_per_second"] == pytest.approx(12.5e6)
    assert found["latency_seconds"] == pytest.approx(2e-4)
    assert found["selection_seconds"] == pytest.approx(0.004)


@pytest.mark.parametrize("shape", [(4,), (4, 2)], ids=["one axis", "two axes"])
@pytest.mark.parametrize(
    "encoding",
    choices(probe.SEND, lambda x: x in (gravac.Bits(2), gravac.TopK(100)), repr),
)
def test_bytes_and_messages_are_those_of_the_whole_step(encoding, shape):
    model = probe.stand_in(20_000)
    mesh = make_mesh(shape, ("data", "fast")[: len(shape)])
    compile = probe.compiler(mesh, model)
    _, sent = probe.compressed(encoding, mesh, model[1], compile)
    plan = _buckets.plan(model[1], True, encoding.padded_size)
    ladders = [Ladder((encoding,), gravac.Bucket(*plan.sizes, *plan.shapes))]
    table = _info.tables(plan, ladders, 6, 4, rides=len(shape) == 1)
    assert sent.wire_bytes == table.wire_bytes[0]
    assert sent.messages == table.messages[0]


def test_noise_gives_no_negative_network():
    seconds = [3e-3, 2e-3, 1e-3, 0.03]  # the smaller program takes longer
    sent = dict.fromkeys(("dense", "TopK(100)"), sends(1e5, 4))
    times = {x: np.full(5, y) for x, y in zip(BESIDE, seconds, strict=True)}
    times["TopK(100)"] = np.zeros(5)
    wire = gravac.WireCost(**probe.network(times, sent))
    assert (wire.latency_seconds, wire.selection_seconds) == (0, 0)


def test_every_program_is_timed_in_every_round():
    calls = []
    runs = {x: lambda x=x: calls.append(x) for x in "abc"}
    seconds = probe.in_rounds(runs, meet=lambda: None, budget_seconds=0)
    assert [x.shape for x in seconds.values()] == [(probe.MIN_ROUNDS,)] * 3
    rounds = "".join(calls[3 * probe.WARM_UP_CALLS :])
    # Each is timed after a call of its own, and each round starts with another one.
    assert rounds == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc" + "bbccaa"


@pytest.mark.parametrize(
    ("situation", "said"),
    [
        ({}, r"pays here: with TopK\(100\), the fastest, a step is 10.00"),
        ({"speed_up": (1.01, 1.1, 1.2)}, r"too close to call: with TopK\(100\)"),
        ({"speed_up": (0.5, 0.9, 1.04)}, r"will not pay here: with TopK\(100\)"),
        (
            {"headroom": (1.01, 1.02, 1.03)},
            "will not pay here: even without an exchange a step is 1.02",
        ),
        ({"headroom": None}, "if computing a gradient takes less than 1.8 s: with"),
    ],
)
def test_the_verdict_says_whether_compression_pays(situation, said):
    assert re.search(said, probe.verdict(results(**situation)))


def test_a_controller_can_start_from_the_file(tmp_path):
    path = tmp_path / "probe.json"
    network = {"latency_seconds": 1e-4, "bytes_per_second": 1e8}
    path.write_text(json.dumps({"wire": network | {"compute_seconds": 0.01}}))
    wire = probe.read(path)
    assert wire == gravac.WireCost(1e8, 1e-4, compute_seconds=0.01)
    gravac.transform(network=wire)


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
        ("--loss {}:two", r"that returns \(loss_fn, params, batch\), got .* \(1, 2\)"),
        ("--params 1e6 --send Bits(3)", r"got 'Bits\(3\)' \(`bits` must be 8 or"),
        ("--params 1e6 --send Bits(2) Fixed(4)", r"'TopK\(100\)', got 'Fixed\(4\)'"),
    ],
)
def test_wrong_arguments_are_refused(model, capsys, argv, said):
    with pytest.raises(SystemExit) as refused:
        probe.main(argv.format(model).split())
    assert refused.value.code == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_encodings_are_given_as_python_shows_them():
    turns = gravac.Bits(1, turns=4)
    for x in (*probe.SEND, turns, gravac.TopK(30.5, select="exact")):
        assert probe.encoding(repr(x)) == x
    default, other = ([], ["--send", "Bits(1, turns=4)"])
    parse = lambda argv: probe._parser().parse_args(["--params", "1e6", *argv]).send
    assert (tuple(parse(default)), parse(other)) == (probe.SEND, [turns])


@pytest.mark.parametrize(
    "text",
    [
        *("", "Bits", "Bits(", "Bits(2).traffic", "gravac.Bits(2)", "Bits(1 + 1)"),
        *("Bits(*[2])", "Bits(**{'bits': 2})", "[Bits(2)]", "Encoding()", "TopK('1')"),
        *("open('made', 'w')", "TopK(open('made'))"),
        "Bits(2) if open('made', 'w') else 0",
    ],
)
def test_what_is_no_encoding_is_refused_and_not_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        probe.encoding(text)
    assert f"such as 'Bits(2)' 'TopK(100)', got {text!r}" in str(refused.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_probe(model):
    argv = f"--loss {model}:infinite --send TopK(10)"
    with pytest.raises(ValueError, match="not finite"):
        probe.main(argv.split())


def test_it_is_one_of_the_tools(capsys):
    with pytest.raises(SystemExit, match="0"):
        tools.main(["probe", "--help"])
    assert capsys.readouterr().out.count("--headroom") >= 2


@pytest.mark.slow
def test_it_times_the_steps_of_a_loss(model, tmp_path, capsys):
    path = tmp_path / "probe.json"
    argv = f"--loss {model}:loss --seconds 0.1 --send TopK(50) TopK(10) TopK(50)"
    probe.main([*argv.split(), "--json", str(path)])
    said, report = capsys.readouterr().out, json.loads(path.read_text())
    assert report["verdict"] in said
    assert "have no network" in said
    assert [x["encoding"] for x in report["rows"]] == ["dense", "TopK(50)", "TopK(10)"]
    # Four bytes an entry to seven others, beside the evidence.
    dense, fifty, ten = (x["wire_bytes"] for x in report["rows"])
    assert ten - fifty == pytest.approx(7 * 4 * 16384 * (1 / 10 - 1 / 50), rel=0.01)
    assert f" ({dense / ten:.3g}x)" in said
    assert dense == 4 * 16384 * 2 * 7 / 8
    assert report["headroom"][0] > 0
    assert probe.read(path).compute_seconds == report["wire"]["compute_seconds"]


@pytest.mark.slow
def test_headroom_times_no_exchange(model, tmp_path):
    path = tmp_path / "probe.json"
    argv = f"--loss {model}:loss --headroom --seconds 0.1 --json {path}"
    probe.main(argv.split())
    report = json.loads(path.read_text())
    assert [x["encoding"] for x in report["rows"]] == ["dense"]
    assert "without an exchange a step is" in report["verdict"]


@pytest.mark.slow
def test_it_times_the_usual_encodings_on_two_axes(tmp_path):
    path = tmp_path / "probe.json"
    argv = f"--params 2e5 --seconds 0.1 --mesh dcn=2,ici=4 --json {path}"
    probe.main(argv.split())
    report = json.loads(path.read_text())
    assert (report["axis"], report["replicas"]) == ("dcn", 2)
    assert report["params"] == pytest.approx(2e5, rel=0.01)
    names = ["dense", *map(repr, probe.SEND)]
    assert [x["encoding"] for x in report["rows"]] == names
    assert "an exchange is" in report["verdict"]


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_it_times_the_processes_of_one_job(model, tmp_path):
    path = tmp_path / "probe.json"
    argv = "-m gravac_jax.launch -n 2 -m gravac_jax probe --send TopK(10)"
    argv += f" --loss {model}:loss --seconds 0.5 --json {path}"
    done = subprocess.run(
        [sys.executable, *argv.split()], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["processes"] == 2
    assert done.stdout.count(report["verdict"]) == 1
    assert "no network" not in done.stdout
