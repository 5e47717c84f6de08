"""One step from top to bottom: from local gradients to the update and a decision.

`update` enters with checks, then takes the six phases in their order:

1. `prepare` the gradient: fuse it into buckets, clip it, add weight decay.
2. `feed` it to the memory, which adds what was held back. A bad gradient is left out.
3. Note the `figures` that all replicas must know: whether a gradient is bad, the rung.
4. `exchange` both: the buckets at the rung, and these figures.
5. `decide` the rung of a coming step from what this one showed.
6. `report` what was sent.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gravac_jax import _arrays, _info, _network, _refuse, _state, _xla
from gravac_jax._buckets import Buckets
from gravac_jax._clipping import global_norm
from gravac_jax._controllers.base import Evidence
from gravac_jax._encodings.ladder import Exchanged
from gravac_jax._evidence import compression_gain
from gravac_jax._evidence.cost_model import WireCost
from gravac_jax._loop import consistency
from gravac_jax._loop.delivery import Delivery
from gravac_jax._memory.base import Memory
from gravac_jax._network import Axes, Comm
from gravac_jax._state import LocalState, Told, TransformState
from gravac_jax._step.components import Components
from gravac_jax._step.values import (
    Agreed,
    Arrived,
    Fed,
    Gradient,
    Setting,
    Taken,
)

# Bound of an entry of an unclipped gradient, so that sums of squares stay finite.
LIMIT = 2.0**50
# Norms that are closer are of the same gradients. Sums of float32 in other orders are.
ALIKE = 1e-6


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
    if asked.get("deliver") == "probe":
        return updates, state
    _refuse.bound_axis(components.axis_name, "update")
    _refuse.gradients(updates)
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
    at: str = "shared",
    **ignored: Any,
) -> tuple[Any, TransformState]:
    """Take one step with what a device owns."""
    del ignored
    if rung is not None:
        top = len(components.controller.ladder) - 1
        _refuse.number(rung, "rung", is_whole=True, low=0, high=top)
    _refuse.one_of(at, "at", ("own", "shared"))
    is_asked = deliver is not None
    axes, local = enter(components, buckets, updates, state, params, is_asked)
    if deliver is not None:
        parts, local = _delivered(components, deliver, local, buckets, axes)
        # gravac.guard must not mistake a delivery for a bad step.
        info = state.info._replace(is_finite=jnp.ones_like(state.info.is_finite))
        local = _state.leave(local, state.local)
        return buckets.unpack(parts, state.steps), state._replace(
            local=local, info=info
        )
    is_own = at == "own" or components.memory.is_at_own_params
    setting = setting_of(components, axes, buckets, state, rung, is_own)._replace(
        params=params,
        times=credit(components, state, step_seconds, measured_step),
        is_due=is_due,
    )
    if components.waits:
        local = add_times(local, setting.times)
    gradient = prepare(updates, setting)
    return report(_take(gradient, local, setting), setting)


def _take(gradient: Gradient, local: LocalState, setting: Setting) -> Taken:
    """Feed, exchange and decide, in the order that delay and rounds ask."""
    if not setting.components.waits:
        fed = feed(gradient, local, setting)
        told = tell(gradient, local, setting.times, setting)
        return _send(told, fed, local, setting)
    if not setting.components.delay:
        return _take_held(keep(gradient, local, setting), setting)
    taken = _take_held(local, setting)
    before = with_own_params(local, setting)
    return taken._replace(local=keep(gradient, taken.local, before))


def _take_held(local: LocalState, setting: Setting) -> Taken:
    """Exchange what the memory holds, if the step is the last one of a round."""
    is_due = _sends(setting)
    exchange = lambda: _send_held(local, setting)
    if is_due is True:
        return exchange()
    nothing = _nothing(jax.eval_shape(exchange).arrived, local, setting)
    if is_due is False:
        return nothing
    return _network.exchange_if(is_due, exchange, nothing)


def _nothing(like: Any, local: LocalState, setting: Setting) -> Taken:
    """Return what comes of a local step: nothing arrives or is decided."""
    state, rungs = setting.state, len(setting.components.controller.ladder)
    arrived = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    arrived = arrived._replace(rung=jnp.int32(rungs))
    return Taken(arrived, local, state.decided, state.controller, state.info.gains)


def _send_held(local: LocalState, setting: Setting) -> Taken:
    """Send what the memory holds, and what the others have not been told yet."""
    fed = held(setting.components.memory, local, setting.buckets)
    told = jax.tree.map(jnp.zeros_like, local.told)
    return _send(local.told, fed, local._replace(told=told), setting)


def _send(told: Told, fed: Fed, local: LocalState, setting: Setting) -> Taken:
    """Exchange what was fed, and what all must know, and decide."""
    own = figures(told, fed.parts[-1], setting)
    arrived, local = exchange(fed, own, local, setting)
    return Taken(arrived, local, *decide(arrived, setting))


def enter(
    components: Components,
    buckets: Buckets,
    updates: Any,
    state: Any,
    params: Any,
    is_asked: bool,
) -> tuple[Axes, LocalState]:
    """Check everything that came, before anything is changed.

    `is_asked` says that there is no gradient: something is delivered.
    """
    slow, fast = Comm(components.axis_name), Comm(components.fast_axis_name)
    axes = Axes(slow, fast, is_sliced=components.slices is not None)
    _refuse.bound_axis(axes.both.axis_name, "update")
    if not is_asked:
        axes.both.check_local(updates)
    if params is None:
        if not is_asked:
            _check_needs_no_params(components)
    elif not axes.is_sliced:
        fast.check_whole(params)
    expected = jax.eval_shape(lambda: components.initial(buckets))
    return axes, _state.enter(state, expected, axes.owners)


def _check_needs_no_params(components: Components) -> None:
    if components.weight_decay:
        _refuse.no_params("weight_decay")
    if components.memory.needs_params:
        _refuse.no_params("memory")


def setting_of(
    components: Components,
    axes: Axes,
    buckets: Buckets,
    state: TransformState,
    rung: int | None,
    at_own_params: bool,
) -> Setting:
    """Return what the step knows, but for what `update` was given."""
    ladders, controller = components.ladders(buckets), components.controller
    replicas, reach = axes.slow.replicas, controller.reach(at_own_params)
    _info.warn_if_dense(ladders, replicas)
    # Devices that share a replica send other words, so that figures which ride with
    # them would not be known to be the same on all of them.
    rides = axes.fast.axis_name is None
    # Every step averages a count, an energy, its contrast, the rung and the length of a
    # round, if there are any, for each kind of step a time and how many replicas
    # measured it, and for each rung an energy, if they are asked for.
    scalars = 4 + components.has_rounds + 2 * components.kinds
    scalars += len(controller.ladder) * (controller.looks_at == "gradient")
    return Setting(
        components=components,
        axes=axes,
        buckets=buckets,
        ladders=ladders,
        tables=_info.tables(buckets, ladders, scalars, replicas, rides),
        looks=controller.looks(state.steps, state.info.local_steps),
        key=jax.random.fold_in(jax.random.key(0), state.steps),
        state=state,
        rung=_rung(0 if controller.is_fixed else rung, reach, state, axes.both),
        reach=reach,
        rides=rides,
        at_own_params=at_own_params,
    )


def _rung(
    known: int | None, reach: tuple[int, ...], state: TransformState, comm: Comm
) -> jax.Array | np.int32:
    """Return the rung of this step: that decided, or the next one below in reach."""
    if known is not None:
        return np.int32(known)
    rung = state.ahead[0]
    if comm.is_simulated and not comm.is_known_alike(rung):
        # vmap would run the branches of all rungs if replicas had a rung each.
        rung = jnp.int32(comm.mean(comm.of_first(rung)) + 0.5)
    if len(reach) == len(state.ladder):
        return rung
    # Another program may have decided, with gradients at other params.
    rungs = jnp.asarray(reach)
    return jnp.max(rungs, where=rungs <= rung, initial=reach[0])


def credit(
    components: Components,
    state: TransformState,
    step_seconds: Any,
    measured_step: Any,
) -> tuple[jax.Array, jax.Array]:
    """Assign a measured time to its kind of step, or warn that times are guessed."""
    controller = components.controller
    if step_seconds is None and components.network is None and controller.uses_seconds:
        warnings.warn(
            f"{type(controller).__name__} is told no step times, and guesses 10 ms of"
            f" computation and 1 Gbit/s: train by gravac.train_step, pass what"
            f" gravac.StepClock measures to tx.update(..., step_seconds=...), or write"
            f" gravac.transform(network=gravac.WireCost(...)).",
            stacklevel=2,
        )
    return _state.credit(state, components.kinds, step_seconds, measured_step)


def _delivered(
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
        state as it is. ("probe" never comes here: `update` hands on what it is given,
        so that `_loop/chain.py` sees what stands around the transform.)
      local: this replica's state, in its local form.
      buckets: the leaves that it belongs to.
      axes: the other replicas.
    """
    memory = components.memory
    parts = held(memory, local, buckets).parts
    emptied = [
        memory.retain(jnp.zeros_like(x), x, state)
        for x, state in zip(parts, local.memory, strict=True)
    ]
    *flat, dense = parts
    dense = dense if components.waits else jnp.zeros(dense.shape)
    if delivery == "mean":
        local = local._replace(memory=tuple(emptied))
        return (*axes.slow.mean(flat), axes.slow.mean(dense)), local
    if delivery == "nothing":
        flat, dense = jax.tree.map(jnp.zeros_like, (flat, dense))
    return (*flat, dense), local


