"""One process of the step timing: it trains, takes times and counts bytes.

steptime.py starts one in every host of a network, and has the definitions.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

sys.path.insert(0, str(Path(__file__).parents[1]))
import network
from dense import wire_bytes
from journal import quartiles
from steptime_methods import Runner, method
from tasks import Task, load
from tasks.pipeline import batches

WARM_UP_STEPS = 3
ALONE_EVERY = 4  # parts are timed of one step in so many: each costs as much again
PROBED_STEPS = 20  # of computation, to find the bandwidth of a ratio
MAX_MBIT = 4000  # emulated links of more are slower than those without a limit


@dataclasses.dataclass(frozen=True)
class Setting:
    """What every figure of a record depends on."""

    methods: tuple[str, ...] = (
        "dense",
        "dense16",
        "default",
        "fixed10",
        "fixed100",
        "fixed1000",
    )
    """Names as in steptime_methods.py; "dense" must be among them."""
    task: str = "lstm-bytes"
    """What to train."""
    preset: str = "tiny"
    """Its size."""
    rows: int | None = None
    """Examples per replica and step; default: what the preset suggests."""
    steps: int = 100
    """Timed steps of each method at each bandwidth."""
    turns: int = 5
    """In so many turns."""
    settle_steps: int = 200
    """Training steps of a method that chooses, before it is timed at a bandwidth."""
    seed: int = 0
    """Of params and batches."""


class Link(NamedTuple):
    """What every host has: one of both figures, or neither for no limit."""

    bandwidth_mbit: float | None = None
    ratio: float | None = None  # of a dense exchange to computation


@dataclasses.dataclass
class Log:
    """What one process measures of one method at one bandwidth."""

    whole_seconds: list[float] = dataclasses.field(default_factory=list)
    # Of some steps: whole, alone, and the wait after it.
    part_seconds: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    factors: list[float] = dataclasses.field(default_factory=list)
    rungs: list[int] = dataclasses.field(default_factory=list)
    wire_bytes: list[float] = dataclasses.field(default_factory=list)
    sent_bytes: int = 0


class Replica:
    """This process's part in the job.

    Args:
      setting: what to time.
      data_dir: where the task's files are.
    """

    def __init__(self, setting: Setting, data_dir: Path) -> None:
        self.setting = setting
        self.links = network.attach()
        self.process, self.replicas = jax.process_index(), jax.process_count()
        mesh = jax.make_mesh((self.replicas,), ("data",))
        self.meet = _meeting(mesh)
        task = load(setting.task, data_dir, preset=setting.preset)
        params = task.init(jax.random.key(setting.seed))
        self.params = sum(x.size for x in jax.tree.leaves(params))
        self.runners = [Runner(method(x), task, params, mesh) for x in setting.methods]
        self._prepare(task)

    def _prepare(self, task: Task) -> None:
        """Draw the batches, the same for all methods; compile, and let settle."""
        source = batches(
            task.train,
            rows=self.setting.rows or task.rows,
            replicas=self.replicas,
            seed=self.setting.seed,
            local=range(self.process, self.process + 1),
        )
        draw = lambda steps: [next(source) for _ in range(steps)]
        self.data = draw(self.setting.steps)
        warm_up, self.settling = draw(WARM_UP_STEPS), draw(self.setting.settle_steps)
        for runner in self.runners:
            runner.prepare(warm_up)
        self.meet()
        (dense,) = (x for x in self.runners if x.method.name == "dense")
        batch = warm_up[0]
        taken = [dense.alone.advance(batch, np.int32(0)) for _ in range(PROBED_STEPS)]
        self.compute_seconds = float(np.median(_everybody(taken)))

    def measure(self, link: Link) -> list[dict[str, Any]]:
        """Time all methods on one network, in turns.

        Args:
          link: that of every host from now on.

        Returns:
          A line per method.
        """
        bandwidth_mbit = self._bandwidth_mbit(link)
        self._set_bandwidth(bandwidth_mbit)
        logs = {runner.method.name: Log() for runner in self.runners}
        for runner in self.runners:
            runner.begin(self.settling)
        size = -(-self.setting.steps // self.setting.turns)
        for turn, start in enumerate(range(0, self.setting.steps, size)):
            first = turn % len(self.runners)
            for runner in [*self.runners[first:], *self.runners[:first]]:
                log = logs[runner.method.name]
                self._time(runner, self.data[start : start + size], log)
        return [
            {
                "hosts": self.replicas,
                "bandwidth_mbit": bandwidth_mbit,
                "ratio": link.ratio,
                "network": self.links.label,
                "method": name,
                "params": self.params,
                **self._summarize(log, logs["dense"]),
            }
            for name, log in logs.items()
        ]

    def _bandwidth_mbit(self, link: Link) -> float | None:
        """In two digits, where it is that of a ratio."""
        if link.ratio is None:
            return link.bandwidth_mbit
        dense_bytes = wire_bytes(self.params, self.replicas, value_bytes=4)
        mbit = 8e-6 * dense_bytes / (link.ratio * self.compute_seconds)
        return None if mbit > MAX_MBIT else float(f"{mbit:.2g}")

    def _set_bandwidth(self, bandwidth_mbit: float | None) -> None:
        self.meet()  # whatever is under way may be lost
        if self.process == 0 and self.links.hosts:
            self.links.set_bandwidth(bandwidth_mbit)
        self.meet()

    def _time(self, runner: Runner, data: Sequence[Any], log: Log) -> None:
        """One turn of one method: whole steps, then some of them alone."""
        self.meet()
        before = self._sent_bytes()
        taken = [(batch, *self._time_whole(runner, batch, log)) for batch in data]
        self.meet()
        log.sent_bytes += self._sent_bytes() - before
        for batch, whole_seconds, rung in taken[::ALONE_EVERY]:
            alone_seconds = runner.alone.advance(batch, rung)
            start = time.perf_counter()
            self.meet()
            wait_seconds = time.perf_counter() - start
            log.part_seconds.append((whole_seconds, alone_seconds, wait_seconds))

    def _time_whole(self, runner: Runner, batch: Any, log: Log) -> tuple[float, Any]:
        """One step; returns its seconds and its rung."""
        seconds = runner.advance(batch)
        if value_bytes := runner.method.value_bytes:
            factor, sent = 1.0, wire_bytes(self.params, self.replicas, value_bytes)
        else:
            info = optax.tree.get(runner.whole.state, "StepInfo")
            factor, sent = float(info.factor), float(info.wire_bytes)
        log.whole_seconds.append(seconds)
        log.factors.append(factor)
        log.wire_bytes.append(sent)
        log.rungs.append(runner.method.rung(factor))
        return seconds, np.int32(log.rungs[-1])

    def _sent_bytes(self) -> int:
        counts = self.links.traffic()
        return counts[self.process].sent_bytes if counts else 0

    def _summarize(self, log: Log, dense: Log) -> dict[str, Any]:
        """Quartiles over the steps, from what all processes have measured."""
        step = _everybody(log.whole_seconds).max(0)
        # [replicas, steps] each; a dense step alone is all computation.
        whole, alone, wait = np.moveaxis(_everybody(log.part_seconds), 2, 0)
        compute = _everybody(dense.part_seconds)[:, :, 1]
        seconds = {
            "step_seconds": step,
            "compute_seconds": compute.mean(0),
            "selection_seconds": (alone - compute).mean(0),
            "wait_seconds": wait.mean(0),
            "exchange_seconds": whole.max(0) - (alone + wait).mean(0),
            "slowest_compute_seconds": compute.max(0),
        }
        interface_bytes = _everybody(log.sent_bytes / len(step)).mean()
        return {
            **{name: quartiles(x) for name, x in seconds.items()},
            "steps": len(step),
            "mean_step_seconds": round(float(step.mean()), 6),
            "timed_alone": whole.shape[1],
            # Of all entries over all that were sent: rungs alternate.
            "factor": float(1 / np.mean(1 / np.asarray(log.factors))),
            "factors": [min(log.factors), max(log.factors)],
            "taken": np.bincount(log.rungs).tolist(),
            "wire_bytes": float(np.mean(log.wire_bytes)),
            "interface_bytes": float(interface_bytes) if self.links.hosts else None,
        }


def _meeting(mesh: jax.sharding.Mesh) -> Callable[[], Any]:
    """An empty all-reduce: nobody is through it before everybody is there."""
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    ones = jax.make_array_from_process_local_data(sharding, np.ones(1, np.float32))
    specs = {"mesh": mesh, "in_specs": jax.P("data"), "out_specs": jax.P()}
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), **specs))
    return lambda: jax.block_until_ready(total(ones))


def _everybody(figures: Any) -> np.ndarray:
    """`[replicas, ...]`, what every process has."""
    return multihost_utils.process_allgather(np.asarray(figures, np.float32))


def main(data_dir: str, out: str, setting: str, links: str) -> None:
    """Time everything, one network after the other; process 0 appends to `out`."""
    replica = Replica(Setting(**json.loads(setting)), Path(data_dir))
    for link in json.loads(links):
        lines = replica.measure(Link(*link))
        if replica.process == 0:
            with Path(out).open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
