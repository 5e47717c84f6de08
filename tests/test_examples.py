"""The examples run, at toy size."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from _harness import agreed, assert_same, copied, on_host, printed

from gravac_jax import metrics

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments, cwd, launch=(), example="quickstart.py"):
    return printed(*launch, str(EXAMPLES / example), *arguments, cwd=cwd)


ROWS = ("807,04", " adapt", " dense")
TOY = ("--steps", "3", "--batch", "2", "--length", "16")


@pytest.mark.slow
def test_the_quickstart_draws_and_finds_the_same_in_two_processes(tmp_path, text):
    ladder = "Fastest((Dense(), Bits(2, turns=2)))"
    options = (*TOY, "--data", str(text), "--send", ladder)
    alone = run(*options, "--out", "a/b.png", cwd=tmp_path)
    assert "807,040 params, 4 replicas" in alone
    assert (tmp_path / "a/b.png").read_bytes().startswith(b"\x89PNG")
    launch = ("-m", "gravac_jax.launch", "-n", "2", "--devices", "2")
    written = ("--out", "launched.png", "--metrics", "lines")
    launched = run(*options, *written, cwd=tmp_path, launch=launch)
    # All but the last column, the time of a step.
    table = lambda x: [y.split()[:-1] for y in x.splitlines() if y[:6] in ROWS]
    assert [row[0] for row in table(alone)] == ["807,040", "adaptive", "dense"]
    assert table(alone) == table(launched)
    assert (tmp_path / "launched.png").exists()
    lines = {x.stem: metrics.read_jsonl(x) for x in (tmp_path / "lines").iterdir()}
    assert {name: len(x) for name, x in lines.items()} == {"adaptive": 3, "dense": 3}


@pytest.mark.slow
def test_fsdp_trains_on_two_slices(tmp_path, text):
    options = ("--steps", "3", "--batch", "1", "--length", "16")
    output = run(*options, "--data", str(text), cwd=tmp_path, example="fsdp.py")
    assert "2 slices of 4 devices" in output
    rows = {x.split()[0]: x.split() for x in output.splitlines() if x.strip()}
    few, dense = rows["Bits(2)"], rows["dense"]
    assert float(few[2]) > 10 > float(dense[2]) == 1
    assert 10 * float(few[3]) < float(dense[3])  # bytes
    # kB: a quarter of all leaves; those that go dense have a residual, too.
    assert (few[4], dense[4]) == ("862", "861")


@pytest.fixture(scope="module")
def scaling():
    with jax.numpy_dtype_promotion("standard"):
        return runpy.run_path(str(EXAMPLES / "loss_scale.py"))


@pytest.mark.slow
def test_an_overflow_on_one_replica_halves_the_scale_on_all(scaling):
    assert scaling["scales"] == [2.0**15, 2.0**14, 2.0**14]
    state, bad_steps = scaling["state"], lambda x: int(optax.tree.get(x, "bad_steps"))
    for replica in (3, 0):
        before, skipped = copied((state[0], state[1][1:])), bad_steps(state)
        factor, batch = float(state[2]["factor"]), scaling["make_batch"](64)
        batch["x"][replica * 64 // jax.device_count()] *= 1e5
        *state, _ = scaling["step"](*state, batch)
        jax.tree.map(agreed, (state[0], state[1][1:], state[2]))
        assert_same(on_host((state[0], state[1][1:])), before)
        assert float(state[2]["factor"]) == factor / 2
        assert bad_steps(state) == skipped + 1
    *state, loss = scaling["step"](*state, scaling["make_batch"](64))
    assert jnp.isfinite(loss)
    assert float(state[2]["factor"]) == factor / 2


@pytest.mark.slow
def test_the_scale_of_a_loss_doubles_after_many_steps_and_leaves_gradients(scaling):
    scale = {"factor": jnp.float32(8), "steps": jnp.int32(1999)}
    for is_finite, factor in ((True, 16), (False, 4)):
        after = scaling["next_scale"](scale, jnp.bool(is_finite))
        assert (float(after["factor"]), int(after["steps"])) == (factor, 0)