def prepare(updates: Any, setting: Setting) -> Gradient:
    """Fuse, average over the fast axis, clip, and add weight decay."""
    components, axes, buckets = setting.components, setting.axes, setting.buckets
    parts = buckets.pack(updates)
    parts = parts if axes.is_sliced else axes.fast.mean(parts)
    if components.clip is None:
        bad = _arrays.is_bad(parts, LIMIT)
    else:
        bad = _arrays.is_bad(parts)
        norm = functools.partial(global_norm, parts, axes.slices)
        parts = components.clip.clip(parts, norm, axes.slow.replicas)
    if components.weight_decay:
        decay = lambda x, p: x + components.weight_decay * p
        parts = jax.tree.map(decay, parts, buckets.pack(setting.params))
    return Gradient(parts, bad)


def _sends(setting: Setting) -> jax.Array | bool:
    """Return whether this step exchanges; static if that is known."""
    if not setting.components.has_rounds:
        return True
    if setting.is_due is not None:
        return setting.is_due
    return setting.state.info.local_steps + 1 >= setting.state.round.length


def _turn(setting: Setting) -> jax.Array:
    """Return the number of this step, or with rounds of this exchange, `[]` int32."""
    state, has_rounds = setting.state, setting.components.has_rounds
    return state.round.exchanges if has_rounds else state.steps


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
    more = held(setting.components.memory, local, setting.buckets).parts
    own = jax.tree.map(jnp.add, setting.buckets.pack(setting.params), more)
    own = setting.buckets.rounded(own, setting.state.steps)
    return setting._replace(own_params=own)


