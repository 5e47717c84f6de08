"""Record what every step did, in a file, in TensorBoard or in the terminal.

The state of the optimizer holds the figures of the last step. A `Recorder` fetches them
while the next step runs, and gives them to writers::

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

A writer is any object with the three methods of `metrics.Writer`. This one sends the
figures to Weights & Biases; open it with `lambda: Wandb(project="one")`::

    class Wandb:
        def __init__(self, **options): self.run = wandb.init(**options)
        def write(self, step, scalars): self.run.log(dict(scalars), step=step)
        def flush(self): pass
        def close(self): self.run.finish()

`TensorBoardWriter` and `LiveView` need an extra: `pip install '.[tools]'` in the
clone.
"""

import contextlib
import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays
from gravac_jax._controllers.base import Controller, Predictions, controller_of
from gravac_jax._encodings.base import Encoding
from gravac_jax._info import StepInfo
from gravac_jax._loop import chain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = [
    "JsonlWriter",
    "LiveView",
    "Recorder",
    "TensorBoardWriter",
    "Writer",
    "explain",
    "first_host",
    "read_jsonl",
    "scalars",
    "scalars_of_steps",
]

# Behind these stands the name of an encoding, or of a choice.
GAINS = "gravac/gains/"
SECONDS, PROGRESS = "gravac/predicted_seconds/", "gravac/predicted_progress/"
HOME = "gravac/choice"  # the place of the choice believed to be fastest


def scalars(opt_state: Any, **others: Any) -> dict[str, float]:
    """Return the figures of the last step; wait until the step is done.

    `Recorder` does not wait. In a job of several processes any one of them may call
    this function without the others. It runs one small program and one transfer of 4
    bytes for each figure.

    Args:
      opt_state: Any tree that holds the state of exactly one `gravac.transform`: of an
        `optax.chain`, of `gravac.guard`, a Flax `TrainState`, an `nnx.Optimizer`, or a
        state replicated by `jax.pmap`. A `StepInfo` alone is such a tree too.
      others: More figures of the step, such as the loss: numbers, or arrays with one
        entry.

    Returns:
      A float for every name: `gravac/factor`, `gravac/gain` and so on for the fields of
      `StepInfo`; `gravac/gains/0` and so on for the rungs of the ladder, of which only
      `Recorder(send=...)` knows the names; then the names of `others`. Integers above
      2**24 are rounded to float32, and `gravac/is_finite` is 0 or 1.

    Raises:
      ValueError: If `opt_state` holds no `StepInfo`, more than one, or the `StepInfo`
        of several steps, or if one of `others` has more than one entry.
      RuntimeError: If the state was donated to a later step.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> exchange = gravac.transform(axis_name=None, send=gravac.TopK(100))
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> updates, opt_state = tx.update(params, tx.init(params))
      >>> figures = metrics.scalars(opt_state, loss=jnp.float32(0.5))
      >>> figures["gravac/is_finite"], figures["loss"]
      (1.0, 0.5)
    """
    (figures,) = _copy(opt_state, others)()
    return figures


def scalars_of_steps(infos: Any, **others: Any) -> list[dict[str, float]]:
    """Return the figures of many steps, such as those of a `jax.lax.scan`.

    Args:
      infos: A `StepInfo` whose leaves have a leading axis `[steps, ...]`. A scan makes
        it if its body returns `optax.tree.get(opt_state, "StepInfo")`.
      others: More figures of these steps, `[steps]` each.

    Returns:
      For every step, what `scalars` returns.

    Raises:
      ValueError: If `infos` holds no `StepInfo` or more than one, or if one of `others`
        does not have one entry for each step.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> exchange = gravac.transform(axis_name=None, send=gravac.TopK(100))
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> def step(opt_state, grads):
      ...     updates, opt_state = tx.update(grads, opt_state)
      ...     return opt_state, optax.tree.get(opt_state, "StepInfo")
      >>> grads = {"w": jnp.ones((3, 256, 256))}
      >>> opt_state, infos = jax.lax.scan(step, tx.init(params), grads)
      >>> [x["gravac/bad_steps"] for x in metrics.scalars_of_steps(infos)]
      [0.0, 0.0, 0.0]
    """
    return _copy(infos, others, of_many=True)()


