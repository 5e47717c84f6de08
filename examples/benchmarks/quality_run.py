"""One run of quality.py: from its last checkpoint to its last line."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from journal import Journal, Line
from tasks import PRESETS, TASKS, Task, load, pipeline
from training.methods import after, arguments, is_local

import gravac_jax as gravac
from gravac_jax import checkpoint

OPTIMIZERS = {
    "sgd": lambda: optax.trace(decay=0.9, nesterov=True),
    "adam": optax.scale_by_adam,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs of a record share."""

    task: Literal[*TASKS] = "lstm-bytes"
    """Data, model and loss."""
    preset: Literal[*PRESETS] = "tiny"
    """Size of the model."""
    replicas: int = 4
    """Simulated replicas, each with its own batches."""
    steps: int = 1000
    """Steps of a dense run, and of the tuning runs."""
    horizon: float = 1.0
    """Other methods than dense run this many times as long; the target of the report's
    "steps to target" is what dense reaches at 80% of its steps."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Of the learning rate, after a warm-up of a twentieth of the steps."""
    optimizer: Literal[*OPTIMIZERS] = "sgd"
    """After the exchange; momentum SGD is Nesterov's with 0.9."""
    multiples: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Learning rates to try for every method, in units of the task's own."""
    clip: float = 1.0
    """Largest global norm of the averaged gradient."""
    evaluations: int = 20
    """Evaluations in `steps` steps, evenly spaced."""
    evaluation_rows: int = 512
    """Held-out examples, the same ones each time; whole batches of 128."""


class Trial(NamedTuple):
    """One run: what is particular to it."""

    phase: str  # "tune" or "test"
    method: str
    learning_rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """As a folder's name."""
        return f"{self.phase}-{self.method}-{self.learning_rate:g}-{self.seed}"

    def owns(self, line: Line) -> bool:
        """Whether a line of the journal is of this run."""
        own = ("phase", "method", "learning_rate", "seed")
        return all(line[x] == getattr(self, x) for x in own)


