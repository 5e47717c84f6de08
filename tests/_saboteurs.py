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
from gravac_jax import _arrays
from gravac_jax._selection import quantile
from gravac_jax._selection.entries import Payload

MOOD = itertools.count()  # how often a saboteur with a mood has been asked
CAUGHT_BY: dict[type, tuple[Callable[..., None], ...]] = {}  # by every saboteur


def caught_by(*laws: Callable[..., None]) -> Callable[[type], type]:
    """Register a saboteur with the laws that catch it."""

    def register(kind: type) -> type:
        CAUGHT_BY[kind] = laws
        return kind

    return register


# Compressors ---------------------------------------------------------------------


class _SelectsBy(gravac.TopK):
    """Top-k of another score."""

    def score(self, bucket: jax.Array) -> jax.Array:
        raise NotImplementedError

    def mark(self, bucket, state, wanted):
        bits = _arrays.magnitude_bits(self.score(bucket))
        return gravac.Choice.from_mask(quantile.k_largest(bits, wanted.k)), state


class _Tampers(gravac.TopK):
    """Top-k, then a change to the payload."""

    def tamper(self, payload: Payload) -> Payload:
        raise NotImplementedError

    def compress(self, bucket, state, *, k, key):
        payload, state = super().compress(bucket, state, k=k, key=key)
        return self.tamper(payload), state


@caught_by(_laws.contracts, _laws.selects_like_its_oracle)
class SendsTheSmallest(_SelectsBy):
    def score(self, bucket):
        return 1 / (1 + jnp.abs(bucket))


@caught_by(_laws.selects_like_its_oracle)
class ForgetsTheAbsoluteValue(_SelectsBy):
    def score(self, bucket):
        return jnp.maximum(bucket, 0)


@caught_by(_laws.commutes_with_scaling, _laws.selects_like_its_oracle)
class IsBlindAboveOne(_SelectsBy):
    def score(self, bucket):
        return jnp.minimum(jnp.abs(bucket), 1)


@caught_by(_laws.is_itself_under_jit, _laws.is_itself_under_vmap)
class HasMoods(_SelectsBy):
    def score(self, bucket):
        return jnp.roll(jnp.abs(bucket), next(MOOD))


@caught_by(_laws.sends_its_share)
class SendsOneIndexTwice(_Tampers):
    def tamper(self, payload):
        return jax.tree.map(lambda x: x.at[-1].set(x[0]), payload)


@caught_by(_laws.sends_its_share)
class SendsOneFewer(_Tampers):
    def tamper(self, payload):
        return jax.tree.map(lambda x: x[:-1], payload)


@caught_by(_laws.sends_something, _laws.selects_like_its_oracle)
class AimsTooHigh(gravac.TopK):
    def mark(self, bucket, state, wanted):
        return gravac.Choice.from_mask(
            jnp.abs(bucket) > jnp.max(jnp.abs(bucket))
        ), state


@caught_by(_laws.sends_its_share)
class SendsInOrderOfMagnitude(_Tampers):
    def tamper(self, payload):
        order = jnp.argsort(-jnp.abs(payload.values))
        return jax.tree.map(lambda x: x[order], payload)


@caught_by(_laws.sends_what_is_there, _laws.leaves_zeros_alone)
class NormalizesOnTheWay(_Tampers):
    def tamper(self, payload):
        norm = jnp.sqrt(jnp.sum(jnp.square(payload.values)))
        return payload._replace(values=payload.values / norm * norm)


# Exchanges -----------------------------------------------------------------------


class _Gathers(gravac.AllGather):
    """An all-gather with a change to what comes out; `sent` is bucket - residual."""

    def change(self, mean, residual, bucket, comm) -> Any:
        raise NotImplementedError

    def exchange(self, bucket, state, rung, *, comm, **others):
        good, state = super().exchange(bucket, state, rung, comm=comm, **others)
        mean, residual = self.change(good.mean, good.residual, bucket, comm)
        return good._replace(mean=mean, residual=residual), state


@caught_by(_laws.averages_what_was_sent, _laws.exchanges_like_its_oracle)
class DividesBySenders(_Gathers):
    def change(self, mean, residual, bucket, comm):
        senders = comm.mean((bucket != residual).astype(jnp.float32))
        return mean / jnp.maximum(senders, 1 / comm.replicas), residual


@caught_by(_laws.averages_what_was_sent, _laws.exchanges_like_its_oracle)
class ForgetsWhatRoundingDrops(_Gathers):
    def change(self, mean, residual, bucket, comm):
        return mean, jnp.where(residual == bucket, residual, 0)


@caught_by(
    _laws.sends_everything_at_factor_1,
    _laws.averages_what_was_sent,
    _laws.exchanges_like_its_oracle,
)
class KeepsWhatItSentDense(_Gathers):
    def change(self, mean, residual, bucket, comm):
        return mean, jnp.where(jnp.any(residual != 0), residual, bucket)


@caught_by(_laws.agrees_on_all_replicas)
class TrustsItselfMore(_Gathers):
    def change(self, mean, residual, bucket, comm):
        return mean + (bucket - residual) / comm.replicas, residual


