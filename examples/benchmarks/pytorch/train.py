"""Train PyTorch's methods to the loss of its own dense steps; needs torch.

The processes of a job, one a replica, train one method after the other over loopback:
steps to the target are counted here, and their seconds are those of `pytorch`. Batches,
averaged params and the target are as in `end_to_end`; the model begins at PyTorch's own
initial params.

    python examples/benchmarks pytorch.train --data-dir DIR --out OUT
"""

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import tempfile
from pathlib import Path
from typing import Literal

from common.journal import Journal, Line, configuration, read
from common.report import markdown
from common.statistics import reached


@dataclasses.dataclass(frozen=True)
class Args:
    """What to train, and how long.

    Args:
      data_dir: The folder of the task's files.
      out: The record, JSONL; runs that are in it are not made again.
      task: What to train.
      hosts: The number of replicas.
      methods: As in `pytorch`; the first is "dense", which sets the target.
      seeds: The number of paired seeds, which are 0, 1, ...
      steps: Steps of a dense run.
      longest: Others run at most this many times as long.
      multiple: The learning rate, in units of the task's own; constant after a short
        warm-up.
      optimizer: What follows the mean.
    """

    data_dir: Path
    out: Path
    task: str = "lstm-ptb"
    hosts: int = 2
    methods: tuple[str, ...] = (
        *("dense", "fp16", "powersgd1", "powersgd4", "topk10", "topk100"),
        *("postlocal4", "postlocal16"),
    )
    seeds: int = 3
    steps: int = 500
    longest: float = 2.0
    multiple: float = 2.0
    optimizer: Literal["sgd", "adam"] = "sgd"


def race(args: Args) -> list[Line]:
    """Make the runs that are missing, and return all of them.

    Raises:
      SystemExit: Without torch, and if the first method is not "dense".
    """
    if args.methods[:1] != ("dense",):
        raise SystemExit(f'--methods must begin with "dense", got {args.methods}')
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("there is no torch: `pip install torch`")
    from pytorch import trainer

    version = importlib.metadata.version("torch")
    own = configuration(args, "seeds", "methods") | {"torch": version}
    journal = Journal(args.out, own)
    wanted = itertools.product(range(args.seeds), args.methods)
    missing = [(s, m) for s, m in wanted if not journal.find(seed=s, method=m)]
    targets = {x["seed"]: x["target"] for x in journal.lines}
    with tempfile.TemporaryDirectory() as folder:
        if missing:
            meeting = f"{folder}/meeting"
            trainer.start(trainer.Work(args, missing, targets, meeting))
    return read(args.out)[1]


def main(args: Args) -> None:
    """Train, and print the steps to the target."""
    runs = race(args)
    rows = [["method", "steps to the target, by seed"]]
    for name in args.methods:
        found = [x for x in runs if x["method"] == name]
        steps = [reached(x["losses"], x["steps"], x["target"]) for x in found]
        rows.append([name, ", ".join("-" if x is None else f"{x:.0f}" for x in steps)])
    print(markdown(rows))
