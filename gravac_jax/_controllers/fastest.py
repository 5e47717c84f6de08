"""The default controller: the least predicted seconds per progress."""

import dataclasses
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _refuse
from gravac_jax._controllers import base
from gravac_jax._controllers.base import Controller, Evidence, Predictions
from gravac_jax._encodings.base import Encoding
from gravac_jax._encodings.bits import Bits
from gravac_jax._encodings.dense import Dense
from gravac_jax._evidence import compression_gain, step_time_filter
from gravac_jax._evidence.progress import WAITING_COST, WAITING_COST_AT_SHARED
from gravac_jax._evidence.progress import progress as progress_of

# All of these are arbitrary; simulations showed that they trade well. Steps at a rung
# are steps that exchange.
MARGIN = 0.03  # how much faster another rung must be, so that noise moves nothing
DWELL = 3  # steps at a rung before the next is chosen
LATE = 2  # exchanges between a decision and the one that takes it
REST = 50  # steps from one visit to the next on a network that does not change
HASTE = 8  # after a change visits may be an eighth of the steps since then apart
TROUBLE = 0.5  # steps that a visit must be worth, so that a tie moves nothing
HORIZON = 500  # steps for which the knowledge from a visit is of use
LOOK_EVERY = 8  # steps, so that looking is cheap in dense ones
SMOOTHING = 0.1  # weight of the newest sample of a gradient

LADDER = (
    Dense(),
    *(Bits(bits) for bits in (8, 4, 2, 1)),
    *(Bits(1, turns=turns) for turns in (2, 4, 8)),
)


class FastestState(NamedTuple):
    """The state of Fastest. Choice c is rung c % rungs, in rounds[c // rungs].

    Attributes:
      home: `[]` int32, the choice believed to be fastest.
      current: `[]` int32, the choice that was decided on: home, or home's rounds at a
        visited rung.
      dwelt: `[]` int32, exchanges at this choice.
      rested: `[]` int32, steps since the last visit began.
      known: `[]` int32, steps since the network last changed, at most 400.
      averages: smoothed energies of the gradients.
      timing: what is known about step times.
      seconds: `[choices]` float32, the mean seconds of a step, as the last decision
        predicted them.
      progress: `[choices]` float32, the same of what a step is worth.
      fits: `[choices]` bool, whether the bytes of a choice are within the budget.
    """

    home: jax.Array
    current: jax.Array
    dwelt: jax.Array
    rested: jax.Array
    known: jax.Array
    averages: compression_gain.Averages
    timing: step_time_filter.Timing
    seconds: jax.Array
    progress: jax.Array
    fits: jax.Array

    def moved(self, fresh: "FastestState") -> "FastestState":
        """Forget step times: on other devices they are not known yet."""
        forgotten = ("known", "timing", "seconds", "progress", "fits")
        return self._replace(**{name: getattr(fresh, name) for name in forgotten})


