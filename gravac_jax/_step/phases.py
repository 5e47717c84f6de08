"""The phases of a step, from local gradients to the update and a decision.

1. `prepare` the gradient: fuse it into buckets, and clip it.
2. `feed` it, with weight decay, to the memory, which adds what was held back. A bad
   gradient is left out.
3. Note as `own_figures` what all replicas must know: is a gradient bad, the rung.
4. `exchange` both: the buckets at the rung, and these figures.
5. Show the controller the `evidence`, by which it decides the rung of a coming step.
6. Report what was sent, in the `info` of the state.

`take` has their order, and `send` phases 3 to 6. With a delay these come before 2, from
what an earlier step left; a local step has none of them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gravac_jax import _arrays, _network, _xla
from gravac_jax._controllers.base import Evidence
from gravac_jax._encodings.ladder import Exchanged, Ladder
from gravac_jax._encodings.rung_costs import RungCosts, rung_costs, warn_if_dense
from gravac_jax._evidence import compression_gain
from gravac_jax._evidence.cost_model import WireCost
from gravac_jax._memory.base import Memory
from gravac_jax._network import Axes
from gravac_jax._step import consistency, norms, step_info
from gravac_jax._step.bucketing import Buckets
from gravac_jax._step.components import Components
from gravac_jax._step.states import LocalState, Round, Told, TransformState
from gravac_jax._step.step_info import StepInfo

# Bound of an entry of a gradient, so that sums of squares stay finite.
LIMIT = 2.0**50
# Norms that are closer are of the same gradients. Sums of float32 in other orders are.
ALIKE = 1e-6
# So many entries show whether gradients are alike. A clip in the step gives all of them
# the same norm, but not a sample of each. CPUs sum up as many in one kernel.
SAMPLE = 32

# The buckets, then the leaves that go dense: `[n]` float32 each.
Parts = tuple[jax.Array, ...]


class Figures(NamedTuple):
    """What every step averages over replicas, at every rung: one's own, or the mean.

    Attributes:
      told: what replicas tell of their gradients and times; `bad` is above 0 if some
        gradient is.
      dense: `[m]` float32, the mean of the leaves that go dense.
      rung: `[]` float32, the rung in the first replica's state.
      round_steps: `[1]` float32, the length of the round after the next exchange, in
        the first replica's state; `[0]` without rounds.
      apart: `[1]` float32, other than 0 if a sample shows that replicas hold different
        params; `[0]` if they are not compared.
      loss: `[]` float32, the loss; 0 if `update` was given none.
    """

    told: Told
    dense: jax.Array
    rung: jax.Array
    round_steps: jax.Array
    apart: jax.Array
    loss: jax.Array


def held_by(memory: Memory, local: LocalState) -> Parts:
    """Return what a memory holds back, to which no gradient was added."""
    return tuple(map(memory.held, local.memory))


@dataclasses.dataclass(frozen=True)
class Step:
    """One step: what it knows before it begins, and its phases.

    Attributes:
      components: what the transform is made of.
      axes: the other replicas.
      buckets: what is fused, and what goes dense.
      state: the transform's state after the last step.
      params: the params, or None if `update` was not given any.
      is_own: whether gradients are known to be taken at own params; static.
      is_due: with rounds, whether this step exchanges, if the caller knows; static.
      times: as in `Told`.
      loss: as in `Figures`.
      rung: the rung of this step, `[]` int32, on which all replicas have agreed; an
        `np.int32` if it never changes or the caller knows it.
    """

    components: Components
    axes: Axes
    buckets: Buckets
    state: TransformState
    params: Any
    is_own: bool
    is_due: bool | None
    times: jax.Array
    loss: jax.Array
    rung: jax.Array | np.int32

    @functools.cached_property
    def ladders(self) -> list[Ladder]:
        """The encodings of each bucket."""
        return self.components.ladders(self.buckets)

    @property
    def rides(self) -> bool:
        """Whether the first bucket's exchange also averages what replicas agree on.

        Devices that share a replica send other words, so that figures which ride with
        them would not be known to be the same on all of them.
        """
        return self.axes.fast.axis_name is None

    @property
    def looks(self) -> jax.Array | bool:
        """Whether it estimates what other rungs would send, `[]` bool or static."""
        local_steps = self.state.info.local_steps
        return self.components.controller.looks(self.state.steps, local_steps)

    @property
    def key(self) -> jax.Array:
        """A random key, the same on all replicas, new at every step."""
        return jax.random.fold_in(jax.random.key(0), self.state.steps)

    def prepare(self, updates: Any) -> tuple[Parts, jax.Array]:
        """Fuse, average over the fast axis, and clip.

        Returns:
          parts: this replica's own gradient.
          bad: `[]` float32, 1 if an entry is not finite or beyond `LIMIT`.
        """
        components, axes = self.components, self.axes
        parts = self.buckets.pack(updates)
        parts = parts if axes.is_sliced else axes.fast.mean(parts)
        bad = _arrays.is_bad(parts, LIMIT)
        if components.clip is not None:
            parts = components.clip.clip(parts, axes.slice_holders, axes.slow.replicas)
        return parts, bad

    def take(
        self, parts: Parts, bad: jax.Array, local: LocalState
    ) -> tuple[Parts, TransformState]:
        """Feed, exchange and decide, in the order that delay and rounds ask.

        Returns:
          parts: what arrived, the same on all replicas; zeros in a local step.
          state: the state after the step, which is not counted in it yet.
        """
        own = self._own_params(local)
        if not self.components.is_told_late:
            return self.send(*self.feed(parts, bad, local, own), local)
        times = jnp.where(self.times[1] > 0, self.times, local.told.times)
        local = local._replace(told=local.told._replace(times=times))
        if not self.components.delay:
            return self._take_held(self.hold_back(parts, bad, local, own))
        arrived, after = self._take_held(local)
        # The next exchange sends the gradient, and tells of it.
        later = dataclasses.replace(self, state=after, is_due=None)
        local = later.hold_back(parts, bad, after.local, own)
        return arrived, after._replace(local=local)

    def _take_held(self, local: LocalState) -> tuple[Parts, TransformState]:
        """Exchange what the memory holds, if the step is the last one of a round."""

        def exchange() -> tuple[Parts, TransformState]:
            held = held_by(self.components.memory, local)
            rest = local._replace(told=jax.tree.map(jnp.zeros_like, local.told))
            return self.send(held, local.memory, local.told, rest)

        def stay() -> tuple[Parts, TransformState]:
            nothing = tuple(jnp.zeros(n, jnp.float32) for n in self.buckets.sizes)
            replicas = self.axes.slow.replicas
            dense = _network.mean_traffic(sum(self.buckets.entries), replicas)
            info = step_info.of_a_local_step(self.state.info, dense.wire_bytes)
            return nothing, self.state._replace(local=local, info=info)

        return _network.if_due(self._exchanges, exchange, stay)

    @property
    def _exchanges(self) -> jax.Array | bool:
        """Whether this step exchanges; static if that is known."""
        if not self.components.has_rounds:
            return True
        if self.is_due is not None:
            return self.is_due
        return self.state.info.local_steps + 1 >= self.state.round.length

    def feed(
        self, parts: Parts, bad: jax.Array, local: LocalState, own: tuple[Parts, ...]
    ) -> tuple[Parts, tuple[Any, ...], Told]:
        """Add gradient and decay to what is held back, unless the gradient is bad.

        Args:
          parts: the gradient.
          bad: whether it is bad, `[]` float32.
          local: this replica's own state.
          own: own params, from `_own_params`.

        Returns:
          parts: the gradient and what was held back.
          memory: the states that `Memory.hold` takes, one a part.
          told: what the others must know of it.
        """
        components = self.components
        unfed = held_by(components.memory, local)
        memories = components.memories(self.buckets)
        compensate = lambda memory, *given: memory.compensate(*given)
        decay = float(components.weight_decay)
        add = lambda x, p: x + decay * p
        decayed = map(add, parts, self.buckets.pack(self.params)) if decay else parts
        compensated = map(compensate, memories, decayed, local.memory, *own)
        fed, memory = zip(*compensated, strict=True)
        own_norms = no_norms = tuple(map(norms.untold, local.norms))
        replicas = self.axes.slow.replicas
        if local.norms and replicas > 1:  # one replica's mean is its own step
            steps = tuple(map(jnp.subtract, fed, unfed))
            own_norms = tuple(norms.told(x, self.state.steps) for x in steps)
            scaled = functools.partial(norms.scaled, replicas=replicas)
            fed = tuple(map(jnp.add, unfed, map(scaled, steps, local.norms)))
        # One device of a replica may see an entry that the others do not.
        is_bad = self.axes.slice_holders.mean(bad) != 0
        # This is no branch, because XLA would copy the memory in and out of one.
        before = unfed, local.memory, no_norms
        fed, memory, own_norms = _arrays.where(is_bad, before, (fed, memory, own_norms))
        return fed, memory, self.told_of(parts, bad, local, own_norms)

    def _own_params(self, local: LocalState) -> tuple[Parts, ...]:
        """Return this replica's own params if asked, not rounded to narrow dtypes."""
        if not self.components.memory.needs_params:
            return ()
        held = held_by(self.components.memory, local)
        return (tuple(map(jnp.add, self.buckets.pack(self.params), held)),)

    def hold_back(
        self, parts: Parts, bad: jax.Array, local: LocalState, own: tuple[Parts, ...]
    ) -> LocalState:
        """Add the gradient to the memory, for a later exchange to send."""
        before, hold = local.told, self.components.memory.hold
        fed, memory, told = self.feed(parts, bad, local, own)
        is_bad = jnp.maximum(told.bad, before.bad)
        return local._replace(
            memory=tuple(map(hold, fed, fed, memory)),
            told=told._replace(bad=is_bad, times=before.times),
        )

    def told_of(
        self, parts: Parts, bad: jax.Array, local: LocalState, own_norms: Parts
    ) -> Told:
        """Return what the others must know of this one's gradient, times and norms."""
        components, (*flat, dense) = self.components, parts
        always = _arrays.energy(dense)  # every rung sends the dense leaves
        each = [_arrays.energy(x) for x in flat]
        sampled: Any = ()
        if components.controller.looks_at == "gradient":

            def look() -> jax.Array:
                # What an exchange by chance would send in which entries wait as long.
                key, n = self.key, self.axes.slow.replicas
                share = lambda ladder, *x: ladder.shares(*x, key, n, waiting=True)
                shares = map(share, self.ladders, flat, local.encodings)
                return always + _arrays.total(map(jnp.multiply, shares, each))

            nothing = jnp.broadcast_to(0 * bad, len(components.controller.ladder))
            sampled = _xla.chosen(self.looks & self._exchanges, look, nothing)
        largest = max(parts, key=jnp.size)
        some = _arrays.energy(largest[:: largest.size // SAMPLE + 1])
        sample = some, self.axes.slow.contrast(some)
        energies = always + _arrays.total(each), sampled
        energy, sampled = jax.tree.map(lambda x: jnp.where(bad != 0, 0, x), energies)
        return Told(bad, energy, sample, sampled, self.times, own_norms)

    def send(
        self, fed: Parts, memory: tuple[Any, ...], told: Told, local: LocalState
    ) -> tuple[Parts, TransformState]:
        """Exchange what was fed, let the memory keep the rest, and decide."""
        components, state = self.components, self.state
        ours = self.own_figures(told, fed[-1])
        exchanged, encodings = self.exchange(fed, ours, local)
        figures = exchanged[0].figures if self.rides else self.agree(ours)
        entries, replicas = self.buckets.entries, self.axes.slow.replicas
        # Rounding leaves something in the zeros that fill up a bucket.
        rests = map(_xla.zero_after, (x.sent.residual for x in exchanged), entries)
        rests = (*rests, jnp.zeros_like(fed[-1]))  # dense leaves went whole
        after = map(components.memory.hold, rests, fed, memory)
        known = tuple(map(norms.learnt, local.norms, figures.told.norms))
        size = optax.tree.size(figures)
        costs = rung_costs(self.ladders, sum(entries), size, replicas, self.rides)
        evidence = self.evidence(exchanged, figures, costs)
        decided, controller = components.controller.decide(evidence, state.controller)
        number = lambda mean: jnp.int32(mean + 0.5)
        following = state.round
        if components.has_rounds:
            length = number(figures.round_steps[0])
            exchanges = jnp.asarray(optax.safe_increment(state.round.exchanges))
            following = Round(state.round.next_length, length, exchanges)
        return (*(x.sent.mean for x in exchanged), figures.dense), state._replace(
            local=local._replace(memory=tuple(after), encodings=encodings, norms=known),
            # The number of rungs would mean a local step.
            decided=jnp.int32(jnp.clip(decided, 0, len(state.ladder) - 1)),
            next_rungs=jnp.stack([state.next_rungs[1], number(figures.rung)]),
            controller=controller,
            round=following,
            loss=figures.loss,
            info=self.info(figures, evidence, costs),
        )

    def own_figures(self, told: Told, dense: jax.Array) -> Figures:
        """Return this replica's part of what all replicas must know.

        Decisions made from the same figures may still differ by a rounding between
        programs that were compiled apart, and different branches would hang. So the
        rung is agreed on, too, before it is taken.
        """
        components, axes, state = self.components, self.axes, self.state
        round_steps = jnp.zeros(0, jnp.float32)
        if components.has_rounds:
            begin = state.steps + 1 + state.round.next_length
            round_steps = axes.both.of_first(components.round_steps(begin))[None]
        return Figures(
            told=told,
            dense=dense,
            rung=axes.both.of_first(state.decided),
            round_steps=round_steps,
            apart=consistency.sample_contrast(self.params, axes),
            loss=self.loss,
        )

    def agree(self, own_figures: Figures) -> Figures:
        """Average what all replicas must know: in one collective, or two if sliced."""
        axes = self.axes
        if not axes.is_sliced:
            return axes.both.mean(own_figures)
        # Dense leaves and norms are of slices.
        told = own_figures.told
        others = own_figures._replace(dense=(), told=told._replace(norms=()))
        rest = axes.fast.mean(others)
        told = rest.told._replace(norms=told.norms)
        return axes.slow.mean(rest._replace(dense=own_figures.dense, told=told))

    def exchange(
        self, fed: Parts, own_figures: Figures, local: LocalState
    ) -> tuple[tuple[Exchanged, ...], tuple[Any, ...]]:
        """Return what came of the exchange of each bucket, and states of encodings."""
        warn_if_dense(self.ladders, self.axes.slow.replicas)
        turn = self.state.round.exchanges if self.state.round else self.state.steps
        reach = self.components.controller.reach(self.is_own)
        known: Any = {"rung": self.rung, "reach": reach, "looks": self.looks}
        known |= {"key": self.key, "step": turn, "comm": self.axes.slow}
        exchange = functools.partial(Ladder.exchange, **known)
        riding = [own_figures if self.rides else (), *[()] * (len(self.ladders) - 1)]
        results = map(exchange, self.ladders, fed[:-1], local.encodings, riding)
        exchanged, encodings = zip(*results, strict=True)
        return exchanged, encodings

    def evidence(
        self, exchanged: Sequence[Exchanged], figures: Figures, costs: RungCosts
    ) -> Evidence:
        """Return what the controller decides by."""
        components, state, told = self.components, self.state, figures.told
        times = told.times[0] / jnp.where(told.times[1] > 0, told.times[1], 1)
        rungs = len(components.controller.ladder)
        is_asked = components.controller.looks_at == "gradient"
        energies = _arrays.total(x.energies for x in exchanged)
        energy = _arrays.total(x.energy for x in exchanged)
        energies, energy = self.axes.slice_holders.mean((energies, energy))
        return Evidence(
            step=state.steps,
            replicas=self.axes.slow.replicas,
            first_sparse=jnp.int32(np.argmin([*costs.is_dense, 0])),
            energies=energies,
            energy=energy,
            gradient_energy=told.gradient_energy,
            gradient_energies=told.gradient_energies if is_asked else jnp.zeros(rungs),
            predicted_parts=_predicted_parts(costs, components.network or WireCost()),
            measured_seconds=times[:rungs],
            local_seconds=times[-1] if components.has_rounds else None,
            round_steps=state.info.local_steps + 1,
            at_own_params=self.is_own,
        )

    def info(self, figures: Figures, evidence: Evidence, costs: RungCosts) -> StepInfo:
        """Return what the step sent, and the counters of what went wrong."""
        before, rung = self.state.info, self.rung
        now = compression_gain.gain(evidence.energies, evidence.energy)
        is_known = jnp.arange(now.size) == rung
        if self.components.controller.looks_at == "bucket":
            is_known = is_known | self.looks
        gains = jnp.where(is_known, now, before.gains)
        at_rung = lambda of_rungs: jnp.asarray(of_rungs)[rung]
        count = lambda before, happened: before + happened.astype(jnp.int32)
        is_bad = figures.told.bad != 0
        # A sample of all gradients has the same norm, and is not 0.
        energy, contrast = figures.told.sample
        is_alike = (self.axes.slow.replicas > 1) & (jnp.abs(contrast) < ALIKE * energy)
        are_apart = jnp.any(figures.apart != 0)
        return StepInfo(
            rung=jnp.asarray(rung, jnp.int32),
            factor=at_rung(costs.factors),
            gain=gains[rung],
            gains=gains,
            wire_bytes=at_rung(costs.wire_bytes),
            dense_wire_bytes=jnp.float32(costs.dense.wire_bytes),
            is_finite=~is_bad | self.components.is_told_late,
            dense_steps=count(before.dense_steps, at_rung(costs.is_dense)),
            bad_steps=count(before.bad_steps, is_bad),
            disagreements=count(before.disagreements, are_apart),
            alike_steps=count(before.alike_steps, is_alike),
            local_steps=jnp.zeros_like(before.local_steps),
        )


def _predicted_parts(costs: RungCosts, wire: WireCost) -> jax.Array:
    """Return the seconds of each part of a step by the cost model: `[rungs, 4]`."""
    each = zip(costs.wire_bytes, costs.messages, costs.is_dense, strict=True)
    parts = [wire.parts(float(x), float(y), bool(z)) for x, y, z in each]
    return jnp.asarray(parts, jnp.float32)
