"""Components that break a law, kept to show that the laws can be broken.

Each differs from a good component by one slip, of the kind that gets past a reader.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

import gravac_jax as gravac
from gravac_jax._compressors.base import chosen
from gravac_jax._marking import compaction, quantile
from gravac_jax._payload import Payload

# How often a saboteur with a mood has been asked.
MOOD = itertools.count()

# Compressors ---------------------------------------------------------------------


class _SelectsBy(gravac.TopK):
    """Top-k of another score."""

    def score(self, bucket: jax.Array) -> jax.Array:
        raise NotImplementedError

    def mark(self, bucket, state, *, k, bracket, key):
        bits = compaction.magnitude_bits(self.score(bucket))
        return chosen(quantile.largest(bits, k)), state


class _Tampers(gravac.TopK):
    """Top-k, then a change to the payload."""

    def tamper(self, payload: Payload) -> Payload:
        raise NotImplementedError

    def compress(self, bucket, state, *, k, key):
        payload, state = super().compress(bucket, state, k=k, key=key)
        return self.tamper(payload), state


class SendsTheSmallest(_SelectsBy):
    def score(self, bucket):
        return 1 / (1 + jnp.abs(bucket))


class ForgetsTheAbsoluteValue(_SelectsBy):
    def score(self, bucket):
        return jnp.maximum(bucket, 0)


class IsBlindAboveOne(_SelectsBy):
    def score(self, bucket):
        return jnp.minimum(jnp.abs(bucket), 1)


class HasMoods(_SelectsBy):
    def score(self, bucket):
        return jnp.roll(jnp.abs(bucket), next(MOOD))


class SendsOneIndexTwice(_Tampers):
    def tamper(self, payload):
        return jax.tree.map(lambda x: x.at[-1].set(x[0]), payload)


class SendsOneFewer(_Tampers):
    def tamper(self, payload):
        return jax.tree.map(lambda x: x[:-1], payload)


class AimsTooHigh(gravac.TopK):
    def mark(self, bucket, state, *, k, bracket, key):
        return chosen(jnp.abs(bucket) > jnp.max(jnp.abs(bucket))), state


class SendsInOrderOfMagnitude(_Tampers):
    def tamper(self, payload):
        order = jnp.argsort(-jnp.abs(payload.values))
        return jax.tree.map(lambda x: x[order], payload)


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


class DividesBySenders(_Gathers):
    def change(self, mean, residual, bucket, comm):
        senders = comm.mean((bucket != residual).astype(jnp.float32))
        return mean / jnp.maximum(senders, 1 / comm.replicas), residual


class ForgetsWhatRoundingDrops(_Gathers):
    def change(self, mean, residual, bucket, comm):
        return mean, jnp.where(residual == bucket, residual, 0)


class KeepsWhatItSentDense(_Gathers):
    def change(self, mean, residual, bucket, comm):
        return mean, jnp.where(jnp.any(residual != 0), residual, bucket)


class TrustsItselfMore(_Gathers):
    def change(self, mean, residual, bucket, comm):
        return mean + (bucket - residual) / comm.replicas, residual


class FavorsTheFirstReplica(_Gathers):
    def change(self, mean, residual, bucket, comm):
        first = comm.gather(bucket - residual)[0]
        return mean + first / comm.replicas, residual


class IsSilentAlone(_Gathers):
    def change(self, mean, residual, bucket, comm):
        return mean * float(comm.axis_name is not None), residual


class TellsTheEnergyOfTheTop(gravac.AllGather):
    def exchange(self, bucket, state, rung, **others):
        good, state = super().exchange(bucket, state, rung, **others)
        top = jnp.broadcast_to(good.energies[-1], good.energies.shape)
        return good._replace(energies=top), state


class AddsItsEnergiesUp(gravac.AllGather):
    def exchange(self, bucket, state, rung, *, comm, **others):
        good, state = super().exchange(bucket, state, rung, comm=comm, **others)
        return good._replace(mean_energies=good.mean_energies * comm.replicas), state


class TalksBeforehand(gravac.AllGather):
    def exchange(self, bucket, state, rung, **others):
        bucket = jax.lax.pmean(bucket, "data")
        return super().exchange(bucket, state, rung, **others)


class SendsInItsSleep(gravac.AllGather):
    def exchange(self, bucket, state, rung, *, ladder, **others):
        rung = jnp.minimum(rung, len(ladder) - 1)
        return super().exchange(bucket, state, rung, ladder=ladder, **others)


class SendsLessUnseen(gravac.AllGather):
    def exchange(self, bucket, state, rung, *, looks=True, **others):
        seen = super().exchange(bucket, state, rung, looks=looks, **others)
        unseen = super().exchange(bucket / 2, state, rung, looks=looks, **others)
        return jax.tree.map(lambda x, y: jnp.where(looks, x, y), seen, unseen)


class CountsNoIndices(gravac.AllGather):
    def traffic(self, n, factor, replicas):
        traffic = super().traffic(n, factor, replicas)
        return traffic._replace(payload_bytes=4 * traffic.entries)


# Memories ------------------------------------------------------------------------


class ForgetsToClear(gravac.Residual):
    def retain(self, residual, compensated, state):
        return state._replace(residual=compensated)


class IsStaleAfterDenseSteps(gravac.Residual):
    def retain(self, residual, compensated, state):
        kept = jnp.where(jnp.any(residual != 0), residual, state.residual)
        return state._replace(residual=kept)


class ForgetsInItsSleep(gravac.Residual):
    def held(self, state, n):
        return jnp.zeros_like(state.residual)


class RemembersInHalfPrecision(gravac.Residual):
    def retain(self, residual, compensated, state):
        return state._replace(residual=residual.astype(jnp.bfloat16))

    def compensate(self, gradient, state):
        return gradient + state.residual.astype(jnp.float32), state


class LeavesDenseLeavesBehind(gravac.Momentum):
    def follow(self, mean, state):
        return mean, state


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


class StepsOffTheLadder(_Decides):
    def change(self, rung, state):
        return rung + 1, state


class SearchesOffTheLadder(_Decides):
    def change(self, rung, state):
        return rung, state._replace(candidate=state.candidate + 1)


class ChangesItsType(_Decides):
    def change(self, rung, state):
        return rung, state._replace(is_settled=state.is_settled.astype(jnp.int32))


class FollowsItsMood(_Decides):
    def change(self, rung, state):
        return (rung + next(MOOD)) % len(self.ladder), state


class GatesOnTheWrongSide(gravac.GraVAC):
    def _gate(self, state, gains):
        is_good = gains[state.candidate] < self.epsilon
        return jnp.where(is_good, state.candidate, state.minimum)


class SettlesOnTheLargerFactor(gravac.GraVAC):
    def _move(self, state, gains):
        moved = super()._move(state, gains)
        larger = jnp.minimum(moved.candidate + 1, len(self.ladder) - 1)
        candidate = jnp.where(moved.is_settled, larger, moved.candidate)
        return moved._replace(candidate=candidate)


class SwallowsInfinity(gravac.GraVAC):
    def decide(self, evidence, state):
        rung, after = super().decide(evidence, state)
        averages = state.averages._replace(
            sent=state.averages.sent + evidence.energies,
            total=state.averages.total + evidence.energy,
        )
        return rung, after._replace(averages=averages)


class SeesWhereNobodyLooks(gravac.GraVAC):
    @property
    def look_every(self):
        return 8
