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

A checkpoint of version 8 holds named arrays. Every leaf is stored as it is, such as
`tree/[0]['dense']['kernel']`. Only the state of `gravac.transform` has another form:

    steps/.steps, info/...               what is the same on all replicas
    decided/.ladder, decided/...         what one ladder and one controller decided
    local/.local.told, local/...         `[N, ...]`, what one ladder and N replicas know
    local/.local.norms[0], ...           `[N, 2, rows]`, how short means of rows are
    memory/.residual['dense']['kernel']  `[replicas, *shape]`, an array for each leaf
    memory/.optimizer.count              `[N]`, numbers that the memory keeps
    memory/.optimizer.mu["['kernel']"]   `[N, ...]`, what an optimizer keeps by leaf

Between two runs the replicas, the buckets, the slices, the ladder and the controller
may change. Everything else must be the same.

A label lies beside the arrays, JSON with a CRC: the version, `data`, and a checksum of
each array. Orbax does not notice a flipped bit: its OCDBT store and zarr3 index have a
CRC, but the data of the arrays and the file with the metadata have none. This was tried
for Orbax 0.12.8 with its four storage options, by flipping bits in every file.
"""

import contextlib
import functools
import json
import math
import operator
import os
import pathlib
import shutil
import signal
import textwrap
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import reached_preemption_sync_point
from jax.flatten_util import ravel_pytree
from jax.tree_util import keystr
from orbax.checkpoint import v1 as ocp

from gravac_jax import _arrays, _refuse
from gravac_jax._job import FOLDER
from gravac_jax._loop import placement
from gravac_jax._network import Comm
from gravac_jax._step import consistency, norms, slicing, states
from gravac_jax._step.bucketing import NO_LEAF
from gravac_jax._step.states import TransformState

__all__ = ["CheckpointError", "Checkpointer", "Restored"]

VERSION = 8

Named = dict[str, Any]

# What means something on one ladder and to one controller only, as does info.gains.
_DECIDED = {".ladder", ".decided", ".next_rungs", ".past_rungs", ".controller"}

_checksum_on_device = jax.jit(consistency.leaf_checksum)

# Files. -----------------------------------------------------------------------------


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
        return self._last_saves >= 1 + any(x._last_saves == 0 for x in _OPEN)

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
            raise CheckpointError(
                "a job with --elastic cannot save: let one process write its params."
            )
        # JAX sees to it that all processes learn of the signal at the same step.
        if jax.process_count() > 1 and reached_preemption_sync_point(step):
            self._must_stop = True
            _stop_all()
        self._last_saves = max(self._last_saves, 0) + self._must_stop
        if step == self._step or (step % self.save_every and not self._must_stop):
            return False
        named = _to_named(tree, params)
        label = _label(named, data, [x.layout for x in states.transform_states(tree)])
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
        anew. With another ladder the controller begins anew, too, with a warning.

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
            it was written by a version of this package with another format.
        """
        self.wait()
        with self._errors("no step can be read from"):
            self._orbax.reload()  # another process may have saved
        step = max(self.steps, default=None) if step is None else step
        if step is None:
            return None
        what = f"step {step} (of {self.steps}) cannot be read from"
        with self._errors(what):
            step = operator.index(step)
            saved, label = _read_label(self._orbax.metadata(step))
        sums, tree = label["checksums"], _laid_out(tree, label.get("layout"))
        here = _to_named(tree, params)
        if partial:  # but a state of gravac.transform is whole
            kinds = {*map(_kind, here)} - {"tree"}
            saved = {k: x for k, x in saved.items() if k in here or _kind(k) in kinds}
        wanted = _wanted(here, saved, sums)
        with self._errors(what):
            everything = dict.fromkeys(sums, ocp.PLACEHOLDER) | wanted
            loaded: Any = self._orbax.load(step, everything)
            found = {name: loaded[name] for name in wanted}
            if bad := dict(_checksums(found).items() - sums.items()):
                raise ValueError(f"damaged arrays: {', '.join(sorted(bad)[:3])}")
        if self._is_reader:  # once it saves, it only looks back
            self._step = step
        return Restored(step, _from_named(found, here, tree, params), label["data"])

    def close(self) -> None:
        """Wait until everything is written, and release the directory.

        Raises:
          CheckpointError: if something could not be written.
        """
        _OPEN.discard(self)
        undo = contextlib.nullcontext() if _OPEN else _UNDO_SIGTERM
        with undo, self._errors(f"step {self._step} cannot be saved to"):
            self._orbax.close()

    def __enter__(self) -> "Checkpointer":
        _OPEN.add(self)
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
_OPEN: set[Checkpointer] = set()
_UNDO_SIGTERM = contextlib.ExitStack()


