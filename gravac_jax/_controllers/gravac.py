"""GraVAC's controller: climb while the gain allows it and the throughput rewards it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _refuse
from gravac_jax._controllers.base import Controller, Evidence, check_ladder
from gravac_jax._encodings.base import Encoding
from gravac_jax._encodings.dense import Dense
from gravac_jax._encodings.top_k import TopK
from gravac_jax._evidence import compression_gain


class GraVACState(NamedTuple):
    """The state of GraVAC.

    Attributes:
      minimum: `[]` int32, the rung of the paper's theta_min.
      candidate: `[]` int32, the rung under evaluation, the paper's theta_s theta_min.
      is_settled: `[]` bool, whether the search has ended at `candidate`.
      is_measured: `[]` bool, whether `throughputs` holds measured times.
      averages: smoothed energies.
      throughputs: `[rungs]` float32, the paper's table of compression throughputs; 0
        if a rung has none yet.
    """

    minimum: jax.Array
    candidate: jax.Array
    is_settled: jax.Array
    is_measured: jax.Array
    averages: compression_gain.Averages
    throughputs: jax.Array

    def moved(self, fresh: "GraVACState") -> "GraVACState":
        """Forget the table and search again: on other devices both are different."""
        return fresh._replace(averages=self.averages)


@dataclasses.dataclass(frozen=True, repr=False)
class GraVAC(Controller):
    """Algorithm 1 of GraVAC: an epsilon gate at every step, a search by windows.

    In plain words::

        gain_minimum, gain_candidate = smoothed gains at the two rungs
        if   gain_candidate >= epsilon: rung = candidate
        elif gain_minimum   >= epsilon: rung = minimum
        else:                           rung = dense
        throughput[rung] = gain[rung] / step_seconds[rung]

        every `window` steps, until settled:
            if (gain_minimum - gain_candidate) / gain_minimum <= omega:
                minimum = candidate
            if the two best throughputs differ by at most omega:
                candidate = the lower rung of the two; settled
            else:
                candidate = the next rung up, if there is one

    The scaling policy is the ladder: `gravac.TopK.exponential` or `TopK.geometric`. The
    paper multiplies a factor at the end of a window; here the controller climbs to the
    next rung. The gate decides from the smoothed gains up to this step. That of the
    rung taken is exact, those of others are estimated from a sample, and the replicas
    exchange one scalar a rung for them. Throughputs come from measured step times as
    soon as `update` is given one, and from the cost model until then. If there are so
    many replicas that the first rungs are dense steps, it starts above them.

    Args:
      ladder: `Dense()`, then the encodings to explore. The default is geometric: on the
        quickstart it saved more than exponential at the same loss.
      epsilon: smallest gain that may be sent; raising it sends more. The default was
        measured on small models; the paper uses 0.7 and 0.9 on larger ones. Gains are
        shares of energies: square an epsilon that is meant for norms.
      omega: relative difference that counts as none; 0.01 in the paper.
      window: steps between two moves; 500 or 2,000 in the paper.

    Raises:
      TypeError: if `ladder` is not a tuple of encodings.
      ValueError: if the ladder does not begin with `Dense()` and go on from there, or
        an argument is out of its range.

    Example:
      >>> import gravac_jax as gravac
      >>> controller = gravac.GraVAC(gravac.TopK.exponential(10, 1000), epsilon=0.7)
      >>> tx = gravac.transform(send=controller)

    References:
      Tyagi and Swany, GraVAC: Adaptive Compression for Communication-Efficient
      Distributed DL Training, IEEE CLOUD 2023, Algorithm 1.
    """

    uses_seconds = True  # by throughputs
    looks_at = "bucket"  # for the gains of all rungs
    ladder: tuple[Encoding, ...] = TopK.geometric(10, 1000)
    epsilon: float = 0.04
    omega: float = 0.01
    window: int = 100

    def __post_init__(self) -> None:
        check_ladder(self.ladder, "GraVAC", least=2)
        if self.ladder[0] != Dense():
            raise ValueError(
                f"the ladder of GraVAC must begin with gravac.Dense(), the step that it"
                f" falls back to, got {_arrays.brief(self.ladder)}."
            )
        _refuse.number(self.epsilon, "epsilon", low=0, high=1)
        _refuse.number(self.omega, "omega", low=0, high=1)
        _refuse.count(self.window, "window", "steps")

    def init(self) -> tuple[jax.Array, GraVACState]:
        """Start at the first encoding after dense, with the next one as candidate."""
        rungs = len(self.ladder)
        return jnp.int32(1), GraVACState(
            minimum=jnp.int32(1),
            candidate=jnp.int32(min(2, rungs - 1)),
            is_settled=jnp.zeros((), bool),
            is_measured=jnp.zeros((), bool),
            averages=compression_gain.no_averages(rungs),
            throughputs=jnp.zeros(rungs, jnp.float32),
        )

    def decide(
        self, evidence: Evidence, state: GraVACState
    ) -> tuple[jax.Array, GraVACState]:
        """Apply the gate, record throughputs, and move at the end of a window."""
        rungs = jnp.arange(len(self.ladder))
        lowest = jnp.minimum(evidence.first_sparse, rungs.size - 1)
        state = self._started_at(lowest, state)
        # The paper's smoothing factor N / 100 exceeds 1 beyond 100 workers, which would
        # make an average swing, so it is capped.
        weight = min(1.0, evidence.replicas / 100)
        seen = evidence.energies, evidence.energy
        averages = compression_gain.smooth(state.averages, *seen, weight)
        gains = compression_gain.gain(averages.sent, averages.total)
        rung = self._gate(state, gains)

        # Predictions and measured times are not on one scale, and the search compares
        # entries with each other: the first time clears what was predicted. A time that
        # comes late is combined with the present gain of its rung.
        is_left_out = (rungs > 0) & (rungs < lowest)
        measured = jnp.where(is_left_out, 0.0, evidence.measured_seconds)
        is_measured = state.is_measured | jnp.any(measured > 0)
        predicted = jnp.where(rungs == rung, evidence.predicted_parts.sum(-1), 0.0)
        seconds = jnp.where(is_measured, measured, predicted)
        table = jnp.where(is_measured & ~state.is_measured, 0.0, state.throughputs)
        state = state._replace(
            averages=averages,
            is_measured=is_measured,
            throughputs=jnp.where(seconds > 0, gains / seconds, table),
        )

        # A window ends where the paper's `i % window == 0` holds, counting from 1. It
        # does not limit how far the averages reach back. A step that gravac.guard skips
        # decides nothing, so a window that would end there goes on into the next.
        now = evidence.step + 1
        is_end = now // self.window > (now - evidence.round_steps) // self.window
        is_move = is_end & ~state.is_settled
        return rung, _arrays.where(is_move, self._move(state, gains), state)

    def _started_at(self, lowest: jax.Array, state: GraVACState) -> GraVACState:
        """Begin above the rungs that are dense because there are so many replicas.

        They have the throughput of rung 0, and two equal throughputs end the search.
        """
        top = len(self.ladder) - 1
        least = lambda rung: jnp.where(state.is_settled, 0, jnp.minimum(rung, top))
        return state._replace(
            minimum=jnp.maximum(state.minimum, least(lowest)),
            candidate=jnp.maximum(state.candidate, least(lowest + 1)),
        )

    def _gate(self, state: GraVACState, gains: jax.Array) -> jax.Array:
        # Rung 0 sends the whole error-fed gradient, which empties the residual.
        fallback = jnp.where(gains[state.minimum] >= self.epsilon, state.minimum, 0)
        is_good = gains[state.candidate] >= self.epsilon
        return jnp.where(is_good, state.candidate, fallback).astype(jnp.int32)

    def _move(self, state: GraVACState, gains: jax.Array) -> GraVACState:
        """Run the paper's CheckGraVAC, by its prose where Algorithm 1 differs."""
        # Promotion comes before the step up. Algorithm 1 scales first and would promote
        # to a factor that was not measured yet; the prose says "to the currently
        # evaluated CF". It also takes the absolute difference, so that a candidate of
        # higher gain would not be promoted.
        low, high = gains[state.minimum], gains[state.candidate]
        is_equal = low - high <= self.omega * low
        minimum = jnp.where(is_equal, state.candidate, state.minimum)

        # Of two equal throughputs, Algorithm 1 takes the second best and the prose the
        # lower factor. These coincide only if throughput grows with the factor.
        (best, second), rungs = jax.lax.top_k(state.throughputs, 2)
        is_settled = (second > 0) & (best - second <= self.omega * second)

        # Entries never expire, as in Algorithm 1, so a single odd step can settle the
        # search, even on dense if dense is among the best. Algorithm 1 goes on scaling
        # after it has settled; here the search stays.
        climbed = jnp.minimum(state.candidate + 1, len(self.ladder) - 1)
        candidate = jnp.where(is_settled, jnp.min(rungs), climbed)
        return state._replace(
            # With a candidate below the minimum the gate would have nothing to try.
            minimum=jnp.minimum(minimum, candidate).astype(jnp.int32),
            candidate=candidate.astype(jnp.int32),
            is_settled=is_settled,
        )
