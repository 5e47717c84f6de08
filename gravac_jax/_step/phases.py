"""The six phases of a step, in the order in which they happen.

1. `prepare` the gradient: fuse it into buckets, clip it, add weight decay.
2. `feed` it to the memory, which adds what was held back. A bad gradient is left out.
3. Note the `figures` that all replicas must know: whether a gradient is bad, the rung.
4. `exchange` both: the buckets at the rung, and these figures.
5. `decide` the rung of a coming step from what this one showed.
6. `report` what was sent.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _arrays, _consistency, _info, _state, _step_checks
from gravac_jax._buckets import Buckets
from gravac_jax._clipping import global_norm
from gravac_jax._collectives import Axes
from gravac_jax._controllers import compression_gain
from gravac_jax._controllers.base import Evidence
from gravac_jax._controllers.cost_model import WireCost
from gravac_jax._error_feedback.base import Memory
from gravac_jax._exchanges.base import Exchanged
from gravac_jax._state import LocalState, Told, TransformState
from gravac_jax._step.values import (
    Agreed,
    Arrived,
    Decision,
    Fed,
    Gradient,
    Setting,
    Taken,
)

# Bound of an entry of an unclipped gradient, so that sums of squares stay finite.
LIMIT = 2.0**50
# Norms that are closer are of the same gradients. Sums of float32 in other orders are.
ALIKE = 1e-6


def prepare(updates: Any, setting: Setting) -> Gradient:
    """Fuse, average over the fast axis, clip, and add weight decay."""
    components, axes, buckets = setting.components, setting.axes, setting.buckets
    parts = _averaged(buckets.pack(updates), axes)
    if components.clip is None:
        bad = _arrays.is_bad(parts, LIMIT)
    else:
        bad = _arrays.is_bad(parts)
        sliced, shared = (parts, ()) if axes.is_cut else (parts[:-1], parts[-1:])
        norm = functools.partial(global_norm, sliced, shared, axes.slices)
        parts = components.clip.clip(parts, norm, axes.slow.replicas)
    if components.weight_decay:
        decay = lambda x, p: x + components.weight_decay * p
        parts = jax.tree.map(decay, parts, buckets.pack(setting.params))
    return Gradient(parts, bad)


def _averaged(parts: tuple[jax.Array, ...], axes: Axes) -> tuple[jax.Array, ...]:
    """Average over the fast axis, unless the compiler has done so."""
    if axes.is_cut:
        return parts
    if not axes.is_sharded:
        return axes.fast.mean(parts)
    # The transpose of gathering a slice sums over the fast axis.
    *flat, dense = parts
    return (*(x / axes.fast.replicas for x in flat), axes.fast.mean(dense))


def feed(gradient: Gradient, local: LocalState, setting: Setting) -> Fed:
    """Add the gradient to what the memory holds back, unless the gradient is bad."""
    components, buckets = setting.components, setting.buckets
    given = (gradient.parts, local.memory)
    if components.memory.needs_params:
        given = (*given, _params_beside(local, setting))
    pairs = zip(components.memories(buckets), zip(*given, strict=True), strict=True)
    fed = [memory.compensate(*x) for memory, x in pairs]
    parts, states = zip(*fed, strict=True)
    # One device of a replica may see an entry that the others do not.
    is_bad = setting.axes.slices.mean(gradient.bad) != 0
    unfed = held(components.memory, local, buckets)
    # This is no branch, because XLA would copy the memory in and out of one.
    return _arrays.where(is_bad, unfed, Fed(parts, states))


def with_own_params(local: LocalState, setting: Setting) -> Setting:
    """Return the setting with own params, if the memory asks for params.

    They are rounded to the dtypes of the params, as those are at which a gradient is
    taken.
    """
    if not setting.components.memory.needs_params:
        return setting
    more = own_minus_shared(setting.components.memory, local, setting.buckets)
    own = jax.tree.map(jnp.add, setting.buckets.pack(setting.params), more)
    return setting._replace(own_params=setting.buckets.rounded(own))


def _params_beside(local: LocalState, setting: Setting) -> tuple[jax.Array, ...]:
    """Return the params that are own params with what the memory now holds.

    What an exchange has just taken out of the memory is not in the params yet.
    """
    if setting.own_params is None:
        return setting.buckets.pack(setting.params)
    more = own_minus_shared(setting.components.memory, local, setting.buckets)
    return jax.tree.map(jnp.subtract, setting.own_params, more)


def held(memory: Memory, local: LocalState, buckets: Buckets) -> Fed:
    """Return what the memory holds back, to which no gradient was added."""
    pairs = zip(local.memory, buckets.part_sizes, strict=True)
    return Fed(tuple(memory.held(*x) for x in pairs), local.memory)


def own_minus_shared(
    memory: Memory, local: LocalState, buckets: Buckets
) -> tuple[jax.Array, ...]:
    """Return by how much own params are ahead of the shared ones, in parts."""
    parts = held(memory, local, buckets).parts
    return tuple(map(memory.ahead, local.memory, parts))


def keep(gradient: Gradient, local: LocalState, setting: Setting) -> LocalState:
    """Add the gradient to the memory, for a later exchange to send."""
    fed = feed(gradient, local, setting)
    kept = tuple(map(setting.components.memory.keep, fed.parts, fed.memory))
    before = local.told
    told = tell(gradient, (before.seconds, before.timed), setting)
    told = told._replace(bad=jnp.maximum(told.bad, before.bad))
    return local._replace(memory=kept, told=told)


def tell(
    gradient: Gradient, times: tuple[jax.Array, jax.Array], setting: Setting
) -> Told:
    """Return what the other replicas must know of this one's gradient and times."""
    each = [_arrays.energy(x) for x in gradient.parts[:-1]]
    energies = _arrays.total(each), _sampled_energies(gradient, each, setting)
    good = jax.tree.map(lambda x: jnp.where(gradient.bad != 0, 0, x), energies)
    return Told(gradient.bad, good[0], good[1], *times)