def _params_beside(local: LocalState, setting: Setting) -> tuple[jax.Array, ...]:
    """Return the params that are own params with what the memory now holds.

    What an exchange has just taken out of the memory is not in the params yet.
    """
    if setting.own_params is None:
        return setting.buckets.pack(setting.params)
    more = held(setting.components.memory, local, setting.buckets).parts
    return jax.tree.map(jnp.subtract, setting.own_params, more)


def held(memory: Memory, local: LocalState, buckets: Buckets) -> Fed:
    """Return what the memory holds back, to which no gradient was added."""
    pairs = zip(local.memory, buckets.part_sizes, strict=True)
    return Fed(tuple(memory.held(*x) for x in pairs), local.memory)


def keep(gradient: Gradient, local: LocalState, setting: Setting) -> LocalState:
    """Add the gradient to the memory, for a later exchange to send."""
    fed = feed(gradient, local, setting)
    kept = tuple(map(setting.components.memory.keep, fed.parts, fed.memory))
    before = local.told
    told = tell(gradient, local, (before.seconds, before.timed), setting)
    told = told._replace(bad=jnp.maximum(told.bad, before.bad))
    return local._replace(memory=kept, told=told)


def tell(
    gradient: Gradient,
    local: LocalState,
    times: tuple[jax.Array, jax.Array],
    setting: Setting,
) -> Told:
    """Return what the other replicas must know of this one's gradient and times."""
    *flat, dense = gradient.parts
    always = _arrays.energy(dense)  # every rung sends the dense leaves
    each = [_arrays.energy(x) for x in flat]
    sampled: Any = ()
    if setting.components.controller.looks_at == "gradient":
        look = lambda: always + _sent_by_chance(flat, each, local, setting)
        rungs = len(setting.components.controller.ladder)
        # With a delay the next exchange tells it; otherwise only one that exchanges.
        is_told = True if setting.components.delay else _sends(setting)
        nothing = jnp.broadcast_to(0 * gradient.bad, (rungs,))
        sampled = _xla.chosen(setting.looks & is_told, look, nothing)
    energies = always + _arrays.total(each), sampled
    good = jax.tree.map(lambda x: jnp.where(gradient.bad != 0, 0, x), energies)
    return Told(gradient.bad, good[0], good[1], *times)


