"""Put training state on the devices: what differs per replica, and what does not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gravac_jax import _checks, _state, _step_checks
from gravac_jax._comm import AxisName


def place(
    tree: Any, mesh: jax.sharding.Mesh | int, axis_name: AxisName = "data"
) -> Any:
    """Put any pytree that holds the transform's state onto a mesh.

    What the transform keeps per replica gets a leading axis of replicas, sharded over
    `axis_name`; everything else is replicated. The shapes and values of all other
    leaves stay as they are. A state that is already placed may be placed again.

    Args:
      tree: params and optimizer state in any nesting, a linen `TrainState`, an
        `nnx.Optimizer`, ...
      mesh: the mesh; or a number of replicas, for `gravac.simulate` on one device.
      axis_name: the axis, or axes, of the transform.

    Returns:
      The tree, of the same structure, in memory of its own.

    Raises:
      ValueError: if the mesh does not have the axis, the state is placed on another
        number of replicas, or `mesh` is neither a mesh nor a positive number.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> tx = optax.chain(gravac.transform(), optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> params, opt_state = gravac.place((params, tx.init(params)), mesh)
      >>> optax.tree.get(opt_state, "residual").shape
      (2, 65536)
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        _checks.count(mesh, "mesh", "replicas, where it is no jax.sharding.Mesh")
        replicas, local, shared = mesh, None, None
    else:
        _checks.mesh_axis(mesh, axis_name)
        replicas = count_replicas(mesh, axis_name)
        local = jax.NamedSharding(mesh, jax.P(axis_name))
        shared = jax.NamedSharding(mesh, jax.P())

    def place_local(state: Any) -> Any:
        placed = _state.placed_replicas(state)
        if placed is not None:
            _step_checks.placed_on(placed, replicas)
            return jax.tree.map(lambda x: _copy(x, local), state)
        return jax.tree.map(lambda x: _per_replica(x, replicas, local), state)

    return _state.map_local(tree, place_local, lambda x: _copy(x, shared))


def count_replicas(mesh: jax.sharding.Mesh, axis_name: AxisName) -> int:
    """N, the devices along the axis or axes of the transform."""
    return int(np.prod([mesh.shape[name] for name in _checks.axis_names(axis_name)]))


def check_placed(tree: Any, replicas: int) -> None:
    """Raise unless every per-replica state in `tree` is placed on `replicas`."""
    check = lambda x: _step_checks.is_placed(_state.placed_replicas(x), replicas)
    _state.map_local(tree, check, lambda _: None)


def _copy(x: Any, sharding: Any) -> jax.Array:
    # device_put alone, also with may_alias=False, keeps the buffer of the device that
    # the array comes from: a step that donates its state would delete the caller's.
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(jnp.array(x, copy=True), sharding)
    return _from_host(np.asarray(x), sharding)


def _per_replica(x: Any, replicas: int, sharding: Any) -> jax.Array:
    if sharding is None:
        return jnp.tile(x, (replicas, *[1] * jnp.ndim(x)))
    return _from_host(np.broadcast_to(x, (replicas, *np.shape(x))), sharding)


def _from_host(x: np.ndarray, sharding: Any) -> jax.Array:
    # By callback each process makes only the shards that its own devices hold, and
    # each shard its own memory.
    return jax.make_array_from_callback(
        x.shape, sharding, lambda index: np.array(x[index])
    )


def init(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: jax.sharding.Mesh | int,
    axis_name: AxisName = "data",
) -> Any:
    """`gravac.place(tx.init(params), mesh, axis_name)`.

    Args:
      tx: an optimizer with `gravac.transform` in it.
      params: the params.
      mesh: as for `gravac.place`.
      axis_name: as for `gravac.place`.

    Returns:
      The optimizer state, placed.

    Raises:
      ValueError: as `gravac.place`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> tx = optax.chain(gravac.transform(), optax.sgd(0.1))
      >>> opt_state = gravac.init(tx, {"w": jnp.ones((256, 256))}, mesh)
      >>> optax.tree.get(opt_state, "residual").shape
      (2, 65536)
    """
    return place(tx.init(params), mesh, axis_name)


def state_specs(tree: Any, axis_name: AxisName = "data") -> Any:
    """The `PartitionSpec` of every leaf of a placed `tree`, for `shard_map`.

    Args:
      tree: as for `gravac.place`, placed or not; leaves may be `ShapeDtypeStruct`.
      axis_name: the axis, or axes, of the transform.

    Returns:
      A pytree of the same structure: `P(axis_name)` for what the transform keeps per
      replica, `P()` for everything else.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> tx = optax.chain(gravac.transform(), optax.sgd(0.1))
      >>> opt_state = tx.init({"w": jnp.ones((256, 256))})
      >>> specs = gravac.state_specs(opt_state)
      >>> optax.tree.get(specs, "residual"), optax.tree.get(specs, "steps")
      (P('data',), P())
    """
    _checks.axis(axis_name)
    return per_leaf(tree, jax.P(axis_name), jax.P())


def per_leaf(tree: Any, local: Any, shared: Any) -> Any:
    """`local` for each per-replica leaf of the transform, `shared` for all others."""
    return _state.map_local(
        tree, lambda state: jax.tree.map(lambda _: local, state), lambda _: shared
    )
