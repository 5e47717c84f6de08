"""The step timing: its baselines, what it takes apart, what it reports."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, collectives, make_mesh, printed
from common import hosts
from common.network import Network
from step_seconds import report, run
from step_seconds.methods import all_reduce

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time


@pytest.mark.parametrize(
    ("dtype", "size", "rounding", "least"),
    [("float32", 1.0, 2**-23, 0), ("float16", 1e-6, 2**-10, N * 2**-24)],
)
def test_a_mean_travels_in_one_all_reduce_of_its_bits(dtype, size, rounding, least):
    rng, shapes = np.random.default_rng(0), {"matrix": (97, 103), "bias": (11,)}
    draw = lambda size: rng.standard_normal(size) * np.exp(rng.normal(0, 5, size))
    grads = {k: np.float32(size * draw((N, *x))) for k, x in shapes.items()}
    tx = all_reduce(jnp.dtype(dtype), "data")
    update = lambda x: tx.update(jax.tree.map(lambda x: x[0], x), optax.EmptyState())[0]
    specs = {"in_specs": jax.P("data"), "out_specs": jax.P()}
    step = jax.jit(jax.shard_map(update, mesh=make_mesh(), **specs))
    found = collectives(step.lower(grads).compile().as_text())
    bits = {"float32": "f32", "float16": "f16"}[dtype]
    assert [(x.kind, x.dtype) for x in found] == [("all-reduce", bits)]
    for name, mean in step(grads).items():
        each = grads[name].astype(np.float64)
        assert (abs(mean - each.mean(0)) <= rounding * abs(each).sum(0) + least).all()


def line(name, seconds, **others):
    """Return a line of a record in which computation takes 0.1 s."""
    times = {"compute": 0.09, "selection": 0, "wait": 0.01, "slowest_compute": 0.1}
    return {
        **{"hosts": 4, "bandwidth_mbit": 100.0, "network": "of some kind"},
        **{"method": name, "params": 1_000_000, "steps": 100},
        **{f"{x}_seconds": [y] * 3 for x, y in times.items()},
        "step_seconds": [0.9 * seconds, 0.95 * seconds, 1.1 * seconds],
        "mean_step_seconds": seconds,
        "exchange_seconds": [-0.002, -0.001, 0.0],
        **{"wire_bytes": 6e6, "interface_bytes": 6.1e6},
    } | others


def row(text, name):
    (found,) = (x for x in text.splitlines() if x.startswith(f"| {name} |"))
    return found.strip("| ").split(" | ")[1:]


def test_a_table_says_how_much_faster_and_how_much_of_what_is_possible(tmp_path):
    half, name = 'Dense("bfloat16")', "own Bits(2)"
    head = {"configuration": {}, "versions": {}, "machine": "2 cores"}
    lines = head, line("dense", 1.0), line(half, 0.5), line(name, 0.25)
    path = tmp_path / "record.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    text = report.text(path)
    assert row(text, "dense")[-3:] == ["1.00", "0.50", "10% of 10.00"]
    assert row(text, half)[-3:] == ["2.00", "1.00", "20% of 5.00"]
    assert row(text, name)[-3:] == ["4.00", "2.00", "40%"]
    assert row(text, name)[0] == "237.5 (225.0-275.0)"
    assert row(text, name)[1:5] == ["90.0", "0.0", "10.0", "-1.0"]
    assert row(text, name)[5:7] == ["6.000", "6.100"]


@pytest.mark.slow
def test_the_smallest_comparison_runs_on_a_network(tmp_path, text):
    if reason := Network.unavailable():
        pytest.skip(reason)
    toy = ["--steps", "4", "--turns", "2", "--settle-steps", "2", "--hosts", "2"]
    toy += ["--methods", "dense", "TopK(100)", "--bandwidths-mbit", "1000"]
    toy += ["--data-dir", str(text), "--out", str(tmp_path / "out.jsonl")]
    said = printed(hosts.PROGRAM, "step_seconds", *toy, timeout=220)
    lines = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    _, whole, sparse = lines
    for x in (whole, sparse):
        for name in ("step", "compute", "slowest_compute", "wait"):
            assert x[f"{name}_seconds"][0] > 0
            assert x[f"{name}_seconds"] == sorted(x[f"{name}_seconds"])
    assert (whole["method"], whole["taken"]) == ("dense", {"dense": 4})
    assert whole["selection_seconds"] == [0.0, 0.0, 0.0]
    assert whole["wire_bytes"] == 4 * whole["params"]
    assert whole["interface_bytes"] == pytest.approx(whole["wire_bytes"], rel=0.1)
    assert (sparse["method"], sparse["taken"]) == ("TopK(100)", {"TopK(100)": 4})
    assert sparse["wire_bytes"] <= sparse["interface_bytes"]
    assert sparse["interface_bytes"] < whole["interface_bytes"] / 10
    assert row(said, "TopK(100)")


def test_a_bandwidth_that_was_cut_is_timed_again(tmp_path, text, monkeypatch):
    out, jobs, names = tmp_path / "x.jsonl", [], ("dense", "TopK(10)")
    args = run.Args(text, out, (2, 4), (100.0,), setting=run.Setting(methods=names))

    def job(n, script, timeout_seconds):
        jobs.append((n, json.loads(script[-1])))
        with out.open("a") as file:
            for name in names[: 1 if len(jobs) == 2 else 2]:  # the second is cut off
                file.write(json.dumps(line(name, 1.0, hosts=n)) + "\n")

    monkeypatch.setattr(hosts, "run", job)
    for _ in range(3):
        run.measure(args)
    assert jobs == [(n, [[100.0, None]]) for n in (2, 4, 4)]
    found = [json.loads(x) for x in out.read_text().splitlines()[1:]]
    expected = [(n, name) for n in (2, 4) for name in names]
    assert [(x["hosts"], x["method"]) for x in found] == expected
