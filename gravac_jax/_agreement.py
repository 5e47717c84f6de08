"""Are the replicas still the same? And how to make them so.

Replicas hold the same params because they start from the same and add the same. A fault
of memory, or a device that adds in another order, breaks that silently.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _state, _step_checks, _tree
from gravac_jax._comm import AxisName, Comm

GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def checksum(tree: Any, axis_name: AxisName = "data") -> jax.Array:
    """Every replica's checksum of `tree`: all are equal if the replicas are.

    Call it where `update` is called, every so many steps;
    `gravac.transform(check_every=...)` does, and counts in `StepInfo`.

    Args:
      tree: arrays that are meant to be the same on every replica, such as the params.
      axis_name: that of `gravac.transform`.

    Returns:
      `[replicas]` uint32, the same on every replica.

    Raises:
      TypeError: for complex leaves.
      ValueError: if called outside the axis.

    Law:
      A tree in which one word of 32 bits differs has another checksum; one in which
      several do, but for a chance of about 2**-32.

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
    _step_checks.bound_axis(axis_name, "checksum")
    _step_checks.comparable(tree)
    return Comm(axis_name).gather(own_checksum(tree))


def own_checksum(tree: Any) -> jax.Array:
    """`[]` uint32, the checksum of this replica's `tree`."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        total = 3 * total + leaf_checksum(leaf)
    return total


def leaf_checksum(leaf: Any) -> jax.Array:
    """`[]` uint32, of one array, also of one that several devices have parts of."""
    words = _words(leaf).astype(jnp.uint32)
    # Raveled, it would be brought to one device.
    places = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        places = places * jnp.uint32(size % 2**32) + along
    mixed = _mixed(words + places * jnp.uint32(GOLDEN))
    return jnp.sum(mixed, dtype=jnp.uint32)


def host_checksum(leaf: Any) -> int:
    """The same of an array of NumPy, or a number."""
    x = np.asarray(leaf).reshape(-1)
    kind = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
    words = x.view(kind).astype(np.uint32)
    mixed = _mixed(words + np.arange(words.size, dtype=np.uint32) * np.uint32(GOLDEN))
    return int(np.sum(mixed, dtype=np.uint32))


def _mixed(x: Any) -> Any:
    """A bijection of 32 bits, MurmurHash3's last steps (Appleby, 2011).

    Without it two changes of the same bit would cancel in the sum too often.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def resync(tree: Any, axis_name: AxisName = "data") -> Any:
    """The first replica's `tree` on every replica, bit for bit.

    What the transform keeps per replica stays each replica's own.

    Args:
      tree: arrays, such as params and optimizer state.
      axis_name: that of `gravac.transform`.

    Returns:
      The tree, of the same structure, shapes and dtypes.

    Raises:
      TypeError: for complex leaves.
      ValueError: if called outside the axis.

    Cost:
      A ring all-reduce of 4 bytes for each entry of up to 32 bits.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> params = {"w": jnp.array([[1.0, 2.0], [1.0, 2.5]])}
      >>> jax.vmap(gravac.resync, axis_name="data")(params)["w"].tolist()
      [[1.0, 2.0], [1.0, 2.0]]
    """
    _step_checks.bound_axis(axis_name, "resync")
    _step_checks.comparable(tree)
    comm = Comm(axis_name)
    is_first = comm.replica() == 0

    def shared(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        words = _words(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(shared(words), impl=jax.random.key_impl(x))
        sent = comm.share(comm.cast(words.astype(jnp.uint32)), is_first)
        if x.dtype == bool:
            return sent.astype(bool)
        return jax.lax.bitcast_convert_type(sent.astype(words.dtype), x.dtype)

    return _state.map_local(tree, lambda local: local, shared)


def is_apart(params: Any, steps: jax.Array, check_every: int, comm: Comm) -> jax.Array:
    """`[1]` float32, 1 if replicas were compared and differ, else 0; `[0]` if never.

    Args:
      params: compared after so many steps.
      steps: `[]` int32, those before this one.
      check_every: so many; 0 for never.
      comm: those who should hold the same.
    """
    if not check_every:
        return jnp.zeros(0)
    _step_checks.params_given(params, "check_every")

    def compare() -> jax.Array:
        sums = comm.gather(own_checksum(params))
        return jnp.any(sums != sums[0]).astype(jnp.float32)

    # It varies where some of the params do.
    firsts = [jnp.ravel(x)[:1].astype(jnp.float32) for x in jax.tree.leaves(params)]
    zero = _tree.total([jnp.sum(comm.zeros(x)) for x in firsts])
    is_due = (steps + 1) % check_every == 0
    return jax.lax.cond(is_due, compare, lambda: zero)[None]


def _words(x: Any) -> jax.Array:
    """The bits of `x` as unsigned integers; two of 32 bits for one of 64."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])
