"""The step timing: its baselines, what it takes apart, what it reports."""

import json
import os
import re
import subprocess
import sys

import dense
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import steptime
import steptime_report
import tyro
from dense import dense16, dense32, dense_half, wire_bytes
from network import Network
from rich.console import Console
from steptime_methods import method

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

REPLICAS = 4
SHAPES = {"matrix": (97, 103), "bias": (11,)}  # no power of two divides their sum


def random(seed):
    """Gradients of every replica, of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = {name: (REPLICAS, *shape) for name, shape in SHAPES.items()}
    return {
        name: (rng.standard_normal(size) * np.exp(rng.normal(0, 5, size))).astype("f4")
        for name, size in sizes.items()
    }


@pytest.fixture(params=[1, 3])
def pieces(request, monkeypatch):
    """16 bits travel in one piece, and in several."""
    entries = sum(map(np.prod, SHAPES.values()))
    monkeypatch.setattr(dense, "PIECE_ENTRIES", -(-entries // request.param))
    return request.param


def averaged(tx):
    """The update of `tx` on four devices, compiled."""
    mesh = jax.make_mesh((REPLICAS,), ("data",), devices=jax.devices()[:REPLICAS])

    def update(grads):
        return tx.update(jax.tree.map(lambda x: x[0], grads), optax.EmptyState())[0]

    step = jax.shard_map(update, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    grads = jax.device_put(random(seed=0), jax.NamedSharding(mesh, jax.P("data")))
    return jax.jit(step).lower(grads).compile(), grads


def to_bfloat16(x):
    return x.astype(jnp.bfloat16).astype(np.float32)


def collectives(compiled):
    """(name, dtype) of every collective in the HLO."""
    pattern = r"= \(?(\w+)\[.*?\)? (all-\w+(?:-\w+)*|collective-\w+|reduce-scatter)\("
    return {(name, dtype) for dtype, name in re.findall(pattern, compiled.as_text())}


def test_16_bits_travel_as_16_bits(pieces):
    compiled, _ = averaged(dense16())
    assert collectives(compiled) == {("all-to-all", "u16"), ("all-gather", "u16")}
    assert compiled.as_text().count(" all-to-all(") == pieces


def test_32_bits_travel_in_one_all_reduce():
    compiled, _ = averaged(dense32())
    assert collectives(compiled) == {("all-reduce", "f32")}
    assert compiled.as_text().count(" all-reduce(") == 1


def test_the_mean_in_16_bits_is_that_of_numpy_bit_by_bit(pieces):
    del pieces
    compiled, grads = averaged(dense16())
    for name, mean in compiled(grads).items():
        total = np.zeros(SHAPES[name], np.float32)
        for replica in np.asarray(grads[name]):
            total = total + to_bfloat16(replica)
        expected = to_bfloat16(total / np.float32(REPLICAS))
        np.testing.assert_array_equal(np.asarray(mean), expected, strict=True)


def test_the_mean_in_32_bits_is_the_mean():
    compiled, grads = averaged(dense32())
    for name, mean in compiled(grads).items():
        expected = np.asarray(grads[name]).astype(np.float64).mean(0)
        largest = abs(np.asarray(grads[name])).sum(0)
        assert (abs(mean - expected) <= 2**-23 * largest).all()


def test_half_precision_travels_in_one_all_reduce_of_16_bits():
    compiled, grads = averaged(dense_half())
    assert collectives(compiled) == {("all-reduce", "f16")}
    assert compiled.as_text().count(" all-reduce(") == 1
    small = jax.tree.map(lambda x: x / np.float32(1e6), grads)
    for name, mean in compiled(small).items():
        each = np.asarray(small[name]).astype(np.float64)
        lost = 2**-10 * abs(each).sum(0) + REPLICAS * 2**-24
        assert (abs(mean - each.mean(0)) <= lost).all()


def test_16_bits_are_half_the_bytes_of_32():
    assert wire_bytes(1000, replicas=4, value_bytes=4) == 6000
    assert wire_bytes(1000, replicas=4, value_bytes=2) == 3000


def test_a_method_that_is_none_is_refused():
    with pytest.raises(SystemExit, match="no method is called 'fixed'"):
        method("fixed")


@pytest.mark.slow
def test_the_local_half_of_the_default_selects_at_the_rung_that_it_is_given():
    default, params = method("default"), {"w": jnp.ones((256, 256))}
    entries = np.random.default_rng(0).standard_normal((256, 256))
    select = jax.jit(default.select)
    for rung, wanted in enumerate(default.ladder):
        state = default.exchange.init(params)
        _, state = select({"w": entries.astype("f4")}, state, jnp.int32(rung))
        factor = float(optax.tree.get(state, "StepInfo").factor)
        assert factor == pytest.approx(wanted, rel=0.02)
        assert default.rung(factor) == rung


def line(name, seconds, **others):
    """A line of a record in which computation takes 0.1 s."""
    return {
        "hosts": 4,
        "bandwidth_mbit": 100.0,
        "network": "a network of some kind",
        "method": name,
        "params": 1_000_000,
        "steps": 100,
        "step_seconds": [0.9 * seconds, 0.95 * seconds, 1.1 * seconds],
        "mean_step_seconds": seconds,
        "compute_seconds": [0.09, 0.09, 0.09],
        "selection_seconds": [0.0, 0.0, 0.0],
        "wait_seconds": [0.01, 0.01, 0.01],
        "exchange_seconds": [-0.002, -0.001, 0.0],
        "slowest_compute_seconds": [0.1, 0.1, 0.1],
        "factor": 1.0,
        "wire_bytes": 6e6,
        "interface_bytes": 6.1e6,
    } | others


@pytest.fixture
def printed(tmp_path):
    """The words of the tables of a record."""

    def show(*lines):
        path = tmp_path / "record.jsonl"
        head = {"configuration": {}, "versions": {}, "machine": "2 cores"}
        path.write_text("".join(json.dumps(x) + "\n" for x in (head, *lines)))
        console = Console(width=steptime_report.WIDTH)
        with console.capture() as captured:
            console.print(steptime_report.tables(path))
        return captured.get()

    return show


def row(text, name):
    (found,) = (x for x in text.splitlines() if x.split()[:1] == [name])
    return found.split()


def test_a_table_says_how_much_faster_and_how_much_of_what_is_possible(printed):
    text = printed(line("dense", 1.0), line("dense16", 0.5), line("fixed10", 0.25))
    assert row(text, "dense")[-5:] == ["1.00", "0.50", "10%", "of", "10.00"]
    assert row(text, "dense16")[-5:] == ["2.00", "1.00", "20%", "of", "5.00"]
    assert row(text, "fixed10")[-3:] == ["4.00", "2.00", "40%"]
    assert row(text, "fixed10")[2:4] == ["237.5", "(225.0-275.0)"]
    assert row(text, "fixed10")[4:8] == ["90.0", "0.0", "10.0", "-1.0"]
    assert row(text, "fixed10")[8:10] == ["6.000", "6.100"]


def test_a_table_says_what_network_it_is_of_and_how_many_share_a_core(printed):
    text = printed(line("dense", 1.0))
    assert "4 hosts, 100 Mbit/s (a network of some kind)" in text
    assert "4 processes on 2 cores" in text


def test_every_network_has_a_table_of_its_own(printed):
    slow = line("dense", 2.0, bandwidth_mbit=None, interface_bytes=None)
    text = printed(line("dense", 1.0), slow)
    assert text.count("of 10.00") == text.count("of 20.00") == 1
    assert "4 hosts, no limit" in text


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--methods", "fixed10"], '--methods must have "dense"'),
        (["--methods", "dense", "topk"], "no method is called 'topk'"),
        (["--hosts", "1", "2"], "--hosts must be from 2 to 200"),
        (["--bandwidths-mbit", "0"], "--bandwidths-mbit must be > 0"),
        (["--steps", "3"], "--turns must be from 1 to --steps, got 5"),
        (["--rows", "9999"], "fewer than one batch"),
        (["--task", "chess"], "no task 'chess'"),
        (["--data-dir", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_one_line(
    tmp_path, text, options, complaint
):
    defaults = ["--data-dir", str(text), "--out", str(tmp_path / "out.jsonl")]
    args = tyro.cli(steptime.Args, args=[*defaults, *options])
    with pytest.raises(SystemExit, match=re.escape(complaint)) as refusal:
        steptime.main(args)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "input.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 800)
    return path


def run_program(text, out, *options, env=None):
    """The lines of the record, and what was printed."""
    program = [sys.executable, steptime.__file__, "--data-dir", str(text)]
    toy = ["--preset", "tiny", "--steps", "4", "--turns", "2", "--settle-steps", "2"]
    done = subprocess.run(
        [*program, "--out", str(out), "--hosts", "2", *toy, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=220,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    head, *lines = map(json.loads, out.read_text().splitlines())
    assert head["configuration"]["preset"] == "tiny"
    return lines, done.stdout


@pytest.mark.slow
def test_the_smallest_comparison_runs_on_a_network(tmp_path, text):
    if reason := Network.unavailable():
        pytest.skip(reason)
    options = ("--methods", "dense", "fixed100", "--bandwidths-mbit", "1000")
    lines, output = run_program(text, tmp_path / "out.jsonl", *options)
    whole, sparse = lines
    for x in lines:
        assert (x["hosts"], x["bandwidth_mbit"], x["steps"]) == (2, 1000.0, 4)
        assert "namespaces" in x["network"]
        for name in ("step", "compute", "slowest_compute", "wait"):
            low, middle, high = x[f"{name}_seconds"]
            assert 0 < low <= middle <= high
        assert len(x["selection_seconds"]) == len(x["exchange_seconds"]) == 3
    assert (whole["method"], whole["factor"]) == ("dense", 1.0)
    assert whole["selection_seconds"] == [0.0, 0.0, 0.0]
    assert whole["wire_bytes"] == 4 * whole["params"]
    assert whole["interface_bytes"] == pytest.approx(whole["wire_bytes"], rel=0.1)
    assert sparse["method"] == "fixed100"
    assert sparse["factor"] == pytest.approx(100, rel=0.01)
    assert sparse["wire_bytes"] <= sparse["interface_bytes"]
    assert sparse["interface_bytes"] < whole["interface_bytes"] / 10
    assert row(output, "fixed100")[1] == "100"


@pytest.mark.slow
def test_without_a_network_all_figures_say_so_and_none_is_made_twice(tmp_path, text):
    out, alone = tmp_path / "out.jsonl", {**os.environ, "PATH": "/nowhere"}
    lines, output = run_program(text, out, "--methods", "dense", env=alone)
    assert [x["network"] for x in lines] == ["loopback, no rate limit: not a network"]
    assert [x["bandwidth_mbit"] for x in lines] == [None]
    assert [x["interface_bytes"] for x in lines] == [None]
    assert "the figures will be of loopback" in output
    assert "(loopback, no rate limit: not a network)" in output
    assert run_program(text, out, "--methods", "dense", env=alone)[0] == lines


def test_what_a_job_wrote_is_kept_and_a_bandwidth_that_was_cut_is_timed_again(
    tmp_path, text, monkeypatch
):
    out, jobs = tmp_path / "x.jsonl", []
    setting = steptime.Setting(methods=("dense", "fixed10"))
    args = steptime.Args(text, out, hosts=(2, 4), setting=setting)
    cut = None

    def job(network, script, timeout_seconds):
        jobs.append((network.hosts, json.loads(script[-1])))
        names = [x for x in setting.methods if (network.hosts, x) != cut]
        with out.open("a") as file:
            for name in names:
                own = {"hosts": network.hosts, "bandwidth_mbit": None}
                file.write(json.dumps(line(name, 1.0, **own)) + "\n")

    monkeypatch.setattr(steptime, "run", job)
    monkeypatch.setattr(Network, "unavailable", lambda: "no network")
    cut = (4, "fixed10")
    steptime.measure(args)
    assert jobs == [(2, [[None, None]]), (4, [[None, None]])]
    cut = None
    steptime.measure(args)
    steptime.measure(args)
    assert jobs[2:] == [(4, [[None, None]])]
    found = [json.loads(x) for x in out.read_text().splitlines()[1:]]
    assert [(x["hosts"], x["method"]) for x in found] == [
        *((2, name) for name in setting.methods),
        *((4, name) for name in setting.methods),
    ]