@dataclasses.dataclass(frozen=True, repr=False)
class Fastest(Controller):
    """Takes the encoding and the length of rounds with which training gets on fastest.

    In plain words::

        waiting  = steps that an entry of the gradient waits before it is sent
        progress = 1 / (1 + 0.15 sqrt(waiting)), what a step is worth in dense steps
        seconds  = compute + (selection + messages + bytes) / steps of a round,
                   each part fitted to the measured step times
        cost     = seconds / progress

        if another choice costs 3% less than this one: take it
        if it is time for a visit
            if a choice of more progress costs no more than this one: take it
            if three exchanges at another rung would teach something about the costs
            that is likely to save more in the next 500 steps than they cost: visit it

    How long an entry waits follows from what an encoding would send of one gradient of
    the whole model, without the residual (`Encoding.waits`), and from the length of a
    round. So it does not depend on the rung in use, and no rung looks better than it is
    because another one let the residual grow. `progress` in `progress.py` says how well
    this predicts.

    At the shared params, gradients ask again for what waits. There, one bit and parts
    in turn are not taken, and on a ladder that has them a step is worth
    1 / (1 + 1.2 sqrt(waiting)). `gravac.train_step` tells where gradients are taken, as
    `update(..., at="own")` does. The steps of `gravac.OwnOptimizer` are always taken at
    own params.

    It is fastest in time, not in steps: on a slow network it takes many cheap steps
    that are worth less each. If your number of steps is fixed, say what each must be
    worth: with `least_progress=0.9`, a run is expected to get as far as dense steps
    would in nine tenths of its steps.

    Dense is a choice like any other, and the controller stays there if compression does
    not pay. It follows a network that changes: four unexpected times in a row, or a
    visit, show the change. Without measured times (`update(..., step_seconds=...)`) it
    believes the cost model.

    Cost:
      Some 30 tiny kernels an exchange on GPUs, and 50 on CPUs; in one step of eight, a
      sample of the gradient; visits of three exchanges each, at most one in fifty steps
      once the network has been stable for 400. On two hosts that share two cores, with
      330 thousand params, a step took 2 to 4 ms longer than with one encoding, in an
      earlier version with twice as many kernels.

    Args:
      ladder: the encodings to choose from, by falling bytes; two or more. It starts at
        the first one that is not `Dense()`. Default: `Dense()`, 8, 4, 2 bits and 1, and
        one bit in 2, 4 and 8 turns.
      least_progress: the least progress of a choice that is taken, in [0, 1]; a dense
        step makes 1. A choice in use is left when it is 3% below. If none makes as
        much, as with `every=`, the one that makes most is taken. The first exchanges,
        from which it learns, are not bound by it.
      rounds: the lengths of rounds to choose from, 1 and then rising, such as
        `(1, 2, 4, 8, 16)`. The last step of a round exchanges; the others are local, as
        with `gravac.transform(every=...)`. Take gradients at own params then
        (`gravac.own_params`): at the shared ones, local steps would lead nowhere.
        Keep momentum before the exchange (`gravac.sgd`, `gravac.adamw`): after it, long
        rounds of whole gradients make less progress than is predicted.
      most_bytes: the most bytes that one replica may send in a step, in the mean over a
        round; None for any number. Dense leaves count. If every choice sends more, the
        one that sends least is taken, and `metrics.explain` says so. The first
        exchanges are not bound by it either.

    Raises:
      TypeError: if `ladder` is not a tuple of encodings, or `rounds` one of numbers.
      ValueError: if there are fewer than two encodings, `rounds` does not begin with 1
        and rise, `least_progress` is outside its bounds, or `most_bytes` is not above
        0.

    Example:
      >>> import gravac_jax as gravac
      >>> controller = gravac.Fastest((gravac.Bits(2), gravac.TopK(100)))
      >>> tx = gravac.transform(send=controller)
      >>> tx = gravac.adamw(1e-3, send=gravac.Fastest(rounds=(1, 4, 16)))

    References:
      GraVAC's objective, gain times throughput (Tyagi and Swany, IEEE CLOUD 2023), with
      the time that the gradient waits in place of the energy of the error-fed one, and
      a model of the seconds in place of a table. The value of a visit is the knowledge
      gradient of Frazier, Powell and Dayanik, SIAM J. Control and Optimization 2008.
    """

    uses_seconds = True
    looks_at = "gradient"  # from which it knows how long entries wait
    look_every = LOOK_EVERY
    ladder: tuple[Encoding, ...] = LADDER
    least_progress: float = 0.0
    rounds: tuple[int, ...] = (1,)
    most_bytes: float | None = None

    def __post_init__(self) -> None:
        base.check_ladder(self.ladder, "Fastest", least=2)
        _refuse.number(self.least_progress, "least_progress", low=0, high=1)
        _refuse.instance(self.rounds, tuple, "rounds", "(1, 4, 16)")
        for steps in self.rounds:
            _refuse.count(steps, "rounds", "the steps of each round")
        is_rising = all(map(operator.lt, self.rounds, self.rounds[1:]))
        if self.rounds[:1] != (1,) or not is_rising:
            raise ValueError(
                f"`rounds` must begin with 1 and rise, got {self.rounds!r}: to exchange"
                f" in every eighth step only, write gravac.transform(every=8)."
            )
        if self.most_bytes is not None:
            _refuse.number(self.most_bytes, "most_bytes", above=0)

    def reach(self, at_own_params: bool) -> tuple[int, ...]:
        """Return all rungs, or at the shared params those that suit these, if any."""
        suits = [i for i, x in enumerate(self.ladder) if not x.needs_own_params]
        return super().reach(at_own_params) if at_own_params or not suits else (*suits,)

    @property
    def has_rounds(self) -> bool:
        """Whether some steps may be local."""
        return self.rounds != (1,)

    def round_steps(self, step: jax.Array, state: FastestState) -> jax.Array:
        """Return the length of the rounds that it has chosen."""
        del step
        return jnp.asarray(self.rounds, jnp.int32)[state.current // len(self.ladder)]

    def init(self) -> tuple[jax.Array, FastestState]:
        """Start at the first rung that is not dense, and go to the last from there.

        The times of these two tell how a step divides into parts, whatever the network.
        Dense steps would tell it, too, but each may take as long as a hundred others.
        The first three exchanges are there whatever it decides, so that the first
        decision leaves it.
        """
        last = len(self.ladder) - 1
        first = int(isinstance(self.ladder[0], Dense))
        start = lambda: jnp.full((), first, jnp.int32)
        choices = len(self.ladder) * len(self.rounds)
        return start(), FastestState(
            home=jnp.full((), last, jnp.int32),
            current=start(),
            dwelt=jnp.full((), DWELL - 1, jnp.int32),
            rested=jnp.zeros((), jnp.int32),
            known=jnp.zeros((), jnp.int32),
            averages=compression_gain.no_averages(len(self.ladder)),
            timing=step_time_filter.no_times(),
            seconds=jnp.zeros(choices, jnp.float32),
            progress=jnp.zeros(choices, jnp.float32),
            fits=jnp.ones(choices, bool),
        )

    def decide(
        self, evidence: Evidence, state: FastestState
    ) -> tuple[jax.Array, FastestState]:
        """Learn, then go home, stay, or visit."""
        reach = lambda choice: self._within_reach(choice, evidence.at_own_params)
        state = state._replace(home=reach(state.home), current=reach(state.current))
        state = _learned(evidence, state)
        costs = self._costs(evidence, state)
        home, may_leave = _home(costs, state)
        # To take another choice that costs alike stands in place of a visit, so that
        # noise does not move it to and fro.
        safest = jnp.where(may_leave, _safest(costs, home), home)
        is_tie, home = safest != home, safest
        visited, is_worth = _visit(costs, state, home)
        is_visit = may_leave & ~is_tie & is_worth
        choice = jnp.where(state.dwelt >= DWELL, home, state.current)
        choice = jnp.where(is_visit, visited, choice)
        return choice % len(self.ladder), state._replace(
            home=home,
            current=choice,
            dwelt=jnp.where(choice == state.current, state.dwelt, 0),
            rested=jnp.where(is_visit | is_tie, 0, state.rested),
            seconds=costs.rounds.seconds,
            progress=costs.expected,
            fits=costs.fits,
        )

    def _costs(self, evidence: Evidence, state: FastestState) -> "_Costs":
        """Return what is believed of all choices."""
        lengths = self._lengths(evidence)
        may_wait = self._may_wait(evidence.at_own_params)
        share = compression_gain.gain(state.averages.sent, state.averages.total)
        waiting_cost = self._waiting_cost(evidence.at_own_params)
        worth = progress_of(share[None], lengths[:, None], waiting_cost).ravel()
        expected = jnp.where(may_wait, worth, 0)
        is_allowed = may_wait & self._is_allowed(expected, state.home)
        mean_bytes = (evidence.wire_bytes[None] / lengths[:, None]).ravel()
        fits = mean_bytes <= jnp.float32(self.most_bytes or jnp.inf)
        least_bytes = jnp.min(jnp.where(may_wait, mean_bytes, jnp.inf))
        is_within = fits | (mean_bytes <= least_bytes)
        # A choice without progress is never the fastest.
        progress = jnp.maximum(jnp.where(is_allowed, expected, 0), 1e-6)
        progress = progress * jnp.where(is_within, 1, 1e-12)
        kinds = step_time_filter.predict(state.timing, _kinds(evidence))
        rounds = step_time_filter.in_rounds(kinds, lengths)
        cost = rounds.seconds / progress
        unit = cost[state.home]
        scale = 1 / (progress * unit)
        return _Costs(
            cost=cost / unit,
            scale=scale,
            progress=progress,
            expected=expected,
            fits=fits,
            may_take=is_allowed & is_within,
            kinds=kinds,
            rounds=rounds,
            lengths=lengths,
        )

    def predictions(self, state: FastestState) -> Predictions:
        """Return the seconds and the progress of every choice at the last decision."""
        return Predictions(
            names=tuple(map(repr, self.ladder)) * len(self.rounds),
            steps=tuple(steps for steps in self.rounds for _ in self.ladder),
            seconds=state.seconds,
            progress=state.progress,
            is_allowed=self._is_allowed(state.progress, state.home),
            waits_too_long=~self._may_wait(False) & (state.progress == 0),
            fits=state.fits,
            home=state.home,
            current=state.current,
            times=state.timing.times,
        )

    def _is_allowed(self, progress: jax.Array, home: jax.Array) -> jax.Array:
        """Return which choices make enough progress: `[choices]` bool."""
        # The choice in use is left at a lower bound than it would be taken at.
        is_home = jnp.arange(progress.size) == home
        least = self.least_progress * jnp.where(is_home, 1 - MARGIN, 1)
        return (progress >= least) | (progress >= jnp.max(progress))

    def _lengths(self, evidence: Evidence) -> jax.Array:
        """Return the steps of rounds, its own or those of `every`: `[rounds]`."""
        if self.has_rounds:
            return jnp.asarray(self.rounds, jnp.float32)
        return jnp.asarray(evidence.steps, jnp.float32)[None]

    def _waiting_cost(self, at_own_params: jax.Array | bool) -> jax.Array:
        """Return what it costs that entries wait: more where gradients ask again."""
        has_such = any(x.needs_own_params for x in self.ladder)
        asks_again = has_such & ~jnp.asarray(at_own_params)
        return jnp.where(asks_again, WAITING_COST_AT_SHARED, WAITING_COST)

    def _may_wait(self, at_own_params: jax.Array | bool) -> jax.Array:
        """Return which choices may be taken where gradients are, `[choices]` bool."""
        always = [i in self.reach(False) for i in range(len(self.ladder))]
        return jnp.asarray(always * len(self.rounds)) | at_own_params

    def _within_reach(
        self, choice: jax.Array, at_own_params: jax.Array | bool
    ) -> jax.Array:
        """Return a choice, or the last rung of its rounds that may be taken."""
        rung = choice % len(self.ladder)
        may_take = self._may_wait(at_own_params)[: len(self.ladder)]
        rungs = jnp.arange(may_take.size, dtype=jnp.int32)
        last = jnp.max(jnp.where(may_take, rungs, 0))
        return choice - rung + jnp.where(may_take[rung], rung, last)


class _Costs(NamedTuple):
    """What is believed of all choices.

    Attributes:
      cost: `[choices]` float32, seconds per progress, in units of what home costs.
      scale: `[choices]` float32, what makes such a cost of seconds.
      progress: `[choices]` float32, what a step is worth; next to nothing if the choice
        is not allowed.
      expected: `[choices]` float32, what a step is worth.
      fits: `[choices]` bool, as in `FastestState`.
      may_take: `[choices]` bool, whether a choice may be taken now.
      kinds: the seconds of each kind of step.
      rounds: those of each choice.
      lengths: `[rounds]` float32, steps of each round.
    """

    cost: jax.Array
    scale: jax.Array
    progress: jax.Array
    expected: jax.Array
    fits: jax.Array
    may_take: jax.Array
    kinds: step_time_filter.Predicted
    rounds: step_time_filter.Predicted
    lengths: jax.Array


def _learned(evidence: Evidence, state: FastestState) -> FastestState:
    """Add what a step has shown, and count it."""
    timing, has_changed = _timed(evidence, state.timing)
    sampled, whole = evidence.gradient_energies, evidence.gradient_energy
    newer = compression_gain.smooth(state.averages, sampled, whole, SMOOTHING)
    known = jnp.minimum(state.known + evidence.steps, HASTE * REST)
    return state._replace(
        dwelt=state.dwelt + 1,
        rested=jnp.minimum(state.rested + evidence.steps, REST),
        known=jnp.where(has_changed, 0, known),
        averages=_arrays.where(jnp.any(sampled > 0), newer, state.averages),
        timing=timing,
    )


def _kinds(evidence: Evidence) -> jax.Array:
    """Return the predicted parts of steps at each rung, and of a local step."""
    parts = evidence.predicted_parts
    is_compute = jnp.eye(1, parts.shape[1], dtype=parts.dtype)
    return jnp.concatenate([parts, parts[:1] * is_compute])


def _timed(
    evidence: Evidence, timing: step_time_filter.Timing
) -> tuple[step_time_filter.Timing, jax.Array]:
    """Learn from the times of a round; return whether the network has changed, too."""
    guess, seconds = _kinds(evidence), evidence.measured_seconds
    if evidence.local_seconds is not None:
        # A local step tells nothing of the network, nor how a step divides.
        local, kind = evidence.local_seconds, seconds.size
        newer, _ = step_time_filter.observe(timing, guess, kind, local)
        timing = _arrays.where(timing.times > 0, newer, timing)
    rung = jnp.argmax(seconds > 0)  # several at once are rare; one will do
    return step_time_filter.observe(timing, guess, rung, seconds[rung])


def _home(costs: _Costs, state: FastestState) -> tuple[jax.Array, jax.Array]:
    """Return the choice believed to be fastest, and whether it may be left now."""
    is_free = state.dwelt >= DWELL
    # A time of the second rung has come, or no time has when it could have.
    is_untold = state.timing.times == 0
    could_have = state.dwelt >= DWELL + LATE
    has_begun = jnp.where(is_untold, could_have, state.timing.times > DWELL)
    best = jnp.argmin(costs.cost).astype(jnp.int32)
    # After a visit it goes home before it moves, unless it moves to where it is.
    is_at_home = (state.current == state.home) | is_untold
    may_move = has_begun & is_free & (is_at_home | (state.current == best))
    is_faster = costs.cost[best] < 1 - MARGIN
    home = jnp.where(may_move & is_faster, best, state.home)
    is_settled = (state.current == state.home) & (home == state.home)
    is_rested = state.rested * HASTE >= state.known
    return home, has_begun & is_free & is_settled & is_rested


def _safest(costs: _Costs, home: jax.Array) -> jax.Array:
    """Return the choice of most progress, which keeps most quality, at no more cost."""
    is_home = jnp.arange(costs.cost.size) == home  # its cost may round to above 1
    is_cheap = is_home | (costs.cost <= 1)
    return jnp.argmax(jnp.where(is_cheap, costs.progress, 0)).astype(jnp.int32)


def _visit(
    costs: _Costs, state: FastestState, home: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the choice that is most worth a visit, and whether a visit pays.

    A visit is to another rung, in rounds as long as those of home.
    """
    rungs = costs.cost.size // costs.lengths.size
    least = step_time_filter.least_compute(state.timing) * costs.scale
    told = _told_by_a_visit(costs.kinds, costs.rounds, state.timing.noise)[:, :rungs]
    worth = value_of_visits(
        costs.cost,
        told * costs.scale[:, None],
        jnp.where(costs.may_take, least, jnp.inf),
        home,
        costs.lengths[home // rungs],
    )
    visited = jnp.argmax(worth).astype(jnp.int32)
    return home - home % rungs + visited, worth[visited] > 0


def _told_by_a_visit(
    kinds: step_time_filter.Predicted,
    rounds: step_time_filter.Predicted,
    noise: jax.Array,
) -> jax.Array:
    """Return how far three times of a kind are likely to move each prediction.

    Args:
      kinds: the seconds of each kind of step.
      rounds: those of each choice, and their covariance with those of each kind.
      noise: `[]` float32, the relative variance of a measured time.

    Returns:
      `[choices, kinds]` float32, standard deviations in seconds, with their signs.
    """
    variance = jnp.maximum(jnp.diag(kinds.covariance), 0)
    spread = jnp.sqrt(variance + noise * jnp.square(kinds.seconds) / DWELL)
    return rounds.covariance / jnp.maximum(spread, 1e-12)[None]


def value_of_visits(
    cost: jax.Array,
    moved: jax.Array,
    least: jax.Array,
    home: jax.Array,
    steps: jax.Array,
) -> jax.Array:
    """Return what it is worth to visit each rung, in steps at home.

    A visit changes what is believed about every choice. Its worth is the expected gain
    from a choice that turns out cheaper than home (or from home, if one that looked
    cheaper turns out dearer), times the steps that have this gain, minus the price of
    the visit.

    Args:
      cost: `[choices]` float32, in units of the cost of home.
      moved: `[choices, rungs]` float32, how far a visit to a rung is likely to move
        `cost`, with its sign.
      least: `[choices]` float32, the cost of a choice if only its compute took time;
        infinite if it may not be taken, so that nothing is gained from it.
      home: `[]` int32, the choice believed to be fastest.
      steps: `[]` float32, the steps of a round at home.

    Returns:
      `[rungs]` float32; negative if a visit does not pay.
    """
    dearer = cost - cost[home]
    against_home = jnp.abs(moved - moved[home][None])
    gained = _expected_excess(jnp.abs(dearer)[:, None], against_home)
    gained = jnp.minimum(gained, jnp.maximum(cost[home] - least, 0)[:, None])
    is_home = jnp.arange(cost.size) == home
    gained = jnp.where(is_home[:, None], 0, gained)
    rungs = moved.shape[1]
    visits = jax.lax.dynamic_slice_in_dim(dearer, home - home % rungs, rungs)
    price = DWELL * steps * jnp.maximum(visits, 0)
    worth = HORIZON * jnp.max(gained, axis=0) - price - TROUBLE
    return jnp.where(jnp.arange(rungs) == home % rungs, -jnp.inf, worth)


def _expected_excess(dearer: jax.Array, deviation: jax.Array) -> jax.Array:
    """Return the mean of max(0, x) for a normal x with mean `-dearer`."""
    deviation = jnp.maximum(deviation, 1e-12)
    z = dearer / deviation
    density = jnp.exp(-jnp.square(z) / 2) / math.sqrt(2 * math.pi)
    beyond = jax.lax.erfc(z / math.sqrt(2)) / 2
    return jnp.maximum(deviation * density - dearer * beyond, 0)