def _stop_all(*_: object) -> None:
    for checkpointer in _OPEN:
        checkpointer._must_stop = True


# Training state as named arrays, and back. ------------------------------------------


def _laid_out(tree: Any, layout: Any) -> Any:
    """Return `tree` with the saved layout of buckets where it has a shape alone."""
    layouts = jax.tree.leaves([x.layout for x in states.transform_states(tree)])

    def fill(x: Any) -> Any:
        if not (_is_shape(x) and any(x is y for y in layouts)):
            return x
        if x.sharding is None or x.shape != np.shape(layout):
            _require_values(x)
        return jax.device_put(np.asarray(layout, x.dtype), x.sharding)

    return jax.tree.map(fill, tree)


def _to_named(tree: Any, params: Any) -> Named:
    """Return what a checkpoint stores of `tree`.

    Args:
      tree: training state, with the state of `gravac.transform` in it.
      params: the params that the state was made for.

    Raises:
      ValueError: if the state was made for other params, is not as `gravac.place` makes
        it, was taken apart, or lies in `params`.
    """
    whole, parts = states.transform_states(tree), states.locals_of(tree)
    if states.locals_of(params) or not len(whole) == len(parts) <= 1:
        raise ValueError(
            "`tree` must hold one state of gravac.transform, whole, and `params` none:"
            " write save(step, (params, opt_state), params), and restore((params,"
            " opt_state), params); pass the nnx.Optimizer itself, not nnx.split of it."
        )
    named: Named = {}
    for keys, x in jax.tree.leaves_with_path(tree, is_leaf=states.is_transform_state):
        is_state = states.is_transform_state(x)
        named |= _stored(x, params) if is_state else {f"tree/{keystr(keys)}": x}
    # Orbax refuses arrays without entries.
    return {name: x for name, x in named.items() if 0 not in _shape(x)}


def _wanted(here: Named, saved: Named, sums: dict[str, int]) -> Named:
    """Return what to load of a checkpoint: arrays as they are to lie, and numbers.

    Args:
      here: what would be stored of the state of this run.
      saved: Orbax's metadata of everything in the checkpoint.
      sums: the checksums of everything in it.

    Raises:
      ValueError: if the checkpoint does not fit.
    """
    _require_same(here, saved)
    shapes = lambda y: {k: _shape(y[k]) for k in y if _kind(k) == "decided"}
    has_ladder = lambda k: k.startswith("decided/.ladder") and not _is_shape(here[k])
    ladder = _checksums({k: here[k] for k in filter(has_ladder, here)})
    is_same = shapes(here) == shapes(saved) and ladder.items() <= sums.items()
    if not is_same:
        warnings.warn(
            "the checkpoint was saved with another ladder or controller: residuals"
            " are restored; the controller, and what encodings keep, begin anew.",
            stacklevel=3,
        )
    begins_anew = () if is_same else ("decided", "local")
    firsts = [_shape(x)[0] for k, x in here.items() if _kind(k) == "memory"]
    # Norms of slices are of one device each.
    may_move = lambda k: _kind(k) == "norms" and _shape(here[k])[0] == min(firsts)
    of_one = lambda x, k: _shape(x)[1:] if may_move(k) else _shape(x)
    fits = lambda k: _kind(k) == "memory" or of_one(saved[k], k) == of_one(here[k], k)
    names = [k for k in here if k in saved and _kind(k) not in begins_anew and fits(k)]
    _require_values(*(here[k] for k in here.keys() - names))
    return {k: _loading(here[k], _shape(saved[k])) for k in names}


