"""Training state by name: what is written down of it, and how it is read back.

Everything has the name of the way to it, as if it were saved as it is; only what the
transform keeps per replica is written in the shapes of the params. What is read must
fit what it is read into, but for what may change from run to run: the number of
replicas, the buckets, the ladder of factors and the controller.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _portable, _restore_checks, _state, _tree
from gravac_jax._portable import Form
from gravac_jax._state import TransformState
from gravac_jax._tree import Path

VERSION = 1  # of the names and shapes of a transform's state

Named = dict[Path, Any]

# Decisions, which mean something on one ladder and to one controller only.
_DECIDED = ("ladder", "rung", "past_rungs", "controller")


@dataclasses.dataclass(frozen=True)
class Own:
    """The state of one transform, somewhere in a tree."""

    path: Path
    state: TransformState
    form: Form

    def has(self, path: Path) -> bool:
        """Whether a name is of this state."""
        return path[: len(self.path)] == self.path

    def below(self, named: Named) -> Named:
        """What is of this state, by its name within."""
        n = len(self.path)
        return {path[n:]: x for path, x in named.items() if self.has(path)}

    @functools.cached_property
    def vectors(self) -> dict[Path, list[jax.Array]]:
        """What the memory keeps per entry: `[replicas, n]` in each bucket."""
        kept = self._memory.items()
        return {name: x for name, x in kept if x[0].ndim == 2}

    @functools.cached_property
    def rows(self) -> Named:
        """What else is kept per replica: `[replicas, ...]`, by its name in the file."""
        numbers = {k: x[0] for k, x in self._memory.items() if k not in self.vectors}
        exchange = _tree.by_path(self._led(self.state.local.exchange))
        return {("memory", *k): x for k, x in numbers.items()} | {
            ("exchange", *k): x for k, x in exchange.items()
        }

    @functools.cached_property
    def shared(self) -> Named:
        """What is the same on all replicas."""
        fields = self.state._asdict()
        del fields["local"], fields["layout"]
        return _tree.by_path(fields)

    @property
    def _memory(self) -> dict[Path, list[jax.Array]]:
        buckets = [_tree.by_path(self._led(x)) for x in self.state.local.memory]
        return {name: [x[name] for x in buckets] for name in buckets[0]}

    def _led(self, local: Any) -> Any:
        """With an axis of replicas; in the local form there is none."""
        if self.form.replicas is not None:
            return local
        return jax.tree.map(lambda x: jnp.asarray(x)[None], local)


def _owns(tree: Any, params: Any) -> list[Own]:
    """Every transform's state in `tree`."""
    is_ours = _state.is_transform_state
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_ours)
    return [
        Own(_tree.names(path), x, _portable.form(x, params))
        for path, x in flat
        if is_ours(x)
    ]


def _others(tree: Any, owns: list[Own]) -> Named:
    """The leaves that are no transform's."""
    flat = _tree.by_path(tree).items()
    return {path: x for path, x in flat if not any(own.has(path) for own in owns)}


def write(tree: Any, params: Any) -> Named:
    """What is to be saved of `tree`, by name.

    Args:
      tree: training state, with that of `gravac.transform` in it.
      params: those that it was made for.

    Raises:
      ValueError: if they are others, or the state is not as `gravac.place` makes it.
    """
    owns = _owns(tree, params)
    written = _others(tree, owns)
    for own in owns:
        written |= {own.path + name: x for name, x in _written(own)}
    return written


