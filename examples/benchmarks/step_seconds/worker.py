"""One process of the step timing: it trains, takes times and counts bytes.

`step_seconds.run` starts one in every host of a network, and has the definitions.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from common import training
from common.hosts import Member
from common.journal import Line
from common.statistics import in_turn, quartiles
from tasks import load

from step_seconds.methods import PLAIN, Runner, all_reduce_bytes, ladder_of

WARM_UP_STEPS = 3
ALONE_EVERY = 4  # parts are timed of one step in so many: each costs as much again
PROBED_STEPS = 20  # of computation, to find the bandwidth of a ratio
MAX_MBIT = 4000  # emulated links of more are slower than links without a limit


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all lines of a record depend on.

    Args:
      methods: Names as in training/methods.py, and "dense float16"; "dense" must be
        among them.
      task: What to train.
      rows: Examples per replica and step. Default: what the task suggests.
      optimizer: What follows the exchange of methods that do not exchange its steps.
      steps: Timed steps of each method at each bandwidth.
      turns: The number of turns in which these steps are timed.
      settle_steps: Training steps of a method that chooses what it sends, before it is
        timed at a bandwidth.
      seed: The seed of params and batches.
    """

    methods: tuple[str, ...] = (
        *("dense", 'Dense("bfloat16")', "own Fastest()"),
        *("own Bits(2)", "own Bits(1, turns=4)", "own TopK(100)"),
    )
    task: str = "lstm-bytes"
    rows: int | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    steps: int = 100
    turns: int = 5
    settle_steps: int = 200
    seed: int = 0


class Link(NamedTuple):
    """What every host has: a bandwidth or a ratio, or neither for no limit."""

    bandwidth_mbit: float | None = None
    ratio: float | None = None  # of a dense exchange to computation


@dataclasses.dataclass
class Log:
    """What one process measures of one method at one bandwidth.

    Attributes:
      whole_seconds: The seconds of whole steps.
      part_seconds: Of every fourth step: whole, alone, and the wait after it.
      rungs: The rung of each step.
      wire_bytes: The bytes of each step, as they are declared.
      sent_bytes: The bytes of all steps, as the interface has counted them.
    """

    whole_seconds: list[float] = dataclasses.field(default_factory=list)
    part_seconds: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    rungs: list[int] = dataclasses.field(default_factory=list)
    wire_bytes: list[float] = dataclasses.field(default_factory=list)
    sent_bytes: int = 0


