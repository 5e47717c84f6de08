"""Starts a training script in several processes, on this machine or on a cluster.

    python -m gravac_jax.launch -n 4 train.py --its --own --arguments

rehearses: four processes of this machine, one `jax.distributed` job. If one dies, the
others are ended and a message names it. SIGTERM is passed on to all of them; if they
end well within `--grace` seconds, as those do that save and stop, so does this.

    srun python -m gravac_jax.launch train.py --its --own --arguments

makes the process that runs it one of a cluster's job. `--coordinator`, `--processes`
and `--process` come first; what is not given, JAX finds out from Slurm, Open MPI,
Kubernetes or a TPU pod.

The script runs as `python` would run it, but `jax.distributed` and its devices are
there already: what must be set before (`XLA_FLAGS`, `JAX_PLATFORMS`) belongs in the
environment, and a call of `jax.distributed.initialize` of its own under `if not
jax.distributed.is_initialized()`. A process whose script fails leaves at once, without
waiting for the others.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import jax

from gravac_jax._launch.processes import Job as Job
from gravac_jax._launch.processes import ProcessDiedError as ProcessDiedError

_PROGRAM = "gravac_jax.launch"

# What tells of a cluster, in the order in which JAX looks.
_CLUSTERS = {
    "OMPI_MCA_orte_hnp_uri": "Open MPI",
    "SLURM_JOB_ID": "Slurm",
    "TPU_PROCESS_ADDRESSES": "a TPU pod",
    "TPU_WORKER_HOSTNAMES": "a TPU pod",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}


def main(arguments: list[str] | None = None) -> None:
    """Start a job on this machine, or take part in one.

    Args:
      arguments: of the command line; default: those of this process.

    Raises:
      SystemExit: if it failed, with a line that says why.
    """
    options = _parse(arguments)
    if options.n is not None:
        _rehearse(options)
    else:
        _take_part(options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_PROGRAM}",
        usage="%(prog)s [options] script [its own arguments]",
        description="Run a script in several processes, on this machine or a cluster.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", type=_count, help="rehearse here, with so many processes")
    add("--devices", type=_count, help="CPU devices of each process")
    add("--grace", type=_count, help="seconds to end in after SIGTERM, by default 5")
    add("--coordinator", type=_address, help="HOST:PORT where process 0 listens")
    add("--processes", type=_count, help="how many the job has")
    add("--process", type=int, help="which one this is, from 0")
    add("--detect", help="how JAX detects the rest: mpi4py, for other MPIs")
    add("--local-devices", type=_indices, help="GPUs of this process: 0 or 0,1")
    add("-m", dest="is_module", action="store_true", help="the script is a module")
    add("script", help="a Python file, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    options = parser.parse_args(arguments)
    if complaint := _complaint(options):
        parser.error(complaint)
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, got {text}")
    return int(text)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {text}")
    return text


def _indices(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be numbers, as 0,1, got {text}")
    return [int(part) for part in text.split(",")]


def _complaint(options: argparse.Namespace) -> str | None:
    """What is wrong with the options together, if anything."""
    joins = ("coordinator", "processes", "process", "detect", "local_devices")
    given = [f"--{x}" for x in joins if getattr(options, x) is not None]
    if options.n is not None and given:
        names = ", ".join(given).replace("_", "-")
        return f"-n starts a job of its own here; leave out {names}, or -n"
    process, processes = options.process, options.processes
    if process is not None and not 0 <= process < (processes or process + 1):
        last = "" if processes is None else f" to {processes - 1}"
        return f"--process must be from 0{last}, got {process}"
    # Of a module its package alone: finding the rest would import it.
    package = options.script.partition(".")[0]
    if options.is_module and importlib.util.find_spec(package) is None:
        return f"there is no module {package}"
    if not options.is_module and not Path(options.script).exists():
        return f"there is no script {options.script}"
    return None


def _rehearse(options: argparse.Namespace) -> None:
    """Start all processes here, and end them together."""
    coordinator = local_coordinator()
    common = ["--coordinator", coordinator, "--processes", str(options.n)]
    common += ["--detect", "deactivate"]
    if options.devices is not None:
        common += ["--devices", str(options.devices)]
    script = [*["-m"] * options.is_module, options.script, *options.arguments]
    launch = [sys.executable, "-m", _PROGRAM, *common]
    commands = [
        [*launch, "--process", str(i), "--local-devices", str(i), *script]
        for i in range(options.n)
    ]
    _stop_on_signals()
    kwargs: dict[str, Any] = {"env": local_environment(coordinator)}
    if options.grace is not None:
        kwargs["grace_seconds"] = options.grace
    job = None
    try:
        with Job(commands, **kwargs) as job:
            job.wait()
    except ProcessDiedError as died:
        raise SystemExit(f"{_PROGRAM}: {died}; the others were ended") from None
    except KeyboardInterrupt as stop:
        number = stop.args[0]
        name = signal.Signals(number).name
        if job is not None and all(status == 0 for status in job.statuses):
            sys.stderr.write(f"{_PROGRAM}: {name}; all processes have ended well\n")
            return
        sys.stderr.write(f"{_PROGRAM}: {name}; all processes were ended\n")
        raise SystemExit(128 + number) from None


def local_coordinator() -> str:
    """HOST:PORT of this machine's loopback, free when this was called."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def local_environment(coordinator: str) -> dict[str, str]:
    """The environment of a job whose coordinator is on this machine.

    Args:
      coordinator: HOST:PORT.

    Returns:
      That of this process, changed so that the coordinator listens there alone, and is
      reached without a proxy.
    """
    host = coordinator.rpartition(":")[0]
    return {
        **os.environ,
        # Otherwise process 0 listens to the whole network.
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
        # Through a proxy the others would not find it, and wait for minutes.
        "no_grpc_proxy": f"{os.environ.get('no_proxy', '')},{host}".removeprefix(","),
        "JAX_CHECK_PROXY_ENVS": "0",
    }