def _require_same(here: Named, saved: Named) -> None:
    """Refuse a checkpoint of something else, and name the first differences."""
    here, saved = ({k: _must_match(k, x) for k, x in y.items()} for y in (here, saved))
    differ = [k for k in here | saved if here.get(k, "") != saved.get(k, "")]
    if not differ:
        return
    of = lambda names, k: names.get(k, "missing")
    say = lambda k: f"{k} is {of(saved, k)} in the checkpoint and {of(here, k)} here"
    raise ValueError(
        f"the checkpoint is of another model, optimizer or memory:"
        f" {'; '.join(map(say, differ[:3]))}. Restore with what saved it. To change"
        f" the memory, then send residuals by gravac.flush, and begin anew."
    )


def _must_match(name: str, x: Any) -> str:
    """Describe what must be the same in the checkpoint and here, if anything must."""
    dtype, shape = _type_and_shape(x)
    if _kind(name) == "memory":
        return f"{shape[1:]} for each replica"
    return f"{dtype}{shape or ''}" if _kind(name) == "tree" else ""


def _from_named(found: Named, here: Named, tree: Any, params: Any) -> Any:
    """Return `tree` with what was loaded, in memory of its own.

    Args:
      found: what was loaded of `wanted`.
      here: what would be stored of the state of this run.
      tree: the state of this run, placed. It stays as it is.
      params: the params in it.
    """
    for name in [x for x in found if _shape(found[x]) != _shape(here[x])]:
        old, new = found[name], here[name]
        found[name] = _redistribute(old, new, _kind(name) != "norms")
        if _kind(name) == "norms":
            found[name] = norms.of_others(found[name], len(old), new.shape[0])

    def fill(keys: Any, x: Any) -> Any:
        name = f"tree/{keystr(keys)}"
        if states.is_transform_state(x):
            return _filled(x, params, found)
        # What is not stored has no entries.
        return found[name] if name in found else jnp.zeros_like(x)

    return jax.tree.map_with_path(fill, tree, is_leaf=states.is_transform_state)


def _stored(state: TransformState, params: Any) -> Named:
    """Return what is stored of a transform's state."""
    layout = _layout_of(state, params)
    own = jax.NamedSharding(layout.mesh, layout.spec)
    put = lambda x: x.update(sharding=own) if _is_shape(x) else jax.device_put(x, own)
    placed = jax.tree.map(put, state.local)
    parts: dict[str, list[Any]] = {}
    for keys, x in jax.tree.leaves_with_path(state._replace(local=placed, layout=())):
        parts.setdefault(_stored_name(keys), []).append(x)
    # Vectors have an entry for each entry of their bucket. Other floats are of a leaf,
    # or each bucket's own. Integers count the same in every bucket.
    sizes = [(sum(bucket),) for bucket in layout.buckets] if layout.leaves else None
    named: Named = {}
    for name, arrays in parts.items():
        if _kind(name) == "memory" and [x.shape[1:] for x in arrays] == sizes:
            names = [name + leaf.path for leaf in layout.leaves]
            split = layout.shapes if _is_shape(arrays[0]) else layout.split
            named |= zip(names, split(arrays), strict=True)
        elif len(arrays) > 1 and _arrays.is_float(arrays[0]):
            named |= {f"{name}/{i}": x for i, x in enumerate(arrays)}
        else:
            named[name] = arrays[0]
    return named


def _filled(state: TransformState, params: Any, named: Named) -> TransformState:
    """Return the state with the arrays in `named`, which are as `_stored` has them."""
    layout = _layout_of(state, params)
    paths = [leaf.path for leaf in layout.leaves]
    join = functools.cache(lambda name: layout.join([named[name + x] for x in paths]))

    def fill(keys: Any, x: jax.Array) -> jax.Array:
        name = _stored_name(keys)
        is_vector = paths and name + paths[0] in named
        own = name + "".join(f"/{x.idx}" for x in keys[2:3] if hasattr(x, "idx"))
        if 0 in x.shape:  # which is not stored
            return jnp.zeros_like(x)
        # The caller may donate what it passed, so nothing may share its memory.
        copy = lambda: jnp.copy(named.get(own, named.get(name, x)))
        return join(name)[keys[2].idx] if is_vector else copy()

    filled = jax.tree.map_with_path(fill, state)
    if "local" not in map(_kind, named):  # it has another number of replicas
        fresh = jax.tree.map(jnp.copy, state.controller)
        filled = filled._replace(controller=states.moved(filled.controller, fresh))
    return jax.device_put(filled, jax.tree.map(lambda x: x.sharding, state))


