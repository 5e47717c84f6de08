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
from threading import Timer
from typing import Any

import jax

from gravac_jax._job import FOLDER, Job, ProcessDiedError, delay, local_coordinator, say
from gravac_jax.elastic import supervise

__all__ = ["Job", "ProcessDiedError", "local_coordinator", "local_environment", "main"]

_PROGRAM = "gravac_jax.launch"


def main(arguments: list[str] | None = None) -> None:
    """Start a job on this machine, or run one process of a job.

    Args:
      arguments: Arguments of the command line; by default those of this process.

    Raises:
      SystemExit: If the arguments are wrong or the job fails, with the reason.
    """
    parser = argparse.ArgumentParser(f"python -m {_PROGRAM}", None, __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    add = parser.add_argument
    add("-n", type=int, help="start a job of N processes on this machine")
    add("--restarts", type=int, default=0, help="how often a job may start again")
    add("--min-processes", type=int, help="go on without what dies, down to M")
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
    own = add("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    own.required = False  # some versions of argparse ask for one
    options = parser.parse_args(arguments)
    place = options.coordinator, options.processes, options.process
    options.place = *place, options.local_devices, options.detect
    counts = [options.n, options.devices, options.min_processes, options.heartbeat]
    if min(x for x in (*counts, options.restarts + 1) if x is not None) < 1:
        parser.error("counts must be at least 1, and --restarts at least 0")
    goes_on = options.restarts or options.elastic
    if goes_on and not (options.n or os.environ.get(FOLDER)):
        parser.error("--restarts and --elastic need -n")
    if not (options.coordinator or ":0").rpartition(":")[2].isdecimal():
        parser.error(f"--coordinator must be HOST:PORT, got {options.coordinator}")
    least = options.min_processes
    if least and not (goes_on and least <= (options.n or 0)):
        parser.error("--min-processes needs --restarts or --elastic, and is at most N")
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
            signal.signal(number, _stop)
    members, last, pause, said = [*range(options.n)], None, 0, ""
    for restart in range(options.restarts + 1):
        begun = time.monotonic() + pause
        try:
            return _run_once(options, members, pause, said)
        except ProcessDiedError as died:
            said = f"{died}; the others were ended"
            if options.elastic or restart == options.restarts:
                raise SystemExit(f"{_PROGRAM}: {said}") from None
            before, last = last, members[died.index]
        if last == before and len(members) > (options.min_processes or options.n):
            members.remove(last)
            said += f", and device {last} is left out, which leaves {len(members)}"
        pause = delay(time.monotonic() - begun, pause)
        said += f"; restart {restart + 1} of {options.restarts} in {pause} s"


def _stop(number: int, _: Any) -> None:
    """End the job. What is sent again while it saves does not end it sooner."""
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, lambda *_: None)  # Python complains of a late SIG_IGN
    sys.exit(128 + number)


def _run_once(options: Any, members: Sequence[int], pause: int, said: str) -> None:
    """Say why, pause, start processes here, one a device, and wait for their end."""
    job = None
    # In memory: on a full disk members of an elastic job would show no sign of life.
    memory = "/dev/shm" if options.elastic and sys.platform == "linux" else None
    try:
        if said:
            say(said)  # here, since a signal may come as soon as it is read
        time.sleep(pause)
        with tempfile.TemporaryDirectory(dir=memory) as path:
            coordinator = local_coordinator()
            env = local_environment(coordinator) | {FOLDER: path * options.elastic}
            job = Job(_commands(options, members, coordinator), options.grace, env=env)
            how = options.restarts, options.min_processes or 1, options.heartbeat or 5
            supervise(job, Path(path), *how) if options.elastic else job.wait()
    except (SystemExit, KeyboardInterrupt) as stop:
        status = stop.args[0] if stop.args else 128 + signal.SIGINT
        say(f"{signal.Signals(status - 128).name}; all processes have ended")
        if not job or any(job.statuses):
            raise SystemExit(status) from None


def _commands(options: Any, members: Sequence[int], address: str) -> list[list[str]]:
    """Return the command of each process; process 0 listens at `address`."""
    launch = f"-m {_PROGRAM} --coordinator {address} --processes {len(members)}"
    launch += f" --devices {options.devices}" if options.devices else ""
    # Between machines JAX waits for 100 seconds.
    launch += f" --heartbeat {options.heartbeat or 15}" + " --elastic" * options.elastic
    own = lambda i, device: f"{launch} --process {i} --local-devices {device}".split()
    script = [*["-m"] * options.is_module, options.script, *options.arguments]
    return [[sys.executable, *own(*x), *script] for x in enumerate(members)]


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
        status, told = 1, (type(error), error, error.__traceback__)
        try:
            sys.excepthook(*told)
        except BaseException:  # of the script's own hook
            sys.__excepthook__(*told)
    if status in (None, 0):
        return None if options.elastic else _tell_if_others_go_on()
    # A normal exit would wait for the other processes, which wait for this one.
    with contextlib.suppress(Exception):  # streams may be the script's own, too
        if not isinstance(status, int):  # sys.exit("the reason")
            sys.stderr.write(f"{status}\n")
        sys.stdout.flush()
    os._exit(status & 0xFF if isinstance(status, int) else 1)


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


if __name__ == "__main__":
    main()
