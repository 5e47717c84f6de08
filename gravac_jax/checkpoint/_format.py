"""What a checkpoint holds, version 8: training state as named arrays.

Every leaf is stored as it is, under the names on the way to it. Only the state of
`gravac.transform` is stored in another form. Below its place in the tree it has

    version                        8
    replicas                       N
    steps, decided, ahead, ...     the fields that are the same on all replicas
    replica                        `[N]`
    memory/residual/dense/kernel   `[replicas, *shape]`, one array for each leaf
    memory/optimizer/count         `[N]`, numbers that the memory keeps
    memory/optimizer/mu/['kernel'] `[N, ...]`, what an optimizer keeps by leaf
    told/bad                       `[N]`, with a delay
    encodings/0/TopK/threshold     `[N, ...]`, the state of an encoding, of bucket 0

Between two runs the replicas, the buckets, the slices, the ladder and the controller
may change. Everything else must be the same.
"""

import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _state
from gravac_jax._state import TransformState, is_transform_state
from gravac_jax.checkpoint import _layout
from gravac_jax.checkpoint._layout import Layout, Named, Path, by_path

VERSION = 8

Read = Callable[..., Named]
Groups = dict[Path | None, Named]  # of each transform's state; under None all else

_PER_REPLICA = ("told", "memory", "encodings")

# What means something on one ladder and to one controller only, as does info/gains.
_DECISIONS = ("ladder", "decided", "ahead", "past_rungs", "controller")


def to_named(tree: Any, params: Any) -> Named:
    """Return what a checkpoint stores of `tree`.

    Args:
      tree: training state, with the state of `gravac.transform` in it.
      params: the params that the state was made for.

    Raises:
      ValueError: if the state was made for other params, is not as `gravac.place` makes
        it, or was taken apart; if Orbax would give two leaves the same name.
    """
    if _state.locals_of(params):
        raise ValueError(
            "`params` holds the state of gravac.transform, which belongs into `tree`:"
            " write save(step, (params, opt_state), params), and restore((params,"
            " opt_state), params)."
        )
    if len(_state.locals_of(tree)) != len(_state.transform_states(tree)):
        raise ValueError(
            "nnx.split took the state in `tree` apart: pass the nnx.Optimizer itself."
        )
    named: Named = {}
    for path, x in by_path(tree, is_transform_state).items():
        stored = _stored(x, params) if is_transform_state(x) else {(): x}
        named |= {path + name: array for name, array in stored.items()}
    dotted = list(map(".".join, named))
    if twice := {name for name in dotted if not name or dotted.count(name) > 1}:
        raise ValueError(
            f"leaves of `tree` have no name, or the same one with dots between its"
            f" parts: {twice}. Rename them, or put a single array into a dict."
        )
    # Orbax refuses arrays without entries.
    return {path: x for path, x in named.items() if 0 not in _shape(x)}


def restore(tree: Any, params: Any, saved: Named, read: Read) -> Any:
    """Return `tree` with what a checkpoint holds, in memory of its own.

    Args:
      tree: the state of this run, placed. It stays as it is.
      params: the params in it.
      saved: Orbax's metadata of everything in the checkpoint, by path.
      read: returns what the checkpoint has under some paths, below `place` if it is
        given. It takes for each of them an array, whose shape, dtype and sharding it
        returns, or a number.

    Raises:
      ValueError: if the checkpoint does not fit.
    """
    leaves = by_path(tree, is_transform_state)
    states = {path: x for path, x in leaves.items() if is_transform_state(x)}
    known = [place for place in states if (*place, "version") in saved]
    _require_version(read({(*place, "version"): VERSION for place in known}))
    here = _grouped(to_named(tree, params), states)
    for place in [place for place in states if place not in known]:
        del here[place]
        warnings.warn(
            "the checkpoint holds no state of gravac.transform: the run begins with"
            " empty residuals, and a controller that has seen nothing.",
            stacklevel=3,
        )
    names = _names_in(saved, here[None], states)
    there = _grouped({k: saved[x] for k, x in names.items() if x in saved}, known)
    _require_same(_fixed(here), _fixed(there))
    found = read({names[path]: x for path, x in here[None].items()})
    for path, x in leaves.items():
        if path in here:
            below = functools.partial(read, place=path)
            named = _found(here[path], there[path], below)
            leaves[path] = _filled(x, params, named)
        elif path in here[None]:
            leaves[path] = found[names[path]]
        elif path in states or isinstance(x, jax.Array):
            leaves[path] = jax.tree.map(_copy_like, x, x)
    structure = jax.tree.structure(tree, is_leaf=is_transform_state)
    return jax.tree.unflatten(structure, leaves.values())


