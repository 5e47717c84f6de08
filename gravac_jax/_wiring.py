"""The wiring: how a step walks through the rooms.

`update` is the order in which the rooms are visited: remember, exchange, decide, keep.
GraVAC's Algorithm 1 decides before it exchanges; here a step decides the rung of the
next one. The wiring adds up what the buckets say, and leaves all else to the rooms.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gravac_jax import (
    _agreement,
    _buckets,
    _checks,
    _comm,
    _delivery,
    _evidence,
    _report,
    _state,
    _step_checks,
    _tree,
)
from gravac_jax._buckets import Buckets
from gravac_jax._clipping import Clip, NoClip, global_norm
from gravac_jax._comm import AxisName, Comm
from gravac_jax._controllers.base import Controller
from gravac_jax._exchanges.base import Exchange, Exchanged
from gravac_jax._memory.base import Memory
from gravac_jax._state import LocalState, TransformState
from gravac_jax._throughput import WireCost

# Of an entry of a gradient, so that sums of squares stay finite.
LIMIT = 2.0**50


class Common(NamedTuple):
    """What every step averages over replicas, in one collective, whatever its rung."""

    dense: jax.Array  # [dense entries] gradients of the leaves that go dense
    bad: jax.Array  # [] 1 where a gradient entry is not finite, or out of all bounds
    gradient_energy: jax.Array  # []
    rung: jax.Array  # [] that of the first replica
    seconds: jax.Array  # [rungs] the measured step time, at its rung
    timed: jax.Array  # [rungs] 1 at that rung, 0 elsewhere
    apart: jax.Array  # [1] 1 where replicas hold different params, [0] if not asked


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The components of one transform; its methods are the transform."""

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
    bucket_bytes: int | None

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
        if self.memory.masks and self.exchange.tolerance:
            _checks.knows_entries(self.memory, self.exchange)
        if self.check_every:
            _checks.count(self.check_every, "check_every", "steps, or 0 for never")
        if self.bucket_bytes is not None:
            what = "the bytes that fill a bucket, or is None for one bucket"
            _checks.count(self.bucket_bytes, "bucket_bytes", what)

    def init(self, params: Any) -> TransformState:
        """The state before the first step, in its local form."""
        _step_checks.gradients(params, "params")
        buckets = _buckets.plan(params, self.compress, self.bucket_bytes)
        if self.compress is not False:
            _buckets.warn_if_empty(buckets)
        return self._initial(buckets)

    def _initial(self, buckets: Buckets) -> TransformState:
        sizes, ladder = buckets.sizes, self.controller.ladder
        rung, controller = self.controller.init()
        return TransformState(
            steps=jnp.zeros((), jnp.int32),
            ladder=jnp.asarray(ladder, jnp.float32),
            layout=jnp.asarray(buckets.layout, jnp.int32).reshape(-1, 2),
            local=LocalState(
                replica=jnp.full((), -1, jnp.int32),
                memory=tuple(self.memory.init(n) for n in sizes),
                exchange=tuple(
                    exchange.init(n, ladder)
                    for exchange, n in zip(self._exchanges(buckets), sizes, strict=True)
                ),
            ),
            dense=self.memory.init_dense(buckets.dense_size),
            rung=rung,
            controller=controller,
            past_rungs=jnp.full(_state.PAST_STEPS, len(ladder), jnp.int32),
            info=_report.before_the_first_step(len(ladder)),
        )

    def _exchanges(self, buckets: Buckets) -> list[Exchange]:
        """One per bucket."""
        return [self.exchange.shaped(shapes) for shapes in buckets.shapes]

    def update(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        step_seconds: Any = None,
        measured_step: Any = None,
        deliver: _delivery.Delivery | None = None,
        **ignored: Any,
    ) -> tuple[Any, TransformState]:
        """One step, from local gradients to their mean and the rung of the next."""
        del ignored
        comm, fast = Comm(self.axis_name), Comm(self.dense_axis_name)
        both = Comm(_comm.join(self.axis_name, self.dense_axis_name))
        buckets = self._plan(updates, params, both, fast, is_local=deliver is None)
        # Who owns a state, and who holds the same params: slices differ over both axes.
        owner, same = (both, comm) if self.is_sharded else (comm, both)
        expected = jax.eval_shape(lambda: self._initial(buckets))
        local = _state.enter(state, expected, owner)
        if deliver is not None:
            return _delivery.deliver(deliver, self.memory, local, state, buckets, comm)

        ladder = self.controller.ladder
        flat, dense, bad = self._local_gradient(updates, buckets, fast, comm.replicas)
        if self.weight_decay:
            _step_checks.params_given(params, "weight_decay")
            decay = lambda x, p: x + self.weight_decay * p
            flat, dense = jax.tree.map(decay, (flat, dense), buckets.pack(params))
        seconds, timed = _state.credit(state, len(ladder), step_seconds, measured_step)
        common = both.mean(
            Common(
                dense=dense,
                bad=bad,
                gradient_energy=_tree.total(map(_tree.energy, flat)),
                rung=both.of_first(state.rung),
                seconds=seconds,
                timed=timed,
                apart=_agreement.is_apart(params, state.steps, self.check_every, same),
            )
        )
        exchanges = self._exchanges(buckets)
        tables = _report.tables(buckets, exchanges, self.controller, comm.replicas)
        _report.warn_if_dense(buckets, exchanges, ladder, comm.replicas)

        # What is decided from the same figures may still differ by a rounding, between
        # programs compiled apart, and different branches would hang. Buckets that wait
        # for no collective do without.
        rung = state.rung if self.bucket_bytes else jnp.int32(common.rung + 0.5)
        is_finite = common.bad == 0
        looks = self.controller.looks(state.steps)
        ran = state.steps - state.info.skipped_steps
        key = jax.random.fold_in(jax.random.key(self.seed), ran)
        runs = [
            functools.partial(
                x.exchange, ladder=ladder, key=key, comm=comm, looks=looks
            )
            for x in exchanges
        ]
        exchanged, memory, exchange = zip(
            *(
                self._send(*bucket, rung, is_finite)
                for bucket in zip(runs, flat, local.memory, local.exchange, strict=True)
            ),
            strict=True,
        )
        means = tuple(x.mean for x in exchanged)
        sample = lambda: _evidence.sampled(
            flat, dense, exchanges, ladder, key, comm, fast, self.is_sharded
        )
        energies = _evidence.energies(
            exchanged, self.controller, looks, sample, self._slices(fast), both
        )
        evidence = _evidence.evidence(
            state.steps,
            comm,
            tables,
            self.wire,
            energies,
            common.gradient_energy,
            common.seconds / common.timed,  # NaN where not timed
        )
        decided = self.controller.decide(evidence, state.controller)
        next_rung, controller = _tree.where(
            is_finite, decided, (state.rung, state.controller)
        )
        local = local._replace(memory=memory, exchange=exchange)
        dense, dense_memory = self.memory.follow(common.dense, state.dense)
        dense = jnp.where(is_finite, dense, 0.0)
        rung = jnp.where(is_finite, rung, len(ladder))
        gains = _evidence.gains(energies, state.info.gains, looks, rung)
        slot = jnp.arange(_state.PAST_STEPS) == state.steps % _state.PAST_STEPS
        return buckets.unpack(means, dense), state._replace(
            steps=jnp.asarray(optax.safe_increment(state.steps)),
            local=_state.leave(local, state.local),
            dense=_tree.where(is_finite, dense_memory, state.dense),
            rung=next_rung,
            controller=controller,
            past_rungs=jnp.where(slot, rung, state.past_rungs),
            info=_report.after(
                state.info, tables, rung, gains, is_finite, common.apart, looks
            ),
        )

    def _send(
        self,
        exchange: Callable[..., Any],
        gradient: jax.Array,
        memory: Any,
        own: Any,
        rung: jax.Array,
        is_finite: jax.Array,
    ) -> tuple[Exchanged, Any, Any]:
        """One bucket's way: remember, exchange, keep.

        A step that is skipped feeds no gradient, sends nothing and keeps all as it was.
        Not in a branch: XLA would copy the memory on its way in and out.
        """
        # Skipped or not is known when all gradients are. A bucket that does not wait
        # for them is sent without what is not finite in it, and taken back.
        waits = self.bucket_bytes is None
        is_fed = is_finite if waits else _tree.is_bad([gradient]) == 0
        if waits:
            rung = jnp.where(is_finite, rung, len(self.controller.ladder))
        elif len(self.controller.ladder) == 1:
            rung = jnp.zeros_like(rung)  # a constant: XLA drops the conditional
        fed = self.memory.compensate(gradient, memory)
        held = (self.memory.held(memory, gradient.size), memory)
        compensated, between = _tree.where(is_fed, fed, held)
        exchanged, after = exchange(compensated, own, rung)
        kept = self.memory.retain(exchanged.residual, compensated, between)
        if not waits:
            kept = _tree.where(is_finite, kept, memory)
            mean = jnp.where(is_finite, exchanged.mean, 0)
            exchanged = exchanged._replace(mean=mean)
        return exchanged, kept, _tree.where(is_finite, after, own)

    def _local_gradient(
        self, updates: Any, buckets: Buckets, fast: Comm, replicas: int
    ) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        """This replica's own: buckets, what goes dense, and whether it is bad."""
        flat, dense = buckets.pack(updates)
        if self.is_sharded:
            # The transpose of gathering a slice sums over the fast axis.
            flat = tuple(x / fast.replicas for x in flat)
        else:
            flat = fast.mean(flat)
        if isinstance(self.clip, NoClip):
            return flat, dense, _tree.is_bad((*flat, dense), LIMIT)
        bad = _tree.is_bad((*flat, dense))
        dense = fast.mean(dense)
        norm = functools.partial(global_norm, flat, dense, self._slices(fast))
        *flat, dense = self.clip.clip((*flat, dense), norm, replicas)
        return tuple(flat), dense, bad

    def _slices(self, fast: Comm) -> Comm:
        """Those who hold the other slices of a bucket, if any."""
        return fast if self.is_sharded else Comm(None)

    def _plan(
        self, updates: Any, params: Any, both: Comm, fast: Comm, is_local: bool
    ) -> Buckets:
        """What goes where, after all checks of what came."""
        _step_checks.bound_axis(both.axis_name, "update")
        _step_checks.gradients(updates)
        if is_local:
            both.check_local(updates)
        buckets = _buckets.plan(updates, self.compress, self.bucket_bytes)
        if params is not None:
            fast.check_sharded(params, buckets.is_compressed, self.is_sharded)
        return buckets
