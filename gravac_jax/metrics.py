"""Record what every step did, in a file, in the terminal, or wherever you like.

The state of the optimizer holds the figures of the last step. A `Recorder` fetches them
while the next step runs, and gives them to writers::

    from gravac_jax import metrics

    with (
        metrics.first_host(
            lambda: metrics.JsonlWriter("runs/one.jsonl"),
            lambda: metrics.LiveView(steps),
        ) as writer,
        metrics.Recorder(writer) as recorder,
    ):
        for i in range(steps):
            params, opt_state, loss = train_step(params, opt_state, batch(i))
            recorder.record(i, opt_state, loss=loss)

A writer is any object with the two methods of `metrics.Writer`. These send the figures
to Weights & Biases, and to TensorBoard; open them with `lambda: Wandb(project="one")`
and `lambda: TensorBoard("runs/one")`::

    class Wandb:
        def __init__(self, **options): self.run = wandb.init(**options)
        def write(self, step, scalars): self.run.log(dict(scalars), step=step)
        def close(self): self.run.finish()

    class TensorBoard(tensorboardX.SummaryWriter):
        def write(self, step, scalars):
            for name, x in scalars.items(): self.add_scalar(name, x, step)

These need their libraries; TensorBoard's writes `Bits(2)` as `Bits_2_`. Of a run that
resumes at step k, `TensorBoard("runs/one", purge_step=k)` hides what was written for
later steps before. `LiveView` needs an extra: `pip install '.[tools]'` in the clone.
"""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _refuse
from gravac_jax._controllers import controller_of
from gravac_jax._controllers.base import Controller
from gravac_jax._encodings.base import Encoding
from gravac_jax._loop import chain
from gravac_jax._step.step_info import StepInfo

__all__ = ["JsonlWriter", "LiveView", "Recorder", "Writer"]
__all__ += ["explain", "first_host", "read_jsonl", "scalars"]

GAINS = "gravac/gains/"  # behind it stands the name of an encoding

Fetch = Callable[[], dict[str, float]]  # waits for figures, and returns them


def scalars(opt_state: Any, **others: Any) -> dict[str, float]:
    """Return the figures of the last step; wait until the step is done.

    `Recorder` does not wait. In a job of several processes any one of them may call
    this function without the others. It runs one small program, and makes one transfer
    of 4 bytes a figure.

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
        of several steps, if one of `others` has more than one entry, or inside a
        transformation of JAX, such as `jax.vmap`.
      RuntimeError: If the state was donated to a later step.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> exchange = gravac.transform(axis_name=None, send=gravac.TopK(100))
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> updates, opt_state = jax.jit(tx.update)(params, tx.init(params))
      >>> figures = metrics.scalars(opt_state, loss=jnp.float32(0.5))
      >>> figures["gravac/is_finite"], figures["loss"]
      (1.0, 0.5)
    """
    return _copy(opt_state, others)()


def _copy(tree: Any, others: Mapping[str, Any], named: Any = ()) -> Fetch:
    """Copy figures on the device; return a function that waits for them.

    A later step may overwrite the state meanwhile.
    """
    info = _info_in(tree)._asdict()
    gains = _local(info.pop("gains"))
    figures = {f"gravac/{name}": _local(x) for name, x in info.items()} | dict(others)
    for name, x in figures.items():
        # Of an array with an entry for each replica, this host may hold one alone.
        if [np.size(y) for y in jax.tree.leaves(x)] != [1]:
            raise ValueError(
                f"`{name}` must be a number or an array with one entry, got"
                f" {_arrays.brief(x)}. Give its mean, or one if all are the same; of a"
                f" scan the StepInfo of one step, jax.tree.map(lambda x: x[i], infos)."
            )
    rungs = named or range(gains.size)
    _check_ladder(rungs, gains.size)
    names = [*figures, *(f"{GAINS}{rung}" for rung in rungs)]
    # JAX would wrap integers of the host around.
    narrow = lambda x: np.float32(x) if isinstance(x, np.ndarray) else x
    # These copies lie on one device, whatever mesh jax.set_mesh was given.
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        table = _table([*(narrow(_local(x)) for x in figures.values()), gains])
    return lambda: dict(zip(names, np.asarray(table, float).tolist(), strict=True))


def _check_ladder(named: Sequence[Any], rungs: int) -> None:
    if len(named) != rungs:
        raise ValueError(
            f"`send` has the encodings {', '.join(map(str, named))}, and the state is"
            f" of {rungs}. Give what the transform was given as `send`."
        )


