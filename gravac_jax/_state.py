"""What the transform carries from step to step, and how to find it in any pytree."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from gravac_jax._info import StepInfo

PAST_STEPS = 8  # how late a measured step time may come; arbitrary


class LocalState(NamedTuple):
    """The per-replica part: every leaf differs from replica to replica.

    `init` gives the local form below. Placed on a mesh every leaf has a leading axis
    of replicas, sharded over them, and inside shard_map one of length 1.

    Attributes:
      replica: `[]` int32, which replica this is; -1 before the first step.
      memory: one state per bucket.
      exchange: one state per bucket.
    """

    replica: jax.Array
    memory: Any
    exchange: Any


class TransformState(NamedTuple):
    """The state of `gravac.transform`.

    Attributes:
      steps: `[]` int32, updates so far, skipped ones included.
      layout: `[pieces]` int32, entries of each compressed leaf, in order, cut where a
        bucket ends; a state with others is refused.
      local: what differs between replicas.
      rung: `[]` int32, that of the next step.
      controller: the controller's state.
      past_rungs: `[8]` int32, the rung of step s at s modulo 8; the number of rungs
        where nothing was sent.
      info: what a human wants to know.
    """

    steps: jax.Array
    layout: jax.Array
    local: LocalState
    rung: jax.Array
    controller: Any
    past_rungs: jax.Array
    info: StepInfo


def is_transform_state(x: Any) -> bool:
    """Whether `x` is the state of a `gravac.transform`."""
    return isinstance(x, TransformState)


def find(tree: Any) -> list[TransformState]:
    """Every transform state in `tree`."""
    leaves = jax.tree.leaves(tree, is_leaf=is_transform_state)
    return [x for x in leaves if is_transform_state(x)]


def _is_local(x: Any) -> bool:
    # flax.nnx.split turns NamedTuples into mappings from their fields.
    names = {"replica", "memory"}
    return isinstance(x, LocalState) or (isinstance(x, Mapping) and names <= set(x))


def map_local(
    tree: Any,
    local: Callable[[LocalState], Any],
    shared: Callable[[Any], Any],
) -> Any:
    """`tree` with `local` applied to per-replica states, `shared` to other leaves."""
    return jax.tree.map(
        lambda x: local(x) if _is_local(x) else shared(x), tree, is_leaf=_is_local
    )


def placed_replicas(local: Any) -> int | None:
    """The length of the leading axis of replicas; None in the local form."""
    replica = local["replica"] if isinstance(local, Mapping) else local.replica
    shape = jax.tree.leaves(replica)[0].shape
    return shape[0] if shape else None
