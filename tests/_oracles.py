"""The library's numerics in slow, obvious NumPy.

Laws bound what a component may do; an oracle says what it does. Each is looked up by
the class of the component, so that a new member of a registry fails until it has one.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gravac_jax as gravac

KEY_SEED = 7


def look_up(table: dict[type, Any], component: Any) -> Any:
    """Return the oracle of `component`, or of the class that a saboteur comes from."""
    kinds = type(component).__mro__
    known = [kind for kind in kinds if kind in table]
    assert known, f"{kinds[0].__name__} has no oracle: add one to tests/_oracles.py"
    return table[known[0]]


# Encodings -----------------------------------------------------------------------


def shapes(n: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a vector and two matrices that fill a bucket of `n`.

    The smallest come first, as in the buckets of `gravac.transform`.
    """
    side = math.isqrt(n // 2)
    if side < 3:
        return ((n,),)
    left = n - side * (side + 1)
    return (left - left // 4 // 2 * 8,), (left // 4 // 2, 2, 4), (side + 1, side)


class Expected(NamedTuple):
    """What an exchange should come to, on all replicas.

    Attributes:
      mean: `[n]` float64.
      residuals: `[replicas, n]`.
      energies: `[replicas]` float64, of what each one sent.
      atol: how far products in float32 may be off, as a share of the largest entry.
    """

    mean: np.ndarray
    residuals: np.ndarray
    energies: np.ndarray
    atol: float = 0.0


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    largest = float(jnp.finfo(jnp.bfloat16).max)
    return np.clip(x.astype(jnp.bfloat16).astype(np.float64), -largest, largest)


VALUES = {"float32": lambda x: x, "bfloat16": _to_bfloat16}


def dense(encoding: Any, bucket: Any, x: np.ndarray, state: Any, step: int) -> Expected:
    """Return the mean of everything, where both may travel as bfloat16."""
    del bucket, state, step
    found = of_what_was_sent(x, VALUES[encoding.values](x).astype(np.float64))
    if encoding.values == "bfloat16":
        total = functools.reduce(np.add, (x - found.residuals).astype(np.float32))
        found = found._replace(mean=_to_bfloat16(total / np.float32(len(x))))
    return found


def of_what_was_sent(x: np.ndarray, sent: np.ndarray, atol: float = 0) -> Expected:
    """Return what follows from what each replica sent."""
    return Expected(sent.mean(0), x - sent, (sent**2).sum(1), atol)


def _largest(x: np.ndarray, k: int) -> list[int]:
    # Python sorts stably: of equal magnitudes the earlier entry comes first.
    order = sorted(range(len(x)), key=lambda i: -abs(float(x[i])))
    return [i for i in order[:k] if x[i]]


def _sampled(x: np.ndarray, k: int) -> list[int]:
    found = _reaching(x, k)
    return found if len(found) <= k else _largest(x, k)


def _reaching(x: np.ndarray, k: int) -> list[int]:
    threshold = sorted(np.abs(x), reverse=True)[k - 1]
    return [i for i, value in enumerate(x) if value and abs(value) >= threshold]


def _thinned(x: np.ndarray, k: int) -> list[int]:
    """Return those of the k-th magnitude and above, without a run of the surplus."""
    found = _reaching(x, k)
    if len(found) <= k:
        return found
    least = min(abs(x[i]) for i in found)
    # What is at least twice as large stays, and of the others as many as there is room.
    sure = [i for i in found if abs(x[i]) >= 2 * least]
    drawn = [i for i in found if i not in sure]
    draw = int(np.asarray(jax.random.key_data(jax.random.key(KEY_SEED)))[1])
    gone = {drawn[(draw + i) % len(drawn)] for i in range(len(found) - k)}
    return [i for i in found if i not in gone]


# Of buckets that are their own sample.
SELECTIONS = {"exact": _largest, "sampled": _sampled, "threshold": _thinned}


def top_k(encoding: Any, bucket: Any, x: np.ndarray, state: Any, step: int) -> Expected:
    """Return the mean of each replica's own selection, rounded."""
    del state, step
    k = min(bucket.n, max(1, math.floor(bucket.n / encoding.factor)))
    sent = np.zeros(x.shape)
    for replica, own in enumerate(x):
        chosen = SELECTIONS[encoding.select](own, k)
        sent[replica, chosen] = VALUES[encoding.values](own[chosen])
    return of_what_was_sent(x, sent)


def low_rank(encoding: Any, bucket: Any, x: Any, state: Any, step: int) -> Expected:
    """Return one step of PowerSGD in float64, from the library's directions."""
    del step
    exact = x.astype(np.float64)
    sent, start, rank = exact.copy(), 0, encoding.rank
    for shape, own in zip(bucket.shapes, state, strict=True):
        a, b = (math.prod(shape[:-1]), shape[-1]) if shape[1:] else (shape[0], 1)
        if rank * (a + b) < a * b:
            mine = exact[:, start : start + a * b].reshape(-1, a, b)
            right = np.asarray(own.right, np.float64)[0, :, :rank]
            left = np.linalg.qr((mine @ right).mean(0))[0]
            sent[:, start : start + a * b] = (left @ (left.T @ mine)).reshape(-1, a * b)
        start += a * b
    return of_what_was_sent(exact, sent, 2.0**-16)


def rounded_row(row: np.ndarray, bits: int) -> np.ndarray:
    """Return a row as codes of so many bits give it back."""
    size = np.sqrt(np.mean(row**2))
    if not size:
        return np.zeros_like(row)
    sign, magnitude = np.where(row >= 0, 1, -1), np.abs(row)
    if bits == 1:
        return sign * magnitude.mean()
    if bits == 2:
        is_big = magnitude > 1.3 * size
        levels = np.zeros_like(row)
        for cell in (is_big, ~is_big):
            if cell.any():
                levels[cell] = magnitude[cell].mean()
        return sign * levels
    if bits == 4:
        with np.errstate(divide="ignore"):
            k = np.ceil(np.log2(8 * size / magnitude) - 0.5)
        q = sign * 2.0 ** -np.minimum(np.maximum(k, 0), 7)
    else:
        q = np.floor(row * 127.5 / magnitude.max())
        q = np.minimum(np.maximum(q, -128), 127) + 0.5
    return q * (row @ q) / (q @ q)


def rounded_rows(x: np.ndarray, bits: int, length: int) -> np.ndarray:
    """Return a vector as its rows of this length in few bits give it back."""
    rows = [x[start : start + length] for start in range(0, x.size, length)]
    return np.concatenate([rounded_row(row, bits) for row in rows])


def few_bits(encoding: Any, bucket: Any, x: Any, state: Any, step: int) -> Expected:
    """Return the mean of the entries that are due, row by row in float64.

    Which leaves are spared and how long rows are is read from the library: test_bits.py
    checks it.
    """
    del state
    replicas, n = x.shape
    owners = 1 if replicas <= 2 else replicas
    due, *others = encoding.message(bucket, replicas).sections
    spared = sum(section.entries for section in others)
    turns = math.ceil((n - spared) / due.entries)
    start = min(spared + step % turns * due.entries, n - due.entries)
    exact = x.astype(np.float64)
    mean, residuals, sent = np.zeros(n), exact.copy(), np.zeros(x.shape)
    for section, first in [(due, start), *((x, 0) for x in others)]:
        entries, length, bits = section
        here = slice(first, first + entries)
        sent[:, here] = [rounded_rows(own[here], bits, length) for own in exact]
        residuals[:, here] = exact[:, here] - sent[:, here]
        average = mean[here] = sent[:, here].mean(0)
        if owners > 1:
            mean[here] = rounded_rows(average, bits, length)
            owed = replicas * (average - mean[here])
            rows = math.ceil(entries / length / owners)
            for owner, begin in enumerate(range(0, entries, rows * length)):
                mine = slice(begin, begin + rows * length)
                residuals[owner, here][mine] += owed[mine]
    return Expected(mean, residuals, (sent**2).sum(1), 2.0**-16)


ENCODINGS = {
    gravac.Bits: few_bits,
    gravac.Dense: dense,
    gravac.LowRank: low_rank,
    gravac.TopK: top_k,
}


# Memories ------------------------------------------------------------------------


class Rememberer:
    """What a memory should do with one bucket of one replica, step by step.

    In float32, whose roundings a memory must share; `made` adds up in float64 what it
    made of gradients.
    """

    rtol = 0.0  # of what is selected from

    def __init__(self, memory: Any, n: int) -> None:
        self.memory = memory
        self.residual = np.zeros(n, np.float32)
        self.made = np.zeros(n)

    def add(self, gradient: np.ndarray) -> np.ndarray:
        """Return what a gradient adds to the residual."""
        return gradient

    def feed(self, gradient: np.ndarray) -> np.ndarray:
        """Return the vector that entries are selected from."""
        added = self.add(gradient)
        self.made += added
        self.compensated = self.residual + added
        return self.compensated

    def keep(self, residual: np.ndarray) -> None:
        """Take what the exchange left."""
        self.residual = residual


class Masks(Rememberer):
    """DGC, sections 3.2 and 3.3."""

    def __init__(self, memory: Any, n: int) -> None:
        super().__init__(memory, n)
        self.velocity = np.zeros(n, np.float32)

    def add(self, gradient: np.ndarray) -> np.ndarray:
        m = np.float32(self.memory.decay)
        if self.memory.nesterov:
            self.velocity = m * (self.velocity + gradient)
            return self.velocity + gradient
        self.velocity = m * self.velocity + gradient
        return self.velocity

    def keep(self, residual: np.ndarray) -> None:
        if self.memory.masking and residual.any():
            self.velocity[residual != self.compensated] = 0
        self.residual = residual


class OwnAdam:
    """Adam's steps in float64."""

    def __init__(self, b1: float, b2: float, eps: float = 1e-8) -> None:
        self.b1, self.b2, self.eps = b1, b2, eps
        self.mean, self.square, self.steps = 0.0, 0.0, 0

    def step(self, gradient: np.ndarray) -> Any:
        self.steps += 1
        self.mean = self.b1 * self.mean + (1 - self.b1) * gradient
        self.square = self.b2 * self.square + (1 - self.b2) * gradient**2
        root = np.sqrt(self.square / (1 - self.b2**self.steps)) + self.eps
        return self.mean / (1 - self.b1**self.steps) / root


class OwnMomentum:
    """Steps of SGD with momentum in float64."""

    def __init__(self, rate: float, decay: float) -> None:
        self.rate, self.decay, self.velocity = rate, decay, 0.0

    def step(self, gradient: np.ndarray) -> Any:
        self.velocity = self.decay * self.velocity + gradient
        return -self.rate * self.velocity


SLOW_ADAM = optax.scale_by_adam(0.8, 0.9, 1.0)
# The same objects at every call, so that a test compiles each of them once.
OPTIMIZERS: dict[optax.GradientTransformation, Callable[[], Any]] = {
    optax.scale_by_adam(): lambda: OwnAdam(0.9, 0.999),
    optax.scale_by_adam(0.5, 0.9): lambda: OwnAdam(0.5, 0.9),
    SLOW_ADAM: lambda: OwnAdam(0.8, 0.9, 1.0),
    optax.sgd(0.5, momentum=0.5): lambda: OwnMomentum(0.5, 0.5),
}


class RunsOptimizer(Rememberer):
    """Steps of an optimizer of its own."""

    rtol = 1e-5

    def __init__(self, memory: Any, n: int) -> None:
        super().__init__(memory, n)
        self.optimizer = OPTIMIZERS[memory.optimizer]()

    def add(self, gradient: np.ndarray) -> np.ndarray:
        return self.optimizer.step(gradient.astype(np.float64))


MEMORIES: dict[type, type[Rememberer]] = {
    gravac.Momentum: Masks,
    gravac.Residual: Rememberer,
    gravac.OwnOptimizer: RunsOptimizer,
}


# Controllers ---------------------------------------------------------------------


class Decision(NamedTuple):
    """What a controller should decide, and how narrowly."""

    rung: int
    rungs_of_state: tuple[int, ...]
    margin: float  # of the closest comparison; float32 cannot be trusted at a tiny one


Run = list[Any]  # one entry a step
Decisions = Iterator[Decision]


def scheduled(controller: Any, evidence: Run, states: Run) -> Decisions:
    """Yield the last rung that has begun by the third exchange from here."""
    del states
    for e in evidence:
        third = int(e.step) + 3 * int(e.round_steps)
        yield Decision(sum(x <= third for x in controller.starts), (), math.inf)


def gravac_algorithm_1(controller: Any, evidence: Run, states: Run) -> Decisions:
    """Yield the decisions of GraVAC's Algorithm 1.

    Gains are quotients of averages (the paper's text). The first measured time clears
    what was predicted. A search that has settled has ended. Rungs that are dense under
    another name are left out.
    """
    del states
    top = len(controller.ladder) - 1
    kept = [0, *range(min(int(evidence[0].first_sparse), top), top + 1)]
    minimum, candidate, is_settled = 1, min(2, len(kept) - 1), False
    sent, total = np.zeros(len(kept)), 0.0
    predicted: dict[int, float] = {}
    measured: dict[int, float] = {}

    for e in evidence:
        weight = min(1.0, e.replicas / 100)
        sent = sent + weight * (e.energies[kept] - sent)
        total = total + weight * (e.energy - total)
        gains = sent / total
        for r, seconds in enumerate(e.measured_seconds[kept]):
            if seconds > 0:
                measured[r] = gains[r] / seconds

        rung, margins = 0, [abs(gains[candidate] - controller.epsilon)]
        if gains[candidate] >= controller.epsilon:
            rung = candidate
        else:
            margins.append(abs(gains[minimum] - controller.epsilon))
            rung = minimum if gains[minimum] >= controller.epsilon else 0
        predicted[rung] = gains[rung] / e.predicted_parts[kept[rung]].sum()

        passed = range(int(e.step) + 2 - int(e.round_steps), int(e.step) + 2)
        if any(x % controller.window == 0 for x in passed) and not is_settled:
            minimum, candidate, is_settled, margin = check_gravac(
                controller.omega, gains, minimum, candidate, measured or predicted
            )
            margins.append(margin)
        yield Decision(kept[rung], (kept[minimum], kept[candidate]), min(margins))


def check_gravac(
    omega: float,
    gains: np.ndarray,
    minimum: int,
    candidate: int,
    throughputs: dict[int, float],
) -> tuple[int, int, bool, float]:
    """Return the paper's CheckGraVAC: minimum, candidate, is settled, margin.

    Promotion comes before the step up and goes to the rung that was measured; of two
    like throughputs the lower rung is taken (the prose, not the listing).
    """
    margin, loss = math.inf, gains[minimum] - gains[candidate]
    if minimum != candidate:
        margin = abs(loss - omega * gains[minimum])
        minimum = candidate if loss <= omega * gains[minimum] else minimum

    candidate = min(candidate + 1, len(gains) - 1)
    first, *others = sorted(throughputs, key=lambda r: -throughputs[r])
    if not others or throughputs[others[0]] <= 0:
        return minimum, candidate, False, margin
    gap = throughputs[first] / throughputs[others[0]] - 1
    if gap <= omega:
        candidate = min(first, others[0])
    # A candidate below the minimum would leave the gate with nothing to try.
    minimum, margin = min(minimum, candidate), min(margin, abs(gap - omega))
    return minimum, candidate, gap <= omega, margin


def fastest(controller: Any, evidence: Run, states: Run) -> Decisions:
    """Yield the rung of least seconds per progress, and visits to other rungs.

    What is known about the parts of a step is read from the library's state: the filter
    has tests of its own.
    """
    rungs = len(controller.ladder)
    # It has been decided before the first step that two more are like that.
    home, now = rungs - 1, int(controller.ladder[0] == gravac.Dense())
    dwelt, rested, known, sent, total = 2, 0, 0, np.zeros(rungs), 0.0
    for e, state in zip(evidence, states, strict=True):
        timing = state.timing
        home, now = (within_reach(controller, e, c) for c in (home, now))
        if e.gradient_energies[0] > 0:
            sent = 0.9 * sent + 0.1 * e.gradient_energies
            total = 0.9 * total + 0.1 * e.gradient_energy
        progress = progress_of(controller, e, sent / total, home)
        cost, worth_of_visits = costs(e, progress, home, timing)

        has_changed = np.max(e.measured_seconds, initial=0) and not timing.surprise
        is_known = timing.times < 2 or not has_changed
        known = min(known + int(e.round_steps), 400) if is_known else 0
        assert state.known == known, "steps since the network changed"
        dwelt, rested = dwelt + 1, rested + int(e.round_steps)
        has_begun = timing.times > 3 if timing.times else dwelt >= 5
        is_free, best = has_begun and dwelt >= 3, int(cost.argmin())
        margins = [abs(cost[best] - 0.97), *np.delete(cost - cost[best], best)]
        may_move = is_free and (now in (home, best) or not timing.times)
        new_home = best if may_move and cost[best] < 0.97 else home
        new = new_home if dwelt >= 3 else now
        if is_free and now == home == new_home and rested >= known / 8:
            wider = np.flatnonzero(progress > progress[home])
            margins += list(abs(cost[wider] - 1))
            cheap = [int(c) for c in wider if cost[c] <= 1]
            if cheap:
                new = new_home = max(cheap, key=lambda c: progress[c])
            else:
                worth = worth_of_visits()
                *_, second, first = sorted(worth, key=lambda r: worth[r])
                margins.append(abs(worth[first]))
                if worth[first] > 0:
                    margins.append(worth[first] - worth[second])
                    new = first
            rested = rested if new == home else 0
        dwelt, home, now = dwelt if new == now else 0, new_home, new
        yield Decision(now, (home, now), float(min(margins)))


def within_reach(controller: Any, e: Any, rung: int) -> int:
    """Return a rung, or the last one whose entries may wait."""
    suits = [r for r, x in enumerate(controller.ladder) if in_reach(x, e)]
    return rung if rung in suits else suits[-1]


def in_reach(encoding: Any, e: Any) -> bool:
    """Return whether entries may wait for as long as they do with an encoding."""
    return bool(e.at_own_params) or not encoding.needs_own_params


def progress_of(controller: Any, e: Any, shares: Any, home: int) -> np.ndarray:
    """Return what a step at each rung is worth; next to nothing if not allowed."""
    suits = [in_reach(x, e) for x in controller.ladder]
    # At the shared params gradients ask again for what waits.
    asks_again = not all(suits)
    worth = []
    for share, is_suited in zip(np.minimum(shares, 1), suits, strict=True):
        waiting = (e.round_steps - 1) / 2 + e.round_steps * (1 - share) / share
        cost = 1.2 if asks_again else 0.15 * math.sqrt(max(1, e.replicas / 4))
        worth.append(is_suited / (1 + cost * math.sqrt(waiting)))
    least = np.full(len(worth), controller.least_progress)
    least[home] *= 0.97
    may_be = (worth >= np.minimum(least, max(worth))) & suits
    return np.where(may_be, np.maximum(worth, 1e-6), 1e-12)


def costs(e: Any, progress: Any, home: int, timing: Any) -> Any:
    """Return the seconds per progress of each rung, and the worth of visits.

    Both are in units of what home costs.
    """
    guess = np.array([*e.predicted_parts, [e.predicted_parts[0][0], 0, 0, 0]], float)
    largest = guess.max(0)
    # Each kind of step has an extra of its own, of which nothing is predicted.
    parts = np.hstack([guess / np.where(largest, largest, 1), np.eye(len(guess))])
    first = np.pad(largest, (0, len(guess)))
    seconds = parts @ (timing.scale if timing.times else first)
    seconds = np.maximum(seconds, 0.02 * timing.seconds)
    # A round is an exchange, and then local steps.
    of_rounds = lambda x: (x[:-1] + (e.round_steps - 1) * x[-1]) / e.round_steps
    cost = of_rounds(seconds) / progress
    unit, cost = cost[home], cost / cost[home]

    def worth_of_visits() -> dict[int, float]:
        """Return what visits to other rungs are worth, in steps at home."""
        worth = {home: -math.inf}
        share = of_rounds(parts) / (progress * unit)[:, None]  # of parts in the cost
        deviation = math.sqrt(timing.covariance[0, 0])
        compute = max(timing.scale[0] - 2 * deviation, 0) if timing.times else 0
        for v in set(range(len(cost))) - {home}:
            moved = parts[v] @ timing.covariance
            variance = moved @ parts[v] + timing.noise * seconds[v] ** 2 / 3
            moved = share @ moved / math.sqrt(max(variance, 1e-24))
            gains = [0.0]
            for c in set(np.flatnonzero(progress > 1e-12)) - {home}:
                likely = excess(abs(cost[c] - cost[home]), abs(moved[c] - moved[home]))
                most = cost[home] - compute * share[c, 0]  # if only compute took time
                gains.append(min(likely, max(most, 0)))
            price = 3 * e.round_steps * max(cost[v] - cost[home], 0)
            worth[v] = 500 * max(gains) - price - 0.5
        return worth

    return cost, worth_of_visits


def excess(dearer: float, deviation: float) -> float:
    """Return the mean of max(0, x) for a normal x with mean `-dearer`."""
    z = dearer / max(deviation, 1e-12)
    normal = statistics.NormalDist()
    return max(deviation * normal.pdf(z) - dearer * normal.cdf(-z), 0)


class Decider(NamedTuple):
    """What a controller should do, and where its state holds rungs."""

    decisions: Callable[[Any, Run, Run], Decisions]
    rungs_of_state: Callable[[Any], tuple[Any, ...]]


CONTROLLERS = {
    gravac.Fastest: Decider(fastest, lambda x: (x.home, x.current)),
    gravac.Scheduled: Decider(scheduled, lambda x: ()),
    gravac.GraVAC: Decider(gravac_algorithm_1, lambda x: (x.minimum, x.candidate)),
}
