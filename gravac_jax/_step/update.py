"""The whole step, from local gradients to the update and the next decision."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks, _collectives, _state, _step_checks
from gravac_jax._buckets import Buckets
from gravac_jax._residuals import Delivery
from gravac_jax._state import LocalState, Told, TransformState
from gravac_jax._step import phases
from gravac_jax._step.components import Components
from gravac_jax._step.deliver import deliver as deliver_held
from gravac_jax._step.enter import credit, enter, setting_of
from gravac_jax._step.values import (
    Arrived,
    Decision,
    Fed,
    Gradient,
    Setting,
    Taken,
)


def update(
    components: Components,
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    step_seconds: Any = None,
    measured_step: Any = None,
    **asked: Any,
) -> tuple[Any, TransformState]:
    """Take one step: `update` of `gravac.transform`."""
    _step_checks.update.bound_axis(components.axis_name, "update")
    _step_checks.update.gradients(updates)
    like = params if asked.get("deliver") else None
    plan = components.plan(updates, like)
    step = functools.partial(_update, components, plan, **asked)
    times = {"step_seconds": step_seconds, "measured_step": measured_step}
    if components.slices is None:
        return step(updates, state, params, **times)
    given = updates, state, params, times
    return components.slices.run(step, asked.get("deliver"), given)


def _update(
    components: Components,
    buckets: Buckets,
    updates: Any,
    state: Any,
    params: Any,
    *,
    step_seconds: Any,
    measured_step: Any,
    is_due: bool | None = None,
    rung: int | None = None,
    deliver: Delivery | None = None,
    receives: bool = False,
    arrived: Arrived | None = None,
    own_params: Any = None,
    at_own_params: bool = False,
    **ignored: Any,
) -> tuple[Any, TransformState]:
    """Take one step with what a device owns.

    With a delay, a step may be taken in two: one that only `receives` and leaves
    `TransformState.arrived`, and one that is given it, with the gradients and the
    `own_params` where they were taken.
    """
    del ignored
    if rung is not None:
        _step_checks.update.known_rung(rung, len(components.controller.ladder))
    _checks.flag(at_own_params, "at_own_params")
    if receives and not components.delay:
        _step_checks.update.needs_delay()
    is_asked = deliver is not None or receives
    axes, local = enter(components, buckets, updates, state, params, is_asked)
    if deliver is not None:
        parts, local = deliver_held(components, deliver, local, buckets, axes)
        # gravac.guard must not mistake a delivery for a bad step.
        info = state.info._replace(is_finite=jnp.ones_like(state.info.is_finite))
        local = _state.leave(local, state.local)
        return buckets.unpack(parts), state._replace(local=local, info=info)
    setting = setting_of(components, axes, buckets, state, rung)._replace(
        params=params,
        own_params=None if own_params is None else buckets.pack(own_params),
        times=credit(components, state, step_seconds, measured_step),
        is_due=is_due,
        at_own_params=at_own_params,
    )
    if components.waits and arrived is None:
        local = phases.add_times(local, setting.times)
    if receives:
        arrived, local = _send_held(local, setting)
        local = _state.leave(local, state.local)
        zeros = jax.tree.map(jnp.zeros_like, updates)
        return zeros, state._replace(local=local, arrived=arrived)
    gradient = phases.prepare(updates, setting)
    return phases.report(_take(gradient, local, arrived, setting), setting)


def _take(
    gradient: Gradient, local: LocalState, arrived: Arrived | None, setting: Setting
) -> Taken:
    """Feed, exchange and decide, in the order that delay and rounds ask."""
    keep = lambda local: phases.keep(gradient, local, setting)
    if arrived is not None:
        return Taken(arrived, keep(local), phases.decide(arrived, setting))
    if not setting.components.waits:
        fed = phases.feed(gradient, local, setting)
        told = phases.tell(gradient, setting.times, setting)
        arrived, local = _send(told, fed, local, setting)
        return Taken(arrived, local, phases.decide(arrived, setting))
    if not setting.components.delay:
        return _take_held(keep(local), setting)
    taken = _take_held(local, setting)
    before = phases.with_own_params(local, setting)
    return taken._replace(local=phases.keep(gradient, taken.local, before))


def _take_held(local: LocalState, setting: Setting) -> Taken:
    """Exchange what the memory holds, if the step is the last one of a round."""

    def exchange() -> Taken:
        arrived, after = _send_held(local, setting)
        return Taken(arrived, after, phases.decide(arrived, setting))

    if setting.sends is True:
        return exchange()
    nothing = _nothing(jax.eval_shape(exchange).arrived, local, setting)
    if setting.sends is False:
        return nothing
    return _collectives.exchange_if(setting.sends, exchange, nothing)


def _nothing(like: Any, local: LocalState, setting: Setting) -> Taken:
    """Return what comes of a local step: nothing arrives or is decided."""
    state, rungs = setting.state, len(setting.components.controller.ladder)
    arrived = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    as_before = Decision(state.rung, state.controller, state.info.gains)
    return Taken(arrived._replace(rung=jnp.int32(rungs)), local, as_before)


def _send_held(local: LocalState, setting: Setting) -> tuple[Arrived, LocalState]:
    """Send what the memory holds, and what the others have not been told yet."""
    fed = phases.held(setting.components.memory, local, setting.buckets)
    arrived, local = _send(local.told, fed, local, setting)
    return arrived, local._replace(told=jax.tree.map(jnp.zeros_like, local.told))


def _send(
    told: Told, fed: Fed, local: LocalState, setting: Setting
) -> tuple[Arrived, LocalState]:
    """Exchange what was fed, and what all must know."""
    own = phases.figures(told, fed.parts[-1], setting)
    return phases.exchange(fed, own, local, setting)
