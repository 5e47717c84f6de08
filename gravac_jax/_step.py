"""One step of the transform, in the order in which it happens.

1. `prepare` the gradient: fuse it into buckets, clip it, add weight decay.
2. `agree` on what all replicas must know: whether a gradient is bad, and the rung.
3. `exchange` the buckets: error feedback, then the branch of the rung.
4. `decide` the rung of the next step from what this one showed.
5. `report` what was sent.

Three things may happen to a step, and they are separate. A *bad* step has a gradient
that is not finite on some replica: nothing is learned from it. A *silent* step sends
nothing of the buckets, because its rung lies beyond the ladder; what replicas agree on
still travels. A bad step is silent, too. A *delivery* is no step at all: it asks for
what is held back (`_residuals.py`).

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
from gravac_jax._controllers.base import Controller, Evidence
from gravac_jax._controllers.cost_model import WireCost
from gravac_jax._error_feedback.base import Memory
from gravac_jax._exchanges.base import Exchange
from gravac_jax._info import Tables
from gravac_jax._state import LocalState, TransformState

# Bound of an entry of an unclipped gradient, so that sums of squares stay finite.
LIMIT = 2.0**50


class Gradient(NamedTuple):
    """This replica's own gradient.

    Attributes:
      flat: the buckets, `[n]` float32 each.
      dense: `[m]` float32, the leaves that go dense.
      bad: `[]` float32, 1 if an entry is not finite or, unclipped, beyond `LIMIT`.
    """

    flat: tuple[jax.Array, ...]
    dense: jax.Array
    bad: jax.Array


class Agreed(NamedTuple):
    """What every step averages over replicas, in one collective, whatever its rung.

    Attributes:
      dense: `[m]` float32, the mean gradient of the leaves that go dense.
      bad: `[]` float32, above 0 if some replica's gradient is bad.
      gradient_energy: `[]` float32, the mean energy of the buckets.
      rung: `[]` float32, the rung in the first replica's state.
      seconds: `[rungs]` float32, the measured step time at its rung, else 0.
      timed: `[rungs]` float32, the share of replicas that measured it.
      apart: `[1]` float32, above 0 if replicas hold different params; `[0]` if params
        are never compared.
    """

    dense: jax.Array
    bad: jax.Array
    gradient_energy: jax.Array
    rung: jax.Array
    seconds: jax.Array
    timed: jax.Array
    apart: jax.Array

    @property
    def is_bad(self) -> jax.Array:
        """Whether some replica's gradient is bad, `[]` bool."""
        return self.bad != 0


class Sent(NamedTuple):
    """What the exchange of all buckets left.

    Attributes:
      rung: `[]` int32, the rung that was taken; beyond the ladder if silent.
      means: the mean of what was sent, `[n]` float32 a bucket.
      memory: the new states of the memory, one a bucket.
      exchange: the new states of the exchange, one a bucket.
      mean_energies: `[rungs + 1]` float32, as in `Exchanged`, of all buckets.
    """

    rung: jax.Array
    means: tuple[jax.Array, ...]
    memory: tuple[Any, ...]
    exchange: tuple[Any, ...]
    mean_energies: jax.Array


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