def _sent_by_chance(
    parts: list[jax.Array],
    energies: list[jax.Array],
    local: LocalState,
    setting: Setting,
) -> jax.Array:
    """Estimate the energy that each rung would send of a gradient alone, `[rungs]`.

    It is what an exchange by chance would send in which entries wait as long.

    Args:
      parts: the buckets of this replica's own gradient.
      energies: those of the buckets, `[]` float32 each.
      local: has the states of the encodings.
      setting: what the step knows.
    """
    key, comm = setting.key, setting.axes.slow
    pairs = zip(setting.ladders, parts, local.encodings, energies, strict=True)
    return _arrays.total(
        ladder.shares(x, state, key, comm, waiting=True) * energy
        for ladder, x, state, energy in pairs
    )


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
    if components.has_rounds:
        begin = state.steps + 1 + state.round.next_length
        steps = components.round_steps(begin, state.controller)
        round_steps = axes.both.of_first(steps)[None]
    if components.check_every:
        unseen = state.info.local_steps + 1
        apart = consistency.is_apart(
            setting.params, state.steps, unseen, components.check_every, axes.alike
        )
    return Agreed(
        told=told,
        dense=dense,
        contrast=axes.slow.contrast(told.gradient_energy),
        rung=axes.both.of_first(state.decided),
        round_steps=round_steps,
        apart=apart,
    )


def agree(own: Agreed, axes: Axes) -> Agreed:
    """Average what all replicas must know, in one collective."""
    if not axes.is_sliced:
        return axes.both.mean(own)
    # Dense leaves are slices, too. XLA joins both means over the slow axis.
    figures = axes.slow.mean(axes.fast.mean(own._replace(dense=())))
    return figures._replace(dense=axes.slow.mean(own.dense))


def _are_alike(agreed: Agreed, setting: Setting) -> jax.Array:
    """Return whether all gradients have the same norm, and are no zeros.

    A clip may give different gradients the same norm, so nothing is said with one.
    """
    is_alike = jnp.abs(agreed.contrast) < ALIKE * agreed.told.gradient_energy
    is_clipped = setting.components.clip is not None
    return is_alike & (setting.axes.slow.replicas > 1 and not is_clipped)


def exchange(
    fed: Fed, own: Agreed, local: LocalState, setting: Setting
) -> tuple[Arrived, LocalState]:
    """Exchange bucket by bucket, agree, and let the memory keep the rest."""
    components = setting.components
    exchanged, states = _each_bucket(fed, own, local, setting)
    agreed = exchanged[0].figures if setting.rides else agree(own, setting.axes)
    dense_residual = jnp.zeros_like(fed.parts[-1])  # it went whole
    buckets = setting.buckets.cleared(x.sent.residual for x in exchanged)
    residuals = (*buckets, dense_residual)
    retained = map(components.memory.retain, residuals, fed.parts, fed.memory)
    local = local._replace(memory=tuple(retained), encodings=states)
    means = tuple(x.sent.mean for x in exchanged)
    energy = jnp.zeros((), jnp.float32)
    if components.has_rounds:  # one more pass, but only at a round's end
        energy = _arrays.total(map(_arrays.energy, means))
    mean_energies = _arrays.total(jnp.append(x.energies, x.energy) for x in exchanged)
    energies = setting.axes.slices.mean((mean_energies, energy))
    return Arrived(agreed, jnp.asarray(setting.rung), means, *energies), local


