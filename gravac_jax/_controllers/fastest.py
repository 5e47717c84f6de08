"""The default controller: the rung with the least predicted seconds per progress."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _checks
from gravac_jax._controllers import compression_gain, step_time_filter
from gravac_jax._controllers.base import Controller, Evidence

# All of these are arbitrary; simulations showed that they trade well.
MARGIN = 0.03  # how much faster another rung must be, so that noise moves nothing
DWELL = 3  # steps at a rung before the next is chosen
REST = 50  # steps from one visit to the next on a network that does not change
HASTE = 8  # after a change visits may be an eighth of the steps since then apart
TROUBLE = 0.5  # steps that a visit must be worth, so that a tie moves nothing
HORIZON = 500  # steps for which the knowledge from a visit is of use
LOOK_EVERY = 8  # steps
SMOOTHING = 0.1  # weight of the newest sample of a gradient


class FastestState(NamedTuple):
    """The state of Fastest.

    Attributes:
      home: `[]` int32, the rung believed to be fastest.
      current: `[]` int32, the rung of the next step: home, or the visited one.
      dwelt: `[]` int32, steps at this rung.
      rested: `[]` int32, steps since the last visit began.
      known: `[]` int32, steps since the network last changed, at most 400.
      averages: smoothed energies of the gradients.
      timing: what is known about step times.
    """

    home: jax.Array
    current: jax.Array
    dwelt: jax.Array
    rested: jax.Array
    known: jax.Array
    averages: compression_gain.Averages
    timing: step_time_filter.Timing

    def moved(self, fresh: "FastestState") -> "FastestState":
        """Forget step times: on other devices they are not known yet."""
        return self._replace(known=fresh.known, timing=fresh.timing)


@dataclasses.dataclass(frozen=True)
class Fastest(Controller):
    """Takes the rung at which training is predicted to progress fastest.

    In plain words::

        progress[rung] = |what the rung would send of the gradient| / |the gradient|
        seconds[rung]  = compute + selection + messages + bytes, each fitted to the
                         measured step times
        cost[rung]     = seconds[rung] / progress[rung]

        if another rung costs 3% less than this one: go there
        if three steps at another rung would teach something about the costs that is
        likely to save more in the next 500 steps than they cost: visit it

    Progress is measured on one gradient of the whole model, without the residual. So it
    does not depend on the rung in use, and no rung looks better than it is because
    another one let the residual grow. That the norm predicts how many dense steps a
    step is worth is an observation, not a theorem. It was right within a quarter where
    entries were sent more than a few times in a run. At factor 1000, where they were
    not, it was up to 2.7 times too hopeful: for runs of few steps let the ladder end at
    100.

    It is fastest in time, not in steps: on a slow network it takes many cheap steps
    that are worth less each. If your number of steps is fixed, say what each must be
    worth: with `least_progress=0.9`, a run is expected to get as far as dense steps
    would in nine tenths of its steps.

    Dense is a rung like any other, and the controller stays there if compression does
    not pay. It follows a network that changes: four unexpected times in a row, or a
    visit, show the change. Without measured times (`update(..., step_seconds=...)`) it
    believes the cost model.

    Cost:
      About a hundred tiny kernels a step; in one step of eight, a sample of the
      gradient and one of the bucket; visits of three steps each, at most one in fifty
      steps once the network has been stable for 400. On two hosts that share two cores,
      with 330 thousand params, a step took 2 to 4 ms longer than at a static factor.

    Args:
      ladder: factor 1, then larger ones. The default has a factor for each width of
        `gravac.Quantized`: 8, 4, 2 bits and 1.
      least_progress: the least progress of a rung that is taken, in [0, 1]; a dense
        step makes 1. A rung in use is left when it is 3% below.

    Raises:
      TypeError: if `ladder` is not a tuple of factors.
      ValueError: if the ladder is out of order or does not begin with 1, or
        `least_progress` is outside its bounds.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.Fastest(ladder=gravac.geometric(10, 100)).ladder
      (1.0, 10.0, 20.0, 40.0, 80.0, 100.0)

    References:
      GraVAC's objective, gain times throughput (Tyagi and Swany, IEEE CLOUD 2023), with
      the norm of the gradient in place of the energy of the error-fed one, and a model
      of the seconds in place of a table. The value of a visit is the knowledge gradient
      of Frazier, Powell and Dayanik, SIAM J. Control and Optimization 2008.
    """

    ladder: tuple[float, ...] = (1.0, 4.0, 8.0, 16.0, 32.0)
    least_progress: float = 0.0

    def __post_init__(self) -> None:
        _checks.ladder(self.ladder)
        why = "It is the least that a step may be worth, in dense steps."
        _checks.within(self.least_progress, "least_progress", 0, 1, why)
        _checks.dense_first(self.ladder, "Fastest")

    @property
    def uses_seconds(self) -> bool:
        """Whether it decides by how long steps take: yes."""
        return True

    @property
    def samples_gradient(self) -> bool:
        """Whether it needs `Evidence.gradient_energies`: always, for unused rungs."""
        return True

    @property
    def look_every(self) -> int:
        """Number of steps between two looks; 8 makes looking cheap in dense steps."""
        return LOOK_EVERY

    def init(self) -> tuple[jax.Array, FastestState]:
        """Start at the smallest compressed factor, and go to the largest from there.

        The times of these two tell how a step divides into parts, whatever the network.
        Dense steps would tell it, too, but each may take as long as a hundred others.
        """
        last = len(self.ladder) - 1
        start = lambda: jnp.full((), min(1, last), jnp.int32)
        return start(), FastestState(
            home=jnp.full((), last, jnp.int32),
            current=start(),
            dwelt=jnp.zeros((), jnp.int32),
            rested=jnp.zeros((), jnp.int32),
            known=jnp.zeros((), jnp.int32),
            averages=compression_gain.no_averages(len(self.ladder)),
            timing=step_time_filter.no_times(),
        )

    def decide(
        self, evidence: Evidence, state: FastestState
    ) -> tuple[jax.Array, FastestState]:
        """Learn, then go home, stay, or visit."""
        sampled = evidence.gradient_energies
        newer = compression_gain.smooth(state.averages, sampled, sampled[0], SMOOTHING)
        averages = _arrays.where(sampled[0] > 0, newer, state.averages)
        progress = compression_gain.gain(averages.sent, averages.total, "norm")
        # The rung in use is left at a lower bound than it would be taken at.
        is_home = jnp.arange(len(self.ladder)) == state.home
        least = self.least_progress * jnp.where(is_home, 1 - MARGIN, 1)
        # A rung without progress is never the fastest.
        progress = jnp.where(progress < least, 0, progress)
        progress = jnp.maximum(progress, 1e-6).at[0].set(1.0)
        timing, has_changed = self._time(evidence, state.timing)
        seconds, covariance = step_time_filter.predict(timing, evidence.predicted_parts)
        # In units of what home costs.
        cost = seconds / progress
        unit = cost[state.home]
        cost = cost / unit
        scale = 1 / (progress * unit)
        covariance = covariance * jnp.outer(scale, scale)

        dwelt = state.dwelt + 1
        rested = jnp.minimum(state.rested + 1, REST)
        known = jnp.where(has_changed, 0, jnp.minimum(state.known + 1, HASTE * REST))
        is_free = dwelt >= DWELL
        best = jnp.argmin(cost).astype(jnp.int32)
        # After a visit it goes home before it moves, unless it moves to where it is.
        is_at_home = (state.current == state.home) | (timing.times == 0)
        may_move = is_free & (is_at_home | (state.current == best))
        home = jnp.where(may_move & (cost[best] < 1 - MARGIN), best, state.home)

        least = step_time_filter.least_compute(timing) * scale
        worth = value_of_visits(cost, covariance, timing.noise, least, home)
        visited = jnp.argmax(worth).astype(jnp.int32)
        is_settled = (state.current == state.home) & (home == state.home)
        is_rested = rested * HASTE >= known
        is_visit = is_free & is_settled & is_rested & (worth[visited] > 0)

        rung = jnp.where(is_free, home, state.current)
        rung = jnp.where(is_visit, visited, rung)
        return rung, FastestState(
            home=home,
            current=rung,
            dwelt=jnp.where(rung == state.current, dwelt, 0),
            rested=jnp.where(is_visit, 0, rested),
            known=known,
            averages=averages,
            timing=timing,
        )

    def _time(
        self, evidence: Evidence, timing: step_time_filter.Timing
    ) -> tuple[step_time_filter.Timing, jax.Array]:
        seconds = evidence.measured_seconds
        rung = jnp.argmax(seconds > 0)  # several at once are rare; one will do
        return step_time_filter.observe(
            timing, evidence.predicted_parts, rung, seconds[rung]
        )


def value_of_visits(
    cost: jax.Array,
    covariance: jax.Array,
    noise: jax.Array,
    least: jax.Array,
    home: jax.Array,
) -> jax.Array:
    """Return what it is worth to visit each rung, in steps at home.

    A visit changes what is believed about every rung. Its worth is the expected gain
    from a rung that turns out cheaper than home (or from home, if a rung that looked
    cheaper turns out dearer), times the steps that have this gain, minus the price of
    the visit.

    Args:
      cost: `[rungs]` float32, in units of the cost of home.
      covariance: `[rungs, rungs]` float32, the covariance of `cost`.
      noise: `[]` float32, the relative variance of a measured time.
      least: `[rungs]` float32, the cost of a rung if only its compute took time.
      home: `[]` int32, the rung believed to be fastest.

    Returns:
      `[rungs]` float32; negative if a visit does not pay.
    """
    dearer = cost - cost[home]
    # [j, v]: how far a visit to v is likely to move j against home.
    variance = jnp.maximum(jnp.diag(covariance), 0)
    spread = jnp.sqrt(variance + noise * jnp.square(cost) / DWELL)
    against_home = covariance - covariance[home][None]
    moved = jnp.abs(against_home) / jnp.maximum(spread, 1e-12)[None]
    gained = _expected_excess(jnp.abs(dearer)[:, None], moved)
    gained = jnp.minimum(gained, jnp.maximum(cost[home] - least, 0)[:, None])
    gained = gained.at[home].set(0.0)
    worth = HORIZON * jnp.max(gained, axis=0) - DWELL * jnp.maximum(dearer, 0)
    return worth.at[home].set(-jnp.inf) - TROUBLE


def _expected_excess(dearer: jax.Array, deviation: jax.Array) -> jax.Array:
    """Return the mean of max(0, x) for a normal x with mean `-dearer`."""
    deviation = jnp.maximum(deviation, 1e-12)
    z = dearer / deviation
    density, beyond = jax.scipy.stats.norm.pdf(z), jax.scipy.stats.norm.cdf(-z)
    return jnp.maximum(deviation * density - dearer * beyond, 0)
