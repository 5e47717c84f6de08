"""The launcher: processes live and die together, on one machine or on a cluster."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gravac_jax import launch
from gravac_jax.launch import Job, ProcessDiedError, local_coordinator

pytestmark = pytest.mark.xdist_group("processes")  # one test of them at a time

LAUNCH = (sys.executable, "-m", "gravac_jax.launch")
BOUND_SECONDS = 300  # for what takes a few seconds, or hangs
FOREVER = ("sleep", "1000")
FOREIGN = re.compile("SLURM_|OMPI_|JAX_|KUBERNETES_|TPU_|.*_proxy", re.IGNORECASE)
ENVIRONMENT = {k: v for k, v in os.environ.items() if not FOREIGN.match(k)}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def shell(line):
    return ("sh", "-c", line)


def running(word):
    """The processes that have `word` among their arguments: {pid: arguments}."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_text().split("\0")[:-1]
        except OSError:  # the process has just ended
            continue
        if word in arguments:
            found[int(path.parent.name)] = arguments
    return found


def is_alive(pid):
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and path.read_text() != ""  # a zombie has no arguments


def wait_until(condition):
    end = time.monotonic() + BOUND_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def finish(*command, **env):
    """Run a command to its end; return its exit status, output and errors."""
    process = subprocess.Popen(command, env=ENVIRONMENT | env, **PIPES)
    output, errors = process.communicate(timeout=BOUND_SECONDS)
    return process.returncode, output, errors


