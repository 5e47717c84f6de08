"""What goes wrong with checkpoints: states that do not fit, files, disks, signals."""

import gc
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
import orbax.checkpoint as ocp
import pytest
from _harness import assert_same, choices
from flax import nnx

import gravac_jax as gravac
from gravac_jax.checkpoint import Checkpointer, CheckpointError

N = 4
RNG = np.random.default_rng(0)
PARAMS = {
    "b": np.zeros(16, np.float32),
    "w": RNG.normal(size=(24, 16)).astype(np.float32),
}

# Orbax leaves coroutines behind where it fails to restore.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True, scope="module")
def collected():
    """Collect them here: Python 3.11 fails if it does so while it parses a file."""
    yield
    gc.collect()


def begin(params=PARAMS, where=N, after=None, **recipe):
    compress = jax.tree.map(lambda x: np.ndim(x) == 2, params)
    usual = {
        "send": gravac.TopK(4),
        "memory": gravac.Momentum(0.5),
        "compress": compress,
    }
    tx = optax.chain(gravac.transform(**usual | recipe), after or optax.sgd(0.1))
    return gravac.place((params, tx.init(params)), where)


def filled(state):
    """Return the state with a residual that no other call returns."""
    draw = lambda x: jnp.asarray(RNG.normal(size=x.shape), x.dtype)
    transform, *others = state[1]
    memory = jax.tree.map(draw, transform.local.memory)
    local = transform.local._replace(memory=memory)
    return state[0], (transform._replace(local=local), *others)


def save(directory, state, data=None, step=1):
    with Checkpointer(directory, save_every=1) as checkpointer:
        checkpointer.save(step, state, state[0], data)


def restore(directory, state, step=None):
    with Checkpointer(directory, save_every=1) as checkpointer:
        return checkpointer.restore(state, state[0], step)


# States that do not fit are refused, and nothing changes.

OTHERS = {
    "another shape": (
        {"params": PARAMS | {"w": np.zeros((16, 24), np.float32)}},
        r"0/w is float32\(24, 16\) in the checkpoint and float32\(16, 24\) here",
    ),
    "another leaf": (
        {"params": PARAMS | {"new": np.zeros(3, np.float32)}},
        r"0/new is missing in the checkpoint and float32\(3,\) here",
    ),
    "another dtype": (
        {"params": jax.tree.map(lambda x: x.astype(np.float16), PARAMS)},
        r"0/b is float32\(16,\) in the checkpoint and float16\(16,\) here",
    ),
    "another optimizer": ({"after": optax.adam(0.1)}, "1/1/0/count is missing"),
    "no momentum": (
        {"memory": None},
        r"1/0/memory/velocity/w is \(24, 16\) for each replica in the checkpoint",
    ),
    "Adam": (
        {"memory": gravac.OwnOptimizer(optax.scale_by_adam())},
        "memory/optimizer/count.*gravac.flush",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_does_not_fit_is_refused_by_name(tmp_path, other):
    recipe, complaint = OTHERS[other]
    save(tmp_path, begin())
    state = begin(**recipe)
    before = jax.tree.map(np.array, state)
    with pytest.raises(ValueError, match=complaint):
        restore(tmp_path, state)
    assert_same(jax.tree.map(np.asarray, state), before)


def test_what_orbax_saved_by_itself_is_refused_with_a_way_on(tmp_path):
    state = begin()
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"params": state[0]}))
        manager.wait_until_finished()
    with pytest.raises(CheckpointError, match=r"begin with its params, step\.init"):
        restore(tmp_path, state)


@pytest.mark.parametrize("other", [{}, *(x for x, _ in OTHERS.values())])
def test_another_version_is_refused_before_anything_is_compared(
    tmp_path, monkeypatch, other
):
    monkeypatch.setattr("gravac_jax.checkpoint._format.VERSION", 7)
    params, opt_state = begin()
    # Version 7 had a factor where this one has a checksum.
    save(tmp_path, (params, optax.tree.set(opt_state, ladder=jnp.ones(1))))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"version 7, and this .* \(gravac.flush\)"):
        restore(tmp_path, begin(**other))


