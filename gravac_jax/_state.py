"""What the transform carries from step to step, and how to find it in any pytree."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _chain_checks, _step_checks
from gravac_jax._comm import Comm
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
      ladder: `[rungs]` float32, the factors.
      layout: `[pieces, 2]` int32, which of all leaves a piece of a bucket is of, and
        how many entries it has; in order. A state with more or fewer is refused.
      local: what differs between replicas.
      dense: the memory of the leaves that go dense.
      rung: `[]` int32, that of the next step.
      controller: the controller's state.
      past_rungs: `[8]` int32, the rung of step s at s modulo 8; the number of rungs
        where nothing was sent.
      info: what a human wants to know.
    """

    steps: jax.Array
    ladder: jax.Array
    layout: jax.Array
    local: LocalState
    dense: Any
    rung: jax.Array
    controller: Any
    past_rungs: jax.Array
    info: StepInfo


def is_transform_state(x: Any) -> bool:
    """Whether `x` is the state of a `gravac.transform`."""
    return isinstance(x, TransformState)


def find(tree: Any) -> list[TransformState]:
    """Every transform state in `tree`."""
    return _instances(tree, TransformState)


def _instances(tree: Any, kind: Any) -> list[Any]:
    """Every instance of a class, or of several, in `tree`."""
    is_one = lambda x: isinstance(x, kind)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_one) if is_one(x)]


def _is_local(x: Any) -> bool:
    # flax.nnx.split turns NamedTuples into mappings from their fields.
    names = {"replica", "memory"}
    return isinstance(x, LocalState) or (isinstance(x, Mapping) and names <= set(x))


def locals_of(tree: Any) -> list[Any]:
    """What differs per replica, wherever it is, also in what nnx.split makes."""
    return list(filter(_is_local, jax.tree.leaves(tree, is_leaf=_is_local)))


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


def enter(state: Any, expected: Any, comm: Comm) -> LocalState:
    """What differs per replica in its local form, whichever form it came in.

    Args:
      state: what came.
      expected: its shapes, in the local form.
      comm: those who own a state each.

    Raises:
      ValueError: if the state is of other shapes, or not placed where it must be.
    """
    if not is_transform_state(state):
        _step_checks.state_matches(state, expected)
    local = state.local
    if placed_replicas(local) is not None:
        is_mine = all(x.shape[:1] == (1,) for x in jax.tree.leaves(local))
        local = jax.tree.map(lambda x: x[0], local) if is_mine else local
    elif comm.is_shared(local):
        _step_checks.is_placed(None, comm.replicas)
    _step_checks.state_matches(state._replace(local=local), expected)
    return comm.cast(local._replace(replica=comm.replica()))


def leave(local: LocalState, like: LocalState) -> LocalState:
    """The state in the form in which it came."""
    if placed_replicas(like) is None:
        return local
    return jax.tree.map(lambda x: x[None], local)


def credit(
    state: TransformState, rungs: int, step_seconds: Any, measured_step: Any
) -> tuple[jax.Array, jax.Array]:
    """Enter a measured time at the rung of the step that it was measured at.

    Returns:
      `[rungs]` float32, the time there and 0 elsewhere; and 1 there, 0 elsewhere.
    """
    seconds = _step_checks.scalar(step_seconds, jnp.nan, jnp.float32, "step_seconds")
    step = _step_checks.scalar(
        measured_step, state.steps - 1, jnp.int32, "measured_step"
    )
    age = state.steps - step
    is_time = jnp.isfinite(seconds) & (seconds > 0)
    is_known = is_time & (age >= 1) & (age <= PAST_STEPS)
    is_here = is_known & (jnp.arange(rungs) == state.past_rungs[step % PAST_STEPS])
    return jnp.where(is_here, seconds, 0.0), is_here.astype(jnp.float32)


# What a memory keeps, and the state of Optax that keeps it too.
_TWICE = {
    "velocity": optax.TraceState,
    "first_moment": optax.TraceState,
    "second_moment": optax.ScaleByAdamState,
}


def check_momentum(state: Any) -> None:
    """Raise if an optimizer keeps what the memory of its transform keeps already."""
    for name, kind in _TWICE.items():
        mine = [x for ours in find(state) for x in ours.local.memory]
        owners = [type(x).__name__ for x in mine if hasattr(x, name)]
        if owners and _instances(state, kind):
            what = name.replace("_", " ")
            _chain_checks.single_momentum(owners[0].removesuffix("State"), what)


# They make whole steps of parts.
_NORMALIZED = (
    optax.FactoredState,  # Adafactor
    optax.ScaleByAdamState,
    optax.ScaleByAdanState,
    optax.ScaleByAmsgradState,
    optax.ScaleByBeliefState,
    optax.ScaleByLionState,
    optax.ScaleByNovogradState,
    optax.ScaleByRmsState,
    optax.ScaleByRssState,  # Adagrad
    optax.ScaleByRStdDevState,
)


def check_linear(state: Any) -> None:
    """Raise if an optimizer is known not to be linear in its updates."""
    for x in _instances(state, _NORMALIZED):
        _chain_checks.linear(type(x).__name__)


_REMEMBERING = (optax.TraceState, optax.EmaState, *_NORMALIZED)

# They keep gradients, or decide by them, before what they are around sees them.
_WRAPPERS = (optax.MultiStepsState, optax.ApplyIfFiniteState)


def check_order(chain: tuple[Any, ...]) -> None:
    """Raise if something that remembers gradients comes before the transform."""
    at = [is_transform_state(part) for part in chain].index(True)
    for before in _instances(chain[:at], _REMEMBERING):
        _chain_checks.comes_first(type(before).__name__)


def check_chains(tree: Any) -> None:
    """Raise if an optimizer in `tree`, which may hold several, is wrongly put up."""
    for wrapper in _instances(tree, _WRAPPERS):
        if find(wrapper):
            _chain_checks.outermost(type(wrapper).__name__.removesuffix("State"))

    def is_chain(x: Any) -> bool:
        parts = x.values() if type(x) is dict else x if type(x) is tuple else ()
        return any(map(is_transform_state, parts))

    for chain in filter(is_chain, jax.tree.leaves(tree, is_leaf=is_chain)):
        check_momentum(chain)
        if type(chain) is tuple:
            check_order(chain)
