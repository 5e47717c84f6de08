"""Put training state on the devices: per-replica state sharded, the rest replicated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from gravac_jax import _network, _refuse, _state
from gravac_jax._loop import chain
from gravac_jax._network import AxisName


def place(
    tree: Any, mesh: jax.sharding.Mesh | int, axis_name: AxisName = "data"
) -> Any:
    """Put any pytree that holds the transform's state onto a mesh.

    The transform's per-replica state gets a leading axis of replicas, sharded over
    `axis_name`. Everything else is replicated, with its shapes and values as they are.
    A state that is already placed may be placed again. What is sharded over other axes
    of the mesh stays sharded.

    Args:
      tree: params and optimizer state in any nesting, a linen `TrainState`, an
        `nnx.Optimizer`, ...
      mesh: the mesh; or a number of replicas, for `gravac.simulate` on one device.
      axis_name: the axis, or axes, of the transform.

    Returns:
      The tree, of the same structure, in new memory.

    Raises:
      TypeError: if the arguments are swapped.
      ValueError: if the mesh does not have the axis, the state is placed on another
        number of replicas, or `mesh` is neither a mesh nor a positive number. If the
        optimizer has a momentum that the transform's memory has already. If something
        keeps gradients before the transform sees them, or moves the params by them: a
        momentum before it in the chain, or `optax.MultiSteps`, `optax.apply_if_finite`
        or `optax.contrib.sam` around it.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> mesh = gravac.make_mesh(devices=jax.devices()[:2])
      >>> tx = optax.chain(gravac.transform(), optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> params, opt_state = gravac.place((params, tx.init(params)), mesh)
      >>> opt_state[0].local.memory[0].residual.shape
      (2, 65536)
    """
    is_place = lambda x: isinstance(x, (jax.sharding.Mesh, int))
    if is_place(tree) and not is_place(mesh):
        raise TypeError(
            f"the arguments are swapped, got {type(tree).__name__} before"
            f" {type(mesh).__name__}: write gravac.place(tree, mesh)."
        )
    _refuse.mesh(mesh, axis_name)
    if not isinstance(mesh, jax.sharding.Mesh):
        replicas, devices, inner, owners = mesh, mesh, (), axis_name
    else:
        replicas, devices = count_replicas(mesh, axis_name), mesh.size
        inner = _network.inner_axes(mesh, axis_name)
        owners = _network.join(axis_name, inner or None)
    on_mesh = functools.partial(_sharding_on, mesh)
    chain.check_chains(tree)

    def place_local(state: Any) -> Any:
        placed = _state.placed_replicas(state)
        local = on_mesh(jax.P(axis_name))
        if placed is None:
            return jax.tree.map(lambda x: _per_replica(x, replicas, local), state)
        if placed == devices:  # a state of slices
            local = on_mesh(jax.P(owners))
        elif placed != replicas:
            raise ValueError(
                f"the state is placed on {placed} replicas, got {replicas}: to move"
                f" what each holds back, save it by gravac_jax.checkpoint and restore"
                f" it there, or start anew from tx.init(params)."
            )
        return jax.tree.map(lambda x: _copy(x, local), state)

    def place_shared(x: Any) -> jax.Array:
        # Under jax.set_mesh JAX makes scalars whose spec has a dimension: P(None).
        spec = _shortened(specs_of(x))
        is_inside = _names_in(spec) <= set(inner)
        return _copy(x, on_mesh(spec if is_inside else jax.P()))

    return _state.map_local(tree, place_local, place_shared)


def _sharding_on(mesh: Any, spec: jax.P) -> jax.NamedSharding | None:
    is_mesh = isinstance(mesh, jax.sharding.Mesh)
    return jax.NamedSharding(mesh, spec) if is_mesh else None


def count_replicas(mesh: jax.sharding.Mesh | int, axis_name: AxisName) -> int:
    """Return N, the devices along the axes of the transform, or those simulated."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return mesh
    return int(np.prod([mesh.shape[name] for name in _refuse.axis_names(axis_name)]))


def check_placed(tree: Any, replicas: int) -> None:
    """Raise unless `tree` is placed on this many replicas."""
    for local in _state.locals_of(tree):
        _refuse.placed(_state.placed_replicas(local), replicas)


def _copy(x: Any, sharding: Any) -> jax.Array:
    # device_put alone, even with may_alias=False, may keep the caller's buffer, which a
    # step that donates its state would delete.
    is_there = isinstance(x, jax.Array) and x.sharding == sharding
    if sharding is None or sharding.is_fully_addressable or is_there:
        return jax.device_put(jnp.array(x, copy=True), sharding)
    return _from_host(np.asarray(x), sharding)


def _per_replica(x: Any, replicas: int, sharding: Any) -> jax.Array:
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        # NumPy, which makes the shards, has no keys.
        data = _per_replica(jax.random.key_data(x), replicas, sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if sharding is None:
        return jnp.tile(x, (replicas, *[1] * jnp.ndim(x)))
    return _from_host(np.broadcast_to(x, (replicas, *np.shape(x))), sharding)


def _from_host(x: np.ndarray, sharding: Any) -> jax.Array:
    # By callback each process makes only the shards of its own devices, each in memory
    # of its own.
    return jax.make_array_from_callback(
        x.shape, sharding, lambda index: np.array(x[index])
    )


def specs_of(tree: Any) -> Any:
    """Return the `PartitionSpec` of each array of `tree`, or `P()`."""
    spec = lambda x: getattr(getattr(x, "sharding", None), "spec", jax.P())
    return jax.tree.map(spec, tree)


def specs_if_known(tree: Any) -> tuple[jax.P, ...] | None:
    """Return how each array of `tree` is sharded; None if that is not known."""
    if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(tree)):
        return None
    return tuple(map(_shortened, jax.tree.leaves(specs_of(tree))))


def _shortened(spec: jax.P) -> jax.P:
    """Return `spec` as XLA returns it; jit would compile anew for one that differs."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return jax.P(*parts)


def has_slices(
    tree: Any,
    specs: tuple[jax.P, ...] | None,
    mesh: jax.sharding.Mesh,
    axis_name: AxisName,
) -> bool:
    """Return whether the compiler shards each replica of a state.

    It does if any array of `tree` is sharded over an axis of the mesh that is not of
    replicas. Of traced arrays the transform's own state shows it, which then has a part
    for every device.
    """
    if specs is None:
        placed = {_state.placed_replicas(x) for x in _state.locals_of(tree)}
        return mesh.size in placed - {count_replicas(mesh, axis_name)}
    inner = set(_network.inner_axes(mesh, axis_name))
    return any(_names_in(spec) & inner for spec in specs)


def check_has_slices(tree: Any, devices: int) -> None:
    """Raise unless the transform has a part for each device of a mesh."""
    for local in _state.locals_of(tree):
        leading = _state.placed_replicas(local)
        _refuse.sliced(leading, devices)


def constrained(
    tree: Any, specs: tuple[jax.P, ...] | None, mesh: jax.sharding.Mesh
) -> Any:
    """Return a traced `tree` that the compiler shards by `specs`; None: as it likes."""
    if specs is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, shardings(tree, specs, mesh))


def shardings(tree: Any, specs: tuple[jax.P, ...], mesh: jax.sharding.Mesh) -> Any:
    """Return a tree like `tree` of the shardings on a mesh that `specs` list."""
    on_mesh = [jax.NamedSharding(mesh, spec) for spec in specs]
    return jax.tree.unflatten(jax.tree.structure(tree), on_mesh)


def _names_in(spec: jax.P) -> set[str]:
    return {name for part in spec for name in _refuse.axis_names(part)}


def state_specs(tree: Any, axis_name: AxisName = "data") -> Any:
    """Return the `PartitionSpec` of every leaf of a placed `tree`, for `shard_map`.

    Args:
      tree: as for `gravac.place`, placed or not; leaves may be `ShapeDtypeStruct`.
      axis_name: the axis, or axes, of the transform.

    Returns:
      A pytree of the same structure: `P(axis_name)` for the transform's per-replica
      state, `P()` for everything else.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> tx = optax.chain(gravac.transform(), optax.sgd(0.1))
      >>> opt_state = tx.init({"w": jnp.ones((256, 256))})
      >>> specs = gravac.state_specs(opt_state)
      >>> specs[0].local.memory[0].residual, specs[0].steps
      (P('data',), P())
    """
    _refuse.axis(axis_name)
    return _state.per_leaf(tree, jax.P(axis_name), jax.P())
