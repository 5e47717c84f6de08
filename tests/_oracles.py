"""The library's numerics in slow, obvious NumPy.

Laws bound what a component may do; an oracle says what it does. Each is looked up by
the class of the component, so that a new member of a registry fails until it has one.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
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


VALUES = {
    "float32": lambda x: x,
    "bfloat16": _to_bfloat16,
}


def dense(encoding: Any, bucket: Any, x: np.ndarray, state: Any, step: int) -> Expected:
    """Return the mean of everything, where both may travel as bfloat16."""
    del bucket, state, step
    sent = VALUES[encoding.values](x).astype(np.float64)
    mean = sent.mean(0)
    if encoding.values == "bfloat16":
        total = functools.reduce(np.add, sent.astype(np.float32))
        mean = _to_bfloat16(total / np.float32(len(x)))
    return Expected(mean, x - sent, (sent**2).sum(1))


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
    return Expected(sent.mean(0), x - sent, (sent**2).sum(1))


def low_rank(
    encoding: Any, bucket: Any, x: np.ndarray, state: Any, step: int
) -> Expected:
    """Return one step of PowerSGD in float64, from the library's directions."""
    del step
    is_short = encoding.values == "bfloat16"
    rounded = lambda x: _to_bfloat16(x.astype(np.float32)) if is_short else x
    exact = x.astype(np.float64)
    sent, start, rank = rounded(exact).astype(np.float64), 0, encoding.rank
    for shape, own in zip(bucket.shapes, state, strict=True):
        a, b = (math.prod(shape[:-1]), shape[-1]) if shape[1:] else (shape[0], 1)
        if rank * (a + b) < a * b:
            mine = exact[:, start : start + a * b].reshape(-1, a, b)
            right = np.asarray(own.right, np.float64)[0, :, :rank]
            left = np.linalg.qr(rounded(rounded(mine @ right).mean(0)))[0]
            projected = left @ rounded(left.T @ mine)
            sent[:, start : start + a * b] = projected.reshape(-1, a * b)
        start += a * b
    energies = (sent**2).sum(1)
    return Expected(
        sent.mean(0), exact - sent, energies, 2.0**-6 if is_short else 2.0**-16
    )


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


def row_length(row_entries: int, n: int, rows: int = 16) -> int:
    """Return how many entries share a scale: as many as divide `n`, if not too few."""
    longest = min(row_entries, 32 * math.ceil(n / rows / 32))
    fitting = [x for x in range(32, longest + 1, 32) if n % x == 0 and 4 * x >= longest]
    return max(fitting, default=longest)