@pytest.fixture
def script(tmp_path):
    """A function that writes the script of a job and returns its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


# Jobs of any commands.


def test_a_failing_process_is_named_and_the_others_are_ended():
    with Job([FOREVER, shell("exit 3"), FOREVER]) as job:
        with pytest.raises(ProcessDiedError) as error:
            job.wait()
        named = f"process 1 of 3 (pid {job.pids[1]}) exited with status 3"
        assert str(error.value) == named
        assert not any(map(is_alive, job.pids))


def test_a_killed_process_is_named_rather_than_those_that_fail_because_of_it():
    with Job([shell("exit 1"), shell("kill -9 $$"), shell("kill -6 $$")]) as job:
        wait_until(lambda: not any(map(is_alive, job.pids)))
        with pytest.raises(ProcessDiedError, match=r"^process 1 .* killed by SIGKILL$"):
            job.wait()


def test_a_job_that_takes_too_long_is_ended():
    with Job([FOREVER, FOREVER]) as job:
        with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
            job.wait(timeout_seconds=0.1)
        assert not any(map(is_alive, job.pids))


def test_leaving_a_job_kills_even_processes_that_ignore_sigterm(tmp_path):
    deaf = shell(f"trap '' TERM; touch {tmp_path}/deaf; while :; do sleep 0.1; done")
    with Job([FOREVER, deaf], grace_seconds=0.2) as job:
        wait_until((tmp_path / "deaf").exists)
        assert all(map(is_alive, job.pids))
    assert not any(map(is_alive, job.pids))


def test_processes_that_a_process_leaves_behind_end_with_the_job(tmp_path):
    with Job([FOREVER, shell(f"sleep 1000 & echo $! > {tmp_path}/pid")]) as job:
        wait_until(lambda: job.statuses[1] == 0)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid))


def test_if_a_command_cannot_start_the_processes_before_it_are_ended(tmp_path):
    word = str(tmp_path)
    other = (sys.executable, "-c", "import time; time.sleep(1000)", word)
    with pytest.raises(FileNotFoundError):
        Job([other, other, (str(tmp_path / "missing"),)])
    assert not running(word)


def test_output_lines_of_all_processes_but_the_first_are_marked(capfd):
    many = 200_000
    write = f"import sys; sys.stdout.write('\\n' * {many}); sys.stderr.write('x\\nend')"
    with Job([shell("echo out; echo error >&2"), (sys.executable, "-c", write)]) as job:
        job.wait()
    assert job.statuses == [0, 0]
    output, errors = capfd.readouterr()
    assert sorted(output.splitlines()) == [*["[1] "] * many, "out"]
    assert sorted(errors.splitlines()) == ["[1] end", "[1] x", "error"]


def test_a_job_does_not_outlive_the_process_that_created_it(tmp_path):
    word = str(tmp_path)
    sleeper = f"{sys.executable} -c 'import time; time.sleep(1000)' {word}"
    parent = shell(f"{sleeper} & wait")
    text = f"from gravac_jax.launch import Job; Job([{parent}] * 2).wait()"
    creator = subprocess.Popen([sys.executable, "-c", text], **PIPES)
    wait_until(lambda: len(running(word)) == 2)
    creator.kill()
    _, errors = creator.communicate(timeout=BOUND_SECONDS)
    assert f"the launcher (pid {creator.pid}) is gone" in errors
    wait_until(lambda: not running(word) and not running(str(creator.pid)))


# The command line.


@pytest.mark.parametrize(
    ("options", "complaint"),
    {
        "": "arguments are required: script",
        "-n 2 --coordinator a:1 --local-devices 0 SCRIPT": "leave out --coordinator, "
        "--local-devices, or -n",
        "--process 4 --processes 4 SCRIPT": "to --processes - 1, got 4",
        "--coordinator a SCRIPT": "--coordinator must be HOST:PORT, got a",
        "-n 0 SCRIPT": "argument -n: must be a positive integer, got 0",
        "--local-devices a,b SCRIPT": "must be indices such as 0,1, got a,b",
        "-n 2 missing.py": "there is no script missing.py",
        "-n 2 .": "there is no script .",
    }.items(),
)
def test_wrong_options_are_refused(options, complaint, script, capsys):
    with pytest.raises(SystemExit, match="2"):
        launch.main(options.replace("SCRIPT", script("")).split())
    assert complaint in capsys.readouterr().err


def test_a_process_outside_of_any_cluster_is_told_what_to_do(script):
    status, output, errors = finish(*LAUNCH, script("print('never')"))
    assert (status, output, errors.count("\n")) == (1, "", 1)
    assert "to start a job on this machine, give -n N" in errors


# Jobs of JAX.

SAY = """
import json, sys, jax
from jax.experimental import multihost_utils
everybody = multihost_utils.process_allgather(jax.process_index()).tolist()
devices = jax.local_device_count(), jax.config.values["jax_cuda_visible_devices"]
print(json.dumps([__name__, sys.argv[1:], sys.path[0], everybody, *devices]))
"""


def said(output):
    decode = json.JSONDecoder().raw_decode
    return [decode(output, x.start())[0] for x in re.finditer('\\["__main__"', output)]


@pytest.mark.parametrize(
    "is_module", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_job_runs_the_script_as_python_would(is_module, script, tmp_path):
    own = ["--lr", "1", "-n", "--", "x"]
    what = [*LAUNCH, "-n", "2", "--devices", "3", script(SAY)]
    if is_module:
        what[-1:] = ["-m", "script"]
    command = [*shell(f'cd {tmp_path} && exec "$@"'), "sh", *what, *own]
    # The proxy answers nobody: whoever asks it for the coordinator waits for ever.
    status, output, errors = finish(*command, http_proxy="http://127.0.0.1:9")
    assert status == 0, errors
    expected = ["__main__", own, str(tmp_path), [0, 1], 3]
    assert sorted(said(output)) == [[*expected, "0"], [*expected, "1"]]
    # Gloo prints to the same pipe and may end its line late, so that it comes before.
    for line in (line for line in output.splitlines() if '["__main__"' in line):
        before, _, text = line.partition('["__main__"')
        assert ("[1] " in before) == text.endswith(', "1"]')
    assert "launch: 2 processes, 6 cpu devices\n" in errors
    assert "reached the end" not in errors


def test_the_tasks_of_a_slurm_step_find_each_other(script, tmp_path):
    slurm = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "JAX_COORDINATOR_PORT": local_coordinator().partition(":")[2],
    }
    tasks = [
        subprocess.Popen(
            [*LAUNCH, script(SAY)],
            env=ENVIRONMENT | slurm | {"SLURM_PROCID": i, "SLURM_LOCALID": i},
            **PIPES,
        )
        for i in "01"
    ]
    both = [task.communicate(timeout=BOUND_SECONDS) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], both
    expected = ["__main__", [], str(tmp_path), [0, 1], 1]
    assert [said(output) for output, _ in both] == [[[*expected, i]] for i in "01"]
    assert ["launch: 2 processes" in errors for _, errors in both] == [True, False]


@pytest.mark.slow
def test_a_script_that_fails_in_one_process_ends_the_job(script):
    text = """
import sys, time, jax
if jax.process_index() == 1:
    print("no data", file=sys.stderr)
    sys.exit(3)
