"""Compare replicas, and make them the same again.

Replicas hold the same params because they start from the same params and add the same
updates. A step that skips updates, or scales them, by its own gradient alone breaks
that silently, as do a memory fault and a seed for each process.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _refuse
from gravac_jax._network import Axes, AxisName, Comm
from gravac_jax._step.states import map_local

GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio
LEAVES, SIDE = 4, 32  # leaves of a sample, and the root of its entries; arbitrary
WORDS = {1: np.uint8, 2: np.uint16}  # of an item of so many bytes; else uint32


def checksum(tree: Any, axis_name: AxisName = "data") -> jax.Array:
    """Return every replica's checksum of `tree`; they are equal if the replicas are.

    Each exchange compares a sample of the params and counts differences in
    `StepInfo.disagreements`. Call this where `update` is called, now and then, to
    compare all of them, for example after a memory fault in one entry.

    Args:
      tree: arrays that should be the same on every replica, such as the params; no
        complex ones.
      axis_name: the axis of `gravac.transform`; with a fast one both, in a tuple.

    Returns:
      `[replicas]` uint32, the same on every replica.

    Raises:
      ValueError: if called outside the axis.

    Law:
      A tree that differs in one word of 32 bits has another checksum. A tree that
      differs in several words has the same checksum with a chance of about 2**-32.

    Cost:
      One pass over `tree`, and an all-gather of 4 bytes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> params = {"w": jnp.array([[1.0, 2.0], [1.0, 2.5]])}
      >>> sums = jax.vmap(gravac.checksum, axis_name="data")(params)
      >>> bool((sums[0] == sums[0, 0]).all())
      False
    """
    _refuse.bound_axis(axis_name, "checksum")
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        total = 3 * total + leaf_checksum(leaf)
    return Comm(axis_name).gather(total)


def leaf_checksum(leaf: Any) -> jax.Array:
    """Return the checksum of one array, which may be sharded: `[]` uint32."""
    words = _words(leaf).astype(jnp.uint32)
    mixed = _mixed(words + _arrays.places(words.shape) * jnp.uint32(GOLDEN))
    return jnp.sum(mixed, dtype=jnp.uint32)


def host_checksum(leaf: Any) -> int:
    """Return the checksum of a NumPy array or a number, as `leaf_checksum` does."""
    x = np.asarray(leaf).reshape(-1)
    words = x.view(WORDS.get(x.dtype.itemsize, np.uint32)).astype(np.uint32)
    mixed = _mixed(words + np.arange(words.size, dtype=np.uint32) * np.uint32(GOLDEN))
    return int(np.sum(mixed, dtype=np.uint32))


def _mixed(x: Any) -> Any:
    """Mix 32 bits by a bijection, MurmurHash3's last steps (Appleby, 2011).

    Without it, two changes of the same bit would cancel in the sum too often.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def resync(tree: Any, axis_name: AxisName = "data") -> Any:
    """Return the first replica's `tree` on every replica, bit for bit.

    What the transform keeps per replica stays as it is.

    Args:
      tree: arrays, such as params and optimizer state; no complex ones.
      axis_name: the axis of `gravac.transform`; with a fast one both, in a tuple.

    Returns:
      The tree, of the same structure, shapes and dtypes.

    Raises:
      ValueError: if called outside the axis.

    Cost:
      A ring all-reduce of 12 bytes for each entry of up to 32 bits.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> params = {"w": jnp.array([[1.0, 2.0], [1.0, 2.5]])}
      >>> jax.vmap(gravac.resync, axis_name="data")(params)["w"].tolist()
      [[1.0, 2.0], [1.0, 2.0]]
    """
    _refuse.bound_axis(axis_name, "resync")
    comm = Comm(axis_name)

    def shared(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if _arrays.is_key(x):
            return _arrays.by_bits(shared, x)
        words = _words(x)
        sent = comm.sum(comm.owned(words.astype(jnp.uint32)))
        if x.dtype == bool:
            return sent.astype(bool)
        return jax.lax.bitcast_convert_type(sent.astype(words.dtype), x.dtype)

    return map_local(tree, lambda local: local, shared)


def sample_contrast(params: Any, axes: Axes) -> jax.Array:
    """Return a figure whose mean is not 0 if replicas hold different params.

    It is the checksum of entries that are spread over a few leaves of other sizes: a
    wrong skip or scale changes those that are trained. As few bits travel as float32
    adds up exactly, so that the mean is 0 where the checksums are the same.

    Returns:
      The figure, `[1]` float32; `[0]` if there is nothing to compare.
    """
    inner = axes.fast.replicas if axes.is_sliced else 1
    # The mean over devices that share a replica must be exact.
    is_exact = inner & (inner - 1) == 0
    # The leaves that training may change, the smallest first.
    leaves = sorted(filter(_arrays.is_float, jax.tree.leaves(params)), key=jnp.size)
    if not (leaves and is_exact and axes.alike.replicas > 1):
        return jnp.zeros(0, jnp.float32)
    few = leaves[:: -(-len(leaves) // LEAVES)]
    flat = jnp.concatenate([_words(_spread(x)).astype(jnp.uint32).ravel() for x in few])
    # CPUs sum up a square in one kernel.
    square = jnp.pad(flat, (0, -flat.size % SIDE)).reshape(-1, SIDE)
    small = leaf_checksum(square) >> (8 + axes.both.replicas.bit_length())
    return axes.alike.contrast(small.astype(jnp.float32))[None]


def _spread(leaf: Any) -> jax.Array:
    """Return entries that are spread over a leaf, at most its share of a sample."""
    x = jnp.asarray(leaf)
    places = int((SIDE**2 / LEAVES) ** (1 / max(1, x.ndim)))
    return jax.lax.slice(x, [0] * x.ndim, x.shape, [n // places + 1 for n in x.shape])


def _words(x: Any) -> jax.Array:
    """Return the bits of `x` as unsigned integers; 64 bits become two of 32."""
    x = jnp.asarray(x)
    if _arrays.is_key(x):
        return jax.random.key_data(x)
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, WORDS.get(x.dtype.itemsize, np.uint32))