def _sampled_energies(
    gradient: Gradient, energies: list[jax.Array], setting: Setting
) -> Any:
    """Estimate the energy of the gradient alone that each rung would send.

    Args:
      gradient: this replica's own.
      energies: those of its buckets, `[]` float32 each.
      setting: what the step knows.

    Returns:
      `[rungs]` float32; zeros in a step that does not look, and () if the controller
      never asks.
    """
    axes, components = setting.axes, setting.components
    ladder = components.controller.ladder
    if not components.controller.samples_gradient:
        return ()
    zeros = jnp.broadcast_to(0 * gradient.bad, (len(ladder),))
    # With a delay the next exchange tells it; otherwise only one that exchanges does.
    looks = setting.looks if components.delay else setting.looks & setting.sends

    def sample() -> jax.Array:
        # Every rung sends the dense leaves, which all devices of a replica hold.
        *flat, dense = gradient.parts
        always = _arrays.energy(dense) / axes.copies.replicas
        sent = [
            exchange.shares(x, ladder, setting.key, axes.slow) * energy
            for exchange, x, energy in zip(
                setting.exchanges, flat, energies, strict=True
            )
        ]
        sampled = always + _arrays.total(sent)
        # A rung that is dense under another name sends what rung 0 sends.
        is_dense = jnp.asarray(setting.tables.factors[: len(ladder)] == 1)
        return jnp.where(is_dense, sampled[0], sampled)

    return _arrays.chosen(looks, sample, zeros)


def add_times(local: LocalState, times: tuple[jax.Array, jax.Array]) -> LocalState:
    """Add a measured time to what the next exchange tells."""
    (seconds, timed), told = times, local.told
    told = told._replace(
        seconds=jnp.where(timed > 0, seconds, told.seconds),
        timed=jnp.maximum(timed, told.timed),
    )
    return local._replace(told=told)