time.sleep(1000)
"""
    status, _, errors = finish(*LAUNCH, "-n", "2", script(text))
    assert status == 1
    assert "[1] no data\n" in errors
    named = r"process 1 of 2 \(pid \d+\) exited with status 3; the others"
    assert re.search(named, errors.splitlines()[-1])


@pytest.mark.slow
def test_processes_may_end_before_the_others(script):
    text = "import time, jax\ntime.sleep(7 * (jax.process_index() == 1))\nprint('done')"
    status, output, errors = finish(*LAUNCH, "-n", "3", script(text))
    assert status == 0, errors
    assert output.count("done") == 3
    waits = (
        "launch: processes 0, 2 of 3 reached the end of the script, and process 1 did"
    )
    assert errors.count(waits) == errors.count("reached the end") == 1


TRAIN = """
import hashlib, json, sys, jax, jax.numpy as jnp, numpy as np, optax
import gravac_jax as gravac

tx, steps = eval(sys.argv[1]), int(sys.argv[2])
digest = lambda x: hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
loss_fn = lambda params, batch: jnp.mean((jnp.tanh(batch @ params) - 0.1) ** 2)
step = gravac.train_step(loss_fn, tx, gravac.make_mesh())
params = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8
state, rungs, losses = step.init(params), [], []
normal = np.random.default_rng([1, jax.process_index()]).normal
for i in range(steps):
    batch = np.float32(normal(size=(8, 64)))
    *state, loss = step(*state, batch)
    losses.append(float(loss.addressable_data(0).mean()))
    rung = optax.tree.get(state[1], "StepInfo").rung
    rungs.append(int(rung.addressable_data(0)))
    if i == 10:
        print("in the middle", flush=True)
params = step.flush(*state)[0].addressable_data(0)
print(json.dumps(["__main__", rungs, losses, digest(params), digest(batch)]))
"""
LADDER = "gravac.Fastest((gravac.Dense(), gravac.Bits(8), gravac.Bits(2)))"
ADAPTIVE = f"optax.chain(gravac.transform(send={LADDER}), optax.sgd(0.05))"
LATE = "gravac.adamw(1e-2, delay=1, every=4, send=gravac.Bits(2))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "processes", "steps"), [(ADAPTIVE, 3, 200), (LATE, 2, 100)]
)
def test_processes_with_different_data_keep_the_same_bits(tx, processes, steps, script):
    n = str(processes)
    status, output, errors = finish(*LAUNCH, "-n", n, script(TRAIN), tx, str(steps))
    assert status == 0, errors
    _, rungs, losses, params, data = zip(*said(output), strict=True)
    assert [len(x) for x in rungs] == [steps] * processes
    assert all(x == rungs[0] for x in rungs)
    assert len(set(rungs[0])) > 1  # a local step counts as a rung, too
    assert tx == ADAPTIVE or losses[0][-1] < 0.5 * losses[0][0]
    assert len(set(params)) == 1
    assert len(set(data)) == processes


@pytest.fixture
def start():
    """A function that starts a job and returns when all processes are training."""
    launchers = []
    # Background jobs of a shell, and all that they start, ignore Ctrl-C.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(*command):
        command = [*LAUNCH, "-n", "2", *command]
        launchers.append(subprocess.Popen(command, env=ENVIRONMENT, **PIPES))
        for _ in range(2):
            wait_until(lambda: "in the middle" in launchers[-1].stdout.readline())
        return launchers[-1]

    yield start
    signal.signal(signal.SIGINT, ignored)
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


def nothing_runs(path, launcher):
    return not running(path) and not running(str(launcher.pid))


@pytest.mark.slow
def test_killing_a_process_ends_the_job_and_names_the_process(script, start):
    path = script(TRAIN)
    launcher = start(path, ADAPTIVE, str(10**9))
    own = "--process 1 "
    [pid] = [pid for pid, words in running(path).items() if own in " ".join(words)]
    os.kill(pid, signal.SIGKILL)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    named = f"process 1 of 2 (pid {pid}) was killed by SIGKILL"
    assert named in errors.splitlines()[-1]
    assert nothing_runs(path, launcher)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "saves"), [(signal.SIGINT, False), (signal.SIGTERM, True)]
)
def test_a_signal_to_the_launcher_ends_the_job(number, saves, script, start):
    handle = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit())\n" * saves
    path = script(f"{handle}import time; print('in the middle'); time.sleep(1000)")
    launcher = start(path)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == (0 if saves else 128 + number)
    assert f"gravac_jax.launch: {number.name}; all processes have ended\n" in errors
    assert nothing_runs(path, launcher)
