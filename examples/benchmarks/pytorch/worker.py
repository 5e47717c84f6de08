"""One process of the PyTorch timing; `pytorch.run` starts one in every host."""

# pyright: reportMissingImports=false

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import network
from common.journal import write
from common.statistics import in_turn, quartiles
from torch import distributed

from pytorch.methods import averaging, optimizer_of, wrapped
from pytorch.models import ROWS, build, random_batch

START = 2  # dense steps before PowerSGD and local steps begin
WARM_UP_STEPS = 4
ALONE_EVERY = 4


def stepper(name: str | None, model: Any, kind: str) -> Callable[[Any], float]:
    """Return a train step that returns its seconds, with `step_seconds`' optimizer.

    Args:
      name: The method; None for a step without other replicas.
      model: The model.
      kind: The optimizer.
    """
    optimizer = optimizer_of(model, kind, 1e-3)
    if name is not None:
        model = wrapped(model, name, START)
        optimizer = averaging(optimizer, name, START)

    def step(batch: Any) -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        model(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - start

    return step


class Replica:
    """This process's part in the job."""

    def __init__(self, setting: dict[str, Any]) -> None:
        torch.set_num_threads(setting["threads"])
        torch.manual_seed(0)
        self.setting, self.links = setting, network.attach()
        self.rank, self.replicas = distributed.get_rank(), distributed.get_world_size()
        self.meet = distributed.barrier
        task, fresh = setting["task"], lambda: build(setting["task"])
        self.params = sum(x.numel() for x in fresh().parameters())
        kind = setting["optimizer"]
        self.alone = stepper(None, fresh(), kind)
        self.steps = {x: stepper(x, fresh(), kind) for x in setting["methods"]}
        draw = lambda: random_batch(task, setting["rows"] or ROWS)
        self.batches = [draw() for _ in range(setting["steps"])]
        for step in (self.alone, *self.steps.values()):
            for batch in self.batches[:WARM_UP_STEPS]:
                step(batch)

    def measure(self, bandwidth_mbit: float | None) -> dict[str, dict[str, Any]]:
        """Time all methods at one bandwidth, in turns."""
        self.meet()
        if self.rank == 0:
            self.links.set_bandwidth(bandwidth_mbit)
        self.meet()
        whole: dict[str, list[float]] = {name: [] for name in self.steps}
        alone: list[float] = []
        size = -(-self.setting["steps"] // self.setting["turns"])
        for turn in range(self.setting["turns"]):
            batches = self.batches[turn * size :][:size]
            for name in in_turn(list(self.steps), turn):
                self.meet()
                whole[name] += [self.steps[name](batch) for batch in batches]
                self.meet()
                alone += [self.alone(batch) for batch in batches[::ALONE_EVERY]]
        compute = quartiles(self._everybody(alone).mean(0))
        lines = {}
        for name, seconds in whole.items():
            slowest = self._everybody(seconds).max(0)
            lines[name] = {
                "step_seconds": quartiles(slowest),
                "mean_step_seconds": round(float(slowest.mean()), 6),
                "compute_seconds": compute,
                "steps": len(slowest),
            }
        return lines

    def _everybody(self, seconds: list[float]) -> np.ndarray:
        mine = torch.tensor(seconds)
        found = [torch.empty_like(mine) for _ in range(self.replicas)]
        distributed.all_gather(found, mine)
        return torch.stack(found).numpy()


def main(*args: str) -> None:
    """Time everything, one bandwidth after the other; the first process writes."""
    coordinator, hosts, rank, out, setting, links = args
    where = {"init_method": f"tcp://{coordinator}", "world_size": int(hosts)}
    distributed.init_process_group("gloo", rank=int(rank), **where)
    replica = Replica(json.loads(setting))
    for bandwidth_mbit, ratio in json.loads(links):
        own = {"hosts": int(hosts), "bandwidth_mbit": bandwidth_mbit, "ratio": ratio}
        own |= {"params": replica.params, "torch": torch.__version__}
        found = replica.measure(bandwidth_mbit)
        if replica.rank == 0:
            lines = [{**own, "method": name, **line} for name, line in found.items()]
            write(Path(out), *lines)
    distributed.destroy_process_group()
    # When the interpreter ends, some of PyTorch's threads may still run: it aborts.
    os._exit(0)
