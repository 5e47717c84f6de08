"""Save training state so that nothing is lost, and restore it on any devices.

A residual is training signal that has not been delivered yet. It is saved whole, for
every replica, and restored bit for bit on as many; on more or fewer replicas their mean
stays what it was::

    from gravac_jax import checkpoint

    with checkpoint.Checkpointer("run/checkpoints", save_every=500) as checkpointer:
        state, start = (params, opt_state), 0
        if saved := checkpointer.restore(state, params):
            state, start = saved.tree, saved.step
        for step in range(start, steps):
            *state, loss = train_step(*state, batch(step))
            checkpointer.save(step + 1, state, state[0])
            if checkpointer.is_preempted:
                break

Orbax does the work: it writes in the background, each process its own part, and a
checkpoint is there when all of it is. It is an extra: `pip install
gravac_jax[checkpoint]`.
"""

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from gravac_jax import _arrays, _checks
from gravac_jax._checkpoint import label, ledger, reading, restore_checks
from gravac_jax._checkpoint.restore_checks import CheckpointError as CheckpointError

__all__ = ["CheckpointError", "Checkpointer", "Restored"]


class Restored(NamedTuple):
    """A checkpoint.

    Attributes:
      step: that it was saved at.
      tree: the training state.
      data: what was saved as `data`; None if nothing was.
    """

    step: int
    tree: Any
    data: Any


