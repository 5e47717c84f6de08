"""Gradients that a plain `jit` has not summed yet, on a mesh of Explicit axes.

The gradient of a loss at params that were cast by
`jax.reshard(params, jax.P(reduced={"data"}))` is *unreduced*: each device holds its
part of a sum that no collective has made.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax

from gravac_jax import _refuse
from gravac_jax._network import join
from gravac_jax._refuse import axis_names
from gravac_jax._step.components import Components


def unsummed_axes(components: Components, updates: Any) -> frozenset[str]:
    """Return the axes over which gradients are still to be summed; static.

    Raises:
      ValueError: unless they are all axes of the transform; for `shardings`, and for a
        memory that needs gradients at own params.
    """
    each = [jax.typeof(x).sharding.spec.unreduced for x in jax.tree.leaves(updates)]
    unsummed = frozenset().union(*each)
    if not unsummed or components.slices is not None:
        _refuse.bound_axis(components.axis_name, "update")
    axes = join(components.axis_name, components.fast_axis_name)
    if unsummed != {*axis_names(axes)}:
        raise ValueError(
            f"gravac.transform averages over {axes!r}, got gradients that are still to"
            f" be summed over {sorted(unsummed)}: give it the axes that the batch lies"
            f" along as `axis_name` and `fast_axis_name`."
        )
    if components.memory.is_at_own_params:
        raise ValueError(
            f"{type(components.memory).__name__} needs gradients at each replica's own"
            f" params, which a plain jit cannot hold: run the step by gravac.train_step"
            f" or gravac.data_parallel, without a cast to `reduced`."
        )
    return unsummed


def on_devices(update: Callable, unsummed: Collection[str]) -> Callable[..., Any]:
    """Return `update(updates, state, params, known)` of one device, run on all.

    Args:
      update: takes the gradient of the rows of one device; where JAX has summed a
        leaf's already, that of all rows.
      unsummed: from `unsummed_axes`. If there are none, this is a device already.
    """
    if not unsummed:
        return update

    def on_mesh(*given: Any) -> Any:
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, given)

        def on_device(updates: Any, *others: Any) -> Any:
            # The mean over the rows of one device, and not over all rows.
            own = lambda x, spec: x * jax.lax.axis_size((*spec.unreduced,))
            return update(jax.tree.map(own, updates, specs[0]), *others)

        summed = jax.tree.map(lambda x: jax.P(*x.partitions), specs[0])
        mesh = jax.typeof(jax.tree.leaves(given[0])[0]).sharding.mesh
        how = {"in_specs": specs, "out_specs": (summed, specs[1])}
        # JAX casts nothing from unreduced to varying (0.12.0).
        return jax.shard_map(on_device, mesh=mesh, **how, check_vma=False)(*given)

    return on_mesh
