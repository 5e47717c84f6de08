"""What a step knows before it begins."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _info, _state, _step_checks
from gravac_jax._buckets import Buckets
from gravac_jax._collectives import Axes, Comm
from gravac_jax._controllers.base import kinds_of_steps
from gravac_jax._state import LocalState, TransformState
from gravac_jax._step.components import Components
from gravac_jax._step.values import Setting


def enter(
    components: Components,
    buckets: Buckets,
    updates: Any,
    state: Any,
    params: Any,
    is_asked: bool,
) -> tuple[Axes, LocalState]:
    """Check everything that came, before anything is changed.

    `is_asked` says that there is no gradient: something is delivered or received.
    """
    slow, fast = Comm(components.axis_name), Comm(components.dense_axis_name)
    axes = Axes(slow, fast, components.is_sharded, is_cut=components.slices is not None)
    _step_checks.update.bound_axis(axes.both.axis_name, "update")
    if not is_asked:
        axes.both.check_local(updates)
    if params is None:
        if not is_asked:
            _check_needs_no_params(components)
    elif not axes.is_cut:
        fast.check_sharded(params, buckets.is_compressed, components.is_sharded)
    expected = jax.eval_shape(lambda: components.initial(buckets))
    return axes, _state.enter(state, expected, axes.owners)


def _check_needs_no_params(components: Components) -> None:
    if components.weight_decay:
        _step_checks.update.params_given(None, "weight_decay")
    if components.memory.needs_params:
        _step_checks.update.params_given(None, "memory")


def setting_of(
    components: Components,
    axes: Axes,
    buckets: Buckets,
    state: TransformState,
    rung: int | None,
) -> Setting:
    """Return what the step knows, but for what `update` was given."""
    exchanges, controller = components.shaped(buckets), components.controller
    replicas = axes.slow.replicas
    _info.warn_if_dense(buckets, exchanges, controller.ladder, replicas)
    # Devices that share a replica send other words, so that figures which ride with
    # them would not be known to be the same on all of them.
    rides = axes.fast.axis_name is None
    return Setting(
        components=components,
        axes=axes,
        buckets=buckets,
        exchanges=exchanges,
        tables=_info.tables(buckets, exchanges, controller, replicas, rides),
        looks=controller.looks(state.steps, state.info.local_steps),
        key=jax.random.fold_in(jax.random.key(components.seed), state.steps),
        state=state,
        rung=_rung(0 if controller.is_fixed else rung, state, axes.both),
        rides=rides,
    )


def _rung(known: int | None, state: TransformState, comm: Comm) -> jax.Array | np.int32:
    """Return the rung of this step."""
    if known is not None:
        return np.int32(known)
    rung = state.ahead[0]
    if not comm.is_simulated or comm.is_known_alike(rung):
        return rung
    # vmap would run the branches of all rungs if replicas had a rung each.
    return jnp.int32(comm.mean(comm.of_first(rung)) + 0.5)


def credit(
    components: Components,
    state: TransformState,
    step_seconds: Any,
    measured_step: Any,
) -> tuple[jax.Array, jax.Array]:
    """Assign a measured time to its kind of step, or warn that times are guessed."""
    controller = components.controller
    if step_seconds is None and components.wire is None and controller.uses_seconds:
        _step_checks.update.warn_of_guess(controller)
    kinds = kinds_of_steps(controller)
    return _state.credit(state, kinds, step_seconds, measured_step)
