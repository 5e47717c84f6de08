"""What goes wrong with checkpoints: other runs, disks, damaged files, signals."""

import contextlib
import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import assert_same, choices

import gravac_jax as gravac
from gravac_jax import elastic, metrics
from gravac_jax.checkpoint import Checkpointer, CheckpointError

RNG = np.random.default_rng(0)
PARAMS = {"b": np.zeros(16, np.float32), "w": np.ones((24, 16), np.float32)}
TX = optax.chain(
    gravac.transform(send=gravac.TopK(4), compress={"b": False, "w": True}),
    optax.sgd(0.1),
)

# Orbax leaves coroutines behind where it fails to restore.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True, scope="module")
def collected():
    """Collect them here: Python 3.11 fails if it does so while it parses a file."""
    yield
    gc.collect()


def begin(where=4):
    return gravac.place((PARAMS, TX.init(PARAMS)), where)


def filled():
    """Return a state with a residual that no other call returns."""
    params, (transform, *others) = begin()
    draw = lambda x: jnp.asarray(RNG.normal(size=x.shape), x.dtype)
    memory = jax.tree.map(draw, transform.local.memory)
    return params, (optax.tree.set(transform, memory=memory), *others)


def save(directory, state, *steps, data=None):
    with Checkpointer(directory, save_every=1, keep=2) as checkpointer:
        for step in steps:
            checkpointer.save(step, state, state[0], data)


def restore(directory, step=None):
    with Checkpointer(directory) as checkpointer:
        return checkpointer.restore(begin(), PARAMS, step)


# Several runs in one directory.


def test_steps_are_saved_when_due_and_only_after_those_that_are_there(tmp_path):
    state = filled()
    with Checkpointer(tmp_path, save_every=2) as checkpointer:
        assert checkpointer.restore(begin(), PARAMS) is None
        saved = [i for i in range(1, 9) if checkpointer.save(i, state, PARAMS)]
        assert saved == [2, 4, 6, 8]
        checkpointer.wait()
        assert checkpointer.steps == [4, 6, 8]
        assert not checkpointer.save(8, state, PARAMS), "it exists already"
    # A run that restored none, or an earlier one, cannot tell whose they are.
    for step in (7, 8):
        said = rf"step {step} can.*\[4, 6, 8\].*anoth"
        with pytest.raises(CheckpointError, match=said):
            save(tmp_path, state, step)
    assert restore(tmp_path, np.int64(6)).step == 6
    for step in (-1, 1.5, "5"):
        with pytest.raises(CheckpointError, match=rf"step {step} \(of \[4, 6, 8\]\)"):
            restore(tmp_path, step)
    save(tmp_path, state, 9)
    largest = max((tmp_path / "9").rglob("d/*"), key=lambda x: x.stat().st_size)
    cut_short(largest)  # not every bit matters
    with pytest.raises(CheckpointError, match=r"step 9 \(of \[8, 9\]\) cannot"):
        restore(tmp_path)
    assert_same(*map(jax.tree.leaves, (restore(tmp_path, 8).tree, state)))


def test_others_may_read_while_one_saves(tmp_path):
    state, reader = filled(), Checkpointer(tmp_path)
    with reader, Checkpointer(tmp_path, save_every=1) as writer:
        for step in (1, 2):
            writer.save(step, state, PARAMS)
            Checkpointer(tmp_path).close()
            writer.wait()
            assert reader.restore(begin(), PARAMS).step == step


def test_of_two_runs_in_one_directory_the_later_to_save_is_refused(tmp_path):
    state, open_one = filled(), lambda: Checkpointer(tmp_path, save_every=1)
    with open_one() as one, open_one() as two:
        one.save(1, state, PARAMS)
        one.wait()
        two.restore(begin(), PARAMS)
        two.save(2, state, PARAMS)
        two.wait()
        with pytest.raises(CheckpointError, match=r"step 3 .*\[1, 2\], from the last"):
            one.save(3, state, PARAMS)
        two.restore(begin(), PARAMS, step=1)
        assert two.save(3, state, PARAMS), "it has only looked back"


