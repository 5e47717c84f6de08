"""The library's numerics in slow, obvious NumPy.

Laws bound what a component may do; an oracle says what it does. Each is looked up by
the class of the component, so that a new member of a registry fails until it has one.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
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


# Compressors ---------------------------------------------------------------------


class Selector(NamedTuple):
    """What a compressor should do."""

    count: Callable[[int, float], int]  # n, factor -> k
    indices: Callable[[np.ndarray, int], list[int]]  # k of them if they are more


def _entries(n: int, factor: float) -> int:
    return max(1, math.floor(n / factor))


def _largest(bucket: np.ndarray, k: int) -> list[int]:
    # Python sorts stably: of equal magnitudes the earlier entry comes first.
    order = sorted(range(len(bucket)), key=lambda i: -abs(float(bucket[i])))
    return [i for i in order[:k] if bucket[i]]


def _sampled(bucket: np.ndarray, k: int) -> list[int]:
    found = _reaching(bucket, k)
    return found if len(found) <= k else _largest(bucket, k)


def _reaching(bucket: np.ndarray, k: int) -> list[int]:
    threshold = sorted(np.abs(bucket), reverse=True)[k - 1]
    return [i for i, x in enumerate(bucket) if x and abs(x) >= threshold]


def _draws() -> np.ndarray:
    return np.asarray(jax.random.key_data(jax.random.key(KEY_SEED)))


def _at_random(bucket: np.ndarray, k: int) -> list[int]:
    one, two = map(int, _draws())
    numbers = []
    for x in range(len(bucket)):
        x = (x + one) % 2**30
        x = (x ^ x >> 15) * 0x85EBCA6B % 2**30
        x = ((x ^ x >> 13) + two) % 2**30
        x = x * 0xC2B2AE35 % 2**30
        numbers.append(x ^ x >> 15)
    return sorted(range(len(bucket)), key=lambda i: -numbers[i])[:k]


def _normal(bucket: np.ndarray) -> list[float]:
    return [abs(float(x)) if abs(x) >= 2.0**-126 else 0.0 for x in bucket]


def _bisected(bucket: np.ndarray, k: int) -> list[int]:
    # RedSync, with numbers as large as they come.
    magnitudes = [Fraction(x) for x in _normal(bucket)]
    low, high = Fraction(0), max(magnitudes)
    middle = Fraction(math.sqrt(sum(x * x for x in magnitudes) / len(bucket)))
    reaching = lambda t: [i for i, x in enumerate(magnitudes) if x and x >= t]
    for _ in range(30):
        count = len(reaching(middle))
        if max(1, int(0.8 * k)) <= count <= k:
            return reaching(middle)
        low, high = (middle, high) if count > k else (low, middle)
        middle = (low + high) / 2
    count = len(reaching(middle))
    return reaching(middle if max(1, int(0.8 * k)) <= count <= k else high)


_WHOLE = Selector(lambda n, _: n, lambda bucket, _: [*range(len(bucket))])
COMPRESSORS: dict[type, Selector] = {
    gravac.Identity: _WHOLE,
    gravac.RandomK: Selector(_entries, _at_random),
    gravac.RedSync: Selector(_entries, _bisected),
    gravac.SampledTopK: Selector(_entries, _sampled),
    gravac.Threshold: Selector(_entries, _reaching),
    gravac.TopK: Selector(_entries, _largest),
}


# Encodings of values. ---------------------------------------------------------------


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    largest = float(jnp.finfo(jnp.bfloat16).max)
    return np.clip(x.astype(jnp.bfloat16).astype(np.float64), -largest, largest)


VALUES = {
    "float32": lambda x: x,
    "bfloat16": _to_bfloat16,
}


# Exchanges -----------------------------------------------------------------------


def shapes(n: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a vector and two matrices that fill a bucket of `n`.

    The smallest come first, as in the buckets of `gravac.transform`.
    """
    side = math.isqrt(n // 2)
    if side < 3:
        return ((n,),)
    left = n - side * (side + 1)
    return (left - left // 4 // 2 * 8,), (left // 4 // 2, 2, 4), (side + 1, side)


class Exchanged(NamedTuple):
    """What an exchange should return, on all replicas."""

    mean: np.ndarray  # [n] float64
    residuals: np.ndarray  # [replicas, n]
    energies: np.ndarray  # [replicas] float64, of what each one sent


def dense_mean(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Return the mean of everything, and no residual."""
    del factor
    if getattr(exchange, "values", "") == "bfloat16":
        return dense_mean_16(buckets)
    exact = buckets.astype(np.float64)
    return Exchanged(exact.mean(0), np.zeros_like(buckets), (exact**2).sum(1))


@functools.cache
def _jitted_compress(compressor: Any, k: int) -> Callable[[Any], Any]:
    key = jax.random.key(KEY_SEED)
    return jax.jit(
        lambda x: compressor.compress(x, compressor.init(x.size), k=k, key=key)[0]
    )


def _selected(compressor: Any, k: int, bucket: np.ndarray) -> np.ndarray:
    """Return what the library selects; selections have an oracle of their own."""
    indices = np.asarray(_jitted_compress(compressor, k)(bucket).indices)
    return indices[indices < bucket.size]


def gathered_mean(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Return the mean of each replica's own selection, rounded."""
    compressor, n = exchange.compressor, buckets.shape[1]
    encode = VALUES[exchange.values]
    k = compressor.count(n, factor)
    sent = buckets.copy() if k == n else np.zeros_like(buckets)
    for replica, bucket in enumerate(buckets) if k < n else ():
        chosen = _selected(compressor, k, bucket)
        sent[replica, chosen] = encode(bucket[chosen])
    exact = sent.astype(np.float64)
    return Exchanged(exact.mean(0), buckets - sent, (exact**2).sum(1))


def dense_mean_16(buckets: np.ndarray) -> Exchanged:
    """Return the mean of everything, where both travel as bfloat16."""
    sent = _to_bfloat16(buckets)
    total = functools.reduce(np.add, sent.astype(np.float32))
    mean = _to_bfloat16(total / np.float32(len(buckets)))
    return Exchanged(mean, buckets - sent, (sent**2).sum(1))


def mean_at(buckets: np.ndarray, indices: np.ndarray) -> Exchanged:
    """Return the mean of all entries at `indices`, the same on every replica."""
    sent = np.zeros_like(buckets)
    sent[:, indices] = buckets[:, indices]
    exact = sent.astype(np.float64)
    return Exchanged(exact.mean(0), buckets - sent, (exact**2).sum(1))


def leaders_mean(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Return the mean at the places of the first replica, which leads first."""
    compressor, n = exchange.compressor, buckets.shape[1]
    k = compressor.count(n, factor)
    if k == n:
        return dense_mean(None, buckets, factor)
    return mean_at(buckets, _selected(compressor, k, buckets[0]))


def random_mean(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Return the mean at random places, the same on every replica."""
    del exchange
    k = gravac.RandomK().count(buckets.shape[1], factor)
    return mean_at(buckets, np.array(_at_random(buckets[0], k)))


def low_rank_mean(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Return one step of PowerSGD in float64, from the library's first directions."""
    is_short = exchange.values == "bfloat16"
    rounded = lambda x: _to_bfloat16(x.astype(np.float32)) if is_short else x
    n = buckets.shape[1]
    parts = shapes(n)
    vector = lambda x: (math.prod(x), 1)
    arrays = [(math.prod(x[:-1]), x[-1]) if x[1:] else vector(x) for x in parts]
    entries = lambda r: sum(min(r * (a + b), a * b) for a, b in arrays)
    fits = [r for r in range(1, n) if entries(r) <= n / factor]
    rank = max(fits, default=1)
    if factor == 1 or entries(rank) == n:
        return dense_mean(None, buckets, factor)
    begun = exchange.shaped(parts).init(n, (1.0, 1.0 + 1e-6))
    exact = buckets.astype(np.float64)
    sent, start = rounded(exact).astype(np.float64), 0
    for (a, b), state in zip(arrays, begun, strict=True):
        mine = exact[:, start : start + a * b].reshape(-1, a, b)
        if rank * (a + b) < a * b:
            right = np.asarray(state.right, np.float64)[:, :rank]
            left = np.linalg.qr(rounded(rounded(mine @ right).mean(0)))[0]
            projected = left @ rounded(left.T @ mine)
            sent[:, start : start + a * b] = projected.reshape(-1, a * b)
        start += a * b
    return Exchanged(sent.mean(0), exact - sent, (sent**2).sum(1))


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


def row_length(row_entries: int, n: int) -> int:
    """Return how many entries share a scale: as many as divide `n`, if not too few."""
    longest = min(row_entries, 32 * math.ceil(n / 16 / 32))  # at least 16 rows
    fitting = [x for x in range(32, longest + 1, 32) if n % x == 0 and 4 * x >= longest]
    return max(fitting, default=longest)


def rounded_rows(x: np.ndarray, bits: int, length: int) -> np.ndarray:
    """Return a vector as its rows of this length in few bits give it back."""
    rows = [x[start : start + length] for start in range(0, x.size, length)]
    return np.concatenate([rounded_row(row, bits) for row in rows])


def in_turn(whole: Any) -> Any:
    """Return an oracle of factors of too few bits, in step 0: of the first rows."""

    def first_part(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
        (replicas, n), highest = buckets.shape, 32 // exchange.least_bits
        length = row_length(exchange.row_entries, n)
        turns = max(1, math.ceil(factor / highest))
        bits, mean_bits = exchange.least_bits, getattr(exchange, "mean_bits", None)
        is_shared = isinstance(exchange, gravac.QuantizedAllReduce)
        has_owners = is_shared and (replicas > 2 or bits > (mean_bits or bits))
        least = replicas if has_owners else 1
        due = max(least, math.ceil(math.ceil(n / length) / turns)) * length
        if due >= n:
            return whole(exchange, buckets, min(factor, highest))
        sent = whole(exchange, buckets[:, :due], highest)
        residuals = np.concatenate([sent.residuals, buckets[:, due:]], 1)
        return Exchanged(np.pad(sent.mean, (0, n - due)), residuals, sent.energies)

    return first_part


def quantized_mean(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Return the mean of all entries in few bits, row by row in float64."""
    replicas, n = buckets.shape
    length = row_length(exchange.row_entries, n)
    bits = max((b for b in (1, 2, 4, 8) if b * factor <= 32), default=1)
    rows = -(-n // length)
    wire_bytes = (replicas - 1) * 4 * rows * (bits * length // 32 + 2)
    if factor == 1 or wire_bytes > 2 * (replicas - 1) / replicas * 4 * n:
        return dense_mean(None, buckets, factor)
    exact = buckets.astype(np.float64)
    sent = np.stack([rounded_rows(x, bits, length) for x in exact])
    return Exchanged(sent.mean(0), exact - sent, (sent**2).sum(1))


def quantized_all_reduce(
    exchange: Any, buckets: np.ndarray, factor: float
) -> Exchanged:
    """Return the mean of all entries in few bits, rounded again by its owners."""
    replicas, n = buckets.shape
    length = row_length(exchange.row_entries, n)
    bits = max((b for b in (1, 2, 4, 8) if b * factor <= 32), default=1)
    mean_bits = exchange.mean_bits or bits
    if replicas <= 2 and bits <= mean_bits:  # a gather sends no more
        return quantized_mean(exchange, buckets, factor)
    part = -(-n // length // replicas) * length  # entries that a replica owns
    row_bytes = (bits + mean_bits) * length // 8 + 16
    wire_bytes = (replicas - 1) * part // length * row_bytes
    if factor == 1 or wire_bytes > 2 * (replicas - 1) / replicas * 4 * n:
        return dense_mean(None, buckets, factor)
    exact = buckets.astype(np.float64)
    sent = np.stack([rounded_rows(x, bits, length) for x in exact])
    mean = rounded_rows(sent.mean(0), mean_bits, length)
    residuals = exact - sent
    for owner in range(replicas):
        own = slice(owner * part, (owner + 1) * part)
        residuals[owner, own] += replicas * (sent.mean(0) - mean)[own]
    return Exchanged(mean, residuals, (sent**2).sum(1))


def best_levels(magnitudes: list[float], bits: int) -> list[float]:
    """Return what falling magnitudes are rounded to: their means, cut at the best."""
    cuts = [len(magnitudes)] if bits == 1 else range(1, len(magnitudes) + 1)
    cells = lambda cut: [x for x in (magnitudes[:cut], magnitudes[cut:]) if x]
    levels = lambda cut: [float(np.mean(x)) for x in cells(cut) for _ in x]
    loss = lambda cut: np.sum(np.square(np.subtract(magnitudes, levels(cut))))
    return levels(min(cuts, key=loss)) if magnitudes else []


def largest_of_rows(x: np.ndarray, bits: int, length: int, k: int) -> np.ndarray:
    """Return a vector with the k largest of each row of this length, rounded."""
    sent = np.zeros_like(x)
    for start in range(0, x.size, length):
        row = x[start : start + length].tolist()
        order = sorted(range(len(row)), key=lambda i: -abs(row[i]))
        chosen = [i for i in order[:k] if row[i]]
        levels = best_levels([abs(row[i]) for i in chosen], bits)
        for i, level in zip(chosen, levels, strict=True):
            sent[start + i] = math.copysign(level, row[i])
    return sent


def rows_mean(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Return the mean of the largest entries of each row, in float64."""
    replicas, n = buckets.shape
    longest = min(exchange.row_entries, n)
    fitting = [x for x in range(16, longest + 1, 16) if n % x == 0 and 2 * x > longest]
    length = longest if longest == n else max(fitting, default=longest)
    rows = math.ceil(n / length)
    k = max(1, round(length / factor))
    width = math.ceil(math.log2(length)) + exchange.bits
    planes = [2**i for i in range(6) if width & 2**i]
    words = sum(math.ceil(rows * k / (32 // x)) for x in planes)
    wire_bytes = (replicas - 1) * 4 * (words + exchange.bits * rows)
    is_dense = wire_bytes > 2 * (replicas - 1) / replicas * 4 * n
    if factor == 1 or rows * k >= n or is_dense:
        return dense_mean(None, buckets, factor)
    exact = buckets.astype(np.float64)
    largest = lambda x: largest_of_rows(x, exchange.bits, length, k)
    sent = np.stack([largest(x) for x in exact])
    return Exchanged(sent.mean(0), exact - sent, (sent**2).sum(1))


def mixed(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Return what the exchange of this factor makes of the buckets."""
    is_sparse = factor in exchange.sparse_factors
    taken = exchange.sparse if is_sparse else exchange.few_bits
    return look_up(EXCHANGES, taken)(taken, buckets, factor)


EXCHANGES = {
    gravac.DenseMean: dense_mean,
    gravac.AllGather: gathered_mean,
    gravac.LeaderIndices: leaders_mean,
    gravac.LowRank: low_rank_mean,
    gravac.Mixed: mixed,
    gravac.Quantized: in_turn(quantized_mean),
    gravac.QuantizedAllReduce: in_turn(quantized_all_reduce),
    gravac.QuantizedTopK: rows_mean,
    gravac.SharedRandomK: random_mean,
}


# Memories ------------------------------------------------------------------------


class Rememberer:
    """What a memory should do with one bucket of one replica, step by step.

    In float32, whose roundings a memory must share; `made` and `lost` add up in
    float64 what it made of gradients, and what will never be sent.
    """

    rtol = 0.0  # of what is selected from

    def __init__(self, memory: Any, n: int) -> None:
        self.memory = memory
        self.residual = np.zeros(n, np.float32)
        self.made = np.zeros(n)
        self.lost = np.zeros(n)

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


class Forgets(Rememberer):
    """No error feedback."""

    def keep(self, residual: np.ndarray) -> None:
        self.lost += residual


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
    gravac.NoMemory: Forgets,
    gravac.Residual: Rememberer,
    gravac.Steps: RunsOptimizer,
}


# Controllers ---------------------------------------------------------------------


class Decision(NamedTuple):
    """What a controller should decide, and how narrowly."""

    rung: int
    rungs_of_state: tuple[int, ...]
    margin: float  # of the closest comparison; float32 cannot be trusted at a tiny one


def fixed(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield the first rung, whatever happens."""
    del controller
    for _ in evidence:
        yield Decision(0, (), math.inf)


def allowed_rung(ladder: Any, allowed: float) -> tuple[int, float]:
    """Return the highest rung up to a factor, and how narrowly."""
    rungs = [r for r, factor in enumerate(ladder) if factor <= allowed]
    margin = min(abs(factor / allowed - 1) for factor in ladder) - 1e-5
    return max(rungs, default=0), margin


def effective_step(evidence: Any) -> int:
    """Return the step of the third exchange after this one, in rounds as long."""
    exchanges = range(int(evidence.step), 10**9, int(evidence.steps))
    return exchanges[3]


def scheduled(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield the highest factor that the schedule allows in the third step from here."""
    for e in evidence:
        allowed = float(controller.schedule(effective_step(e)))
        rung, margin = allowed_rung(controller.ladder, allowed)
        yield Decision(rung, (), margin)


def capped(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield the decision of the capped controller, or the cap of the third step."""
    evidence, other = list(evidence), controller.controller
    decisions = look_up(CONTROLLERS, other).decisions(other, evidence)
    for e, decision in zip(evidence, decisions, strict=True):
        cap, margin = allowed_rung(
            controller.ladder, float(controller.cap(effective_step(e)))
        )
        yield decision._replace(
            rung=min(cap, decision.rung), margin=min(margin, decision.margin)
        )


def every(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield the decisions of the controller of the exchanges."""
    other = controller.controller
    yield from look_up(CONTROLLERS, other).decisions(other, evidence)


def accordion(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Yield the low factor where the gradient's norm changes between intervals."""
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

    Promotion comes before the step up and goes to the factor that was measured; of two
    like throughputs the lower factor is taken (the prose, not the listing).
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
    choices = [(h, r) for h in controller.rounds for r in range(rungs)]
    # It has been decided before the first step that two more are like that.
    home, now, dwelt, rested, known = rungs - 1, 1, 2, 0, 0
    sent, total, filtered = np.zeros(rungs), 0.0, SecondsFilter()
    for e in evidence:
        home = within_reach(controller, home, e)
        weight = 0.1 * bool(e.gradient_energies[0] > 0)
        sent = sent + weight * (e.gradient_energies - sent)
        total = total + weight * (e.gradient_energies[0] - total)
        shares = np.minimum(sent / total, 1)
        progress = within_bytes(controller, choices, e) * progress_of_choices(
            controller, choices, shares, home, e
        )
        kinds = kinds_of(e)
        has_changed = learned(filtered, kinds, e)
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


def kinds_of(e: Any) -> np.ndarray:
    """Return the predicted parts of a step at each rung, and of a local one."""
    return np.array([*e.predicted_parts, [e.predicted_parts[0][0], 0, 0, 0]], float)


def within_reach(controller: Any, choice: int, e: Any) -> int:
    """Return a choice, or that of the largest factor at which entries may wait."""
    rungs = range(len(controller.ladder))
    last = max(r for r in rungs if may_wait(controller, r, e.at_own_params))
    return choice - max(choice % len(rungs) - last, 0)


def may_wait(controller: Any, rung: int, is_own: bool) -> bool:
    """Return whether entries may wait for as long as they do at a rung."""
    return is_own or controller.ladder[rung] <= controller.largest_at_shared


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
    asks_again = controller.largest_at_shared < math.inf and not e.at_own_params
    return 1.2 if asks_again else 0.15


def progress_of_choices(
    controller: Any, choices: list[tuple[int, int]], shares: Any, home: int, e: Any
) -> np.ndarray:
    """Return what a step of each choice is worth, and next to nothing if too little."""
    progress = []
    for i, (steps, rung) in enumerate(choices):
        waiting = (steps - 1) / 2 + steps * (1 - shares[rung]) / shares[rung]
        worth = 1 / (1 + waiting_cost(controller, e) * math.sqrt(waiting))
        least = controller.least_progress * (0.97 if i == home else 1)
        is_enough = worth >= least or i == 0
        waits = may_wait(controller, rung, e.at_own_params)
        progress.append(worth if is_enough and waits else 1e-6)
    return np.array(progress)


def learned(filtered: "SecondsFilter", kinds: Any, e: Any) -> bool:
    """Learn from the times of a round; return whether there were surprises in a row."""
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


def rungs_of_rounds(state: Any) -> tuple[Any, ...]:
    """Return the rungs in the state of the controller of the exchanges."""
    return (state.minimum, state.candidate) if hasattr(state, "minimum") else ()


class Decider(NamedTuple):
    """What a controller should do, and where its state holds rungs."""

    decisions: Callable[[Any, Iterable[Any]], Iterator[Decision]]
    rungs_of_state: Callable[[Any], tuple[Any, ...]]


CONTROLLERS = {
    gravac.Accordion: Decider(accordion, lambda state: (state.rung,)),
    gravac.Capped: Decider(capped, lambda state: (state.minimum, state.candidate)),
    gravac.Every: Decider(every, rungs_of_rounds),
    gravac.Fastest: Decider(fastest, lambda state: (state.home, state.current)),
    gravac.Fixed: Decider(fixed, lambda state: ()),
    gravac.Scheduled: Decider(scheduled, lambda state: ()),
    gravac.GraVAC: Decider(
        gravac_decisions, lambda state: (state.minimum, state.candidate)
    ),
}
