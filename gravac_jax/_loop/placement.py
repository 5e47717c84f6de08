"""Where things lie: a mesh over all devices, and training state on it."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.experimental import mesh_utils

from gravac_jax import _network, _refuse
from gravac_jax._loop import chain
from gravac_jax._network import AxisName
from gravac_jax._step import states

# The structure of a tree, and how each array of it is sharded; None if not known.
Lies = tuple[Any, tuple[jax.P, ...]] | None


def make_mesh(
    axis_names: Sequence[str] = ("data",),
    *,
    hosts: int | None = None,
    devices: Sequence[Any] | None = None,
) -> jax.sharding.Mesh:
    """Lay a mesh over devices, on one host or on many.

    With one name, all devices lie along one axis. With two, the first axis has the
    hosts, between which the network is slow, and the second the devices of each. A host
    here is what JAX calls a slice: the GPUs of a machine, or of several that NVLink
    connects, however many processes they have; the TPUs of a slice. Where JAX knows of
    no slices, as on most CPUs, a host is a process.

    `jax.make_mesh` refuses devices of several slices, such as GPUs of several machines.

    Args:
      axis_names: one or two names, the slow network's first, as in `("dcn", "ici")`.
      hosts: into how many hosts to divide the devices, in their order, where JAX cannot
        tell, as when one machine plays several. Default: what JAX tells.
      devices: the devices. Default: those of all processes.

    Returns:
      A mesh whose axes are Auto. Devices of a host are neighbours along every axis.

    Raises:
      ValueError: if there are not one or two different names, there are no devices, or
        hosts have different numbers of devices.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.make_mesh().axis_names
      ('data',)
      >>> mesh = gravac.make_mesh(("dcn", "ici"), hosts=2, devices=jax.devices()[:4])
      >>> dict(mesh.shape)
      {'dcn': 2, 'ici': 2}
    """
    names = tuple(axis_names)
    is_one_name = isinstance(axis_names, str)
    if is_one_name or len(names) not in (1, 2) or len(set(names)) < len(names):
        raise ValueError(
            f"`axis_names` must be a tuple of one or two names that differ, such as"
            f" ('data',) or ('dcn', 'ici'), got {axis_names!r}. For more axes reshape"
            f" the `devices` of the mesh, and hand them to jax.sharding.Mesh."
        )
    chosen = list(jax.devices() if devices is None else devices)
    if hosts is None:
        rows = _by_host(chosen)
    else:
        _refuse.count(hosts, "hosts", "groups of devices")
        rows = np.array_split(np.array(chosen, object), hosts)
    if len(names) == 1:
        return jax.sharding.Mesh(np.concatenate(rows), names)
    sizes = sorted({len(x) for x in rows})
    if len(sizes) > 1:
        raise ValueError(
            f"hosts must have as many devices each, got {sizes[0]} to {sizes[-1]}:"
            f" give `devices` that are spread evenly, `hosts` that divides them, or one"
            f" axis name."
        )
    return jax.sharding.Mesh(np.stack(rows), names)


def _by_host(devices: Sequence[Any]) -> list[np.ndarray]:
    host = lambda device: getattr(device, "slice_index", device.process_index)
    ordered = sorted(devices, key=lambda x: (host(x), x.id))
    groups = [list(x) for _, x in itertools.groupby(ordered, host)]
    # JAX orders TPUs by how they are wired.
    return [mesh_utils.create_device_mesh((len(x),), x) for x in groups]


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
    _refuse.mesh(mesh, axis_name)
    chain.check_chains(tree)
    inner = _network.inner_axes(mesh, axis_name)
    owners = _network.join(axis_name, inner or None)
    replicas, devices = (count_replicas(mesh, x) for x in (axis_name, owners))
    on_mesh = functools.partial(_on_mesh, mesh)

    def place_local(state: Any) -> Any:
        placed, local = states.placed_replicas(state), on_mesh(axis_name)
        if placed is None:
            return jax.tree.map(lambda x: _per_replica(x, replicas, local), state)
        if placed == devices:  # a state of slices
            local = on_mesh(owners)
        elif placed != replicas:
            raise ValueError(
                f"the state is placed on {placed} replicas, got {replicas}: to move"
                f" what each holds back, save it by gravac_jax.checkpoint and restore"
                f" it there, or start anew from tx.init(params)."
            )
        return jax.tree.map(lambda x: _copy(x, local), state)

    def place_shared(x: Any) -> jax.Array:
        spec = specs_of(x)
        is_inside = _names_in(spec) <= set(inner)
        return _copy(x, on_mesh(*spec) if is_inside else on_mesh())

    return states.map_local(tree, place_local, place_shared)


def count_replicas(mesh: jax.sharding.Mesh | int, axis_name: AxisName) -> int:
    """Return N, the devices along the axes of the transform, or those simulated."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return mesh
    return int(np.prod([mesh.shape[name] for name in _refuse.axis_names(axis_name)]))


def _on_mesh(mesh: Any, *spec: Any) -> jax.NamedSharding | None:
    is_mesh = isinstance(mesh, jax.sharding.Mesh)
    return jax.NamedSharding(mesh, jax.P(*spec)) if is_mesh else None


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
    # Each process makes only the shards of its own devices, each in memory of its own.
    return jax.make_array_from_callback(
        x.shape, sharding, lambda index: np.array(x[index])
    )


def specs_of(x: Any) -> jax.P:
    """Return the `PartitionSpec` of an array, or `P()`.

    It is as short as XLA returns it; jit would compile anew for one that differs. Under
    jax.set_mesh JAX makes scalars whose spec has an axis: P(None).
    """
    parts = list(getattr(getattr(x, "sharding", None), "spec", ()))
    while parts and parts[-1] is None:
        parts.pop()
    return jax.P(*parts)


def how_it_lies(tree: Any, mesh: Any, axis_name: AxisName) -> tuple[bool, Lies]:
    """Return whether the compiler shards each replica of a state, and how.

    The compiler does if any array of `tree` is sharded over an axis of the mesh that is
    not of replicas. Of traced arrays the shardings are not known. The transform's own
    state then shows it, by a part for every device.
    """
    leaves, structure = jax.tree.flatten(tree)
    if any(isinstance(x, core.Tracer) for x in leaves):
        placed = {states.placed_replicas(x) for x in states.locals_of(tree)}
        return mesh.size in placed - {count_replicas(mesh, axis_name)}, None
    specs, inner = (
        tuple(map(specs_of, leaves)),
        set(_network.inner_axes(mesh, axis_name)),
    )
    return any(_names_in(spec) & inner for spec in specs), (structure, specs)


def shardings(lies: Lies, mesh: Any) -> Any:
    """Return the shardings on a mesh of what `how_it_lies` has seen."""
    if lies is None:
        return None
    on_mesh = [jax.NamedSharding(mesh, spec) for spec in lies[1]]
    return jax.tree.unflatten(lies[0], on_mesh)


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
    return states.per_leaf(tree, jax.P(axis_name), jax.P())