class Setting(NamedTuple):
    """What a step knows before it begins; all but `key` and `looks` is static.

    Attributes:
      axes: the other replicas.
      buckets: what is fused, and what goes dense.
      exchanges: the exchange of each bucket.
      tables: what each rung sends.
      looks: whether the step estimates what other rungs would send, `[]` bool or
        static.
      key: a random key, the same on all replicas, new at every step that was not bad.
    """

    axes: Axes
    buckets: Buckets
    exchanges: list[Exchange]
    tables: Tables
    looks: jax.Array | bool
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Components:
    """The components of one transform; `init` and `update` are the transform.

    The arguments are those of `gravac.transform`.
    """

    axis_name: AxisName
    dense_axis_name: AxisName
    is_sharded: bool
    clip: Clip
    weight_decay: float
    exchange: Exchange
    memory: Memory
    controller: Controller
    compress: Any
    wire: WireCost
    seed: int
    check_every: int

    def __post_init__(self) -> None:
        _checks.axis(self.axis_name)
        _checks.two_axes(self.axis_name, self.dense_axis_name, self.is_sharded)
        _checks.component(self.exchange, Exchange, "exchange", "gravac.AllGather()")
        why = "It is the share of the params that is added to their gradient."
        _checks.within(self.weight_decay, "weight_decay", 0, 1, why)
        _checks.component(self.clip, Clip, "clip", "gravac.ClipByGlobalNorm(1.0)")
        _checks.component(self.memory, Memory, "memory", "gravac.Residual()")
        example = "gravac.Fixed(factor=100)"
        _checks.component(self.controller, Controller, "controller", example)
        _checks.component(self.wire, WireCost, "wire", "gravac.WireCost()")
        _checks.ladder(self.controller.ladder)
        if self.memory.masks and not self.exchange.sends_whole_entries:
            _checks.cannot_mask(self.memory, self.exchange)
        if self.check_every:
            _checks.positive_integer(
                self.check_every, "check_every", "steps, or 0 for never"
            )

    def init(self, params: Any) -> TransformState:
        """Return the state before the first step, in its local form."""
        _step_checks.gradients(params, "params")
        buckets = _buckets.plan(params, self.compress)
        if self.compress is not False:
            _buckets.warn_if_empty(buckets)
        return self._initial(buckets)

    def _initial(self, buckets: Buckets) -> TransformState:
        sizes, ladder = buckets.sizes, self.controller.ladder
        exchanges = zip(self._shaped(buckets), sizes, strict=True)
        rung, controller = self.controller.init()
        return TransformState(
            steps=jnp.zeros((), jnp.int32),
            ladder=jnp.asarray(ladder, jnp.float32),
            layout=jnp.asarray(buckets.layout, jnp.int32).reshape(-1, 2),
            local=LocalState(
                replica=jnp.full((), -1, jnp.int32),
                memory=tuple(self.memory.init(n) for n in sizes),
                exchange=tuple(x.init(n, ladder) for x, n in exchanges),
            ),
            dense=self.memory.init_dense(buckets.dense_size),
            rung=rung,
            controller=controller,
            past_rungs=jnp.full(_state.PAST_STEPS, len(ladder), jnp.int32),
            info=_info.before_the_first_step(len(ladder)),
        )

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
        deliver: _residuals.Delivery | None = None,
        **ignored: Any,
    ) -> tuple[Any, TransformState]:
        """Take one step, from local gradients to their mean and the next rung."""
        del ignored
        axes, buckets, local = self._enter(updates, state, params, deliver is not None)
        if deliver is not None:
            slow = axes.slow
            return _residuals.deliver(deliver, self.memory, local, state, buckets, slow)
        setting = self._setting(axes, buckets, state)

        gradient = self._prepare(updates, params, setting)
        times = _state.credit(
            state, len(self.controller.ladder), step_seconds, measured_step
        )
        agreed = self._agree(gradient, times, state, params, axes)
        sent = self._exchange(gradient, agreed, local, setting)
        decision = self._decide(gradient, agreed, sent, state, setting)
        return self._report(agreed, sent, decision, local, state, setting)

    def _enter(
        self, updates: Any, state: Any, params: Any, is_delivery: bool
    ) -> tuple[Axes, Buckets, LocalState]:
        """Check everything that came, before anything is changed."""
        slow, fast = Comm(self.axis_name), Comm(self.dense_axis_name)
        axes = Axes(slow, fast, self.is_sharded)
        _step_checks.bound_axis(axes.both.axis_name, "update")
        _step_checks.gradients(updates)
        if not is_delivery:
            axes.both.check_local(updates)
        buckets = _buckets.plan(updates, self.compress)
        if params is not None:
            fast.check_sharded(params, buckets.is_compressed, self.is_sharded)
        elif self.weight_decay and not is_delivery:
            _step_checks.params_given(params, "weight_decay")
        expected = jax.eval_shape(lambda: self._initial(buckets))
        return axes, buckets, _state.enter(state, expected, axes.owners)

    def _setting(self, axes: Axes, buckets: Buckets, state: TransformState) -> Setting:
        exchanges, replicas = self._shaped(buckets), axes.slow.replicas
        _info.warn_if_dense(buckets, exchanges, self.controller.ladder, replicas)
        good_steps = state.steps - state.info.skipped_steps
        return Setting(
            axes=axes,
            buckets=buckets,
            exchanges=exchanges,
            tables=_info.tables(buckets, exchanges, self.controller, replicas),
            looks=self.controller.looks(state.steps),
            key=jax.random.fold_in(jax.random.key(self.seed), good_steps),
        )

    def _prepare(self, updates: Any, params: Any, setting: Setting) -> Gradient:
        """Fuse, average over the fast axis, clip, and add weight decay."""
        fast, buckets = setting.axes.fast, setting.buckets
        flat, dense = buckets.pack(updates)
        if self.is_sharded:
            # The transpose of gathering a slice sums over the fast axis.
            flat = tuple(x / fast.replicas for x in flat)
        else:
            flat = fast.mean(flat)
        if isinstance(self.clip, NoClip):
            bad = _arrays.is_bad((*flat, dense), LIMIT)
        else:
            bad = _arrays.is_bad((*flat, dense))
            dense = fast.mean(dense)
            norm = functools.partial(global_norm, flat, dense, setting.axes.slices)
            parts = self.clip.clip((*flat, dense), norm, setting.axes.slow.replicas)
            flat, dense = parts[:-1], parts[-1]
        if self.weight_decay:
            decay = lambda x, p: x + self.weight_decay * p
            flat, dense = jax.tree.map(decay, (flat, dense), buckets.pack(params))
        return Gradient(flat, dense, bad)

    def _agree(
        self,
        gradient: Gradient,
        times: tuple[jax.Array, jax.Array],
        state: TransformState,
        params: Any,
        axes: Axes,
    ) -> Agreed:
        """Average what all replicas must know, in one collective.

        Decisions made from the same figures may still differ by a rounding between
        programs that were compiled apart, and different branches would hang. So the
        rung is agreed on, too.
        """
        seconds, timed = times
        apart = jnp.zeros(0)
        if self.check_every:
            apart = _consistency.is_apart(
                params, state.steps, self.check_every, axes.alike
            )
        return axes.both.mean(
            Agreed(
                dense=gradient.dense,
                bad=gradient.bad,
                gradient_energy=_arrays.total(map(_arrays.energy, gradient.flat)),
                rung=axes.both.of_first(state.rung),
                seconds=seconds,
                timed=timed,
                apart=apart,
            )
        )

    def _exchange(
        self, gradient: Gradient, agreed: Agreed, local: LocalState, setting: Setting
    ) -> Sent:
        """Feed errors back and exchange, bucket by bucket."""
        silent = len(self.controller.ladder)
        rung = jnp.where(agreed.is_bad, silent, jnp.int32(agreed.rung + 0.5))
        means, memories, states, mean_energies = [], [], [], []
        for exchange, flat, before, own in zip(
            setting.exchanges, gradient.flat, local.memory, local.exchange, strict=True
        ):
            # In a bad step the memory adds no gradient. This is no branch, because XLA
            # would copy the memory on its way in and out of one.
            fed = self.memory.compensate(flat, before)
            held = (self.memory.held(before, flat.size), before)
            compensated, memory = _arrays.where(~agreed.is_bad, fed, held)
            exchanged, own = exchange.exchange(
                compensated,
                own,
                rung,
                ladder=self.controller.ladder,
                key=setting.key,
                comm=setting.axes.slow,
                looks=setting.looks,
            )
            means.append(exchanged.mean)
            memories.append(self.memory.retain(exchanged.residual, compensated, memory))
            states.append(own)
            mean_energies.append(exchanged.mean_energies)
        total = setting.axes.slices.mean(_arrays.total(mean_energies))
        return Sent(rung, tuple(means), tuple(memories), tuple(states), total)

    def _decide(
        self,
        gradient: Gradient,
        agreed: Agreed,
        sent: Sent,
        state: TransformState,
        setting: Setting,
    ) -> Decision:
        """Show the evidence to the controller, which picks the next rung."""
        tables, energies = setting.tables, sent.mean_energies
        evidence = Evidence(
            step=state.steps,
            replicas=setting.axes.slow.replicas,
            first_sparse=_info.first_sparse(tables),
            energies=energies[:-1],
            energy=energies[-1],
            gradient_energy=agreed.gradient_energy,
            gradient_energies=self._sampled_energies(gradient, setting),
            predicted_parts=_info.predicted_parts(tables, self.wire),
            measured_seconds=agreed.seconds / agreed.timed,  # NaN where not timed
        )
        rung, controller = self.controller.decide(evidence, state.controller)
        now = compression_gain.gain(evidence.energies, evidence.energy)
        is_taken = jnp.arange(now.size) == sent.rung
        is_known = (setting.looks | is_taken) & (sent.rung < now.size)
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
            dense = _arrays.energy(axes.fast.mean(gradient.dense))
            always = dense / axes.slices.replicas
            shares = [
                exchange.shares(x, ladder, setting.key, axes.slow) * _arrays.energy(x)
                for exchange, x in zip(setting.exchanges, gradient.flat, strict=True)
            ]
            return axes.both.mean(always + _arrays.total(shares))

        sampled = jax.lax.cond(setting.looks, sample, lambda: zeros)
        # A rung that is dense under another name sends what rung 0 sends.
        is_dense = jnp.asarray(setting.tables.factors[:-1] == 1)
        return jnp.where(is_dense, sampled[0], sampled)

    def _report(
        self,
        agreed: Agreed,
        sent: Sent,
        decision: Decision,
        local: LocalState,
        state: TransformState,
        setting: Setting,
    ) -> tuple[Any, TransformState]:
        """Return the updates, and the state with what a human wants to know.

        Nothing is learned from a bad step: what it would have changed stays as it was.
        """
        dense, dense_memory = self.memory.follow(agreed.dense, state.dense)
        learned = (dense, dense_memory, decision.rung, decision.controller)
        before = (jnp.zeros_like(dense), state.dense, state.rung, state.controller)
        dense, dense_memory, rung, controller = _arrays.where(
            agreed.is_bad, before, learned
        )
        local = local._replace(memory=sent.memory, exchange=sent.exchange)
        slot = jnp.arange(_state.PAST_STEPS) == state.steps % _state.PAST_STEPS
        info = _info.after(
            state.info, setting.tables, sent.rung, decision.gains, setting.looks
        )
        return setting.buckets.unpack(sent.means, dense), state._replace(
            steps=jnp.asarray(optax.safe_increment(state.steps)),
            local=_state.leave(local, state.local),
            dense=dense_memory,
            rung=rung,
            controller=controller,
            past_rungs=jnp.where(slot, sent.rung, state.past_rungs),
            info=_info.count_faults(info, agreed.is_bad, agreed.apart),
        )
