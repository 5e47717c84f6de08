"""The default controller: the least predicted seconds per progress."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _refuse
from gravac_jax._controllers.base import Controller, Evidence, check_ladder
from gravac_jax._encodings.base import Encoding
from gravac_jax._encodings.bits import Bits
from gravac_jax._encodings.dense import Dense
from gravac_jax._evidence import compression_gain, cost_model

# All of these are arbitrary; simulations showed that they trade well. Steps at a rung
# are steps that exchange.
MARGIN = 0.03  # how much faster another rung must be, so that noise moves nothing
DWELL = 3  # steps at a rung before the next is chosen
LATE = 2  # exchanges between a decision and the one that takes it
REST = 50  # steps from one visit to the next on a network that does not change
HASTE = 8  # after a change a visit may come after an eighth of the steps since
TROUBLE = 0.5  # steps that a visit must be worth, so that a tie moves nothing
HORIZON = 500  # steps for which the knowledge from a visit is of use
LOOK_EVERY = 8  # steps, so that looking is cheap in dense ones
SMOOTHING = 0.1  # weight of the newest sample of a gradient

# Each rung is a program. One more between two of these would save less than `MARGIN`
# on any network: four bits 0.7%, two bits in two turns 1.7% by these predictions. One
# bit is not among them: of a gradient of four images it kept 4% of the energy, and with
# sixteen such replicas one bit in four turns cost ten points more than two bits did.
LADDER = (Dense(), Bits(8), Bits(2), Bits(2, turns=4), Bits(2, turns=8))


class FastestState(NamedTuple):
    """The state of Fastest.

    Attributes:
      home: `[]` int32, the rung believed to be fastest.
      current: `[]` int32, the rung that was decided on: home, or one that is visited.
      dwelt: `[]` int32, exchanges at this rung.
      rested: `[]` int32, steps since the last visit began.
      known: `[]` int32, steps since the network last changed, at most 400.
      averages: smoothed energies of the gradients.
      timing: what is known about step times.
      seconds: `[rungs]` float32, the mean seconds of a step, as the last decision
        predicted them.
      progress: `[rungs]` float32, the same of what a step is worth.
    """

    home: jax.Array
    current: jax.Array
    dwelt: jax.Array
    rested: jax.Array
    known: jax.Array
    averages: compression_gain.Averages
    timing: cost_model.Timing
    seconds: jax.Array
    progress: jax.Array

    def moved(self, fresh: "FastestState") -> "FastestState":
        """Forget step times: on other devices they are not known yet."""
        forgotten = ("known", "timing", "seconds", "progress")
        return self._replace(**{name: getattr(fresh, name) for name in forgotten})


@dataclasses.dataclass(frozen=True, repr=False)
class Fastest(Controller):
    """Takes the encoding with which training gets on fastest.

    In plain words::

        waiting  = steps that an entry of the gradient waits before it is sent
        progress = 1 / (1 + c sqrt(waiting)), what a step is worth in dense steps, where
                   c is 0.15, or 0.15 sqrt(N / 4) with N > 4 replicas
        seconds  = compute + (selection + messages + bytes) / steps of a round,
                   each part, and what a rung takes beyond them, fitted to step times
        cost     = seconds / progress

        if another encoding costs 3% less than this one: take it
        if it is time for a visit
            if one of more progress costs no more than this one: take it
            if three exchanges at another rung would teach something about the costs
            that is likely to save more in the next 500 steps than they cost: visit it

    How long an entry waits follows from what an encoding would send of one gradient of
    the whole model, without the residual (`Encoding.waits`), and with `every` from the
    length of a round. So it does not depend on the rung in use, and none looks better
    than it is because another one let the residual grow. `progress` in
    `compression_gain.py` says how well this predicts.

    At the shared params, gradients ask again for what waits. There, one bit and parts
    in turn are not taken, and on a ladder that has them a step is worth
    1 / (1 + 1.2 sqrt(waiting)). `gravac.train_step` tells where gradients are taken, as
    `update(..., at="own")` does. With `gravac.OwnOptimizer` they count as taken at own
    params unless it says `at="shared"`.

    It is fastest in time, not in steps: on a slow network it takes many cheap steps
    that are worth less each. If your number of steps is fixed, say what each must be
    worth: with `least_progress=0.9`, a run is expected to get as far as dense steps
    would in nine tenths of its steps.

    Dense is a rung like any other, and the controller stays there if compression does
    not pay. It follows a network that changes: four unexpected times in a row, or a
    visit, show the change. Without measured times (`update(..., step_seconds=...)`) it
    believes the cost model.

    Cost:
      Some 30 tiny kernels an exchange on GPUs, and 70 on CPUs; in one step of eight, a
      sample of the gradient; visits of three exchanges each, at most one in fifty steps
      once the network has been stable for 400.

    Args:
      ladder: the encodings to choose from, by falling bytes; two or more. It starts at
        the first one that is not `Dense()`. Default: `Dense()`, 8 and 2 bits, and two
        bits in 4 and 8 turns.
      least_progress: the least progress of a rung that is taken, in [0, 1]; a dense
        step makes 1. A rung in use is left when it is 3% below. If none makes as much,
        as with `every=`, the one that makes most is taken. The first exchanges, from
        which it learns, are not bound by it.

    Raises:
      TypeError: if `ladder` is not a tuple of encodings.
      ValueError: if there are fewer than two encodings, or `least_progress` is outside
        its bounds.

    Example:
      >>> import gravac_jax as gravac
      >>> controller = gravac.Fastest((gravac.Bits(2), gravac.TopK(100)))
      >>> tx = gravac.transform(send=controller)

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

    def __post_init__(self) -> None:
        check_ladder(self.ladder, "Fastest", least=2)
        _refuse.number(self.least_progress, "least_progress", low=0, high=1)

    def reach(self, at_own_params: bool) -> tuple[int, ...]:
        """Return all rungs, or at the shared params those that suit these, if any."""
        suits = [i for i, x in enumerate(self.ladder) if not x.needs_own_params]
        return super().reach(at_own_params) if at_own_params or not suits else (*suits,)

    def init(self) -> tuple[jax.Array, FastestState]:
        """Start at the first rung that is not dense, and go to the last from there.

        The times of these two tell how a step divides into parts, whatever the network.
        Dense steps would tell it, too, but each may take as long as a hundred others.
        The first three exchanges are there whatever it decides, so that the first
        decision leaves it.
        """
        first, rungs = int(self.ladder[0] == Dense()), len(self.ladder)
        return jnp.int32(first), FastestState(
            home=jnp.int32(rungs - 1),
            current=jnp.int32(first),
            dwelt=jnp.int32(DWELL - 1),
            rested=jnp.int32(0),
            known=jnp.int32(0),
            averages=compression_gain.no_averages(rungs),
            timing=cost_model.no_times(rungs + 1),  # and local steps
            seconds=jnp.zeros(rungs, jnp.float32),
            progress=jnp.zeros(rungs, jnp.float32),
        )

    def decide(
        self, evidence: Evidence, state: FastestState
    ) -> tuple[jax.Array, FastestState]:
        """Learn, predict the cost of every rung, and go home, stay, or visit."""
        in_reach, guess = self._in_reach(evidence.at_own_params), _guess(evidence)
        state = self._back_in_reach(_learned(evidence, guess, state), in_reach)
        steps = jnp.float32(evidence.round_steps)
        # Seconds of each kind of step, and at each rung; what a step is worth.
        kinds = cost_model.predict(state.timing, guess)
        seconds = cost_model.in_rounds(kinds, steps)
        expected = jnp.where(in_reach, self._progress(evidence, state), 0)
        is_allowed = in_reach & self._is_allowed(expected, state.home)
        # A rung without progress is never the fastest.
        progress = jnp.maximum(jnp.where(is_allowed, expected, 0), 1e-6)
        # In units of what home costs.
        cost = seconds.mean / progress
        unit = cost[state.home]
        cost, of_a_second = cost / unit, 1 / (progress * unit)

        home, is_tie, may_visit = _home(cost, progress, state)
        least = cost_model.least_compute(state.timing) * of_a_second
        least = jnp.where(is_allowed, least, jnp.inf)
        # Nobody visits a local step, the last kind.
        moved = _moved_by_a_visit(kinds, seconds, state.timing.noise)[:, :-1]
        moved *= of_a_second[:, None]
        worth = _value_of_visits(cost, moved, least, home, steps)
        visited = jnp.argmax(worth).astype(jnp.int32)
        is_visit = may_visit & (worth[visited] > 0)
        rung = jnp.where(state.dwelt >= DWELL, home, state.current)
        rung = jnp.where(is_visit, visited, rung)
        return rung, state._replace(
            home=home,
            current=rung,
            dwelt=jnp.where(rung == state.current, state.dwelt, 0),
            rested=jnp.where(is_visit | is_tie, 0, state.rested),
            seconds=seconds.mean,
            progress=expected,
        )

    def explain(self, state: FastestState) -> str:
        """Return a line for each rung, and one about where the seconds come from."""
        if not np.any(state.progress):
            return "It has predicted nothing yet: it decides after each step."
        width = max(len(repr(x)) for x in self.ladder)
        line = f"{{:{width}}}  {{:>9}}  {{:>8}}  {{:>30}}".format
        titles = "sends", "ms a step", "progress", "ms for a dense step's progress"
        lines = [line(*titles)]
        for i, encoding in enumerate(self.ladder):
            ms, progress = 1e3 * float(state.seconds[i]), float(state.progress[i])
            cost = f"{ms / progress:.1f}" if progress > 0 else "never"
            figures = line(repr(encoding), f"{ms:.1f}", f"{progress:.2f}", cost)
            lines.append(f"{figures}  {self._verdict(state, i)}".rstrip())
        source = "by gravac.WireCost alone, since no step time was measured"
        if state.timing.times:
            source = f"from {state.timing.times} measured step times"
        return "\n".join([*lines, f"The milliseconds are predicted {source}."])

    def _verdict(self, state: FastestState, rung: int) -> str:
        """Return what was done with a rung."""
        if rung == state.home:
            return "taken"
        if rung == state.current:
            return "visited, to measure it"
        if not state.progress[rung] and rung not in self.reach(False):
            return "only at own params"
        is_allowed = self._is_allowed(state.progress, state.home)[rung]
        return "" if is_allowed else "too little progress"

    def _in_reach(self, at_own_params: jax.Array | bool) -> jax.Array:
        """Return which rungs may be taken where gradients are, `[rungs]` bool."""
        always = [i in self.reach(False) for i in range(len(self.ladder))]
        return jnp.asarray(always) | at_own_params

    def _back_in_reach(self, state: FastestState, in_reach: jax.Array) -> FastestState:
        """Move to the last rung that may be taken, from one that may not."""
        moved = lambda x: jnp.where(in_reach[x], x, self.reach(False)[-1])
        return state._replace(home=moved(state.home), current=moved(state.current))

    def _progress(self, evidence: Evidence, state: FastestState) -> jax.Array:
        """Return what a step at each rung is worth: `[rungs]`."""
        has_such = any(x.needs_own_params for x in self.ladder)
        asks_again = has_such & ~jnp.asarray(evidence.at_own_params)
        share = compression_gain.gain(*state.averages)
        steps = jnp.float32(evidence.round_steps)
        return compression_gain.progress(share, steps, asks_again, evidence.replicas)

    def _is_allowed(self, progress: jax.Array, home: jax.Array) -> jax.Array:
        """Return which rungs make enough progress: `[rungs]` bool."""
        # The rung in use is left at a lower bound than it would be taken at.
        is_home = jnp.arange(progress.size) == home
        least = self.least_progress * jnp.where(is_home, 1 - MARGIN, 1)
        return (progress >= least) | (progress >= jnp.max(progress))