def refused():
    state, params = begin(), PARAMS
    optimizer = nnx.Optimizer(
        nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
        gravac.transform(send=gravac.Bits(2)),
        wrt=nnx.Param,
    )
    of_pmap = jax.tree.map(lambda x: jnp.stack([x] * N), begin(where=1))
    # Not placed, it goes through pmap as if it were the same on all devices.
    numbers = jax.pmap(lambda i: i[None], "r", out_axes=None)(jnp.arange(N))
    mixed = optax.tree.set(begin(where=1), replica=numbers)
    named = lambda x: {"state": state, "bad": x}
    return {
        "other params": (
            state,
            {**params, "w": params["w"][:3]},
            "not the params that",
        ),
        "pmap": (of_pmap, params, "gravac.data_parallel"),
        "pmap without an axis": (mixed, params, "give the optimizer state axis 0"),
        "on the host": (jax.device_get(state), params, "gravac.place makes it"),
        "split": (nnx.split(optimizer)[1], params, "pass the nnx.Optimizer itself"),
        "two of a name": ({"a.b": 1, "a": {"b": 2}}, params, "a.b"),
        "an array": (jnp.ones(3), params, "put a single array into a dict"),
        "True": (named(True), params, "holds a bool at bad"),
        "text": (named("text"), params, "holds a str at bad"),
        "int4": (named(jnp.zeros(3, jnp.int4)), params, "int4 at bad"),
        "too large": (named(2**64), params, "holds a int at bad"),
    }


@pytest.mark.parametrize("name", refused())
def test_a_state_that_cannot_be_saved_is_refused_and_nothing_written(tmp_path, name):
    tree, params, complaint = refused()[name]
    with (
        Checkpointer(tmp_path, save_every=1) as checkpointer,
        pytest.raises((TypeError, ValueError), match=complaint),
    ):
        checkpointer.save(1, tree, params)
    assert not list(tmp_path.rglob("*_METADATA"))


WRONG_ORDER = r"write save\(step, tree, params\)"
SWAPPED = r"`params` holds .*save\(step, \(params.*restore\(\(params"


