"""The launcher: processes live and die together, on one machine or on a cluster."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _harness import choices, is_alive, wait_until

from gravac_jax import _job, launch
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
    """Return the processes that have `word` among their arguments: {pid: arguments}."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # where the process has just ended
            found[int(path.parent.name)] = path.read_text().split("\0")[:-1]
    return {pid: arguments for pid, arguments in found.items() if word in arguments}


def finish(*command, **env):
    """Run a command to its end; return its exit status, output and errors."""
    process = subprocess.Popen(command, env=ENVIRONMENT | env, **PIPES)
    output, errors = process.communicate(timeout=BOUND_SECONDS)
    return process.returncode, output, errors


@pytest.fixture
def script(tmp_path):
    """Return a function that writes the script of a job and returns its path."""
    path = tmp_path / "script.py"
    return lambda text: path.write_text(text) and str(path)


# Jobs of any commands.

KILLED = [shell("exit 1"), shell("kill -9 $$"), shell("kill -6 $$")]


@pytest.mark.parametrize(
    ("commands", "seconds", "said"),
    [
        ([FOREVER, shell("exit 3"), FOREVER], 60, "process 1 of 3 .* with status 3"),
        (KILLED, 60, "process 1 of 3 .* was killed by SIGKILL"),
        ([FOREVER, FOREVER], 0.1, r"the job did not end within 0\.1 s"),
    ],
)
def test_a_job_names_the_first_that_died_and_ends_the_others(commands, seconds, said):
    with Job(commands) as job:
        if commands is KILLED:  # those that fail because of it may be seen first
            wait_until(lambda: not any(map(is_alive, job.pids)))
        with pytest.raises((ProcessDiedError, TimeoutError), match=f"^{said}$") as died:
            job.wait(seconds)
        assert f"(pid {job.pids[1]})" in str(died.value) or "not end" in said
        assert not any(map(is_alive, job.pids))


def test_leaving_a_job_kills_deaf_processes_and_those_that_are_left_behind(tmp_path):
    deaf = shell(f"trap '' TERM; touch {tmp_path}/deaf; while :; do sleep 0.1; done")
    leaves = shell(f"sleep 1000 & echo $! > {tmp_path}/pid")
    with Job([FOREVER, deaf, leaves], grace_seconds=0.2) as job:
        wait_until(lambda: (tmp_path / "deaf").exists() and job.statuses[2] == 0)
        assert all(map(is_alive, job.pids[:2]))
    assert not any(map(is_alive, job.pids))
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


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


def test_wrong_options_are_refused(capsys, monkeypatch):
    for options, complaint in (
        ("", "arguments are required: script\n"),
        ("-n 2 --local-devices 0 train.py", "leave out --coordinator and the like"),
        ("-n 2 --devices 0 train.py", "counts must be at least 1"),
        ("-n 2 --min-processes 1 x", "--min-processes needs --restarts or --elastic"),
        ("-n 2 --elastic --min-processes 3 x", "and is at most N"),
        ("--restarts 1 train.py", "--restarts and --elastic need -n"),
        ("--local-devices a,b train.py", "invalid indices value: 'a,b'"),
        ("--coordinator host0 train.py", "--coordinator must be HOST:PORT, got host0"),
    ):
        with pytest.raises(SystemExit, match="2"):
            launch.main(options.split())
        assert complaint in capsys.readouterr().err
    monkeypatch.setenv(launch.FOLDER, "of a job")
    with pytest.raises(SystemExit, match="2"):
        launch.main(["--elastic", "--min-processes", "1", "train.py"])
    assert "and is at most N" in capsys.readouterr().err
    monkeypatch.setattr(launch, "_run_job", lambda options: None)
    launch.main(["-n", "2", "--elastic", "--min-processes", "1", "train.py"])


def test_a_process_outside_of_any_cluster_is_told_what_to_do(script):
    status, output, errors = finish(*LAUNCH, script("print('never')"))
    assert (status, output, errors.count("\n")) == (1, "", 1)
    assert "to start a job on this machine give -n N" in errors


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


@pytest.mark.parametrize("is_module", choices([False, True], lambda x: not x))
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
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost"}
    slurm["JAX_COORDINATOR_PORT"] = local_coordinator().partition(":")[2]
    start = lambda **own: subprocess.Popen(
        [*LAUNCH, script(SAY)], env=ENVIRONMENT | slurm | own, **PIPES
    )
    tasks = [start(SLURM_NTASKS="2", SLURM_PROCID=i, SLURM_LOCALID=i) for i in "01"]
    both = [task.communicate(timeout=BOUND_SECONDS) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], both
    expected = ["__main__", [], str(tmp_path), [0, 1], 1]
    assert [said(output) for output, _ in both] == [[[*expected, i]] for i in "01"]
    assert ["launch: 2 processes" in errors for _, errors in both] == [True, False]


@pytest.mark.slow
def test_processes_may_end_before_the_others(script):
    text = "import time, jax\ntime.sleep(7 * (jax.process_index() == 1))\nprint('done')"
    status, output, errors = finish(*LAUNCH, "-n", "3", script(text))
    assert status == 0, errors
    assert output.count("done") == 3
    waits = r"launch: process ([02]) of 3 reached the end of its script and waits"
    assert sorted(re.findall(waits, errors)) == ["0", "2"]
    assert errors.count("reached the end") == 2


