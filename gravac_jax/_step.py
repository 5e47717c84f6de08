"""One step of the transform, in the order in which it happens.

1. `prepare` the gradient: fuse it into buckets, clip it, add weight decay.
2. `feed` it to the memory, which adds what was held back.
3. `agree` on what all replicas must know: whether a gradient is bad, and the rung.
4. `exchange` the buckets, in the branch of the rung.
5. `decide` the rung of the next step from what this one showed.
6. `report` what was sent.

With a delay of one step, the memory is fed last: the exchange sends what the last step
left in the memory, so that it depends on nothing that this step computes, and the
network works while the devices do. What is on its way lies in the memory, as does
everything else that a replica holds back. Nothing else in a step differs. Such a step
may be taken in two programs, which a CPU needs to do both at once: an update that only
`receives`, and one that is given what has `arrived`.

Where a controller has rounds (`gravac.Every`), each step feeds the memory, and only the
last step of a round exchanges what has gathered there. The others are *local*: they
have no collective, and all but the memory stays as it is. Replicas know which step is
which because all count alike.

Three more things may happen to a step, and they are separate. A *bad* step has a
gradient that is not finite on some replica: nothing is learned from it, on any of them.
With a delay or rounds the others hear of it later, so that this replica alone learns
nothing. A *silent* step sends nothing of the buckets, because its rung lies beyond the
ladder; what replicas agree on still travels. A *delivery* is no step at all: it asks
for what is held back (`_residuals.py`).

GraVAC's Algorithm 1 decides before it exchanges. Here a step decides the rung of the
next one, so that the decision costs no collective of its own.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gravac_jax import (
    _arrays,
    _buckets,
    _checks,
    _collectives,
    _consistency,
    _info,
    _residuals,
    _state,
    _step_checks,
)
from gravac_jax._buckets import Buckets
from gravac_jax._clipping import Clip, NoClip, global_norm
from gravac_jax._collectives import Axes, AxisName, Comm
from gravac_jax._controllers import compression_gain
from gravac_jax._controllers.base import Controller, Evidence, kinds_of_steps
from gravac_jax._controllers.cost_model import WireCost
from gravac_jax._error_feedback import NoMemory
from gravac_jax._error_feedback.base import Memory
from gravac_jax._exchanges.base import Exchange
from gravac_jax._info import Tables
from gravac_jax._slices import Slices
from gravac_jax._state import LocalState, Told, TransformState

# Bound of an entry of an unclipped gradient, so that sums of squares stay finite.
LIMIT = 2.0**50
# Norms that are closer are of the same gradients. Sums of float32 in other orders are.
ALIKE = 1e-6


class Gradient(NamedTuple):
    """This replica's own gradient.

    Attributes:
      parts: the buckets, then the leaves that go dense: `[n]` float32 each.
      bad: `[]` float32, 1 if an entry is not finite or, unclipped, beyond `LIMIT`.
    """

    parts: tuple[jax.Array, ...]
    bad: jax.Array


class Fed(NamedTuple):
    """What the memory made of the gradient.

    Attributes:
      parts: the buckets, then the leaves that go dense: the gradient and what was held
        back, `[n]` float32 each.
      memory: the states that `Memory.retain` takes, one a part.
    """

    parts: tuple[jax.Array, ...]
    memory: tuple[Any, ...]


class Agreed(NamedTuple):
    """What every step averages over replicas, in one collective, whatever its rung.

    Attributes:
      dense: `[m]` float32, the mean of the leaves that go dense.
      bad: `[]` float32, above 0 if some replica's gradient is bad.
      gradient_energy: `[]` float32, the mean energy of the gradient's buckets.
      contrast: `[]` float32, 0 if that energy is the same on all replicas.
      rung: `[]` float32, the rung in the first replica's state.
      round_steps: `[1]` float32, the length of the round after the next exchange, in
        the first replica's state; `[0]` without rounds.
      seconds: `[kinds]` float32, the measured time of each kind of step, else 0.
      timed: `[kinds]` float32, the share of replicas that measured it.
      apart: `[1]` float32, above 0 if replicas hold different params; `[0]` if params
        are never compared.
    """

    dense: jax.Array
    bad: jax.Array
    gradient_energy: jax.Array
    contrast: jax.Array
    rung: jax.Array
    round_steps: jax.Array
    seconds: jax.Array
    timed: jax.Array
    apart: jax.Array


class Arrived(NamedTuple):
    """What all replicas have received, the same on each of them.

    Attributes:
      agreed: what every step averages.
      rung: `[]` int32, the rung that was taken; the first beyond the ladder if silent,
        the second if local.
      means: the mean of what was sent, `[n]` float32 a bucket.
      mean_energies: `[rungs + 1]` float32, as in `Exchanged`, of all buckets.
      energy: `[]` float32, the energy of the means; 0 without rounds.
    """

    agreed: Agreed
    rung: jax.Array
    means: tuple[jax.Array, ...]
    mean_energies: jax.Array
    energy: jax.Array


class Decision(NamedTuple):
    """What the controller made of the step.

    Attributes:
      rung: `[]` int32, the rung of the next step.
      controller: the controller's new state.
      gains: `[rungs]` float32, the gain of each rung, as last known.
    """

    rung: jax.Array
    controller: Any
    gains: jax.Array


class Taken(NamedTuple):
    """What came of a step, before it is reported.

    Attributes:
      arrived: what all replicas have received.
      local: this replica's own state after the step.
      decision: what the controller decided.
    """

    arrived: Arrived
    local: LocalState
    decision: Decision


class Setting(NamedTuple):
    """What a step knows before it begins. The first four are static.

    Attributes:
      axes: the other replicas.
      buckets: what is fused, and what goes dense.
      exchanges: the exchange of each bucket.
      tables: what each rung sends.
      looks: whether the step estimates what other rungs would send, `[]` bool or
        static.
      key: a random key, the same on all replicas, new at every step that was not bad.
      state: the transform's state after the last step.
      params: the params, or None if `update` was not given any.
      times: the measured time of each kind of step, and whether it is known:
        `[kinds]` float32 both.
      is_due: with rounds, whether this step exchanges, if the caller knows: static.
    """

    axes: Axes
    buckets: Buckets
    exchanges: list[Exchange]
    tables: Tables
    looks: jax.Array | bool
    key: jax.Array
    state: TransformState
    params: Any = None
    times: Any = ()
    is_due: bool | None = None


@dataclasses.dataclass(frozen=True)
class Components:
    """The components of one transform; `init` and `update` are the transform.

    The arguments are those of `gravac.transform`.
    """

    axis_name: AxisName
    dense_axis_name: AxisName
    is_sharded: bool
    slices: Slices | None
    clip: Clip
    weight_decay: float
    exchange: Exchange
    memory: Memory
    controller: Controller
    compress: Any
    delay: int
    wire: WireCost | None
    seed: int
    check_every: int

    def __post_init__(self) -> None:
        _checks.axis(self.axis_name)
        _checks.two_axes(self.axis_name, self.dense_axis_name, self.is_sharded)
        _checks.component(self.exchange, Exchange, "exchange", "gravac.AllGather()")
        why = "It is the share of the params that is added to their gradient."
        _checks.within(self.weight_decay, "weight_decay", 0, 1, why)
        _checks.component(self.clip, Clip, "clip", "gravac.ClipByGlobalNorm(1.0)")
        if self.wire is not None:
            wires = "gravac.WireCost(), or probe.read(file)"
            _checks.component(self.wire, WireCost, "wire", wires)
        _checks.ladder(self.controller.ladder)
        _checks.delay(self.delay)
        _checks.seed(self.seed)
        if self.waits and isinstance(self.memory, NoMemory):
            raise ValueError(
                "`delay` and gravac.Every need a memory: what is not sent yet waits"
                " there, and NoMemory() forgets it. Use memory=gravac.Residual(), the"
                " default."
            )
        if self.memory.masks and not self.exchange.sends_whole_entries:
            _checks.cannot_mask(self.memory, self.exchange)
        if self.check_every:
            _checks.positive_integer(
                self.check_every, "check_every", "steps, or 0 for never"
            )

    @property
    def waits(self) -> bool:
        """Whether a gradient waits in the memory before the others hear of it."""
        waits = bool(self.delay) or self.controller.has_rounds
        return waits or self.memory.forgets

    def init(self, params: Any) -> TransformState:
        """Return the state before the first step, in its local form."""
        _step_checks.gradients(params, "params")
        buckets = self._plan(params)
        _buckets.warn_if_wide(buckets)
        if self.compress is not False:
            _buckets.warn_if_empty(buckets)
        initial = functools.partial(self._initial, buckets)
        return initial() if self.slices is None else self.slices.place(initial)

    def _plan(self, tree: Any) -> Buckets:
        """Decide which leaves are compressed; buckets hold what a device owns."""
        buckets = _buckets.plan(tree, self.compress)
        if self.slices is None:
            return buckets
        return dataclasses.replace(buckets, leaves=self.slices.shapes(buckets.leaves))

    def _initial(self, buckets: Buckets) -> TransformState:
        sizes, ladder = buckets.sizes, self.controller.ladder
        exchanges = zip(self._shaped(buckets), sizes, strict=True)
        rung, controller = self.controller.init()
        told, rounds = (), ()
        if self.waits:
            told = _state.nothing_told(kinds_of_steps(self.controller))
        if self.controller.has_rounds:
            rounds = _state.first_round(self.controller, controller)
        return TransformState(
            steps=jnp.zeros((), jnp.int32),
            ladder=jnp.asarray(ladder, jnp.float32),
            layout=self._layout(buckets),
            local=LocalState(
                replica=jnp.full((), -1, jnp.int32),
                told=told,
                memory=tuple(map(self.memory.init, buckets.part_sizes)),
                exchange=tuple(x.init(n, ladder) for x, n in exchanges),
            ),
            rung=rung,
            controller=controller,
            past_rungs=jnp.full(_state.PAST_STEPS, len(ladder), jnp.int32),
            round=rounds,
            info=_info.before_the_first_step(len(ladder)),
        )

    def _layout(self, buckets: Buckets) -> jax.Array:
        slices = 1 if self.slices is None else self.slices.inner_devices
        pieces = [(*piece, slices) for piece in buckets.layout]
        return jnp.asarray(pieces, jnp.int32).reshape(-1, 3)

    def _shaped(self, buckets: Buckets) -> list[Exchange]:
        return [self.exchange.shaped(shapes) for shapes in buckets.shapes]

    def update(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        step_seconds: Any = None,
        measured_step: Any = None,
        **asked: Any,
    ) -> tuple[Any, TransformState]:
        """Take one step, from local gradients to the update and the next rung."""
        _step_checks.bound_axis(self.axis_name, "update")
        _step_checks.gradients(updates)
        step = functools.partial(self._update, self._plan(updates), **asked)
        times = {"step_seconds": step_seconds, "measured_step": measured_step}
        if self.slices is None:
            return step(updates, state, params, **times)
        given = updates, state, params, times
        return self.slices.run(step, asked.get("deliver"), given)

    def _update(
        self,
        buckets: Buckets,
        updates: Any,
        state: Any,
        params: Any,
        *,
        step_seconds: Any,
        measured_step: Any,
        is_due: bool | None = None,
        deliver: _residuals.Delivery | None = None,
        receives: bool = False,
        arrived: Arrived | None = None,
        **ignored: Any,
    ) -> tuple[Any, TransformState]:
        """Take one step with what a device owns.

        With a delay, a step may be taken in two: one that only `receives` and leaves
        `TransformState.arrived`, and one that is given it, with the gradients.
        """
        del ignored
        if receives and not self.delay:
            _step_checks.needs_delay()
        is_asked = deliver is not None or receives
        axes, local = self._enter(buckets, updates, state, params, is_asked)
        if deliver is not None:
            held, local = self.deliver(deliver, local, buckets, axes)
            # gravac.guard must not mistake a delivery for a bad step.
            info = state.info._replace(is_finite=jnp.ones_like(state.info.is_finite))
            local = _state.leave(local, state.local)
            return buckets.unpack(held), state._replace(local=local, info=info)
        setting = self._setting(axes, buckets, state)._replace(
            params=params,
            times=self._credit(state, step_seconds, measured_step),
            is_due=is_due,
        )
        if self.waits and arrived is None:
            local = self._timed(local, setting)
        if receives:
            arrived, local = self._send_held(local, setting)
            local = _state.leave(local, state.local)
            zeros = jax.tree.map(jnp.zeros_like, updates)
            return zeros, state._replace(local=local, arrived=arrived)
        gradient = self._prepare(updates, setting)
        return self._report(self._take(gradient, local, arrived, setting), setting)

    def _enter(
        self, buckets: Buckets, updates: Any, state: Any, params: Any, is_asked: bool
    ) -> tuple[Axes, LocalState]:
        """Check everything that came, before anything is changed."""
        slow, fast = Comm(self.axis_name), Comm(self.dense_axis_name)
        axes = Axes(slow, fast, self.is_sharded, is_cut=self.slices is not None)
        _step_checks.bound_axis(axes.both.axis_name, "update")
        if not is_asked:
            axes.both.check_local(updates)
        if params is None:
            if not is_asked:
                self._check_needs_no_params()
        elif not axes.is_cut:
            fast.check_sharded(params, buckets.is_compressed, self.is_sharded)
        expected = jax.eval_shape(lambda: self._initial(buckets))
        return axes, _state.enter(state, expected, axes.owners)

    def _check_needs_no_params(self) -> None:
        if self.weight_decay:
            _step_checks.params_given(None, "weight_decay")
        if self.memory.needs_params:
            _step_checks.params_given(None, "memory")

    def _setting(self, axes: Axes, buckets: Buckets, state: TransformState) -> Setting:
        exchanges, replicas = self._shaped(buckets), axes.slow.replicas
        _info.warn_if_dense(buckets, exchanges, self.controller.ladder, replicas)
        good_steps = state.steps - state.info.skipped_steps
        return Setting(
            axes=axes,
            buckets=buckets,
            exchanges=exchanges,
            tables=_info.tables(buckets, exchanges, self.controller, replicas),
            looks=self.controller.looks(state.steps, state.info.local_steps),
            key=jax.random.fold_in(jax.random.key(self.seed), good_steps),
            state=state,
        )

    def _credit(
        self, state: TransformState, step_seconds: Any, measured_step: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Assign a measured time to its rung, or warn that times are guessed."""
        if step_seconds is None and self.wire is None and self.controller.uses_seconds:
            _step_checks.warn_of_guess(self.controller)
        kinds = kinds_of_steps(self.controller)
        return _state.credit(state, kinds, step_seconds, measured_step)

    def _prepare(self, updates: Any, setting: Setting) -> Gradient:
        """Fuse, average over the fast axis, clip, and add weight decay."""
        axes, buckets = setting.axes, setting.buckets
        parts = self._averaged(buckets.pack(updates), axes)
        if isinstance(self.clip, NoClip):
            bad = _arrays.is_bad(parts, LIMIT)
        else:
            bad = _arrays.is_bad(parts)
            sliced, shared = (parts, ()) if axes.is_cut else (parts[:-1], parts[-1:])
            norm = functools.partial(global_norm, sliced, shared, axes.slices)
            parts = self.clip.clip(parts, norm, axes.slow.replicas)
        if self.weight_decay:
            decay = lambda x, p: x + self.weight_decay * p
            parts = jax.tree.map(decay, parts, buckets.pack(setting.params))
        return Gradient(parts, bad)

    def _averaged(
        self, parts: tuple[jax.Array, ...], axes: Axes
    ) -> tuple[jax.Array, ...]:
        """Average over the fast axis, unless the compiler has done so."""
        if axes.is_cut:
            return parts
        if not axes.is_sharded:
            return axes.fast.mean(parts)
        # The transpose of gathering a slice sums over the fast axis.
        *flat, dense = parts
        return (*(x / axes.fast.replicas for x in flat), axes.fast.mean(dense))

    def _take(
        self,
        gradient: Gradient,
        local: LocalState,
        arrived: Arrived | None,
        setting: Setting,
    ) -> Taken:
        """Feed, agree, exchange and decide, in the order that delay and rounds ask."""
        decide = lambda arrived: self._decide(gradient, arrived, setting)
        keep = lambda local: self._keep(gradient, local, setting)
        if arrived is not None:
            return Taken(arrived, keep(local), decide(arrived))
        if not self.waits:
            fed = self._feed(gradient, local, setting)
            told = _tell(gradient, setting.times)
            arrived, local = self._send(told, fed, local, setting)
            return Taken(arrived, local, decide(arrived))
        if not self.delay:
            return self._take_held(gradient, keep(local), setting)
        taken = self._take_held(gradient, local, setting)
        return taken._replace(local=keep(taken.local))

    def _take_held(
        self, gradient: Gradient, local: LocalState, setting: Setting
    ) -> Taken:
        """Exchange what the memory holds, if the step is the last one of a round."""

        def exchange() -> Taken:
            arrived, after = self._send_held(local, setting)
            return Taken(arrived, after, self._decide(gradient, arrived, setting))

        if not self.controller.has_rounds or setting.is_due:
            return exchange()
        state = setting.state
        nothing = self._nothing(jax.eval_shape(exchange).arrived, local, state)
        if setting.is_due is not None:
            return nothing
        is_due = state.info.local_steps + 1 >= state.round.length
        return _collectives.only_if(is_due, exchange, nothing)

    def _nothing(self, like: Any, local: LocalState, state: TransformState) -> Taken:
        """Return what comes of a local step: nothing arrives or is decided."""
        arrived = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        local_rung = jnp.int32(len(self.controller.ladder) + 1)
        as_before = Decision(state.rung, state.controller, state.info.gains)
        return Taken(arrived._replace(rung=local_rung), local, as_before)

    def deliver(
        self,
        delivery: _residuals.Delivery,
        local: LocalState,
        buckets: Buckets,
        axes: Axes,
    ) -> tuple[tuple[jax.Array, ...], LocalState]:
        """Return what is held back of each part, and the state after the delivery.

        Args:
          delivery: "mean" sends what is held back to all replicas and empties the
            memory. "own" returns this replica's part and "nothing" returns zeros; both
            leave the state as it is.
          local: this replica's state, in its local form.
          buckets: the leaves that it belongs to.
          axes: the other replicas.
        """
        held = self._held(local, buckets).parts
        if delivery == "own":
            held = tuple(map(self.memory.ahead, local.memory, held))
        emptied = [
            self.memory.retain(jnp.zeros_like(x), x, state)
            for x, state in zip(held, local.memory, strict=True)
        ]
        # Dense leaves that wait do so on all devices of a replica alike.
        *flat, dense = held
        dense = axes.copies.mean(dense) if self.waits else jnp.zeros(dense.shape)
        if delivery == "mean":
            local = local._replace(memory=tuple(emptied))
            return (*axes.slow.mean(flat), axes.slow.mean(dense)), local
        if delivery == "nothing":
            flat, dense = jax.tree.map(jnp.zeros_like, (flat, dense))
        return (*flat, dense), local

    def _feed(self, gradient: Gradient, local: LocalState, setting: Setting) -> Fed:
        """Add the gradient to what the memory holds back."""
        given = (gradient.parts, local.memory)
        if self.memory.needs_params:
            given = (*given, setting.buckets.pack(setting.params))
        fed = [self.memory.compensate(*x) for x in zip(*given, strict=True)]
        parts, memory = zip(*fed, strict=True)
        return Fed(parts, memory)

    def _held(self, local: LocalState, buckets: Buckets) -> Fed:
        """Return what the memory holds back, to which no gradient was added."""
        pairs = zip(local.memory, buckets.part_sizes, strict=True)
        return Fed(tuple(self.memory.held(*x) for x in pairs), local.memory)

    def _keep(
        self, gradient: Gradient, local: LocalState, setting: Setting
    ) -> LocalState:
        """Add the gradient to the memory, for a later exchange to send."""
        is_bad = setting.axes.slices.mean(gradient.bad) != 0
        fed = self._feed(gradient, local, setting)
        kept = tuple(map(self.memory.keep, fed.parts, fed.memory))
        # This is no branch, because XLA would copy the memory in and out of one.
        memory = _arrays.where(is_bad, local.memory, kept)
        before = local.told
        told = _tell(gradient, (before.seconds, before.timed))
        told = told._replace(bad=jnp.maximum(told.bad, before.bad))
        return local._replace(memory=memory, told=told)

    def _timed(self, local: LocalState, setting: Setting) -> LocalState:
        """Add a measured time to what the next exchange tells."""
        (seconds, timed), told = setting.times, local.told
        told = told._replace(
            seconds=jnp.where(timed > 0, seconds, told.seconds),
            timed=jnp.maximum(timed, told.timed),
        )
        return local._replace(told=told)

    def _send_held(
        self, local: LocalState, setting: Setting
    ) -> tuple[Arrived, LocalState]:
        """Send what the memory holds, and what the others have not been told yet."""
        held = self._held(local, setting.buckets)
        arrived, local = self._send(local.told, held, local, setting)
        return arrived, local._replace(told=jax.tree.map(jnp.zeros_like, local.told))

    def _send(
        self, told: Told, fed: Fed, local: LocalState, setting: Setting
    ) -> tuple[Arrived, LocalState]:
        """Agree on what all must know, then exchange."""
        agreed = self._agree(told, fed.parts[-1], setting)
        return self._exchange(fed, agreed, local, setting)

    def _agree(self, told: Told, dense: jax.Array, setting: Setting) -> Agreed:
        """Average what all replicas must know, in one collective.

        Decisions made from the same figures may still differ by a rounding between
        programs that were compiled apart, and different branches would hang. So the
        rung is agreed on, too.
        """
        axes, state = setting.axes, setting.state
        apart = round_steps = jnp.zeros(0, jnp.float32)
        if self.controller.has_rounds:
            begin = state.steps + 1 + state.round.next_length
            steps = self.controller.round_steps(begin, state.controller)
            round_steps = axes.both.of_first(steps)[None]
        if self.check_every:
            unseen = state.info.local_steps + 1
            apart = _consistency.is_apart(
                setting.params, state.steps, unseen, self.check_every, axes.alike
            )
        own = Agreed(
            dense=dense,
            bad=told.bad,
            gradient_energy=told.gradient_energy,
            contrast=axes.slow.contrast(told.gradient_energy),
            rung=axes.both.of_first(state.rung),
            round_steps=round_steps,
            seconds=told.seconds,
            timed=told.timed,
            apart=apart,
        )
        if not axes.is_cut:
            return axes.both.mean(own)
        # Dense leaves are slices, too. XLA joins both means over the slow axis.
        figures = axes.slow.mean(axes.fast.mean(own._replace(dense=())))
        return figures._replace(dense=axes.slow.mean(dense))

    def _are_alike(self, agreed: Agreed, axes: Axes) -> jax.Array:
        """Return whether all gradients have the same norm, and are no zeros."""
        is_alike = jnp.abs(agreed.contrast) < ALIKE * agreed.gradient_energy
        return is_alike & (axes.slow.replicas > 1)

    def _skips(self, agreed: Agreed) -> jax.Array:
        """Return whether nothing at all is learned in this step, `[]` bool."""
        # What has waited in the memory was fed to it because it is good.
        return jnp.zeros((), bool) if self.waits else agreed.bad != 0

    def _exchange(
        self, fed: Fed, agreed: Agreed, local: LocalState, setting: Setting
    ) -> tuple[Arrived, LocalState]:
        """Exchange bucket by bucket, and let the memory keep the rest."""
        controller, is_skipped = self.controller, self._skips(agreed)
        # This is no branch, because XLA would copy the memory in and out of one.
        fed = _arrays.where(is_skipped, self._held(local, setting.buckets), fed)
        silent = jnp.int32(len(controller.ladder))
        rung = jnp.int32(0) if controller.is_fixed else jnp.int32(agreed.rung + 0.5)
        rung_or_silent = jnp.where(is_skipped, silent, rung)
        means, residuals, states, mean_energies = [], [], [], []
        *flat, dense = fed.parts
        for exchange, compensated, before in zip(
            setting.exchanges, flat, local.exchange, strict=True
        ):
            exchanged, after = exchange.exchange(
                compensated,
                before,
                rung if controller.is_fixed else rung_or_silent,
                ladder=controller.ladder,
                key=setting.key,
                comm=setting.axes.slow,
                looks=setting.looks,
            )
            mean, residual = exchanged.mean, exchanged.residual
            if controller.is_fixed:
                # One that never changes needs no branch: a GPU's host would have to
                # read the rung. So what a skipped step receives is dropped here.
                unsent = (jnp.zeros_like(mean), compensated, before)
                mean, residual, after = _arrays.where(
                    is_skipped, unsent, (mean, residual, after)
                )
            means.append(mean)
            residuals.append(residual)
            states.append(after)
            mean_energies.append(exchanged.mean_energies)
        residuals.append(jnp.zeros_like(dense))  # it went whole
        kept = zip(residuals, fed.parts, fed.memory, strict=True)
        memory = tuple(self.memory.retain(*x) for x in kept)
        local = local._replace(memory=memory, exchange=tuple(states))
        energy = jnp.zeros((), jnp.float32)
        if controller.has_rounds:  # one more pass, but only at the end of a round
            energy = _arrays.total(map(_arrays.energy, means))
        energies = setting.axes.slices.mean((_arrays.total(mean_energies), energy))
        return Arrived(agreed, rung_or_silent, tuple(means), *energies), local

    def _decide(
        self, gradient: Gradient, arrived: Arrived, setting: Setting
    ) -> Decision:
        """Show the evidence to the controller, which picks the next rung."""
        state = setting.state
        tables, energies = setting.tables, arrived.mean_energies
        agreed, taken = arrived.agreed, arrived.rung
        times = agreed.seconds / agreed.timed  # NaN where not timed
        evidence = Evidence(
            step=state.steps,
            replicas=setting.axes.slow.replicas,
            first_sparse=_info.first_sparse(tables),
            energies=energies[:-1],
            energy=energies[-1],
            gradient_energy=agreed.gradient_energy,
            gradient_energies=self._sampled_energies(gradient, setting),
            predicted_parts=_info.predicted_parts(tables, self.wire or WireCost()),
            measured_seconds=times[: len(self.controller.ladder)],
            local_seconds=times[-1] if self.controller.has_rounds else None,
            steps=state.info.local_steps + 1,
        )
        rung, controller = self.controller.decide(evidence, state.controller)
        now = compression_gain.gain(evidence.energies, evidence.energy)
        is_taken = jnp.arange(now.size) == taken
        is_known = (setting.looks | is_taken) & (taken < now.size)
        gains = jnp.where(is_known, now, state.info.gains)
        return Decision(rung, controller, gains)

    def _sampled_energies(self, gradient: Gradient, setting: Setting) -> jax.Array:
        """Estimate the energy of the gradient alone that each rung would send.

        The result is `[rungs]` float32, averaged over replicas; zeros in a step that
        does not look, or if the controller never asks.
        """
        axes, ladder = setting.axes, self.controller.ladder
        zeros = axes.both.zeros(jnp.zeros(len(ladder), jnp.float32))
        if not self.controller.samples_gradient:
            return zeros

        def sample() -> jax.Array:
            # Every rung sends the dense leaves, which all devices of a replica hold.
            *flat, dense = gradient.parts
            always = _arrays.energy(dense) / axes.copies.replicas
            shares = [
                exchange.shares(x, ladder, setting.key, axes.slow) * _arrays.energy(x)
                for exchange, x in zip(setting.exchanges, flat, strict=True)
            ]
            return axes.both.mean(always + _arrays.total(shares))

        sampled = jax.lax.cond(setting.looks, sample, lambda: zeros)
        # A rung that is dense under another name sends what rung 0 sends.
        is_dense = jnp.asarray(setting.tables.factors[: len(ladder)] == 1)
        return jnp.where(is_dense, sampled[0], sampled)

    def _report(self, step: Taken, setting: Setting) -> tuple[Any, TransformState]:
        """Return the updates, and the state with what a human wants to know.

        Nothing is learned from a bad step: what it would have changed stays as it was.
        """
        arrived, local, decision = step
        agreed, taken, state = arrived.agreed, arrived.rung, setting.state
        is_skipped = self._skips(agreed)
        learned = (agreed.dense, decision.rung, decision.controller)
        before = (jnp.zeros_like(agreed.dense), state.rung, state.controller)
        dense, rung, controller = _arrays.where(is_skipped, before, learned)
        slot = jnp.arange(_state.PAST_STEPS) == state.steps % _state.PAST_STEPS
        sent = arrived.mean_energies[jnp.minimum(taken, len(self.controller.ladder))]
        is_known = (sent > 0) & (arrived.energy > 0)
        alignment = jnp.where(is_known, arrived.energy / sent, state.info.alignment)
        info = _info.after(
            state.info,
            setting.tables,
            taken,
            decision.gains,
            setting.looks,
            alignment,
        )
        return setting.buckets.unpack((*arrived.means, dense)), state._replace(
            steps=jnp.asarray(optax.safe_increment(state.steps)),
            local=_state.leave(local, state.local),
            rung=rung,
            controller=controller,
            past_rungs=jnp.where(slot, taken, state.past_rungs),
            round=self._next_round(arrived, state),
            info=_info.count_faults(
                info,
                is_bad=agreed.bad != 0,
                is_skipped=is_skipped,
                is_alike=self._are_alike(agreed, setting.axes),
                apart=agreed.apart,
            ),
        )

    def _next_round(self, arrived: Arrived, state: TransformState) -> Any:
        """Return the round of the next step: another one if this step exchanged."""
        if not self.controller.has_rounds:
            return ()
        is_local = arrived.rung == len(self.controller.ladder) + 1
        agreed = jnp.int32(arrived.agreed.round_steps[0] + 0.5)
        following = _state.Round(state.round.next_length, agreed)
        return _arrays.where(is_local, state.round, following)


def _tell(gradient: Gradient, times: tuple[jax.Array, jax.Array]) -> Told:
    """Return what the other replicas must know of this one's gradient and times."""
    energy = _arrays.total(map(_arrays.energy, gradient.parts[:-1]))
    return Told(gradient.bad, jnp.where(gradient.bad != 0, 0, energy), *times)
