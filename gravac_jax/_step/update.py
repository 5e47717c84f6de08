"""`update` of the transform: check what came, then take a step or deliver."""

import contextvars
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gravac_jax import _refuse
from gravac_jax._memory.base import Memory
from gravac_jax._network import Axes, Comm
from gravac_jax._step import plain_jit, states
from gravac_jax._step.components import Components
from gravac_jax._step.phases import Parts, Step, held_by
from gravac_jax._step.states import PAST_STEPS, LocalState, TransformState

# Over which axis or axes, and fast axis, the step that is traced splits its batch.
SPLIT_OVER = contextvars.ContextVar[Any]("SPLIT_OVER", default=None)
# For a warning alone: how deliveries were asked for by any transform so far, since
# optax.inject_hyperparams makes a new one in each step.
ASKED: set[str | None] = set()


@dataclasses.dataclass
class Delivery:
    """What `_loop/` asks of the transform, in place of a step or beside one.

    Attributes:
      how: "mean" sends what is held back to all replicas, "own" returns this replica's
        part, and "identity" hands on the updates, to look around the transform. None
        takes a step.
      share: a factor of what "own" and "identity" return.
      components: those of the transform that answered; None before.
      after: the state after a step, with the mean of `own_loss`; None before, and
        with a delay.
    """

    how: str | None
    share: Any = 1
    components: Components | None = None
    after: Any = None


def update(
    components: Components,
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    deliver: Delivery | None = None,
    at: str | None = None,
    rung: int | None = None,
    is_due: bool | None = None,
    step_seconds: Any = None,
    steps_ago: Any = None,
    own_loss: Any = None,
    **_: Any,
) -> tuple[Any, TransformState]:
    """Take one step, or deliver what is held back: `update` of `gravac.transform`."""
    how = (delivery := deliver or Delivery(None)).how
    delivery.components = components
    ASKED.add(how)
    if how == "identity":
        return optax.tree.scale(delivery.share, updates), _delivered(state)
    is_mapped = _refuse.is_bound(components.axis_name)
    unsummed = () if is_mapped else plain_jit.unsummed_axes(components, updates)
    _refuse.gradients(updates)
    if not states.is_transform_state(state):
        raise ValueError(
            f"`update` was given a {type(state).__name__} for the transform's state:"
            f" write tx.update(grads, opt_state, params), or call init again."
        )
    buckets = components.plan(updates, params if how else None)
    slow, fast = Comm(components.axis_name), Comm(components.fast_axis_name)
    axes = Axes(slow, fast, is_sliced=components.slices is not None)

    def run(updates: Any, state: Any, params: Any, known: Any) -> Any:
        """Work with what a device owns: check what came, before anything is changed."""
        _refuse.bound_axis(axes.both.axis_name, "update")
        if not how:
            _check_axes(components, updates)
            _check(components, params, at, rung)
            axes.both.check_local(updates)
        if params is not None and not axes.is_sliced:
            fast.check_whole(params)
        expected = jax.eval_shape(lambda: components.initial(buckets))
        local = states.enter(state, expected, axes.both if axes.is_sliced else slow)
        if how:
            parts, local = _held(how, components.memory, slow, local)
            after = state._replace(local=states.leave(local, state.local))
            return buckets.unpack(parts), _delivered(after)
        is_own = at == "own" or (at is None and components.memory.is_at_own_params)
        *measured, loss = known
        times = _times(components, state, *measured)
        taken = _rung(rung, components.controller.reach(is_own), state, axes.both)
        step = Step(
            components, axes, buckets, state, params, is_own, is_due, times, loss, taken
        )
        arrived, after = step.take(*step.prepare(updates), local)
        slot = jnp.arange(PAST_STEPS) == state.steps % PAST_STEPS
        return buckets.unpack(arrived), after._replace(
            steps=jnp.asarray(optax.safe_increment(state.steps)),
            local=states.leave(after.local, state.local),
            past_rungs=jnp.where(slot, after.info.rung, state.past_rungs),
        )

    sliced = components.slices and functools.partial(components.slices.run, run, how)
    whole = sliced or plain_jit.on_devices(run, unsummed)
    # An exchange that comes first, with a delay, must not wait for the loss.
    told_loss = None if components.delay else own_loss
    known = step_seconds, steps_ago, _scalar(told_loss, 0, jnp.float32, "own_loss")
    found, after = whole(updates, state, params, known)
    delivery.after = None if components.delay else after
    # `own_params` takes the derivative by the share.
    return optax.tree.scale(delivery.share, found) if how == "own" else found, after


