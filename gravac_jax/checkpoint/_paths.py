"""Trees as flat dicts: each leaf under the names on the way to it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Path = tuple[str, ...]
Named = dict[Path, Any]


def names(path: Any) -> Path:
    """Return the names in a path of `jax.tree_util`."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def by_path(tree: Any, is_leaf: Any = None) -> Named:
    """Return the leaves of `tree` by path: `{("dense", "kernel"): array, ...}`."""
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {names(path): x for path, x in flat}


def nested(named: Named) -> dict[str, Any]:
    """Undo `by_path`: return dicts in dicts."""
    tree: dict[str, Any] = {}
    for path, x in named.items():
        at = functools.reduce(lambda at, part: at.setdefault(part, {}), path[:-1], tree)
        at[path[-1]] = x
    return tree


def map_by_path(
    change: Callable[[Path, Any], Any], tree: Any, is_leaf: Any = None
) -> Any:
    """Return `tree` with `change(path, leaf)` in place of each leaf."""
    with_names = lambda path, x: change(names(path), x)
    return jax.tree_util.tree_map_with_path(with_names, tree, is_leaf=is_leaf)


def below(named: Named, place: Path) -> Named:
    """Return what lies below a place in the tree, by its path from there."""
    n = len(place)
    return {path[n:]: x for path, x in named.items() if path[:n] == place}


def outside(named: Named, places: list[Path]) -> Named:
    """Return what lies below none of several places in the tree."""
    is_inside = lambda path: any(path[: len(place)] == place for place in places)
    return {path: x for path, x in named.items() if not is_inside(path)}


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape in which an array or a number is stored.

    A random key is stored as its bits. `x` may be Orbax's metadata.
    """
    return tuple(getattr(_as_stored(x), "shape", ()))


def describe(x: Any) -> str:
    """Return the type and shape in which `x` is stored, such as `float32(2, 3)`."""
    dtype = getattr(_as_stored(x), "dtype", type(x).__name__)
    return f"{dtype}{shape_of(x) or ''}"


def _as_stored(x: Any) -> Any:
    is_key = jnp.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key)
    return jax.eval_shape(jax.random.key_data, x) if is_key else x