TRAIN = """
import hashlib, json, sys, jax, jax.numpy as jnp, numpy as np, optax
import gravac_jax as gravac

tx, steps = eval(sys.argv[1]), int(sys.argv[2])
digest = lambda x: hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
loss_fn = lambda params, batch: jnp.mean((jnp.tanh(batch @ params) - 0.1) ** 2)
step = gravac.train_step(loss_fn, tx, gravac.make_mesh())
params = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8
state, rungs = step.init(params), []
normal = np.random.default_rng([1, jax.process_index()]).normal
for i in range(steps):
    batch = np.float32(normal(size=(8, 64)))
    *state, _ = step(*state, batch)
    rungs.append(int(optax.tree.get(state[1], "StepInfo").rung.addressable_data(0)))
    if i == 10:
        print("in the middle", flush=True)
key_of = gravac.data_parallel(lambda x, _, key: (x, key), gravac.make_mesh())
assert key_of(jnp.zeros(()), batch, key=jax.random.key(7))[1] == jax.random.key(7)
params = step.flush(*state)[0].addressable_data(0)
print(json.dumps(["__main__", rungs, digest(params), digest(batch)]))
"""
LADDER = "gravac.Fastest((gravac.Dense(), gravac.Bits(8), gravac.Bits(2)))"
ADAPTIVE = f"optax.chain(gravac.transform(send={LADDER}), optax.sgd(0.05))"
LATE = "gravac.adamw(1e-2, delay=1, every=4, send=gravac.Bits(2))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "processes", "steps"), [(ADAPTIVE, 3, 60), (LATE, 2, 40)]
)
def test_processes_with_different_data_keep_the_same_bits(tx, processes, steps, script):
    n = str(processes)
    status, output, errors = finish(*LAUNCH, "-n", n, script(TRAIN), tx, str(steps))
    assert status == 0, errors
    _, rungs, params, data = zip(*said(output), strict=True)
    assert [len(x) for x in rungs] == [steps] * processes
    assert all(x == rungs[0] for x in rungs)
    assert len(set(rungs[0])) > 1  # a local step counts as a rung, too
    assert len(set(params)) == 1
    assert len(set(data)) == processes


SLEEP = "import time; print('in the middle', flush=True); time.sleep(1000)"
SAVE = "import signal, sys, time\nsave = lambda *_: [time.sleep(1), sys.exit()]\n"
SAVE += "signal.signal(15, save)\n" + SLEEP
FAIL = "import sys, jax\nsleep = 3 if jax.process_index() else 1000\n"
FAIL += SLEEP.replace("sleep(1000)", "sleep(sleep); sys.exit('no data')")
HOOK = FAIL.replace("sys.exit('no data')", "sys.excepthook = sys.stdout = exit; 1 / 0")


def launched(*arguments):
    """Start a launcher that hears Ctrl-C, which background jobs of a shell ignore."""
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    launcher = subprocess.Popen([*LAUNCH, *arguments], env=ENVIRONMENT, **PIPES)
    signal.signal(signal.SIGINT, ignored)
    return launcher


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "number", "status", "said"),
    [
        (SLEEP, signal.SIGINT, 130, "SIGINT; all processes have ended"),
        (SAVE, signal.SIGTERM, 0, "SIGTERM; all processes have ended"),
        (TRAIN, signal.SIGKILL, 1, r"process 1 of 2 \(pid {}\) was killed by SIGKILL"),
        (TRAIN, signal.SIGSTOP, 1, r"process 1 of 2 \(pid {}\) is stopped"),
        (FAIL, 0, 1, r"\[1\] no data\n.* 1 of 2 \(pid {}\) exited with status 1"),
        (HOOK, 0, 1, r"ZeroDivisionError: .* 1 of 2 \(pid {}\) exited with status 1"),
    ],
)
def test_a_signal_or_a_failure_ends_the_job(text, number, status, said, script):
    path = script(text)
    launcher = launched("-n", "2", path, ADAPTIVE, str(10**9))
    try:
        for _ in range(2):
            wait_until(lambda: "in the middle" in launcher.stdout.readline())
        own = "--process 1 "
        [pid] = [pid for pid, words in running(path).items() if own in " ".join(words)]
        os.kill(pid if text == TRAIN else launcher.pid, number)
        for again in (signal.SIGTERM, signal.SIGHUP) * (text == SAVE):
            time.sleep(0.2)  # it saves meanwhile, and is not disturbed
            os.kill(launcher.pid, again)
        _, errors = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == status
    said = rf"{said.format(pid)}(; the others were ended)?\n$"
    assert re.search(said, errors, re.DOTALL)
    assert not running(path) | running(str(launcher.pid))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_pause_before_a_restart_ends_the_job(number, script):
    launcher = launched("-n", "1", "--restarts", "9", script("raise SystemExit(7)"))
    try:
        wait_until(lambda: "restart 1 of 9 in 1 s" in launcher.stderr.readline())
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + number
    assert errors == f"gravac_jax.launch: {number.name}; all processes have ended\n"


def test_what_dies_early_waits_twice_as_long_up_to_a_minute():
    pauses = [0]
    for lived_seconds in (*[1] * 8, 11, 1):
        pauses.append(_job.delay(lived_seconds, pauses[-1]))
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 1, 2]


DIES = """
import sys, jax
device = jax.config.values["jax_cuda_visible_devices"]
print(f"device {device} of {jax.process_count()}")
sys.exit(7 * (device == "1"))
"""


@pytest.mark.slow
def test_what_dies_twice_in_a_row_is_left_out(script):
    options = ["-n", "2", "--restarts", "2", "--min-processes", "1"]
    status, output, errors = finish(*LAUNCH, *options, script(DIES))
    assert status == 0, errors
    assert sorted(re.findall(r"device (\d) of 1", output)) == ["0"]
    left = "process 1 of 2 .* exited with status 7; the others were ended, and"
    assert re.search(f"{left} device 1 is left out, which leaves 1; restart", errors)
