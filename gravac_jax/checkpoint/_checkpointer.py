"""The checkpoints of one run: when to save, where, and which one to restore."""

import contextlib
import operator
import os
import pathlib
import signal
import textwrap
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.tree import from_flat_dict

from gravac_jax import _refuse
from gravac_jax.checkpoint import _checksums, _format
from gravac_jax.checkpoint._layout import Named, Path, by_path


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

    One run saves to a directory, and others may read from it meanwhile. If a run
    restores an earlier checkpoint and then saves, it deletes the later ones with a
    warning. If two models have an optimizer each, give each a directory of its own.

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
      is_preempted: whether a process of the job received SIGTERM. The last `save` has
        then saved its state, and the run should stop. Call `save` after every step. A
        job of one process notices the signal, and survives it, only while the
        checkpointer is open in a `with` block of the main thread.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax
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
        is_url = "://" in str(directory)
        self.directory = directory if is_url else pathlib.Path(directory).absolute()
        self.save_every = save_every
        self.is_preempted = False
        self._keep = keep
        self._got_sigterm = threading.Event()
        self._at_exit = contextlib.ExitStack()
        self._at: int | None = None  # the step that was last saved or restored
        self._is_reader = True  # until the first save
        self._orbax = self._open()

    def _open(self) -> ocp.training.Checkpointer:
        newest: Any = ocp.training.preservation_policies.LatestN(self._keep)
        with self._errors("cannot be used"):
            return ocp.training.Checkpointer(
                str(self.directory),
                preservation_policy=newest,
                # A reader must not delete what another process is writing.
                cleanup_tmp_directories=not self._is_reader,
            )

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints in the directory, in order."""
        return sorted(x.step for x in self._orbax.checkpoints)

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
            `get_state()` of an iterator of `grain.MapDataset`. It must be the same in
            all processes.

        Returns:
          Whether a checkpoint is being saved.

        Raises:
          TypeError: if JSON cannot store `data`, or a leaf cannot be saved.
          ValueError: if the state was made for other params, `step` is not a whole
            number of at least 0, or `tree` and `params` are swapped.
          CheckpointError: if this checkpoint, or the one before, cannot be written; if
            the directory has later checkpoints and the run was not restored from any.

        Cost:
          Waits for the step, computes a checksum of everything, copies it to the host.
        """
        step = operator.index(step) if hasattr(step, "__index__") else step
        hint = "it counts steps so far; write save(step, tree, params)"
        _refuse.number(step, "step", hint, is_whole=True, low=0)
        if jax.process_count() == 1:
            self.is_preempted |= self._got_sigterm.is_set()
        else:
            # JAX sees to it that all processes learn of the signal at the same step.
            self.is_preempted |= multihost_utils.reached_preemption_sync_point(step)
        is_due = step % self.save_every == 0 or self.is_preempted
        if not is_due or step == self._at:
            return False
        named = _format.to_named(tree, params)
        label = _checksums.label(named, data)
        self._make_way(step)
        with self._errors("cannot be saved", step):
            self._orbax.save_async(
                step, from_flat_dict(named), force=True, custom_metadata=label
            )
        self._at = step
        if self.is_preempted:
            self.wait()
        return True

    def _make_way(self, step: int) -> None:
        """Finish the last save, and delete checkpoints of steps that are done anew."""
        if self._is_reader:
            self._is_reader = False
            self._orbax.close()
            self._orbax = self._open()  # this deletes what killed runs left unfinished
        self.wait()
        if self._at is None:
            if self.steps and self.steps[-1] >= step:
                raise CheckpointError(
                    f"step {step} cannot be saved: {self.directory} has checkpoints of"
                    f" {self.steps}. Restore one, or save to another directory."
                )
        elif later := [x for x in self.steps if x > self._at]:
            warnings.warn(
                f"the run went back to step {self._at}: the checkpoints of {later} in"
                f" {self.directory}, which an earlier run saved, are deleted.",
                stacklevel=3,
            )
            with self._errors("cannot be deleted"):
                for x in later:
                    self._orbax.delete(x)

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
          CheckpointError: if something could not be written.
        """
        try:
            with self._errors("cannot be saved", self._at):
                self._orbax.wait()
        except CheckpointError:
            self._at = max(self.steps, default=None)  # the step may be saved again
            raise

    def restore(
        self, tree: Any, params: Any, step: int | None = None
    ) -> Restored | None:
        """Read a checkpoint into the state that a run begins with.

        The number of replicas and the buckets may differ from when it was saved. Each
        replica then gets the mean of the replicas in whose place it stands, so that the
        mean over all replicas stays the same. The controller keeps what it knows about
        gradients, and measures again how long steps take. With another ladder the
        controller begins anew, as does what encodings keep. If the checkpoint is of a
        chain without `gravac.transform`, residuals begin empty. Both raise a warning.

        Args:
          tree: the state, as for `save`, placed on the devices of this run. It stays as
            it is.
          params: the params in `tree`.
          step: the step of the checkpoint; by default the last one.

        Returns:
          What was saved; None if the directory has no checkpoint.

        Raises:
          ValueError: if the checkpoint is of another model, optimizer or memory, or was
            written by a version of this package with another format.
          CheckpointError: if no checkpoint of this step exists, or it cannot be read.
        """
        self.wait()
        with self._errors("cannot be read"):
            self._orbax.reload()  # another process may have saved
        if step is None and not self.steps:
            return None
        step = self.steps[-1] if step is None else step
        if step not in self.steps:
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self.directory}: restore"
                f" one of {self.steps}."
            )
        step = int(step)
        # Without reading them nobody knows whether these are whole.
        others = [x for x in self.steps if x != step]
        hint = f" Try restore(tree, params, step=...) of {others}." if others else ""
        with self._errors("cannot be read", step, hint):
            metadata = self._orbax.metadata(step)
            saved = by_path(metadata.metadata)
            data, checksums = _checksums.read_label(metadata.custom_metadata, saved)

        def read(wanted: Named, place: Path = ()) -> Named:
            asked = {place + name: x for name, x in wanted.items()}
            others = dict.fromkeys(saved, ocp.PLACEHOLDER)
            with self._errors("cannot be read", step, hint):
                loaded = by_path(self._orbax.load(step, from_flat_dict(others | asked)))
                found = {path: loaded[path] for path in asked}
                _checksums.verify(found, checksums)
            return dict(zip(wanted, found.values(), strict=True))

        restored = _format.restore(tree, params, saved, read)
        self._at = step
        return Restored(step, restored, data)

    def close(self) -> None:
        """Wait until everything is written, and release the directory.

        Raises:
          CheckpointError: if something could not be written.
        """
        with self._errors("cannot be saved"):
            self._orbax.close()

    def __enter__(self) -> "Checkpointer":
        is_alone = jax.process_count() == 1
        if is_alone and threading.current_thread() is threading.main_thread():
            note = lambda *_: self._got_sigterm.set()
            before = signal.signal(signal.SIGTERM, note)
            self._at_exit.callback(signal.signal, signal.SIGTERM, before)
        return self

    def __exit__(self, *_: object) -> None:
        with self._at_exit:
            self.close()

    @contextlib.contextmanager
    def _errors(
        self, what: str, step: int | None = None, hint: str = ""
    ) -> Iterator[None]:
        """Turn every exception into a `CheckpointError` that names the checkpoint."""
        try:
            yield
        except Exception as error:
            which = "" if step is None else f"step {step} in "
            why = textwrap.shorten(str(error), 300)  # Orbax's may fill pages
            raise CheckpointError(
                f"the checkpoint of {which}{self.directory} {what}:"
                f" {type(error).__name__}: {why}.{hint}"
            ) from error