def _stored_name(keys: Any) -> str:
    """Return the name of a leaf of a transform's state: its kind and its place."""
    field, both = keystr(keys[:1]), keystr(keys[:2])
    if both == ".local.memory":
        return f"memory/{keystr(keys[3:])}"  # whichever bucket it is of
    is_decided = field in _DECIDED or both == ".info.gains"
    return f"{'decided' if is_decided else field[1:]}/{keystr(keys)}"


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _require_values(*leaves: Any) -> None:
    """Refuse shapes where the checkpoint has no values for them."""
    if any(map(_is_shape, leaves)):
        raise ValueError(
            "shapes suffice if they have shardings, and params, replicas, ladder and"
            " controller are those that saved the checkpoint: restore into arrays, as"
            " gravac.place makes them."
        )


def _kind(name: str) -> str:
    return "norms" if name.startswith("local/.local.norms") else name.split("/", 1)[0]


def _type_and_shape(x: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the type and shape in which an array or a number is stored.

    A random key is stored as its bits. `x` may be Orbax's metadata.
    """
    if _arrays.is_key(x):
        x = jax.eval_shape(jax.random.key_data, x)
    return getattr(x, "dtype", type(x).__name__), tuple(getattr(x, "shape", ()))


def _shape(x: Any) -> tuple[int, ...]:
    return _type_and_shape(x)[1]


def _label(named: Named, data: Any, layouts: list[Any]) -> dict[str, Any]:
    """Return the label to store beside arrays.

    Raises:
      TypeError: if an array has no checksum, or JSON cannot store `data`.
    """
    content = {"version": VERSION, "data": data, "checksums": _checksums(named)}
    for layout in jax.tree.leaves(layouts):
        content["layout"] = np.asarray(layout).tolist()
    text = json.dumps(content)
    return {"label": text, "crc32": zlib.crc32(text.encode())}


def _read_label(metadata: Any) -> tuple[Named, dict[str, Any]]:
    """Return Orbax's metadata of each array, and the label: `data`, `checksums`, ...

    Args:
      metadata: what Orbax tells of a checkpoint, with the label.

    Raises:
      ValueError: if the label is damaged, does not fit the arrays, or is of a
        checkpoint of another version.
    """
    stored, saved = metadata.custom_metadata or {}, metadata.metadata or {}
    text, crc = stored.get("label", ""), stored.get("crc32")
    is_whole = zlib.crc32(text.encode()) == crc
    content = json.loads(text) if is_whole else {"version": VERSION, "checksums": {}}
    version = content.get("version", "before 8")
    has = "checksums that are damaged or missing"
    if version != VERSION:
        has = f"version {version}, and this gravac_jax reads {VERSION}"
    elif saved and content["checksums"].keys() == saved.keys():
        return saved, content
    raise ValueError(
        f"it has {has}: restore it with what saved it, deliver what replicas hold back,"
        f" if anything (gravac.flush), and begin with its params, step.init(params) or"
        f" gravac.place((params, tx.init(params)), mesh)"
    )


def _checksums(named: Named) -> dict[str, int]:
    """Return the checksum of each array or number.

    Raises:
      TypeError: if one has none.
    """
    return {name: _checksum(name, x) for name, x in named.items()}


def _checksum(name: str, x: Any) -> int:
    # JAX's takes no complex numbers, and neither an odd number of halves of a byte.
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(x, jax.Array):
            # One after the other: a sharded array's has a collective, and many programs
            # with collectives at once can deadlock on devices that share a processor.
            return int(_checksum_on_device(x))
        if hasattr(x, "dtype") or type(x) in (int, float):
            return consistency.host_checksum(x)
    raise TypeError(
        f"`{name}` is a {getattr(x, 'dtype', type(x).__name__)}, which cannot be"
        f" saved: make it an array of real numbers, or leave it out."
    )


# Per-replica state on devices. ------------------------------------------------------
#
# Every device keeps the residuals of its slices of the leaves in buckets, flat
# vectors. A checkpoint stores an array `[replicas, *shape]` for each leaf, so that
# the buckets, the slices and the number of replicas may change.


class _Leaf(NamedTuple):
    """A leaf of the params.

    Attributes:
      path: its path in the params, such as `['dense']['kernel']`.
      slice: the shape of the slice that one device has.
      spec: along which axes of the mesh `[replicas, *shape]` is sharded.
      copies: the axes along which the first device's is the only one that counts.
    """

    path: str
    slice: tuple[int, ...]
    spec: jax.P
    copies: tuple[str, ...]


class _Layout(NamedTuple):
    """How the state of one transform lies on the devices.

    Attributes:
      mesh: the devices. All axes are Auto, so that XLA finds out what to send.
      spec: along which axes per-replica state `[N, ...]` is sharded.
      leaves: the leaves, in the order in which they fill the buckets.
      buckets: how many entries of leaves each bucket has, and how many zeros after
        them.
    """

    mesh: jax.sharding.Mesh
    spec: jax.P
    leaves: tuple[_Leaf, ...]
    buckets: tuple[tuple[int, int], ...]

    def shapes(self, buckets: list[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes, with shardings, of what `split` returns."""
        lies = [jax.NamedSharding(self.mesh, x.spec) for x in self.leaves]
        return jax.eval_shape(jax.jit(self.split, out_shardings=lies), buckets)

    @functools.partial(jax.jit, static_argnums=0)
    def split(self, buckets: list[jax.Array]) -> list[jax.Array]:
        """Return `[replicas, *shape]` for each leaf, from `[N, n]` for each bucket."""

        def body(buckets: list[jax.Array]) -> list[jax.Array]:
            filled = [x[:, :n] for x, (n, _) in zip(buckets, self.buckets, strict=True)]
            parts = _regroup(filled, [leaf.slice for leaf in self.leaves])
            return [*map(Comm.first, (Comm(x.copies) for x in self.leaves), parts)]

        return self._on_devices(body, self.spec, [x.spec for x in self.leaves])(buckets)

    @functools.partial(jax.jit, static_argnums=0)
    def join(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Undo `split`."""

        def body(arrays: list[jax.Array]) -> list[jax.Array]:
            own = [*map(Comm.owned, (Comm(x.copies) for x in self.leaves), arrays)]
            filled = _regroup(own, [(entries,) for entries, _ in self.buckets])
            zeros = [((0, 0), (0, zeros)) for _, zeros in self.buckets]
            return [*map(jnp.pad, filled, zeros)]

        return self._on_devices(body, [x.spec for x in self.leaves], self.spec)(arrays)

    def _on_devices(self, body: Any, in_specs: Any, out_specs: Any) -> Any:
        specs = {"in_specs": (in_specs,), "out_specs": out_specs}
        return jax.shard_map(body, mesh=self.mesh, check_vma=False, **specs)


def _regroup(arrays: list[jax.Array], shapes: Sequence[Any]) -> list[jax.Array]:
    """Cut the entries of all `[1, ...]` arrays of a device, in a row, into shapes."""
    _, unravel = ravel_pytree([jnp.zeros(shape, arrays[0].dtype) for shape in shapes])
    return jax.vmap(lambda rows: unravel(ravel_pytree(rows)[0]))(arrays)


def _layout_of(state: TransformState, params: Any) -> _Layout:
    """Return how a transform's state, and the params it was made for, lie on devices.

    Raises:
      ValueError: if the state was made for other params, is not as `gravac.place` makes
        it, or was returned by `jax.pmap` as if it were the same on all devices.
    """
    # nnx.Optimizer wraps every array in a variable.
    only = lambda x: jax.tree.leaves(x)[0]
    steps, replica, pieces = map(only, (state.steps, state.local.replica, state.layout))
    _require_placed(steps, replica)
    sizes: dict[int, int] = {}
    buckets, entries = [], 0
    for i, size, _ in np.asarray(pieces).tolist():
        if i == NO_LEAF:  # the zeros at the end of a bucket
            buckets.append((entries, size))
            entries = 0
        elif size:  # Orbax refuses arrays without entries
            sizes[i] = sizes.get(i, 0) + size
            entries += size
    mesh, slow, inner = _axes(replica.sharding, np.asarray(pieces)[:, 2].max())
    flat = _arrays.named_leaves(params)

    def leaf(path: str, x: Any) -> _Leaf:
        spec = placement.specs_of(x) if inner else jax.P()
        cut = slicing.cut(x.shape, spec, mesh, inner)
        shape = jax.NamedSharding(mesh, cut.spec).shard_shape(x.shape)
        return _Leaf(path, shape, jax.P(slow, *cut.spec), cut.copies)

    leaves = [leaf(*flat[i]) for i in sizes if i < len(flat)]
    expected, found = list(sizes.values()), [math.prod(x.slice) for x in leaves]
    if found != expected:
        raise ValueError(
            f"`params` are not the params that the state was made for, whose leaves"
            f" have {expected[:8]} entries on a device, got {found[:8]}: pass those of"
            f" tx.init, and give each of two models a directory."
        )
    return _Layout(mesh, jax.P(slow + inner), tuple(leaves), tuple(buckets))


def _require_placed(steps: Any, replica: Any) -> None:
    """Refuse a state that is not as `gravac.place` makes it.

    JAX may take replicas' own states for copies of one. The numbers of the replicas
    show it: they differ where all else may, too.
    """
    shards = getattr(replica, "addressable_shards", [])
    found = {(str(x.index), str(np.asarray(x.data))) for x in shards}
    are_copies = _is_shape(replica) or len(found) == len(dict(found)) > 0
    if not are_copies or (steps.ndim, replica.ndim) != (0, 1):
        raise ValueError(
            f"the state must be as gravac.place makes it and gravac.data_parallel"
            f" returns it, got {len(found)} replicas, `steps` of shape {steps.shape}:"
            f" take gravac.state_specs under shard_map; save that of jax.pmap yourself."
        )


def _axes(sharding: Any, sharing: int) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """Return the mesh of per-replica state, and the axes that it is sharded along.

    Args:
      sharding: the sharding of per-replica state.
      sharing: how many devices share a replica.

    Returns:
      The mesh, the axes of the replicas, and the axes inside a replica.
    """
    if not isinstance(sharding, jax.NamedSharding):  # one device simulates replicas
        return jax.sharding.Mesh([*sharding.device_set], ("device",)), (), ()
    mesh, axes = sharding.mesh, _refuse.axis_names(next(iter(sharding.spec), None))
    mesh = jax.sharding.Mesh(np.asarray(mesh.devices), mesh.axis_names)
    # An axis of one device may be in either.
    is_inside = lambda at: math.prod(mesh.shape[x] for x in axes[at:]) <= sharing
    at = next(filter(is_inside, range(len(axes) + 1)))
    return mesh, axes[:at], axes[at:]


def _loading(like: Any, shape: tuple[int, ...]) -> Any:
    """Return where to load an array, which may be of another number of replicas.

    Args:
      like: the array of this run; if it has another shape, `[new, ...]`, sharded along
        its first axis.
      shape: the shape in the checkpoint, which is then `[old, ...]`.

    Returns:
      `like`, or the shape with a sharding. It is sharded along axes that can be
      divided, if there are any, so that no device has to hold all of it.
    """
    if shape == _shape(like):
        return like
    mesh, spec = like.sharding.mesh, [*like.sharding.spec, None][: len(shape)]
    cut = slicing.cut(shape, jax.P(None, *spec[1:]), mesh, _refuse.axis_names(spec[0]))
    sharding = jax.NamedSharding(mesh, cut.spec)
    return jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)


def _redistribute(x: jax.Array, like: jax.Array, is_mean: bool = True) -> jax.Array:
    """Return for the replicas of this run what the replicas of a checkpoint kept.

    Old and new replicas divide the same line into equal parts. Each new replica gets
    the mean of the old ones that it overlaps, weighted by the overlap: of 4 old and 2
    new replicas, the first gets the mean of the first two. The mean over all replicas
    stays the same, and numbers that are nowhere negative stay so. Of integers, and of
    what is the same on all replicas, it gets those of the old replica at the beginning
    of its part.

    Args:
      x: `[old, ...]`.
      like: `[new, ...]`, an array with the shape and the sharding to return.
      is_mean: whether it is a mean at all.
    """
    old, new = x.shape[0], like.shape[0]
    places = np.arange(old * new)  # of the line
    share = np.bincount(places // old * old + places // new).reshape(new, old) / old

    def change(x: jax.Array) -> jax.Array:
        if not (is_mean and _arrays.is_float(x)):
            return x[np.arange(new) * old // new]
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        mean = jnp.tensordot(share.astype(wide), x.astype(wide), 1, precision="highest")
        return mean.astype(x.dtype)

    return jax.jit(change, out_shardings=like.sharding)(x)
