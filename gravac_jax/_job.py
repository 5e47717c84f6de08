"""Processes of one machine that live and die together, whatever they run."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread
from typing import IO, Any

FOLDER = "GRAVAC_JAX_ELASTIC"  # where those of an elastic job leave word


def say(text: str) -> None:
    """Say on stderr what happens to a job."""
    sys.stderr.write(f"gravac_jax.launch: {text}\n")


def poll(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; return whether it holds within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def delay(lived_seconds: float, pause: int) -> int:
    """Return the pause in seconds before what died starts again.

    Args:
      lived_seconds: how long it lived.
      pause: the seconds until it started; 0 of a first start.
    """
    return 1 if lived_seconds > 10 or not pause else min(2 * pause, 60)


def local_coordinator() -> str:
    """Find a free port of this machine for process 0 of a job.

    Returns:
      HOST:PORT on the loopback interface; free at the time of the call.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


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
        for pipe, fd in ((process.stdout, 1), (process.stderr, 2)) if index else ():
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
            names = {int(x): x.name for x in signal.Signals}  # not those of real time
            how = f"was killed by {names.get(-status, f'signal {-status}')}"
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
            for relay in self._relays:  # what left the group may hold its pipe
                relay.join(min(2, self._grace_seconds))
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
