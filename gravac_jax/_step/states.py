"""The state that the transform carries, and how to find it in any pytree."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from gravac_jax import _refuse
from gravac_jax._network import Comm
from gravac_jax._step.step_info import StepInfo

Change = Callable[[Any], Any]
PAST_STEPS = 8  # how late a measured step time may come; arbitrary


class Told(NamedTuple):
    """What a replica tells the others about its own gradient.

    Attributes:
      bad: `[]` float32, 1 if it is left out.
      gradient_energy: `[]` float32, its energy.
      sample: `[]` float32 each, the energy of a few of its entries, and the contrast of
        that energy, whose mean is 0 if all replicas have the same gradient.
      gradient_energies: `[rungs]` float32, as in `Evidence`; () if the controller
        never asks.
      times: `[2, kinds]` float32, a measured step time at the kind of its step, and 1
        there; else 0. Kinds are the rungs, and with rounds local steps.
      norms: what `norms.told` says of the last own step, `[rows]` float32 a part; () if
        the memory keeps no norm.
    """

    bad: jax.Array
    gradient_energy: jax.Array
    sample: tuple[jax.Array, jax.Array]
    gradient_energies: Any
    times: jax.Array
    norms: tuple[jax.Array, ...]


class Round(NamedTuple):
    """How long rounds are, as all replicas have agreed.

    Attributes:
      length: `[]` int32, steps of this round, of which the last one exchanges.
      next_length: `[]` int32, steps of the next one.
      exchanges: `[]` int32, rounds before this one.
    """

    length: jax.Array
    next_length: jax.Array
    exchanges: jax.Array


class LocalState(NamedTuple):
    """The part of the state that differs from replica to replica.

    `init` returns the local form below. Placed on a mesh, every leaf has a leading axis
    of replicas, sharded over them; inside shard_map that axis has length 1.

    Attributes:
      replica: `[]` int32, which replica this is; -1 before the first step.
      told: with a delay or rounds, what the next exchange tells about the gradients
        since the last one.
      memory: the memory's states, one a bucket, and one of the leaves that go dense.
      encodings: their states, a dict by class of encoding for each bucket.
      norms: as `norms.learnt` returns it, `[2, rows]` float32 for each state of
        `memory`; () if it keeps no norm. The same on all replicas; where leaves are
        cut, each device has those of its own slices.
    """

    replica: jax.Array
    told: Any
    memory: Any
    encodings: Any
    norms: Any


class TransformState(NamedTuple):
    """The state of `gravac.transform`.

    Attributes:
      steps: `[]` int32, updates so far, including those that `gravac.guard` skipped.
      ladder: `[rungs]` uint32, a checksum of the name of each encoding.
      layout: `[pieces, 3]` int32, for each piece of a bucket, in order, and then each
        leaf that goes dense: the index of the leaf, the number of entries, and the
        devices among which the exchange cuts a leaf, or 1. The last piece of a bucket,
        and of the leaves that go dense, is padding, with -1 for a leaf. `update`
        refuses a state with another number of pieces.
      local: what differs between replicas.
      decided: `[]` int32, the last decision: the rung of the third exchange from here.
      next_rungs: `[2]` int32, the rungs of the next two exchanges, as all replicas have
        agreed: the decisions of the two exchanges before the last one. A step that
        `gravac.guard` skips moves them on, too.
      controller: the controller's state.
      past_rungs: `[8]` int32, the rung of step s at index s modulo 8; the number of
        rungs if the step was local, and -1 before the first step.
      round: how long rounds are, if there are any.
      loss: `[]` float32, the mean over replicas of the `own_loss` that the last
        exchange was given, or 0.
      info: what a human wants to know.
    """

    steps: jax.Array
    ladder: jax.Array
    layout: jax.Array
    local: LocalState
    decided: jax.Array
    next_rungs: jax.Array
    controller: Any
    past_rungs: jax.Array
    round: Any
    loss: jax.Array
    info: StepInfo


def is_transform_state(x: Any) -> bool:
    """Return whether `x` is the state of a `gravac.transform`."""
    return isinstance(x, TransformState)


def transform_states(tree: Any) -> list[TransformState]:
    """Return every transform state in `tree`."""
    found = jax.tree.leaves(tree, is_leaf=is_transform_state)
    return list(filter(is_transform_state, found))


def _is_local(x: Any) -> bool:
    # flax.nnx.split turns NamedTuples into mappings from fields that are not empty.
    names = {"replica", "memory"}
    return isinstance(x, LocalState) or (isinstance(x, Mapping) and names <= set(x))


def moved(state: Any, fresh: Any) -> Any:
    """Return a state in which controllers forget what other devices make untrue."""
    can_move = lambda x: hasattr(x, "moved")
    move = lambda x, fresh: x.moved(fresh) if can_move(x) else x
    return jax.tree.map(move, state, fresh, is_leaf=can_move)


def locals_of(tree: Any) -> list[Any]:
    """Return every per-replica state in `tree`, also in what nnx.split makes."""
    return list(filter(_is_local, jax.tree.leaves(tree, is_leaf=_is_local)))


def map_local(tree: Any, local: Change, shared: Change) -> Any:
    """Apply `local` to per-replica states of `tree`, and `shared` to other leaves."""
    change = lambda x: local(x) if _is_local(x) else shared(x)
    return jax.tree.map(change, tree, is_leaf=_is_local)


def change_local(change: Change, tree: Any) -> Any:
    """Apply `change` to each per-replica leaf of `tree`."""
    return map_local(tree, lambda x: jax.tree.map(change, x), lambda x: x)


def per_leaf(tree: Any, local: Any, shared: Any) -> Any:
    """Return `local` for each per-replica leaf of `tree`, `shared` for all others."""
    each = lambda state: jax.tree.map(lambda _: local, state)
    return map_local(tree, each, lambda _: shared)


def placed_replicas(local: Any) -> int | None:
    """Return the length of the leading axis of replicas; None in the local form."""
    replica = local["replica"] if isinstance(local, Mapping) else local.replica
    shape = jax.tree.leaves(replica)[0].shape
    return shape[0] if shape else None


def enter(state: Any, expected: Any, comm: Comm) -> LocalState:
    """Return the per-replica state in its local form, whichever form it came in.

    Args:
      state: the transform's state.
      expected: its shapes, in the local form.
      comm: the replicas or devices that each own a per-replica state.

    Raises:
      ValueError: if the state has other shapes, or is not placed where it must be.
    """
    _refuse.pure(state.steps)
    local = state.local
    if placed_replicas(local) is not None:
        is_mine = all(x.shape[:1] == (1,) for x in jax.tree.leaves(local))
        local = jax.tree.map(lambda x: x[0], local) if is_mine else local
    elif comm.is_shared(local):
        _refuse.placed(None, comm.replicas)
    _refuse.state_of_others(state._replace(local=local), expected)
    return comm.cast(local._replace(replica=comm.replica()))


def leave(local: LocalState, like: LocalState) -> LocalState:
    """Return the per-replica state in the form in which `like` came."""
    if placed_replicas(like) is None:
        return local
    return jax.tree.map(lambda x: x[None], local)