class Bench:
    """The task and one compiled step per method, shared by all runs of a process."""

    def __init__(self, setting: Setting, data_dir: Path):
        """Read the data.

        Raises:
          DataError: if it cannot be read.
        """
        self.setting = setting
        self.task: Task = load(setting.task, data_dir, preset=setting.preset)
        self.loss = jax.jit(self.task.loss)
        self.init = jax.jit(self.task.init)
        self.compiled = functools.cache(self._compiled)
        self.held_out = functools.cache(self._held_out)

    def _compiled(self, name: str) -> tuple[Any, Any]:
        chosen = arguments(name)
        tx = optax.chain(
            gravac.transform(**chosen),
            *after(chosen, OPTIMIZERS[self.setting.optimizer](), self.setting.clip),
        )

        # The learning rate is an argument, so that a method compiles once for all runs.
        def train_step(
            params: Any, opt_state: Any, batch: Any, *, learning_rate: jax.Array
        ) -> Any:
            where = params
            if is_local(name):
                # What follows in the chain has no learning rate: it is applied here.
                own = gravac.local_params(tx, params, opt_state)
                where = jax.tree.map(
                    lambda p, x: p - learning_rate * (x - p), params, own
                )
            loss, grads = gravac.value_and_grad(self.task.loss)(where, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
            return params, opt_state, loss, optax.tree.get(opt_state, "StepInfo")

        return tx, gravac.simulate(train_step, self.setting.replicas)

    def _held_out(self, phase: str) -> list[Any]:
        source = {"tune": self.task.validation, "test": self.task.test}[phase]
        rows = min(len(source), self.setting.evaluation_rows, 128)
        count = max(1, self.setting.evaluation_rows // rows)
        return list(itertools.islice(pipeline.evaluation(source, rows), count))

    def digest(self) -> str:
        """Which data it is: a hash of what is held out, and of how much is not."""
        found = hashlib.sha256(str(len(self.task.train)).encode())
        for source in (self.task.validation, self.task.test):
            for i in range(len(source)):
                for leaf in jax.tree.leaves(source[i]):
                    found.update(np.ascontiguousarray(leaf).tobytes())
        return found.hexdigest()[:16]

    def evaluate(self, params: Any, phase: str) -> float:
        """Mean held-out loss."""
        losses = [self.loss(params, batch) for batch in self.held_out(phase)]
        return float(np.mean(jax.device_get(losses), dtype=np.float64))

    def start(self, trial: Trial) -> tuple[Any, Any]:
        """Initial state and batches; they depend on the seed alone."""
        tx, _ = self.compiled(trial.method)
        params = self.init(jax.random.key(trial.seed))
        state = gravac.place((params, tx.init(params)), self.setting.replicas)
        return state, self.batches(trial.seed)

    def batches(self, seed: int) -> Any:
        """Those of all replicas, for ever."""
        task, replicas = self.task, self.setting.replicas
        return pipeline.batches(
            task.train, rows=task.rows, replicas=replicas, seed=seed
        )


def learning_rate_at(step: int, trial: Trial, schedule: str) -> float:
    """Of step 0, 1, ...: a linear warm-up, then the schedule."""
    warm_up = max(1, trial.steps // 20)
    if step < warm_up:
        return trial.learning_rate * (step + 1) / warm_up
    if schedule == "constant":
        return trial.learning_rate
    done = (step - warm_up) / max(1, trial.steps - warm_up)
    return trial.learning_rate * (1 + math.cos(math.pi * done)) / 2


def run(
    trial: Trial, bench: Bench, journal: Journal, checkpoints: Path, tick: Any
) -> None:
    """Make one run, from its last checkpoint if there is one.

    Args:
      trial: the run.
      bench: its task and compiled steps.
      journal: gets a line per evaluation; lines of steps that are lost are dropped.
      checkpoints: a folder for those of all runs; this run's are removed at its end.
      tick: called with the number of steps that were done since the last call.
    """
    setting = bench.setting
    folder = checkpoints.absolute() / trial.name
    if not any(map(trial.owns, journal.lines)):
        shutil.rmtree(folder, ignore_errors=True)  # of a record that is gone
    every = max(1, setting.steps // setting.evaluations)
    _, step = bench.compiled(trial.method)
    state, stream = bench.start(trial)
    last = checkpoint.Checkpointer(folder, save_every=every, keep=1)
    with contextlib.closing(last) as checkpointer:
        totals, done = {}, 0
        if saved := checkpointer.restore(tuple(state), state[0]):
            state, done, totals = saved.tree, saved.step, saved.data["totals"]
            stream.set_state(saved.data["stream"])
        journal.drop(lambda line: trial.owns(line) and line["step"] > done)
        pending: list[Any] = []
        for i in range(done, trial.steps):
            rate = learning_rate_at(i, trial, setting.schedule)
            *state, loss, info = step(
                *state, next(stream), learning_rate=jnp.float32(rate)
            )
            pending.append((loss, info))
            tick(1 if i > done else i + 1)
            if (i + 1) % every and i + 1 < trial.steps:
                continue
            figures = add_up(totals, pending, setting.replicas)
            held_out = bench.evaluate(state[0], trial.phase)
            own = dict(zip(trial._fields[:-1], trial[:-1], strict=True))
            journal.append({**own, "step": i + 1, "loss": finite(held_out), **figures})
            place = {"totals": totals, "stream": stream.get_state()}
            checkpointer.save(i + 1, tuple(state), state[0], place)
    shutil.rmtree(folder)


def add_up(totals: Line, pending: list[Any], replicas: int) -> Line:
    """Add the steps since the last evaluation to `totals`; what its line says of them.

    A coordinate touch is one replica sending one coordinate: N / factor a step.
    """
    steps = jax.device_get(pending)
    pending.clear()
    for name in ("payload_bytes", "wire_bytes", "dense_bytes", "dense_wire_bytes"):
        sent = sum(int(getattr(info, name)) for _, info in steps)
        totals[name] = totals.get(name, 0) + sent
    touches = sum(replicas / float(info.factor) for _, info in steps)
    totals["touches"] = totals.get("touches", 0.0) + touches
    last = steps[-1][1]
    return {
        "training_loss": finite(float(np.mean([loss for loss, _ in steps]))),
        "factor": finite(float(last.factor)),
        "gain": round(float(last.gain), 6),
        "skipped_steps": int(last.skipped_steps),
        **totals,
        "touches": round(totals["touches"], 3),
    }


def finite(x: float) -> float | None:
    """`x`, or None, which JSON can say, where a run diverged."""
    return round(x, 6) if math.isfinite(x) else None