def _each_bucket(
    fed: Fed, own: Agreed, local: LocalState, setting: Setting
) -> tuple[list[Exchanged], tuple[Any, ...]]:
    """Exchange all buckets, the first one with figures; also return their states."""
    results = [
        ladder.exchange(
            compensated,
            before,
            setting.rung,
            reach=setting.reach,
            looks=setting.looks,
            figures=own if setting.rides and i == 0 else (),
            key=setting.key,
            step=_turn(setting),
            comm=setting.axes.slow,
        )
        for i, (ladder, compensated, before) in enumerate(
            zip(setting.ladders, fed.parts[:-1], local.encodings, strict=True)
        )
    ]
    return [x for x, _ in results], tuple(after for _, after in results)


def decide(arrived: Arrived, setting: Setting) -> tuple[jax.Array, Any, jax.Array]:
    """Show the evidence to the controller; return its rung and state, and the gains."""
    components, state, tables = setting.components, setting.state, setting.tables
    controller, energies = components.controller, arrived.mean_energies
    told, taken = arrived.agreed.told, arrived.rung
    times = told.seconds / told.timed  # NaN where not timed
    is_asked = controller.looks_at == "gradient"
    evidence = Evidence(
        step=state.steps,
        replicas=setting.axes.slow.replicas,
        first_sparse=_info.first_sparse(tables),
        energies=energies[:-1],
        energy=energies[-1],
        gradient_energy=told.gradient_energy,
        gradient_energies=told.gradient_energies
        if is_asked
        else jnp.zeros_like(energies[:-1]),
        predicted_parts=_info.predicted_parts(tables, components.network or WireCost()),
        measured_seconds=times[: len(controller.ladder)],
        local_seconds=times[-1] if components.has_rounds else None,
        steps=state.info.local_steps + 1,
        wire_bytes=jnp.asarray(tables.wire_bytes[: len(controller.ladder)]),
        at_own_params=setting.at_own_params,
    )
    rung, decided = controller.decide(evidence, state.controller)
    rung = jnp.clip(rung, 0, len(controller.ladder) - 1)  # more would mean a local step
    now = compression_gain.gain(evidence.energies, evidence.energy)
    is_known = jnp.arange(now.size) == taken
    if controller.looks_at == "bucket":
        is_known = is_known | setting.looks
    return rung, decided, jnp.where(is_known, now, state.info.gains)


def report(taken: Taken, setting: Setting) -> tuple[Any, TransformState]:
    """Return the updates, and the state with what a human wants to know."""
    arrived, state = taken.arrived, setting.state
    agreed, rung = arrived.agreed, arrived.rung
    ahead, following = _what_follows(arrived, setting)
    slot = jnp.arange(_state.PAST_STEPS) == state.steps % _state.PAST_STEPS
    sent = arrived.mean_energies[rung]
    is_known = (sent > 0) & (arrived.energy > 0)
    alignment = jnp.where(is_known, arrived.energy / sent, state.info.alignment)
    info = _info.after(state.info, setting.tables, rung, taken.gains, alignment)
    updates = setting.buckets.unpack((*arrived.means, agreed.dense), state.steps)
    return updates, state._replace(
        steps=jnp.asarray(optax.safe_increment(state.steps)),
        local=_state.leave(taken.local, state.local),
        decided=taken.decided,
        ahead=ahead,
        controller=taken.controller,
        past_rungs=jnp.where(slot, rung, state.past_rungs),
        round=following,
        info=_info.count_faults(
            info,
            is_bad=agreed.told.bad != 0,
            is_told_late=setting.components.waits,
            is_alike=_are_alike(agreed, setting),
            apart=agreed.apart,
        ),
    )


def _what_follows(arrived: Arrived, setting: Setting) -> tuple[jax.Array, Any]:
    """Return the rungs ahead and the round of the next step.

    A step that exchanged has agreed on one more of each; a local one changes neither.
    """
    components, state = setting.components, setting.state
    number = lambda x: jnp.int32(x + 0.5)
    agreed, round_ahead = arrived.agreed, ()
    if components.has_rounds:
        length = number(agreed.round_steps[0])
        exchanges = jnp.asarray(optax.safe_increment(state.round.exchanges))
        round_ahead = _state.Round(state.round.next_length, length, exchanges)
    ahead = jnp.stack([state.ahead[1], number(agreed.rung)])
    is_local = arrived.rung == len(components.controller.ladder)
    return _arrays.where(is_local, (state.ahead, state.round), (ahead, round_ahead))
