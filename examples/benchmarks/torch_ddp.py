"""Seconds of a step of PyTorch's DistributedDataParallel, on the same networks.

The same model shapes as in a record of steptime.py, the same hosts and bandwidths, one
process with one thread of its own in each host, gloo. What DDP comes with: all-reduces
of float32 buckets under way during the backward pass, the hook that sends float16 (that
for bfloat16 is refused on gloo), and PowerSGD of rank 1 and 4; and a hook that sends
the largest entries of error-fed gradients by an all-gather, as peers do. Inputs are
random: only time is taken.

PyTorch's kernels are not XLA's, so a step is compared by what it takes beyond the same
step without other replicas; `step` and `compute` are as in steptime.py.

Needs root, and torch.

    python examples/benchmarks/torch_ddp.py --timed STEPS.jsonl --out FILE.jsonl
"""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
import journal
from journal import Journal, Line
from network import Network, NetworkError
from steptime import link_of, missing_of
from steptime_report import rate

from gravac_jax.launch import ProcessDiedError

INSIDE = Path(__file__).with_name("torch_inside.py")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What every figure of a record depends on."""

    methods: tuple[str, ...] = (
        "dense",
        "fp16",
        "powersgd1",
        "powersgd4",
        "topk10",
        "topk100",
    )
    """DDP's own, its hooks with a rank, and the all-gather with a factor."""
    steps: int = 100
    """Timed steps of each method at each bandwidth."""
    turns: int = 5
    """In so many turns."""
    threads: int = 1
    """Of each process."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Which steps to time, on which networks."""

    timed: Path
    """A record of steptime.py, which says on what networks, and of which task."""
    out: Path
    """JSONL; what is in it is not timed again."""
    timeout_seconds: float = 7200
    """For each number of hosts."""
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Setting
    )


def networks(lines: list[Line]) -> dict[int, list[tuple[float | None, float | None]]]:
    """For each number of hosts the (bandwidth, ratio) of all networks."""
    found: dict[int, dict[tuple[float | None, float | None], None]] = {}
    for x in lines:
        here = found.setdefault(x["hosts"], {})
        here[x["bandwidth_mbit"], x.get("ratio")] = None
    return {hosts: list(here) for hosts, here in found.items()}


def measure(args: Args) -> list[Line]:
    """Time what is missing in the file.

    Raises:
      SystemExit: without torch or a network, and if a process died.
    """
    head, lines = journal.read(args.timed)
    shapes = {name: head["configuration"][name] for name in ("task", "preset", "rows")}
    setting = dataclasses.asdict(args.setting) | shapes
    out, methods = Journal(args.out, setting), args.setting.methods
    wanted = {
        hosts: {link_of({"bandwidth_mbit": x[0], "ratio": x[1]}): x for x in links}
        for hosts, links in networks(lines).items()
    }
    # Before the first job: from then on the file is theirs.
    missing = {n: missing_of(n, links, out, methods) for n, links in wanted.items()}
    for hosts, links in missing.items():
        if links:
            figures = [wanted[hosts][link] for link in links]
            run(args, hosts, [json.dumps(setting), json.dumps(figures)])
    return journal.read(args.out)[1]


def run(args: Args, hosts: int, figures: list[str]) -> None:
    """One job, of a process in each host.

    Raises:
      SystemExit: without torch or a network, and if a process died.
    """
    reason = Network.unavailable()
    if importlib.util.find_spec("torch") is None:
        reason = "there is no torch: `pip install torch`"
    if reason:
        raise SystemExit(reason)
    try:
        with Network(hosts) as network:
            script = [sys.executable, str(INSIDE), network.coordinator(), str(hosts)]
            ranks = ([*script, str(i), str(args.out), *figures] for i in range(hosts))
            network.run(ranks).wait(args.timeout_seconds)
    except (NetworkError, ProcessDiedError, TimeoutError) as error:
        raise SystemExit(f"{hosts} hosts: {error}") from None


def table(lines: list[Line]) -> Table:
    """Medians in milliseconds."""
    found = Table(box=SIMPLE)
    for column in ("hosts", "Mbit/s", "method", "step, ms (quartiles)", "compute"):
        found.add_column(column, justify="left" if column == "method" else "right")
    for x in lines:
        low, middle, high = (1e3 * s for s in x["step_seconds"])
        found.add_row(
            str(x["hosts"]),
            rate(x["bandwidth_mbit"]),
            x["method"],
            f"{middle:.1f} ({low:.1f}-{high:.1f})",
            f"{1e3 * x['compute_seconds'][1]:.1f}",
        )
    return found


def main(args: Args) -> None:
    """Time, and print the table."""
    Console().print(table(measure(args)))


if __name__ == "__main__":
    main(tyro.cli(Args))
