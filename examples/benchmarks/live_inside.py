"""One process of a live run: it trains with every method in turn, and takes times.

live.py starts one in every host of a network, and has the definitions.
"""

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

sys.path.insert(0, str(Path(__file__).parents[1]))
import network
from closed_loop import AVERAGED
from dense import wire_bytes
from steptime_methods import method
from tasks import Task, load
from tasks.pipeline import batches, evaluation

import gravac_jax as gravac

WARM_UP_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Setting:
    """What every figure of a record depends on."""

    methods: tuple[str, ...] = ("dense", "fastest", "gravac", "fixed10", "fixed100")
    """Names as in methods.py."""
    bandwidths_mbit: tuple[float, ...] = (1000, 100, 1000)
    """Of every link, phase by phase."""
    steps: int = 600
    """Of every method in a phase."""
    turn: int = 20
    """Steps of a method before the next one has its turn."""
    task: str = "lstm-bytes"
    """What to train."""
    preset: str = "tiny"
    """Its size."""
    learning_rate: float | None = None
    """Default: what the preset suggests."""
    warm_up_steps: int = 25
    """In which the learning rate rises to that."""
    seed: int = 0
    """Of params and batches."""


class Racer:
    """One method: its state, its clock, and its compiled step."""

    def __init__(
        self, name: str, task: Task, params: Any, mesh: Any, setting: Setting
    ) -> None:
        rate = setting.learning_rate or task.learning_rate
        ramp = optax.linear_schedule(0, rate, setting.warm_up_steps)
        chosen = method(name)
        tx = optax.chain(
            chosen.exchange,
            optax.clip_by_global_norm(1.0),
            optax.sgd(ramp, momentum=0.9, nesterov=True),
        )

        entries = sum(x.size for x in jax.tree.leaves(params))
        dense_bytes = wire_bytes(entries, jax.process_count(), chosen.value_bytes or 4)

        def train_step(params: Any, opt_state: Any, batch: Any, **times: Any) -> Any:
            loss, grads = gravac.value_and_grad(task.loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params, **times)
            info = optax.tree.get(opt_state, "StepInfo")
            # A baseline of its own has no report: all of its steps are dense.
            dense = np.float32(1), np.float32(dense_bytes)
            report = dense if info is None else (info.factor, info.wire_bytes)
            params = optax.apply_updates(params, updates)
            return params, opt_state, (loss, *report)

        self.name = name
        self.step = gravac.data_parallel(train_step, mesh)
        self._first = params, tx.init(params)
        self.mesh = mesh

    def begin(self, data: Sequence[Any]) -> None:
        """Compile; then all begins anew."""
        self._reset()
        self.advance(data)
        self._reset()

    def _reset(self) -> None:
        self.clock = gravac.StepClock()
        self.state = gravac.place(self._first, self.mesh)
        self.average = jax.tree.map(jnp.copy, self._first[0])

    def advance(self, data: Sequence[Any]) -> dict[str, Any]:
        """Train on `data`, as fast as it goes; seconds are those of all its steps."""
        seen = []
        start = time.perf_counter()
        for batch in data:
            *self.state, report = self.step(*self.state, batch, **self.clock.times())
            self.clock.record(report[0])
            seen.append(report)
        self.clock.wait()
        seconds = time.perf_counter() - start
        losses, factors, sent = np.asarray(jax.device_get(seen), np.float64).T
        mine = jax.tree.map(lambda x: x.addressable_data(0), self.state[0])
        self.average = _mixed(self.average, mine, 1 - (1 - AVERAGED) ** len(data))
        return {
            "seconds": round(seconds, 6),
            "factors": factors.round(1).tolist(),
            "wire_bytes": float(sent.sum()),
            "training_loss": round(float(losses.mean()), 5),
        }


class Race:
    """This process's part in the job."""

    def __init__(self, setting: Setting, data_dir: Path) -> None:
        self.setting, self.links = setting, network.attach()
        self.process, self.replicas = jax.process_index(), jax.process_count()
        mesh = jax.make_mesh((self.replicas,), ("data",))
        task = load(setting.task, data_dir, preset=setting.preset)
        params = task.init(jax.random.key(setting.seed))
        source = batches(
            task.train,
            rows=task.rows,
            replicas=self.replicas,
            seed=setting.seed,
            local=range(self.process, self.process + 1),
        )
        self.draw = lambda steps: [next(source) for _ in range(steps)]
        self.held_out = list(itertools.islice(evaluation(task.test, 128), 8))
        self.loss = jax.jit(task.loss)
        self.racers = [Racer(x, task, params, mesh, setting) for x in setting.methods]
        warm_up = self.draw(WARM_UP_STEPS)
        for racer in self.racers:
            racer.begin(warm_up)

    def run(self) -> Iterator[dict[str, Any]]:
        """All phases; a line for every turn of every method."""
        turns = self.setting.steps // self.setting.turn
        for phase, bandwidth_mbit in enumerate(self.setting.bandwidths_mbit):
            self._meet()
            if self.process == 0 and self.links.hosts:
                self.links.set_bandwidth(bandwidth_mbit)
            for turn in range(turns):
                data = self.draw(self.setting.turn)
                first = turn % len(self.racers)
                for racer in [*self.racers[first:], *self.racers[:first]]:
                    self._meet()
                    line = racer.advance(data)
                    yield {
                        "method": racer.name,
                        "phase": phase,
                        "bandwidth_mbit": bandwidth_mbit,
                        "network": self.links.label,
                        "step": (phase * turns + turn + 1) * self.setting.turn,
                        **line,
                        "held_out_loss": round(self._evaluate(racer), 5),
                    }

    def _evaluate(self, racer: Racer) -> float:
        losses = [self.loss(racer.average, batch) for batch in self.held_out]
        return float(np.mean(losses))

    def _meet(self) -> None:
        multihost_utils.sync_global_devices("meet")


@jax.jit
def _mixed(average: Any, params: Any, weight: jax.Array) -> Any:
    return jax.tree.map(lambda x, y: x + weight * (y - x), average, params)


def main(data_dir: str, out: str, setting: str) -> None:
    """Race; the first process writes."""
    race = Race(Setting(**json.loads(setting)), Path(data_dir))
    for line in race.run():
        if race.process == 0:
            with Path(out).open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