def test_a_state_of_many_sharded_arrays_is_saved(tmp_path):
    """Its checksums have collectives, which deadlock if many begin at once."""
    mesh = jax.make_mesh((8,), ("data",))
    put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    many = {f"w{i}": put(np.full((8, 4096), i, np.float32)) for i in range(100)}
    state = (*begin(mesh), many)
    with Checkpointer(tmp_path, save_every=1) as checkpointer:
        checkpointer.save(1, state, PARAMS)
        assert_same(checkpointer.restore(state, PARAMS).tree, state)


# Directories and disks.


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Checkpointer("~/run").directory == tmp_path / "run"
    metrics.JsonlWriter("~/run/one.jsonl").close()
    assert metrics.read_jsonl("~/run/one.jsonl") == []


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (10**9, 10**9 - 288, 288))
    with pytest.raises(CheckpointError, match=r"has [0-9,]+ bytes, and 288 are free"):
        save(tmp_path, filled(), 1)
    assert not any(tmp_path.iterdir())


def test_a_full_disk_raises_and_earlier_checkpoints_stay(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run"):
        with pytest.raises(CheckpointError, match=rf"cannot be kept in .*{name}:"):
            Checkpointer(tmp_path / name)
    first = filled()
    save(tmp_path, first, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        checkpointer = Checkpointer(tmp_path, save_every=1)
        assert checkpointer.save(2, filled(), PARAMS)
        with pytest.raises(CheckpointError, match=rf"step 2 cannot.* {tmp_path}"):
            checkpointer.save(3, first, PARAMS)  # which is tried all the same
        with pytest.raises(CheckpointError, match="step 3 cannot"):
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    saved = restore(tmp_path)
    assert saved.step == 1
    assert_same(jax.tree.leaves(saved.tree), jax.tree.leaves(first))
    # Threads of the save that failed may still write for a moment: not step 3 again.
    assert checkpointer.save(4, first, PARAMS), "the run goes on and saves again"
    checkpointer.close()
    assert restore(tmp_path).step == 4


# Files that are not as they were written.


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    if data := bytearray(path.read_bytes()):
        data[RNG.integers(len(data))] ^= 1 << RNG.integers(8)
        path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", choices([Path.unlink, cut_short, flip], lambda x: x == flip)
)
def test_a_damaged_file_is_noticed_or_does_no_harm(tmp_path, damage):
    state = filled()
    save(tmp_path / "whole", state, 1, data={"at": 12})
    files = [x for x in (tmp_path / "whole").rglob("*") if x.is_file()]
    refused = 0
    for i, file in enumerate(files * 2):
        directory = tmp_path / f"{i}"
        shutil.copytree(tmp_path / "whole", directory)
        damage(directory / file.relative_to(tmp_path / "whole"))
        try:
            saved = restore(directory)
        except CheckpointError as error:
            refused += str(directory) in str(error)
        else:
            assert saved.data == {"at": 12}
            assert_same(jax.tree.leaves(saved.tree), jax.tree.leaves(state))
    assert refused >= 2, "else nothing was tried"


def test_an_error_names_what_came_first(tmp_path):
    saver, because = Checkpointer(tmp_path), f"{tmp_path}: ValueError: bad"
    with pytest.raises(CheckpointError, match=because), saver._errors("no, not from"):
        raise KeyError("Orbax knows no handler") from ValueError("bad")


# Signals.


def test_an_elastic_job_saves_and_restores_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(elastic.FOLDER, "somewhere")
    saver, state = Checkpointer(tmp_path, save_every=1), {"x": np.arange(3)}
    monkeypatch.setattr("jax.process_count", lambda: 2)
    for name, given in (("save", (1, state, {})), ("restore", (state, {}))):
        with pytest.raises(CheckpointError, match=f"--elastic cannot {name}"):
            getattr(saver, name)(*given)


@pytest.mark.parametrize("at", [(3, 0), (3, 1), (1, 1)])
def test_all_that_are_open_save_the_same_step_when_sigterm_comes(tmp_path, at):
    """Two models of which one is a step ahead could not go on."""
    before, tree = signal.getsignal(signal.SIGTERM), {"x": np.arange(3)}
    with contextlib.ExitStack() as opened:
        open_in = lambda name: opened.enter_context(Checkpointer(tmp_path / name))
        *both, best, _ = map(open_in, ("a", "b", "best", "only read"))
        best.save(0, tree, {})  # not in every step
        for step in range(1, 9):
            for i, checkpointer in enumerate(both):
                if at == (step, i):
                    os.kill(os.getpid(), signal.SIGTERM)
                checkpointer.save(step, tree, {})
            if any(x.is_preempted for x in both):
                break
        assert step <= at[0] + 1
        assert [x.steps[-1:] for x in both] == [[step], [step]]
    assert signal.getsignal(signal.SIGTERM) == before


# Processes that are killed.

SCRIPT = str(Path(__file__).with_name("_resumable.py"))
KILLS = 3


def start(*arguments, processes=1, restarts=0):
    launch = f"-m gravac_jax.launch --restarts {restarts} -n {processes}".split()
    command = [sys.executable, *(launch if processes > 1 else [])]
    command += [SCRIPT, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes)


def lines_until(process, pattern, times=1):
    """Return the lines that a process writes until some of them match."""
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        times -= bool(re.match(pattern, line))
        if not times:
            return lines
    raise AssertionError(f"it ended without {pattern}: {lines}")


def ends(process):
    """Return the last line of each process of a job that ends with success."""
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    return sorted(re.findall(r"end .*", output))


@pytest.mark.slow
def test_two_processes_that_are_stopped_go_on(tmp_path):
    """One is killed while they save, then the other one, then SIGTERM stops both."""
    whole, cut = start(tmp_path / "whole", 20, processes=2), tmp_path / "cut"
    run = start(cut, 20, 0.3, processes=2, restarts=2)
    try:
        for at, victim in {"step 3$": 0, "step 6$": 1}.items():
            lines_until(run, at)
            time.sleep(0.1 * (1 - victim))
            find = ["pgrep", "-f", "--", f"--process {victim} .*{cut}"]
            os.kill(int(subprocess.check_output(find)), signal.SIGKILL)
        lines_until(run, "step 10$")
        run.send_signal(signal.SIGTERM)
        output, errors = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 0
    for victim, restart in enumerate(("1 of 2 in 1 s", "2 of 2 in [12] s")):
        said = f"process {victim} of 2 .* was killed by SIGKILL; the others were ended"
        assert re.search(f"{said}; restart {restart}\n", errors)
    (stopped,) = re.findall(r"preempted (\d+)", output)
    assert 10 <= int(stopped) < 20
    again = start(cut, 20, processes=2)
    assert lines_until(again, "restored")[-1] == f"restored {stopped}"
    assert ends(again) == ends(whole)
    fewer = start(cut, 20)
    assert lines_until(fewer, "restored")[-1] == "restored 18"
    assert len(ends(fewer)) == 1


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_from_the_last_whole_checkpoint(tmp_path):
    steps, torn = 16 * KILLS, set()
    whole = start(tmp_path / "whole", steps)
    restored = []
    unfinished = lambda: set((tmp_path / "cut").glob("*tmp*"))
    for kill in range(KILLS):
        run = start(tmp_path / "cut", steps, 0.02)
        lines = lines_until(run, "step", times=3)
        restored += [int(x.split()[1]) for x in lines if x.startswith("restored")]
        left = unfinished()
        time.sleep(0.2 * kill / KILLS)  # it writes, or has written
        while kill and unfinished() <= left:  # surely it writes
            assert run.poll() is None, "else it saved nothing"
        run.kill()
        run.communicate()
        torn |= unfinished()
    assert torn, "else none was killed while it saved"
    assert restored, "else it never began again"
    assert all(step % 3 == 0 for step in restored)
    assert ends(start(tmp_path / "cut", steps)) == ends(whole)
    assert not unfinished(), "else killed runs fill the disk"