def _require_version(found: Named) -> None:
    """Refuse a checkpoint of another version of the format."""
    for version in found.values():
        if version != VERSION:
            raise ValueError(
                f"the checkpoint has version {version}, and this gravac_jax reads"
                f" {VERSION}. To go on with this one, restore with the gravac_jax that"
                f" saved it, deliver what replicas hold back (gravac.flush), save the"
                f" params alone, and begin here with gravac.place((params,"
                f" tx.init(params)), mesh)."
            )


def _names_in(saved: Named, here: Named, places: Collection[Path]) -> dict[Path, Path]:
    """Return for each path of this run the path in the checkpoint.

    They differ if the checkpoint is of a chain without `gravac.transform`, which moves
    what comes after it one place on, and makes a chain of a single optimizer.
    """
    number = lambda name: int(name) if name.isdigit() else -1

    def without(path: Path, is_chain: bool) -> Path:
        for *chain, at in places:
            n = len(chain)
            if [*path[:n]] == chain and number(path[n]) > number(at) >= 0:
                before = (str(number(path[n]) - 1),) if is_chain else ()
                return (*chain, *before, *path[n + 1 :])
        return path

    for is_chain in (True, False):
        names = {path: without(path, is_chain) for path in here}
        if saved.keys() <= set(names.values()):
            return names
    return {path: path for path in saved}


def _fixed(groups: Groups) -> dict[str, str]:
    """Describe everything that must be the same in the checkpoint and here."""
    found = {}
    for place, named in groups.items():
        for name, x in named.items():
            dtype, shape = _type_and_shape(x)
            if place is None:
                found["/".join(name)] = f"{dtype}{shape or ''}"
            elif name[0] == "memory":
                found["/".join(place + name)] = f"{shape[1:]} for each replica"
    return found


def _require_same(here: dict[str, str], there: dict[str, str]) -> None:
    """Refuse a checkpoint of something else, and name the first differences."""
    different = [
        f"{name} is {there.get(name, 'missing')} in the checkpoint and"
        f" {here.get(name, 'missing')} here"
        for name in here | there
        if here.get(name) != there.get(name)
    ]
    if different:
        raise ValueError(
            f"the checkpoint is of another model, optimizer or memory."
            f" Differences: {len(different)}, such as {'; '.join(different[:3])}."
            f" Restore with what saved it. Then, to change the memory, send the"
            f" residuals with gravac.flush, and begin with gravac.place."
        )


def _found(here: Named, there: Named, read: Read) -> Named:
    """Return what a checkpoint has of one transform's state, for these replicas.

    Args:
      here: what would be stored of the state of this run.
      there: Orbax's metadata of what is stored, by the same names.
      read: as for `restore`, by these names.
    """
    is_decided = lambda name: name[0] in _DECISIONS or name[:2] == ("info", "gains")
    shapes = lambda named: {k: _shape(x) for k, x in named.items() if is_decided(k)}
    ladder = {name: x for name, x in here.items() if name[0] == "ladder"}
    is_same = shapes(here) == shapes(there) and all(
        map(np.array_equal, read(ladder).values(), ladder.values())
    )
    if not is_same:
        is_new = lambda name: is_decided(name) or name[0] in ("told", "encodings")
        here = {name: x for name, x in here.items() if not is_new(name)}
        warnings.warn(
            "the checkpoint was saved with another ladder or controller: residuals"
            " are restored; the controller, and what encodings keep, begin anew.",
            stacklevel=4,
        )
    wanted: Named = {}
    for name in [name for name in here if name in there]:
        x, shape = here[name], _shape(there[name])
        if shape == _shape(x):
            wanted[name] = x
        elif name[0] in _PER_REPLICA and shape[1:] == x.shape[1:]:
            wanted[name] = _layout.loading(x, shape)
    found = read(wanted)
    for name, x in found.items():
        if _shape(x) != _shape(here[name]):
            # In the state of an encoding a mean of replicas means nothing.
            is_averaged = name[0] != "encodings"
            found[name] = _layout.redistribute(x, here[name], is_averaged)
    return found


