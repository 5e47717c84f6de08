"""Redistribute per-replica arrays `[replicas, ...]` over another number of replicas."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def loading(like: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return where to load an array of another number of replicas.

    Args:
      like: the shape `[new, ...]` of this run; it is sharded along its first axis.
      shape: the shape `[old, ...]` in the checkpoint.

    Returns:
      The shape with a sharding. It is sharded along an axis that can be divided, if
      there is one, so that no device has to hold all of it.
    """
    assert isinstance(like.sharding, jax.NamedSharding)
    first, *rest = [*like.sharding.spec, *[None] * len(shape)][: len(shape)]
    parts = [None, *rest]
    for i, (part, size) in enumerate(zip(parts, shape, strict=True)):
        if part is None and size % like.shape[0] == 0:
            parts[i] = first
            break
    sharding = jax.NamedSharding(like.sharding.mesh, jax.P(*parts))
    return jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)


def redistribute(x: jax.Array, like: Any, is_averaged: bool) -> jax.Array:
    """Return for the replicas of this run what the replicas of a checkpoint kept.

    Old and new replicas divide the same line into equal parts. Each new replica gets
    the mean of the old ones that it overlaps, weighted by the overlap: of 4 old and 2
    new replicas, the first gets the mean of the first two. The mean over all replicas
    stays the same, and numbers that are nowhere negative stay so.

    Args:
      x: `[old, ...]`.
      like: the shape `[new, ...]` and the sharding.
      is_averaged: whether to average floats. If not, and for integers, each new replica
        gets a copy of the old one at the beginning of its part.
    """
    if x.shape == like.shape:
        return x
    is_averaged &= jnp.issubdtype(x.dtype, jnp.floating)
    change = functools.partial(_mean if is_averaged else _first, replicas=like.shape[0])
    return jax.jit(change, out_shardings=like.sharding)(x)


def _mean(x: jax.Array, replicas: int) -> jax.Array:
    # In units of 1 / (old * new) of the line.
    old, new = np.arange(x.shape[0])[None], np.arange(replicas)[:, None]
    end = np.minimum((old + 1) * replicas, (new + 1) * x.shape[0])
    overlap = end - np.maximum(old * replicas, new * x.shape[0])
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    share = jnp.asarray(np.maximum(overlap, 0) / x.shape[0], wide)
    mean = jnp.tensordot(share, x.astype(wide), axes=1, precision="highest")
    return mean.astype(x.dtype)


def _first(x: jax.Array, replicas: int) -> jax.Array:
    return x[np.arange(replicas) * x.shape[0] // replicas]
