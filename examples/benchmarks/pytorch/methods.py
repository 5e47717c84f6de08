"""PyTorch's ways to average gradients: its own, and the hooks that come with it."""

# pyright: reportMissingImports=false

import dataclasses
import re
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import (
    PeriodicModelAverager,
)
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

LOCAL = "postlocal"


@dataclasses.dataclass
class LargestEntries:
    """Error feedback, and an all-gather of the largest entries of each bucket."""

    factor: float
    residuals: dict[int, Any] = dataclasses.field(default_factory=dict)

    def hook(
        self, bucket: distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Return a future of the mean."""
        flat, replicas = bucket.buffer(), distributed.get_world_size()
        residual = self.residuals.get(bucket.index())
        if residual is not None and residual.shape == flat.shape:
            flat += residual
        count = max(1, round(flat.numel() / self.factor))
        at = torch.topk(flat.abs(), count, sorted=False).indices
        # Values and 32-bit places travel as one buffer.
        mine = torch.cat([flat[at].view(torch.int32), at.to(torch.int32)])
        flat[at] = 0
        self.residuals[bucket.index()] = flat.clone()
        gathered = [torch.empty_like(mine) for _ in range(replicas)]
        work = distributed.all_gather(gathered, mine, async_op=True)

        def add(_: Any) -> Any:
            flat.zero_()
            for payload in gathered:
                values, places = payload[:count].view(torch.float32), payload[count:]
                flat.index_add_(0, places, values, alpha=1 / replicas)
            return flat

        return work.get_future().then(add)


def parsed(name: str) -> tuple[str, int]:
    """Return the kind of a method, and its rank, factor or period.

    Raises:
      SystemExit: If there is no method of that name.
    """
    match = re.fullmatch(rf"(dense|fp16)|(powersgd|topk|{LOCAL})([1-9]\d*)", name)
    if match is None:
        known = f"dense, fp16, powersgd<rank>, topk<factor>, {LOCAL}<steps>"
        raise SystemExit(f"no method is called {name!r}; there are: {known}")
    return match[1] or match[2], int(match[3] or 0)


def wrapped(model: Any, name: str, start: int) -> Any:
    """Return the model under DDP, with the method's hook.

    Args:
      model: The model.
      name: "dense", "fp16", "powersgd1" of rank 1, "topk10" of a tenth of the entries,
        "postlocal4" of an average in every fourth step.
      start: The number of dense steps before PowerSGD and local steps begin. PowerSGD
        cannot begin before DDP's buckets are final, in the third step.
    """
    kind, number = parsed(name)
    # On gloo, PowerSGD's callbacks of several buckets run in another order on every
    # replica, and receive each other's data.
    whole = {"bucket_cap_mb": 1000} if kind == "powersgd" else {}
    model = DistributedDataParallel(model, gradient_as_bucket_view=True, **whole)
    if kind == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, number, start_powerSGD_iter=start)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif kind == "topk":
        model.register_comm_hook(LargestEntries(number), LargestEntries.hook)
    elif kind == LOCAL:
        alone, _ = distributed.new_subgroups(group_size=1)
        state = post_localSGD_hook.PostLocalSGDState(None, alone, start)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return model


def optimizer_of(model: Any, kind: str, learning_rate: float) -> torch.optim.Optimizer:
    """Return Adam, or SGD with Nesterov's momentum."""
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), learning_rate)
    return torch.optim.SGD(
        model.parameters(), learning_rate, momentum=0.9, nesterov=True
    )


def averaging(optimizer: torch.optim.Optimizer, name: str, start: int) -> Any:
    """Return the optimizer, which averages params too if steps are local."""
    kind, period = parsed(name)
    if kind != LOCAL:
        return optimizer
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period, start))
