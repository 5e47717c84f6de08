"""Processes live and die together, here and as part of a cluster's job."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gravac_jax import launch
from gravac_jax.launch import Job, ProcessDiedError

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

LAUNCH = (sys.executable, "-m", "gravac_jax.launch")
BOUND_SECONDS = 300  # for what comes within a few, or hangs
FOREVER = ("sleep", "1000")
FOREIGN = re.compile("SLURM_|OMPI_|JAX_|KUBERNETES_|TPU_|.*_proxy", re.IGNORECASE)
ENVIRONMENT = {k: v for k, v in os.environ.items() if not FOREIGN.match(k)}


def shell(line):
    return ("sh", "-c", line)


def running(word):
    """The processes with `word` among their arguments: pid to arguments."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_text().split("\0")[:-1]
        except OSError:  # it has just ended
            continue
        if word in arguments:
            found[int(path.parent.name)] = arguments
    return found


def is_alive(pid):
    # One that has ended and that nobody has asked for has no arguments.
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and path.read_text() != ""


def until(condition):
    end = time.monotonic() + BOUND_SECONDS
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.02)


def finish(command, **env):
    """Run to the end; its exit status, output and errors."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT | env,
        timeout=BOUND_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def script(tmp_path):
    """Writes the script that a job runs, and gives its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


# A job of any commands.


def test_a_job_returns_when_all_have_ended_well():
    with Job([shell("exit 0"), shell("sleep 0.1")]) as job:
        job.wait()
    assert not any(map(is_alive, job.pids))


def test_the_process_that_fails_is_named_and_the_others_are_ended():
    with Job([FOREVER, shell("exit 3"), FOREVER]) as job:
        with pytest.raises(ProcessDiedError) as error:
            job.wait()
        named = f"process 1 of 3 (pid {job.pids[1]}) exited with status 3"
        assert str(error.value) == named
        assert not any(map(is_alive, job.pids))


def test_a_killed_process_is_named_before_those_that_fail_for_it():
    with Job([shell("exit 1"), shell("kill -9 $$"), shell("kill -6 $$")]) as job:
        until(lambda: not any(map(is_alive, job.pids)))
        with pytest.raises(ProcessDiedError, match=r"^process 1 .* killed by SIGKILL$"):
            job.wait()


def test_a_job_out_of_time_is_ended():
    with Job([FOREVER, FOREVER]) as job:
        with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
            job.wait(timeout_seconds=0.1)
        assert not any(map(is_alive, job.pids))


def test_leaving_the_with_ends_what_still_runs():
    with Job([FOREVER, FOREVER]) as job:
        assert all(map(is_alive, job.pids))
    assert not any(map(is_alive, job.pids))


def test_what_does_not_want_to_end_is_killed(tmp_path):
    deaf = shell(f"trap '' TERM; touch {tmp_path}/deaf; while :; do sleep 0.1; done")
    with Job([deaf], grace_seconds=0.2) as job:
        until((tmp_path / "deaf").exists)
    assert not any(map(is_alive, job.pids))


def test_what_a_process_leaves_behind_ends_with_the_job(tmp_path):
    with Job([shell(f"sleep 1000 & echo $! > {tmp_path}/pid")]) as job:
        job.wait()
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not is_alive(pid))


def test_a_command_that_cannot_start_ends_those_that_have(tmp_path):
    word = str(tmp_path)
    other = (sys.executable, "-c", "import time; time.sleep(1000)", word)
    with pytest.raises(FileNotFoundError):
        Job([other, other, (str(tmp_path / "missing"),)])
    assert not running(word)


def test_lines_of_all_but_the_first_process_are_marked(capfd):
    others = shell("echo out; echo error >&2; printf 'no end'")
    with Job([shell("echo out; echo error >&2"), others, others]) as job:
        job.wait()
    output, errors = map(str.splitlines, capfd.readouterr())
    marked = [f"[{i}] {line}" for i in (1, 2) for line in ("no end", "out")]
    assert sorted(output) == [*marked, "out"]
    assert sorted(errors) == ["[1] error", "[2] error", "error"]


def test_much_output_is_passed_on_whole(capfd):
    many = 200_000
    write = (
        f"import sys; sys.stdout.write('\\n' * {many}); sys.stderr.write('x' * {many})"
    )
    with Job([shell("exit 0"), (sys.executable, "-c", write)]) as job:
        job.wait()
    output, errors = capfd.readouterr()
    assert output == "[1] \n" * many
    assert errors == f"[1] {'x' * many}\n"