def _check_axes(components: Components, updates: Any) -> None:
    """Refuse a step that lacks an axis of the transform, or divides over another."""
    own = components.axis_name, components.fast_axis_name
    over = SPLIT_OVER.get() or own
    known, split = ([{*_refuse.axis_names(x)} for x in axes] for axes in (own, over))
    given = set.union(*split)
    lacking = tuple(sorted(given.difference(*known)))
    is_alike = not lacking or Comm(lacking).is_known_alike(updates)
    # The state of each replica lies along the step's axis.
    fits = is_alike and known[0] <= split[0] and known[1] <= given
    if components.slices is None and not fits:
        raise ValueError(
            f"gravac.transform has the axes {own}, got a step over {over}: give both"
            f" the same `axis_name` and `fast_axis_name`."
        )


def _check(components: Components, params: Any, at: Any, rung: Any) -> None:
    """Refuse a wrong `at` or `rung`, or no params; warn of the wrong gradients."""
    _refuse.one_of(at, "at", (None, "own", "shared"))
    if at is None and components.needs_own_params and "own" not in ASKED:
        _refuse.warn(
            "gradients are not taken at gravac.own_params(tx, params, opt_state), which"
            ' costs much here: take them there, or if you cannot, pass at="shared".'
        )
    if rung is not None:
        top = len(components.controller.ladder) - 1
        _refuse.number(rung, "rung", is_whole=True, low=0, high=top)
    if params is None and components.weight_decay:
        _refuse.no_params("weight_decay")
    if params is None and components.memory.needs_params:
        _refuse.no_params("memory")


def _delivered(state: TransformState) -> TransformState:
    """Return the state after a delivery, which `gravac.guard` must not undo."""
    is_finite = jnp.ones_like(state.info.is_finite)
    return state._replace(info=state.info._replace(is_finite=is_finite))


def _held(
    how: str, memory: Memory, comm: Comm, local: LocalState
) -> tuple[Parts, LocalState]:
    """Return what is held back, as buckets and leaves, and the state after a delivery.

    "mean" sends what is held back to all replicas and empties the memory. "own" returns
    this replica's part, and leaves the state as it is.
    """
    parts = held_by(memory, local)
    if how == "mean":
        empty = jax.tree.map(jnp.zeros_like, parts)
        emptied = tuple(map(memory.hold, empty, parts, local.memory))
        local = local._replace(memory=emptied)
        parts = comm.mean(parts)
    return parts, local


def _times(
    components: Components, state: TransformState, step_seconds: Any, steps_ago: Any
) -> jax.Array:
    """Return the `times` of `Told`: zeros if the time or its step is not known.

    Warn if times are guessed.
    """
    controller = components.controller
    if step_seconds is None and components.network is None and controller.uses_seconds:
        _refuse.warn(
            f"{type(controller).__name__} is told no step times, and guesses 10 ms of"
            f" computation and 1 Gbit/s: train by gravac.train_step, pass what"
            f" gravac.StepClock measures to tx.update(..., step_seconds=...), or write"
            f" gravac.transform(network=gravac.WireCost(...))."
        )
    seconds = _scalar(step_seconds, 0, jnp.float32, "step_seconds")
    ago = _scalar(steps_ago, 1, jnp.int32, "steps_ago")
    kind = state.past_rungs[(state.steps - ago) % PAST_STEPS]
    is_known = jnp.isfinite(seconds) & (seconds > 0) & (ago >= 1) & (ago <= PAST_STEPS)
    is_here = is_known & (jnp.arange(components.kinds) == kind)
    return jnp.stack([jnp.where(is_here, seconds, 0.0), is_here.astype(jnp.float32)])


def _rung(
    known: int | None, reach: tuple[int, ...], state: TransformState, comm: Comm
) -> jax.Array | np.int32:
    """Return the rung of this step: the one decided.

    If that is out of reach it is the next below it, or else the lowest.
    """
    if known is not None or len(reach) == 1:
        return np.int32(max((x for x in reach if x <= (known or 0)), default=reach[0]))
    rung = state.next_rungs[0]
    if comm.is_simulated and not comm.is_known_alike(rung):
        # vmap would run the branches of all rungs if replicas had a rung each.
        rung = comm.sum(comm.owned(rung))
    if len(reach) == len(state.ladder):
        return rung
    # Another program may have decided, with gradients at other params.
    rungs = jnp.asarray(reach)
    return jnp.max(rungs, where=rungs <= rung, initial=reach[0])


def _scalar(value: Any, default: Any, dtype: Any, name: str) -> jax.Array:
    """Return `value`, or `default` for None, as a `[]` array of `dtype`."""
    array = jnp.asarray(default if value is None else value)
    if array.shape != ():
        raise ValueError(
            f"`{name}` must be one number, or None if unknown, got shape {array.shape}."
        )
    return array.astype(dtype)