def figures(told: Told, dense: jax.Array, setting: Setting) -> Agreed:
    """Return this replica's part of what all replicas must know.

    Decisions made from the same figures may still differ by a rounding between programs
    that were compiled apart, and different branches would hang. So the rung is agreed
    on, too, before it is taken.
    """
    components, axes, state = setting.components, setting.axes, setting.state
    apart = round_steps = jnp.zeros(0, jnp.float32)
    if components.controller.has_rounds:
        begin = state.steps + 1 + state.round.next_length
        steps = components.controller.round_steps(begin, state.controller)
        round_steps = axes.both.of_first(steps)[None]
    if components.check_every:
        unseen = state.info.local_steps + 1
        apart = _consistency.is_apart(
            setting.params, state.steps, unseen, components.check_every, axes.alike
        )
    return Agreed(
        dense=dense,
        bad=told.bad,
        gradient_energy=told.gradient_energy,
        gradient_energies=told.gradient_energies,
        contrast=axes.slow.contrast(told.gradient_energy),
        rung=axes.both.of_first(state.rung),
        round_steps=round_steps,
        seconds=told.seconds,
        timed=told.timed,
        apart=apart,
    )


def agree(own: Agreed, axes: Axes) -> Agreed:
    """Average what all replicas must know, in one collective."""
    if not axes.is_cut:
        return axes.both.mean(own)
    # Dense leaves are slices, too. XLA joins both means over the slow axis.
    figures = axes.slow.mean(axes.fast.mean(own._replace(dense=())))
    return figures._replace(dense=axes.slow.mean(own.dense))


def _are_alike(agreed: Agreed, setting: Setting) -> jax.Array:
    """Return whether all gradients have the same norm, and are no zeros.

    A clip may give different gradients the same norm, so nothing is said with one.
    """
    is_alike = jnp.abs(agreed.contrast) < ALIKE * agreed.gradient_energy
    is_clipped = setting.components.clip is not None
    return is_alike & (setting.axes.slow.replicas > 1 and not is_clipped)


def exchange(
    fed: Fed, own: Agreed, local: LocalState, setting: Setting
) -> tuple[Arrived, LocalState]:
    """Exchange bucket by bucket, agree, and let the memory keep the rest."""
    components = setting.components
    exchanged, states = _each_bucket(fed, own, local, setting)
    agreed = exchanged[0].figures if setting.rides else agree(own, setting.axes)
    _step_checks.update.averaged_figures(agreed, Agreed, setting.exchanges)
    dense_residual = jnp.zeros_like(fed.parts[-1])  # it went whole
    buckets = setting.buckets.cleared(x.residual for x in exchanged)
    residuals = (*buckets, dense_residual)
    retained = map(components.memory.retain, residuals, fed.parts, fed.memory)
    local = local._replace(memory=tuple(retained), exchange=states)
    means = tuple(x.mean for x in exchanged)
    energy = jnp.zeros((), jnp.float32)
    if components.controller.has_rounds:  # one more pass, but only at a round's end
        energy = _arrays.total(map(_arrays.energy, means))
    mean_energies = _arrays.total(x.mean_energies for x in exchanged)
    energies = setting.axes.slices.mean((mean_energies, energy))
    return Arrived(agreed, jnp.asarray(setting.rung), means, *energies), local


def _each_bucket(
    fed: Fed, own: Agreed, local: LocalState, setting: Setting
) -> tuple[list[Exchanged], tuple[Any, ...]]:
    """Exchange all buckets, the first one with figures; also return their states."""
    results = [
        exchange.exchange(
            compensated,
            before,
            setting.rung,
            ladder=setting.components.controller.ladder,
            key=setting.key,
            comm=setting.axes.slow,
            looks=setting.looks,
            step=setting.turn,
            **({"figures": own} if setting.rides and i == 0 else {}),
        )
        for i, (exchange, compensated, before) in enumerate(
            zip(setting.exchanges, fed.parts[:-1], local.exchange, strict=True)
        )
    ]
    return [x for x, _ in results], tuple(after for _, after in results)


