"""The library's numerics in slow, obvious NumPy.

Laws bound what a component may do; an oracle says what it does. Each is looked up by
the class of the component, so that a new member of a registry fails until it has one.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

import gravac_jax as gravac


def look_up(table: dict[type, Any], component: Any) -> Any:
    """The oracle of `component`; a saboteur's is that of the class it sabotages."""
    kinds = type(component).__mro__
    known = [kind for kind in kinds if kind in table]
    assert known, f"{kinds[0].__name__} has no oracle: add one to tests/_oracles.py"
    return table[known[0]]


# Compressors ---------------------------------------------------------------------


class Selector(NamedTuple):
    """What a compressor should do."""

    count: Callable[[int, float], int]  # n, factor -> k
    indices: Callable[[np.ndarray, int], list[int]]  # in the order of the payload


def _largest(bucket: np.ndarray, k: int) -> list[int]:
    # Python sorts stably: of equal magnitudes the earlier entry comes first.
    return sorted(range(len(bucket)), key=lambda i: -abs(float(bucket[i])))[:k]


COMPRESSORS = {
    gravac.Identity: Selector(lambda n, _: n, lambda bucket, _: [*range(len(bucket))]),
    gravac.TopK: Selector(lambda n, factor: max(1, math.floor(n / factor)), _largest),
}


# Exchanges -----------------------------------------------------------------------


class Exchanged(NamedTuple):
    """What an exchange should return, on all replicas."""

    mean: np.ndarray  # [n] float64
    residuals: np.ndarray  # [replicas, n]
    energies: np.ndarray  # [replicas] float64, of what each one sent


def dense_mean(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Everything is sent."""
    del exchange, factor
    exact = buckets.astype(np.float64)
    return Exchanged(exact.mean(0), np.zeros_like(buckets), (exact**2).sum(1))


def gathered_mean(exchange: Any, buckets: np.ndarray, factor: float) -> Exchanged:
    """Each replica's own selection, zero elsewhere, then the mean over replicas."""
    oracle = look_up(COMPRESSORS, exchange.compressor)
    sent = np.zeros_like(buckets)
    for replica, bucket in enumerate(buckets):
        for i in oracle.indices(bucket, oracle.count(len(bucket), factor)):
            sent[replica, i] = bucket[i]
    exact = sent.astype(np.float64)
    return Exchanged(exact.mean(0), buckets - sent, (exact**2).sum(1))


EXCHANGES = {gravac.DenseMean: dense_mean, gravac.AllGather: gathered_mean}


# Memories ------------------------------------------------------------------------


class Keeper(NamedTuple):
    """What a memory should do with a run of residuals."""

    compensated: Callable[[np.ndarray, list[np.ndarray]], np.ndarray]
    lost: Callable[[list[np.ndarray]], Any]  # what will never be sent


MEMORIES = {
    gravac.NoMemory: Keeper(
        compensated=lambda gradient, residuals: gradient,
        lost=lambda residuals: sum(residuals),
    ),
    gravac.Residual: Keeper(
        compensated=lambda gradient, residuals: gradient + residuals[-1],
        lost=lambda residuals: np.zeros_like(residuals[-1]),
    ),
}


# Controllers ---------------------------------------------------------------------


class Decision(NamedTuple):
    """What a controller should decide, and how narrowly."""

    rung: int
    rungs_of_state: tuple[int, ...]
    margin: float  # of the closest comparison; float32 cannot be trusted at a tiny one


def fixed(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """The first rung of one, whatever happens."""
    del controller
    for _ in evidence:
        yield Decision(0, (), math.inf)


def gravac_algorithm_1(controller: Any, evidence: Iterable[Any]) -> Iterator[Decision]:
    """Algorithm 1 of GraVAC, with the decisions where the paper leaves a choice.

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

        if (e.step + 1) % controller.window == 0 and not is_settled:
            minimum, candidate, is_settled, margin = check_gravac(
                controller, gains, minimum, candidate, measured or predicted
            )
            margins.append(margin)
        yield Decision(rung, (minimum, candidate), min(margins))


def check_gravac(
    controller: Any,
    gains: list[float],
    minimum: int,
    candidate: int,
    throughputs: dict[int, float],
) -> tuple[int, int, bool, float]:
    """The paper's CheckGraVAC: the new minimum and candidate, settled, the margin.

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


class Decider(NamedTuple):
    """What a controller should do, and where its state holds rungs."""

    decisions: Callable[[Any, Iterable[Any]], Iterator[Decision]]
    rungs_of_state: Callable[[Any], tuple[Any, ...]]


CONTROLLERS = {
    gravac.Fixed: Decider(fixed, lambda state: ()),
    gravac.GraVAC: Decider(
        gravac_algorithm_1, lambda state: (state.minimum, state.candidate)
    ),
}
