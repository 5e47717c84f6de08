"""Writers on the first host, and the recorder that feeds them."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from gravac_jax import _arrays
from gravac_jax._controllers.base import Controller, controller_of
from gravac_jax._encodings.base import Encoding
from gravac_jax.metrics._explain import columns
from gravac_jax.metrics._scalars import Snapshot, fetch, snapshot


class Writer(Protocol):
    """The interface of writers: any object with these three methods is one."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the figures of a step."""

    def flush(self) -> None:
        """Return when all figures have arrived where they are written to."""

    def close(self) -> None:
        """Release files and connections; nothing is written afterwards."""


class _Writers(contextlib.ExitStack):
    """Several writers as one, and a context manager that closes all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[Writer] = []

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for writer in self.writers:
            writer.write(step, scalars)

    def flush(self) -> None:
        for writer in self.writers:
            writer.flush()


def first_host(*makes: Callable[[], Writer]) -> _Writers:
    """Open writers on the first process of a job, and none on the others.

    With it, every process of a job runs the same lines.

    Args:
      makes: Functions that open one writer each. Only process 0 calls them.

    Returns:
      One writer that passes its figures to all of them, and a context manager that
      closes all of them. On other processes it does nothing. If one writer cannot be
      opened or closed, the others are closed.

    Raises:
      TypeError: If one of `makes` is no function, such as a writer that is open.

    Example:
      >>> import pathlib, tempfile
      >>> from gravac_jax import metrics
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
      >>> with metrics.first_host(lambda: metrics.JsonlWriter(path)) as writer:
      ...     writer.write(0, {"loss": 0.5})
      >>> [line["loss"] for line in metrics.read_jsonl(path)]
      [0.5]
    """
    for make in makes:
        if not callable(make):
            raise TypeError(
                f"first_host takes functions that open a writer, such as lambda:"
                f" metrics.JsonlWriter(path), got a {type(make).__name__}."
            )
    opened = _Writers()
    try:
        for make in makes if jax.process_index() == 0 else ():
            opened.writers.append(make())
            opened.callback(opened.writers[-1].close)
    except BaseException:
        opened.close()
        raise
    return opened


class Recorder:
    """Writes the figures of each step while the next step runs.

    Reading the figures of a step waits until the step is done, and until the next step
    is dispatched the devices would be idle. `record` therefore copies the figures on
    the device, and fetches those of the step before. The copy is safe if the next step
    takes over the memory of the state.

    Leaving the recorder writes the figures of the last step. On hosts where
    `metrics.first_host` opened no writer, the recorder fetches nothing.

    Args:
      writers: Where the figures go. The recorder does not close them.
      send: The transform's `send`, so that gains have the names of encodings
        (`gravac/gains/Bits(2)`), and `metrics.LiveView` says which one was taken. If it
        is a controller that predicts, what it predicted of each choice is written, too:
        `gravac/predicted_seconds/Bits(2)`, `gravac/predicted_progress/Bits(2)` and so
        on, and `gravac/choice`, the place of the one believed to be fastest; the view
        then says why. None to number the encodings and write no predictions.

    Raises:
      TypeError: If a writer has no `write`, or `send` is neither an encoding nor a
        controller.

    Example:
      >>> import pathlib, tempfile, jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> exchange = gravac.transform(axis_name=None, send=gravac.TopK(100))
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
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

    def __init__(
        self, *writers: Writer, send: Encoding | Controller | None = None
    ) -> None:
        for x in writers:
            if not hasattr(x, "write"):
                raise TypeError(
                    f"a recorder takes writers, such as metrics.JsonlWriter(path), got"
                    f" {_arrays.brief(x)}."
                )
        is_idle = lambda x: isinstance(x, _Writers) and not x.writers
        self.writers = [x for x in writers if not is_idle(x)]
        self.send = send
        ladder = () if send is None else controller_of(send).ladder
        self._rungs = list(map(repr, ladder))
        self._pending: tuple[int, Snapshot] | None = None

    def record(self, step: int, opt_state: Any, **others: Any) -> None:
        """Copy the figures of a step, and write those of the step before.

        Args:
          step: Number of the step.
          opt_state: State after the step, as `metrics.scalars` takes it.
          others: More figures of the step, such as the loss: numbers, or arrays with
            one entry.

        Raises:
          ValueError: As `metrics.scalars` raises it, or if `send` has another number of
            encodings than the transform.
        """
        if not self.writers:
            return
        predicted = columns(opt_state, self.send) if self.send else ()
        shot = snapshot(opt_state, others, self._rungs, predicted)
        self.flush()
        self._pending = step, shot

    def flush(self) -> None:
        """Wait for the step recorded last, and write its figures."""
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