class Section(NamedTuple):
    """Some entries that go in one step in so many bits, and come back in others."""

    entries: int
    length: int
    bits: int
    back: int

    def rows(self, owners: int) -> int:
        """Return how many rows each owner has."""
        return math.ceil(self.entries / self.length / owners)

    def size(self, owners: int) -> int:
        """Return the bytes that one replica puts in, with two scales for each row."""
        there, back = (self.length * x // 8 + 8 for x in (self.bits, self.back))
        return self.rows(owners) * (owners * there + (back if owners > 1 else 0))


def sections(encoding: Any, bucket: Any, owners: int) -> list[Section]:
    """Return the part that is due, and small leaves that go in every step, if any."""
    n, bits, back = bucket.n, encoding.bits, encoding.mean_bits or encoding.bits
    row = row_length(encoding.row_entries, n)

    def part_of(entries: int) -> int:
        turn = math.ceil(math.ceil(entries / row) / encoding.turns)
        return min(entries, max(turn, owners) * row)

    def with_spared(spared: int) -> list[Section]:
        part = n if part_of(n) == n else part_of(n - spared)
        due = Section(part, row_length(encoding.row_entries, part), bits, back)
        rows = owners * math.ceil(16 / owners)
        length = row_length(encoding.row_entries, spared, rows) if spared else row
        small = Section(spared, length, max(bits, 4), max(back, 4))
        return [due, small] if spared else [due]

    def size(spared: int) -> int:
        return sum(x.size(owners) for x in with_spared(spared))

    if part_of(n) == n and bits > 1:
        return with_spared(0)
    unit = row // 4 if part_of(n) < n and row % 128 == 0 else row
    leaves = itertools.takewhile(lambda x: x < 16_384, map(math.prod, bucket.shapes))
    ends = [unit * math.ceil(x / unit) for x in itertools.accumulate(leaves)]
    spared = [x for x in ends if x < n and size(x) <= 4 / 3 * size(0)]
    return with_spared(max(spared, default=0))


def few_bits(
    encoding: Any, bucket: Any, x: np.ndarray, state: Any, step: int
) -> Expected:
    """Return the mean of the entries that are due, row by row in float64."""
    del state
    (replicas, n), back = x.shape, encoding.mean_bits or encoding.bits
    owners = 1 if replicas <= 2 and encoding.bits <= back else replicas
    due, *others = sections(encoding, bucket, owners)
    spared = sum(section.entries for section in others)
    turns = math.ceil((n - spared) / due.entries)
    start = min(spared + step % turns * due.entries, n - due.entries)
    exact = x.astype(np.float64)
    mean, residuals, sent = np.zeros(n), exact.copy(), np.zeros(x.shape)
    for section, begin in zip([due, *others], [start, 0], strict=False):
        here = slice(begin, begin + section.entries)
        rounded = [rounded_rows(own[here], *section[2:0:-1]) for own in exact]
        sent[:, here] = rounded
        residuals[:, here] = exact[:, here] - sent[:, here]
        mean[here] = sent[:, here].mean(0)
        if owners > 1:
            average = mean[here].copy()
            mean[here] = rounded_rows(average, section.back, section.length)
            owed = replicas * (average - mean[here])
            own = section.rows(owners) * section.length
            for owner, first in enumerate(range(0, section.entries, own)):
                mine = slice(first, first + own)
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


def effective_step(evidence: Any) -> int:
    """Return the step of the third exchange after this one, in rounds as long."""
    exchanges = range(int(evidence.step), 10**9, int(evidence.steps))
    return exchanges[3]


def scheduled(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield the last rung that has begun by the third step from here."""
    for e in evidence:
        begun = [start for start in controller.starts if start <= effective_step(e)]
        yield Decision(len(begun), (), math.inf)


def accordion(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield the first rung where the gradient's norm changes between intervals."""
    norms: list[float] = []
    totals: list[float] = []
    regime = 0
    for e in evidence:
        norms.append(math.sqrt(float(e.gradient_energy)))
        margin = math.inf
        if len(norms) % controller.interval == 0:
            totals.append(sum(norms[-controller.interval :]))
            if len(totals) > 1:
                change = abs(totals[-2] - totals[-1]) / totals[-2]
                margin = abs(change / controller.threshold - 1)
                regime = int(change < controller.threshold)
        rung = regime
        if controller.learning_rate:
            last = effective_step(e) + 1
            first = max(last - controller.interval, 0)
            rates = [
                float(controller.learning_rate(x))
                for x in range(max(first - 1, 0), last)
            ]
            falls = [now / then for then, now in itertools.pairwise(rates)]
            margin = min([margin, *(abs(x / 0.7 - 1) for x in falls)])
            rung = 0 if min(falls, default=1) < 0.7 else regime
        yield Decision(rung, (regime,), margin)


def gravac_algorithm_1(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield the decisions of GraVAC's Algorithm 1.

    Gains are quotients of averages (the paper's text). The first measured time clears
    what was predicted. A search that has settled has ended.
    """
    top = len(controller.ladder) - 1
    minimum, candidate, is_settled = 1, min(2, top), False
    sent, total = [0.0] * (top + 1), 0.0
    predicted: dict[int, float] = {}
    measured: dict[int, float] = {}

    for e in evidence:
        weight = controller.smoothing or min(1.0, e.replicas / 100)
        sent = [a + weight * (e.energies[r] - a) for r, a in enumerate(sent)]
        total = total + weight * (e.energy - total)
        gains = [a / total for a in sent]
        if controller.gain == "norm":
            gains = [math.sqrt(gain) for gain in gains]
        for r, seconds in enumerate(e.measured_seconds):
            if not math.isnan(seconds):
                measured[r] = gains[r] / seconds

        margins = [abs(gains[candidate] - controller.epsilon)]
        rung = 0
        if gains[candidate] >= controller.epsilon:
            rung = candidate
        else:
            margins.append(abs(gains[minimum] - controller.epsilon))
            if gains[minimum] >= controller.epsilon:
                rung = minimum
        predicted[rung] = gains[rung] / e.predicted_seconds[rung]

        passed = range(int(e.step) + 2 - int(e.steps), int(e.step) + 2)
        if any(x % controller.window == 0 for x in passed) and not is_settled:
            minimum, candidate, is_settled, margin = check_gravac(
                controller, gains, minimum, candidate, measured or predicted
            )
            margins.append(margin)
        yield Decision(rung, (minimum, candidate), min(margins))


def gravac_decisions(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield decisions on a ladder without rungs that are dense under another name."""
    evidence, top = list(evidence), len(controller.ladder) - 1
    kept = [0, *range(min(int(evidence[0].first_sparse), top), top + 1)]
    ladder = tuple(controller.ladder[r] for r in kept)
    shorter = dataclasses.replace(controller, ladder=ladder)
    names = ("energies", "predicted_parts", "measured_seconds")
    only = lambda e: e._replace(**{x: getattr(e, x)[kept] for x in names})
    for rung, state, margin in gravac_algorithm_1(shorter, map(only, evidence)):
        yield Decision(kept[rung], tuple(kept[r] for r in state), margin)


def check_gravac(
    controller: Any,
    gains: list[float],
    minimum: int,
    candidate: int,
    throughputs: dict[int, float],
) -> tuple[int, int, bool, float]:
    """Return the paper's CheckGraVAC: minimum, candidate, is settled, margin.

    Promotion comes before the step up and goes to the rung that was measured; of two
    like throughputs the lower rung is taken (the prose, not the listing).
    """
    omega, margin = controller.omega, math.inf
    if minimum != candidate:
        loss = gains[minimum] - gains[candidate]
        margin = abs(loss - omega * gains[minimum])
        if loss <= omega * gains[minimum]:
            minimum = candidate

    candidate = min(candidate + 1, len(controller.ladder) - 1)
    first, *others = sorted(throughputs, key=lambda r: -throughputs[r])
    if not others or throughputs[others[0]] <= 0:
        return minimum, candidate, False, margin
    gap = throughputs[first] / throughputs[others[0]] - 1
    if gap <= omega:
        candidate = min(first, others[0])
    margin = min(margin, abs(gap - omega))
    # A candidate below the minimum would leave the gate with nothing to try.
    return min(minimum, candidate), candidate, gap <= omega, margin


def fastest(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield the rung of least seconds per progress, and visits to other rungs."""
    rungs = len(controller.ladder)
    # It has been decided before the first step that two more are like that.
    home, now = rungs - 1, int(controller.ladder[0] == gravac.Dense())
    dwelt, rested, known, filtered = 2, 0, 0, SecondsFilter()
    sent, total = np.zeros(rungs), 0.0
    for e in evidence:
        choices = choices_of(controller, e)
        home, now = (within_reach(controller, x, e) for x in (home, now))
        weight = 0.1 * bool(e.gradient_energies[0] > 0)
        sent = sent + weight * (e.gradient_energies - sent)
        total = total + weight * (e.gradient_energy - total)
        shares = np.minimum(sent / total, 1)
        progress = within_bytes(controller, choices, e) * progress_of_choices(
            controller, choices, shares, home, e
        )
        kinds, has_changed = kinds_of(e), learned(filtered, e)
        seconds = rounds_of(choices, [filtered.seconds(x) for x in kinds])
        cost, guess = seconds / progress, rounds_of(choices, kinds)
        cost /= cost[home]
        dwelt, rested = dwelt + 1, rested + int(e.steps)
        known = 0 if has_changed else min(known + int(e.steps), 400)

        best = int(np.argmin(cost))
        is_free = dwelt >= 3 and filtered.has_begun(dwelt)
        may_move = is_free and (now in (home, best) or not filtered.times)
        new_home = best if may_move and cost[best] < 0.97 else home
        margins = [abs(cost[best] - 0.97), *np.delete(cost - cost[best], best)]
        may_leave = is_free and now == home == new_home and rested >= known / 8
        if may_leave:
            new_home, close = safest(cost, progress, home)
            margins += close
        gain = functools.partial(visit_gain, filtered, guess, progress, cost, new_home)
        worth = worth_of_visits(gain, kinds, cost, choices, new_home)
        new = new_home if dwelt >= 3 else now
        if may_leave and new_home != home:
            rested = 0
        elif may_leave:
            *_, second, first = sorted(worth, key=lambda r: worth[r])
            margins.append(abs(worth[first]))
            if worth[first] > 0:
                margins.append(worth[first] - worth[second])
                new, rested = new_home - new_home % rungs + first, 0
        dwelt, home, now = dwelt if new == now else 0, new_home, new
        yield Decision(now % rungs, (home, now), float(min(margins)))


def choices_of(controller: Any, e: Any) -> list[tuple[int, int]]:
    """Return pairs: the steps of its own rounds, or of the given one, and a rung."""
    lengths = [int(e.steps)] if controller.rounds == (1,) else controller.rounds
    return [(h, r) for h in lengths for r in range(len(controller.ladder))]


def kinds_of(e: Any) -> np.ndarray:
    """Return the predicted parts of a step at each rung, and of a local one."""
    return np.array([*e.predicted_parts, [e.predicted_parts[0][0], 0, 0, 0]], float)


def within_reach(controller: Any, choice: int, e: Any) -> int:
    """Return a choice, or the last in rounds as long whose entries may wait."""
    rungs = range(len(controller.ladder))
    allowed = [r for r in rungs if may_wait(controller, r, e.at_own_params)]
    rung = choice % len(rungs)
    return choice if rung in allowed else choice - rung + allowed[-1]


def may_wait(controller: Any, rung: int, is_own: bool) -> bool:
    """Return whether entries may wait for as long as they do at a rung."""
    return is_own or not controller.ladder[rung].needs_own_params


def within_bytes(controller: Any, choices: list[tuple[int, int]], e: Any) -> Any:
    """Return 1 for choices that send few enough bytes, else next to nothing."""
    mean = np.array([e.wire_bytes[r] / h for h, r in choices])
    takes = [may_wait(controller, r, e.at_own_params) for _, r in choices]
    most = controller.most_bytes or math.inf
    return np.where(mean <= max(most, mean[takes].min()), 1, 1e-12)


def worth_of_visits(
    gain: Any, kinds: Any, cost: Any, choices: list[tuple[int, int]], home: int
) -> dict[int, float]:
    """Return what it is worth to visit each rung, in steps at home."""
    worth = dict.fromkeys(range(len(kinds) - 1), -math.inf)
    steps, at = choices[home]
    for v in worth.keys() - {at}:
        price = 3 * steps * max(cost[choices.index((steps, v))] - cost[home], 0)
        worth[v] = 500 * gain(kinds[v]) - price - 0.5
    return worth


def safest(cost: Any, progress: Any, home: int) -> tuple[int, list[float]]:
    """Return the choice of most progress that costs no more, and how close it was."""
    wider = [c for c in range(len(cost)) if progress[c] > progress[home]]
    margins = [abs(cost[c] - 1) for c in wider]
    cheap = [c for c in wider if cost[c] <= 1]
    return max(cheap, key=lambda c: progress[c], default=home), margins


def waiting_cost(controller: Any, e: Any) -> float:
    """Return what waiting costs: more where gradients ask again for what waits."""
    asks_again = any(x.needs_own_params for x in controller.ladder)
    return 1.2 if asks_again and not e.at_own_params else 0.15


def progress_of_choices(
    controller: Any, choices: list[tuple[int, int]], shares: Any, home: int, e: Any
) -> np.ndarray:
    """Return what a step of each choice is worth, and next to nothing if too little."""
    worth = []
    for steps, rung in choices:
        waiting = (steps - 1) / 2 + steps * (1 - shares[rung]) / shares[rung]
        found = 1 / (1 + waiting_cost(controller, e) * math.sqrt(waiting))
        worth.append(found if may_wait(controller, rung, e.at_own_params) else 0)
    least = np.full(len(choices), controller.least_progress)
    least[home] *= 0.97
    return np.where(
        worth >= np.minimum(least, max(worth)), np.maximum(worth, 1e-6), 1e-6
    )


def learned(filtered: "SecondsFilter", e: Any) -> bool:
    """Learn from the times of a round; return whether there were surprises in a row."""
    kinds = kinds_of(e)
    if filtered.last is not None and not math.isnan(e.local_seconds):
        filtered.observe(kinds, len(kinds) - 1, float(e.local_seconds))
    has_changed = False
    for r, seconds in enumerate(e.measured_seconds):
        if not math.isnan(seconds):
            has_changed = filtered.observe(kinds, r, float(seconds))
    return has_changed


def rounds_of(choices: list[tuple[int, int]], of: Any) -> np.ndarray:
    """Return the means over rounds: an exchange, and for the rest local steps."""
    *rungs, local = np.asarray(of)
    return np.array([(rungs[r] + (h - 1) * local) / h for h, r in choices])


class SecondsFilter:
    """The textbook's Kalman filter of what the parts of a step take."""

    def __init__(self):
        self.scale, self.covariance = np.ones(4), np.zeros((4, 4))
        self.noise, self.surprise, self.last, self.times = 0.04, 0.0, None, 0

    def has_begun(self, dwelt: int) -> bool:
        """Return whether the second rung was timed, or nothing when it could be."""
        return self.times > 3 if self.times else dwelt >= 5

    def seconds(self, guess: Any) -> float:
        """Return the predicted seconds of a step with these parts."""
        least = 0.02 * self.last[0] if self.last else 0.0
        return max(float(guess @ self.scale), least)

    def observe(self, guess: Any, rung: int, seconds: float) -> bool:
        """Learn from a time; return whether there were surprises in a row."""
        self.times += 1
        at, largest = guess[rung], guess.max(0)
        whole = np.array([seconds / x if x else 0.0 for x in largest])
        is_first = self.last is None
        if is_first:
            self.scale *= seconds / (at @ self.scale)
        for i, share in enumerate((0.002, 0.002, 0.03, 0.03)):
            most = seconds / at[i] if at[i] else math.inf
            likely = max(min(max(self.scale[i], 0), most), 0.3 * whole[i])
            self.covariance[i, i] += (share * likely) ** 2
            self.covariance[i, i] += whole[i] ** 2 if is_first else 0
        expected = max(float(at @ self.scale), 0.02 * seconds)
        share = at / expected
        variance = share @ self.covariance @ share + self.noise
        error = (seconds / expected - share @ self.scale) / math.sqrt(variance)
        error = min(max(error, -3), 3)
        gain = self.covariance @ share / variance
        self.scale = self.scale + gain * error * math.sqrt(variance)
        self.covariance = self.covariance - np.outer(gain, gain) * variance
        i = int(np.argmin(self.scale))
        if self.scale[i] < 0:
            column = self.covariance[i] / (2 * self.covariance[i, i])
            doubled = 2 * self.covariance[i, i]
            self.scale = self.scale - column * self.scale[i]
            self.covariance = self.covariance - np.outer(column, column) * doubled
        if self.last and np.array_equal(self.last[1], at):
            change = 2 * (seconds - self.last[0]) / (seconds + self.last[0])
            seen = min(change**2 / 2, 9 * self.noise)
            self.noise += 0.05 * (seen - self.noise)
        self.noise = max(self.noise, 1e-4)
        self.last = seconds, at
        self.surprise = 0.7 * self.surprise + 0.3 * error
        if abs(self.surprise) <= 2.2:
            return False
        self.surprise = 0.0
        self.covariance += np.diag((np.array([0.3, 0.3, 1, 1]) * whole) ** 2)
        return True


def visit_gain(
    filtered: SecondsFilter,
    guess: Any,
    progress: np.ndarray,
    cost: np.ndarray,
    home: int,
    visited: Any,
) -> float:
    """Return how much less a step is likely to cost after three times of one kind."""
    unit = filtered.seconds(guess[home]) / progress[home]
    per_progress = guess / (progress[:, None] * unit)
    seen = visited @ filtered.covariance @ visited
    seen += filtered.noise * filtered.seconds(visited) ** 2 / 3
    compute = filtered.scale[0] - 2 * math.sqrt(filtered.covariance[0, 0])
    gains = [0.0]
    for c, other in enumerate(per_progress):
        if c == home:
            continue
        if progress[c] <= 1e-6:  # it may not be taken
            continue
        moved = (other - per_progress[home]) @ filtered.covariance @ visited
        spread = max(abs(moved) / math.sqrt(max(seen, 1e-24)), 1e-12)
        z = abs(cost[c] - cost[home]) / spread
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        excess = spread * density - spread * z * math.erfc(z / math.sqrt(2)) / 2
        most = cost[home] - other[0] * max(compute, 0)
        gains.append(max(min(excess, max(most, 0)), 0))
    return max(gains)


class Decider(NamedTuple):
    """What a controller should do, and where its state holds rungs."""

    decisions: Callable[[Any, Iterable[Any]], Iterator[Decision]]
    rungs_of_state: Callable[[Any], tuple[Any, ...]]


CONTROLLERS = {
    gravac.Accordion: Decider(accordion, lambda state: (state.regime,)),
    gravac.Fastest: Decider(fastest, lambda state: (state.home, state.current)),
    gravac.Scheduled: Decider(scheduled, lambda state: ()),
    gravac.GraVAC: Decider(
        gravac_decisions, lambda state: (state.minimum, state.candidate)
    ),
}