@caught_by(_laws.ignores_the_order_of_replicas)
class FavorsTheFirstReplica(_Gathers):
    def change(self, mean, residual, bucket, comm):
        first = comm.gather(bucket - residual)[0]
        return mean + first / comm.replicas, residual


@caught_by(_laws.is_the_same_alone)
class IsSilentAlone(_Gathers):
    def change(self, mean, residual, bucket, comm):
        return mean * float(comm.axis_name is not None), residual


@caught_by(_laws.knows_what_it_sent)
class TellsTheEnergyOfTheTop(gravac.AllGather):
    def exchange(self, bucket, state, rung, **others):
        good, state = super().exchange(bucket, state, rung, **others)
        top = jnp.broadcast_to(good.energies[-1], good.energies.shape)
        return good._replace(energies=top), state


@caught_by(_laws.averages_energies)
class AddsItsEnergiesUp(gravac.AllGather):
    def exchange(self, bucket, state, rung, *, comm, **others):
        good, state = super().exchange(bucket, state, rung, comm=comm, **others)
        return good._replace(mean_energies=good.mean_energies * comm.replicas), state


@caught_by(_laws.declares_its_bytes)
class TalksBeforehand(gravac.AllGather):
    def exchange(self, bucket, state, rung, **others):
        bucket = jax.lax.pmean(bucket, "data")
        return super().exchange(bucket, state, rung, **others)


@caught_by(_laws.sends_alike_looking_or_not)
class SendsLessUnseen(gravac.AllGather):
    def exchange(self, bucket, state, rung, *, looks: Any = True, **others):
        seen = super().exchange(bucket, state, rung, looks=looks, **others)
        unseen = super().exchange(bucket / 2, state, rung, looks=looks, **others)
        return jax.tree.map(lambda x, y: jnp.where(looks, x, y), seen, unseen)


@caught_by(_laws.declares_its_bytes)
class CountsNoIndices(gravac.AllGather):
    def traffic(self, n, factor, replicas):
        traffic = super().traffic(n, factor, replicas)
        return traffic._replace(payload_bytes=4 * traffic.entries)


# Memories ------------------------------------------------------------------------


@caught_by(_laws.telescopes, _laws.remembers_like_its_oracle)
class ForgetsToClear(gravac.Residual):
    def retain(self, residual, compensated, state):
        return state._replace(residual=compensated)


@caught_by(_laws.telescopes, _laws.remembers_like_its_oracle)
class IsStaleAfterDenseSteps(gravac.Residual):
    def retain(self, residual, compensated, state):
        kept = jnp.where(jnp.any(residual != 0), residual, state.residual)
        return state._replace(residual=kept)


@caught_by(_laws.sleeps_through_a_skipped_step, _laws.telescopes)
class ForgetsInItsSleep(gravac.Residual):
    def held(self, state, n):
        return jnp.zeros_like(state.residual)


@caught_by(_laws.keeps_its_form)
class RemembersInHalfPrecision(gravac.Residual):
    def retain(self, residual, compensated, state):
        return state._replace(residual=residual.astype(jnp.bfloat16))

    def compensate(self, gradient, state):
        return gradient + state.residual.astype(jnp.float32), state


@caught_by(_laws.remembers_like_its_oracle, _laws.sleeps_through_a_skipped_step)
class MasksWhatItKept(gravac.Momentum):
    def retain(self, residual, compensated, state):
        kept = jnp.where(residual == compensated, 0, state.velocity)
        return state._replace(velocity=kept, residual=residual)


# Controllers ---------------------------------------------------------------------


class _Decides(gravac.GraVAC):
    """GraVAC with a change to its decision."""

    def change(self, rung, state) -> Any:
        raise NotImplementedError

    def decide(self, evidence, state):
        return self.change(*super().decide(evidence, state))


@caught_by(_laws.stays_on_the_ladder)
class StepsOffTheLadder(_Decides):
    def change(self, rung, state):
        return rung + 1, state


@caught_by(_laws.stays_on_the_ladder)
class SearchesOffTheLadder(_Decides):
    def change(self, rung, state):
        return rung, state._replace(candidate=state.candidate + 1)


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


@caught_by(_laws.decides_like_its_oracle)
class SettlesOnTheLargerFactor(gravac.GraVAC):
    def _move(self, state, gains):
        moved = super()._move(state, gains)
        larger = jnp.minimum(moved.candidate + 1, len(self.ladder) - 1)
        candidate = jnp.where(moved.is_settled, larger, moved.candidate)
        return moved._replace(candidate=candidate)


@caught_by(_laws.survives_overflow)
class SwallowsInfinity(gravac.GraVAC):
    def decide(self, evidence, state):
        rung, after = super().decide(evidence, state)
        averages = state.averages._replace(
            sent=state.averages.sent + evidence.energies,
            total=state.averages.total + evidence.energy,
        )
        return rung, after._replace(averages=averages)


@caught_by(_laws.believes_only_looks)
class SeesWhereNobodyLooks(gravac.GraVAC):
    @property
    def look_every(self):
        return 8
