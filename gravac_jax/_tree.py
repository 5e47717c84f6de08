"""Arithmetic on pytrees and vectors, in float32.

Nothing here knows about compression, replicas or optimizers.
"""

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


def named_leaves(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """The leaves of `tree` with a readable path each, such as `['dense']['kernel']`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(path) or "the tree itself", x) for path, x in leaves]


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


def total(parts: Iterable[jax.Array]) -> jax.Array:
    """The sum of one or more arrays."""
    return functools.reduce(operator.add, parts)


def count_not_finite(x: jax.Array) -> jax.Array:
    """`[]` float32, how many entries of `x` are infinite or NaN."""
    return jnp.sum(~jnp.isfinite(x), dtype=jnp.float32)
