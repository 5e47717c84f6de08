"""Fit the arrays of a checkpoint to the state that a run begins with.

The number of replicas, the buckets, the slices, the ladder and the controller may
change between runs. Everything else must be the same.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gravac_jax._state import TransformState, is_transform_state
from gravac_jax.checkpoint import _format, _paths, _replicas
from gravac_jax.checkpoint._paths import Named, Path

_PER_REPLICA = ("told", "memory", "encodings")

# What means something on one ladder and to one controller only.
_SHARED_DECISIONS: list[Path] = [
    ("ladder",),
    ("decided",),
    ("ahead",),
    ("past_rungs",),
    ("controller",),
    ("info", "gains"),
]
_DECISIONS: list[Path] = [*_SHARED_DECISIONS, ("told",), ("encodings",)]


def paths_here(saved: Named, tree: Any) -> dict[Path, Path]:
    """Return for each saved path the path in `tree`.

    They differ if the checkpoint is of a chain without `gravac.transform`, which moves
    what comes after it one place on, and makes a chain of a single optimizer.
    """
    paths = list(_paths.by_path(tree))
    numbered = jax.tree.unflatten(jax.tree.structure(tree), range(len(paths)))
    is_chain = lambda x: type(x) is tuple and any(map(is_transform_state, x))

    def without_transform(chain_of: Callable[[list[Any]], Any]) -> Named:
        others = lambda chain: [x for x in chain if not is_transform_state(x)]
        change = lambda x: chain_of(others(x)) if is_chain(x) else x
        return _paths.by_path(jax.tree.map(change, numbered, is_leaf=is_chain))

    for chain_of in (tuple, lambda others: others[0] if others else ()):
        before = without_transform(chain_of)
        if saved.keys() <= before.keys():
            return {path: paths[i] for path, i in before.items()}
    return {path: path for path in saved}


def versions(saved: Named, tree: Any) -> Named:
    """Return what to read before all else: a number for each transform, by path.

    Args:
      saved: as for `shapes_to_read`.
      tree: as for `shapes_to_read`.
    """
    paths = [(*place, "version") for place in _places(tree)]
    return {path: _format.VERSION for path in paths if path in saved}


def require_version(found: Named) -> None:
    """Refuse a checkpoint of another version of the format.

    Args:
      found: what was read of `versions`.
    """
    for version in found.values():
        if version != _format.VERSION:
            raise ValueError(
                f"the checkpoint has version {version}, and this gravac_jax reads"
                f" {_format.VERSION}. To go on with this one, restore with the"
                f" gravac_jax that saved it, deliver what replicas hold back"
                f" (gravac.flush), save the params alone, and begin here with"
                f" gravac.place((params, tx.init(params)), mesh)."
            )


def shapes_to_read(saved: Named, tree: Any, params: Any) -> Named:
    """Return what to read: by path, an abstract array with a sharding, or a number.

    Args:
      saved: Orbax's metadata of everything in the checkpoint, by path.
      tree: the state of this run, placed.
      params: the params in it.

    Raises:
      ValueError: if the checkpoint does not fit.
    """
    here, places = _abstract(tree, params), _places(tree)
    known = [place for place in places if (*place, "version") in saved]
    for place in [place for place in places if place not in known]:
        here = _paths.outside(here, [place])
        warnings.warn(
            "the checkpoint holds no state of gravac.transform: the run begins with"
            " empty residuals, and a controller that has seen nothing.",
            stacklevel=3,
        )
    _require_same(_fixed(here, known), _fixed(saved, known))
    wanted = _paths.outside(here, known)
    for place in known:
        mine, theirs = _paths.below(here, place), _paths.below(saved, place)
        is_same = _decisions(mine) == _decisions(theirs)
        for name, x in (mine if is_same else _undecided(mine)).items():
            shape = _paths.shape_of(theirs[name]) if name in theirs else None
            if name[0] in _PER_REPLICA and shape and shape[1:] == x.shape[1:]:
                wanted[place + name] = _replicas.loading(x, shape)
            elif shape == _paths.shape_of(x):
                wanted[place + name] = x
    return wanted


def fill(loaded: Named, tree: Any, params: Any) -> Any:
    """Return `tree` with everything that was read, in memory of its own.

    Args:
      loaded: the arrays for which `shapes_to_read` asked, by path.
      tree: as for `shapes_to_read`. It stays as it is.
      params: as for `shapes_to_read`.
    """
    named, here = _paths.outside(loaded, list(_places(tree))), _abstract(tree, params)
    for place, state in _places(tree).items():
        below = _paths.below(loaded, place)
        ladder = [x for name, x in below.items() if name[0] == "ladder"]
        if below and not np.array_equal(ladder, jax.tree.leaves(state.ladder)):
            below = _undecided(below)
            warnings.warn(
                "the checkpoint was saved with another ladder or controller: residuals"
                " are restored; the controller, and what encodings keep, begin anew.",
                stacklevel=3,
            )
        for name, x in below.items():
            path, value = place + name, x
            if name[0] in _PER_REPLICA:
                # In the state of an encoding a mean of replicas means nothing.
                is_averaged = name[0] != "encodings"
                value = _replicas.redistribute(x, here[path], is_averaged)
            named[path] = value
    return _format.from_named(named, tree, params)


def _places(tree: Any) -> dict[Path, TransformState]:
    found = _paths.by_path(tree, is_transform_state).items()
    return {path: x for path, x in found if is_transform_state(x)}


def _abstract(tree: Any, params: Any) -> Named:
    """Return what would be stored of `tree`, with an abstract array for each array."""
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    named = _format.to_named(tree, params).items()
    return {path: like(x) if isinstance(x, jax.Array) else x for path, x in named}


def _undecided(named: Named) -> Named:
    """Return what means the same on every ladder and to every controller."""
    return _paths.outside(named, _DECISIONS)


def _decisions(named: Named) -> Named:
    """Return the shapes of what replicas have decided alike."""
    shared = named.keys() - _paths.outside(named, _SHARED_DECISIONS).keys()
    return {name: _paths.shape_of(named[name]) for name in shared}


def _fixed(named: Named, places: list[Path]) -> dict[Path, str]:
    """Describe everything that must be the same in the checkpoint and here."""
    outside = _paths.outside(named, places).items()
    found = {path: _paths.describe(x) for path, x in outside}
    for place in places:
        for name, x in _paths.below(named, place).items():
            if name[0] == "memory":
                found[place + name] = f"{_paths.shape_of(x)[1:]} for each replica"
    return found


def _require_same(here: dict[Path, str], saved: dict[Path, str]) -> None:
    """Refuse a checkpoint of something else, and name the first differences."""
    both = {path: (saved.get(path), here.get(path)) for path in [*here, *saved]}
    different = [
        f"{'/'.join(path)} is {theirs or 'missing'} in the checkpoint and"
        f" {mine or 'missing'} here"
        for path, (theirs, mine) in both.items()
        if theirs != mine
    ]
    if different:
        raise ValueError(
            f"the checkpoint is of another model, optimizer or memory."
            f" Differences: {len(different)}, such as {'; '.join(different[:3])}."
            f" Restore with what saved it. Then, to change the memory, send the"
            f" residuals with gravac.flush, and begin with gravac.init."
        )
