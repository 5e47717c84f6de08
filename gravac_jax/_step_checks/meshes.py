"""Where params and state lie: on which replicas, and sharded over which axes."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import core

from gravac_jax import _arrays


def is_placed(leading: Any, replicas: int) -> None:
    """Refuse a state that was not placed on this many replicas."""
    if leading is None:
        raise ValueError(
            f"the state is not placed: what the transform keeps per replica has no"
            f" leading axis of {replicas} replicas. Call params, opt_state ="
            f" gravac.place((params, opt_state), mesh) first (for gravac.simulate, with"
            f" the number of replicas in place of the mesh), and in a shard_map of your"
            f" own take its specs from gravac.state_specs."
        )
    if leading != replicas:
        raise ValueError(
            f"the state is placed on {leading} replicas, and the step runs on"
            f" {replicas}. Give gravac.place the same mesh or number as the step."
        )


def is_sliced(leading: int | None, devices: int, whose: str) -> None:
    """Refuse a state that was made without knowing how the params are sharded."""
    parts = 1 if leading is None else leading
    if parts != devices:
        raise ValueError(
            f"the state has {parts} parts, one a device, and {whose} has {devices}"
            f" devices, of which each needs a part for the slice that it owns. Make the"
            f" state with a transform that knows how the params are sharded,"
            f" shardings=params, and place it by gravac.place."
        )


def placed_on(state_replicas: int, mesh_replicas: int) -> None:
    """Refuse to move per-replica state onto another number of replicas."""
    if state_replicas != mesh_replicas:
        raise ValueError(
            f"the state is placed on {state_replicas} replicas, and the mesh has"
            f" {mesh_replicas}: what each replica still holds back would be lost or"
            f" doubled. Place it on {state_replicas} replicas, or start anew"
            f" from tx.init(params)."
        )


def is_whole(path: str, axis_name: Any) -> None:
    """Refuse slices of params in a step that is mapped over a fast axis."""
    raise ValueError(
        f"the leaf at {path} is a slice on each device along {axis_name!r}, and over a"
        f" fast axis every device holds the whole params. Leave the model to the"
        f" compiler: gravac.transform(shardings=params), without `dense_axis_name`."
    )


def one_mesh(shardings: Sequence[Any]) -> Any:
    """Return the mesh of shardings; refuse several, or none."""
    meshes = {x.mesh for x in shardings if isinstance(x, jax.NamedSharding)}
    if len(meshes) != 1:
        raise ValueError(
            f"`shardings` must be the params as they lie on one mesh, or their"
            f" jax.NamedSharding, got {len(meshes)} meshes, and"
            f" {sorted({type(x).__name__ for x in shardings})}. Under a trace JAX does"
            f" not tell how params are sharded: take them from outside of jit."
        )
    return meshes.pop()


def has_axes(mesh: Any, slow: Sequence[str]) -> None:
    """Refuse an axis of replicas that the mesh of the params does not have."""
    if missing := sorted(set(slow) - set(mesh.axis_names)):
        raise ValueError(
            f"`axis_name` must name axes of the mesh that `shardings` tells, which has"
            f" {mesh.axis_names}, got {missing}. Name the slow one, as in"
            f" gravac.transform({mesh.axis_names[0]!r}, shardings=params)."
        )


def sharded_inside(used: set[str], slow: Sequence[str]) -> None:
    """Refuse params that are sharded over the slow axis."""
    if both := sorted(used & set(slow)):
        raise ValueError(
            f"the params are sharded over {both}, and a replica along `axis_name` needs"
            f" all of the model: name another axis, or leave {both} out of their specs."
        )


def sharded_alike(leaves: Sequence[Any], specs: Sequence[Any]) -> None:
    """Refuse leaves that are not those of which `shardings` told."""
    is_alike = lambda x, spec: len(spec) <= len(x.shape)
    if len(leaves) != len(specs) or not all(map(is_alike, leaves, specs)):
        raise ValueError(
            f"`shardings` told of {len(specs)} leaves, sharded by"
            f" {_arrays.brief(specs)}, and there are {len(leaves)}, of the shapes"
            f" {_arrays.brief([x.shape for x in leaves])}. Give gravac.transform the"
            f" params that the optimizer sees: shardings=params."
        )


def lies_as_said(leaves: Sequence[Any], specs: Sequence[Any], mesh: Any) -> None:
    """Refuse params that lie otherwise than `shardings` told."""
    for x, spec in zip(leaves, specs, strict=True):
        lies = getattr(x, "sharding", None)
        if isinstance(x, core.Tracer) or not isinstance(lies, jax.NamedSharding):
            continue  # nothing tells
        if not lies.is_equivalent_to(jax.NamedSharding(mesh, spec), len(x.shape)):
            raise ValueError(
                f"an array of shape {x.shape} is sharded by {lies.spec} over"
                f" {dict(lies.mesh.shape)}, and `shardings` told of {spec} over"
                f" {dict(mesh.shape)}. Give gravac.transform the params that the"
                f" optimizer sees, as they lie: shardings=params."
            )


def is_auto(mesh: Any, axis_name: Any) -> None:
    """Refuse a mesh on which the compiler cannot be left to shard the model."""
    if not isinstance(axis_name, str):
        raise ValueError(
            f"where the compiler shards the model over other axes of a mesh, replicas"
            f" lie along one axis, got {axis_name!r}: make one axis of these."
        )
    if set(mesh.axis_types) != {jax.sharding.AxisType.Auto}:
        raise ValueError(
            f"where the compiler shards the model, all axes of the mesh must be Auto,"
            f" got {mesh.axis_types}: jax.sharding.Mesh(mesh.devices, mesh.axis_names)"
            f" has such axes."
        )


def mapped_by_vmap(is_simulated: bool, axis_name: Any) -> None:
    """Refuse a transform that knows of slices, in a step that is mapped otherwise."""
    if not is_simulated:
        raise ValueError(
            f"gravac.transform(shardings=params) leaves the model to the compiler, and"
            f" this step is mapped over {axis_name!r} by shard_map or pmap. Run it by"
            f" gravac.data_parallel(step, mesh, {axis_name!r}), without a"
            f" `dense_axis_name`."
        )
