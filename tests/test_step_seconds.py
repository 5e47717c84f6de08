"""The step timing: its baselines, what it takes apart, what it reports."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import hosts
from common.network import Network
from step_seconds import report, run
from step_seconds.methods import all_reduce, ladder_of, optimizer_of

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


def averaged(tx):
    """The update of `tx` on four devices, compiled."""
    mesh = jax.make_mesh((REPLICAS,), ("data",), devices=jax.devices()[:REPLICAS])

    def update(grads):
        return tx.update(jax.tree.map(lambda x: x[0], grads), optax.EmptyState())[0]

    step = jax.shard_map(update, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    grads = jax.device_put(random(seed=0), jax.NamedSharding(mesh, jax.P("data")))
    return jax.jit(step).lower(grads).compile(), grads


def collectives(compiled):
    """(name, dtype) of every collective in the HLO."""
    pattern = r"= \(?(\w+)\[.*?\)? (all-\w+(?:-\w+)*|collective-\w+|reduce-scatter)\("
    return {(name, dtype) for dtype, name in re.findall(pattern, compiled.as_text())}


def test_32_bits_travel_in_one_all_reduce_whose_result_is_the_mean():
    compiled, grads = averaged(all_reduce(jnp.float32, "data"))
    assert collectives(compiled) == {("all-reduce", "f32")}
    assert compiled.as_text().count(" all-reduce(") == 1
    for name, mean in compiled(grads).items():
        expected = np.asarray(grads[name]).astype(np.float64).mean(0)
        largest = abs(np.asarray(grads[name])).sum(0)
        assert (abs(mean - expected) <= 2**-23 * largest).all()


def test_half_precision_travels_in_one_all_reduce_of_16_bits():
    compiled, grads = averaged(all_reduce(jnp.float16, "data"))
    assert collectives(compiled) == {("all-reduce", "f16")}
    assert compiled.as_text().count(" all-reduce(") == 1
    small = jax.tree.map(lambda x: x / np.float32(1e6), grads)
    for name, mean in compiled(small).items():
        each = np.asarray(small[name]).astype(np.float64)
        lost = 2**-10 * abs(each).sum(0) + REPLICAS * 2**-24
        assert (abs(mean - each.mean(0)) <= lost).all()


@pytest.mark.slow
def test_a_step_alone_sends_what_it_is_told_to():
    name, params = "own Fastest()", {"w": jnp.ones((256, 256))}
    entries = np.random.default_rng(0).standard_normal((256, 256))
    tx = optimizer_of(name, optax.identity(), 1.0, axis_name=None)
    grads = {"w": jnp.asarray(entries, jnp.float32)}
    update = jax.jit(lambda state: tx.update(grads, state, at="own")[1])
    for rung in range(len(ladder_of(name))):
        state = optax.tree.set(tx.init(params), ahead=jnp.full(2, rung))
        assert optax.tree.get(update(state), "StepInfo").rung == rung


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
        "wire_bytes": 6e6,
        "interface_bytes": 6.1e6,
    } | others


@pytest.fixture
def printed(tmp_path):
    """The tables of a record."""

    def show(*lines):
        path = tmp_path / "record.jsonl"
        head = {"configuration": {}, "versions": {}, "machine": "2 cores"}
        path.write_text("".join(json.dumps(x) + "\n" for x in (head, *lines)))
        return report.text(path)

    return show


def row(text, name):
    (found,) = (x for x in text.splitlines() if x.startswith(f"| {name} |"))
    return found.strip("| ").split(" | ")[1:]


def test_a_table_says_how_much_faster_and_how_much_of_what_is_possible(printed):
    half, name = 'Dense("bfloat16")', "own Bits(2)"
    text = printed(line("dense", 1.0), line(half, 0.5), line(name, 0.25))
    assert row(text, "dense")[-3:] == ["1.00", "0.50", "10% of 10.00"]
    assert row(text, half)[-3:] == ["2.00", "1.00", "20% of 5.00"]
    assert row(text, name)[-3:] == ["4.00", "2.00", "40%"]
    assert row(text, name)[0] == "237.5 (225.0-275.0)"
    assert row(text, name)[1:5] == ["90.0", "0.0", "10.0", "-1.0"]
    assert row(text, name)[5:7] == ["6.000", "6.100"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "input.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 800)
    return path


@pytest.mark.slow
def test_the_smallest_comparison_runs_on_a_network(tmp_path, text):
    if reason := Network.unavailable():
        pytest.skip(reason)
    toy = ["--steps", "4", "--turns", "2", "--settle-steps", "2", "--hosts", "2"]
    toy += ["--methods", "dense", "TopK(100)", "--bandwidths-mbit", "1000"]
    command = [sys.executable, hosts.PROGRAM, "step_seconds", "--data-dir", str(text)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out.jsonl"), *toy],
        capture_output=True,
        text=True,
        check=False,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr
    _, *lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    whole, sparse = lines
    for x in lines:
        for name in ("step", "compute", "slowest_compute", "wait"):
            low, middle, high = x[f"{name}_seconds"]
            assert 0 < low <= middle <= high
    assert (whole["method"], whole["taken"]) == ("dense", {"dense": 4})
    assert whole["selection_seconds"] == [0.0, 0.0, 0.0]
    assert whole["wire_bytes"] == 4 * whole["params"]
    assert whole["interface_bytes"] == pytest.approx(whole["wire_bytes"], rel=0.1)
    assert (sparse["method"], sparse["taken"]) == ("TopK(100)", {"TopK(100)": 4})
    assert sparse["wire_bytes"] <= sparse["interface_bytes"]
    assert sparse["interface_bytes"] < whole["interface_bytes"] / 10
    assert row(done.stdout, "TopK(100)")


def test_what_a_job_wrote_is_kept_and_a_bandwidth_that_was_cut_is_timed_again(
    tmp_path, text, monkeypatch
):
    out, jobs = tmp_path / "x.jsonl", []
    setting = run.Setting(methods=("dense", "TopK(10)"))
    args = run.Args(text, out, (2, 4), (100.0,), setting=setting)
    cut = None

    def job(n, script, timeout_seconds):
        jobs.append((n, json.loads(script[-1])))
        names = [x for x in setting.methods if (n, x) != cut]
        lines = [line(name, 1.0, hosts=n) for name in names]
        with out.open("a") as file:
            file.writelines(json.dumps(x) + "\n" for x in lines)

    monkeypatch.setattr(hosts, "run", job)
    cut = (4, "TopK(10)")
    run.measure(args)
    assert jobs == [(2, [[100.0, None]]), (4, [[100.0, None]])]
    cut = None
    run.measure(args)
    run.measure(args)
    assert jobs[2:] == [(4, [[100.0, None]])]
    found = [json.loads(x) for x in out.read_text().splitlines()[1:]]
    assert [(x["hosts"], x["method"]) for x in found] == [
        *((2, name) for name in setting.methods),
        *((4, name) for name in setting.methods),
    ]
