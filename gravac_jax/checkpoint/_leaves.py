"""Convert flat vectors on each device to arrays in the shapes of the params, and back.

Every device keeps the residuals of its slices of the compressed leaves in buckets, flat
vectors. A checkpoint stores an array `[replicas, *shape]` for each leaf, so that the
buckets, the slices and the number of replicas may change.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from gravac_jax import _collectives, _placement, _slices
from gravac_jax._buckets import NO_LEAF
from gravac_jax._state import TransformState
from gravac_jax.checkpoint._paths import Path, by_path


class Leaf(NamedTuple):
    """A compressed leaf of the params.

    Attributes:
      path: its path in the params.
      slice: the shape of the slice that one device has.
      spec: along which axes of the mesh `[replicas, *shape]` is sharded.
      copies: the axes along which the first device's is the only one that counts.
    """

    path: Path
    slice: tuple[int, ...]
    spec: jax.P
    copies: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the state of one transform lies on the devices.

    Attributes:
      mesh: the devices. All axes are Auto, so that XLA finds out what to send.
      spec: along which axes per-replica state `[N, ...]` is sharded.
      leaves: the leaves, in the order in which they fill the buckets.
      paddings: the zeros at the end of each bucket.
    """

    mesh: jax.sharding.Mesh
    spec: jax.P
    leaves: tuple[Leaf, ...]
    paddings: tuple[int, ...]

    @functools.partial(jax.jit, static_argnums=0)
    def split(self, buckets: list[jax.Array]) -> list[jax.Array]:
        """Return `[replicas, *shape]` for each leaf, from `[N, n]` for each bucket."""
        shapes = [x.slice for x in self.leaves]

        def body(buckets: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(buckets, self.paddings, strict=True)
            filled = [x[:, : x.shape[1] - zeros] for x, zeros in pairs]
            parts = zip(_regroup(filled, shapes), self.leaves, strict=True)
            return [_slices.from_owner(x, leaf.copies) for x, leaf in parts]

        return self._on_devices(body, self.spec, [x.spec for x in self.leaves])(buckets)

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def join(self, arrays: list[jax.Array], sizes: tuple[int, ...]) -> list[jax.Array]:
        """Undo `split`, for buckets of these sizes n."""

        def body(arrays: list[jax.Array]) -> list[jax.Array]:
            parts = zip(arrays, self.leaves, strict=True)
            own = [_slices.owned(x, leaf.copies) for x, leaf in parts]
            pairs = list(zip(sizes, self.paddings, strict=True))
            filled = _regroup(own, [(n - zeros,) for n, zeros in pairs])
            pad = lambda x, zeros: jnp.pad(x, ((0, 0), (0, zeros)))
            return list(map(pad, filled, self.paddings))

        return self._on_devices(body, [x.spec for x in self.leaves], self.spec)(arrays)

    def _on_devices(self, body: Any, in_specs: Any, out_specs: Any) -> Any:
        specs = {"in_specs": (in_specs,), "out_specs": out_specs}
        return jax.shard_map(body, mesh=self.mesh, check_vma=False, **specs)


def _regroup(arrays: list[jax.Array], shapes: Sequence[Any]) -> list[jax.Array]:
    """Cut the entries of all `[1, ...]` arrays of a device, in a row, into shapes."""
    _, unravel = ravel_pytree([jnp.zeros(shape, arrays[0].dtype) for shape in shapes])
    return jax.vmap(lambda rows: unravel(ravel_pytree(rows)[0]))(arrays)


def layout_of(state: TransformState, params: Any) -> Layout:
    """Return how a transform's state, and the params it was made for, lie on devices.

    Raises:
      ValueError: if the state was made for other params, is not as `gravac.place` makes
        it, or was returned by `jax.pmap` as if it were the same on all devices.
    """
    # nnx.Optimizer wraps every array in a variable.
    only = lambda x: jax.tree.leaves(x)[0]
    steps, replica, pieces = map(only, (state.steps, state.local.replica, state.layout))
    if steps.ndim or not isinstance(replica, jax.Array):
        raise ValueError(
            f"the state must be as gravac.place makes it, not of jax.pmap or on the"
            f" host, got `steps` as {type(steps).__name__} of shape {steps.shape}. Pass"
            f" what gravac.data_parallel returns."
        )
    _check_copies(replica)
    mesh, axes = _mesh_and_axes(replica.sharding)
    sizes: dict[int, int] = {}
    paddings = []
    for i, entries, _ in np.asarray(pieces).tolist():
        if i == NO_LEAF:
            paddings.append(entries)
        elif entries:  # Orbax refuses arrays without any
            sizes[i] = sizes.get(i, 0) + entries
    inner = _inner_axes(mesh, axes, int(np.max(pieces, axis=0, initial=1)[2]))
    flat = list(by_path(params).items())
    leaves = tuple(_leaf(*flat[i], mesh, axes, inner) for i in sizes if i < len(flat))
    expected, found = list(sizes.values()), [math.prod(x.slice) for x in leaves]
    if found != expected:
        raise ValueError(
            f"`params` are not the params that the state was made for: on one device,"
            f" its compressed leaves have {expected[:8]} entries, and those of `params`"
            f" {found[:8]}. Pass those of tx.init. Give each of two models a directory."
        )
    return Layout(mesh, jax.P(axes), leaves, tuple(paddings))


def _check_copies(replica: jax.Array) -> None:
    """Refuse replicas' own states that JAX takes for copies of one.

    The numbers of the replicas show it: they differ where all else may, too.
    """
    numbers: dict[Any, set[tuple[int, ...]]] = {}
    for shard in replica.addressable_shards:
        found = numbers.setdefault(str(shard.index), set())
        found.add(tuple(np.ravel(shard.data).tolist()))
    if any(len(found) > 1 for found in numbers.values()):
        raise ValueError(
            f"{len(replica.addressable_shards)} devices hold different states of the"
            f" transform, and JAX takes them for copies of one: all but the first would"
            f" be lost. jax.pmap(..., out_axes=None) returns such states, and so does a"
            f" shard_map without checks whose out_specs are P(). Under pmap give the"
            f" optimizer state axis 0, in and out; under shard_map take its specs from"
            f" gravac.state_specs. To save it, train with gravac.data_parallel."
        )


def _mesh_and_axes(sharding: Any) -> tuple[jax.sharding.Mesh, tuple[str, ...]]:
    """Return the devices of per-replica state, and the axes that slice it."""
    if isinstance(sharding, jax.NamedSharding):
        devices, names = np.asarray(sharding.mesh.devices), sharding.mesh.axis_names
        axes = _collectives.axis_names(next(iter(sharding.spec), None))
    else:
        devices, names, axes = np.array(list(sharding.device_set)), ("devices",), ()
    types = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(devices, names, types), axes


def _inner_axes(
    mesh: jax.sharding.Mesh, axes: tuple[str, ...], devices: int
) -> tuple[str, ...]:
    """Return the last of the `axes`, along which so many devices share a replica."""
    at = len(axes)
    while math.prod(mesh.shape[name] for name in axes[at:]) < devices:
        at -= 1
    return axes[at:]


def _leaf(
    path: Path,
    x: Any,
    mesh: jax.sharding.Mesh,
    axes: tuple[str, ...],
    inner: tuple[str, ...],
) -> Leaf:
    spec = _placement.specs_of(x) if axes else jax.P()
    cut = _slices.cut(x.shape, spec, mesh, inner)
    sliced = {name for part in cut.spec for name in _collectives.axis_names(part)}
    # Along the other axes, devices keep different residuals of the same slice.
    owners = tuple(name for name in axes if name not in {*sliced, *cut.copies})
    shape = jax.NamedSharding(mesh, cut.spec).shard_shape(x.shape)
    return Leaf(path, shape, jax.P(owners, *cut.spec), cut.copies)