def _guess(evidence: Evidence) -> jax.Array:
    """Return the predicted parts of steps at each rung, and of a local step."""
    parts = evidence.predicted_parts
    local = jnp.where(cost_model.IS_COMPUTE[None], parts[:1], 0)
    return jnp.concatenate([parts, local])


def _learned(evidence: Evidence, guess: jax.Array, state: FastestState) -> FastestState:
    """Add what a step has shown, and count it."""
    timing, seconds = state.timing, evidence.measured_seconds
    if evidence.local_seconds is not None:
        # A local step tells nothing of the network, nor how a step divides.
        newer, _ = cost_model.observe(timing, guess, -1, evidence.local_seconds)
        timing = _arrays.where(timing.times > 0, newer, timing)
    rung = jnp.argmax(seconds > 0)  # several at once are rare; one will do
    timing, has_changed = cost_model.observe(timing, guess, rung, seconds[rung])
    sampled, whole = evidence.gradient_energies, evidence.gradient_energy
    newer = compression_gain.smooth(state.averages, sampled, whole, SMOOTHING)
    known = jnp.where(has_changed, 0, state.known + evidence.round_steps)
    return state._replace(
        dwelt=state.dwelt + 1,
        rested=jnp.minimum(state.rested + evidence.round_steps, REST),
        known=jnp.minimum(known, HASTE * REST),
        averages=_arrays.where(jnp.any(sampled > 0), newer, state.averages),
        timing=timing,
    )