class Replica(Member):
    """This process's part in the job.

    Args:
      setting: What to time.
      data_dir: The folder of the task's files.
    """

    def __init__(self, setting: Setting, data_dir: Path) -> None:
        super().__init__()
        self.setting = setting
        task = load(setting.task, data_dir)
        params = task.init(jax.random.key(setting.seed))
        self.params = training.size(params)
        self.runners = {
            name: Runner(name, task, params, self.mesh, setting.optimizer)
            for name in setting.methods
        }
        source = self.batches(task, setting.rows or task.rows, setting.seed)
        draw = lambda steps: [next(source) for _ in range(steps)]
        self.data = draw(setting.steps)
        warm_up, self.settling = draw(WARM_UP_STEPS), draw(setting.settle_steps)
        for runner in self.runners.values():
            runner.prepare(warm_up)
        self.meet()
        alone, batch = self.runners["dense"].alone, warm_up[0]
        taken = [alone.advance(batch, np.int32(0)) for _ in range(PROBED_STEPS)]
        self.compute_seconds = float(np.median(self.gather(taken)))

    def measure(self, link: Link) -> list[Line]:
        """Time all methods on one network, in turns, and return a line for each."""
        bandwidth_mbit = self._bandwidth_mbit(link)
        self.set_bandwidth(bandwidth_mbit)
        for runner in self.runners.values():
            runner.begin(self.settling)
        logs = {name: Log() for name in self.runners}
        size = -(-self.setting.steps // self.setting.turns)
        for turn, start in enumerate(range(0, self.setting.steps, size)):
            for name in in_turn(list(self.runners), turn):
                data = self.data[start : start + size]
                self._time(self.runners[name], data, logs[name])
        own = {"hosts": self.replicas, "params": self.params, "ratio": link.ratio}
        own |= {"bandwidth_mbit": bandwidth_mbit, "network": self.links.label}
        summarize = lambda name, log: self._summarize(name, log, logs["dense"])
        return [{**own, "method": x, **summarize(x, y)} for x, y in logs.items()]

    def _bandwidth_mbit(self, link: Link) -> float | None:
        """Return the link's bandwidth; in two digits, if it follows from a ratio."""
        if link.ratio is None:
            return link.bandwidth_mbit
        dense_bytes = all_reduce_bytes(self.params, self.replicas, "dense")
        mbit = 8e-6 * dense_bytes / (link.ratio * self.compute_seconds)
        return None if mbit > MAX_MBIT else float(f"{mbit:.2g}")

    def _time(self, runner: Runner, data: Sequence[Any], log: Log) -> None:
        """Time one turn of one method: whole steps, then some of them alone."""
        self.meet()
        before = self._sent_bytes()
        whole_seconds = [self._time_whole(runner, batch, log) for batch in data]
        self.meet()
        log.sent_bytes += self._sent_bytes() - before
        rungs = log.rungs[-len(data) :]
        for i in range(0, len(data), ALONE_EVERY):
            alone_seconds = runner.alone.advance(data[i], np.int32(rungs[i]))
            start = time.perf_counter()
            self.meet()
            wait_seconds = time.perf_counter() - start
            log.part_seconds.append((whole_seconds[i], alone_seconds, wait_seconds))

    def _time_whole(self, runner: Runner, batch: Any, log: Log) -> float:
        seconds = runner.advance(batch)
        if runner.name in PLAIN:
            rung, sent = 0, all_reduce_bytes(self.params, self.replicas, runner.name)
        else:
            info = optax.tree.get(runner.whole.state, "StepInfo")
            rung, sent = int(info.rung), float(info.wire_bytes)
        log.whole_seconds.append(seconds)
        log.wire_bytes.append(sent)
        log.rungs.append(rung)
        return seconds

    def _sent_bytes(self) -> int:
        return self.links.sent_bytes()[self.index]

    def _summarize(self, name: str, log: Log, dense: Log) -> Line:
        """Return quartiles over steps of what all processes have measured."""
        step = self.gather(log.whole_seconds).max(0)
        # [replicas, steps] each; a dense step alone is all computation.
        whole, alone, wait = np.moveaxis(self.gather(log.part_seconds), 2, 0)
        compute = self.gather(dense.part_seconds)[:, :, 1]
        seconds = {
            "step_seconds": step,
            "compute_seconds": compute.mean(0),
            "selection_seconds": (alone - compute).mean(0),
            "wait_seconds": wait.mean(0),
            "exchange_seconds": whole.max(0) - (alone + wait).mean(0),
            "slowest_compute_seconds": compute.max(0),
        }
        names = [*ladder_of(name), "local"]
        taken = {x: log.rungs.count(i) for i, x in enumerate(names)}
        interface_bytes = float(self.gather(log.sent_bytes / len(step)).mean())
        return {
            **{name: quartiles(x) for name, x in seconds.items()},
            "steps": len(step),
            "mean_step_seconds": round(float(step.mean()), 6),
            "taken": {x: n for x, n in taken.items() if n},
            "wire_bytes": float(np.mean(log.wire_bytes)),
            "interface_bytes": interface_bytes,
        }


def main(data_dir: str, out: str, setting: str, links: str) -> None:
    """Time everything, one network after the other; process 0 appends to `out`."""
    replica = Replica(Setting(**json.loads(setting)), Path(data_dir))
    for link in json.loads(links):
        replica.write(Path(out), *replica.measure(Link(*link)))
