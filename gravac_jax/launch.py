"""Run a training script in several processes, on this machine or on a cluster.

On one machine, start four processes that form one `jax.distributed` job::

    python -m gravac_jax.launch -n 4 train.py --its --own --arguments

If a process dies, the launcher ends the others and names the process that died, or is
stopped. With `--restarts K` it then starts the job again, K times at most: after one
second, or if it dies within ten seconds after twice the last pause, up to 60. A script
that restores its newest checkpoint, as with `gravac_jax.checkpoint`, goes on from
there. With `--min-processes M`, a process that died in two starts in a row is left out,
down to M processes: a checkpoint may be restored on fewer. The launcher passes SIGTERM
on to all processes. If all of them then exit with status 0 within
`--grace` seconds (60), for example because they saved a checkpoint, the launcher exits
with status 0 too. After a death or Ctrl-C they have 2 seconds.

With `--elastic`, which is experimental, a script that makes a
`gravac_jax.elastic.Elastic` goes on when a process dies or freezes: K processes may be
started again, and those that are left go on meanwhile if they are M at least (1).

A process whose script has ended waits in JAX for the others, and says so after five
seconds: a process with fewer steps than the others, because its data were fewer, stops
all of them.

On a cluster, every process of the job runs the launcher, without `-n`::

    srun python -m gravac_jax.launch train.py --its --own --arguments

JAX detects the address of process 0, the number of processes and the index of this
process from Slurm, Open MPI, Kubernetes or a TPU pod. `--coordinator`, `--processes`
and `--process` replace what JAX would detect.

The script runs as if Python ran it, but `jax.distributed` and the devices are
initialized before its first line. Set `XLA_FLAGS` and `JAX_PLATFORMS` in the
environment, not in the script. A script that calls `jax.distributed.initialize` itself
must first check `jax.distributed.is_initialized()`.
"""

import argparse
import contextlib
import io
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread, Timer
from typing import IO, Any

import jax

from gravac_jax.elastic import FOLDER, delay, local_coordinator, poll, say, supervise

__all__ = ["Job", "ProcessDiedError", "local_coordinator", "local_environment", "main"]

_PROGRAM = "gravac_jax.launch"