def _home(
    cost: jax.Array, progress: jax.Array, state: FastestState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose a home: the rung believed to be fastest.

    Returns:
      home: `[]` int32.
      is_tie: `[]` bool, whether it is a new one that costs no more than the last.
      may_visit: `[]` bool, whether another rung may be visited now.
    """
    times, dwelt = state.timing.times, state.dwelt
    # A time of the second rung has come, or no time has when it could have.
    has_begun = jnp.where(times == 0, dwelt >= DWELL + LATE, times > DWELL)
    is_free = has_begun & (dwelt >= DWELL)
    best = jnp.argmin(cost).astype(jnp.int32)
    # After a visit it goes home before it moves, unless it moves to where it is.
    is_there = (state.current == state.home) | (state.current == best)
    may_move = is_free & ((times == 0) | is_there)
    home = jnp.where(may_move & (cost[best] < 1 - MARGIN), best, state.home)
    is_settled = (state.current == state.home) & (home == state.home)
    may_leave = is_free & is_settled & (state.rested * HASTE >= state.known)
    # Of rungs that cost alike, the one of most progress keeps most quality. To take
    # it stands in place of a visit, so that noise does not move it to and fro.
    is_home = jnp.arange(cost.size) == home  # its cost may round to above 1
    safest = jnp.argmax(jnp.where(is_home | (cost <= 1), progress, 0))
    is_tie = may_leave & (safest != home)
    home = jnp.where(is_tie, safest.astype(jnp.int32), home)
    return home, is_tie, may_leave & ~is_tie


def _moved_by_a_visit(
    kinds: cost_model.Seconds, rungs: cost_model.Seconds, noise: jax.Array
) -> jax.Array:
    """Return how far three times of a kind are likely to move each prediction.

    Args:
      kinds: the seconds of each kind of step.
      rungs: those of a mean step at each rung, and their covariance with the former.
      noise: `[]` float32, the relative variance of a measured time.

    Returns:
      `[rungs, kinds]` float32, standard deviations in seconds, with their signs.
    """
    variance = jnp.maximum(jnp.diag(kinds.covariance), 0)
    spread = jnp.sqrt(variance + noise * jnp.square(kinds.mean) / DWELL)
    return rungs.covariance / jnp.maximum(spread, 1e-12)[None]


def _value_of_visits(
    cost: jax.Array,
    moved: jax.Array,
    least: jax.Array,
    home: jax.Array,
    steps: jax.Array,
) -> jax.Array:
    """Return what it is worth to visit each rung, in steps at home.

    A visit changes what is believed about every rung. Its worth is the expected gain
    from a rung that turns out cheaper than home (or from home, if one that looked
    cheaper turns out dearer), times the steps that have this gain, minus the price of
    the visit.

    Args:
      cost: `[rungs]` float32, in units of the cost of home.
      moved: `[rungs, rungs]` float32, how far a visit to a rung, the second axis, is
        likely to move `cost`, with its sign.
      least: `[rungs]` float32, the cost of a rung if only its compute took time;
        infinite if it may not be taken, so that nothing is gained from it.
      home: `[]` int32, the rung believed to be fastest.
      steps: `[]` float32, the steps of a round.

    Returns:
      `[rungs]` float32; negative if a visit does not pay.
    """
    dearer = cost - cost[home]
    against_home = jnp.abs(moved - moved[home][None])
    gained = _expected_excess(jnp.abs(dearer)[:, None], against_home)
    gained = jnp.minimum(gained, jnp.maximum(cost[home] - least, 0)[:, None])
    is_home = jnp.arange(cost.size) == home
    gained = jnp.where(is_home[:, None], 0, gained)
    price = DWELL * steps * jnp.maximum(dearer, 0)
    worth = HORIZON * jnp.max(gained, axis=0) - price - TROUBLE
    return jnp.where(is_home, -jnp.inf, worth)


def _expected_excess(dearer: jax.Array, deviation: jax.Array) -> jax.Array:
    """Return the mean of max(0, x) for a normal x with mean `-dearer`."""
    deviation = jnp.maximum(deviation, 1e-12)
    z = dearer / deviation
    density = jnp.exp(-jnp.square(z) / 2) / math.sqrt(2 * math.pi)
    beyond = jax.lax.erfc(z / math.sqrt(2)) / 2
    return jnp.maximum(deviation * density - dearer * beyond, 0)