def _stop_on_signals() -> None:
    def stop(number: int, _: Any) -> NoReturn:
        raise KeyboardInterrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What is ignored stays so: that is what nohup is for.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def _take_part(options: argparse.Namespace) -> None:
    """Join the job, then run the script; if either fails, leave at once."""
    status = 1
    try:
        _join(options)
        _run(options)
        status = 0
    except SystemExit as end:
        status = _status(end.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    if status:
        # The usual way out waits for the other processes, and they for this one.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


def _join(options: argparse.Namespace) -> None:
    if options.devices is not None:
        jax.config.update("jax_num_cpu_devices", options.devices)
    source = _source(options)
    try:
        jax.distributed.initialize(
            coordinator_address=options.coordinator,
            num_processes=options.processes,
            process_id=options.process,
            local_device_ids=options.local_devices,
            cluster_detection_method=options.detect,
        )
        devices = jax.devices()
    except Exception as error:
        reason = _why_not(options, source, error)
        raise SystemExit(f"{_PROGRAM}: {reason}") from error
    if jax.process_index() == 0:
        sys.stderr.write(
            f"{_PROGRAM}: {jax.process_count()} processes, {source}; "
            f"{len(devices)} {devices[0].platform} devices\n"
        )


def _source(options: argparse.Namespace) -> str:
    """Where the coordinator, the number of processes and this one's come from."""
    if address := options.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"):
        given = f"coordinator {address}"
        both = options.processes is not None and options.process is not None
        return given if both else f"{given}, the rest {_cluster(options)}"
    return _cluster(options)


def _cluster(options: argparse.Namespace) -> str:
    if options.detect:
        return f"found by {options.detect}"
    for variable, name in _CLUSTERS.items():
        if value := os.environ.get(variable):
            return f"found by {name} ({variable}={value})"
    return "found by JAX"


def _why_not(options: argparse.Namespace, source: str, error: Exception) -> str:
    """Why this process is not part of a job, and what to do."""
    needed = ("coordinator", "processes", "process")
    missing = [f"--{x}" for x in needed if getattr(options, x) is None]
    if missing and isinstance(error, ValueError):
        return (
            f"JAX detects no cluster that tells {', '.join(missing)} ({error}): give "
            "them, or rehearse on this machine with -n N"
        )
    process = (
        "this process" if options.process is None else f"process {options.process}"
    )
    return f"{process} could not join the job ({source}): {error}"


def _run(options: argparse.Namespace) -> None:
    """Run the script as Python would."""
    sys.argv = [options.script, *options.arguments]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In pipes and files too a line appears when it is printed, and in one piece,
        # which PYTHONUNBUFFERED does not see to.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(options.script).resolve().parent)
    runpy.run_path(options.script, run_name="__main__")


def _status(code: Any) -> int:
    """The exit status that `sys.exit(code)` means."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


if __name__ == "__main__":
    main()
