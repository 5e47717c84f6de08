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

from gravac_jax import _arrays, _refuse
from gravac_jax._network import AxisName, Comm, inner_axes
from gravac_jax._refuse import axis_names
from gravac_jax._step import states


class Cut(NamedTuple):
    """How one leaf is cut.

    Attributes:
      spec: along which inner axes the exchange cuts each of its axes.
      copies: the inner axes along which it could not be cut.
    """

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

    def slices_of(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], list[bool]]:
        """Return a device's slice of each leaf, as shapes, and whether each divides."""
        cuts = self.cuts(leaves)
        shape = lambda x, cut: self._on_mesh(cut.spec).shard_shape(x.shape)
        like = lambda x, cut: jax.ShapeDtypeStruct(shape(x, cut), x.dtype)
        return tuple(map(like, leaves, cuts)), [not cut.copies for cut in cuts]

    def _on_mesh(self, spec: jax.P) -> jax.NamedSharding:
        return jax.NamedSharding(self.mesh, spec)

    def cuts(self, leaves: Sequence[Any]) -> list[Cut]:
        """Return how each leaf is cut; raise if they are others, or lie otherwise.

        Leaves that do not tell how they lie on their mesh are trusted.
        """
        if not leaves:
            return []  # optax.tree.map_params asks for the state of no params at all
        pairs = list(zip(leaves, self.specs, strict=False))
        wrong = [(x, spec) for x, spec in pairs if not self._lies_so(x, spec)]
        if len(leaves) != len(self.specs) or wrong:
            lies = [(x.shape, getattr(x, "sharding", None)) for x, _ in wrong]
            raise ValueError(
                f"`shardings` told of {len(self.specs)} leaves over"
                f" {dict(self.mesh.shape)}, {_arrays.brief([x for _, x in wrong])}, got"
                f" {len(leaves)}, {_arrays.brief(lies)}: give gravac.transform the"
                f" params that the optimizer sees, as they lie, shardings=params."
            )
        return [cut(x.shape, spec, self.mesh, self.axes) for x, spec in pairs]

    def _lies_so(self, x: Any, spec: jax.P) -> bool:
        lies = None if isinstance(x, core.Tracer) else getattr(x, "sharding", None)
        if len(spec) > len(x.shape) or not isinstance(lies, jax.NamedSharding):
            return len(spec) <= len(x.shape)
        return lies.is_equivalent_to(self._on_mesh(spec), len(x.shape))

    def place(self, make: Callable[[], states.TransformState]) -> states.TransformState:
        """Return the state that `make` returns for one device, of all devices."""
        own = self._on_mesh(jax.P((*axis_names(self.axis_name), *self.axes)))
        every = lambda x: jnp.broadcast_to(x, (own.num_devices, *x.shape))
        of_all = lambda: states.change_local(every, make())
        lies = states.per_leaf(jax.eval_shape(make), own, self._on_mesh(jax.P()))
        return jax.jit(of_all, out_shardings=lies)()

    def run(self, update: Callable[..., Any], how: str | None, *given: Any) -> Any:
        """Call `update` on every device, with what it owns.

        Args:
          update: `(updates, state, params, known)` of one device; it returns
            updates and the new state.
          how: it is asked, in place of a step: as in `update.Delivery`.
          given: gradients, or anything of the shapes of the params; the transform's
            state; the params, or None; times and the loss.

        Returns:
          What `update` returns.
        """
        updates, state, params, known = given
        comm = Comm(self.axis_name)
        by_hand = jax.sharding.get_abstract_mesh().manual_axes
        if {*axis_names(self.axis_name)} & {*by_hand}:
            raise ValueError(
                f"gravac.transform(shardings=params) leaves the model to the compiler,"
                f" got a step that shard_map or pmap maps over {self.axis_name!r}: run"
                f" it by gravac.data_parallel without a `fast_axis_name`."
            )
        _refuse.placed(states.placed_replicas(state.local), self.inner_devices, True)
        # The gradient of what does not depend on the batch is alike on all replicas. In
        # a lax.cond nothing is known: JAX maps its branches after they are traced.
        if how is None and comm.is_simulated and comm.is_known_alike(updates):
            for path, _ in _arrays.named_leaves(updates)[:1]:
                _refuse.summed(path, axis_names(self.axis_name))
        cuts = self.cuts(jax.tree.leaves(updates))

        def each(change: Callable[..., Any], tree: Any) -> Any:
            leaves, structure = jax.tree.flatten(tree)
            return jax.tree.unflatten(structure, map(change, leaves, cuts, self.specs))

        def on_device(updates: Any, state: Any, params: Any, known: Any) -> Any:
            mine = lambda x, cut, _: Comm(cut.copies).owned(x)
            own = each(mine, updates), state, each(mine, params)
            updates, state = update(*own, known)
            return each(lambda x, cut, _: Comm(cut.copies).first(x), updates), state

        def as_model(x: jax.Array, _: Cut, spec: jax.P) -> jax.Array:
            # Else the compiler might shard the model as the exchange cuts its leaves.
            return jax.lax.with_sharding_constraint(x, self._on_mesh(spec))

        all_of = lambda value, tree: jax.tree.map(lambda _: value, tree)
        specs = lambda tree: each(lambda _, cut, __: cut.spec, tree)
        lies = states.per_leaf(state, jax.P(self.axes), jax.P())
        on_devices = self._escaped(
            on_device,
            (specs(updates), lies, specs(params), all_of(jax.P(), known)),
            (specs(updates), lies),
            (all_of(how == "own", updates), states.per_leaf(state, True, False)),
        )
        updates, state = on_devices(each(as_model, updates), *given[1:])
        return each(as_model, updates), state

    def _escaped(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, is_own: Any
    ) -> Callable[..., Any]:
        """Return `function` of one device, run on all, also where vmap maps replicas.

        Args:
          function: takes updates, a state and more, and returns updates and a state.
          in_specs: how each array of one replica that it takes is sharded.
          out_specs: how each array of one replica that it returns is sharded.
          is_own: whether each that it returns differs between replicas.
        """
        lead = lambda is_own, spec: jax.P(self.axis_name, *spec) if is_own else spec

        @jax.custom_batching.custom_vmap
        def escaped(updates: Any, state: Any, *others: Any) -> Any:
            # Never run: it shows of which shapes the results are.
            return updates, state

        @escaped.def_vmap
        def of_all_replicas(replicas: int, is_batched: Any, *given: Any) -> Any:
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


