"""Time a train step on an emulated network, and split it into its parts.

Every method trains the same model from the same params on the same batches. All are
compiled first; then, at each bandwidth, they take turns of a few steps, in rotating
order, so that whatever else the machine does falls on all alike. The record has the
quartiles over steps of these seconds:

- `step`: the compiled step of `gravac.data_parallel`, as people run it, until its last
  result is there; on the slowest replica. The mean loss comes with the exchange of all
  but dense steps and late ones. Speed-ups are of the mean of steps, since rungs may
  alternate. The other seconds are means over replicas, of every fourth step.
- `compute`: that step without any exchange, every replica by itself with its own
  gradients, all processes at the same time.
- `selection`: how much longer that takes with all that the method does without other
  replicas, at the rung of the step. 0 for "dense", which has none.
- `wait`: from there to the end of an empty all-reduce: until the slowest replica is
  there, and one latency.
- `exchange`: the rest of the step. It includes adding up other replicas' payloads and
  the errors of all other parts; it may be negative.

With r a dense step's communication over its computation, no method that computes the
same gradients can be faster than it by more than 1 + r. Here 1 + r is the dense step
over `slowest compute`, a step's computation on the slowest replica; a method's share of
it is `slowest compute` over its own step, the same against every baseline.

With `--ratios` in place of bandwidths, a dense float32 exchange takes so many times as
long as computation did when the job began, by its bytes alone. Above 4 Gbit/s links are
left without a limit, which the machine does not reach.

A method that chooses what it sends is told the seconds of its steps, and trains for
some steps at each bandwidth before it is timed there: these are the seconds of that
stretch of a run, not of a whole one. `taken` counts the steps at each encoding.

The network needs root.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from common import hosts
from common.journal import Journal, Line
from common.network import MAX_HOSTS
from tasks import DataError, load
from tasks.pipeline import batches

from step_seconds import report
from step_seconds.methods import ladder_of
from step_seconds.worker import Link, Setting


@dataclasses.dataclass(frozen=True)
class Args:
    """Which steps to time, on which networks.

    Args:
      data_dir: The folder of the task's files.
      out: The record, JSONL; lines that are in it are not made again.
      hosts: Numbers of replicas, each in a host of its own.
      bandwidths_mbit: Bandwidths of each host's link in each direction.
      ratios: Ratios of a dense exchange to computation; they replace the bandwidths.
      timeout_seconds: Time for each number of hosts.
      setting: What all lines depend on.
    """

    data_dir: Path
    out: Path
    hosts: tuple[int, ...] = (2, 4)
    bandwidths_mbit: tuple[float, ...] = (1000, 300, 100)
    ratios: tuple[float, ...] = ()
    timeout_seconds: float = 7200
    setting: Annotated[Setting, tyro.conf.OmitArgPrefixes] = Setting()  # noqa: RUF009


def check(args: Args) -> None:
    """Refuse what cannot be timed, before anything is started.

    Raises:
      SystemExit: With what is wrong.
    """
    setting = args.setting
    if "dense" not in setting.methods:
        raise SystemExit('--methods must have "dense", which others are compared with')
    if not all(2 <= n <= MAX_HOSTS for n in args.hosts) or not args.hosts:
        raise SystemExit(f"--hosts must be from 2 to {MAX_HOSTS}, got {args.hosts}")
    if not all(0 < x < math.inf for x in (*args.bandwidths_mbit, *args.ratios)):
        raise SystemExit("--bandwidths-mbit and --ratios must be above 0")
    if not 1 <= setting.turns <= setting.steps:
        raise SystemExit(f"--turns must be from 1 to --steps, got {setting.turns}")
    for name in setting.methods:
        ladder_of(name)
    try:
        task = load(setting.task, args.data_dir)
        rows = task.rows if setting.rows is None else setting.rows
        batches(task.train, rows=rows, replicas=max(args.hosts), seed=setting.seed)
    except (DataError, ValueError) as error:
        raise SystemExit(str(error)) from None


def measure(args: Args) -> None:
    """Time what is missing in the file, by one job for each number of hosts."""
    setting = dataclasses.asdict(args.setting)
    journal = Journal(args.out, setting)
    by_rate = [Link(bandwidth_mbit=x) for x in args.bandwidths_mbit]
    wanted = [Link(ratio=x) for x in args.ratios] or by_rate
    methods = args.setting.methods
    # Found before the first job starts: from then on its processes write the file.
    missing = {n: missing_of(n, wanted, journal, methods) for n in args.hosts}
    for n, links in missing.items():
        if links:
            script = ["step_seconds.worker", str(args.data_dir), str(args.out)]
            script += [json.dumps(setting), json.dumps(links)]
            hosts.run(n, script, args.timeout_seconds)


def missing_of(
    n: int, wanted: Iterable[Link], journal: Journal, methods: Sequence[str]
) -> list[Link]:
    """Drop the lines of links that lack a method, and return these links."""
    found = {(link_of(x), x["method"]) for x in journal.find(hosts=n)}
    is_whole = lambda link: all((link, name) in found for name in methods)
    missing = [link for link in wanted if not is_whole(link)]
    journal.drop(lambda x: x["hosts"] == n and link_of(x) in missing)
    return missing


def link_of(line: Line) -> Link:
    """Return the link that a line is of, as it was asked for."""
    ratio = line.get("ratio")
    return Link(None if ratio else line["bandwidth_mbit"], ratio)


def main(args: Args) -> None:
    """Time, and print the tables."""
    check(args)
    measure(args)
    print(report.text(args.out))