def decide(arrived: Arrived, setting: Setting) -> Decision:
    """Show the evidence to the controller, which picks a rung."""
    components, state, tables = setting.components, setting.state, setting.tables
    controller, energies = components.controller, arrived.mean_energies
    agreed, taken = arrived.agreed, arrived.rung
    times = agreed.seconds / agreed.timed  # NaN where not timed
    unasked = jnp.zeros_like(energies[:-1])
    evidence = Evidence(
        step=state.steps,
        replicas=setting.axes.slow.replicas,
        first_sparse=_info.first_sparse(tables),
        energies=energies[:-1],
        energy=energies[-1],
        gradient_energy=agreed.gradient_energy,
        gradient_energies=agreed.gradient_energies
        if controller.samples_gradient
        else unasked,
        predicted_parts=_info.predicted_parts(tables, components.wire or WireCost()),
        measured_seconds=times[: len(controller.ladder)],
        local_seconds=times[-1] if controller.has_rounds else None,
        steps=state.info.local_steps + 1,
        wire_bytes=jnp.asarray(tables.wire_bytes[: len(controller.ladder)]),
        at_own_params=setting.at_own_params,
    )
    rung, decided = controller.decide(evidence, state.controller)
    rung = jnp.clip(rung, 0, len(controller.ladder) - 1)  # more would mean a local step
    now = compression_gain.gain(evidence.energies, evidence.energy)
    is_taken = jnp.arange(now.size) == taken
    is_known = setting.looks | is_taken
    return Decision(rung, decided, jnp.where(is_known, now, state.info.gains))


def report(taken: Taken, setting: Setting) -> tuple[Any, TransformState]:
    """Return the updates, and the state with what a human wants to know."""
    arrived, local, decision = taken
    agreed, rung, state = arrived.agreed, arrived.rung, setting.state
    ahead, following = _what_follows(arrived, setting)
    slot = jnp.arange(_state.PAST_STEPS) == state.steps % _state.PAST_STEPS
    sent = arrived.mean_energies[rung]
    is_known = (sent > 0) & (arrived.energy > 0)
    alignment = jnp.where(is_known, arrived.energy / sent, state.info.alignment)
    info = _info.after(state.info, setting.tables, rung, decision.gains, alignment)
    return setting.buckets.unpack((*arrived.means, agreed.dense)), state._replace(
        steps=jnp.asarray(optax.safe_increment(state.steps)),
        local=_state.leave(local, state.local),
        rung=decision.rung,
        ahead=ahead,
        controller=decision.controller,
        past_rungs=jnp.where(slot, rung, state.past_rungs),
        round=following,
        info=_info.count_faults(
            info,
            is_bad=agreed.bad != 0,
            is_told_late=setting.components.waits,
            is_alike=_are_alike(agreed, setting),
            apart=agreed.apart,
        ),
    )


def _what_follows(arrived: Arrived, setting: Setting) -> tuple[jax.Array, Any]:
    """Return the rungs ahead and the round of the next step.

    A step that exchanged has agreed on one more of each; a local one changes neither.
    """
    controller, state = setting.components.controller, setting.state
    number = lambda x: jnp.int32(x + 0.5)
    agreed, round_ahead = arrived.agreed, ()
    if controller.has_rounds:
        length = number(agreed.round_steps[0])
        exchanges = jnp.asarray(optax.safe_increment(state.round.exchanges))
        round_ahead = _state.Round(state.round.next_length, length, exchanges)
    ahead = jnp.stack([state.ahead[1], number(agreed.rung)])
    is_local = arrived.rung == len(controller.ladder)
    return _arrays.where(is_local, (state.ahead, state.round), (ahead, round_ahead))
