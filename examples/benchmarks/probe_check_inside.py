"""One process of the probe's check: it times steps, probes, and times steps again.

probe_check.py starts one in every host of a network, and has the definitions.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

sys.path.insert(0, str(Path(__file__).parents[1]))
import network
from dense import dense32
from journal import quartiles
from steptime_methods import Trainer
from tasks import load
from tasks.pipeline import batches

import gravac_jax as gravac
from gravac_jax import probe

WARM_UP_STEPS = 3
LEARNING_RATE = 1e-3  # the probe's own
PAST_LOOKING = 33  # the first steps of a run look at all rungs
EXCHANGES = {
    "all-gather": gravac.AllGather(),
    "all-gather-8": gravac.AllGather(values=gravac.Float32(), indices=gravac.Int32()),
    "leader": gravac.LeaderIndices(),
    "low-rank": gravac.LowRank(),
}
LEAST_SPEED_UP = 1.05


@dataclasses.dataclass(frozen=True)
class Setting:
    """What every figure of a record depends on."""

    task: str = "lstm-bytes"
    """What to train."""
    preset: str = "tiny"
    """Its size."""
    exchanges: tuple[str, ...] = ("all-gather",)
    """As the probe names them, without "dense-16"."""
    rungs: tuple[float, ...] = (10, 100, 1000)
    """Beside dense steps and the transform's own."""
    steps: int = 20
    """Timed steps of each rung, before the probe, and as many after it."""
    seconds: float = 20
    """The probe's own."""
    seed: int = 0
    """Of params and batches."""


def loss() -> tuple[Callable[..., Any], Any, Any]:
    """What the probe is given, from this process's own arguments."""
    setting, task = Setting(**json.loads(sys.argv[3])), None
    task = load(setting.task, Path(sys.argv[1]), preset=setting.preset)
    source = batches(task.train, rows=task.rows, replicas=1, seed=setting.seed)
    return task.loss, task.init(jax.random.key(setting.seed)), next(source)


class Replica:
    """This process's part in the job."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.links = network.attach()
        self.mesh = jax.make_mesh((jax.process_count(),), ("data",))
        function, params, self.batch = loss()
        self.runs: dict[tuple[str, float], Callable[[], float]] = {}
        dense = self._trainer(function, params, dense32())
        self.runs["dense", 1.0] = functools.partial(dense.advance, self.batch)
        for name in setting.exchanges:
            ladder = (1.0, *setting.rungs)
            controller = gravac.Fastest(ladder)
            tx = gravac.transform(exchange=EXCHANGES[name], controller=controller)
            trainer = self._trainer(function, params, tx)
            for rung, factor in enumerate(ladder):
                key = (name if rung else "dense rung", factor)
                advance = functools.partial(trainer.advance, self.batch)
                self.runs.setdefault(
                    key, functools.partial(advance, rung=np.int32(rung))
                )

    def _trainer(self, loss: Any, params: Any, exchange: Any) -> Trainer:
        tx = optax.chain(exchange, optax.sgd(LEARNING_RATE))

        def step(params: Any, opt_state: Any, batch: Any, **at: Any) -> Any:
            value, grads = gravac.value_and_grad(loss)(params, batch)
            if at:
                opt_state = optax.tree.set(opt_state, steps=PAST_LOOKING, **at)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        state = gravac.place((params, tx.init(params)), self.mesh)
        return Trainer(gravac.data_parallel(step, self.mesh), state)

    def lines(self, bandwidth_mbit: float, path: Path) -> list[dict[str, Any]]:
        """Steps as timed and as predicted, at one bandwidth."""
        multihost_utils.sync_global_devices("before")
        if jax.process_index() == 0:
            self.links.set_bandwidth(bandwidth_mbit or None)
        multihost_utils.sync_global_devices("after")
        taken = self._steps()
        probe.main(self._arguments(path))
        later = self._steps()
        seconds = {x: np.concatenate([taken[x], later[x]]) for x in self.runs}
        if jax.process_index():
            return []
        found = json.loads(path.read_text())
        rows = {
            (x["exchange"], x["factor"]): x for x in (found["dense"], *found["rows"])
        }
        middle = np.median(seconds["dense", 1.0])
        return [
            {
                "bandwidth_mbit": bandwidth_mbit or None,
                "network": self.links.label,
                "params": found["params"],
                "exchange": name,
                "factor": factor,
                "step_seconds": quartiles(x),
                "predicted_seconds": rows[name, factor]["step_seconds"],
                "speed_up": float(middle / np.median(x)),
                "predicted_speed_up": rows[name, factor]["speed_up"],
                "least_speed_up": LEAST_SPEED_UP,
                "pays": rows[name, factor]["pays"],
                "selection_seconds": rows[name, factor]["selection_seconds"],
                "exchange_seconds": rows[name, factor]["exchange_seconds"],
                "compute_seconds": found["compute_seconds"],
                "verdict": found["verdict"],
            }
            for (name, factor), x in seconds.items()
        ]

    def _arguments(self, path: Path) -> list[str]:
        arguments = ["--loss", f"{Path(__file__).stem}:loss", "--json", str(path)]
        arguments += ["--rungs", *map(str, self.setting.rungs)]
        arguments += ["--exchanges", *self.setting.exchanges]
        return [*arguments, "--seconds", str(self.setting.seconds)]

    def _steps(self) -> dict[tuple[str, float], np.ndarray]:
        """`[steps]` seconds of every way, in turns, on the slowest host."""
        for run in self.runs.values():
            for _ in range(WARM_UP_STEPS):
                run()
        taken: dict[Any, list[float]] = {x: [] for x in self.runs}
        for _ in range(self.setting.steps):
            for name, run in self.runs.items():
                run()  # a step after its like, as in a run
                taken[name].append(run())
        names, seconds = list(taken), np.array(list(taken.values()), np.float32)
        slowest = multihost_utils.process_allgather(seconds).max(0)
        return dict(zip(names, slowest, strict=True))


def main(data_dir: str, out: str, setting: str, bandwidths_mbit: str) -> None:
    """Check at one bandwidth after the other; process 0 appends to `out`."""
    del data_dir  # of the loss
    replica = Replica(Setting(**json.loads(setting)))
    for bandwidth_mbit in json.loads(bandwidths_mbit):
        path = Path(out).with_suffix(f".{bandwidth_mbit:g}.json")
        lines = replica.lines(bandwidth_mbit, path)
        if lines:
            with Path(out).open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
