"""The slice of each leaf that a device owns, where the compiler shards the model.

Under `jit` with sharding annotations the compiler spreads a model over the inner axes
of a mesh: all but the slow one. A step of `gravac.data_parallel` is then mapped over
the slow axis alone, by vmap, and the compiler partitions the model as under `jit`. The
exchange alone escapes from the vmap to a shard_map over all axes, in which each device
compresses what lies on it, and sends it to the devices of other replicas that own the
same slice.

The exchange cuts every leaf into as many slices as there are inner devices. Along inner
axes over which a leaf is not sharded, devices hold copies of it: there, each device
owns a part of its copy. So everything is remembered once and sent once. A leaf that
does not divide goes dense. It belongs to the first of the devices that hold it: the
others take zeros in its place, and what they send of it is dropped.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core

from gravac_jax import _arrays, _refuse, _state
from gravac_jax._network import AxisName, Comm, inner_axes
from gravac_jax._refuse import axis_names
from gravac_jax._state import TransformState


class Cut(NamedTuple):
    """How one leaf is cut.

    Attributes:
      model: along which inner axes the compiler shards each of its axes.
      spec: along which inner axes the exchange cuts each of them.
      copies: the inner axes along which it could not be cut.
    """

    model: jax.P
    spec: jax.P
    copies: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Slices:
    """How the compiler shards the params of one transform.

    Attributes:
      mesh: the mesh on which the params lie.
      axis_name: the slow axis, or axes.
      specs: how each leaf of the params is sharded, in the order of the leaves.
    """

    mesh: Any
    axis_name: AxisName
    specs: tuple[jax.P, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The inner axes."""
        return inner_axes(self.mesh, self.axis_name)

    @property
    def inner_devices(self) -> int:
        """The number of devices that share a replica."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    def shapes(self, leaves: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shape of a device's slice of each leaf."""
        if not leaves:
            return ()  # optax.tree.map_params asks for the state of no params at all

        def slice_of(x: Any, cut: Cut) -> jax.ShapeDtypeStruct:
            shape = jax.NamedSharding(self.mesh, cut.spec).shard_shape(x.shape)
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return tuple(map(slice_of, leaves, self._cuts(leaves)))

    def are_cut(self, leaves: Sequence[Any]) -> list[bool]:
        """Return whether each leaf divides, so that a device owns a part of each."""
        return [not cut.copies for cut in self._cuts(leaves)] if leaves else []

    def _cuts(self, leaves: Sequence[Any]) -> list[Cut]:
        fits = lambda x, spec: len(spec) <= len(x.shape)
        if len(leaves) != len(self.specs) or not all(map(fits, leaves, self.specs)):
            raise ValueError(
                f"`shardings` told of {len(self.specs)} leaves, sharded by"
                f" {_arrays.brief(self.specs)}, got {len(leaves)} of the shapes"
                f" {_arrays.brief([x.shape for x in leaves])}: give gravac.transform"
                f" the params that the optimizer sees, shardings=params."
            )
        pairs = zip(leaves, self.specs, strict=True)
        return [cut(x.shape, spec, self.mesh, self.axes) for x, spec in pairs]

    def check(self, params: Any) -> None:
        """Raise if params lie otherwise on their mesh, as far as they tell."""
        for x, spec in zip(jax.tree.leaves(params), self.specs, strict=False):
            lies = getattr(x, "sharding", None)
            if isinstance(x, core.Tracer) or not isinstance(lies, jax.NamedSharding):
                continue  # nothing tells
            if not lies.is_equivalent_to(jax.NamedSharding(self.mesh, spec), x.ndim):
                raise ValueError(
                    f"`shardings` told of {spec} over {dict(self.mesh.shape)}, got an"
                    f" array of shape {x.shape} sharded by {lies.spec} over"
                    f" {dict(lies.mesh.shape)}: give gravac.transform the params as"
                    f" they lie, shardings=params."
                )

    def place(self, make: Callable[[], TransformState]) -> TransformState:
        """Return the state that `make` returns for one device, of all devices."""
        owners = (*axis_names(self.axis_name), *self.axes)
        own = jax.NamedSharding(self.mesh, jax.P(owners))
        whole = jax.NamedSharding(self.mesh, jax.P())
        every = lambda x: jnp.broadcast_to(x, (own.num_devices, *x.shape))

        def of_all() -> TransformState:
            local = lambda state: jax.tree.map(every, state)
            return _state.map_local(make(), local, lambda x: x)

        shardings = _state.per_leaf(jax.eval_shape(make), own, whole)
        return jax.jit(of_all, out_shardings=shardings)()

    def run(
        self,
        update: Callable[..., Any],
        deliver: str | None,
        given: tuple[Any, TransformState, Any, dict[str, Any]],
    ) -> Any:
        """Call `update` on every device, with what it owns.

        Args:
          update: `(updates, state, params, **numbers)` of one device; it returns
            updates and the new state.
          deliver: what it is asked for, in place of a step.
          given: gradients, or anything of the shapes of the params; the transform's
            state; the params, or None; numbers, such as step times.

        Returns:
          What `update` returns.
        """
        updates, state, params, numbers = given
        comm = Comm(self.axis_name)
        if not comm.is_simulated:
            raise ValueError(
                f"gravac.transform(shardings=params) leaves the model to the compiler,"
                f" got a step that shard_map or pmap maps over {self.axis_name!r}: run"
                f" it by gravac.data_parallel without a `fast_axis_name`."
            )
        _state.check_sliced(state, self.inner_devices)
        alike = [x for x in _arrays.named_leaves(updates) if comm.is_known_alike(x[1])]
        # The gradient of what does not depend on the batch is alike on all replicas.
        if deliver is None and len(alike) == len(self.specs):
            _refuse.summed(alike[0][0], axis_names(self.axis_name))
        cuts = self._cuts(jax.tree.leaves(updates))

        def each(change: Callable[[Any, Cut], Any], tree: Any) -> Any:
            leaves, structure = jax.tree.flatten(tree)
            return jax.tree.unflatten(structure, map(change, leaves, cuts))

        def on_device(updates: Any, state: Any, params: Any, numbers: Any) -> Any:
            mine = lambda x, cut: owned(x, cut.copies)
            own = each(mine, updates), state, each(mine, params)
            updates, state = update(*own, **numbers)
            return each(lambda x, cut: from_owner(x, cut.copies), updates), state

        specs = lambda tree: each(lambda _, cut: cut.spec, tree)
        states = _state.per_leaf(state, jax.P(self.axes), jax.P())
        in_specs = specs(updates), states, specs(params), _all(jax.P(), numbers)
        out_specs = specs(updates), states
        is_own = deliver in ("own", "nothing")
        out_is_own = _all(is_own, updates), _state.per_leaf(state, True, False)
        on_devices = self._escaped(on_device, in_specs, out_specs, out_is_own)

        def as_model(x: jax.Array, cut: Cut) -> jax.Array:
            # Else the compiler might shard the model as the exchange cuts its leaves.
            sharding = jax.NamedSharding(self.mesh, cut.model)
            return jax.lax.with_sharding_constraint(x, sharding)

        updates, state = on_devices(each(as_model, updates), *given[1:])
        return each(as_model, updates), state

    def _escaped(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, is_own: Any
    ) -> Callable[..., Any]:
        """Return `function` of one device, run on all, also where vmap maps replicas.

        Args:
          function: takes updates, a state and more, and returns updates and a state.
          in_specs: how each array of one replica that it takes is sharded.
          out_specs: how each that it returns is.
          is_own: whether each that it returns differs between replicas.
        """
        lead = lambda is_own, spec: jax.P(self.axis_name, *spec) if is_own else spec

        @jax.custom_batching.custom_vmap
        def escaped(updates: Any, state: Any, *others: Any) -> Any:
            # Never run: it shows of which shapes the results are.
            return updates, state

        @escaped.def_vmap
        def of_all_replicas(replicas: int, is_batched: Any, *given: Any) -> Any:
            del replicas
            is_batched = tuple(is_batched)

            def on_device(*given: Any) -> Any:
                own = jax.tree.map(lambda b, x: x[0] if b else x, is_batched, given)
                results = function(*own)
                return jax.tree.map(lambda b, x: x[None] if b else x, is_own, results)

            run = jax.shard_map(
                on_device,
                mesh=self.mesh,
                in_specs=jax.tree.map(lead, is_batched, in_specs),
                out_specs=jax.tree.map(lead, is_own, out_specs),
                # With it, each vmap in here would mark arrays as varying over the axis
                # of the vmap around (jax 0.10.2).
                check_vma=False,
            )
            return run(*given), is_own

        return escaped


