"""Elastic training: processes die, freeze and join, and the others go on."""

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from unittest import mock

import _examples
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import assert_same

import gravac_jax as gravac
from gravac_jax import elastic
from gravac_jax._encodings import ENCODINGS
from gravac_jax._step import states

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

LAUNCH = (sys.executable, "-m", "gravac_jax.launch", "--elastic", "-n")
HERE = jax.__version__, sys.platform
# Signals, of a process in a generation; 0 for an error of its loader.
FAULTS = {"(0, 1)": 9, "(1, 3)": 19, "(2, 5)": 15, "(0, 7)": 0}
CONNECTING = "elastic._client", "multihost_utils.sync_global_devices"
SOAK = int(os.environ.get("GRAVAC_JAX_SOAK", "0"))  # steps of four processes

# Both the script of a job and its reference run this.
TASK = """
import dataclasses, json, os, sys, time, typing, zlib
import jax, jax.numpy as jnp, numpy as np, optax
import gravac_jax as gravac
from gravac_jax import elastic
rows = lambda *at: np.random.default_rng(at).standard_normal((8, 64), np.float32)
params = {"w": np.concatenate([rows(i) for i in range(8)]) / 8}
loss_fn = lambda params, batch: jnp.mean((jnp.tanh(batch @ params["w"]) - 0.1) ** 2)
class Count(typing.NamedTuple):
    steps: jax.Array
    def moved(self, fresh):
        return fresh
@dataclasses.dataclass(frozen=True, repr=False)
class Turns(gravac.Controller):
    ladder: tuple
    def init(self):
        return jnp.int32(0), Count(jnp.int32(0))
    def decide(self, evidence, state):
        return state.steps // 3 % 2, Count(state.steps + 1)
def digest(own):
    held = [x for _, x in optax.tree.get_all_with_path(own[1], "residual")]
    return zlib.crc32(b"".join(x.tobytes() for x in (own[0]["w"], *held)))
"""
SCRIPT = """
import random, threading
from jax.experimental import multihost_utils
tx, steps, least, *dying_at = sys.argv[1:]
tell = lambda **x: print(json.dumps(x | run.generation), flush=True)
def die(number):
    tell(fault=number, process=run.generation["members"][own], time=time.time())
    if not number:
        raise OSError("no such shard")
    os.kill(int(own), number)
def dying(function):  # if process 1 calls it in the first generation
    def call(*args):
        run.generation["number"] == 1 == run.generation["members"][own] and die(9)
        return function(*args)
    return call
exec("".join(f"{x} = dying({x})" for x in dying_at))
def begin():
    tell(begun=True)
    step = gravac.train_step(loss_fn, eval(tx), gravac.make_mesh())
    return step, step.init(params), 0
def batch(i):
    members, start = run.generation["members"], run.generation["start"]
    if i == start + 4 and least == "3" == str(len(members)):
        number = FAULTS.get(str((run.process, run.generation["number"])))
        number is None or die(number)
    # Steps wait for a process that is missing, but for the first two.
    time.sleep(2 if len(members) < int(least) and i > start + 1 else 0.05)
    return rows(i, run.process)
own = str(os.getpid())
run = elastic.Elastic(begin)
def fail_in_turn():  # one, five to ten seconds after all are there; not at the end
    generation = {}
    while True:
        time.sleep(0.01)
        if generation is not vars(run).get("generation", generation):
            generation, due = run.generation, time.time() + random.uniform(5, 10)
        if len(generation.get("members", ())) == 4 and time.time() > due:
            turn, is_late = len(generation["lost"]), run.steps > int(steps) - 200
            turn % 4 == run.process and not is_late and die((9, 19)[turn // 4 % 2])
if least == "1":
    threading.Thread(target=fail_in_turn, daemon=True).start()
for i, loss in run.train(batch, int(steps)):
    tell(step=i, pid=own, time=time.time())
tell(process=run.process, digest=digest(elastic.own_rows(run.state)))
"""
exec(TASK, NAMES := {})


