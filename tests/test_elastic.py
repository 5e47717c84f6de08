"""Elastic training: processes die, freeze and join, and the others go on."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from _harness import assert_same

import gravac_jax as gravac
from gravac_jax import elastic

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

LAUNCH = (sys.executable, "-m", "gravac_jax.launch", "-n", "3", "--elastic")
HERE = jax.__version__, sys.platform
FAULTS = [(0, signal.SIGKILL), (1, signal.SIGSTOP)]
STEPS = 40

# Both the script of a job and its reference run this.
TASK = """
import json, os, sys, time, zlib, jax, jax.numpy as jnp, numpy as np, optax
import gravac_jax as gravac
from gravac_jax import elastic
rows = lambda *at: np.random.default_rng(at).standard_normal((8, 64), np.float32)
params = {"w": np.concatenate([rows(i) for i in range(8)]) / 8}
loss_fn = lambda params, batch: jnp.mean((jnp.tanh(batch @ params["w"]) - 0.1) ** 2)
def digest(own):
    held = [x for _, x in optax.tree.get_all_with_path(own[1], "residual")]
    return zlib.crc32(b"".join(x.tobytes() for x in (own[0]["w"], *held)))
"""
SCRIPT = """
def begin():
    step = gravac.train_step(loss_fn, eval(sys.argv[1]), gravac.make_mesh())
    return step, step.init(params), 0
# Steps wait for a process that is missing, but for the first two.
pause = lambda x, i: 2 if len(x["members"]) < 3 and i > x["start"] + 1 else 0.05
batch = lambda i: time.sleep(pause(run.generation, i)) or rows(i, run.process)
own = lambda: {"process": run.process, "pid": os.getpid(), "time": time.time()}
tell = lambda **x: print(json.dumps(x | own() | run.generation), flush=True)
run = elastic.Elastic(begin)
for i, loss in run.train(batch, int(sys.argv[2])):
    tell(step=i)
tell(digest=digest(elastic.own_rows(run.state)))
"""
exec(TASK, NAMES := {})


def told_under_faults(command):
    """Return what processes tell under faults, and after which and when they came."""
    told, done = [], [{"number": 0}]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        for found in filter(None, map(re.compile(r"{.*}$").search, launcher.stdout)):
            told.append(x := json.loads(found[0]))
            steps = len(x["members"]) == 3 and x.get("step", 0) > x["start"] + 2
            if steps and x["number"] > done[-1]["number"] and len(done) <= len(FAULTS):
                index, number = FAULTS[len(done) - 1]
                os.kill(int(list(x["members"])[index]), number)
                done.append(x | {"time": time.time()})
    assert launcher.returncode == 0
    return told, done[1:]


def reference(tx, generations):
    """Return digests by process of a run in one process with the same members."""
    params, own, ends = NAMES["params"], {}, [x["start"] for x in generations[1:]]
    specs = gravac.state_specs((params, tx.init(params)))
    cut = lambda j: lambda x, spec: x[j : j + 1] if spec != jax.P() else x
    row = lambda tree, j: jax.tree.map(cut(j), jax.tree.map(np.asarray, tree), specs)
    whole = lambda spec, *rows: np.concatenate(rows) if spec != jax.P() else rows[0]
    is_own = lambda keys: re.search(r"\.residual|\.told", jax.tree_util.keystr(keys))
    pick = lambda keys, old, new: new if is_own(keys) else old
    for x, end in zip(generations, [*ends, STEPS], strict=True):
        members = list(x["members"].values())
        mesh = gravac.make_mesh(devices=jax.devices()[: len(members)])
        step = gravac.train_step(NAMES["loss_fn"], tx, mesh)
        fresh = row(step.init(params), 0)
        for m in x["joined"]:
            own[m] = jax.tree.map_with_path(pick, own.get(x["source"], fresh), fresh)
        state = gravac.place(jax.tree.map(whole, specs, *map(own.get, members)), mesh)
        for i in range(max(x["start"], 0), end):
            batch = np.concatenate([NAMES["rows"](i, m) for m in members])
            *state, _ = step(*state, batch)
        own = {m: row(tuple(state), j) for j, m in enumerate(members)}
    return {m: NAMES["digest"](x) for m, x in own.items()}


@pytest.mark.slow
@pytest.mark.skipif(HERE not in elastic.TRIED, reason="elastic is not for this JAX")
def test_after_a_kill_and_a_freeze_the_run_ends_as_one_with_the_same_members(tmp_path):
    tx, script = "gravac.adamw(1e-2, send=gravac.Bits(2), delay=1)", tmp_path / "x.py"
    script.write_text(TASK + SCRIPT)
    options = ["--restarts", "2", "--heartbeat", "5", script, tx, str(STEPS)]
    told, done = told_under_faults([*LAUNCH, *options])
    later = lambda done: (x["time"] for x in told if x["number"] > done["number"])
    seconds = [min(later(x)) - x["time"] for x in done]
    sys.stdout.write(f"from a fault to the next step: {np.round(seconds, 1)} s\n")
    for pid in {x["pid"] for x in told}:
        steps = np.diff([x["step"] for x in told if x["pid"] == pid and "step" in x])
        assert {*steps} <= {0, 1}
        assert np.sum(steps == 0) <= len(FAULTS) == len(done)
    *_, last = generations = list({x["number"]: x for x in told}.values())
    assert [index for index, *_ in last["lost"]] == [index for index, _ in FAULTS]
    assert all(0 < energy < np.inf for *_, energy in last["lost"])
    digests = {x["process"]: x["digest"] for x in told if "digest" in x}
    assert digests == reference(eval(tx), generations)


@pytest.mark.slow
@pytest.mark.skipif(HERE not in elastic.TRIED, reason="elastic is not for this JAX")
def test_a_job_that_has_no_restarts_left_fails(tmp_path):
    (script := tmp_path / "x.py").write_text("raise SystemExit(3)")
    command = [*LAUNCH, "--restarts", "1", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "exited with status 3; the others were ended" in done.stderr


def test_own_rows_lie_on_another_mesh_bit_by_bit():
    tx, first = gravac.adamw(1e-2, send=gravac.Bits(2)), jax.devices()[:4]
    meshes = [gravac.make_mesh(devices=x) for x in (first, jax.devices()[4:])]
    step, other = [gravac.train_step(NAMES["loss_fn"], tx, x) for x in meshes]
    *state, _ = step(*step.init(NAMES["params"]), NAMES["rows"](0))
    rows = elastic.own_rows(tuple(state))
    moved = elastic.put_rows(rows, other.init(NAMES["params"]))
    assert_same((rows, moved), (tuple(state), rows))


def test_what_cannot_work_is_refused_before_anything_changes(monkeypatch):
    monkeypatch.delenv(elastic.FOLDER, raising=False)
    for tried, said in (((), "needs one of"), ([HERE], "start it by")):
        monkeypatch.setattr(elastic, "TRIED", tried)
        with pytest.raises(RuntimeError, match=said):
            elastic.Elastic(lambda: None)