def _all(value: Any, tree: Any) -> Any:
    return jax.tree.map(lambda _: value, tree)


def cut(shape: Sequence[int], spec: jax.P, mesh: Any, axes: Sequence[str]) -> Cut:
    """Cut a leaf that is sharded by `spec` along all other `axes` of `mesh`, too."""
    parts = [axis_names(x) for x in spec]
    parts += [()] * (len(shape) - len(parts))
    slices = lambda at: math.prod(mesh.shape[name] for name in parts[at])
    copies: list[str] = []
    for name in axes:
        if any(name in part for part in parts):
            continue
        is_even = lambda at, more: shape[at] % (slices(at) * more) == 0
        fits = [i for i in range(len(shape)) if is_even(i, mesh.shape[name])]
        if not fits:
            copies.append(name)
            continue
        # Slices along an axis that is cut already stay whole rows or columns.
        at = max(fits, key=lambda at: (slices(at) > 1, shape[at]))
        parts[at] = (*parts[at], name)
    return Cut(spec, jax.P(*(part or None for part in parts)), tuple(copies))


def owned(x: jax.Array, copies: tuple[str, ...]) -> jax.Array:
    """Return a device's slice; zeros if another one along `copies` owns it."""
    if not copies:
        return x
    return jnp.where(Comm(copies).replica() == 0, x, jnp.zeros_like(x))


