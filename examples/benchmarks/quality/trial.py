"""Make one run of `quality`."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from common.journal import Journal, Line
from common.training import held_out, train_step
from tasks import Task, load, pipeline
from training.methods import MAX_NORM, OPTIMIZERS, Method, method
from training.replicas import Replicas

import gravac_jax as gravac


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all runs of a record share.

    Args:
      task: Data, model and loss.
      replicas: The number of replicas, each with its own batches. One device simulates
        them, unless there are as many, as XLA_FLAGS makes of a CPU: conv nets are
        quicker on these.
      rows: Examples per replica and step. Default: what the task suggests.
      steps: Steps of each run.
      schedule: The course of the learning rate, after a warm-up of a twentieth of the
        steps.
      optimizer: What follows an exchange of gradients; SGD has Nesterov's momentum 0.9.
      multiples: Learning rates to try for every method, in units of the task's own. A
        single one is taken without a trial.
      max_norm: Where gradients are clipped; a number that is never reached for no clip.
      evaluations: Evaluations in `steps` steps, evenly spaced.
      evaluation_rows: Held-out examples, the same ones each time; whole batches of 128.
    """

    task: str = "lstm-bytes"
    replicas: int = 4
    rows: int | None = None
    steps: int = 1000
    schedule: Literal["cosine", "constant"] = "cosine"
    optimizer: Literal["sgd", "adam", "lion", "muon"] = "sgd"
    multiples: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    max_norm: float = MAX_NORM
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

    @property
    def own(self) -> Line:
        """The fields that identify the lines of this run."""
        return {k: x for k, x in self._asdict().items() if k != "steps"}

    def owns(self, line: Line) -> bool:
        """Return whether a line of the journal is of this run."""
        return self.own.items() <= line.items()


NUDGED = "nudged dense"  # from first params that are moved by a millionth
ALONE = "alone"  # one replica, which exchanges nothing


def method_of(name: str) -> Method:
    """Return a method of `training.methods`, or what a control is made of."""
    return method("dense" if name in (NUDGED, ALONE) else name)


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
        self.compiled = functools.cache(self._compile)
        self.held_out = functools.cache(self._held_out)

    def optimizer(
        self, name: str, learning_rate: Any = 0.0
    ) -> optax.GradientTransformationExtraArgs:
        """Return a method's optimizer."""
        after = OPTIMIZERS[self.setting.optimizer]
        clip = gravac.ClipByGlobalNorm(self.setting.max_norm)
        return method_of(name).optimizer(after, learning_rate, clip=clip)

    def replicas(self, name: str) -> Replicas:
        """Return the replicas of a method."""
        return Replicas(1 if name == ALONE else self.setting.replicas)

    def _compile(self, name: str) -> Any:
        # The learning rate is an argument, so that a method compiles once for all runs.
        def step_of_one(
            params: Any, opt_state: Any, batch: Any, *, learning_rate: jax.Array
        ) -> Any:
            tx = self.optimizer(name, learning_rate)
            step = train_step(tx, self.task.loss, method_of(name).is_own)
            params, opt_state, loss = step(params, opt_state, batch)
            return params, opt_state, (loss, optax.tree.get(opt_state, "StepInfo"))

        return self.replicas(name).parallel(step_of_one)

    def _held_out(self, phase: str) -> Callable[[Any], dict[str, float]]:
        source = {"tune": self.task.validation, "test": self.task.test}[phase]
        rows = min(len(source), self.setting.evaluation_rows, 128)
        batches = max(1, self.setting.evaluation_rows // rows)
        return held_out(self.task, source, rows, batches)

    def digest(self) -> str:
        """Return a hash of the held-out data and of the number of training examples."""
        found = hashlib.sha256(str(len(self.task.train)).encode())
        for source in (self.task.validation, self.task.test):
            for i in range(len(source)):
                for leaf in jax.tree.leaves(source[i]):
                    found.update(np.ascontiguousarray(leaf).tobytes())
        return found.hexdigest()[:16]

    def start(self, trial: Trial) -> Any:
        """Return the initial state; the params depend on the seed alone."""
        tx = self.optimizer(trial.method)
        params = self.init(jax.random.key(trial.seed))
        if trial.method == NUDGED:
            params = jax.tree.map(lambda x: x * (1 + 1e-6), params)
        where = self.replicas(trial.method).where
        return gravac.place((params, tx.init(params)), where)

    def batches(self, trial: Trial) -> Iterator[Any]:
        """Return the batches of all replicas, which depend on the seed alone."""
        replicas, rows = self.setting.replicas, self.setting.rows or self.task.rows
        train, own = self.task.train, rows * self.replicas(trial.method).count
        found = pipeline.batches(train, rows=rows, replicas=replicas, seed=trial.seed)
        return (jax.tree.map(lambda x: x[:own], batch) for batch in found)


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
    setting, step = bench.setting, bench.compiled(trial.method)
    every = max(1, setting.steps // setting.evaluations)
    state, batches = bench.start(trial), bench.batches(trial)
    totals: Line = {}
    pending: list[Any] = []
    for i in range(trial.steps):
        rate = np.float32(learning_rate_at(i, trial, setting.schedule))
        *state, figures = step(*state, next(batches), learning_rate=rate)
        pending.append(figures)
        tick()
        if (i + 1) % every == 0 or i + 1 == trial.steps:
            metrics = bench.held_out(trial.phase)(state[0])
            shown = {name: finite(x) for name, x in metrics.items()}
            found = add_up(totals, jax.device_get(pending))
            pending.clear()
            journal.append({**trial.own, "step": i + 1, **shown, **found})


def add_up(totals: Line, steps: Sequence[Any]) -> Line:
    """Add the steps since the last evaluation to `totals`, and return their figures."""
    for name in ("wire_bytes", "dense_wire_bytes"):
        sent = sum(int(getattr(info, name)) for _, info in steps)
        totals[name] = totals.get(name, 0) + sent
    last = steps[-1][1]
    return {
        "training_loss": finite(float(np.mean([loss for loss, _ in steps]))),
        "rung": int(last.rung),
        "gain": round(float(last.gain), 6),
        "bad_steps": int(last.bad_steps),
        **totals,
    }


def finite(x: float) -> float | None:
    """Return `x`, rounded, or None, which JSON can say, where a run diverged."""
    return round(x, 6) if math.isfinite(x) else None