def cut(shape: Sequence[int], spec: jax.P, mesh: Any, axes: Sequence[str]) -> Cut:
    """Cut a leaf that is sharded by `spec` along all other `axes` of `mesh`, too."""
    parts = [axis_names(x) for x in spec]
    parts += [()] * (len(shape) - len(parts))
    slices = lambda at: math.prod(mesh.shape[name] for name in parts[at])
    copies: list[str] = []
    for name in [x for x in axes if not any(x in part for part in parts)]:
        is_even = lambda at, more: shape[at] % (slices(at) * more) == 0
        fits = [i for i in range(len(shape)) if is_even(i, mesh.shape[name])]
        if fits:
            # Slices along an axis that is cut already stay whole rows or columns.
            at = max(fits, key=lambda at: (slices(at) > 1, shape[at]))
            parts[at] = (*parts[at], name)
        else:
            copies.append(name)
    return Cut(jax.P(*(part or None for part in parts)), tuple(copies))


def axes_and_slices(
    shardings: Any, axis_name: AxisName, fast_axis_name: AxisName
) -> dict[str, Any]:
    """Return the components `fast_axis_name` and `slices` of `gravac.transform`.

    Args:
      shardings: a pytree of arrays on a mesh, or of `jax.NamedSharding`; without leaves
        it says nothing.
      axis_name: the slow axis, or axes.
      fast_axis_name: the fast axis, if there are no `shardings`.
    """
    if not jax.tree.leaves(shardings):
        return {"fast_axis_name": fast_axis_name, "slices": None}
    named = _arrays.named_leaves(shardings)
    each = [getattr(x, "sharding", x) for _, x in named]
    meshes = {x.mesh for x in each if isinstance(x, jax.NamedSharding)}
    if len(meshes) != 1:
        raise ValueError(
            f"`shardings` must be the params as they lie on one mesh, or their"
            f" jax.NamedSharding, got {len(meshes)} meshes, and"
            f" {sorted({type(x).__name__ for x in each})}: take them outside of jit."
        )
    mesh = meshes.pop()
    if fast_axis_name is not None:
        raise TypeError(
            f"give `fast_axis_name` or `shardings`, not both, got {fast_axis_name!r}"
            f" and {mesh}: `shardings` tells the other axes."
        )
    _refuse.mesh(mesh, axis_name)
    specs = tuple(getattr(x, "spec", jax.P()) for x in each)
    for (path, _), lies, spec in zip(named, each, specs, strict=True):
        if _refuse.names_in(spec) & {*axis_names(axis_name)}:
            _refuse.cut(path, lies, axis_name)
    slices = Slices(mesh, axis_name, specs)
    inner = slices.axes or None  # without other axes nothing is cut
    return {"fast_axis_name": inner, "slices": inner and slices}