def _copy(
    tree: Any, others: Mapping[str, Any], send: Any = None, of_many: bool = False
) -> Callable[[], list[dict[str, float]]]:
    """Copy figures on the device; return a function that waits for them.

    A later step may overwrite the state meanwhile. The function returns the figures of
    every step, by name.
    """
    info = _info_in(tree)._asdict()
    steps, gains = _local(info["factor"]).size, _local(info.pop("gains"))
    if steps != 1 and not of_many:
        raise ValueError(
            f"expected the StepInfo of one step, got one with {steps} entries in each"
            " field. Give one of them, or call metrics.scalars_of_steps(infos)."
        )
    for name, x in others.items():
        # Of an array with an entry for each replica, this host may hold one alone.
        sizes = [np.size(y) for y in jax.tree.leaves(x) if not isinstance(y, str)]
        if sizes != [steps]:
            raise ValueError(
                f"`{name}` must be a number or an array with one entry for each step"
                f" ({steps}), got {_arrays.brief(x)}. Give its mean; where all entries"
                f" are the same, as from jax.pmap, {name}[0]; or leave it out."
            )
    columns = {f"gravac/{name}": x for name, x in info.items()} | dict(others)
    rungs = list(map(str, range(gains.size // max(1, steps))))
    named = [(GAINS, rungs, gains)] if send is None else _named_by(send, tree, gains)
    names = [*columns, *(prefix + x for prefix, ends, _ in named for x in ends)]
    arrays = map(_local, [*columns.values(), *(x for *_, x in named)])
    table = _table(list(arrays))
    rows = lambda: np.asarray(table, np.float64).tolist()
    return lambda: [dict(zip(names, row, strict=True)) for row in rows()]


@jax.jit
def _table(columns: list[jax.Array]) -> jax.Array:
    """Return all figures in one array, `[steps, names]` float32: one transfer."""
    steps = columns[0].size
    rows = [jnp.reshape(x, (steps, -1)).astype(jnp.float32) for x in columns]
    return jnp.concatenate(rows, axis=1)


def _local(value: Any) -> Any:
    """Return a copy of one array that this process may read by itself."""
    (x,) = jax.tree.leaves(value)  # nnx wraps arrays in variables
    # One local copy: a program on all devices would have to run on every host.
    return x.addressable_data(0) if hasattr(x, "addressable_data") else np.asarray(x)


def _info_in(tree: Any) -> StepInfo:
    """Return the only `StepInfo` of a tree."""

    def is_info(x: Any) -> bool:
        # flax.nnx.split turns NamedTuples into mappings from their fields.
        is_split = isinstance(x, Mapping) and set(StepInfo._fields) <= set(x)
        return is_split or isinstance(x, StepInfo)

    infos = list(filter(is_info, jax.tree.leaves(tree, is_leaf=is_info)))
    if len(infos) != 1:
        raise ValueError(
            f"expected one StepInfo, found {len(infos)} in a {type(tree).__name__}."
            " Give the state of an optimizer with one gravac.transform in it."
        )
    return infos[0] if isinstance(infos[0], StepInfo) else StepInfo(**infos[0])


def _named_by(send: Any, tree: Any, gains: Any) -> list[tuple[str, Any, Any]]:
    """Return gains and predictions, each with a prefix and the names of its entries."""
    rungs = list(map(repr, controller_of(send).ladder))
    if len(rungs) != gains.size:
        raise ValueError(
            f"`send` has the encodings {', '.join(rungs)}, and the state is of"
            f" {gains.size}. Give what the transform was given as `send`."
        )
    named, found = [(GAINS, rungs, gains)], _predictions(tree, send)
    if found is not None:
        choices, home = _choices(found), (HOME, [""], found.home)
        both = (SECONDS, choices, found.seconds), (PROGRESS, choices, found.progress)
        named += [*both, home]
    return named


def _predictions(opt_state: Any, send: Any) -> Predictions | None:
    """Return what the last decision compared, if the controller predicts anything."""
    controller = controller_of(send)
    if isinstance(send, Encoding):
        return None
    state = chain.the_transform(opt_state, "gravac_jax.metrics")
    return controller.predictions(state.controller)


def _choices(found: Predictions) -> list[str]:
    """Return what each choice is called."""
    pairs = zip(found.names, found.steps, strict=True)
    return [f"{name} every {x} steps" if x > 1 else name for name, x in pairs]


_HEAD = "choice", "ms a step", "progress", "ms for a dense step's progress", ""


def explain(opt_state: Any, send: Encoding | Controller) -> str:
    """Return what the controller predicted of each choice, as a table in words.

    The figures are those that the last decision compared; nothing is predicted anew.
    The choice with the fewest seconds for the progress of a dense step is the fastest.
    Waits until the step is done.

    Args:
      opt_state: the state after the step, with exactly one `gravac.transform` in it.
      send: the transform's `send`, a controller.

    Returns:
      A line for each choice, and one line about where the seconds come from. One
      sentence if nothing was predicted yet.

    Raises:
      TypeError: if `send` is not a controller that predicts, as `gravac.Fastest` does.
      ValueError: if `opt_state` holds no `gravac.transform`, or more than one.

    Example:
      >>> import jax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> send = gravac.Fastest((gravac.Dense(), gravac.Bits(8), gravac.Bits(2)))
      >>> network = gravac.WireCost(bytes_per_second=1e6)
      >>> tx = gravac.transform(send=send, network=network)
      >>> step = gravac.simulate(lambda state, grads: tx.update(grads, state)[::-1], 4)
      >>> grads = jax.random.normal(jax.random.key(0), (4, 25_600))
      >>> state, _ = step(gravac.place(tx.init(grads[0]), 4), grads)
      >>> print(metrics.explain(state, send))  # doctest: +ELLIPSIS
      choice   ms a step  progress  ms for a dense step's progress
      Dense()      164.3      1.00                           164.3
      Bits(8)       50.3      1.00                            50.3
      Bits(2)       21.5      0.98                            21.9  taken
      The milliseconds are predicted by gravac.WireCost alone, since no step time ...
    """
    found = _predictions(opt_state, send)
    if found is None:
        raise TypeError(
            f"{send!r} predicts nothing, so that there is nothing to explain. Give a"
            " controller that does, such as gravac.Fastest()."
        )
    arrays = [np.squeeze(_local(x)) for x in found[2:]]
    found = Predictions(found.names, found.steps, *arrays)
    if not np.any(found.progress):
        return "The controller has predicted nothing yet: it decides after each step."
    names = _choices(found)
    rows: list[tuple[str, ...]] = [_HEAD]
    for i, name in enumerate(names):
        ms, progress = 1e3 * found.seconds[i], found.progress[i]
        cost = f"{ms / progress:.1f}" if progress > 0 else "never"
        figures = f"{ms:.1f}", f"{progress:.2f}", cost
        rows.append((name, *figures, _verdict(found, i)))
    first, *rest, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    row = f"{{:{first}}}{''.join(f'  {{:>{x}}}' for x in rest)}  {{}}".format
    lines = [row(*x).rstrip() for x in rows]
    source = "by gravac.WireCost alone, since no step time was measured"
    if found.times:
        source = f"from {found.times} measured step times"
    lines.append(f"The milliseconds are predicted {source}.")
    return "\n".join(lines)


def _verdict(found: Predictions, choice: int) -> str:
    """Return what was done with a choice."""
    if choice == found.home:
        return "taken" if found.fits[choice] else "taken, more than most_bytes"
    if choice == found.current:
        return "visited, to measure it"
    if found.waits_too_long[choice]:
        return "only at own params"
    if not found.fits[choice]:
        return "too many bytes"
    return "" if found.is_allowed[choice] else "too little progress"


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


class Recorder(contextlib.AbstractContextManager["Recorder"]):
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
        self.writers: list[Writer] = []
        for x in writers:
            if not hasattr(x, "write"):
                raise TypeError(
                    f"a recorder takes writers, such as metrics.JsonlWriter(path), got"
                    f" {_arrays.brief(x)}."
                )
            self.writers += x.writers if isinstance(x, _Writers) else [x]
        if send is not None:
            controller_of(send)  # refuses what is neither
        self.send = send
        self._copied: list[tuple[int, Callable[[], list[dict[str, float]]]]] = []

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
        if self.writers:
            copied = _copy(opt_state, others, self.send)
            self.flush()
            self._copied.append((step, copied))

    def flush(self) -> None:
        """Wait for the step recorded last, and write its figures."""
        while self._copied:
            step, fetch = self._copied.pop()
            (figures,) = fetch()
            for writer in self.writers:
                writer.write(step, figures)

    def __exit__(self, *_: Any) -> None:
        self.flush()


class JsonlWriter(contextlib.AbstractContextManager["JsonlWriter"]):
    """Writes one line for each step: `{"step": 3, "seconds": 1.5, "loss": 0.25}`.

    `seconds` counts from the moment when the writer was opened. JSON has no infinity
    and no NaN: they are written as the strings "Infinity", "-Infinity" and "NaN".

    A run that resumes writes to the same file. When it writes step k first, the lines
    from step k on, which an earlier process wrote before it was killed, are removed.
    Every line is handed to the operating system at once, so that no line is lost when
    the process dies; `flush` waits for the disk.

    Args:
      path: The file; its folder is created if needed.

    Raises:
      ValueError: If the file exists and its first line is not a line of this writer.
      OSError: If the file cannot be written.

    Example:
      >>> import pathlib, tempfile
      >>> from gravac_jax import metrics
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
      >>> for steps in (range(4), range(2, 6)):  # killed after step 3, resumed at 2
      ...     with metrics.JsonlWriter(path) as writer:
      ...         for step in steps:
      ...             writer.write(step, {"loss": 1 / (step + 1)})
      >>> [int(line["step"]) for line in metrics.read_jsonl(path)]
      [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            next(_lines(self.path), None)  # refuses a file of something else
        self._file = self.path.open("ab")
        self._opened = time.perf_counter()
        self._has_written = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the line of a step.

        Args:
          step: Number of the step.
          scalars: Figures of the step, by name.

        Raises:
          ValueError: If a figure is named `step` or `seconds`.
          OSError: If the line cannot be written, for example because the disk is full.
        """
        if taken := {"step", "seconds"} & scalars.keys():
            raise ValueError(
                f"a figure cannot be named {taken.pop()!r}, which JsonlWriter writes"
                " itself: choose another name, such as 'step_seconds'."
            )
        if not self._has_written:  # lines from this step on, and a last one cut off
            kept = itertools.takewhile(lambda x: x[1]["step"] < step, _lines(self.path))
            self._file.truncate(sum(len(text) for text, _ in kept))
            self._has_written = True
        seconds = time.perf_counter() - self._opened
        line: dict[str, Any] = {"step": int(step), "seconds": seconds}
        for name, value in scalars.items():
            x = float(value)
            line[name] = x if math.isfinite(x) else json.dumps(x)
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def flush(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()

    def __exit__(self, *_: Any) -> None:
        self.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Read a file of `JsonlWriter`, also while it is being written.

    Args:
      path: The file.

    Returns:
      One dictionary for each line: `step`, `seconds` and the figures. A last line that
      was cut off is left out, with a warning.

    Raises:
      ValueError: If a line is not a line of `JsonlWriter`; the message says which.
      OSError: If the file cannot be read.

    Example:
      See `metrics.JsonlWriter`.
    """
    return [line for _, line in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    """Yield every whole line, as bytes and parsed."""
    *whole, rest = path.read_bytes().split(b"\n")
    for number, text in enumerate(whole, 1):
        try:
            line = {name: float(x) for name, x in json.loads(text).items()}
            if not {"step", "seconds"} <= line.keys():
                raise ValueError
        except (ValueError, TypeError, AttributeError):
            raise ValueError(
                f"{path}, line {number}, is not a line of metrics.JsonlWriter:"
                f" {text[:60]!r}. Give another file, or remove the line."
            ) from None
        yield text + b"\n", line
    if rest:
        why = "the last line was cut off and is left out"
        warnings.warn(f"{path}: {why}", stacklevel=3)


class TensorBoardWriter:
    """Writes the event files that TensorBoard shows.

    When a run resumes at step k, TensorBoard hides what was written for step k and
    later before.

    Args:
      directory: Directory of this run, created if needed. Give `tensorboard --logdir`
        this directory or its parent.

    Raises:
      ImportError: If tensorboardX is not installed.
      OSError: If the directory cannot be created.

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
        with _from_tools("TensorBoardWriter"):
            from tensorboardX import FileWriter
            from tensorboardX.proto import event_pb2
        self.directory = Path(directory)
        self._file, self._protocol = FileWriter(str(directory)), event_pb2
        self._has_written = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the figures of a step."""
        protocol: Any = self._protocol
        if not self._has_written:  # hides what an earlier process wrote from here on
            start = protocol.SessionLog(status=protocol.SessionLog.START)
            self._file.add_event(protocol.Event(session_log=start), step)
            self._has_written = True
        event = protocol.Event()  # SummaryWriter would write Bits_2_ for Bits(2)
        for name, x in scalars.items():
            event.summary.value.add(tag=name, simple_value=float(x))
        self._file.add_event(event, step)

    def flush(self) -> None:
        """Wait until all figures are in the file."""
        self._file.flush()

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._file.close()


@contextlib.contextmanager
def _from_tools(name: str) -> Iterator[None]:
    """Say how to install what cannot be imported."""
    try:
        yield
    except ImportError as error:
        why = f"metrics.{name} needs {error.name}"
        raise ImportError(f"{why}: pip install '.[tools]' in the clone") from error


_LOSSES = 20  # steps in the mean of the loss; arbitrary
_REFRESH_HZ = 2  # a frame takes milliseconds of a core that may have steps to run
_FIGURES = {"gravac/factor": "factor {:.0f}", "gravac/gain": "gain {:.2f}"}
_ALIKE = "gravac/alike_steps"
_ALARMS = {
    "gravac/bad_steps": "{:.0f} bad steps: a gradient was not finite",
    "gravac/disagreements": "replicas held other params {:.0f} times: gravac.resync",
    _ALIKE: "all replicas had the same gradient in {:.0f} steps",
}
_CHANCE = 0.01  # of steps may have different gradients of one norm


class LiveView:
    """Shows progress, loss, encoding, factor, gain, bytes and the time left.

    In a terminal a progress bar changes in place, with the figures below it. Elsewhere,
    such as in the log of a cluster, one line is printed every few seconds. The loss is
    the mean of the last 20 steps; the bytes are those of one replica since the view was
    opened, beside those of dense steps. Figures that are not written are not shown.

    If `metrics.Recorder` is given the transform's `send`, the encoding that was taken
    is named, and a line says whenever a controller changes its mind, and why.

    Args:
      total_steps: Number of steps of the run.
      title: Name of the run.
      console: A `rich.console.Console`; by default standard output.
      transient: Whether the view disappears when it is closed.
      every_seconds: Time between two lines outside of a terminal, in seconds.

    Raises:
      ImportError: If rich is not installed.

    Example:
      >>> from gravac_jax import metrics
      >>> view = metrics.LiveView(2, every_seconds=0)
      >>> view.write(0, {"loss": 2.5, "gravac/factor": 40, "gravac/gain": 0.5})
      step 1 of 2, loss 2.5000, factor 40, gain 0.50
      >>> view.close()
    """

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "",
        console: "Console | None" = None,
        transient: bool = False,
        every_seconds: float = 10.0,
    ) -> None:
        with _from_tools("LiveView"):
            from rich import console as consoles
            from rich import progress
        self.title, self.total_steps = title, total_steps
        self.every_seconds = every_seconds
        self._console = console or consoles.Console()
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            "{task.fields[pace]}",
            progress.TimeRemainingColumn(),
            "left",
            console=self._console,
            refresh_per_second=_REFRESH_HZ,
            transient=transient,
            expand=True,
        )
        bar = self._progress.get_renderables
        self._progress.get_renderables = lambda: [*bar(), *self._lines]
        self._task = self._progress.add_task(title, total=total_steps, pace="")
        self._lines: list[str] = []  # below the bar
        self._losses: list[float] = []
        self._known: list[str] = []  # figures of the last step that sent
        self._sent = self._dense = 0.0  # bytes so far
        self._printed_at, self._choice = -math.inf, None
        if self._console.is_terminal:
            self._progress.live.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the figures of a step."""
        why, choice = _in_words(scalars), scalars.get(HOME)
        if why and choice != self._choice:
            self._choice = choice
            self._print(f"step {step + 1}: {why}")
        self._progress.update(self._task, completed=step + 1)
        if speed := self._progress.tasks[0].speed:  # steps per second
            self._progress.update(self._task, pace=f"{1e3 / speed:.0f} ms/step")
        figures, total = self._figures(scalars), self._total(scalars)
        counts = {name: scalars.get(name, 0) for name in _ALARMS}
        if counts[_ALIKE] <= max(1, _CHANCE * step):
            counts[_ALIKE] = 0
        alarms = [_ALARMS[name].format(x) for name, x in counts.items() if x > 0]
        self._lines = ["  ".join(figures), *total, *alarms]
        now, is_last = time.monotonic(), step + 1 == self.total_steps
        is_time = is_last or now - self._printed_at >= self.every_seconds
        if is_time and not self._console.is_terminal:
            self._printed_at = now
            place = f"step {step + 1} of {self.total_steps}"
            pace = self._progress.tasks[0].fields["pace"]
            words = [self.title, place, *figures, *total, pace, *alarms]
            self._print(", ".join(filter(None, words)))

    def flush(self) -> None:
        """Show the newest figures now."""
        if self._progress.live.is_started:
            self._progress.refresh()

    def close(self) -> None:
        """Leave the last view in the terminal, or remove it if `transient`."""
        self._progress.live.stop()

    def frame(self) -> "RenderableType":
        """Return what the terminal shows now."""
        return self._progress.get_renderable()

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def _figures(self, scalars: Mapping[str, float]) -> list[str]:
        """Return the loss, and what the last step that sent anything has sent."""
        if math.isfinite(scalars.get("gravac/factor", math.nan)):
            found = [x.format(scalars[k]) for k, x in _FIGURES.items() if k in scalars]
            self._known = [*_taken(scalars), *found]
        if "loss" not in scalars:
            return self._known
        self._losses = [*self._losses, scalars["loss"]][-_LOSSES:]
        return [f"loss {np.mean(self._losses):.4f}", *self._known]

    def _total(self, scalars: Mapping[str, float]) -> list[str]:
        """Return the bytes so far."""
        from rich.filesize import decimal

        if "gravac/dense_wire_bytes" not in scalars:
            return []
        self._sent += scalars.get("gravac/wire_bytes", 0.0)
        self._dense += scalars["gravac/dense_wire_bytes"]
        sent, dense = decimal(int(self._sent)), decimal(int(self._dense))
        fewer = self._dense / max(self._sent, 1.0)
        return [f"sent {sent} (dense {dense}, {fewer:.1f}x)"]


def _behind(prefix: str, scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the figures whose names begin with `prefix`, by the rest of the name."""
    found = {k: x for k, x in scalars.items() if k.startswith(prefix)}
    return {k.removeprefix(prefix): x for k, x in found.items()}


def _taken(scalars: Mapping[str, float]) -> list[str]:
    """Return the name of the encoding that a step has sent, if it is known."""
    rung, names = scalars.get("gravac/rung"), _behind(GAINS, scalars)
    return [x for i, x in enumerate(names) if i == rung and not x.isdecimal()]


def _in_words(scalars: Mapping[str, float]) -> str:
    """Return a decision in words, if its predictions are among the figures.

    It has the choice believed to be fastest, the first one, and the next best.
    """
    progress, seconds = _behind(PROGRESS, scalars), _behind(SECONDS, scalars)
    if not any(progress.values()):
        return ""
    names = list(progress)
    home = names[int(scalars[HOME])]
    cost = lambda name: seconds[name] / max(progress[name], 1e-6)
    next_best = min((x for x in names if x != home), key=cost, default=home)
    words = []
    for name in (x for x in names if x in (names[0], home, next_best)):
        worth = f" at {progress[name]:.2f} of the progress" * (progress[name] != 1)
        taken = ": taken" * (name == home)
        words.append(f"{name} {1e3 * seconds[name]:.0f} ms{worth}{taken}")
    return ", ".join(words)
