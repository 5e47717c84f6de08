"""Arithmetic on pytrees and vectors, in float32.

Nothing here knows about compression, replicas or optimizers.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

SMALLEST_NORMAL = 2.0**-126  # arithmetic takes what is below for zero

_ROW_ENTRIES = 1024  # arbitrary

Path = tuple[str, ...]


def named_leaves(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """The leaves of `tree` with a readable path each, such as `['dense']['kernel']`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(path) or "the tree itself", x) for path, x in leaves]


def by_path(tree: Any) -> dict[Path, Any]:
    """The leaves of `tree`, by the names on the way to them: `("dense", "kernel")`."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {names(path): x for path, x in flat}


def names(path: Any) -> Path:
    """The names in a path of `jax.tree_util`."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def nested(leaves: dict[Path, Any]) -> dict[str, Any]:
    """Dicts in dicts, from what `by_path` gives."""
    tree: dict[str, Any] = {}
    for path, x in leaves.items():
        at = functools.reduce(lambda at, part: at.setdefault(part, {}), path[:-1], tree)
        at[path[-1]] = x
    return tree


def ravel(leaves: list[jax.Array]) -> jax.Array:
    """`[n]` float32, the entries of all `leaves` one after the other."""
    if not leaves:
        return jnp.zeros(0, jnp.float32)
    return jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in leaves])


def unravel(vector: jax.Array, like: list[Any]) -> list[jax.Array]:
    """The inverse of `ravel`: leaves with the shapes and dtypes of `like`.

    What a narrower dtype cannot hold saturates: a finite vector stays finite.
    """
    leaves, start = [], 0
    for x in like:
        part = jax.lax.slice_in_dim(vector, start, start + x.size).reshape(x.shape)
        if jnp.finfo(x.dtype).bits < 32:
            largest = float(jnp.finfo(x.dtype).max)
            part = jnp.clip(part, -largest, largest)
        leaves.append(part.astype(x.dtype))
        start += x.size
    return leaves


def energy(x: jax.Array) -> jax.Array:
    """`[]` float32, the squared norm of `x`."""
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def largest(parts: Sequence[jax.Array]) -> jax.Array:
    """`[]` float32, the largest magnitude in `parts`, to divide by: at most 2**100.

    The reciprocal of a larger one may be below what arithmetic takes for zero.
    """
    tops = [jnp.max(jnp.abs(x), initial=0) for x in parts]
    return jnp.minimum(functools.reduce(jnp.maximum, tops), 2.0**100)


def norm(parts: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """A unit and a length, `[]` float32: of all `parts` as one vector, their product.

    The unit is 1, but where squares overflow the largest entry.
    """

    def scaled(_: Any) -> tuple[jax.Array, jax.Array]:
        top = largest(parts)
        return top, jnp.sqrt(total(energy(x / top) for x in parts))

    direct = jnp.sqrt(total(map(energy, parts)))
    return only_if(jnp.isinf(direct), scaled, (jnp.ones_like(direct), direct))


def excess(x: jax.Array, thresholds: jax.Array) -> jax.Array:
    """`[rungs]` float32, the sum of what exceeds each threshold."""
    # Row by row, in as many sums as a row has entries: a plain sum over all adds one
    # by one on a CPU, which takes ten times as long and rounds more.
    rows = jnp.pad(x, (0, -x.size % _ROW_ENTRIES)).reshape(-1, _ROW_ENTRIES)
    add = lambda total, row: (
        total + jnp.maximum(row[None] - thresholds[:, None], 0),
        None,
    )
    # Begun like this, and not with zeros, it varies over the axis of replicas.
    begun = jnp.maximum(rows[:1] - thresholds[:, None], 0)
    return jnp.sum(jax.lax.scan(add, begun, rows[1:])[0], axis=1)


def excess_if(
    predicate: jax.Array | bool, x: jax.Array, thresholds: jax.Array
) -> jax.Array:
    """`excess` of squares where `predicate` (`[]` bool, or static) holds, else zeros.

    It takes a loop of many small turns.
    """
    some = lambda: excess(x, thresholds)
    # Made from both, the zeros vary over the axis of replicas where they do.
    none = lambda: jnp.where(x[0] < 0, thresholds, 0.0)
    if isinstance(predicate, bool):
        return some() if predicate else none()
    return jax.lax.cond(predicate, some, none)


def total(parts: Iterable[jax.Array]) -> jax.Array:
    """The sum of one or more arrays."""
    return functools.reduce(operator.add, parts)


def is_bad(parts: Sequence[jax.Array], limit: float = math.inf) -> jax.Array:
    """`[]` float32, 1 if some entry of `parts` is NaN or reaches `limit`, else 0."""
    # The energy is needed anyway, and mostly answers; looking at all entries is a pass.
    is_good = total(map(energy, parts)) < limit**2
    every = lambda x: jnp.all(jnp.abs(x) < limit)
    look = lambda _: functools.reduce(operator.and_, map(every, parts))
    return 1 - only_if(~is_good, look, is_good).astype(jnp.float32)


def where(condition: jax.Array, x: Any, y: Any) -> Any:
    """`x` where `condition` (`[]` bool) holds, else `y`, leaf by leaf."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), x, y)


def draws(key: jax.Array) -> jax.Array:
    """`[2]` uint32, random bits: those of the key itself, which is used for no more.

    That it came from `fold_in` or `split` makes them random.
    """
    return jax.random.key_data(key)[:2]


def only_if(predicate: jax.Array, change: Callable[[Any], Any], x: Any) -> Any:
    """`change(x)` where `predicate` (`[]` bool) holds, `x` elsewhere.

    As `jax.lax.cond`, which under vmap becomes a selection and always computes both:
    this one costs nothing as long as no member of the batch needs the change.
    """
    body = lambda carry: (carry[0] & False, change(carry[1]))
    return jax.lax.while_loop(lambda carry: carry[0], body, (predicate, x))[1]


def is_never(energies: jax.Array) -> jax.Array:
    """`[]` bool, False: no energy is below zero. XLA does not know.

    It overwrites a vector in place only where all that reads it is known to have
    happened, and copies it otherwise, which can cost more than a whole selection. An
    optimization barrier is gone by the time it decides. What is computed from this has
    waited for `energies`, and for all that they were computed from.
    """
    return jnp.any(energies < 0)