def told(folder, n, *arguments):
    """Return what the processes of a job tell."""
    (script := folder / "x.py").write_text(TASK + f"FAULTS = {FAULTS}" + SCRIPT)
    command = [*LAUNCH, str(n), "--restarts", "999", script, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = map(re.compile(r"{.*}$").search, done.stdout.splitlines())
    return [json.loads(x[0]) for x in found if x]


def cut(tree, j):
    """Return what the process of replica j has of a state in NumPy."""
    return states.change_local(lambda x: x[j : j + 1], jax.tree.map(np.asarray, tree))


def join(rows):
    """Return the state of processes that each have one replica."""
    whole = lambda spec, *x: np.concatenate(x) if spec != jax.P() else x[0]
    return jax.tree.map(whole, gravac.state_specs(rows[0]), *rows)


def reference(tx, generations, steps):
    """Return digests by process of a run in one process with the same members."""
    own, ends = {}, [x["start"] for x in generations[1:]]
    is_own = lambda keys: re.search(r"\.residual|\.told", jax.tree_util.keystr(keys))
    pick = lambda keys, old, new: new if is_own(keys) else old
    steps_of = functools.cache(lambda n: train_step(NAMES["loss_fn"], tx, n))
    for x, end in zip(generations, [*ends, steps], strict=True):
        members = list(x["members"].values())
        step, mesh = steps_of(len(members))
        fresh = cut(step.init(NAMES["params"]), 0)
        for m in x["joined"]:
            own[m] = jax.tree.map_with_path(pick, own.get(x["source"], fresh), fresh)
        state = gravac.place(join([own[m] for m in members]), mesh)
        if x["start"] >= 0:  # what is true of other members
            state = states.moved(state, step.init(NAMES["params"]))
        for i in range(max(x["start"], 0), end):
            batch = np.concatenate([NAMES["rows"](i, m) for m in members])
            *state, _ = step(*state, batch)
        own = {m: cut(tuple(state), j) for j, m in enumerate(members)}
    return {m: NAMES["digest"](x) for m, x in own.items()}


def train_step(loss_fn, tx, n):
    mesh = gravac.make_mesh(devices=jax.devices()[:n])
    return gravac.train_step(loss_fn, tx, mesh), mesh


def assert_like_reference(lines, tx, steps):
    """Processes end as in one process with the same members; return what was lost."""
    *_, last = generations = list({x["number"]: x for x in lines}.values())
    digests = {x["process"]: x["digest"] for x in lines if "digest" in x}
    assert digests == reference(eval(tx), generations, steps)
    return last["lost"]


@pytest.mark.slow
@pytest.mark.skipif(HERE not in elastic.TRIED, reason="elastic is not for this JAX")
@pytest.mark.parametrize(("n", "steps"), [(4, SOAK) if SOAK else (3, 70)])
def test_after_faults_the_run_ends_as_one_with_the_same_members(n, steps, tmp_path):
    ladder = "(gravac.Bits(8), gravac.Bits(2))"
    tx = f"gravac.adamw(1e-2, send=NAMES['Turns']({ladder}), delay=1)"
    lines = told(tmp_path, n, tx.replace("NAMES", "globals()"), steps, 1 if SOAK else 3)
    faults, taken = [[x for x in lines if k in x] for k in ("fault", "step")]
    later = lambda x: [
        y["time"] - x["time"] for y in taken if y["number"] > x["number"]
    ]
    seconds = [min(x) for x in map(later, faults) if x]
    quartiles = np.round(np.quantile(seconds, (0, 0.25, 0.5, 0.75, 1)), 1)
    sys.stdout.write(f"from {len(faults)} faults to the next step: {quartiles} s\n")
    for pid in {x["pid"] for x in taken}:
        numbers = np.diff([x["step"] for x in taken if x["pid"] == pid])
        assert {*numbers} <= {0, 1}
        assert np.sum(numbers == 0) <= len(faults)
    lost = assert_like_reference(lines, tx, steps)
    who = [x["process"] for x in faults], [i for i, *_ in lost]
    assert SOAK or who == ([0, 1, 2, 0],) * 2
    energies = [energy for *_, energy in lost]
    assert np.isfinite(energies).all()
    assert SOAK or min(energies) > 0  # one of many may die before its first step


@pytest.mark.slow
@pytest.mark.skipif(HERE not in elastic.TRIED, reason="elastic is not for this JAX")
@pytest.mark.parametrize("at", CONNECTING)
def test_who_dies_while_processes_connect_takes_no_other_along(at, tmp_path):
    tx = "gravac.adamw(1e-2, send=gravac.Bits(2))"
    lost = assert_like_reference(told(tmp_path, 3, tx, 8, 2, at), tx, 8)
    assert lost == [[1, -1, 0.0]]


@pytest.mark.slow
@pytest.mark.skipif(HERE not in elastic.TRIED, reason="elastic is not for this JAX")
def test_a_job_that_has_no_restarts_left_fails(tmp_path):
    (script := tmp_path / "x.py").write_text("raise SystemExit(3)")
    command = [*LAUNCH, "3", "--restarts", "1", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "exited with status 3; the others were ended" in done.stderr


@pytest.mark.skipif(HERE not in elastic.TRIED, reason="elastic is not for this JAX")
def test_processes_that_all_die_while_a_generation_begins_start_again(tmp_path):
    statuses, started = [None, None], []
    job = mock.Mock(pids=(1, 2), statuses=statuses, start=started.append)
    job.is_stopped.return_value = False
    for pid in job.pids:
        sign = elastic._Sign(0, -1, 0.0, False, time.monotonic())
        (tmp_path / str(pid)).write_text(json.dumps(sign))
    supervisor = elastic._Supervisor(job, tmp_path, 2, 1, 5)
    supervisor._begin = lambda: statuses.__setitem__(slice(2), [-9, -9])
    assert supervisor.goes_on()
    assert supervisor.goes_on()
    assert sorted(started) == [0, 1]


@pytest.mark.parametrize("send", _examples.one_of_each(ENCODINGS), ids=repr)
def test_what_replicas_made_was_sent_or_is_held_or_lost_whoever_goes_and_comes(send):
    tx = optax.chain(gravac.transform(send=send, compress=True), optax.sgd(1.0))
    loss_fn = lambda params, batch: jnp.vdot(params["w"], batch[0])  # batches are grads
    held = lambda row: sum(x.astype(np.float64) for x in elastic._residuals(row))
    own, made, sent, lost, rng = {}, 0.0, 0.0, 0.0, np.random.default_rng(0)
    for members in ({0, 1, 2, 3}, {0, 2, 3}, {0, 1, 2, 3}):
        step, _ = train_step(loss_fn, tx, n := len(members))
        fresh = step.init({"w": np.zeros((64, 64), np.float32)})
        first = cut(elastic.own_rows(fresh), 0)
        lost += sum(held(own.pop(gone)) for gone in own.keys() - members)
        for m in members - own.keys():
            own[m] = elastic._with_empty_residual(own.get(0, first), first)
        state = elastic.put_rows(join([own[m] for m in members]), fresh)
        sent += n * np.asarray(state[0]["w"])
        for batch in rng.standard_normal((5, n, 64, 64), np.float32):
            *state, _ = step(*state, batch)
            made += batch.sum(0, np.float64)
        rows = elastic.own_rows(tuple(state))
        sent -= n * rows[0]["w"]
        own = {m: cut(rows, j) for j, m in enumerate(members)}
    found = sent + np.reshape(lost + sum(map(held, own.values())), sent.shape)
    np.testing.assert_allclose(found, made, atol=2.0**-16 * np.abs(made).max())
    assert np.any(lost) != (send == gravac.Dense())


def test_own_rows_lie_on_another_mesh_bit_by_bit():
    tx, first = gravac.adamw(1e-2, send=gravac.Bits(2)), jax.devices()[:4]
    meshes = [gravac.make_mesh(devices=x) for x in (first, jax.devices()[4:])]
    step, other = [gravac.train_step(NAMES["loss_fn"], tx, x) for x in meshes]
    *state, _ = step(*step.init(NAMES["params"]), NAMES["rows"](0))
    rows = elastic.own_rows(tuple(state))
    moved = elastic.put_rows(rows, other.init(NAMES["params"]))
    assert_same((rows, moved), (tuple(state), rows))
    keys = jax.random.split(jax.random.key(0), 4)
    laid = [jax.device_put(keys, jax.NamedSharding(x, jax.P("data"))) for x in meshes]
    moved = elastic.put_rows(elastic.own_rows(laid[0])[::-1], laid[1])
    assert (moved == laid[1][::-1]).all()


@pytest.mark.parametrize("state", [(), (1,)])
def test_any_error_while_processes_connect_may_be_of_a_death(state, monkeypatch):
    monkeypatch.setattr(elastic.Elastic, "_newest", lambda run: {"is_over": True})
    monkeypatch.setattr(elastic.backend, "clear_backends", lambda: None)
    run = object.__new__(elastic.Elastic)
    run.state, run.generation, run._shared = state, {"number": 1}, mock.Mock()
    with pytest.raises(ValueError, match="reshape") if state else nullcontext():
        run._leave(ValueError("cannot reshape array of size 2 into shape (3, 1)"))


def test_a_run_that_begins_beyond_its_last_step_ends(monkeypatch):
    monkeypatch.setattr(elastic.Elastic, "_watch", lambda run: None)
    run = object.__new__(elastic.Elastic)
    run._port, run.steps = 1, 5
    assert list(run.train(lambda i: None, steps=3)) == []


def test_connections_outside_of_tcp_stay():
    one, other = socket.socketpair()
    with one, other:
        elastic._break_connections(port=1)
        assert one.send(b"x") == 1


def test_what_cannot_work_is_refused_before_anything_changes(monkeypatch):
    for name in (elastic.FOLDER, retries := "GLOO_DISABLE_CONNECTION_RETRIES"):
        monkeypatch.delenv(name, raising=False)
    for tried, said in (((), "needs one of"), ([HERE], "start it by")):
        monkeypatch.setattr(elastic, "TRIED", tried)
        with pytest.raises(RuntimeError, match=said):
            elastic.Elastic(lambda: None)
    assert retries not in os.environ
