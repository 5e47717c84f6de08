"""A delivery, which is no step: what is held back, without a gradient."""

import jax
import jax.numpy as jnp

from gravac_jax._buckets import Buckets
from gravac_jax._collectives import Axes
from gravac_jax._residuals import Delivery
from gravac_jax._state import LocalState
from gravac_jax._step.components import Components
from gravac_jax._step.phases import held, own_minus_shared


def deliver(
    components: Components,
    delivery: Delivery,
    local: LocalState,
    buckets: Buckets,
    axes: Axes,
) -> tuple[tuple[jax.Array, ...], LocalState]:
    """Return what is held back of each part, and the state after the delivery.

    Args:
      components: what the transform is made of.
      delivery: "mean" sends what is held back to all replicas and empties the memory.
        "own" returns this replica's part and "nothing" returns zeros; both leave the
        state as it is.
      local: this replica's state, in its local form.
      buckets: the leaves that it belongs to.
      axes: the other replicas.
    """
    memory = components.memory
    parts = held(memory, local, buckets).parts
    if delivery == "own":
        parts = own_minus_shared(memory, local, buckets)
    emptied = [
        memory.retain(jnp.zeros_like(x), x, state)
        for x, state in zip(parts, local.memory, strict=True)
    ]
    # Dense leaves that wait do so on all devices of a replica alike.
    *flat, dense = parts
    dense = axes.copies.mean(dense) if components.waits else jnp.zeros(dense.shape)
    if delivery == "mean":
        local = local._replace(memory=tuple(emptied))
        return (*axes.slow.mean(flat), axes.slow.mean(dense)), local
    if delivery == "nothing":
        flat, dense = jax.tree.map(jnp.zeros_like, (flat, dense))
    return (*flat, dense), local
