"""Time PyTorch's DistributedDataParallel and its hooks on the networks of a record.

The networks, the task and its batch are those of a record of `step_seconds`. Besides
DDP's own all-reduce there are its float16 hook, its PowerSGD hook, post-local SGD, and
the largest entries of error-fed gradients by an all-gather, as peers do. Inputs are
random: only time is taken. Steps to a held-out loss are
counted by `end_to_end`.

PyTorch's kernels are not XLA's, so a step is compared by what it takes beyond the same
step without other replicas; `step` and `compute` are as in `step_seconds`.

It needs root for the network, and torch.
"""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from common import hosts
from common.journal import Journal, Line, read
from common.network import Network
from common.report import markdown, rate, spread
from step_seconds.run import link_of, missing_of
from step_seconds.worker import Link

from gravac_jax.launch import Job


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all lines of a record depend on.

    Args:
      methods: DDP's own mean, its hooks with a rank or a period, and the all-gather
        with a factor.
      optimizer: What follows the mean.
      steps: Timed steps of each method at each bandwidth; whole periods of all.
      turns: The number of turns in which these steps are timed.
      threads: Threads of each process.
    """

    methods: tuple[str, ...] = (
        *("dense", "fp16", "powersgd1", "powersgd4", "topk10", "topk100"),
        *("postlocal4", "postlocal16"),
    )
    optimizer: Literal["sgd", "adam"] = "sgd"
    steps: int = 96
    turns: int = 5
    threads: int = 1


@dataclasses.dataclass(frozen=True)
class Args:
    """Which steps to time, on which networks.

    Args:
      timed: A record of `step_seconds`, for its networks and its task.
      out: The record, JSONL; lines that are in it are not made again.
      timeout_seconds: Time for each number of hosts.
      setting: What all lines depend on.
    """

    timed: Path
    out: Path
    timeout_seconds: float = 7200
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = Setting()


def networks(lines: list[Line]) -> dict[int, dict[Link, float | None]]:
    """Return the bandwidth of every link, by the number of hosts."""
    found: dict[int, dict[Link, float | None]] = {}
    for line in lines:
        found.setdefault(line["hosts"], {})[link_of(line)] = line["bandwidth_mbit"]
    return found


def measure(args: Args) -> list[Line]:
    """Time what is missing in the file.

    Raises:
      SystemExit: Without torch or a network, and if a process died.
    """
    head, lines = read(args.timed)
    task = {name: head["configuration"].get(name) for name in ("task", "rows")}
    setting = dataclasses.asdict(args.setting) | task
    journal, wanted = Journal(args.out, setting), networks(lines)
    # Found before the first job starts: from then on its processes write the file.
    missing = {
        n: missing_of(n, links, journal, args.setting.methods)
        for n, links in wanted.items()
    }
    for n, links in missing.items():
        if links:
            figures = [(wanted[n][link], link.ratio) for link in links]
            start_job(args, n, [json.dumps(setting), json.dumps(figures)])
    return read(args.out)[1]


def start_job(args: Args, n: int, figures: list[str]) -> None:
    """Run one job with a process in each of `n` hosts, to its end."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("there is no torch: `pip install torch`")

    def start(network: Network) -> Job:
        script = [sys.executable, hosts.PROGRAM, "pytorch.worker"]
        script += [network.coordinator(), str(n)]
        return network.run([*script, str(i), str(args.out), *figures] for i in range(n))

    hosts.finish(n, start, args.timeout_seconds)


def main(args: Args) -> None:
    """Time, and print the table."""
    columns = ["method", "hosts", "Mbit/s", "step, ms (quartiles)", "compute"]
    rows = [
        [
            x["method"],
            str(x["hosts"]),
            rate(x["bandwidth_mbit"]),
            spread([1e3 * s for s in x["step_seconds"]], 1),
            f"{1e3 * x['compute_seconds'][1]:.1f}",
        ]
        for x in measure(args)
    ]
    print(markdown([columns, *rows]))
