"""What replicas hold back, in the shapes of the params, and on other replicas.

A residual belongs to a leaf of the params, whatever bucket it lies in and whichever
device has it. Here it is an array `[replicas, *shape]`, and can be dealt out anew.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _collectives, _placement, _state
from gravac_jax._arrays import Path
from gravac_jax._checkpoint import restore_checks
from gravac_jax._state import TransformState


@dataclasses.dataclass(frozen=True)
class Form:
    """How the state of one transform lies on devices.

    Attributes:
      mesh: None where it is on none, but on a device.
      device: the sharding then.
      axes: along which every device has a state of its own.
      replicas: how many there are; None in the local form.
      names: of the compressed leaves.
      leaves: their shapes and dtypes, of the whole leaf.
      specs: along which axes of the mesh they are cut.
    """

    mesh: jax.sharding.Mesh | None
    device: Any
    axes: tuple[str, ...]
    replicas: int | None
    names: tuple[Path, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[jax.P, ...]

    @property
    def slices(self) -> list[tuple[int, ...]]:
        """The shape of each leaf as one device has it."""
        if self.mesh is None:
            return [x.shape for x in self.leaves]
        shardings = [jax.NamedSharding(self.mesh, spec) for spec in self.specs]
        pairs = zip(shardings, self.leaves, strict=True)
        return [sharding.shard_shape(x.shape) for sharding, x in pairs]

    def owners(self, spec: jax.P) -> tuple[str, ...]:
        """The axes along which a leaf's residual differs, and is not merely cut."""
        cut = {name for part in spec for name in _collectives.axis_names(part)}
        return tuple(name for name in self.axes if name not in cut)

    def count(self, spec: jax.P) -> int:
        """Replicas that hold back something of a leaf."""
        if self.mesh is None:
            return self.replicas or 1
        return math.prod(self.mesh.shape[name] for name in self.owners(spec))

    def spec(self, spec: jax.P) -> jax.P:
        """That of `[replicas, *shape]`."""
        return jax.P(self.owners(spec) or None, *spec)

    def sharding(self, spec: jax.P, replicas: int, leaf: Any) -> Any:
        """Where to put `[replicas, *shape]`, so that no device has to hold all of it.

        Of as many replicas as here it is as `split` gives it, of others where `deal`
        can take it from.
        """
        if self.mesh is None:
            return self.device
        owners, count = self.owners(spec) or None, self.count(spec)
        mesh = automatic(self.mesh)
        if replicas % count == 0:
            return jax.NamedSharding(mesh, jax.P(owners, *spec))
        parts = [*spec, *[None] * (len(leaf.shape) - len(spec))]
        for i, (part, size) in enumerate(zip(parts, leaf.shape, strict=True)):
            if part is None and size % count == 0:
                parts[i] = owners
                break
        return jax.NamedSharding(mesh, jax.P(None, *parts))

    def whole_unless(self, replicas: int) -> Any:
        """A sharding for `[replicas, ...]`: None, or whole if it is not as many."""
        if self.mesh is None or replicas == self.replicas:
            return self.device
        return jax.NamedSharding(automatic(self.mesh), jax.P())

    def deal(self, x: jax.Array, spec: jax.P) -> jax.Array:
        """`[replicas, *shape]` of a leaf for the replicas here: see `deal`."""
        if self.mesh is None:
            return deal(x, self.count(spec), self.device)
        mesh = automatic(self.mesh)
        there = jax.NamedSharding(mesh, self.spec(spec))
        here = jax.NamedSharding(self.mesh, self.spec(spec))
        return jax.device_put(deal(x, self.count(spec), there), here)

    def split(self, buckets: list[jax.Array]) -> list[jax.Array]:
        """`[replicas, *shape]` a leaf, from `[replicas, n]` a bucket."""
        return _splitter(self, len(buckets))(buckets) if self.leaves else []

    def join(self, leaves: list[jax.Array], sizes: list[int]) -> list[jax.Array]:
        """The inverse of `split`, for buckets of these sizes."""
        return _joiner(self, tuple(sizes))(leaves)

    def run(self, body: Any, in_specs: Any, out_specs: Any) -> Any:
        """Compile what a device does with what it has."""
        if self.mesh is not None:
            body = jax.shard_map(
                body,
                mesh=self.mesh,
                in_specs=(in_specs,),
                out_specs=out_specs,
                check_vma=False,
            )
        return jax.jit(body)