def test_a_job_does_not_outlive_the_one_who_started_it(tmp_path):
    word = str(tmp_path)
    sleeper = f"{sys.executable} -c 'import time; time.sleep(1000)' {word}"
    parent = shell(f"{sleeper} & wait")
    text = f"from gravac_jax.launch import Job; Job([{parent}] * 2).wait()"
    launcher = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE)
    until(lambda: len(running(word)) == 2)
    launcher.kill()
    _, errors = launcher.communicate(timeout=BOUND_SECONDS)
    assert errors.decode() == (
        f"the launcher (pid {launcher.pid}) is gone; its processes end\n"
    )
    until(lambda: not running(word) and not running(str(launcher.pid)))


# The command line.


@pytest.mark.parametrize(
    ("options", "complaint"),
    {
        "": "arguments are required: script",
        "-n 0 SCRIPT": "-n: must be a number from 1 on, got 0",
        "--devices x SCRIPT": "--devices: must be a number from 1 on, got x",
        "-n 2 --coordinator a:1 --local-devices 0 SCRIPT": "leave out --coordinator, "
        "--local-devices, or -n",
        "--coordinator a SCRIPT": "--coordinator: must be HOST:PORT, got a",
        "--local-devices 0,x SCRIPT": "--local-devices: must be numbers, as 0,1, got",
        "--process -1 SCRIPT": "--process must be from 0, got -1",
        "--process 4 --processes 4 SCRIPT": "--process must be from 0 to 3, got 4",
        "-n 2 missing.py": "there is no script missing.py",
        "-n 2 -m missing.module": "there is no module missing",
    }.items(),
)
def test_options_that_make_no_sense_are_refused(options, complaint, script, capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(options.replace("SCRIPT", script("")).split())
    assert complaint in capsys.readouterr().err


def test_a_process_alone_is_told_what_to_do(script):
    status, output, errors = finish([*LAUNCH, script("print('never')")])
    assert (status, output, errors.count("\n")) == (1, "", 1)
    assert "give them, or rehearse on this machine with -n N" in errors


# Jobs of jax.

SAY = """
import json, sys, jax
from jax.experimental import multihost_utils
everybody = multihost_utils.process_allgather(jax.process_index()).tolist()
devices = jax.local_device_count(), jax.config.values["jax_cuda_visible_devices"]
print(json.dumps([__name__, sys.argv[1:], sys.path[0], everybody, *devices]))
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def said(output):
    decode = json.JSONDecoder().raw_decode
    return [decode(output, x.start())[0] for x in re.finditer('\\["__main__"', output)]


def test_a_rehearsal_runs_the_script_as_python_would(script, tmp_path):
    own = ["--lr", "1", "-n", "--", "x"]
    command = [*LAUNCH, "-n", "2", "--devices", "3", script(SAY), *own]
    # Whoever asks a proxy for a process of this machine waits for ever.
    status, output, errors = finish(command, http_proxy="http://127.0.0.1:9")
    assert status == 0, errors
    expected = ["__main__", own, str(tmp_path), [0, 1], 3]
    assert sorted(said(output)) == [[*expected, "0"], [*expected, "1"]]
    assert output.count('[1] ["__main__') == 1
    assert re.search(r"launch: 2 processes, coordinator 127.*; 6 cpu devices\n", errors)


def by_hand(commands, **envs):
    """What two processes, started one by one, leave behind."""
    env = [ENVIRONMENT | {k: v[i] for k, v in envs.items()} for i in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen(command, env=own, **pipes)
        for command, own in zip(commands, env, strict=True)
    ]
    return [(*x.communicate(timeout=BOUND_SECONDS), x.returncode) for x in both]


def test_processes_started_one_by_one_find_each_other(script, tmp_path):
    job = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2"]
    text = script(SAY)
    both = by_hand([[*LAUNCH, *job, "--process", i, text] for i in "01"])
    assert [status for *_, status in both] == [0, 0], both
    expected = ["__main__", [], str(tmp_path), [0, 1], 1]
    assert [said(x) for x, *_ in both] == [[[*expected, "all"]]] * 2
    assert ["launch: 2 processes" in errors for _, errors, _ in both] == [True, False]


def test_the_tasks_of_a_slurm_step_find_each_other(script, tmp_path):
    port = free_port()
    both = by_hand(
        [[*LAUNCH, script(SAY)]] * 2,
        SLURM_JOB_ID=["77", "77"],
        SLURM_STEP_NODELIST=["localhost", "localhost"],
        SLURM_NTASKS=["2", "2"],
        SLURM_PROCID=["0", "1"],
        SLURM_LOCALID=["0", "1"],
        JAX_COORDINATOR_PORT=[port, port],
    )
    assert [status for *_, status in both] == [0, 0], both
    expected = ["__main__", [], str(tmp_path), [0, 1], 1]
    assert [said(x) for x, *_ in both] == [[[*expected, i]] for i in "01"]
    assert "2 processes, found by Slurm (SLURM_JOB_ID=77); 2 cpu" in both[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "status", "line"),
    [
        ("raise ValueError('one of us')", 1, "ValueError: one of us"),
        ("print('no data', file=sys.stderr); sys.exit(3)", 3, "no data"),
    ],
)
def test_a_script_that_fails_in_one_process_ends_the_job(fails, status, line, script):
    text = f"import sys, time, jax\nif jax.process_index() == 1:\n    {fails}\n"
    command = [*LAUNCH, "-n", "2", script(text + "time.sleep(1000)")]
    launcher_status, _, errors = finish(command)
    assert launcher_status == 1
    assert f"[1] {line}\n" in errors
    *_, last = errors.splitlines()
    assert re.fullmatch(
        r"gravac_jax.launch: process 1 of 2 \(pid \d+\) exited with status "
        rf"{status}; the others were ended",
        last,
    )


@pytest.mark.slow
def test_a_module_is_found_where_the_job_starts(script, tmp_path):
    script(SAY)
    command = ["sh", "-c", f'cd {tmp_path} && exec "$@"', "sh"]
    command += [*LAUNCH, "-n", "2", "-m", "script", "--lr", "1"]
    status, output, errors = finish(command)
    assert status == 0, errors
    expected = ["__main__", ["--lr", "1"], str(tmp_path), [0, 1], 1]
    assert sorted(said(output)) == [[*expected, "0"], [*expected, "1"]]


@pytest.mark.slow
def test_a_process_may_end_before_the_others(script):
    text = "import time, jax\ntime.sleep(3 * jax.process_index())\nprint('done')"
    status, output, errors = finish([*LAUNCH, "-n", "2", script(text)])
    assert status == 0, errors
    assert output.count("done") == 2


TIMED = """
import jax, jax.numpy as jnp, numpy as np, optax
import gravac_jax as gravac

mesh = jax.make_mesh((jax.device_count(),), ("data",))
exchange = gravac.transform(controller=gravac.Fastest((1, 4, 16)), compress=True)
tx = optax.chain(exchange, optax.sgd(0.01))

def train_step(params, opt_state, batch, **times):
    loss = lambda params, batch: jnp.mean((batch @ params) ** 2)
    value, grads = gravac.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params, **times)
    return optax.apply_updates(params, updates), opt_state, value