@jax.jit
def _table(columns: list[jax.Array]) -> jax.Array:
    """Return all figures in one array, `[names]` float32: one transfer."""
    return jnp.concatenate([x.astype(jnp.float32).ravel() for x in columns])


def _local(value: Any) -> Any:
    """Return the part of one array that this process may read by itself."""
    (x,) = jax.tree.leaves(value)  # nnx wraps arrays in variables
    # One local copy: a program on all devices would have to run on every host.
    return x.addressable_data(0) if hasattr(x, "addressable_data") else np.asarray(x)


def _info_in(tree: Any) -> StepInfo:
    """Return the only `StepInfo` of a tree."""
    # flax.nnx.split turns NamedTuples into mappings from their fields.
    is_split = lambda x: isinstance(x, Mapping) and set(StepInfo._fields) <= set(x)
    is_info = lambda x: isinstance(x, StepInfo) or is_split(x)
    infos = list(filter(is_info, jax.tree.leaves(tree, is_leaf=is_info)))
    if len(infos) != 1:
        raise ValueError(
            f"expected one StepInfo, found {len(infos)} in a {type(tree).__name__}."
            " Give the state of an optimizer with one gravac.transform in it."
        )
    return StepInfo(**infos[0]) if is_split(infos[0]) else infos[0]


def explain(opt_state: Any, send: Encoding | Controller) -> str:
    """Return what the controller predicted of each rung, as a table in words.

    The figures are those that the last decision compared; nothing is predicted anew.
    The rung with the fewest seconds for the progress of a dense step is the fastest.
    Waits until the step is done.

    Args:
      opt_state: the state after the step, with exactly one `gravac.transform` in it.
      send: the transform's `send`, a controller.

    Returns:
      A line for each rung, and one line about where the seconds come from. One
      sentence if nothing was predicted yet.

    Raises:
      TypeError: if `send` is not a controller that predicts, as `gravac.Fastest` does.
      ValueError: if `opt_state` holds no `gravac.transform`, or more than one, or that
        of another ladder.

    Example:
      >>> import jax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> send = gravac.Fastest((gravac.Dense(), gravac.Bits(8), gravac.Bits(2)))
      >>> network = gravac.WireCost(bytes_per_second=1e6)
      >>> tx = gravac.transform(send=send, network=network)
      >>> one = lambda state, grads: tx.update(grads, state)[::-1]
      >>> step = gravac.data_parallel(one, 4)
      >>> grads = jax.random.normal(jax.random.key(0), (4, 25_600))
      >>> state, _ = step(gravac.place(tx.init(grads[0]), 4), grads)
      >>> print(metrics.explain(state, send))  # doctest: +ELLIPSIS
      sends    ms a step  progress  ms for a dense step's progress
      Dense()      164.3      1.00                           164.3
      Bits(8)       50.3      1.00                            50.3
      Bits(2)       21.5      0.98                            21.9  taken
      The milliseconds are predicted by gravac.WireCost alone, since no step time ...
    """
    state = chain.the_transform(opt_state, "metrics.explain")
    controller = controller_of(send)
    if type(controller).explain is Controller.explain:
        raise TypeError(f"{send!r} predicts nothing to explain: give gravac.Fastest().")
    _check_ladder(controller.ladder, _local(state.ladder).size)
    squeeze = lambda x: np.squeeze(np.asarray(_local(x)))
    return controller.explain(jax.tree.map(squeeze, state.controller))


@runtime_checkable
class Writer(Protocol):
    """The interface of writers: any object with these two methods is one."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the figures of a step."""

    def close(self) -> None:
        """Release files and connections; nothing is written afterwards."""


