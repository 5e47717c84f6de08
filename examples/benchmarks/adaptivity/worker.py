"""One process of a live race: it trains with every method in turn, and takes times.

`adaptivity.run` starts one in every host of a network, and has the definitions.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.hosts import Member
from common.journal import Line
from common.statistics import in_turn
from common.training import AVERAGED, averaged, held_out_loss, size, train_step
from step_seconds.methods import all_reduce_bytes, is_own, ladder_of, optimizer_of
from tasks import Task, load
from training.methods import DENSE, OPTIMIZERS

import gravac_jax as gravac

WARM_UP_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all lines of a record depend on.

    Args:
      methods: Names as in `step_seconds`.
      bandwidths_mbit: The bandwidth of every link, phase by phase.
      steps: Steps of every method in a phase.
      turn: Steps of a method before the next one has its turn.
      task: What to train.
      learning_rate: The learning rate. Default: what the task suggests.
      warm_up_steps: Steps in which the learning rate rises.
      seed: The seed of params and batches.
    """

    methods: tuple[str, ...] = (
        *("dense", "own Fastest()", "own GraVAC()", "own Bits(2)", "own TopK(100)"),
    )
    bandwidths_mbit: tuple[float, ...] = (1000, 100, 1000)
    steps: int = 600
    turn: int = 20
    task: str = "lstm-bytes"
    learning_rate: float | None = None
    warm_up_steps: int = 25
    seed: int = 0


class Racer:
    """One method: its state, its clock, and its compiled step."""

    def __init__(
        self, name: str, task: Task, params: Any, mesh: Any, setting: Setting
    ) -> None:
        rate = setting.learning_rate or task.learning_rate
        ramp = optax.linear_schedule(0, rate, setting.warm_up_steps)
        tx = optimizer_of(name, OPTIMIZERS["sgd"], ramp)
        step = train_step(tx, task.loss, is_own(name))
        dense_bytes = all_reduce_bytes(size(params), mesh.size, DENSE)

        def reported(params: Any, opt_state: Any, batch: Any, **times: Any) -> Any:
            params, opt_state, loss = step(params, opt_state, batch, **times)
            if name == DENSE:  # a plain all-reduce, which has no report
                report = np.int32(0), np.float32(dense_bytes)
            else:
                info = optax.tree.get(opt_state, "StepInfo")
                report = info.rung, info.wire_bytes
            return params, opt_state, (loss, *report)

        self.name = name
        self.step = gravac.data_parallel(reported, mesh)
        self._first = params, tx.init(params)
        self.mesh = mesh

    def begin(self, data: Sequence[Any]) -> None:
        """Compile the step by training on `data`, then go back to the initial state."""
        self._reset()
        self.advance(data)
        self._reset()

    def _reset(self) -> None:
        self.clock = gravac.StepClock()
        self.state = gravac.place(self._first, self.mesh)
        self.average = jax.tree.map(jnp.copy, self._first[0])

    def advance(self, data: Sequence[Any]) -> Line:
        """Train on `data`, as fast as it goes; seconds are those of all its steps."""
        seen = []
        start = time.perf_counter()
        for batch in data:
            *self.state, report = self.step(*self.state, batch, **self.clock.times())
            self.clock.record(report[0])
            seen.append(report)
        self.clock.wait()
        seconds = time.perf_counter() - start
        losses, rungs, sent = np.asarray(jax.device_get(seen), np.float64).T
        mine = jax.tree.map(lambda x: x.addressable_data(0), self.state[0])
        self.average = _averaged(self.average, mine, 1 - (1 - AVERAGED) ** len(data))
        return {
            "seconds": round(seconds, 6),
            "last": [*ladder_of(self.name), "local"][int(rungs[-1])],
            "wire_bytes": float(sent.sum()),
            "training_loss": round(float(losses.mean()), 5),
        }


_averaged = jax.jit(averaged)


class Race(Member):
    """This process's part in the job."""

    def __init__(self, setting: Setting, data_dir: Path) -> None:
        super().__init__()
        self.setting = setting
        task = load(setting.task, data_dir)
        params = task.init(jax.random.key(setting.seed))
        source = self.batches(task, task.rows, setting.seed)
        self.draw = lambda steps: [next(source) for _ in range(steps)]
        self.held_out_loss = held_out_loss(task, task.test)
        self.racers = [
            Racer(name, task, params, self.mesh, setting) for name in setting.methods
        ]
        warm_up = self.draw(WARM_UP_STEPS)
        for racer in self.racers:
            racer.begin(warm_up)

    def run(self) -> Iterator[Line]:
        """Run all phases, and yield a line for every turn of every method."""
        turns = self.setting.steps // self.setting.turn
        for phase, bandwidth_mbit in enumerate(self.setting.bandwidths_mbit):
            self.set_bandwidth(bandwidth_mbit)
            for turn in range(turns):
                data = self.draw(self.setting.turn)
                for racer in in_turn(self.racers, turn):
                    self.meet()
                    line = racer.advance(data)
                    yield {
                        "method": racer.name,
                        "phase": phase,
                        "bandwidth_mbit": bandwidth_mbit,
                        "network": self.links.label,
                        "step": (phase * turns + turn + 1) * self.setting.turn,
                        **line,
                        "held_out_loss": round(self.held_out_loss(racer.average), 5),
                    }


def main(data_dir: str, out: str, setting: str) -> None:
    """Race; the first process writes."""
    race = Race(Setting(**json.loads(setting)), Path(data_dir))
    for line in race.run():
        race.write(Path(out), line)