params = jnp.ones((32, 8))
state = gravac.place((params, tx.init(params)), mesh)
step, clock = gravac.data_parallel(train_step, mesh), gravac.StepClock()
batch = np.random.default_rng(jax.process_index()).random((4, 32), np.float32)
for _ in range(20):
    *state, loss = step(*state, batch, **clock.times())
    clock.record(loss)
timing = state[1][0].controller.timing
print("times", int(timing.times), float(timing.seconds), "rung", int(state[1][0].rung))
"""


@pytest.mark.slow
def test_each_process_measures_its_own_steps_and_all_decide_alike(script):
    status, output, errors = finish([*LAUNCH, "-n", "2", script(TIMED)])
    assert status == 0, errors
    one, other = re.findall(r"times (\d+) (\S+) rung (\d+)", output)
    assert one == other
    assert int(one[0]) > 5


LOOP = """
import jax, jax.numpy as jnp, numpy as np, optax
import gravac_jax as gravac

mesh = jax.make_mesh((jax.device_count(),), ("data",))
controller = gravac.GraVAC(ladder=(1, 4, 16), window=5)
exchange = gravac.transform(controller=controller, compress=True)
tx = optax.chain(exchange, optax.sgd(0.01))

def train_step(params, opt_state, batch):
    loss = lambda params, batch: jnp.mean((batch @ params) ** 2)
    value, grads = gravac.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

