"""What a run does, written down while it runs.

The figures of every step are in the optimizer's state. A writer takes them anywhere::

    from gravac_jax import metrics

    with (
        metrics.first_host(
            lambda: metrics.JsonlWriter("runs/one.jsonl"),
            lambda: metrics.TensorBoardWriter("runs/one"),
            lambda: metrics.LiveView(steps),
        ) as writer,
        metrics.Recorder(writer) as recorder,
    ):
        for i in range(steps):
            params, opt_state, loss = train_step(params, opt_state, batch(i))
            recorder.record(i, opt_state, loss=loss)

Another place takes five lines, and goes beside them as `lambda: Wandb(project="one")`::

    class Wandb:
        def __init__(self, **options): self.run = wandb.init(**options)
        def write(self, step, scalars): self.run.log(dict(scalars), step=step)
        def flush(self): pass
        def close(self): self.run.finish()

`JsonlWriter` needs nothing; the others are an extra: `pip install gravac_jax[tools]`.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from gravac_jax._metrics.jsonl import JsonlWriter as JsonlWriter
from gravac_jax._metrics.jsonl import read_jsonl as read_jsonl
from gravac_jax._metrics.live_view import LiveView as LiveView
from gravac_jax._metrics.scalars import fetch, snapshot
from gravac_jax._metrics.scalars import scalars as scalars
from gravac_jax._metrics.scalars import scalars_of_steps as scalars_of_steps

__all__ = [
    "JsonlWriter",
    "LiveView",
    "Recorder",
    "TensorBoardWriter",
    "Writer",
    "first_host",
    "read_jsonl",
    "scalars",
    "scalars_of_steps",
]


class Writer(Protocol):
    """Where figures go; anything with these three methods is one."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the figures of a step."""
        ...

    def flush(self) -> None:
        """Return when they are where they belong."""
        ...

    def close(self) -> None:
        """End; nothing is written after it."""
        ...


class TensorBoardWriter:
    """Writes what TensorBoard shows.

    A run that goes on from step k hides what it wrote of k and later steps before.

    Args:
      directory: of this run; `tensorboard --logdir` is given it, or its parent.

    Raises:
      ImportError: if tensorboardX is not there.
      OSError: if there can be no such directory.

    Example:
      >>> import pathlib, tempfile
      >>> from gravac_jax import metrics
      >>> directory = pathlib.Path(tempfile.mkdtemp())
      >>> writer = metrics.TensorBoardWriter(directory)
      >>> writer.write(0, {"loss": 0.5})
      >>> writer.close()
      >>> len(list(directory.glob("events.out.tfevents.*")))
      1
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            import tensorboardX
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise ImportError(
                f"metrics.TensorBoardWriter needs {error.name}: pip install "
                "'gravac_jax[tools]'"
            ) from error
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file: Any = tensorboardX.FileWriter(str(self.directory))
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._has_written = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the figures of a step."""
        if not self._has_written:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._file.add_event(self._events.Event(session_log=start), step)
            self._has_written = True
        # All in one event: one for each figure would take ten times as long.
        Summary = self._summaries.Summary
        values = [
            Summary.Value(tag=name, simple_value=float(x))
            for name, x in scalars.items()
        ]
        self._file.add_summary(Summary(value=values), step)

    def flush(self) -> None:
        """Wait until all is in the file."""
        self._file.flush()

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._file.close()


class _Several:
    """All of several writers, or none."""

    def __init__(self, writers: Sequence[Writer], closing: contextlib.ExitStack):
        self.writers = writers
        self._closing = closing

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for writer in self.writers:
            writer.write(step, scalars)

    def flush(self) -> None:
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> "_Several":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def first_host(*makes: Callable[[], Writer]) -> _Several:
    """Open writers on the first process of a job, and none on the others.

    Every process then runs the same lines.

    Args:
      makes: functions that open a writer each; they are called on process 0 alone.

    Returns:
      A writer to all of them, and a context that closes them; where there are none it
      does nothing. If one cannot be opened, or closed, the others are closed.

    Example:
      >>> import pathlib, tempfile
      >>> from gravac_jax import metrics
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
      >>> with metrics.first_host(lambda: metrics.JsonlWriter(path)) as writer:
      ...     writer.write(0, {"loss": 0.5})
      >>> [line["loss"] for line in metrics.read_jsonl(path)]
      [0.5]
    """
    with contextlib.ExitStack() as opened:
        writers = []
        for make in makes if jax.process_index() == 0 else ():
            writers.append(make())
            opened.callback(writers[-1].close)
        return _Several(tuple(writers), opened.pop_all())


class Recorder:
    """Writes the figures of every step when the next one is under way.

    To read a step's figures is to wait for it, and nothing runs until the next one is
    dispatched. So they are set aside on the device, where the next step may take the
    state's memory, and are fetched after that step's dispatch, in one transfer.

    Where `metrics.first_host` writes nothing, nothing is fetched.

    Args:
      writers: where they go. They are not closed.

    Example:
      >>> import pathlib, tempfile, jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> tx = optax.chain(gravac.transform(axis_name=None), optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> update, opt_state = jax.jit(tx.update, donate_argnums=1), tx.init(params)
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
      >>> writer = metrics.JsonlWriter(path)
      >>> with writer, metrics.Recorder(writer) as recorder:
      ...     for i in range(3):
      ...         updates, opt_state = update(params, opt_state)
      ...         recorder.record(i, opt_state, loss=0.5)
      >>> [line["gravac/is_finite"] for line in metrics.read_jsonl(path)]
      [1.0, 1.0, 1.0]
    """

    def __init__(self, *writers: Writer) -> None:
        is_idle = lambda x: isinstance(x, _Several) and not x.writers
        self.writers = [x for x in writers if not is_idle(x)]
        self._pending: tuple[int, Any] | None = None

    def record(self, step: int, opt_state: Any, **others: Any) -> None:
        """Set a step's figures aside, and write those of the step before.

        Args:
          step: its number.
          opt_state: what `metrics.scalars` takes.
          others: more of this step, such as its loss: arrays of one entry, or numbers.

        Raises:
          ValueError: as `metrics.scalars`.
        """
        if not self.writers:
            return
        shot = snapshot(opt_state, **others)
        self.flush()
        self._pending = step, shot

    def flush(self) -> None:
        """Write what was set aside, when its step is done."""
        if self._pending is None:
            return
        (step, shot), self._pending = self._pending, None
        (figures,) = fetch(shot)
        for writer in self.writers:
            writer.write(step, figures)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: Any) -> None:
        self.flush()
