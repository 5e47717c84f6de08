"""The processes that train PyTorch's methods; `pytorch.train` starts them."""

# pyright: reportMissingImports=false

import dataclasses
import itertools
import math
import os
from typing import Any

import torch
from common.journal import Line, write
from common.statistics import target_of
from common.training import AVERAGED, EVERY, held_out_batches
from tasks import Task, load, pipeline
from torch import distributed
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pytorch.methods import averaging, optimizer_of, wrapped
from pytorch.models import as_tensors, build
from pytorch.train import Args

START = 10  # dense steps before PowerSGD and local steps begin


class Replica:
    """One process of the job: its task, and its held-out batches.

    Args:
      args: What to train.
      rank: The number of the process.
    """

    def __init__(self, args: Args, rank: int):
        self.args, self.rank = args, rank
        self.task: Task = load(args.task, args.data_dir)
        self.held_out = list(map(as_tensors, held_out_batches(self.task.test)))

    def train(self, name: str, seed: int, target: float | None) -> Line:
        """Train until the target is reached; without one, all steps of a dense run."""
        args = self.args
        torch.manual_seed(seed)
        plain = build(args.task)
        model = wrapped(plain, name, START)
        rate = args.multiple * self.task.learning_rate
        inner = optimizer_of(plain, args.optimizer, rate)
        ramp = max(1, args.steps // 20)
        schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda i: min(1, i / ramp))
        optimizer = averaging(inner, name, START)
        average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(1 - AVERAGED))
        average.n_averaged += 1  # it begins at the initial params
        stream = self._batches(seed)
        losses: list[float] = []
        longest = args.steps if target is None else round(args.longest * args.steps)
        for _ in range(longest // EVERY):
            for batch in itertools.islice(stream, EVERY):
                optimizer.zero_grad()
                model(as_tensors(batch)).backward()
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                average.update_parameters(plain)
            loss = self._loss(average)
            if not math.isfinite(loss) and target is None:
                raise SystemExit(f"dense steps of seed {seed} diverged")
            if not math.isfinite(loss):
                break
            losses.append(loss)
            if target is not None and loss <= target:
                break
        return {
            "target": target_of(losses) if target is None else target,
            "losses": losses,
            "steps": [EVERY * (i + 1) for i in range(len(losses))],
        }

    def _batches(self, seed: int) -> Any:
        return pipeline.batches(
            self.task.train,
            rows=self.task.rows,
            replicas=self.args.hosts,
            seed=seed,
            local=range(self.rank, self.rank + 1),
        )

    @torch.no_grad()
    def _loss(self, average: Any) -> float:
        """Return the held-out loss of the mean of all replicas' averaged params.

        Each goes on from that mean, which changes nothing: averages are linear.
        """
        for x in average.module.parameters():
            distributed.all_reduce(x, distributed.ReduceOp.SUM)
            x /= self.args.hosts
        mine = self.held_out[self.rank :: self.args.hosts]
        total = sum((average(x).double() for x in mine), torch.zeros(()).double())
        distributed.all_reduce(total)
        return round(float(total) / len(self.held_out), 6)


@dataclasses.dataclass(frozen=True)
class Work:
    """What the processes of a job do.

    Args:
      args: What to train.
      missing: The seeds and methods of runs to make.
      targets: The target of each seed that has one.
      meeting: A file by which the processes find each other.
    """

    args: Args
    missing: list[tuple[int, str]]
    targets: dict[int, float]
    meeting: str


def work(rank: int, job: Work) -> None:
    """Make the missing runs in one process; the first one writes them."""
    args, targets = job.args, dict(job.targets)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{job.meeting}", rank=rank, world_size=args.hosts
    )
    replica = Replica(args, rank)
    for seed, name in job.missing:
        line = replica.train(name, seed, targets.get(seed))
        targets[seed] = line["target"]
        if rank == 0:
            write(args.out, {"seed": seed, "method": name, **line})
    distributed.barrier()
    distributed.destroy_process_group()
    # When the interpreter ends, some of PyTorch's threads may still run: it aborts.
    os._exit(0)


def start(job: Work) -> None:
    """Start the processes, and wait for their end."""
    torch.multiprocessing.spawn(work, (job,), nprocs=job.args.hosts)