params = jnp.ones((32, 8))
state = gravac.place((params, tx.init(params)), mesh)
step = gravac.data_parallel(train_step, mesh)
batch = np.random.default_rng(jax.process_index()).random((4, 32), np.float32)
for i in range(10**9):
    *state, loss = step(*state, batch)
    if i == 50:
        print("in the middle", float(loss), flush=True)
"""


@pytest.fixture
def start():
    """Starts a job, and returns when all of it is in the middle of what never ends."""
    launchers = []
    # A shell's background jobs ignore Ctrl-C, and so would all that they start.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(path, processes=3):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [*LAUNCH, "-n", str(processes), path]
        launchers.append(subprocess.Popen(command, env=ENVIRONMENT, **pipes))
        for _ in range(processes):
            until(lambda: "in the middle" in launchers[-1].stdout.readline())
        return launchers[-1]

    yield start
    signal.signal(signal.SIGINT, ignored)
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


def nothing_runs(path, launcher):
    return not running(path) and not running(str(launcher.pid))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_killing_any_process_ends_the_job_and_names_it(rank, script, start):
    path = script(LOOP)
    launcher = start(path)
    own = ["--process", str(rank)]
    find = lambda words: any(words[i : i + 2] == own for i in range(len(words)))
    [pid] = [pid for pid, words in running(path).items() if find(words)]
    os.kill(pid, signal.SIGKILL)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert errors.splitlines()[-1] == (
        f"gravac_jax.launch: process {rank} of 3 (pid {pid}) was killed by SIGKILL; "
        "the others were ended"
    )
    assert nothing_runs(path, launcher)


@pytest.mark.slow
def test_killing_the_launcher_ends_the_job(script, start):
    path = script(LOOP)
    launcher = start(path)
    launcher.kill()
    _, errors = launcher.communicate(timeout=30)
    assert f"the launcher (pid {launcher.pid}) is gone; its processes end\n" in errors
    until(lambda: nothing_runs(path, launcher))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_the_job(number, script, start):
    path = script("import time; print('in the middle'); time.sleep(1000)")
    launcher = start(path, processes=2)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert errors.splitlines()[-1] == (
        f"gravac_jax.launch: {number.name}; all processes were ended"
    )
    assert nothing_runs(path, launcher)


LOCK_STEP = """
import hashlib, json, pathlib, sys, jax, jax.numpy as jnp, numpy as np, optax
import gravac_jax as gravac

mesh = jax.make_mesh((jax.device_count(),), ("data",))
controller = gravac.GraVAC(epsilon=0.2, ladder=(1, 4, 16, 64), window=5)
exchange = gravac.transform(controller=controller, compress=True)
tx = optax.chain(exchange, optax.sgd(0.05))

def loss_of(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["inner"]) @ params["outer"] - y) ** 2)

def train_step(params, opt_state, batch):
    loss, grads = gravac.value_and_grad(loss_of)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

def own_copy(x):
    return np.asarray(x.addressable_shards[0].data)

normal = np.random.default_rng(0).normal
params = {"inner": normal(size=(64, 64)) / 8, "outer": normal(size=(64, 16)) / 8}
params = jax.tree.map(np.float32, params)
state = gravac.place((params, tx.init(params)), mesh)
step = gravac.data_parallel(train_step, mesh)
normal = np.random.default_rng([1, jax.process_index()]).normal
factors = []
for _ in range(1000):
    batch = np.float32(normal(size=(8, 64))), np.float32(normal(size=(8, 16)))
    *state, loss = step(*state, batch)
    factors.append(own_copy(optax.tree.get(state[1], "StepInfo").factor).item())
params = b"".join(own_copy(x).tobytes() for x in jax.tree.leaves(state[0]))
digests = [hashlib.sha256(x).hexdigest() for x in (params, batch[0].tobytes())]
out = pathlib.Path(sys.argv[1], f"{jax.process_index()}.json")
out.write_text(json.dumps([factors, *digests]))
"""


@pytest.mark.slow
def test_four_processes_go_in_lock_step_for_a_thousand_steps(script, tmp_path):
    status, _, errors = finish([*LAUNCH, "-n", "4", script(LOCK_STEP), str(tmp_path)])
    assert status == 0, errors
    reports = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(4)]
    factors, params, data = zip(*reports, strict=True)
    assert len(factors[0]) == 1000
    assert set(factors[0]) >= {4, 16, 64}
    assert all(other == factors[0] for other in factors)
    assert len(set(params)) == 1
    assert len(set(data)) == 4
