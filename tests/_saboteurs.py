"""Components that break laws, to show that the tests would notice.

Each differs from an honest component by one slip that a reader may overlook, and names
the laws that catch it. Classes with an underscore are what several of them share.
"""

import itertools
from collections.abc import Callable
from typing import Any

import _laws
import jax
import jax.numpy as jnp

import gravac_jax as gravac
from gravac_jax._encodings.ladder import Ladder

MOOD = itertools.count()  # how often a saboteur with a mood has been asked
CAUGHT_BY: dict[type, tuple[Callable[..., None], ...]] = {}  # by every saboteur


def caught_by(*laws: Callable[..., None]) -> Callable[[type], type]:
    """Register a saboteur with the laws that catch it."""

    def register(kind: type) -> type:
        CAUGHT_BY[kind] = laws
        return kind

    return register


# Encodings -----------------------------------------------------------------------


class _Alters(gravac.TopK):
    """Top-k with a change to what comes out."""

    change: Callable[..., gravac.Sent]  # of sent, the bucket and the network

    def exchange(self, x, state, *, comm, **others):
        sent, state = super().exchange(x, state, comm=comm, **others)
        return self.change(sent, x, comm), state


@caught_by(_laws.averages_what_was_sent, _laws.is_like_its_oracle)
class DividesBySenders(_Alters):
    def change(self, sent, x, comm):
        senders = comm.mean((x != sent.residual).astype(jnp.float32))
        return sent._replace(mean=sent.mean / jnp.maximum(senders, 1 / comm.replicas))


@caught_by(_laws.averages_what_was_sent, _laws.is_like_its_oracle)
class ForgetsWhatRoundingDrops(_Alters):
    def change(self, sent, x, comm):
        return sent._replace(residual=jnp.where(sent.residual == x, sent.residual, 0))


@caught_by(_laws.agrees_on_all_replicas)
class TrustsItselfMore(_Alters):
    def change(self, sent, x, comm):
        return sent._replace(mean=sent.mean + (x - sent.residual) / comm.replicas)


@caught_by(_laws.ignores_the_order_of_replicas)
class FavorsTheFirstReplica(_Alters):
    def change(self, sent, x, comm):
        first = comm.gather(x - sent.residual)[0]
        return sent._replace(mean=sent.mean + first / comm.replicas)


@caught_by(_laws.is_the_same_alone)
class IsSilentAlone(_Alters):
    def change(self, sent, x, comm):
        return sent._replace(mean=sent.mean * float(comm.axis_name is not None))


@caught_by(_laws.knows_what_it_sent, _laws.is_like_its_oracle)
class TellsTheEnergyOfAll(_Alters):
    def change(self, sent, x, comm):
        return sent._replace(energy=jnp.sum(x**2))


@caught_by(_laws.leaves_zeros_alone)
class NormalizesOnTheWay(_Alters):
    def change(self, sent, x, comm):
        norm = jnp.sqrt(jnp.sum(sent.mean**2))
        return sent._replace(mean=sent.mean / norm * norm)


class _SelectsBy(gravac.TopK):
    """Top-k of another score."""

    score: Callable[..., jax.Array]

    def _choose(self, x, state, k, key):
        return super()._choose(self.score(x), state, k, key)


@caught_by(_laws.contracts, _laws.is_like_its_oracle)
class SendsTheSmallest(_SelectsBy):
    def score(self, x):
        return 1 / (1 + jnp.abs(x))


@caught_by(_laws.commutes_with_scaling, _laws.is_like_its_oracle)
class IsBlindAboveOne(_SelectsBy):
    def score(self, x):
        return jnp.minimum(jnp.abs(x), 1)


@caught_by(_laws.is_itself_however_it_runs)
class HasMoods(_SelectsBy):
    def score(self, x):
        return jnp.roll(jnp.abs(x), next(MOOD))


@caught_by(_laws.sends_something, _laws.is_like_its_oracle)
class AimsTooHigh(_SelectsBy):
    def score(self, x):
        return jnp.where(jnp.abs(x) > jnp.max(jnp.abs(x)), x, 0)


@caught_by(_laws.declares_its_bytes)
class CountsNoIndices(gravac.TopK):
    def traffic(self, bucket, replicas):
        traffic = super().traffic(bucket, replicas)
        return traffic._replace(payload_bytes=2 * self.slots(bucket.n))


@caught_by(_laws.keeps_the_form_of_its_state)
class CountsInIntegers(gravac.TopK):
    def exchange(self, x, state, **others):
        sent, state = super().exchange(x, state, **others)
        return sent, state._replace(reached=state.reached.astype(jnp.int32))


@caught_by(
    _laws.sends_everything, _laws.averages_what_was_sent, _laws.is_like_its_oracle
)
class KeepsWhatItSent(gravac.Dense):
    def exchange(self, x, state, **others):
        sent, state = super().exchange(x, state, **others)
        return sent._replace(residual=x), state


@caught_by(_laws.averages_what_was_sent, _laws.is_like_its_oracle)
class ForgetsWhatItOwes(gravac.Bits):
    def exchange(self, x, state, *, comm, **others):
        sent, _ = super().exchange(x, state, comm=comm, **others)
        alone, _ = super().exchange(x, state, comm=gravac.Comm(None), **others)
        return sent._replace(residual=alone.residual), state