def from_owner(x: jax.Array, copies: tuple[str, ...]) -> jax.Array:
    """Return on all devices along `copies` what their first one owns."""
    return jax.lax.psum(owned(x, copies), copies) if copies else x


def said(
    shardings: Any, axis_name: AxisName, fast_axis_name: AxisName
) -> dict[str, Any]:
    """Return what `shardings` says of the axes of `gravac.transform`."""
    if not jax.tree.leaves(shardings):
        return {"fast_axis_name": fast_axis_name, "slices": None}
    slices = slices_of(shardings, axis_name)
    if fast_axis_name is not None:
        raise TypeError(
            f"give `fast_axis_name` or `shardings`, not both, got {fast_axis_name!r}"
            f" and {slices.mesh}: `shardings` tells the other axes."
        )
    # Without other axes nothing is cut.
    is_cut = bool(slices.axes)
    return {
        "fast_axis_name": slices.axes or None,
        "slices": slices if is_cut else None,
    }


def slices_of(shardings: Any, axis_name: AxisName) -> Slices:
    """Return how params lie on their mesh.

    Args:
      shardings: a pytree of arrays on a mesh, or of `jax.NamedSharding`.
      axis_name: the slow axis, or axes.
    """
    each = [getattr(x, "sharding", x) for x in jax.tree.leaves(shardings)]
    spec = lambda x: x.spec if isinstance(x, jax.NamedSharding) else jax.P()
    meshes = {x.mesh for x in each if isinstance(x, jax.NamedSharding)}
    if len(meshes) != 1:
        raise ValueError(
            f"`shardings` must be the params as they lie on one mesh, or their"
            f" jax.NamedSharding, got {len(meshes)} meshes, and"
            f" {sorted({type(x).__name__ for x in each})}: take them outside of jit."
        )
    mesh, slow = meshes.pop(), set(axis_names(axis_name))
    if missing := sorted(slow - set(mesh.axis_names)):
        raise ValueError(
            f"`axis_name` must be the slow axis of the mesh of `shardings`, which has"
            f" {mesh.axis_names}, got {missing}: write"
            f" gravac.transform({mesh.axis_names[0]!r}, shardings=params)."
        )
    slices = Slices(mesh, axis_name, tuple(map(spec, each)))
    names = {x for spec in slices.specs for part in spec for x in axis_names(part)}
    if both := sorted(names & slow):
        raise ValueError(
            f"the params are sharded over {both}, and each replica along `axis_name`"
            f" needs all of them: name another axis, or leave {both} out of the specs."
        )
    return slices