# Kept, so that no save but the first compiles.
@functools.lru_cache(maxsize=8)
def _splitter(form: Form, buckets: int) -> Callable[..., list[jax.Array]]:
    shapes = form.slices
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1].tolist()

    def body(buckets: list[jax.Array]) -> list[jax.Array]:
        # Buckets are cut from all leaves in a row.
        parts = jnp.split(jnp.concatenate(buckets, axis=1), ends, axis=1)
        pairs = zip(parts, shapes, strict=True)
        return [x.reshape(x.shape[0], *shape) for x, shape in pairs]

    specs = [form.spec(spec) for spec in form.specs]
    return form.run(body, [jax.P(form.axes)] * buckets, specs)


@functools.lru_cache(maxsize=8)
def _joiner(form: Form, sizes: tuple[int, ...]) -> Callable[..., list[jax.Array]]:
    ends = np.cumsum(sizes)[:-1].tolist()

    def body(leaves: list[jax.Array]) -> list[jax.Array]:
        rows = [x.reshape(x.shape[0], -1) for x in leaves]
        return jnp.split(jnp.concatenate(rows, axis=1), ends, axis=1)

    specs = [form.spec(spec) for spec in form.specs]
    return form.run(body, specs, [jax.P(form.axes)] * len(sizes))


def form(state: TransformState, params: Any) -> Form:
    """How a state, and the params that it was made for, lie on devices.

    Raises:
      ValueError: if the params are others, or the state is that of a pmap.
    """
    steps, replica, layout = map(
        _only, (state.steps, state.local.replica, state.layout)
    )
    restore_checks.is_on_devices(replica)
    restore_checks.is_not_of_pmap(steps)
    layout = np.asarray(layout)
    flat = list(_arrays.by_path(params).items())
    chosen = sorted(set(layout[:, 0].tolist()))
    mesh, axes = _mesh_of(replica)
    picked = [flat[i] for i in chosen if i < len(flat)]
    made = Form(
        mesh=mesh,
        device=None if mesh is not None else getattr(replica, "sharding", None),
        axes=axes,
        replicas=_state.placed_replicas(state.local),
        names=tuple(path for path, _ in picked),
        leaves=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in picked),
        specs=tuple(jax.tree.leaves(_placement.specs_of([x for _, x in picked]))),
    )
    entries = {i: int(layout[layout[:, 0] == i, 1].sum()) for i in chosen}
    has = [math.prod(shape) for shape in made.slices]
    restore_checks.params_are_those(list(entries.values()), has)
    return made


def _only(x: Any) -> Any:
    # flax.nnx.Optimizer wraps every array in a variable.
    (leaf,) = jax.tree.leaves(x)
    return leaf


def _mesh_of(replica: Any) -> tuple[jax.sharding.Mesh | None, tuple[str, ...]]:
    sharding = getattr(replica, "sharding", None)
    if isinstance(sharding, jax.NamedSharding) and replica.ndim and sharding.spec:
        axes = _collectives.axis_names(sharding.spec[0])
        if axes and isinstance(sharding.mesh, jax.sharding.Mesh):
            return sharding.mesh, axes
    return None, ()


def automatic(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The same devices, where XLA finds out what to send between them."""
    types = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, types)


def deal(x: jax.Array, replicas: int, sharding: Any) -> jax.Array:
    """What some replicas hold, for another number of them, whose mean is the same.

    Each stands where a part of the old ones stood, and gets the mean of these: of four
    replicas, the first of two gets that of the first two, and of eight each two get
    what one had. So what is nowhere negative stays so.

    Args:
      x: `[old, ...]` float32.
      replicas: the new number.
      sharding: of the result.

    Returns:
      `[replicas, ...]` float32.
    """
    if x.shape[0] == replicas:
        return x
    # In units of 1 / (old * new) of them all.
    old, new = np.arange(x.shape[0])[None], np.arange(replicas)[:, None]
    end = np.minimum((old + 1) * replicas, (new + 1) * x.shape[0])
    overlap = end - np.maximum(old * replicas, new * x.shape[0])
    share = jnp.asarray(np.maximum(overlap, 0) / x.shape[0], jnp.float32)
    mean = lambda x: jnp.tensordot(share, x, axes=1, precision="highest")
    return jax.jit(mean, out_shardings=sharding)(x)


def pick(x: jax.Array, replicas: int) -> jax.Array:
    """The same for what has no mean: each gets that of one whose place it takes."""
    if x.shape[0] == replicas:
        return x
    rows = np.arange(replicas) * x.shape[0] // replicas
    return jax.jit(lambda x: x[rows])(x)
