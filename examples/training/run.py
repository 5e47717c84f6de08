"""A training run: its options, where it goes on, and what it leaves behind."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tasks import DataError

import gravac_jax as gravac
from gravac_jax import checkpoint, metrics
from training.replicas import Replicas
from training.sends import parse

DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class Options:
    """How to train.

    Args:
      data_dir: The folder of the data set's files.
      preset: The hyper-parameters of config.py; two CPU cores are enough for "small".
      send: What is exchanged: an encoding or a controller, such as "Bits(2)",
        "TopK(100)" or "GraVAC(epsilon=0.7)"; or "default" for the program's own.
      replicas: The number of replicas. Default: one on every device, or four that are
        simulated on a single one.
      steps: Steps other than the preset's.
      seed: The seed of initial params, batches and dropout.
      bfloat16: Compute in bfloat16; params and gradients stay float32.
      out: The folder of checkpoints and figures; a run that is there goes on. Default:
        one in runs/ that is named after the run.
      save_every: Steps from one checkpoint to the next.
      bandwidth_mbit: The bandwidth of the network that simulated replicas are said to
        have; real steps are timed.
    """

    data_dir: Path
    preset: Literal["paper", "small"] = "small"
    send: str = DEFAULT
    replicas: int | None = None
    steps: int | None = None
    seed: int = 0
    bfloat16: bool = False
    out: Path | None = None
    save_every: int = 500
    bandwidth_mbit: float = 1000

    @property
    def dtype(self) -> Any:
        """The dtype to compute in."""
        return jnp.bfloat16 if self.bfloat16 else jnp.float32

    @property
    def exchange(self) -> dict[str, Any]:
        """The arguments of `gravac.transform` or `gravac.adamw`.

        Raises:
          SystemExit: If there is nothing of that name to send.
        """
        network = gravac.WireCost(bytes_per_second=125e3 * self.bandwidth_mbit)
        chosen = {} if self.send == DEFAULT else {"send": parse(self.send)}
        return {"network": network, **chosen}


class Run:
    """One run, in a folder of its own.

    Args:
      name: The name of the program.
      config: Its hyper-parameters, among them `steps` and `evaluate_every`.
      options: The options of the command line.
      replicas: The replicas that train.
      batches: Training batches, with `get_state` and `set_state`.

    Raises:
      SystemExit: When entered, if the folder is of another run.
    """

    def __init__(
        self, name: str, config: Any, options: Options, replicas: Replicas, batches: Any
    ):
        label = f"{name}-{options.preset}-{options.send}-{options.seed}"
        self.folder = options.out or Path("runs") / file_name(label)
        self._config, self._options, self._batches = config, options, batches
        self._replicas, self._label = replicas, label
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            if jax.process_index() == 0:
                self._claim()
            self._checkpoints = opened.enter_context(
                checkpoint.Checkpointer(
                    self.folder / "checkpoints", save_every=self._options.save_every
                )
            )
            writer = opened.enter_context(metrics.first_host(*self._writers()))
            recorder = metrics.Recorder(writer, send=self._options.exchange.get("send"))
            self._recorder = opened.enter_context(recorder)
            self._closing = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._closing.__exit__(*error)

    def train(
        self,
        step: Callable[..., Any],
        state: tuple[Any, ...],
        evaluate: Callable[[Any], Mapping[str, float]],
    ) -> tuple[Any, ...]:
        """Train to the end, or until SIGTERM comes, from the last checkpoint.

        Args:
          step: The step, from the state and a batch to the state and a loss.
          state: The state that training begins with, placed; the params first.
          evaluate: A function from the state to held-out figures by name.

        Returns:
          The last state.
        """
        start = 0
        if saved := self._checkpoints.restore(state, state[0]):
            state, start = saved.tree, saved.step
            self._batches.set_state(saved.data)
        self._clock = gravac.StepClock()
        every, steps = self._config.evaluate_every, self._config.steps
        for i in range(start, steps):
            # Simulated replicas send nothing, so that their times mean nothing.
            times = {} if self._replicas.is_simulated else self._clock.times()
            *rest, loss = step(*state, next(self._batches), **times)
            state = tuple(rest)
            is_due = (i + 1) % every == 0 or i + 1 == steps
            if self.end_step(i, state, loss, evaluate(state) if is_due else {}):
                break
        return state

    def end_step(
        self, step: int, state: tuple[Any, ...], loss: Any, held_out: Mapping[str, Any]
    ) -> bool:
        """Write a step's figures, and a checkpoint if it is time to.

        Args:
          step: The number of the step, from 0.
          state: The state after it.
          loss: The loss of its batch.
          held_out: The figures of an evaluation, by name, or none.

        Returns:
          Whether the run is to end here, because SIGTERM has come.
        """
        if not self._replicas.is_simulated:
            self._clock.record(loss)
        figures = {f"held_out/{name}": x for name, x in held_out.items()}
        self._recorder.record(step, state, loss=loss, **figures)
        where = self._batches.get_state()
        self._checkpoints.save(step + 1, state, state[0], where)
        return self._checkpoints.is_preempted

    def _writers(self) -> list[Callable[[], metrics.Writer]]:
        folder, steps = self.folder, self._config.steps
        return [
            lambda: metrics.JsonlWriter(folder / "metrics.jsonl"),
            lambda: metrics.LiveView(steps, title=self._label),
        ]

    def _claim(self) -> None:
        """Write down what this is a run of, or refuse to go on with another one."""
        path = self.folder / "config.json"
        own = {name: getattr(self._options, name) for name in ("send", "seed")}
        own |= {"bfloat16": self._options.bfloat16, **dataclasses.asdict(self._config)}
        own = json.loads(json.dumps(own))  # tuples become lists
        if path.exists():
            found = json.loads(path.read_text())
            for name in own.keys() | found.keys():
                if found.get(name) != own.get(name):
                    raise SystemExit(
                        f"{self.folder} holds a run with {name} {found.get(name)!r}, "
                        f"and this would be {own.get(name)!r}: give another --out"
                    )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(own, indent=2) + "\n")


def file_name(text: str) -> str:
    """Return a text without the quotes, brackets and spaces of an encoding's name."""
    return re.sub(r"[^\w.-]+", "_", text)


def mean(figures: list[dict[str, Any]]) -> dict[str, float]:
    """Return the means of some figures, fetched from the devices."""
    fetched = jax.device_get(figures)
    return {name: float(np.mean([x[name] for x in fetched])) for name in fetched[0]}


def main(train: Callable[[Any, Options], dict[str, float]], presets: Any) -> None:
    """Train as the command line says, and print the figures on the test data."""
    options = tyro.cli(Options)
    config = presets[options.preset]
    if options.steps is not None:
        config = dataclasses.replace(config, steps=options.steps)
    try:
        tested = train(config, options)
    except (DataError, ValueError) as error:
        raise SystemExit(str(error)) from error
    if jax.process_index() == 0:
        print(", ".join(f"test {name} {x:.4f}" for name, x in tested.items()))
