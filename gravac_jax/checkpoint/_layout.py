"""How per-replica state lies on the devices of a run, and how it moves to others.

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
from orbax.checkpoint.tree import to_flat_dict

from gravac_jax import _refuse, _slices
from gravac_jax._buckets import NO_LEAF
from gravac_jax._loop import placement
from gravac_jax._state import TransformState

Path = tuple[str, ...]
Named = dict[Path, Any]


def by_path(tree: Any, is_leaf: Any = None) -> Named:
    """Return the leaves of `tree` by path: `{("dense", "kernel"): array, ...}`."""
    return dict(to_flat_dict(tree, is_leaf=is_leaf) or {})


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
      buckets: how many entries of leaves each bucket has, and how many zeros after
        them.
    """

    mesh: jax.sharding.Mesh
    spec: jax.P
    leaves: tuple[Leaf, ...]
    buckets: tuple[tuple[int, int], ...]

    @functools.partial(jax.jit, static_argnums=0)
    def split(self, buckets: list[jax.Array]) -> list[jax.Array]:
        """Return `[replicas, *shape]` for each leaf, from `[N, n]` for each bucket."""

        def body(buckets: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(buckets, self.buckets, strict=True)
            filled = [x[:, :entries] for x, (entries, _) in pairs]
            parts = _regroup(filled, [leaf.slice for leaf in self.leaves])
            pairs = zip(parts, self.leaves, strict=True)
            return [_slices.from_owner(x, leaf.copies) for x, leaf in pairs]

        return self._on_devices(body, self.spec, [x.spec for x in self.leaves])(buckets)

    @functools.partial(jax.jit, static_argnums=0)
    def join(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Undo `split`."""

        def body(arrays: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(arrays, self.leaves, strict=True)
            own = [_slices.owned(x, leaf.copies) for x, leaf in pairs]
            filled = _regroup(own, [(entries,) for entries, _ in self.buckets])
            pairs = zip(filled, self.buckets, strict=True)
            return [jnp.pad(x, ((0, 0), (0, zeros))) for x, (_, zeros) in pairs]

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
    _require_copies(replica)
    sizes: dict[int, int] = {}
    buckets, entries, sharing = [], 0, 1
    for i, size, devices in np.asarray(pieces).tolist():
        if i == NO_LEAF:  # the zeros at the end of a bucket
            buckets.append((entries, size))
            entries = 0
        elif size:  # Orbax refuses arrays without entries
            sizes[i] = sizes.get(i, 0) + size
            entries, sharing = entries + size, max(sharing, devices)
    mesh, slow, inner = _axes(replica.sharding, sharing)
    flat = list(by_path(params).items())
    leaves = [_leaf(*flat[i], mesh, slow, inner) for i in sizes if i < len(flat)]
    expected, found = list(sizes.values()), [math.prod(x.slice) for x in leaves]
    if found != expected:
        raise ValueError(
            f"`params` are not the params that the state was made for: on one device,"
            f" its compressed leaves have {expected[:8]} entries, and those of `params`"
            f" {found[:8]}. Pass those of tx.init. Give each of two models a directory."
        )
    return Layout(mesh, jax.P(slow + inner), tuple(leaves), tuple(buckets))


def _require_copies(replica: jax.Array) -> None:
    """Refuse replicas' own states that JAX takes for copies of one.

    The numbers of the replicas show it: they differ where all else may, too.
    """
    shards = replica.addressable_shards
    found = {(str(x.index), str(np.asarray(x.data))) for x in shards}
    if len(found) > len({index for index, _ in found}):
        raise ValueError(
            f"{len(shards)} devices hold different states of the transform, and JAX"
            f" takes them for copies of one: all but the first would be lost."
            f" jax.pmap(..., out_axes=None) returns such states, and so does a"
            f" shard_map without checks whose out_specs are P(). Under pmap give the"
            f" optimizer state axis 0, in and out; under shard_map take its specs from"
            f" gravac.state_specs. To save it, train with gravac.data_parallel."
        )


def _axes(sharding: Any, sharing: int) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """Return the devices of per-replica state, and the axes that it is sharded along.

    Args:
      sharding: the sharding of per-replica state.
      sharing: how many devices share a replica.

    Returns:
      The mesh, the axes of the replicas, and the axes inside a replica.
    """
    if isinstance(sharding, jax.NamedSharding):
        devices, names = np.asarray(sharding.mesh.devices), sharding.mesh.axis_names
        axes = _refuse.axis_names(next(iter(sharding.spec), None))
    else:
        devices, names, axes = np.array(list(sharding.device_set)), ("devices",), ()
    mesh = jax.sharding.Mesh(devices, names, (jax.sharding.AxisType.Auto,) * len(names))
    at = len(axes)
    while math.prod(mesh.shape[name] for name in axes[at:]) < sharing:
        at -= 1
    return mesh, axes[:at], axes[at:]


def _leaf(
    path: Path, x: Any, mesh: Any, slow: tuple[str, ...], inner: tuple[str, ...]
) -> Leaf:
    spec = placement.specs_of(x) if inner else jax.P()
    cut = _slices.cut(x.shape, spec, mesh, inner)
    shape = jax.NamedSharding(mesh, cut.spec).shard_shape(x.shape)
    # An axis of one device may be in either.
    sliced = {name for part in cut.spec for name in _refuse.axis_names(part)}
    slow = tuple(name for name in slow if name not in sliced)
    return Leaf(path, shape, jax.P(slow, *cut.spec), cut.copies)


def loading(like: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return where to load an array of another number of replicas.

    Args:
      like: `[new, ...]`, the array of this run; it is sharded along its first axis.
      shape: the shape `[old, ...]` in the checkpoint.

    Returns:
      The shape with a sharding. It is sharded along an axis that can be divided, if
      there is one, so that no device has to hold all of it.
    """
    assert isinstance(like.sharding, jax.NamedSharding)
    first, *rest = [*like.sharding.spec, *[None] * len(shape)][: len(shape)]
    parts = [None, *rest]
    divides = lambda i: parts[i] is None and shape[i] % like.shape[0] == 0
    if free := list(filter(divides, range(len(shape)))):
        parts[free[0]] = first
    sharding = jax.NamedSharding(like.sharding.mesh, jax.P(*parts))
    return jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)


def redistribute(x: jax.Array, like: jax.Array, is_averaged: bool) -> jax.Array:
    """Return for the replicas of this run what the replicas of a checkpoint kept.

    Old and new replicas divide the same line into equal parts. Each new replica gets
    the mean of the old ones that it overlaps, weighted by the overlap: of 4 old and 2
    new replicas, the first gets the mean of the first two. The mean over all replicas
    stays the same, and numbers that are nowhere negative stay so.

    Args:
      x: `[old, ...]`.
      like: `[new, ...]`, an array with the shape and the sharding to return.
      is_averaged: whether to average floats. If not, and for integers, each new replica
        gets a copy of the old one at the beginning of its part.
    """
    old, new = x.shape[0], like.shape[0]
    first = np.arange(new) * old // new
    # In units of 1 / (old * new) of the line.
    starts, begins = np.arange(old) * new, np.arange(new)[:, None] * old
    overlap = np.minimum(starts + new, begins + old) - np.maximum(starts, begins)

    def mean(x: jax.Array) -> jax.Array:
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        share = jnp.asarray(np.maximum(overlap, 0) / old, wide)
        mean = jnp.tensordot(share, x.astype(wide), axes=1, precision="highest")
        return mean.astype(x.dtype)

    is_averaged &= jnp.issubdtype(x.dtype, jnp.floating)
    change = mean if is_averaged else lambda x: x[first]
    return jax.jit(change, out_shardings=like.sharding)(x)
