"""The paper's controller: climb while the gain allows and the throughput rewards it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _checks, _gain, _ladder, _throughput
from gravac_jax._controllers.base import Controller, Evidence


class GraVACState(NamedTuple):
    """What GraVAC carries from step to step.

    Attributes:
      minimum: `[]` int32, rung of the paper's theta_min.
      candidate: `[]` int32, rung under evaluation, theta_s theta_min in the paper.
      is_settled: `[]` bool, whether the search has ended at `candidate`.
      is_measured: `[]` bool, whether `throughputs` holds measured times.
      averages: smoothed energies.
      throughputs: `[rungs]` float32, the paper's table of compression throughputs; 0
        where a rung has none yet.
    """

    minimum: jax.Array
    candidate: jax.Array
    is_settled: jax.Array
    is_measured: jax.Array
    averages: _gain.Averages
    throughputs: jax.Array

    def moved(self, fresh: "GraVACState") -> "GraVACState":
        """On other devices the table is filled, and the search ends, anew."""
        return self._replace(
            is_settled=fresh.is_settled,
            is_measured=fresh.is_measured,
            throughputs=fresh.throughputs,
        )


@dataclasses.dataclass(frozen=True)
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
                candidate = the smaller factor of the two; settled
            else:
                candidate = the next rung up

    The scaling policy is the ladder: `gravac.exponential` or `gravac.geometric`.
    The gate decides the rung of the next step from the smoothed gains up to this one;
    for that the replicas exchange one scalar per rung. Throughputs come from measured
    step times where `update` is given any, and from the wire-cost model until then.
    With so many replicas that the first factors are dense steps, it starts above them.

    Args:
      epsilon: smallest gain that may be sent; raising it sends more. The default is
        measured (the README says how); the paper uses 0.7 and 0.9 on larger models.
      ladder: factor 1, then the factors to explore. The default is geometric, which
        a record of the quickstart has saving more at the same loss than exponential.
      omega: relative difference that counts as none. 0.01 in the paper.
      window: steps between two moves. 500 or 2,000 in the paper.
      gain: "energy" for squared norms, as StepInfo reports them, "norm" for their
        square roots. An epsilon of 0.2 on norms is one of 0.04 on energies.
      smoothing: weight of the newest step in the averages, in (0, 1]; None for the
        paper's replicas / 100, at most 1.

    Raises:
      TypeError: if `ladder` is no tuple of factors.
      ValueError: if the ladder is out of order or does not begin with 1, or a knob is
        out of its range.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.GraVAC(epsilon=0.9, ladder=gravac.geometric(10, 100)).ladder
      (1.0, 10.0, 20.0, 40.0, 80.0, 100.0)

    References:
      Tyagi and Swany, GraVAC: Adaptive Compression for Communication-Efficient
      Distributed DL Training, IEEE CLOUD 2023, Algorithm 1.
    """

    epsilon: float = 0.04
    ladder: tuple[float, ...] = _ladder.geometric(10, 1000)
    omega: float = 0.01
    window: int = 100
    gain: str = "energy"
    smoothing: float | None = None

    def __post_init__(self) -> None:
        _checks.within(self.epsilon, "epsilon", 0, 1, "It is a gain.")
        _checks.ladder(self.ladder)
        _checks.dense_first(self.ladder, "GraVAC")
        _checks.within(self.omega, "omega", 0, 1, "It is a relative difference.")
        _checks.count(self.window, "window", "steps")
        _checks.one_of(self.gain, "gain", _gain.GAINS)
        if self.smoothing is not None:
            why = "It is the weight of the newest step; None means replicas / 100."
            _checks.within(self.smoothing, "smoothing", 1e-6, 1, why)

    def init(self) -> tuple[jax.Array, GraVACState]:
        """Start at the smallest compressed factor, with the next one as candidate."""
        rungs = len(self.ladder)
        return jnp.int32(1), GraVACState(
            minimum=jnp.int32(1),
            candidate=jnp.int32(min(2, rungs - 1)),
            is_settled=jnp.zeros((), bool),
            is_measured=jnp.zeros((), bool),
            averages=_gain.no_averages(rungs),
            throughputs=jnp.zeros(rungs, jnp.float32),
        )

    def decide(
        self, evidence: Evidence, state: GraVACState
    ) -> tuple[jax.Array, GraVACState]:
        """Gate, record, and at the end of a window move."""
        evidence, state = self._above(evidence, state)
        # The paper's smoothing factor N / 100 exceeds 1 beyond 100 workers, where an
        # average would swing: capped.
        weight = self.smoothing or min(1.0, evidence.replicas / 100)
        averages = _gain.smooth(
            state.averages, evidence.energies, evidence.energy, weight
        )
        gains = _gain.gain(averages.sent, averages.total, self.gain)
        state = self._record(state._replace(averages=averages), gains, evidence)
        rung = self._gate(state, gains)
        state = self._record_prediction(state, rung, gains, evidence)

        # The end of a window: the paper's `i % window == 0`, counting steps from 1. It
        # has nothing to do with how far the averages reach back. A skipped step decides
        # nothing, so a window that ends on one goes on into the next.
        is_end = (evidence.step + 1) % self.window == 0
        is_move = is_end & ~state.is_settled
        moved = self._move(state, gains)
        return rung, jax.tree.map(
            lambda new, old: jnp.where(is_move, new, old), moved, state
        )

    def _above(
        self, evidence: Evidence, state: GraVACState
    ) -> tuple[Evidence, GraVACState]:
        """Act as if the rungs that are dense by another name were not on the ladder.

        They have the throughput of rung 0, and two that are alike end the search.
        """
        rungs, top = jnp.arange(len(self.ladder)), len(self.ladder) - 1
        lowest = jnp.minimum(evidence.first_sparse, top)
        seconds = evidence.measured_seconds
        is_left_out = (rungs > 0) & (rungs < lowest)
        at_least = lambda x, low: jnp.where(state.is_settled, x, jnp.maximum(x, low))
        return evidence._replace(
            measured_seconds=jnp.where(is_left_out, jnp.nan, seconds)
        ), state._replace(
            minimum=at_least(state.minimum, lowest),
            candidate=at_least(state.candidate, jnp.minimum(lowest + 1, top)),
        )

    def _gate(self, state: GraVACState, gains: jax.Array) -> jax.Array:
        # Rung 0 is dense and sends the error-fed gradient, which empties the residual.
        fallback = jnp.where(gains[state.minimum] >= self.epsilon, state.minimum, 0)
        is_good = gains[state.candidate] >= self.epsilon
        return jnp.where(is_good, state.candidate, fallback).astype(jnp.int32)

    def _record(
        self, state: GraVACState, gains: jax.Array, evidence: Evidence
    ) -> GraVACState:
        """Enter measured times; the first one clears what the model had guessed.

        A guess of the network alone and a measured step are not on one scale, and the
        search compares entries with each other. A time that comes late is multiplied
        with the gain that its rung has now.
        """
        seconds = evidence.measured_seconds
        is_new = seconds > 0  # False where NaN
        is_measured = state.is_measured | jnp.any(is_new)
        is_first = is_measured & ~state.is_measured
        table = jnp.where(is_first, 0.0, state.throughputs)
        measured = _throughput.compression_throughput(gains, seconds)
        return state._replace(
            throughputs=jnp.where(is_new, measured, table), is_measured=is_measured
        )

    def _record_prediction(
        self,
        state: GraVACState,
        rung: jax.Array,
        gains: jax.Array,
        evidence: Evidence,
    ) -> GraVACState:
        predicted = _throughput.compression_throughput(
            gains, evidence.predicted_seconds
        )
        is_here = (jnp.arange(len(self.ladder)) == rung) & ~state.is_measured
        throughputs = jnp.where(is_here, predicted, state.throughputs)
        return state._replace(throughputs=throughputs)

    def _move(self, state: GraVACState, gains: jax.Array) -> GraVACState:
        """The paper's CheckGraVAC, by its prose where Algorithm 1 differs from it."""
        # Promotion comes before the step up: Algorithm 1 scales first and would promote
        # to a factor that nobody measured yet; the prose says "to the currently
        # evaluated CF". And it takes the absolute difference, by which a candidate of
        # higher gain would not do.
        low, high = gains[state.minimum], gains[state.candidate]
        is_equal = low - high <= self.omega * low
        minimum = jnp.where(is_equal, state.candidate, state.minimum)

        # Of two throughputs that are alike, Algorithm 1 takes the second best; the
        # prose takes the lower factor. They coincide only if throughput grows with it.
        (best, second), rungs = jax.lax.top_k(state.throughputs, 2)
        is_settled = (second > 0) & (best - second <= self.omega * second)

        # Entries are the last ones written and never expire, as in Algorithm 1, so one
        # odd step can settle the search; also on dense, where that is among the best.
        # Algorithm 1 goes on to scale after it has settled; we stay.
        climbed = jnp.minimum(state.candidate + 1, len(self.ladder) - 1)
        candidate = jnp.where(is_settled, jnp.min(rungs), climbed)
        return state._replace(
            # A candidate below the minimum would leave the gate with nothing to try.
            minimum=jnp.minimum(minimum, candidate).astype(jnp.int32),
            candidate=candidate.astype(jnp.int32),
            is_settled=is_settled,
        )