class _Writers(list[Writer]):
    """Several writers as one."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for writer in self:
            writer.write(step, scalars)


@contextlib.contextmanager
def first_host(*makes: Callable[[], Writer]) -> Iterator[_Writers]:
    """Open writers on the first process of a job, and none on the others.

    With it, every process of a job runs the same lines.

    Args:
      makes: Functions that open one writer each. Only process 0 calls them.

    Returns:
      A context manager. Entering it opens the writers and returns one that passes its
      figures to all of them; leaving it closes them. On other processes it does
      nothing. If one writer cannot be opened or closed, the others are closed.

    Example:
      >>> import pathlib, tempfile
      >>> from gravac_jax import metrics
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
      >>> with metrics.first_host(lambda: metrics.JsonlWriter(path)) as writer:
      ...     writer.write(0, {"loss": 0.5})
      >>> [line["loss"] for line in metrics.read_jsonl(path)]
      [0.5]
    """
    with contextlib.ExitStack() as closing:
        makes = makes if jax.process_index() == 0 else ()
        closed_later = lambda make: closing.enter_context(contextlib.closing(make()))
        yield _Writers(map(closed_later, makes))


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
        (`gravac/gains/Bits(2)`), and `metrics.LiveView` says which one was taken. None
        to number the encodings.

    Raises:
      TypeError: If `send` is neither an encoding nor a controller, or a writer lacks
        `write` or `close`, as what `metrics.first_host` returns does outside of `with`.

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
        self, *writers: Writer | _Writers, send: Encoding | Controller | None = None
    ) -> None:
        each = (x if isinstance(x, _Writers) else [x] for x in writers)
        self.writers = _Writers(itertools.chain.from_iterable(each))
        for writer in self.writers:
            if not isinstance(writer, Writer):
                raise TypeError(
                    f"a writer needs `write` and `close`, got {_arrays.brief(writer)}:"
                    f" take metrics.JsonlWriter(path), or metrics.first_host in `with`."
                )
        ladder = () if send is None else controller_of(send).ladder
        self._named = list(map(repr, ladder))
        self._copied: dict[int, Fetch] = {}

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
            copied = _copy(opt_state, others, self._named)
            self.flush()
            self._copied[step] = copied

    def flush(self) -> None:
        """Wait for the step recorded last, and write its figures."""
        while self._copied:
            step, fetch = self._copied.popitem()
            self.writers.write(step, fetch())

    def __exit__(self, *_: Any) -> None:
        self.flush()


class JsonlWriter(contextlib.AbstractContextManager["JsonlWriter"]):
    """Writes one line for each step: `{"step": 3, "seconds": 1.5, "loss": 0.25}`.

    `seconds` counts from the moment when the writer was opened. JSON has no infinity
    and no NaN: they are written as the strings "Infinity", "-Infinity" and "NaN".

    A run that resumes writes to the same file. When it writes step k first, the first
    line of a step from k on and all behind it, which an earlier process wrote before it
    was killed, are removed. If none is left, as in a second run to the file, it warns.
    Every line is handed to the operating system at once, so that no line is lost when
    the process dies.

    Args:
      path: The file; its folder is created if needed.

    Raises:
      ValueError: If the file exists, and no such writer wrote its first line.
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

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._old: list[Any] | None = list(_lines(path)) if path.exists() else []
        self._file = path.open("ab")
        self._start = time.perf_counter()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the line of a step.

        Args:
          step: Number of the step.
          scalars: Figures of the step, by name.

        Raises:
          TypeError: If a figure is named `step` or `seconds`.
          OSError: If the line cannot be written, for example because the disk is full.
        """
        to_json = lambda x: x if math.isfinite(x) else json.dumps(x)
        figures = {name: to_json(float(x)) for name, x in scalars.items()}
        seconds = time.perf_counter() - self._start
        line = dict(step=int(step), seconds=seconds, **figures)
        if self._old is not None:  # lines from this step on, and a last one cut off
            is_kept = lambda x: x[1] is None or x[1]["step"] < step
            size = sum(len(x[0]) for x in itertools.takewhile(is_kept, self._old))
            if self._old and not size:
                why = f"all {len(self._old)} lines, of an earlier run, are replaced"
                _refuse.warn(f"{self._file.name}: {why}")
            self._file.truncate(size)
            self._old = None
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()

    def __exit__(self, *_: Any) -> None:
        self.close()


def read_jsonl(path: str | Path) -> list[dict[str, float]]:
    """Read a file of `JsonlWriter`, also while it is being written.

    Args:
      path: The file.

    Returns:
      One dictionary for each line: `step`, `seconds` and the figures. What is damaged,
      as a last line that was cut off, is left out, with a warning.

    Raises:
      ValueError: If the first line is not a line of `JsonlWriter`.
      OSError: If the file cannot be read.

    Example:
      See `metrics.JsonlWriter`.
    """
    return [line for _, line in _lines(Path(path).expanduser()) if line]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, float] | None]]:
    """Yield every whole line, as bytes and parsed; None if it is damaged."""
    *whole, rest = path.read_bytes().split(b"\n")
    if not whole and not rest.startswith(b'{"step": '[: len(rest)]):
        whole, rest = [rest], b""
    for number, text in enumerate(whole, 1):
        try:
            line = {name: float(x) for name, x in json.loads(text).items()}
            _ = line["step"], line["seconds"]
        except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError):
            why = f"line {number} is not a line of metrics.JsonlWriter: {text[:60]!r}"
            if number == 1:
                raise ValueError(f"{path}: {why}. Give another file.") from None
            _refuse.warn(f"{path}: {why}; it is left out")
            line = None
        yield text + b"\n", line
    if rest:
        _refuse.warn(f"{path}: the last line was cut off and is left out")


_FIGURES = {"gravac/factor": "factor {:.0f}", "gravac/gain": "gain {:.2f}"}
_ALARMS = {
    "gravac/bad_steps": "{:.0f} bad steps: a gradient was not finite",
    "gravac/disagreements": "replicas held other params {:.0f} times: gravac.resync",
    "gravac/alike_steps": "all replicas had the same gradient in {:.0f} steps",
}


class LiveView(contextlib.AbstractContextManager["LiveView"]):
    """Shows progress, loss, encoding, factor, gain, bytes and the time left.

    In a terminal a progress bar changes in place, with the figures below it. Elsewhere,
    such as in the log of a cluster, one line is printed every few seconds. The loss is
    the mean of the last 20 steps; the bytes are those of one replica since the view was
    opened, beside those of dense steps. Figures that are not written are not shown.

    If `metrics.Recorder` is given the transform's `send`, the encoding that was taken
    is named.

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
        console: Any = None,
        transient: bool = False,
        every_seconds: float = 10.0,
    ) -> None:
        from rich import progress

        self.every_seconds, self._due = every_seconds, -math.inf  # of the next line
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            "{task.fields[pace]}",
            progress.TimeRemainingColumn(),
            "left",
            console=console,
            refresh_per_second=2,  # a frame takes milliseconds of a core
            transient=transient,
            expand=True,
        )
        bar = self._progress.get_renderables
        self._progress.get_renderables = lambda: [*bar(), *self._lines]
        self._progress.add_task(title, total=total_steps, pace="")
        self._lines: list[str] = []  # below the bar
        self._sent: list[str] = []  # figures of the last step that sent
        self._losses: list[float] = []
        self._bytes = np.zeros(2)  # so far: sent, and dense
        if self._progress.console.is_terminal:
            self._progress.live.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the figures of a step."""
        (task,) = self._progress.tasks
        self._progress.update(task.id, completed=step + 1)
        pace = f"{1e3 / task.speed:.0f} ms/step" if task.speed else ""
        task.fields["pace"] = pace
        figures, total, alarms = self._shown(step, scalars)
        self._lines = ["  ".join(figures), *total, *alarms]
        is_due = step + 1 == task.total or time.monotonic() >= self._due
        if is_due and not self._progress.console.is_terminal:
            self._due = time.monotonic() + self.every_seconds
            place = f"step {step + 1} of {task.total}"
            words = [task.description, place, *figures, *total, pace, *alarms]
            self._progress.console.out(", ".join(filter(None, words)), highlight=False)

    def close(self) -> None:
        """Leave the last view in the terminal, or remove it if `transient`."""
        self._progress.live.stop()

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _shown(self, step: int, scalars: Mapping[str, float]) -> tuple[list[str], ...]:
        """Return a step's figures, the bytes so far, and what went wrong so far."""
        from rich.filesize import decimal

        if "loss" in scalars:
            self._losses = [*self._losses, scalars["loss"]][-20:]
        loss = [f"loss {np.mean(self._losses):.4f}"] if self._losses else []
        if math.isfinite(scalars.get("gravac/factor", math.nan)):  # not a local step
            names = [x.removeprefix(GAINS) for x in scalars if x.startswith(GAINS)]
            rung = scalars.get("gravac/rung")
            taken = [x for i, x in enumerate(names) if i == rung and not x.isdecimal()]
            shown = [x.format(scalars[k]) for k, x in _FIGURES.items() if k in scalars]
            self._sent = [*taken, *shown]
        self._bytes += [scalars.get(f"gravac/{x}wire_bytes", 0) for x in ("", "dense_")]
        sent, dense = map(int, self._bytes)
        fewer = f"(dense {decimal(dense)}, {dense / max(sent, 1):.1f}x)"
        total = [f"sent {decimal(sent)} {fewer}"] if dense else []
        # By chance, one step in a hundred may have different gradients of one norm.
        least = {"gravac/alike_steps": max(1, 0.01 * step)}
        is_loud = lambda name: scalars.get(name, 0) > least.get(name, 0)
        alarms = [x.format(scalars[k]) for k, x in _ALARMS.items() if is_loud(k)]
        return [*loss, *self._sent], total, alarms
