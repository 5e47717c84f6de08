"""The norm of the mean: where replicas normalise their own steps, their mean is short.

Adam, Lion and Muon give a step its size. The steps of N replicas point apart, as far as
their gradients are noise, so that their mean is shorter than each of them, by up to
sqrt(N), and shorter than a step of the mean gradient. Each replica multiplies its own
steps by the ratio of the two norms, row by row of a bucket, before they are added to
what it holds back.

The norm of the mean is estimated from what no encoding rounds: in each step the
replicas average one number a row, the sum of the row's entries with random signs over
the row's norm. With the same signs on all replicas, the square of that average is, but
for a variance that many steps smooth away, the squared norm of the mean of the rows,
each scaled to norm 1. A replica without a step in a row counts as 0.
"""

from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _refuse
from gravac_jax._network import AxisName, Comm

COLUMNS = 256  # sums that stand for a gradient; arbitrary
ROW = 1024  # entries that have a ratio in common
DECAY = 0.99  # of what is known of a row
PRIOR = 3.0  # steps' worth of a ratio of 1 at the beginning


def none(n: int) -> jax.Array:
    """Return what is known of a part before the first exchange: `[2, rows]` float32.

    The first is the squared norm of the mean of rows of norm 1, smoothed; the second
    how many exchanges have told of the row.
    """
    return jnp.zeros((2, -(-n // ROW)), jnp.float32).at[0].set(1)


def _rows(x: jax.Array) -> jax.Array:
    """Cut a vector into rows, `[rows, 8, ROW / 8]`: TPUs keep it as it lies."""
    return jnp.pad(x, (0, -x.size % ROW)).reshape(-1, 8, ROW // 8)


def _signs(shape: tuple[int, ...], salt: Any) -> jax.Array:
    """Return -1 or 1 for each entry, a hash of its place; others for another salt."""
    x = _arrays.places(shape) * jnp.uint32(0x9E3779B1)
    x ^= jnp.asarray(salt, jnp.uint32) * jnp.uint32(0x85EBCA77)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return jnp.where(x >> 31, jnp.float32(1), jnp.float32(-1))


def scaled(step: jax.Array, known: jax.Array, replicas: int) -> jax.Array:
    """Return a replica's own step, `[n]` float32, times each row's ratio."""
    return (_rows(step) * ratios(known, replicas)[:, None, None]).ravel()[: step.size]


def ratios(known: jax.Array, replicas: int) -> jax.Array:
    """Return the ratio of each row, `[rows]` float32, between 1 and sqrt(replicas)."""
    return jax.lax.rsqrt(jnp.clip(known[0], 1 / replicas, 1))


def told(step: jax.Array, steps: jax.Array) -> jax.Array:
    """Return what replicas average of a step: `[rows]` float32.

    It is the sum of each row with random signs, over its norm; 0 of a row of zeros, or
    of entries whose squares are 0.

    Args:
      step: `[n]` float32, a replica's own step, as it is.
      steps: `[]` int32, which step it is.
    """
    total = lambda x: jnp.sum(_rows(x), axis=(1, 2))
    norm = jnp.sqrt(total(jnp.square(step)))
    unit = total(step * _signs(step.shape, steps)) / jnp.where(norm > 0, norm, 1)
    # A mean of 0 says that no replica had a step, not that signs cancel.
    return jnp.where(norm > 0, unit + 2.0**-12, 0)


def untold(known: jax.Array) -> jax.Array:
    """Return what a replica tells without a step: zeros, `[rows]` float32."""
    return jnp.zeros_like(known[0])


def learnt(known: jax.Array, mean: jax.Array) -> jax.Array:
    """Return `known` after an exchange, with the mean of what replicas told.

    A row without steps, or whose gradient was bad everywhere, stays as it is.
    """
    share, seen = known
    weight = jnp.maximum(1 - DECAY, 1 / (seen + 1 + PRIOR))
    after = jnp.stack([share + weight * (jnp.square(mean) - share), seen + 1])
    return jnp.where(mean != 0, after, known)


def of_others(known: jax.Array, before: int, replicas: int) -> jax.Array:
    """Return what would be `known` with another number of replicas than `before`.

    Each has the same signal and noise: the squared norm of the mean of N rows of norm 1
    is s + (1 - s) / N.

    Args:
      known: `[..., 2, rows]` float32.
      before: at least 1; one replica alone has learnt nothing.
      replicas: N.
    """
    least = 1 / max(before, 2)
    signal = jnp.maximum(known[..., 0, :] - least, 0) / (1 - least)
    return known.at[..., 0, :].set(signal + (1 - signal) / replicas)


def norm_of_mean(tree: Any, axis_name: AxisName = "data") -> jax.Array:
    """Estimate the norm of the mean over replicas of `tree`, such as the gradient.

    The gradients of replicas stay local, and `optax.global_norm` of one of them is
    longer than that of their mean. Log this one in its place, or decide by it: it is
    the same on all replicas.

    Args:
      tree: floating-point arrays of one replica.
      axis_name: the axis of `gravac.transform`; with a fast one both, in a tuple.

    Returns:
      `[]` float32. Not finite if an entry is not, or if squares leave float32.

    Raises:
      ValueError: if called outside the axis.

    Law:
      Its square is right but for an error of sqrt(2 / 256), 9% (one standard
      deviation), if no few of 256 diagonals of the tree have most of its energy. A
      single array of at most 256 entries has no error.

    Cost:
      One pass over `tree`, and a mean of 1 KB; a core of a CPU takes 3 ms for a million
      entries, since each gets a random sign. If `jit` shards a leaf, sums of it are
      gathered; all of it if its last axis is no multiple of 256 entries.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> grads = {"w": jnp.array([[3.0, 8.0], [3.0, 0.0]])}  # of two replicas
      >>> jax.vmap(gravac.norm_of_mean, axis_name="data")(grads).tolist()
      [5.0, 5.0]

    References:
      Charikar, Chen and Farach-Colton, Finding Frequent Items in Data Streams, 2002.
    """
    _refuse.bound_axis(axis_name, "norm_of_mean")
    cut = lambda x: _arrays.ravel([x], x.size + -x.size % COLUMNS).reshape(-1, COLUMNS)
    sums = jnp.zeros(COLUMNS, jnp.float32)
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        x = jnp.asarray(leaf, jnp.float32) * _signs(jnp.shape(leaf), i)
        # Raveling may gather a sharded array.
        x = cut(x) if x.ndim == 0 or x.shape[-1] % COLUMNS else x
        x = x.reshape(*x.shape[:-1], x.shape[-1] // COLUMNS, COLUMNS)
        *others, _ = sorted(range(x.ndim - 1), key=x.shape.__getitem__)
        # Few columns of a matrix may have most of its energy, but not few diagonals.
        rows = jnp.pad(jnp.sum(x, axis=tuple(others)), ((0, 0), (0, 1)))
        sums += jnp.sum(cut(rows), axis=0)
    return jnp.sqrt(_arrays.energy(Comm(axis_name).mean(sums)))