def main(arguments: list[str] | None = None) -> None:
    """Start a job on this machine, or run one process of a job.

    Args:
      arguments: Arguments of the command line; by default those of this process.

    Raises:
      SystemExit: If the arguments are wrong or the job fails, with the reason.
    """
    how: Any = {"description": __doc__, "allow_abbrev": False}
    how |= {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(f"python -m {_PROGRAM}", **how)
    add = parser.add_argument
    add("-n", type=int, help="start a job of N processes on this machine")
    add("--restarts", type=int, default=0, help="how often a job may start again")
    add("--min-processes", type=int, help="leave out what dies twice, down to M")
    add("--grace", type=float, default=60, help="seconds from SIGTERM to SIGKILL")
    add("--elastic", action="store_true", help="go on without what dies: experimental")
    add("--devices", type=int, help="number of CPU devices of each process")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    add("--processes", type=int, help="number of processes of the job")
    add("--process", type=int, help="index of this process, from 0")
    add("--heartbeat", type=int, help="seconds until a silent process counts as dead")
    add("--detect", help="how JAX detects the rest, such as mpi4py or deactivate")
    add("--local-devices", type=indices, help="GPUs of this process, such as 0,1")
    add("-m", dest="is_module", action="store_true", help="the script is a module")
    add("script", help="Python file, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(arguments)
    place = options.coordinator, options.processes, options.process
    options.place = *place, options.local_devices, options.detect
    counts = options.n, options.min_processes, options.heartbeat, options.restarts + 1
    if min(x for x in counts if x is not None) < 1:
        parser.error("counts must be at least 1, and --restarts at least 0")
    if options.min_processes and not (options.n and options.restarts):
        parser.error("--min-processes needs -n and --restarts")
    if options.n and any(x is not None for x in options.place):
        parser.error("-n starts a job of its own: leave out --coordinator and the like")
    (_run_process if options.n is None else _run_job)(options)


def indices(text: str) -> list[int]:
    """Parse indices such as 0,1; argparse shows this function's name in its error."""
    return [int(index) for index in text.split(",")]


def _run_job(options: argparse.Namespace) -> None:
    """Start all processes on this machine, end them together, and maybe start again."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup starts its program with SIGHUP ignored, which must stay so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    members, last, pause = [*range(options.n)], None, 0
    for restart in range(options.restarts + 1):
        begun = time.monotonic()
        try:
            return _run_once(options, members)
        except ProcessDiedError as died:
            said = f"{died}; the others were ended"
            if options.elastic or restart == options.restarts:
                raise SystemExit(f"{_PROGRAM}: {said}") from None
            before, last = last, members[died.index]
        if last == before and len(members) > (options.min_processes or options.n):
            members.remove(last)
            said += f", and device {last} is left out, which leaves {len(members)}"
        pause = delay(time.monotonic() - begun, pause)
        say(f"{said}; restart {restart + 1} of {options.restarts} in {pause} s")
        time.sleep(pause)


def _run_once(options: argparse.Namespace, members: Sequence[int]) -> None:
    """Start processes on this machine, one for each device, and wait until they end."""
    coordinator = local_coordinator()
    launch = f"-m {_PROGRAM} --coordinator {coordinator} --processes {len(members)}"
    launch += f" --devices {options.devices}" if options.devices else ""
    # Between machines JAX waits for 100 seconds.
    launch += f" --heartbeat {options.heartbeat or 15}" + " --elastic" * options.elastic
    own = lambda i, device: f"{launch} --process {i} --local-devices {device}".split()
    script = [*["-m"] * options.is_module, options.script, *options.arguments]
    commands = [[sys.executable, *own(*x), *script] for x in enumerate(members)]
    # In memory: on a full disk members of an elastic job would show no sign of life.
    memory = "/dev/shm" if options.elastic and sys.platform == "linux" else None
    with tempfile.TemporaryDirectory(dir=memory) as path:
        env = local_environment(coordinator) | {FOLDER: path * options.elastic}
        job = Job(commands, options.grace, env=env)
        try:
            supervise(job, path, options) if options.elastic else job.wait()
        except (SystemExit, KeyboardInterrupt) as stop:
            status = stop.args[0] if stop.args else 128 + signal.SIGINT
            say(f"{signal.Signals(status - 128).name}; all processes have ended")
            if any(job.statuses):
                raise SystemExit(status) from None


def local_environment(coordinator: str) -> dict[str, str]:
    """Make the environment of a job whose process 0 runs on this machine.

    Args:
      coordinator: HOST:PORT where process 0 listens.

    Returns:
      The environment of this process, changed so that process 0 listens on HOST alone
      and the others connect to it without a proxy.
    """
    # By default process 0 listens on every interface of the machine.
    changed = {"JAX_COORDINATOR_BIND_ADDRESS": coordinator}
    if any("_proxy" in name.lower() for name in os.environ):
        # A proxy cannot reach the loopback: the others would wait for minutes.
        hosts = os.environ.get("no_proxy", ""), coordinator.rpartition(":")[0]
        changed["no_grpc_proxy"] = ",".join(filter(None, hosts))
    return {**os.environ, **changed}


def _run_process(options: argparse.Namespace) -> None:
    """Join the job and run the script; if either fails, exit at once."""
    status: Any = None
    try:
        _join_job(options)
        _run_script(options)
    except SystemExit as stop:
        status = stop.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    if not status:
        return None if options.elastic else _tell_if_others_go_on()
    if not isinstance(status, int):  # sys.exit("the reason")
        sys.stderr.write(f"{status}\n")
    # A normal exit would wait for the other processes, which wait for this one.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 1)


def _join_job(options: argparse.Namespace) -> None:
    if options.devices is not None:
        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.elastic:  # its script joins, again and again
        return
    beats = {"heartbeat_timeout_seconds": options.heartbeat or 100}
    try:
        jax.distributed.initialize(*options.place, **beats)
        devices = jax.devices()
    except Exception as error:
        said = f"could not join a job: {error} (to start a job on this machine give -n"
        said += " N; to join one, --coordinator HOST:PORT, --processes, --process)"
        raise SystemExit(f"{_PROGRAM}: {said}") from error
    if jax.process_index() == 0:
        kind = devices[0].platform
        say(f"{jax.process_count()} processes, {len(devices)} {kind} devices")


def _run_script(options: argparse.Namespace) -> None:
    sys.argv = [options.script, *options.arguments]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Show each line when it is printed and in one piece, also in pipes and files.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(options.script).resolve().parent)
        runpy.run_path(options.script, run_name="__main__")


def _tell_if_others_go_on() -> None:
    """If this process, whose script has ended, still waits for others, say so."""
    said = f"process {jax.process_index()} of {jax.process_count()} reached the end of"
    said += " its script and waits: all processes must take the same number of steps"
    # Scripts that end together end within seconds.
    timer = Timer(5, say, [said])
    timer.daemon = True  # it ends with the process
    timer.start()


# The guardian ends the processes of a launcher that died, even by SIGKILL. It is the
# first member of their process group. Its standard input is a pipe that the launcher
# holds open and never writes to, so that `read` returns when the launcher is gone. It
# ignores the signals that end the other processes: it must be the last one to go.
_GUARDIAN = 'trap "" INT TERM HUP PIPE; read -r _; echo "the launcher (pid $0) is gone;'
_GUARDIAN += ' its processes end" >&2; kill -KILL 0'


class ProcessDiedError(RuntimeError):
    """A process of a job failed; the message says which one, and how.

    Attributes:
      index: which one.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class Job(contextlib.AbstractContextManager["Job"]):
    """Processes of this machine that live and die together.

    All processes, and all that they start, are one process group. The group ends when
    the job ends, and when the process that created the job dies in any way, even by
    SIGKILL. The output of process 0 is passed on unchanged, so that live displays work;
    every output line of process i > 0 begins with `[i] `. The standard input of every
    process is empty.

    A job is a context manager; leaving it ends the job.

    Args:
      commands: One command for each process, as `subprocess.Popen` takes it.
      grace_seconds: Time between SIGTERM and SIGKILL when the job ends, in seconds; at
        most 2 after an error, such as a process that died.
      **popen: More arguments of `subprocess.Popen` for every process, such as `env`.

    Raises:
      OSError: If a command cannot be started; those that run are ended.

    Example:
      >>> from gravac_jax.launch import Job
      >>> with Job([["true"], ["sh", "-c", "exit 3"]]) as job:
      ...     job.wait()  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      gravac_jax...ProcessDiedError: process 1 of 2 (...) exited with status 3
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], grace_seconds: float = 60, **popen: Any
    ):
        self._grace_seconds = grace_seconds
        self._processes: list[Popen[Any]] = []
        self._relays: list[Thread] = []
        self._begun: dict[int, tuple[float, int]] = {}  # when, and after which pause
        guardian = ["sh", "-c", _GUARDIAN, str(os.getpid())]
        self._guardian = Popen(guardian, stdin=PIPE, stdout=DEVNULL, process_group=0)
        popen |= {"process_group": self._guardian.pid, "stdin": DEVNULL}
        self._commands, self._popen = commands, popen
        try:
            for index in range(len(commands)):
                self.start(index)
        except BaseException:
            self.end()
            raise

    def start(self, index: int) -> None:
        """Start a process; in the place of one that died a little later.

        Args:
          index: which one.

        Raises:
          OSError: if its command cannot be started.
        """
        output, pause, now = PIPE if index else None, 0, time.monotonic()
        if before := self._begun.get(index):
            pause = delay(now - before[0], before[1])
        self._begun[index] = now + pause, pause
        # A shell that waits is a process of the job, and becomes this one.
        wait = ["sh", "-c", 'sleep "$0"; exec "$@"', str(pause)] if pause else []
        command = [*wait, *self._commands[index]]
        process = Popen(command, stdout=output, stderr=output, **self._popen)
        self._processes[index : index + 1] = [process]
        for pipe, fd in ((process.stdout, 1), (process.stderr, 2)) * bool(index):
            relay = Thread(target=_relay, args=(pipe, fd, index), daemon=True)
            relay.start()
            self._relays.append(relay)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process identifiers, in the order of the commands."""
        return tuple(process.pid for process in self._processes)

    @property
    def statuses(self) -> list[int | None]:
        """Exit statuses, in the order of the commands; None of one that runs."""
        return [process.poll() for process in self._processes]

    def wait(self, timeout_seconds: float = float("inf")) -> None:
        """Wait until all processes have exited with status 0.

        Args:
          timeout_seconds: Longest time to wait, in seconds; by default no limit.

        Raises:
          ProcessDiedError: If a process fails; the others have been ended.
          TimeoutError: After `timeout_seconds`; all processes have been ended.
        """
        is_over = lambda: any(self.statuses) or None not in self.statuses
        with self:
            if not poll(is_over, timeout_seconds):
                raise TimeoutError(f"the job did not end within {timeout_seconds:g} s")
            if died := [i for i, x in enumerate(self.statuses) if x]:
                # Processes that talk to one that was killed fail within milliseconds,
                # and on a busy machine may be seen to fail before it.
                time.sleep(0.2)
                now = self.statuses
                killed = [i for i, x in enumerate(now) if x == -signal.SIGKILL]
                # Others die of one that is stopped: they hear nothing of it.
                stopped = filter(self.is_stopped, range(len(self.pids)))
                raise self.death([*stopped, *killed, *died][0])

    def death(self, index: int) -> ProcessDiedError:
        """Return an error that says how a process died, or that it is stopped."""
        n, status = len(self.pids), self.statuses[index]
        how = "is stopped" if status is None else f"exited with status {status}"
        if status and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        said = f"process {index} of {n} (pid {self.pids[index]}) {how}"
        return ProcessDiedError(said, index)

    def is_stopped(self, index: int) -> bool:
        """Return whether a process is stopped, as by SIGSTOP; False without /proc."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.pids[index]}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    def end(self) -> None:
        """End all processes and what they started: SIGTERM, later SIGKILL.

        Ending a job again does nothing.
        """
        if self._guardian.returncode is not None:
            return
        try:
            self._signal(signal.SIGTERM)
        finally:
            if deaf := [i for i, x in enumerate(self.statuses) if x is None]:
                say(f"SIGKILL must end processes {deaf}")
            self._signal(signal.SIGKILL)  # ends the guardian too
            for relay in self._relays:
                relay.join(self._grace_seconds)
            # Until the guardian is waited for, no other group can take its number.
            self._guardian.communicate()

    def _signal(self, number: int) -> None:
        """Send a signal to the group; wait until the processes end, or for a while."""
        # macOS raises PermissionError for a group whose members are all dead.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guardian.pid, number)
        poll(lambda: None not in self.statuses, self._grace_seconds)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind not in (None, SystemExit):
            # What waits for a process that died can save nothing.
            self._grace_seconds = min(self._grace_seconds, 2)
        self.end()


def _relay(pipe: IO[bytes], fd: int, index: int) -> None:
    # Whole lines, so that those of several processes do not mix. If nobody reads the
    # output of this process, closing the pipe tells the process that writes.
    quietly = contextlib.suppress(BrokenPipeError)
    with pipe, quietly, open(fd, "wb", closefd=False) as output:
        for line in pipe:
            output.write(b"[%d] %s\n" % (index, line.removesuffix(b"\n")))
            output.flush()


if __name__ == "__main__":
    main()