@caught_by(_laws.moves_little_what_is_small, _laws.is_like_its_oracle)
class MeasuresByTheLargest(gravac.Bits):
    def exchange(self, x, state, *, comm, **others):
        largest = jnp.max(jnp.abs(x))
        sent = jnp.where(x >= 0, largest, -largest)
        return gravac.Sent(comm.mean(sent), x - sent, jnp.sum(sent**2)), state


@caught_by(_laws.is_like_its_oracle)
class StaysAtTheFirstTurn(gravac.Bits):
    def exchange(self, x, state, *, step, **others):
        return super().exchange(x, state, step=0 * step, **others)


@caught_by(_laws.estimates_what_it_sends)
class ForgetsWhatItLearned(gravac.LowRank):
    def exchange(self, x, state, **others):
        sent, _ = super().exchange(x, state, **others)
        return sent, state


# Ladders -------------------------------------------------------------------------


@caught_by(_laws.takes_each_encoding_as_if_alone)
class StartsAnew(Ladder):
    def exchange(self, x, states, figures, **others):
        begun = jax.tree.map(jnp.asarray, self.init())
        return super().exchange(x, begun, figures, **others)


@caught_by(_laws.leaves_other_states_alone)
class CountsEveryStep(Ladder):
    def exchange(self, x, states, figures, **others):
        found, states = super().exchange(x, states, figures, **others)
        return found, jax.tree.map(lambda x: x + 1, states)


@caught_by(_laws.knows_the_energies)
class AddsItsEnergiesUp(Ladder):
    def exchange(self, x, states, figures, *, comm, **others):
        found, states = super().exchange(x, states, figures, comm=comm, **others)
        return found._replace(energies=found.energies * comm.replicas), states


@caught_by(_laws.sends_alike_looking_or_not)
class SendsLessUnseen(Ladder):
    def exchange(self, x, states, figures, *, looks, **others):
        less = x * jnp.where(looks, 1.0, 0.5)
        return super().exchange(less, states, figures, looks=looks, **others)


@caught_by(_laws.declares_the_bytes_of_each_rung)
class CountsNoFigures(Ladder):
    def traffic(self, rung, figures, replicas):
        return super().traffic(rung, 0, replicas)


# Memories ------------------------------------------------------------------------


@caught_by(_laws.telescopes, _laws.remembers_like_its_oracle)
class ForgetsToClear(gravac.Residual):
    def hold(self, residual, compensated, state):
        return state._replace(residual=compensated)


@caught_by(_laws.sleeps_through_a_skipped_step, _laws.telescopes)
class ForgetsInItsSleep(gravac.Residual):
    def held(self, state):
        return jnp.zeros_like(state.residual)


@caught_by(_laws.keeps_its_form)
class RemembersInHalfPrecision(gravac.Residual):
    def hold(self, residual, compensated, state):
        return state._replace(residual=residual.astype(jnp.bfloat16))

    def compensate(self, gradient, state):
        return gradient + state.residual.astype(jnp.float32), state


@caught_by(_laws.remembers_like_its_oracle, _laws.sleeps_through_a_skipped_step)
class MasksWhatItKept(gravac.Momentum):
    def hold(self, residual, compensated, state):
        kept = jnp.where(residual == compensated, 0, state.velocity)
        return state._replace(velocity=kept, residual=residual)


# Controllers ---------------------------------------------------------------------


class _Decides(gravac.GraVAC):
    """GraVAC with a change to its decision."""

    change: Callable[..., Any]

    def decide(self, evidence, state):
        return self.change(*super().decide(evidence, state))


@caught_by(_laws.stays_on_the_ladder)
class StepsOffTheLadder(_Decides):
    def change(self, rung, state):
        return rung + 1, state


@caught_by(_laws.compiles_once)
class ChangesItsType(_Decides):
    def change(self, rung, state):
        return rung, state._replace(is_settled=state.is_settled.astype(jnp.int32))


@caught_by(_laws.decides_alike)
class FollowsItsMood(_Decides):
    def change(self, rung, state):
        return (rung + next(MOOD)) % len(self.ladder), state


@caught_by(_laws.decides_like_its_oracle)
class GatesOnTheWrongSide(gravac.GraVAC):
    def _gate(self, state, gains):
        is_good = gains[state.candidate] < self.epsilon
        return jnp.where(is_good, state.candidate, state.minimum)


@caught_by(_laws.survives_overflow)
class SwallowsInfinity(gravac.GraVAC):
    def decide(self, evidence, state):
        rung, after = super().decide(evidence, state)
        averages = state.averages._replace(
            sent=state.averages.sent + evidence.energies,
            total=state.averages.total + evidence.energy,
        )
        return rung, after._replace(averages=averages)


@caught_by(_laws.waits_only_at_own_params, _laws.decides_like_its_oracle)
class WaitsAnywhere(gravac.Fastest):
    def _in_reach(self, at_own_params):
        return super()._in_reach(True)


@caught_by(_laws.believes_only_looks)
class SeesWhereNobodyLooks(gravac.GraVAC):
    look_every = 8