def _written(own: Own) -> Iterator[tuple[Path, Any]]:
    yield ("version",), VERSION
    yield ("replicas",), own.form.replicas or 1
    yield from own.shared.items()
    yield from own.rows.items()
    for name, buckets in own.vectors.items():
        leaves = own.form.split(buckets)
        for path, x in zip(own.form.names, leaves, strict=True):
            yield ("memory", *name, *path), x


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape in which a leaf is saved: a random key as its bits."""
    dtype = getattr(x, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, x).shape
    return tuple(np.shape(x))


def shapes(metadata: Any) -> dict[Path, tuple[int, ...]]:
    """Of what was saved, by name, from what Orbax knows of it."""
    flat = _tree.by_path(metadata).items()
    return {path: tuple(getattr(x, "shape", None) or ()) for path, x in flat}


def renamed(saved: Named, tree: Any) -> dict[Path, Path]:
    """Names here of what was saved by a chain that had no transform in it.

    In `optax.chain` the transform moves what comes after it one place on, and makes a
    chain of what was none.

    Returns:
      The name here for each name in `saved`; empty if they are the same.
    """
    is_ours = _state.is_transform_state
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_ours)
    ours = [_tree.names(path) for path, x in flat if is_ours(x)]
    if len(ours) != 1 or not ours[0] or not ours[0][-1].isdecimal():
        return {}
    *above, place = ours[0]
    chain = tuple(above)
    here = {_tree.names(path): shape_of(x) for path, x in flat if not is_ours(x)}
    if any(path[: len(ours[0])] == ours[0] for path in saved):
        return {}

    def moved_up(path: Path) -> Path:
        if path[: len(chain)] != chain or int(path[len(chain)]) < int(place):
            return path
        at = str(int(path[len(chain)]) - 1)
        return (*chain, at, *path[len(chain) + 1 :])

    def unwrapped(path: Path) -> Path:
        is_inside = path[: len(chain)] == chain
        return (*chain, *path[len(chain) + 1 :]) if is_inside else path

    for before in (moved_up, unwrapped):
        if {before(path): shape for path, shape in here.items()} == saved:
            return {before(path): path for path in here}
    return {}


def plan(saved: Named, tree: Any, params: Any) -> Named:
    """What to read, in what shapes and where to.

    Args:
      saved: the shapes of what was saved, by name.
      tree: training state of this run, placed.
      params: those that it was made for.

    Returns:
      For each name a `jax.ShapeDtypeStruct` with a sharding, or a number.

    Raises:
      ValueError: if what was saved does not fit.
    """
    owns = _owns(tree, params)
    others = _others(tree, owns)
    rest = {k: x for k, x in saved.items() if not any(own.has(k) for own in owns)}
    _restore_checks.fits({k: shape_of(x) for k, x in others.items()}, rest)
    wanted = {k: _like(x) for k, x in others.items()}
    for own in owns:
        mine = own.below(saved)
        if _restore_checks.has_transform(mine, own.path):
            wanted |= {own.path + name: x for name, x in _wanted(own, mine)}
    return wanted


def _like(x: Any, shape: tuple[int, ...] | None = None, sharding: Any = None) -> Any:
    if not isinstance(x, jax.Array):
        return x
    shape = x.shape if shape is None else shape
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding or x.sharding)


def _wanted(own: Own, saved: Named) -> Iterator[tuple[Path, Any]]:
    """What one transform reads of what it finds."""
    form = own.form
    vectors = {
        ("memory", *name, *path): (1, *leaf.shape)
        for name in own.vectors
        for path, leaf in zip(form.names, form.leaves, strict=True)
    }
    rows = {name: x.shape for name, x in own.rows.items()}
    _restore_checks.memory(vectors | rows, saved)
    _restore_checks.exchange(rows, saved)
    yield ("version",), 0
    yield ("replicas",), 0
    for name, x in own.shared.items():
        if saved.get(name) == x.shape and _decides_alike(name, own, saved):
            yield name, _like(x)
    for name, x in own.rows.items():
        shape = saved.get(name, ())
        if shape[1:] == x.shape[1:]:
            yield name, _like(x, shape, form.whole_unless(shape[0]))
    for name in own.vectors:
        for path, leaf, spec in zip(form.names, form.leaves, form.specs, strict=True):
            shape = saved[("memory", *name, *path)]
            at = form.sharding(spec, shape[0], leaf)
            x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)
            yield ("memory", *name, *path), x


def _decides_alike(name: Path, own: Own, saved: Named) -> bool:
    """Whether a name is no part of decisions, or all of them can be read."""
    decided = lambda x: {k: v for k, v in x.items() if k[0] in _DECIDED}
    shapes = {k: x.shape for k, x in own.shared.items()}
    return name[0] not in _DECIDED or decided(shapes) == decided(saved)


def read(saved: Named, tree: Any, params: Any) -> Any:
    """`tree` with what was read, all that `plan` asked for.

    Raises:
      ValueError: if it was written by another version.
    """
    owns = {own.path: own for own in _owns(tree, params)}
    is_ours = _state.is_transform_state
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_ours)

    def leaf(path: Path, x: Any) -> Any:
        if path not in owns:
            return saved[path]
        mine = owns[path].below(saved)
        return _read(owns[path], mine) if mine else x

    leaves = [leaf(_tree.names(path), x) for path, x in flat]
    return jax.tree.unflatten(structure, leaves)


def _read(own: Own, saved: Named) -> TransformState:
    """The state of one transform."""
    _restore_checks.version(saved[("version",)], VERSION)
    state, ladder = own.state, saved.get(("ladder",))
    if ladder is None or not np.array_equal(ladder, own.shared[("ladder",)]):
        _restore_checks.begins_anew(ladder is None)
        saved = {k: x for k, x in saved.items() if k[0] not in _DECIDED}
    fields = state._asdict()
    del fields["local"], fields["layout"]
    fields = _filled(fields, lambda name, x: saved.get(name, x))
    if saved[("replicas",)] != (own.form.replicas or 1):
        fields["controller"] = _moved(fields["controller"], state.controller)
    return state._replace(local=_local(own, saved), **fields)


def _filled(tree: Any, value: Callable[[Path, Any], Any]) -> Any:
    """`tree` with other leaves, by their names."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [value(_tree.names(path), x) for path, x in flat]
    return jax.tree.unflatten(structure, leaves)


def _moved(controller: Any, fresh: Any) -> Any:
    """What a controller knows that is true on other devices too."""
    can = lambda x: hasattr(x, "moved")
    move = lambda x, y: x.moved(y) if can(x) else x
    return jax.tree.map(move, controller, fresh, is_leaf=can)


def _local(own: Own, saved: Named) -> Any:
    """What each replica keeps, dealt out to those that there are."""
    form, local = own.form, own.state.local
    replicas = form.replicas or 1
    memory: Named = {}
    for name, like in own.vectors.items():
        leaves = [
            form.deal(saved[("memory", *name, *path)], spec)
            for path, spec in zip(form.names, form.specs, strict=True)
        ]
        buckets = form.join(leaves, [x.shape[1] for x in like])
        memory |= {(str(i), *name): x for i, x in enumerate(buckets)}
    rows = {
        name: _portable.pick(saved[name], replicas)
        for name in own.rows
        if name in saved
    }

    def value(name: Path, x: Any) -> Any:
        place, bucket, *rest = name
        if place == "memory":
            new = memory.get((bucket, *rest), rows.get((place, *rest), x))
        else:
            new = rows.get(name, x)
        return jax.device_put(new.reshape(x.shape), x.sharding)

    fields = {"memory": local.memory, "exchange": local.exchange}
    return local._replace(**_filled(fields, value))