@pytest.mark.parametrize(
    ("step", "data", "complaint"),
    [
        *((1, data, "JSON gives") for data in ({1, 2}, b"x", {0: 1}, {"at": (1, 2)})),
        *((step, None, WRONG_ORDER) for step in (-1, 1.5, "5", 1.0, (PARAMS,))),
    ],
    ids=str,
)
def test_bad_arguments_of_save_are_refused(tmp_path, step, data, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        save(tmp_path, ({"w": np.ones(3)},), data, step)


@pytest.mark.parametrize("argument", ["save_every", "keep"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_bad_numbers_are_refused_before_anything_is_made(tmp_path, argument, value):
    with pytest.raises(ValueError, match=argument):
        Checkpointer(tmp_path / "new", **{argument: value})
    assert not (tmp_path / "new").exists()


def test_what_is_not_there_cannot_be_restored(tmp_path):
    state = begin()
    with Checkpointer(tmp_path, save_every=1) as checkpointer:
        with pytest.raises(ValueError, match=SWAPPED):
            checkpointer.save(1, PARAMS, state)
        checkpointer.save(1, state, PARAMS)
        with pytest.raises(ValueError, match=SWAPPED):
            checkpointer.restore(PARAMS, state)
        for step in (-1, 1.5, "5"):
            message = rf"no checkpoint of step {step}.*of \[1\]"
            with pytest.raises(CheckpointError, match=message):
                checkpointer.restore(state, PARAMS, step)


# Several runs in one directory.


def test_a_run_that_goes_back_deletes_later_checkpoints_with_a_warning(tmp_path):
    state = filled(begin())
    with Checkpointer(tmp_path, save_every=10, keep=2) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state, PARAMS)
    # A run that restored none cannot tell which of them belong to it.
    with pytest.raises(CheckpointError, match=r"step 25 cannot.*30\].*Restore one"):
        save(tmp_path, state, step=25)
    with Checkpointer(tmp_path, save_every=5, keep=2) as checkpointer:
        saved = checkpointer.restore(begin(), PARAMS, np.int64(20))
        with pytest.warns(UserWarning, match=r"went back to step 20.*\[30\]"):
            assert checkpointer.save(25, saved.tree, PARAMS)
        checkpointer.wait()
        assert checkpointer.steps == [20, 25]
    save(tmp_path, state, step=40)


def test_others_may_read_while_one_saves(tmp_path):
    state = filled(begin())
    with Checkpointer(tmp_path, save_every=1) as writer:
        reader = Checkpointer(tmp_path)
        assert reader.restore(begin(), PARAMS) is None
        for step in (1, 2):
            writer.save(step, state, PARAMS)
            Checkpointer(tmp_path).close()
            writer.wait()
            assert reader.restore(begin(), PARAMS).step == step
        reader.close()


def test_a_state_of_many_sharded_arrays_is_saved(tmp_path):
    """Its checksums have collectives, which deadlock if many begin at once."""
    mesh = jax.make_mesh((8,), ("data",))
    put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    params, opt_state = begin(where=mesh)
    many = {f"w{i}": put(np.full((8, 4096), i, np.float32)) for i in range(100)}
    state = (params, opt_state, many)
    with Checkpointer(tmp_path, save_every=1) as checkpointer:
        checkpointer.save(1, state, params)
        assert_same(checkpointer.restore(state, params).tree, state)


# Directories and disks.


def test_a_directory_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run cannot be used"):
        Checkpointer(tmp_path / "file" / "run")


def test_a_full_disk_raises_and_earlier_checkpoints_stay(tmp_path):
    first = filled(begin())
    save(tmp_path, first)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        checkpointer = Checkpointer(tmp_path, save_every=1)
        assert checkpointer.save(2, filled(begin()), PARAMS)
        with pytest.raises(CheckpointError, match=r"of step 2 in .* cannot be saved"):
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    saved = restore(tmp_path, begin())
    assert saved.step == 1
    assert_same(jax.tree.leaves(saved.tree), jax.tree.leaves(first))
    # Threads of the save that failed may still write for a moment: not step 2 again.
    assert checkpointer.save(3, first, PARAMS), "the run goes on and saves again"
    checkpointer.close()
    assert restore(tmp_path, begin()).step == 3


# Files that are not as they were written.


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "truncated":
        data = data[: len(data) // 2]
    elif data:
        at = RNG.integers(len(data))
        data[at] ^= 1 << RNG.integers(8)
    path.write_bytes(data)


HOWS = ["missing", "truncated", "one bit"]


@pytest.mark.parametrize("how", choices(HOWS, lambda x: x == "one bit"))
def test_a_damaged_file_is_noticed_or_does_no_harm(tmp_path, how):
    state = filled(begin())
    save(tmp_path / "whole", state, data={"at": 12})
    files = [x for x in (tmp_path / "whole").rglob("*") if x.is_file()]
    refused = 0
    for i, file in enumerate(files * 2):
        directory = tmp_path / f"{i}"
        shutil.copytree(tmp_path / "whole", directory)
        damage(directory / file.relative_to(tmp_path / "whole"), how)
        try:
            saved = restore(directory, begin())
        except CheckpointError as error:
            refused += str(directory) in str(error)
        else:
            assert saved.data == {"at": 12}
            assert_same(jax.tree.leaves(saved.tree), jax.tree.leaves(state))
    assert refused >= 2, "else nothing was tried"


def test_if_the_last_checkpoint_is_damaged_an_earlier_one_can_be_restored(tmp_path):
    state = filled(begin())
    with Checkpointer(tmp_path, save_every=1) as checkpointer:
        for step in (0, 1, 2):
            checkpointer.save(step, state, state[0])
    largest = max((tmp_path / "2").rglob("d/*"), key=lambda x: x.stat().st_size)
    damage(largest, "truncated")  # not every bit matters
    with pytest.raises(CheckpointError, match=r"of step 2 in .* cannot be read"):
        restore(tmp_path, begin())
    with pytest.raises(CheckpointError, match=r"Try restore\(.*step.* of \[0, 1\]"):
        restore(tmp_path, begin())
    with Checkpointer(tmp_path, save_every=1) as checkpointer:
        saved = checkpointer.restore(begin(), PARAMS, 1)
        assert_same(jax.tree.leaves(saved.tree), jax.tree.leaves(state))
        with pytest.warns(UserWarning, match="went back to step 1"):
            assert checkpointer.save(2, saved.tree, PARAMS), "the damaged one is gone"
    assert restore(tmp_path, begin()).step == 2


# Processes that are killed.

SCRIPT = str(Path(__file__).with_name("_resumable.py"))
KILLS = 4


def start(*arguments, processes=1, grace=60):
    launch = ["-m", "gravac_jax.launch", "--grace", str(grace), "-n", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else [])]
    return subprocess.Popen(
        [*command, SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the run `whole`."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(folder):
    """How a run of 20 steps in two processes ends that nobody stops."""
    return ends(start(folder, 20, processes=2))


@pytest.mark.slow
def test_sigterm_saves_and_ends_well_and_the_next_start_goes_on(tmp_path, whole):
    run = start(tmp_path / "cut", 20, 0.3, processes=2)
    try:
        lines_until(run, "step 4$")
        run.send_signal(signal.SIGTERM)
        output = run.communicate(timeout=300)[0]
    finally:
        run.kill()
    assert run.returncode == 0
    (stopped,) = re.findall(r"preempted (\d+)", output)
    assert 4 <= int(stopped) < 20
    again = start(tmp_path / "cut", 20, processes=2)
    assert lines_until(again, "restored")[-1] == f"restored {stopped}"
    assert ends(again) == whole


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_from_the_last_whole_checkpoint(tmp_path):
    steps, torn = 16 * KILLS, set()
    whole = ends(start(tmp_path / "whole", steps))
    restored = []
    unfinished = lambda: set((tmp_path / "cut").glob("*tmp*"))
    for kill in range(KILLS):
        run = start(tmp_path / "cut", steps, 0.02)
        lines = lines_until(run, "step", times=3)
        restored += [int(x.split()[1]) for x in lines if x.startswith("restored")]
        left = unfinished()
        time.sleep(0.2 * kill / KILLS)  # it writes, or has written
        while kill % 2 and unfinished() <= left:  # surely it writes
            assert run.poll() is None, "else it saved nothing"
        run.kill()
        run.communicate()
        torn |= unfinished()
    assert torn, "else none was killed while it saved"
    assert restored, "else it never began again"
    assert all(step % 3 == 0 for step in restored)
    assert ends(start(tmp_path / "cut", steps)) == whole
    assert not unfinished(), "else killed runs fill the disk"


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "pause"), [(0, 0.1), (1, 0.0)])
def test_one_of_several_killed_while_all_save_does_no_harm(
    tmp_path, victim, pause, whole
):
    # The other one waits for the victim in a collective until it is killed, too.
    run = start(tmp_path / "cut", 20, 0.2, processes=2, grace=1)
    try:
        lines_until(run, "step 3$")
        time.sleep(pause)
        children = subprocess.run(
            ["pgrep", "-f", "--", f"--process {victim} .*{tmp_path / 'cut'}"],
            capture_output=True,
            text=True,
            check=True,
        )
        (pid,) = children.stdout.split()
        subprocess.run(["kill", "-9", pid], check=True)
        run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 1
    again = start(tmp_path / "cut", 20, processes=2)
    assert ends(again) == whole


@pytest.mark.slow
def test_more_processes_go_on_where_fewer_stopped(tmp_path, folder, whole):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    again = start(tmp_path, 20, processes=3)
    assert lines_until(again, "restored")[-1] == "restored 18"
    assert len(ends(again)) == 3
