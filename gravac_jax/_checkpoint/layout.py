"""How per-replica state lies on the devices: buckets of a run, leaves of a checkpoint.

Every device keeps the residuals of its slices of the leaves in buckets, flat vectors. A
checkpoint stores an array `[replicas, *shape]` for each leaf, so that the buckets, the
slices and the number of replicas may change.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from gravac_jax import _arrays, _refuse
from gravac_jax._loop import placement
from gravac_jax._network import Comm
from gravac_jax._step import slicing
from gravac_jax._step.bucketing import NO_LEAF
from gravac_jax._step.states import TransformState


class Leaf(NamedTuple):
    """A leaf of the params.

    Attributes:
      path: its path in the params, such as `['dense']['kernel']`.
      slice: the shape of the slice that one device has.
      spec: along which axes of the mesh `[replicas, *shape]` is sharded.
      copies: the axes along which the first device's is the only one that counts.
    """

    path: str
    slice: tuple[int, ...]
    spec: jax.P
    copies: tuple[str, ...]


class Layout(NamedTuple):
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

    def shapes(self, buckets: list[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes, with shardings, of what `split` returns."""
        lies = [jax.NamedSharding(self.mesh, x.spec) for x in self.leaves]
        return jax.eval_shape(jax.jit(self.split, out_shardings=lies), buckets)

    @functools.partial(jax.jit, static_argnums=0)
    def split(self, buckets: list[jax.Array]) -> list[jax.Array]:
        """Return `[replicas, *shape]` for each leaf, from `[N, n]` for each bucket."""

        def body(buckets: list[jax.Array]) -> list[jax.Array]:
            filled = [x[:, :n] for x, (n, _) in zip(buckets, self.buckets, strict=True)]
            parts = _regroup(filled, [leaf.slice for leaf in self.leaves])
            return [*map(Comm.first, (Comm(x.copies) for x in self.leaves), parts)]

        return self._on_devices(body, self.spec, [x.spec for x in self.leaves])(buckets)

    @functools.partial(jax.jit, static_argnums=0)
    def join(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Undo `split`."""

        def body(arrays: list[jax.Array]) -> list[jax.Array]:
            own = [*map(Comm.owned, (Comm(x.copies) for x in self.leaves), arrays)]
            filled = _regroup(own, [(entries,) for entries, _ in self.buckets])
            zeros = [((0, 0), (0, zeros)) for _, zeros in self.buckets]
            return [*map(jnp.pad, filled, zeros)]

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
    _require_placed(steps, replica)
    sizes: dict[int, int] = {}
    buckets, entries = [], 0
    for i, size, _ in np.asarray(pieces).tolist():
        if i == NO_LEAF:  # the zeros at the end of a bucket
            buckets.append((entries, size))
            entries = 0
        elif size:  # Orbax refuses arrays without entries
            sizes[i] = sizes.get(i, 0) + size
            entries += size
    mesh, slow, inner = _axes(replica.sharding, np.asarray(pieces)[:, 2].max())
    flat = _arrays.named_leaves(params)

    def leaf(path: str, x: Any) -> Leaf:
        spec = placement.spec_of(x) if inner else jax.P()
        cut = slicing.cut(x.shape, spec, mesh, inner)
        shape = jax.NamedSharding(mesh, cut.spec).shard_shape(x.shape)
        return Leaf(path, shape, jax.P(slow, *cut.spec), cut.copies)

    leaves = [leaf(*flat[i]) for i in sizes if i < len(flat)]
    expected, found = list(sizes.values()), [math.prod(x.slice) for x in leaves]
    if found != expected:
        raise ValueError(
            f"`params` are not the params that the state was made for, whose leaves"
            f" have {expected[:8]} entries on a device, got {found[:8]}: pass those of"
            f" tx.init, and give each of two models a directory."
        )
    return Layout(mesh, jax.P(slow + inner), tuple(leaves), tuple(buckets))


def _require_placed(steps: Any, replica: Any) -> None:
    """Refuse a state that is not as `gravac.place` makes it.

    JAX may take replicas' own states for copies of one. The numbers of the replicas
    show it: they differ where all else may, too.
    """
    shards = getattr(replica, "addressable_shards", [])
    found = {(str(x.index), str(np.asarray(x.data))) for x in shards}
    are_copies = _arrays.is_shape(replica) or len(found) == len(dict(found)) > 0
    if not are_copies or (steps.ndim, replica.ndim) != (0, 1):
        raise ValueError(
            f"the state must be as gravac.place makes it and gravac.data_parallel"
            f" returns it, got {len(found)} replicas, `steps` of shape {steps.shape}:"
            f" take gravac.state_specs under shard_map; save that of jax.pmap yourself."
        )


def _axes(sharding: Any, sharing: int) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """Return the mesh of per-replica state, and the axes that it is sharded along.

    Args:
      sharding: the sharding of per-replica state.
      sharing: how many devices share a replica.

    Returns:
      The mesh, the axes of the replicas, and the axes inside a replica.
    """
    if not isinstance(sharding, jax.NamedSharding):  # one device simulates replicas
        return jax.sharding.Mesh([*sharding.device_set], ("device",)), (), ()
    mesh, axes = sharding.mesh, _refuse.axis_names(next(iter(sharding.spec), None))
    mesh = jax.sharding.Mesh(np.asarray(mesh.devices), mesh.axis_names)
    # An axis of one device may be in either.
    is_inside = lambda at: math.prod(mesh.shape[x] for x in axes[at:]) <= sharing
    at = next(filter(is_inside, range(len(axes) + 1)))
    return mesh, axes[:at], axes[at:]


def loading(like: Any, shape: tuple[int, ...]) -> Any:
    """Return where to load an array of another number of replicas.

    Args:
      like: the array of this run, `[new, ...]`, sharded along its first axis.
      shape: the shape in the checkpoint, `[old, ...]`.

    Returns:
      The shape with a sharding, along axes that can be divided, if there are any, so
      that no device has to hold all of it.
    """
    mesh, spec = like.sharding.mesh, [*like.sharding.spec, None][: len(shape)]
    cut = slicing.cut(shape, jax.P(None, *spec[1:]), mesh, _refuse.axis_names(spec[0]))
    sharding = jax.NamedSharding(mesh, cut.spec)
    return jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)


def redistribute(x: jax.Array, like: jax.Array, is_mean: bool = True) -> jax.Array:
    """Return for the replicas of this run what the replicas of a checkpoint kept.

    Old and new replicas divide the same line into equal parts. Each new replica gets
    the mean of the old ones that it overlaps, weighted by the overlap: of 4 old and 2
    new replicas, the first gets the mean of the first two. The mean over all replicas
    stays the same, and numbers that are nowhere negative stay so. Of integers, and of
    what is the same on all replicas, it gets those of the old replica at the beginning
    of its part.

    Args:
      x: `[old, ...]`.
      like: `[new, ...]`, an array with the shape and the sharding to return.
      is_mean: False to take the old replica's, of floats, too.
    """
    old, new = x.shape[0], like.shape[0]
    places = np.arange(old * new)  # of the line
    share = np.bincount(places // old * old + places // new).reshape(new, old) / old

    def change(x: jax.Array) -> jax.Array:
        if not (is_mean and _arrays.is_float(x)):
            return x[np.arange(new) * old // new]
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        mean = jnp.tensordot(share.astype(wide), x.astype(wide), 1, precision="highest")
        return mean.astype(x.dtype)

    return jax.jit(change, out_shardings=like.sharding)(x)
