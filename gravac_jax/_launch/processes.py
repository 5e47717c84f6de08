"""Processes of this machine that live and die together."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from gravac_jax._launch import guardian

# How long to look for the one that was killed among processes that died together.
_SETTLE_SECONDS = 0.2


class ProcessDiedError(RuntimeError):
    """A process of a job failed; the message says which, and how."""


class Job:
    """Processes that live and die together.

    All of them are in one process group, with what they start themselves; ending the
    job ends the group. If the process that made the job dies, by `kill -9` even, the
    group is killed. Process 0 writes where this process writes, so that a live display
    works; each line of process i is shown with `[i] ` before it. Their standard input
    is empty.

    Leaving the `with` ends whatever still runs.

    Args:
      commands: one a process, as for `subprocess.Popen`.
      env: the whole environment of each; default: that of this process.
      grace_seconds: between asking to end (SIGTERM) and killing (SIGKILL).

    Attributes:
      pids: one a process, in the order of `commands`.
      statuses: with which each ended; None while it runs.

    Raises:
      OSError: if a command cannot be started; the others are ended.

    Example:
      >>> from gravac_jax.launch import Job
      >>> with Job([["true"], ["sh", "-c", "exit 3"]]) as job:
      ...     job.wait()  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      gravac_jax...ProcessDiedError: process 1 of 2 (...) exited with status 3
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        grace_seconds: float = 5.0,
    ):
        self.pids: tuple[int, ...] = ()
        self._count = len(commands)
        self._grace_seconds = grace_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running = set(range(len(commands)))
        self._ends: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._waiters: list[threading.Thread] = []
        self._readers: list[threading.Thread] = []
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            for command in commands:
                self._start(command, env)
        except BaseException:
            self.end()
            raise

    @property
    def statuses(self) -> list[int | None]:
        return [process.returncode for process in self._processes]

    def _start(self, command: Sequence[str], env: Mapping[str, str] | None) -> None:
        index = len(self._processes)
        output = subprocess.PIPE if index else None
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=self._guardian.pid,
        )
        self._processes.append(process)
        self.pids = (*self.pids, process.pid)
        self._waiters.append(_thread(self._await, index))
        for pipe, fd in ((process.stdout, 1), (process.stderr, 2)):
            if pipe is not None:
                self._readers.append(_thread(_relay, pipe, fd, b"[%d] " % index))

    def _await(self, index: int) -> None:
        # A thread for each learns of deaths in their order, which looking from time to
        # time does not.
        self._processes[index].wait()
        self._ends.put(index)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when all processes have ended well.

        Args:
          timeout_seconds: how long to wait at most; default: for ever.

        Raises:
          ProcessDiedError: as soon as one fails, once all others are ended.
          TimeoutError: after `timeout_seconds`, once all are ended.
        """
        end = time.monotonic() + (timeout_seconds or 0)
        while self._running:
            left = None if timeout_seconds is None else max(0, end - time.monotonic())
            try:
                index = self._ends.get(timeout=left)
            except queue.Empty:
                self.end()
                message = f"the job did not end within {timeout_seconds:g} s"
                raise TimeoutError(message) from None
            self._running.discard(index)
            if self._processes[index].returncode:
                message = self._obituary(index)
                self.end()
                raise ProcessDiedError(message)
        self.end()

    def _obituary(self, index: int) -> str:
        # Processes that talk to one that is killed fail within milliseconds, and under
        # load may be seen to end before it. None of them ends by SIGKILL, though.
        time.sleep(_SETTLE_SECONDS)
        if -signal.SIGKILL in self.statuses:
            index = self.statuses.index(-signal.SIGKILL)
        status = self.statuses[index] or 0
        how = (
            f"was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"exited with status {status}"
        )
        return f"process {index} of {self._count} (pid {self.pids[index]}) {how}"

    def end(self) -> None:
        """End all processes, and what they started: SIGTERM, then SIGKILL.

        On a job that has ended, `end` does nothing and `wait` returns.
        """
        self._running.clear()
        try:
            self._signal(signal.SIGTERM)
            _join(self._waiters, self._grace_seconds)
        finally:
            # The guardian goes with the group; until it is waited for, below, no other
            # group can have its number.
            self._signal(signal.SIGKILL)
            _join([*self._waiters, *self._readers], self._grace_seconds)
            self._guardian.communicate()

    def _signal(self, number: int) -> None:
        if self._guardian.returncode is None:
            # Where only the dead are left, macOS says PermissionError.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._guardian.pid, number)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _thread(target, *args) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _join(threads: list[threading.Thread], seconds: float) -> None:
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))


def _relay(pipe: IO[bytes], fd: int, prefix: bytes) -> None:
    # Line by line, so that the lines of several processes do not mix. If nobody reads
    # this process's output, closing the pipe tells the one that writes.
    quietly = contextlib.suppress(BrokenPipeError)
    with pipe, quietly, open(fd, "wb", closefd=False) as output:
        for line in pipe:
            output.write(prefix + line.removesuffix(b"\n") + b"\n")
            output.flush()
