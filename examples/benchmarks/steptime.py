"""Seconds of a train step on an emulated network, split into its parts.

Every method trains the same model from the same params on the same batches. All are
compiled first; then, at each bandwidth, they take turns of a few steps, in rotating
order, so that whatever else the machine does falls on all alike. The seconds, of which
the record has the quartiles over steps:

- `step`: the compiled step of `gravac.data_parallel`, as people run it, until its last
  result is there; on the slowest replica. Speed-ups are of its mean, since rungs may
  alternate. The other seconds are means over replicas, of every fourth step.
- `compute`: that step without any exchange, every replica by itself with its own
  gradients, all processes at the same time.
- `selection`: how much longer that takes with all that the method does without other
  replicas, at the rung of the step. 0 for "dense", which has none.
- `wait`: from there to the end of an empty all-reduce: until the slowest replica is
  there, and one latency.
- `exchange`: what is left of the step. It holds the adding up of other replicas'
  payloads, and the errors of all other parts, and may be negative as they may.

With r a dense step's communication over its computation, nothing that computes the
same gradients can be faster than it by more than 1 + r. That is taken as the dense step
over `slowest compute`, a step's computation on the slowest replica; a method's share of
it is `slowest compute` over its own step, the same against every baseline.

A network may be given by `--ratios` in place of its bandwidth: there, by bytes alone, a
dense float32 exchange takes so many times as long as computation did when the job
began. Above 4 Gbit/s links are left without a limit, which the machine does not reach.

A method that chooses its factor is told the seconds of its steps, and trains for some
at each bandwidth before it is timed there: these are the seconds of that stretch of a
run, not of a whole one. `factor` is that of all timed steps together, entries over
entries sent.

Needs root, for the network. Without, the processes talk over loopback, no bytes are
counted, and all figures say so.

    python examples/benchmarks/steptime.py --data-dir DIR --out FILE.jsonl
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import steptime_report
from journal import Journal, Line
from network import MAX_HOSTS, Hosts, Loopback, Network, NetworkError
from steptime_inside import Link, Setting
from steptime_methods import method
from tasks import DataError, load
from tasks.pipeline import batches

from gravac_jax.launch import ProcessDiedError

INSIDE = Path(__file__).with_name("steptime_inside.py")


@dataclasses.dataclass(frozen=True)
class Args:
    """Which steps to time, on which networks."""

    data_dir: Path
    """Where the task's files are."""
    out: Path
    """JSONL; what is in it is not timed again."""
    hosts: tuple[int, ...] = (2, 4)
    """Replicas, each in a host of its own."""
    bandwidths_mbit: tuple[float, ...] = (1000, 300, 100)
    """Of each host's link in each direction."""
    ratios: tuple[float, ...] = ()
    """Of a dense exchange to computation; takes the place of bandwidths."""
    timeout_seconds: float = 7200
    """For each number of hosts."""
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Setting
    )


def check(args: Args) -> None:
    """Complain before anything is started.

    Raises:
      SystemExit: with what is wrong.
    """
    setting = args.setting
    if "dense" not in setting.methods:
        raise SystemExit('--methods must have "dense", which others are compared with')
    if not all(2 <= n <= MAX_HOSTS for n in args.hosts) or not args.hosts:
        raise SystemExit(f"--hosts must be from 2 to {MAX_HOSTS}, got {args.hosts}")
    if not all(0 < mbit < math.inf for mbit in args.bandwidths_mbit):
        raise SystemExit(f"--bandwidths-mbit must be > 0, got {args.bandwidths_mbit}")
    if not all(0 < ratio < math.inf for ratio in args.ratios):
        raise SystemExit(f"--ratios must be > 0, got {args.ratios}")
    if not 1 <= setting.turns <= setting.steps:
        raise SystemExit(f"--turns must be from 1 to --steps, got {setting.turns}")
    for name in setting.methods:
        method(name)
    try:
        task = load(setting.task, args.data_dir, preset=setting.preset)
        rows = task.rows if setting.rows is None else setting.rows
        batches(task.train, rows=rows, replicas=max(args.hosts), seed=setting.seed)
    except (DataError, ValueError) as error:
        raise SystemExit(str(error)) from None


def measure(args: Args) -> None:
    """Time what is missing in the file, by one job for each number of hosts."""
    reason = Network.unavailable()
    if reason:
        print(f"{reason}; the figures will be of loopback")
    setting = dataclasses.asdict(args.setting)
    journal = Journal(args.out, setting | {"is_emulated": not reason})
    by_rate = [Link(bandwidth_mbit=x) for x in args.bandwidths_mbit]
    by_ratio = [Link(ratio=x) for x in args.ratios]
    wanted = [Link()] if reason else by_ratio or by_rate
    methods = args.setting.methods
    # Before the first job: from then on the file is theirs.
    missing = {n: missing_of(n, wanted, journal, methods) for n in args.hosts}
    for hosts, links in missing.items():
        if links:
            network = Loopback(hosts) if reason else Network(hosts)
            figures = [json.dumps(setting), json.dumps(links)]
            script = [str(INSIDE), str(args.data_dir), str(args.out), *figures]
            run(network, script, args.timeout_seconds)


def missing_of(
    hosts: int, wanted: Iterable[Link], journal: Journal, methods: Sequence[str]
) -> list[Link]:
    """The links without a line of every method; what they have is dropped."""
    lines = [x for x in journal.lines if x["hosts"] == hosts]
    found = {(link_of(x), x["method"]) for x in lines}
    is_whole = lambda link: all((link, name) in found for name in methods)
    missing = [link for link in wanted if not is_whole(link)]
    journal.drop(lambda x: x["hosts"] == hosts and link_of(x) in missing)
    return missing


def link_of(line: Line) -> Link:
    """The link that a line is of, as it was asked for."""
    ratio = line.get("ratio")
    return Link(None if ratio else line["bandwidth_mbit"], ratio)


def run(network: Hosts, script: list[str], timeout_seconds: float) -> None:
    """Run one job to its end.

    Raises:
      SystemExit: if a process died, or the time is over.
    """
    try:
        with network:
            network.launch(script).wait(timeout_seconds)
    except (NetworkError, ProcessDiedError, TimeoutError) as error:
        raise SystemExit(f"{network.hosts} hosts: {error}") from None


def main(args: Args) -> None:
    """Time, and print the tables."""
    check(args)
    measure(args)
    steptime_report.show(args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
