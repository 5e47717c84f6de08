"""Make one run of `quality`."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.journal import Journal, Line
from common.training import held_out_loss
from tasks import Task, load, pipeline
from training.methods import (
    OPTIMIZERS,
    after,
    arguments,
    is_local,
    is_recipe,
    recipe,
)

import gravac_jax as gravac


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs of a record share.

    Args:
      task: Data, model and loss.
      replicas: The number of simulated replicas, each with its own batches.
      rows: Examples per replica and step. Default: what the task suggests.
      steps: Steps of each run.
      schedule: The course of the learning rate, after a warm-up of a twentieth of the
        steps.
      optimizer: What follows the exchange; momentum SGD is Nesterov's with 0.9.
      multiples: Learning rates to try for every method, in units of the task's own. A
        single one is taken without a trial.
      clip: The largest global norm of the averaged gradient.
      evaluations: Evaluations in `steps` steps, evenly spaced.
      evaluation_rows: Held-out examples, the same ones each time; whole batches of 128.
    """

    task: str = "lstm-bytes"
    replicas: int = 4
    rows: int | None = None
    steps: int = 1000
    schedule: Literal["cosine", "constant"] = "cosine"
    optimizer: Literal["sgd", "adam", "muon"] = "sgd"
    multiples: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    clip: float = 1.0
    evaluations: int = 20
    evaluation_rows: int = 512


class Trial(NamedTuple):
    """One run: what is particular to it."""

    phase: str  # "tune" or "test"
    method: str
    learning_rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """The run's name, and that of its folder."""
        return f"{self.phase}-{self.method}-{self.learning_rate:g}-{self.seed}"

    def owns(self, line: Line) -> bool:
        """Return whether a line of the journal is of this run."""
        own = ("phase", "method", "learning_rate", "seed")
        return all(line[x] == getattr(self, x) for x in own)


class Bench:
    """The task and one compiled step per method, shared by all runs of a process.

    Args:
      setting: What all runs share.
      data_dir: The folder of the task's files.

    Raises:
      DataError: If the files cannot be read.
    """

    def __init__(self, setting: Setting, data_dir: Path):
        self.setting = setting
        self.task: Task = load(setting.task, data_dir)
        self.init = jax.jit(self.task.init)
        self._compiled = functools.cache(self._compile)
        self.held_out = functools.cache(self._held_out)

    def compiled(self, trial: Trial) -> tuple[Any, Any]:
        """Return the transformation and the step of a run, compiled once for many."""
        same = trial._replace(phase="", seed=0)
        if not is_recipe(trial.method):
            same = same._replace(learning_rate=0.0, steps=0)
        return self._compiled(same)

    def _transformation(self, trial: Trial) -> optax.GradientTransformation:
        optimizer, name = OPTIMIZERS[self.setting.optimizer], trial.method
        if not is_recipe(name):
            chosen = arguments(name)
            rest = after(chosen, optimizer, self.setting.clip)
            return optax.chain(gravac.transform(**chosen), *rest)
        schedule = self.setting.schedule
        rates = [learning_rate_at(x, trial, schedule) for x in range(trial.steps)]
        at = lambda step: jnp.asarray(rates, jnp.float32)[step]
        return recipe(name, optax.chain(optimizer, optax.scale_by_learning_rate(at)))

    def _compile(self, trial: Trial) -> tuple[Any, Any]:
        name, tx = trial.method, self._transformation(trial)

        # The learning rate is an argument, so that a method compiles once for all runs.
        def train_step(
            params: Any, opt_state: Any, batch: Any, *, learning_rate: jax.Array
        ) -> Any:
            where = params
            if is_recipe(name):  # its updates are params' own
                learning_rate = jnp.float32(-1)
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

    def _held_out(self, phase: str) -> Callable[[Any], float]:
        source = {"tune": self.task.validation, "test": self.task.test}[phase]
        rows = min(len(source), self.setting.evaluation_rows, 128)
        batches = max(1, self.setting.evaluation_rows // rows)
        return held_out_loss(self.task, source, rows, batches)

    def digest(self) -> str:
        """Return a hash of the held-out data and of the number of training examples."""
        found = hashlib.sha256(str(len(self.task.train)).encode())
        for source in (self.task.validation, self.task.test):
            for i in range(len(source)):
                for leaf in jax.tree.leaves(source[i]):
                    found.update(np.ascontiguousarray(leaf).tobytes())
        return found.hexdigest()[:16]

    def start(self, trial: Trial) -> tuple[Any, Any]:
        """Return the initial state and the batches; they depend on the seed alone."""
        tx, _ = self.compiled(trial)
        params = self.init(jax.random.key(trial.seed))
        replicas, rows = self.setting.replicas, self.setting.rows or self.task.rows
        batches = pipeline.batches(
            self.task.train, rows=rows, replicas=replicas, seed=trial.seed
        )
        return gravac.place((params, tx.init(params)), replicas), batches


def learning_rate_at(step: int, trial: Trial, schedule: str) -> float:
    """Return the learning rate of a step: a linear warm-up, then the schedule."""
    warm_up = max(1, trial.steps // 20)
    if step < warm_up:
        return trial.learning_rate * (step + 1) / warm_up
    if schedule == "constant":
        return trial.learning_rate
    done = (step - warm_up) / max(1, trial.steps - warm_up)
    return trial.learning_rate * (1 + math.cos(math.pi * done)) / 2


def run(trial: Trial, bench: Bench, journal: Journal, tick: Any) -> None:
    """Make one run, and add a line for each evaluation.

    Args:
      trial: The run.
      bench: The task and its compiled steps.
      journal: The record; lines of the run from before it was cut off are dropped.
      tick: A function that is called after every step.
    """
    journal.drop(trial.owns)
    setting, (_, step) = bench.setting, bench.compiled(trial)
    every = max(1, setting.steps // setting.evaluations)
    state, stream = bench.start(trial)
    own = dict(zip(trial._fields[:-1], trial[:-1], strict=True))
    totals: Line = {}
    pending: list[Any] = []
    for i in range(trial.steps):
        rate = learning_rate_at(i, trial, setting.schedule)
        *state, loss, info = step(*state, next(stream), learning_rate=jnp.float32(rate))
        pending.append((loss, info))
        tick()
        if (i + 1) % every == 0 or i + 1 == trial.steps:
            figures = add_up(totals, pending, setting.replicas)
            held_out = bench.held_out(trial.phase)(state[0])
            journal.append({**own, "step": i + 1, "loss": finite(held_out), **figures})


def add_up(totals: Line, pending: list[Any], replicas: int) -> Line:
    """Add the steps since the last evaluation to `totals`, and return their figures.

    A coordinate touch is one replica sending one coordinate: N / factor a step.
    """
    steps: list[Any] = jax.device_get(pending)
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
    """Return `x`, rounded, or None, which JSON can say, where a run diverged."""
    return round(x, 6) if math.isfinite(x) else None
