"""Save training state so that nothing is lost, and restore it on any devices.

A residual is gradient that no replica has received yet. A checkpoint holds the residual
of every replica. A run on as many replicas gets back the same bits; on more or fewer
replicas the mean of the residuals stays the same::

    from gravac_jax import checkpoint

    with checkpoint.Checkpointer("run/checkpoints", save_every=500) as checkpointer:
        state, start = (params, opt_state), 0
        if saved := checkpointer.restore(state, params):
            state, start = saved.tree, saved.step
        for step in range(start, steps):
            *state, loss = train_step(*state, batch(step))
            checkpointer.save(step + 1, tuple(state), state[0])
            if checkpointer.is_preempted:
                break

Orbax writes the files, in the background and from all processes at once. It is an
extra: `pip install '.[checkpoint]'` in the clone.
"""

import contextlib
import functools
import operator
import os
import pathlib
import shutil
import signal
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point
from orbax.checkpoint import v1 as ocp

from gravac_jax import _refuse
from gravac_jax._checkpoint import labels, named_arrays
from gravac_jax._checkpoint.labels import Named
from gravac_jax._job import FOLDER

__all__ = ["CheckpointError", "Checkpointer", "Restored"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, and why."""


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns.

    Attributes:
      step: the step at which it was saved.
      tree: the training state.
      data: the `data` that was saved; None if there was none.
    """

    step: int
    tree: Any
    data: Any


class Checkpointer:
    """The checkpoints of one run, in one directory.

    One run saves to a directory, and others may read from it meanwhile. A run that goes
    on from an earlier checkpoint saves to another directory. If two models have an
    optimizer each, give each a directory and a checkpointer of its own.

    Args:
      directory: the directory of the checkpoints, created if needed. All processes of a
        job must see it.
      save_every: the number of steps from one checkpoint to the next.
      keep: how many checkpoints to keep, the newest ones; None keeps all.

    Raises:
      ValueError: if `save_every` or `keep` is not a positive whole number.
      CheckpointError: if the directory cannot be created or read.

    Attributes:
      directory: the directory as an absolute path, or a URL as it was given.
      save_every: the argument.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import checkpoint
      >>> tx = optax.chain(gravac.transform(), optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> begin = lambda replicas: gravac.place((params, tx.init(params)), replicas)
      >>> directory = tempfile.TemporaryDirectory()
      >>> with checkpoint.Checkpointer(directory.name, save_every=1) as checkpointer:
      ...     state = begin(4)
      ...     saved = checkpointer.save(1, state, params)
      ...     step, (_, opt_state), _ = checkpointer.restore(begin(2), params)
      >>> saved, step, opt_state[0].local.memory[0].residual.shape
      (True, 1, (2, 65536))

      Inference needs the params alone, on any devices:

      >>> on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
      >>> shapes = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=on)}
      >>> with checkpoint.Checkpointer(directory.name) as checkpointer:
      ...     restored = checkpointer.restore((shapes,), shapes, partial=True)
      >>> restored.tree[0]["w"].shape
      (256, 256)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every: int = 1000,
        keep: int | None = 3,
    ) -> None:
        _refuse.count(save_every, "save_every", "steps from one checkpoint to the next")
        if keep is not None:
            _refuse.count(keep, "keep", "the checkpoints that are kept, or is None")
        path = pathlib.Path(os.path.expanduser(directory)).absolute()
        self.directory = directory if "://" in str(directory) else path
        self.save_every = save_every
        self._must_stop = False
        self._last_saves = -1  # calls of `save` since it must stop; -1 before any call
        self._step: int | None = None  # the step that was last saved or restored
        self._is_reader = True  # until the first save
        newest: Any = ocp.training.preservation_policies.LatestN(keep)
        self._open = functools.partial(
            ocp.training.Checkpointer, str(self.directory), preservation_policy=newest
        )
        with self._errors("checkpoints cannot be kept in"):
            self._orbax = self._open()
            if path.is_file():
                raise NotADirectoryError("it is a file")

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints in the directory, in order."""
        return sorted(x.step for x in self._orbax.checkpoints)

    @property
    def is_preempted(self) -> bool:
        """Whether a process of the job received SIGTERM, and the run should stop.

        The last `save` has then saved its state, and so has the last `save` of every
        other checkpointer that is open in a `with` block. Call `save` after every step,
        of all checkpointers, and then look. A job of one process notices the signal,
        and survives it, only while a checkpointer is open in a `with` block of the main
        thread.
        """
        # If the signal comes between two models' saves of one step, the first model
        # saves in the next step. One that is not saved in every step is not awaited.
        return self._last_saves >= 1 + any(x._last_saves == 0 for x in _ENTERED)

    def save(self, step: int, tree: Any, params: Any, data: Any = None) -> bool:
        """Save the state after `step` steps, if a checkpoint is due.

        It is due at multiples of `save_every`, and when the job is preempted. `save`
        returns when everything is copied to the host, so the arrays may be donated at
        once. Files are written in the background; the next call raises if that fails.

        Args:
          step: the number of steps so far.
          tree: everything that training needs to go on: params, optimizer state, keys,
            in any nesting, with the state of `gravac.transform` as `gravac.place` makes
            it.
          params: the params in `tree`, to which the residuals belong.
          data: the position in the training data, as JSON: a number, or the
            `get_state()` of an iterator of `grain.MapDataset`. JSON gives back tuples
            as lists, and keys as strings. `data` must be the same in all processes.

        Returns:
          Whether a checkpoint is being saved.

        Raises:
          TypeError: if JSON cannot store `data`, or a leaf cannot be saved.
          ValueError: if the state was made for other params, `step` is not a whole
            number of at least 0, or `tree` and `params` are swapped.
          CheckpointError: if this checkpoint, or the one before, cannot be written, as
            on a full disk, or the job is `--elastic`; if the directory has this step,
            or later ones, of another run.

        Cost:
          Waits for the step, computes a checksum of everything, copies it to the host.
        """
        step = operator.index(step) if hasattr(step, "__index__") else step
        _refuse.number(step, "step", "save(step, tree, params)", is_whole=True, low=0)
        if os.environ.get(FOLDER):  # others may take the place of those that save
            raise CheckpointError("--elastic cannot save: let one process write params")
        # JAX sees to it that all processes learn of the signal at the same step.
        if jax.process_count() > 1 and reached_preemption_sync_point(step):
            self._must_stop = True
            _stop_all()
        self._last_saves = max(self._last_saves, 0) + self._must_stop
        if step == self._step or (step % self.save_every and not self._must_stop):
            return False
        named = named_arrays.of_tree(tree, params)
        label = labels.new(named, data, named_arrays.pieces_in(tree))
        try:
            self.wait()
        except CheckpointError:  # this one may be written all the same
            self._save(step, named, label)
            raise
        self._save(step, named, label)
        if self._must_stop:
            self.wait()
        return True

    def _save(self, step: int, named: Named, label: dict[str, Any]) -> None:
        with self._errors(f"step {step} cannot be saved to"):
            self._require_room(sum(getattr(x, "nbytes", 8) for x in named.values()))
            if self._is_reader:
                self._is_reader = False
                self._orbax.close()
                # It deletes what killed runs left unfinished, and so must no reader.
                self._orbax = self._open(cleanup_tmp_directories=True)
            else:
                self._orbax.reload()  # another run may have saved
            last = step - 1 if self._step is None else min(self._step, step - 1)
            if max(self.steps, default=-1) > last:
                raise ValueError(
                    f"it has {self.steps}, from the last of which this run did not go"
                    f" on: use another, or delete the later ones"
                )
            self._orbax.save_async(step, named, force=True, custom_metadata=label)
        self._step = step

    def _require_room(self, size: int) -> None:
        """Refuse a full disk, for which Orbax lets the other processes wait minutes."""
        if isinstance(self.directory, pathlib.Path):
            total, _, free = shutil.disk_usage(self.directory)  # 0, 0, 0 if unknown
            if free < size and total:
                raise OSError(f"the state has {size:,} bytes, and {free:,} are free")

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
          CheckpointError: if something could not be written.
        """
        with self._errors(f"step {self._step} cannot be saved to"):
            self._orbax.wait()

    def restore(
        self, tree: Any, params: Any, step: int | None = None, *, partial: bool = False
    ) -> Restored | None:
        """Read a checkpoint into the state that a run begins with.

        The number of replicas and the buckets may differ from when it was saved. Each
        replica then gets the mean of the replicas in whose place it stands, so that the
        mean over all replicas stays the same. The controller keeps what it knows about
        gradients, and measures again how long steps take; what encodings keep begins
        anew. With another ladder the controller begins anew, too, with a warning. This
        round and the next keep the length that was agreed on, whatever `every` is now.

        Args:
          tree: the state, as for `save`, placed on the devices of this run. It stays as
            it is. In place of its arrays `jax.ShapeDtypeStruct` with shardings will do
            if the replicas and what the transform sends are those that saved it, so
            that a large state need not be in memory twice. Shapes do not tell whether
            an encoding has other arguments: after such a change restore into arrays.
          params: the params in `tree`.
          step: the step of the checkpoint; by default the last one.
          partial: whether `tree` may be a part of what was saved, such as `(params,)`
            or `(params, None)` of `(params, opt_state)`, or a `TrainState` with None
            for the optimizer state. What is not in it is not read.

        Returns:
          What was saved; None if the directory has no checkpoint.

        Example:
          >>> import tempfile, jax, jax.numpy as jnp
          >>> import gravac_jax as gravac
          >>> from gravac_jax import checkpoint
          >>> mesh, tx = gravac.make_mesh(), gravac.adamw(1e-3)
          >>> def begin():
          ...     params = {"w": jnp.ones((256, 256))}
          ...     return gravac.place((params, tx.init(params)), mesh)
          >>> lies = lambda x, spec: x.update(sharding=jax.NamedSharding(mesh, spec))
          >>> shapes = jax.eval_shape(begin)
          >>> shapes = jax.tree.map(lies, shapes, gravac.state_specs(shapes))
          >>> with checkpoint.Checkpointer(tempfile.mkdtemp(), save_every=1) as saver:
          ...     state = begin()
          ...     saved = saver.save(1, state, state[0])
          ...     (params, opt_state) = saver.restore(shapes, shapes[0]).tree
          >>> float(params["w"].sum())
          65536.0

        Raises:
          ValueError: if the checkpoint is of another model, optimizer or memory.
          CheckpointError: if no checkpoint of this step exists, it cannot be read, or
            it was written by a version of this package with another format; in a job
            with `--elastic` once processes have joined.
        """
        if os.environ.get(FOLDER) and jax.process_count() > 1:  # which Orbax remembers
            raise CheckpointError("--elastic cannot restore: do it before Elastic(...)")
        self.wait()
        with self._errors("no step can be read from"):
            self._orbax.reload()  # another process may have saved
        step = max(self.steps, default=None) if step is None else step
        if step is None:
            return None
        what = f"step {step} (of {self.steps}) cannot be read from"
        with self._errors(what):
            step = operator.index(step)
            saved, label = labels.read(self._orbax.metadata(step))
        sums = label["checksums"]
        tree = named_arrays.with_pieces(tree, label["layout"])
        here = named_arrays.of_tree(tree, params)
        wanted = named_arrays.to_load(here, saved, sums, partial=partial)
        with self._errors(what):
            everything = dict.fromkeys(sums, ocp.PLACEHOLDER) | wanted
            loaded: Any = self._orbax.load(step, everything)
            found = {name: loaded[name] for name in wanted}
            if bad := dict(labels.checksums(found).items() - sums.items()):
                raise ValueError(f"damaged arrays: {', '.join(sorted(bad)[:3])}")
        if self._is_reader:  # once it saves, it only looks back
            self._step = step
        tree = named_arrays.into_tree(found, here, tree, params)
        return Restored(step, tree, label["data"])

    def close(self) -> None:
        """Wait until everything is written, and release the directory.

        Raises:
          CheckpointError: if something could not be written.
        """
        _ENTERED.discard(self)
        undo = contextlib.nullcontext() if _ENTERED else _UNDO_SIGTERM
        with undo, self._errors(f"step {self._step} cannot be saved to"):
            self._orbax.close()

    def __enter__(self) -> "Checkpointer":
        _ENTERED.add(self)
        if jax.process_count() == 1 and signal.getsignal(signal.SIGTERM) != _stop_all:
            with contextlib.suppress(ValueError):  # not in the main thread
                before = signal.signal(signal.SIGTERM, _stop_all)
                _UNDO_SIGTERM.callback(signal.signal, signal.SIGTERM, before)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn every exception into a `CheckpointError` that says what failed."""
        try:
            yield
        except Exception as error:
            first: BaseException = error
            while first.__cause__:  # Orbax takes a damaged file for one of another kind
                first = first.__cause__
            why = textwrap.shorten(f"{type(first).__name__}: {first}", 300)
            raise CheckpointError(f"{what} {self.directory}: {why}.") from error


# Those that are open in `with` blocks of this process; the last one undoes the handler.
_ENTERED: set[Checkpointer] = set()
_UNDO_SIGTERM = contextlib.ExitStack()


def _stop_all(*_: object) -> None:
    for checkpointer in _ENTERED:
        checkpointer._must_stop = True