def _stored(state: TransformState, params: Any) -> Named:
    layout = _layout.layout_of(state, params)
    named, vectors = _parts(state, layout)
    for name, buckets in vectors.items():
        arrays = zip(layout.leaves, layout.split(buckets), strict=True)
        named |= {name + leaf.path: x for leaf, x in arrays}
    return named


def _filled(state: TransformState, params: Any, named: Named) -> TransformState:
    """Return the state with the arrays in `named`, which are as `_stored` has them."""
    layout = _layout.layout_of(state, params)
    plain, vectors = _parts(state, layout)
    join = lambda name: layout.join([named[name + x.path] for x in layout.leaves])
    joined = {name: join(name) for name in vectors}
    flat = by_path(state)
    for path, x in flat.items():
        name = _stored_name(path)
        is_joined = name in joined
        flat[path] = joined[name][int(path[2])] if is_joined else named.get(name, x)
    filled = jax.tree.unflatten(jax.tree.structure(state), flat.values())
    if named["replicas",] != plain["replicas",]:
        # Some of what a controller knows is not true on other devices.
        can_move = lambda x: hasattr(x, "moved")
        move = lambda x, fresh: x.moved(fresh) if can_move(x) else x
        args = filled.controller, state.controller
        filled = filled._replace(controller=jax.tree.map(move, *args, is_leaf=can_move))
    return jax.tree.map(_copy_like, filled, state)


def _parts(state: TransformState, layout: Layout) -> tuple[Named, dict[Path, Any]]:
    """Return what is stored as it is, and the memory's vectors of all buckets.

    Both are by their stored names. Per-replica state is `[N, ...]`, on the layout's
    mesh.
    """
    local, replicas = state.local, _state.placed_replicas(state.local)
    if replicas is None:
        local = jax.tree.map(lambda x: jnp.asarray(x)[None], local)
    by_device = jax.NamedSharding(layout.mesh, layout.spec)
    placed = state._replace(local=jax.device_put(local, by_device))
    named: dict[Path, list[Any]] = {}
    for path, x in by_path(placed).items():
        if path[0] != "layout":
            named.setdefault(_stored_name(path), []).append(x)
    # These have an entry for each entry of their bucket. All else of the memory is of
    # one leaf, or the same in every bucket.
    sizes = [(sum(bucket),) for bucket in layout.buckets] if layout.leaves else None
    is_vector = lambda arrays: [x.shape[1:] for x in arrays] == sizes
    vectors = {k: x for k, x in named.items() if k[0] == "memory" and is_vector(x)}
    plain: Named = {("version",): VERSION, ("replicas",): replicas or 1}
    return plain | {k: x[0] for k, x in named.items() if k not in vectors}, vectors


def _stored_name(path: Path) -> Path:
    """Return the stored name of a leaf of a transform's state."""
    name = path[1:] if path[0] == "local" else path
    return (name[0], *name[2:]) if name[0] == "memory" else name


def _grouped(named: Named, places: Collection[Path]) -> Groups:
    """Return what lies below each of some places, and under None all else."""
    groups: Groups = {None: {}}
    groups |= {place: {} for place in places}
    for path, x in named.items():
        place = next((p for p in places if path[: len(p)] == p), None)
        groups[place][path[len(place or ()) :]] = x
    return groups


def _type_and_shape(x: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the type and shape in which an array or a number is stored.

    A random key is stored as its bits. `x` may be Orbax's metadata.
    """
    if jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key):
        x = jax.eval_shape(jax.random.key_data, x)
    return getattr(x, "dtype", type(x).__name__), tuple(getattr(x, "shape", ()))


def _shape(x: Any) -> tuple[int, ...]:
    return _type_and_shape(x)[1]


def _copy_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return a copy of `x` with the shape and sharding of `like`.

    The caller may donate what it passed, so nothing may share its memory.
    """
    return jax.device_put(jnp.copy(x).reshape(like.shape), like.sharding)