class Checkpointer:
    """The checkpoints of one run, in one directory.

    One run saves there; others may read meanwhile. A run that was restored from an
    earlier one deletes those that came after, when it saves, and says so. Where two
    models have an optimizer each, each has a directory of its own.

    Args:
      directory: where they are; it is made if it is not there. Of several processes,
        one that all of them share.
      save_every: steps from one to the next.
      keep: how many are kept, the newest; None for all.

    Raises:
      ValueError: if `save_every` or `keep` is no positive number.
      CheckpointError: if there can be no such directory.

    Attributes:
      is_preempted: whether SIGTERM has come, to this process or another one of the job;
        what was the state at the last `save` is saved then. A run in one process knows
        only while the checkpointer is in use as a context, which keeps SIGTERM from
        ending it: call `save` after every step, and stop.

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
      ...     checkpointer.wait()
      ...     step, (_, opt_state), _ = checkpointer.restore(begin(2), params)
      >>> saved, step, optax.tree.get(opt_state, "residual").shape
      (True, 1, (2, 65536))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every: int = 1000,
        keep: int | None = 3,
    ) -> None:
        _checks.count(save_every, "save_every", "steps from one checkpoint to the next")
        if keep is not None:
            _checks.count(keep, "keep", "the checkpoints that are kept, or is None")
        is_remote = "://" in str(directory)
        self.directory = directory if is_remote else pathlib.Path(directory).absolute()
        self.save_every = save_every
        self.is_preempted = False
        self._keep = keep
        self._at: int | None = None  # where the run was last saved or restored
        self._got_sigterm = threading.Event()
        self._contexts = contextlib.ExitStack()
        self._is_reader = True  # until it saves, when it clears up after the killed
        self._orbax = self._open()

    def _open(self) -> ocp.training.Checkpointer:
        newest: Any = ocp.training.preservation_policies.LatestN(self._keep)
        with self._complaints("cannot be used"):
            return ocp.training.Checkpointer(
                str(self.directory),
                save_decision_policy=_WhenAsked(),
                preservation_policy=newest,
                cleanup_tmp_directories=not self._is_reader,
            )

    @property
    def steps(self) -> list[int]:
        """Those of the checkpoints that are there, in order."""
        return sorted(x.step for x in self._orbax.checkpoints)

    def save(self, step: int, tree: Any, params: Any, data: Any = None) -> bool:
        """Save the state after so many steps, if it is time to.

        It is at multiples of `save_every`, and when the job is being preempted. The
        state may be donated at once; writing goes on meanwhile, and what goes wrong
        with it is said at the next call.

        Args:
          step: steps so far.
          tree: all that training goes on from: params, optimizer state, keys, in any
            nesting, with the state of `gravac.transform` as `gravac.place` makes it.
          params: those in it, which the residuals belong to.
          data: where the data are to go on, as JSON knows it: a number, or the
            `get_state()` of an iterator of `grain.MapDataset`. The same in all
            processes.

        Returns:
          Whether it is being saved.

        Raises:
          TypeError: if JSON does not know `data`, or a leaf cannot be saved.
          ValueError: if the params are not those of the state, or `step` is no count.
          CheckpointError: if this, or what was to be saved before, cannot be written;
            if there are later ones, and the run began without any of them.

        Cost:
          It waits for the step, for a checksum of everything, and until all is copied
          to the host.
        """
        step = restore_checks.step_number(step)
        self.is_preempted = self.is_preempted or self._reached_preemption(step)
        is_due = step % self.save_every == 0 or self.is_preempted
        if not is_due or step == self._at:
            return False
        written = ledger.write(tree, params)
        beside = label.write(written, data)
        self._begin_to_save(step)
        nested = _arrays.nested(written)
        with self._complaints("cannot be saved", step):
            self._orbax.save_async(step, nested, custom_metadata=beside)
        self._at = step
        if self.is_preempted:
            self.wait()
        return True

    def _begin_to_save(self, step: int) -> None:
        """Finish what is being saved, and make way."""
        if self._is_reader:
            self._is_reader = False
            self._orbax.close()
            self._orbax = self._open()
        self.wait()
        began = -1 if self._at is None else self._at
        later = [x for x in self.steps if x > began]
        if self._at is None:
            restore_checks.goes_on(step, later, self.directory)
        elif later:
            restore_checks.went_back(began, later, self.directory)
            with self._complaints("cannot be deleted"):
                for each in later:
                    self._orbax.delete(each)

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
          CheckpointError: if something cannot be.
        """
        try:
            with self._complaints("cannot be saved", self._at):
                self._orbax.wait()
        except CheckpointError:
            self._at = max(self.steps, default=None)  # it may be tried again
            raise

    def restore(
        self, tree: Any, params: Any, step: int | None = None
    ) -> Restored | None:
        """Read a checkpoint into the state that a run begins with.

        Replicas may be more or fewer than when it was saved, buckets others: what each
        replica gets is the mean of those in whose place it stands, so that the mean of
        all is what it was. A controller keeps what is true there too, and measures
        again how long steps take; with another ladder it begins anew. The checkpoint of
        a chain without `gravac.transform` is restored too, with empty residuals. Both
        are said in a warning.

        Args:
          tree: as for `save`, placed on the devices of this run; it stays as it is.
          params: those in it.
          step: which one; default: the last.

        Returns:
          What was saved; None if there is no checkpoint.

        Raises:
          ValueError: if it is of another model, optimizer, memory or exchange, or of
            another version of this package.
          CheckpointError: if there is none of that step, or it cannot be read.
        """
        self.wait()
        with self._complaints("cannot be read"):
            self._orbax.reload()  # others may have saved
        if step is None and not self.steps:
            return None
        step = self.steps[-1] if step is None else step
        step = restore_checks.is_there(step, self.steps, self.directory)
        with self._complaints("cannot be read", step):
            metadata = self._orbax.metadata(step)
            specs = reading.specs_of(metadata.metadata)
            beside = label.read(metadata.custom_metadata, specs)
        here = reading.renamed(specs, tree)
        wanted = reading.plan({here[k]: x for k, x in specs.items()}, tree, params)
        abstract = {k: wanted.get(here[k], ocp.PLACEHOLDER) for k in specs}
        with self._complaints("cannot be read", step):
            arrays = _arrays.by_path(self._orbax.load(step, _arrays.nested(abstract)))
            read = {k: x for k, x in arrays.items() if here[k] in wanted}
            label.check(read, beside["checksums"])
        self._at = step
        saved = {here[k]: x for k, x in read.items()}
        return Restored(step, reading.read(saved, tree, params), beside["data"])

    def close(self) -> None:
        """Wait until all is written, and write no more.

        Raises:
          CheckpointError: if something cannot be.
        """
        with self._complaints("cannot be saved"):
            self._orbax.close()

    def _reached_preemption(self, step: int) -> bool:
        if jax.process_count() == 1:
            return self._got_sigterm.is_set()
        # JAX's own, by which all processes come to know at the same step.
        return multihost_utils.reached_preemption_sync_point(step)

    def __enter__(self) -> "Checkpointer":
        is_alone = jax.process_count() == 1
        if is_alone and threading.current_thread() is threading.main_thread():
            note = lambda *_: self._got_sigterm.set()
            before = signal.signal(signal.SIGTERM, note)
            self._contexts.callback(signal.signal, signal.SIGTERM, before)
        return self

    def __exit__(self, *_: object) -> None:
        with self._contexts:
            self.close()

    @contextlib.contextmanager
    def _complaints(self, what: str, step: int | None = None) -> Iterator[None]:
        """Say which checkpoint it is that trouble is about, and what can be done."""
        try:
            yield
        except Exception as error:
            which = "" if step is None else f"step {step} in "
            why = f"{what}: {type(error).__name__}: {error}"
            message = f"the checkpoint of {which}{self.directory} {why}"
            raise CheckpointError(message) from error


class _WhenAsked:
    """Orbax's policy: every time that `save` calls."""

    def should_save(self, *_: Any, **__: Any) -> bool:
        return True
