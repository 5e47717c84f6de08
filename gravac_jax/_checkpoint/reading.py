"""Reading what was written down of a training state, into one that fits.

What may change from run to run is the number of replicas, the buckets, the ladder of
factors and the controller; all else must be as it was.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _state
from gravac_jax._arrays import Path
from gravac_jax._checkpoint import ledger, portable, restore_checks
from gravac_jax._checkpoint.ledger import VERSION, Named, Own
from gravac_jax._state import TransformState

# Decisions, which mean something on one ladder and to one controller only.
_DECIDED = ("ladder", "rung", "past_rungs", "controller")


def specs_of(metadata: Any) -> dict[Path, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of what was saved, by name, from what Orbax knows of it."""
    shape = lambda x: tuple(getattr(x, "shape", None) or ())
    flat = _arrays.by_path(metadata).items()
    return {path: (kind_of(x), shape(x)) for path, x in flat}


def kind_of(x: Any) -> str:
    """The dtype as which something is saved, or its type if it is a Python number."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return type(x).__name__
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return "uint32" if is_key else str(np.dtype(dtype))


def renamed(saved: Named, tree: Any) -> dict[Path, Path]:
    """Names here of what was saved by a chain that had no transform in it.

    In `optax.chain` the transform moves what comes after it one place on, and makes a
    chain of what was none.

    Returns:
      The name here for each name in `saved`; the same if nothing moved.
    """
    same = {path: path for path in saved}
    is_ours = _state.is_transform_state
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_ours)
    ours = [_arrays.names(path) for path, x in flat if is_ours(x)]
    if len(ours) != 1 or not ours[0] or not ours[0][-1].isdecimal():
        return same
    if (*ours[0], "version") in saved:
        return same
    *above, place = ours[0]
    chain = tuple(above)
    here = {
        _arrays.names(path): (kind_of(x), ledger.shape_of(x))
        for path, x in flat
        if not is_ours(x) and ledger.is_saved(x)
    }

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
    return same


def plan(saved: Named, tree: Any, params: Any) -> Named:
    """What to read, in what shapes and where to.

    Args:
      saved: the dtypes and shapes of what was saved, by name.
      tree: training state of this run, placed.
      params: those that it was made for.

    Returns:
      For each name a `jax.ShapeDtypeStruct` with a sharding, or a number.

    Raises:
      ValueError: if what was saved does not fit.
    """
    owns = ledger.owns_of(tree, params)
    others = ledger.others_of(_arrays.by_path(tree), owns)
    others = {k: x for k, x in others.items() if ledger.is_saved(x)}
    here = {k: (kind_of(x), ledger.shape_of(x)) for k, x in others.items()}
    restore_checks.fits(here, ledger.others_of(saved, owns))
    wanted = {k: _like(x) for k, x in others.items()}
    for own in owns:
        mine = own.below({k: shape for k, (_, shape) in saved.items()})
        if restore_checks.has_transform(mine, own.path):
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
    rows = {name: x.shape for name, x in own.rows.items() if ledger.is_saved(x)}
    restore_checks.memory(vectors | rows, saved)
    restore_checks.exchange(rows, saved)
    yield ("version",), 0
    yield ("replicas",), 0
    decides_alike = _decides_alike(own, saved)
    for name, x in own.shared.items():
        is_kept = decides_alike or name[0] not in _DECIDED
        if is_kept and saved.get(name) == x.shape:
            yield name, _like(x)
    for name, x in own.rows.items():
        shape = saved.get(name)
        if shape is not None and shape[1:] == x.shape[1:]:
            yield name, _like(x, shape, form.whole_unless(shape[0]))
    for name in own.vectors:
        for path, leaf, spec in zip(form.names, form.leaves, form.specs, strict=True):
            shape = saved[("memory", *name, *path)]
            at = form.sharding(spec, shape[0], leaf)
            x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)
            yield ("memory", *name, *path), x


def _decides_alike(own: Own, saved: Named) -> bool:
    """Whether all that belongs to decisions can be read."""
    decided = lambda x: {k: v for k, v in x.items() if k[0] in _DECIDED}
    shapes = {k: x.shape for k, x in own.shared.items() if ledger.is_saved(x)}
    return decided(shapes) == decided(saved)


def read(saved: Named, tree: Any, params: Any) -> Any:
    """`tree` with what was read, all that `plan` asked for.

    Raises:
      ValueError: if it was written by another version.
    """
    owns = {own.path: own for own in ledger.owns_of(tree, params)}

    def leaf(path: Path, x: Any) -> Any:
        if path not in owns:
            return saved.get(path, x)
        mine = owns[path].below(saved)
        return _read(owns[path], mine) if mine else x

    filled = _filled(tree, leaf, _state.is_transform_state)
    # What was not read is in memory of its own too: the caller's may be donated.
    copy = lambda x: jax.device_put(jnp.copy(x), x.sharding)
    own = lambda x, old: copy(x) if x is old and isinstance(x, jax.Array) else x
    return jax.tree.map(own, filled, tree)


def _read(own: Own, saved: Named) -> TransformState:
    """The state of one transform."""
    restore_checks.version(saved[("version",)], VERSION)
    state = own.state
    ladders = [x for k, x in saved.items() if k[0] == "ladder"]
    if not ladders or not np.array_equal(*ladders, *jax.tree.leaves(state.ladder)):
        restore_checks.begins_anew(is_other_controller=not ladders)
        saved = {k: x for k, x in saved.items() if k[0] not in _DECIDED}
    fields = _filled(own.fields, lambda name, x: saved.get(name, x))
    if saved[("replicas",)] != (own.form.replicas or 1):
        fields["controller"] = _moved(fields["controller"], state.controller)
    return state._replace(local=_local(own, saved), **fields)


def _filled(tree: Any, value: Callable[[Path, Any], Any], is_leaf: Any = None) -> Any:
    """`tree` with other leaves, by their names."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    leaves = [value(_arrays.names(path), x) for path, x in flat]
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
    for name, like in own.vectors.items() if form.names else ():
        leaves = [
            form.deal(saved[("memory", *name, *path)], spec)
            for path, spec in zip(form.names, form.specs, strict=True)
        ]
        buckets = form.join(leaves, [x.shape[1] for x in like])
        memory |= {(str(i), *name): x for i, x in enumerate(buckets)}
    rows = {
        name: portable.pick(saved[name], replicas) for name in own.rows if name in saved
    }
    if saved[("replicas",)] != replicas:
        rows = {k: x for k, x in rows.items() if k[0] != "replica"}  # find out anew

    def value(name: Path, x: Any) -> Any:
        new = rows.get(name, x)
        if name[0] == "memory":
            _, bucket, *rest = name
            new = memory.get((bucket, *rest), rows.get(("memory", *rest), x))
        # In memory of its own, also where two buckets get the same.
        return jax.device_put(jnp.array(new, copy=True).reshape(x.shape), x.sharding)

    return local._replace(**_filled(local._asdict(), value))
