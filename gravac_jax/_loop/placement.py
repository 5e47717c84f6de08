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

from gravac_jax import _arrays, _network, _refuse
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
    no slices, a host is a process. CPUs of one machine are one host, and one host alone
    is warned about.

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
    names = () if isinstance(axis_names, str) else tuple(axis_names)
    if len(names) not in (1, 2) or len(set(names)) < len(names):
        raise ValueError(
            f"`axis_names` must be a tuple of one or two names that differ, such as"
            f" ('data',) or ('dcn', 'ici'), got {axis_names!r}. For more axes reshape"
            f" the `devices` of the mesh, and hand them to jax.sharding.Mesh."
        )
    chosen = list(jax.devices() if devices is None else np.ravel(list(devices)))
    if not chosen:
        raise ValueError("a mesh needs a device, got devices=[]: leave it out for all.")
    if hosts is None:
        host = lambda device: getattr(device, "slice_index", device.process_index)
        chosen.sort(key=lambda x: (host(x), x.id))
        groups = [list(x) for _, x in itertools.groupby(chosen, host)]
        # JAX orders TPUs by how they are wired.
        rows = [mesh_utils.create_device_mesh((len(x),), x) for x in groups]
    else:
        _refuse.count(hosts, "hosts", "groups of devices")
        rows = np.array_split(np.array(chosen, object), hosts)
    if len(names) == 1:
        return jax.sharding.Mesh(np.concatenate(rows), names)
    if hosts is None and len(rows) == 1 < len(chosen):
        found = "gravac.make_mesh found one host, so that the first axis has length 1"
        _refuse.warn(f"{found}: to rehearse pass hosts=2, else hosts=1.")
    sizes = sorted({len(x) for x in rows})
    if len(sizes) > 1:
        raise ValueError(
            f"hosts must have as many devices each, got {sizes[0]} to {sizes[-1]}: give"
            f" other `devices`, `hosts` that divides them, or one axis name."
        )
    return jax.sharding.Mesh(np.stack(rows), names)


def place(
    tree: Any, mesh: jax.sharding.Mesh | int, axis_name: AxisName = "data"
) -> Any:
    """Put any pytree that holds the transform's state onto a mesh.

    The transform's per-replica state gets a leading axis of replicas, sharded over
    `axis_name`. Everything else is replicated, with its shapes and values as they are.
    A state that is already placed may be placed again. What is sharded over other axes
    of the mesh stays sharded.

    Under `jax.jit` and `jax.eval_shape` the compiler sees no shardings of what comes
    in: on a mesh with other axes it chooses those of all but the per-replica state.

    Args:
      tree: params and optimizer state in any nesting, a linen `TrainState`, an
        `nnx.Optimizer`, ... Leaves are arrays, numbers, or `jax.ShapeDtypeStruct`.
      mesh: the mesh; or a number of replicas, to simulate them on one device.
      axis_name: the axis, or axes, of the transform.

    Returns:
      The tree, of the same structure, in new memory. In place of a
      `jax.ShapeDtypeStruct` it has the one of the placed array, with its sharding.

    Raises:
      TypeError: if a leaf is neither an array nor a number.
      ValueError: if the mesh does not have the axis, the state is placed on another
        number of replicas, or `mesh` is neither a mesh nor a positive number. If a leaf
        is sharded over the axis of the replicas, or over one that the mesh does not
        have; if a `vmap` made a state for each member of an ensemble; if nnx objects,
        or modules of one, share a variable. If the optimizer has a momentum that the
        transform's memory has already. If something keeps gradients before the
        transform sees them, or moves the params by them: a momentum before it in the
        chain, or `optax.MultiSteps`, `optax.apply_if_finite` or `optax.contrib.sam`
        around it.

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
    _refuse.ties(tree)
    chain.check_chains(tree)
    _refuse.members(states.transform_states(tree))
    inner = _network.inner_axes(mesh, axis_name)
    is_simulated = not isinstance(mesh, jax.sharding.Mesh)
    shared = states.map_local(tree, lambda _: None, lambda x: x)
    for path, x in _arrays.named_leaves(shared):
        _refuse.no_array(path, x)
        lies, names = getattr(x, "sharding", None), _refuse.names_in(spec_of(x))
        is_whole = getattr(lies, "is_fully_replicated", True) or is_simulated
        if not (is_whole or set() < names <= {*inner}):
            _refuse.cut(path, lies, axis_name)  # it would have to be gathered
    owners = _network.join(axis_name, inner or None)
    replicas, devices = (count_replicas(mesh, x) for x in (axis_name, owners))
    here = functools.partial(on_mesh, mesh)

    def place_local(state: Any) -> Any:
        placed = states.placed_replicas(state)
        if placed not in (None, devices):
            _refuse.placed(placed, replicas)
        local = here(owners if placed == devices else axis_name)  # of slices, or not
        lead = (replicas,) if placed is None else ()
        return jax.tree.map(lambda x: _put(x, local, *lead), state)

    def place_shared(x: Any) -> Any:
        spec = spec_of(x)
        if inner and isinstance(x, core.Tracer):
            return jnp.copy(x)  # the compiler alone knows how it is sharded
        return _put(x, here(*spec) if _refuse.names_in(spec) <= {*inner} else here())

    return states.map_local(tree, place_local, place_shared)


def count_replicas(mesh: jax.sharding.Mesh | int, axis_name: AxisName) -> int:
    """Return N, the devices along the axes of the transform, or those simulated."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return mesh
    return int(np.prod([mesh.shape[name] for name in _refuse.axis_names(axis_name)]))


def on_mesh(mesh: Any, *spec: Any) -> Any:
    """Return a sharding over a mesh; None for replicas that are simulated."""
    is_mesh = isinstance(mesh, jax.sharding.Mesh)
    return jax.NamedSharding(mesh, jax.P(*spec)) if is_mesh else None


def _put(x: Any, sharding: Any, *lead: int) -> Any:
    """Put a copy of an array, or several along a new axis `lead`."""
    shape = (*lead, *jnp.shape(x))
    if _arrays.is_shape(x):
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
    if isinstance(x, core.Tracer):  # device_put alone would leave it to the compiler
        put = jax.jit(jnp.broadcast_to, static_argnums=1, out_shardings=sharding)
        return put(x, shape)
    stays = getattr(x, "sharding", None) == sharding
    if sharding is None or (not lead and (stays or sharding.is_fully_addressable)):
        # device_put alone, even with may_alias=False, may keep the caller's buffer,
        # which a step that donates its state would delete.
        copy = jnp.broadcast_to(jnp.array(x, copy=True), shape)
        return jax.device_put(copy, sharding)
    if _arrays.is_key(x):  # NumPy, which makes the shards, has none
        return _arrays.by_bits(lambda bits: _put(bits, sharding, *lead), x)
    # Each process makes only the shards of its own devices, each in memory of its own.
    rows = np.broadcast_to(np.asarray(x, jnp.result_type(x)), shape)
    return jax.make_array_from_callback(shape, sharding, lambda i: np.array(rows[i]))


def spec_of(x: Any) -> jax.P:
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
    specs = tuple(map(spec_of, leaves))
    inner = {*_network.inner_axes(mesh, axis_name)}
    return any(_refuse.names_in(spec) & inner for spec in specs), (structure, specs)


def shardings(lies: Lies, mesh: Any) -> Any:
    """Return the shardings on a mesh of what `how_it_lies` has seen."""
    return lies and jax.tree.unflatten(lies[0], [on_mesh(mesh, *x) for x in lies[1]])


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
