"""Make runs of `quality`: one, or several of a method side by side."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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

    @property
    def own(self) -> Line:
        """The fields that identify the lines of this run."""
        return {k: x for k, x in self._asdict().items() if k != "steps"}

    def owns(self, line: Line) -> bool:
        """Return whether a line of the journal is of this run."""
        return self.own.items() <= line.items()


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

    def transformation(
        self, method: str, learning_rate: Any = 0.0
    ) -> optax.GradientTransformationExtraArgs:
        """Return a method's optimizer; whole ones know their learning rate."""
        optimizer = OPTIMIZERS[self.setting.optimizer]
        if is_recipe(method):
            scale = optax.scale_by_learning_rate(learning_rate)
            return optax.with_extra_args_support(recipe(method, optimizer, scale))
        chosen = arguments(method)
        rest = after(chosen, optimizer, self.setting.clip)
        return optax.chain(gravac.transform(**chosen), *rest)

    def _compile(self, method: str, is_one: bool) -> Any:
        # The learning rate is an argument, so that a method compiles once for all runs.
        def train_step(
            params: Any, opt_state: Any, batch: Any, *, learning_rate: jax.Array
        ) -> Any:
            tx, where = self.transformation(method, learning_rate), params
            is_own = is_local(method)
            if is_recipe(method):  # its updates are params' own
                learning_rate = jnp.float32(-1)
            if is_own:
                # What follows in the chain has no learning rate: it is applied here.
                own = gravac.local_params(tx, params, opt_state)
                where = jax.tree.map(
                    lambda p, x: p - learning_rate * (x - p), params, own
                )
            loss, grads = gravac.value_and_grad(self.task.loss)(where, batch)
            updates, opt_state = tx.update(
                grads, opt_state, params, at_own_params=is_own
            )
            params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
            return params, opt_state, loss, optax.tree.get(opt_state, "StepInfo")

        step = gravac.simulate(train_step, self.setting.replicas)
        return step if is_one else jax.jit(jax.vmap(step), donate_argnums=(0, 1))

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

    def start(self, trial: Trial) -> Any:
        """Return the initial state; the params depend on the seed alone."""
        tx = self.transformation(trial.method)
        params = self.init(jax.random.key(trial.seed))
        return gravac.place((params, tx.init(params)), self.setting.replicas)

    def batches(self, seed: int) -> Iterator[Any]:
        """Return the batches of all replicas, which depend on the seed alone."""
        replicas, rows = self.setting.replicas, self.setting.rows or self.task.rows
        train = self.task.train
        return pipeline.batches(train, rows=rows, replicas=replicas, seed=seed)


class SideBySide:
    """Runs of one method as one: their arrays are stacked along a new first axis.

    They fill an accelerator that one small model leaves idle. Under `vmap` all branches
    of a conditional run, so a single run is left as it is.

    Args:
      bench: The task.
      trials: The runs, of one method and as many steps.
    """

    def __init__(self, bench: Bench, trials: Sequence[Trial]):
        self.trials, self._schedule = trials, bench.setting.schedule
        self._is_one = len(trials) == 1
        self._step = bench.compiled(trials[0].method, self._is_one)
        self._state = self._stacked(map(bench.start, trials), jnp.stack)
        self._streams = {x.seed: bench.batches(x.seed) for x in trials}

    def step(self, i: int) -> Any:
        """Take step `i` of all runs, and return their losses and infos."""
        rates = [learning_rate_at(i, x, self._schedule) for x in self.trials]
        rate = self._stacked(np.asarray(rates, np.float32), np.stack)
        batches = {seed: next(stream) for seed, stream in self._streams.items()}
        batch = self._stacked([batches[x.seed] for x in self.trials], np.stack)
        *self._state, loss, info = self._step(*self._state, batch, learning_rate=rate)
        return loss, info

    @property
    def params(self) -> list[Any]:
        """The shared params of each run."""
        return self.divided(self._state[0])

    def divided(self, tree: Any) -> list[Any]:
        """Return the part of each run."""
        if self._is_one:
            return [tree]
        part = lambda i: jax.tree.map(lambda x: x[i], tree)
        return [part(i) for i in range(len(self.trials))]

    def _stacked(self, trees: Iterable[Any], stack: Any) -> Any:
        first, *others = trees
        if self._is_one:
            return first
        return jax.tree.map(lambda *leaves: stack(leaves), first, *others)


def learning_rate_at(step: int, trial: Trial, schedule: str) -> float:
    """Return the learning rate of a step: a linear warm-up, then the schedule."""
    warm_up = max(1, trial.steps // 20)
    if step < warm_up:
        return trial.learning_rate * (step + 1) / warm_up
    if schedule == "constant":
        return trial.learning_rate
    done = (step - warm_up) / max(1, trial.steps - warm_up)
    return trial.learning_rate * (1 + math.cos(math.pi * done)) / 2


def run(trials: Sequence[Trial], bench: Bench, journal: Journal, tick: Any) -> None:
    """Make runs side by side, and add a line of each for each evaluation.

    Args:
      trials: The runs, of one method and phase.
      bench: The task and its compiled steps.
      journal: The record; lines of the runs from before they were cut off are dropped.
      tick: A function that is called after every step.
    """
    journal.drop(lambda line: any(x.owns(line) for x in trials))
    every = max(1, bench.setting.steps // bench.setting.evaluations)
    together = SideBySide(bench, trials)
    totals: list[Line] = [{} for _ in trials]
    pending: list[Any] = []
    steps = trials[0].steps
    for i in range(steps):
        pending.append(together.step(i))
        tick()
        if (i + 1) % every == 0 or i + 1 == steps:
            found = [together.divided(x) for x in jax.device_get(pending)]
            pending.clear()
            parts = zip(
                trials, together.params, totals, zip(*found, strict=True), strict=True
            )
            for trial, params, total, own in parts:
                held_out = bench.held_out(trial.phase)(params)
                figures = add_up(total, own, bench.setting.replicas)
                line = {"step": i + 1, "loss": finite(held_out), **figures}
                journal.append({**trial.own, **line})


def add_up(totals: Line, steps: Sequence[Any], replicas: int) -> Line:
    """Add the steps since the last evaluation to `totals`, and return their figures.

    A coordinate touch is one replica sending one coordinate: N / factor a step.
    """
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
        "bad_steps": int(last.bad_steps),
        **totals,
        "touches": round(totals["touches"], 3),
    }


def finite(x: float) -> float | None:
    """Return `x`, rounded, or None, which JSON can say, where a run diverged."""
    return round(x, 6) if math.isfinite(x) else None
