"""From timed parts to the seconds of a step, and whether compression pays.

A step is compute, what replicas do for themselves, and collectives, one after the
other. A collective takes what was timed of others, larger and smaller; beyond the
largest its bytes take what alpha and beta say, as they were fitted. How far all this
may err is told by bootstrap: rounds of timing are drawn anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gravac_jax._throughput import WireCost

LEAST_SPEED_UP = 1.05  # arbitrary: a compressed step teaches less than a dense one
DRAWS = 300
INTERVAL = (5, 95)  # percent of the draws
# How far what an exchange adds to a step is from the sum of its parts, a standard
# deviation; arbitrary.
MODEL_ERROR = 0.1
LEAST_SHARE = 0.1  # of a timed call is its own, whatever launching it took
LEAST_OFF = 0.01  # of a relative error of a fit, to be weighed less

# What is timed.
REDUCE, GATHER = "all-reduce", "all-gather"
LAUNCH, COMPUTE, STEP, ONE_ROW, MANY_ROWS = "launch", "compute", "step", "one", "many"
DENSE = "dense"
DENSE_RUNG = "dense rung"  # of the transform


class Call(NamedTuple):
    """A collective.

    Attributes:
      kind: `REDUCE` or `GATHER`.
      axis: of the mesh.
      wire_bytes: what one replica sends.
      messages: how many, one after the other.
    """

    kind: str
    axis: str
    wire_bytes: float
    messages: float


class Way(NamedTuple):
    """One way to average gradients.

    Attributes:
      exchange: its name.
      factor: of its rung.
      local: the name of what a replica does for itself.
      calls: its collectives.
      added: entries of other replicas' payloads that one replica adds up.
    """

    exchange: str
    factor: float
    local: str
    calls: tuple[Call, ...]
    added: float = 0.0


class Measured(NamedTuple):
    """What was timed.

    Attributes:
      seconds: of everything, by name, collectives by themselves: `[rounds]` float64.
      ways: to average gradients; the first is what they are compared with.
      added: entries that were added up for `MANY_ROWS`, and not for `ONE_ROW`.
    """

    seconds: Mapping[str | Call, np.ndarray]
    ways: tuple[Way, ...]
    added: float


class Range(NamedTuple):
    """A figure, and what it is between in 90% of bootstrap draws."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3g} ({self.low:.3g} to {self.high:.3g})"


class Row(NamedTuple):
    """What is predicted of one way.

    Attributes:
      way: it.
      selection_seconds: of what a replica does for itself, beyond a dense step's.
      exchange_seconds: of its collectives.
      step_seconds: of a step.
      speed_up: of a step over a dense one.
    """

    way: Way
    selection_seconds: float
    exchange_seconds: float
    step_seconds: Range
    speed_up: Range

    @property
    def pays(self) -> str:
        """Whether it does: "yes", "no" or "too close"."""
        if self.speed_up.low > LEAST_SPEED_UP:
            return "yes"
        return "no" if self.speed_up.high < LEAST_SPEED_UP else "too close"


class Predicted(NamedTuple):
    """All that is predicted.

    Attributes:
      links: of each kind of collective on each axis.
      wire: of all kinds on the compressed axis together, with the compute of a step and
        the selection of a rung in the middle: as far as known what `WireCost` takes.
      compute_seconds: of a step; None if nothing computed.
      dense: the step that others are compared with.
      rows: the others.
      ceiling: the speed-up of a step without any exchange; None if nothing computed.
    """

    links: dict[tuple[str, str], WireCost]
    wire: dict[str, float]
    compute_seconds: float | None
    dense: Row
    rows: tuple[Row, ...]
    ceiling: Range | None


def fit(calls: Sequence[Call], seconds: Iterable[float]) -> WireCost:
    """Alpha and beta of timed collectives.

    Relative errors count, large ones no more than in proportion: least squares that are
    weighed anew by the errors left, and neither result is negative.

    Args:
      calls: what was timed.
      seconds: of each, above 0.

    Returns:
      A cost without compute and selection.

    Example:
      >>> calls = [Call("all-reduce", "data", x, 2) for x in (1e3, 1e5, 1e7)]
      >>> cost = fit(calls, [2e-4 + x.wire_bytes / 1e8 for x in calls])
      >>> round(cost.latency_seconds, 7), round(cost.bytes_per_second / 1e8, 3)
      (0.0001, 1.0)
    """
    taken = np.fromiter(seconds, float)
    parts = np.array([(x.messages, x.wire_bytes) for x in calls]) / taken[:, None]
    weights = np.ones(len(taken))
    costs = np.zeros(2)
    for _ in range(10):
        costs = _positive(parts * weights[:, None], weights)
        weights = np.maximum(np.abs(parts @ costs - 1), LEAST_OFF) ** -0.5
    alpha, per_byte = costs.tolist()
    beta = 1 / min(1.0, max(per_byte, 1e-15))  # as WireCost bounds it
    return WireCost(beta, alpha, compute_seconds=0, selection_seconds=0)


def _positive(parts: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares of two numbers, neither of them negative."""
    both = np.linalg.lstsq(parts, target)[0]
    if both.min() >= 0:
        return both
    alone = np.maximum(parts.T @ target, 0) / np.maximum((parts**2).sum(0), 1e-300)
    errors = np.sum((target[:, None] - parts * alone) ** 2, axis=0)
    return np.where(np.arange(2) == errors.argmin(), alone, 0.0)


def predict(measured: Measured, seed: int = 0) -> Predicted:
    """The seconds of all ways, with their uncertainty.

    Args:
      measured: what was timed.
      seed: of the bootstrap.
    """
    rounds = len(measured.seconds[LAUNCH])
    rng = np.random.default_rng(seed)
    draw = lambda: _Parts(measured, rng.integers(0, rounds, rounds))
    drawn = [x.steps(rng) for x in (draw() for _ in range(DRAWS))]
    steps, bare = map(np.array, zip(*drawn, strict=True))
    parts = _Parts(measured, np.arange(rounds))
    step, compute = parts.steps()
    dense = parts.local(measured.ways[0])
    rows = [
        Row(
            way,
            parts.local(way) - dense,
            sum(map(parts.exchange, way.calls)),
            _range(step[i], steps[:, i]),
            _range(step[0] / step[i], steps[:, 0] / steps[:, i]),
        )
        for i, way in enumerate(measured.ways)
    ]
    is_computed = COMPUTE in measured.seconds
    wire = parts.wire(rows[-1].way.calls[-1].axis)
    some = [x for x in rows if x.way.factor > 1] or rows
    wire["selection_seconds"] = max(0.0, some[len(some) // 2].selection_seconds)
    if is_computed:
        wire["compute_seconds"] = compute
    return Predicted(
        links=parts.links,
        wire=wire,
        compute_seconds=compute if is_computed else None,
        dense=rows[0],
        rows=tuple(rows[1:]),
        ceiling=_range(step[0] / compute, steps[:, 0] / bare) if is_computed else None,
    )


def _range(middle: float, draws: np.ndarray) -> Range:
    low, high = np.percentile(draws, INTERVAL)
    return Range(float(min(low, middle)), float(middle), float(max(high, middle)))


class _Parts:
    """What ways to average consist of, by the medians of some rounds."""

    def __init__(self, measured: Measured, rounds: np.ndarray) -> None:
        self._ways, self._timed = measured.ways, {}
        self._seconds = {
            name: float(np.median(x[rounds])) for name, x in measured.seconds.items()
        }
        for call in (x for x in measured.seconds if isinstance(x, Call)):
            self._timed.setdefault((call.kind, call.axis), []).append(call)
        self.links = {x: fit(y, map(self._own, y)) for x, y in self._timed.items()}
        adding = self._seconds[MANY_ROWS] - self._seconds[ONE_ROW]
        self._entry_seconds = max(0.0, adding) / measured.added

    def _own(self, name: str | Call) -> float:
        taken = self._seconds[name]
        return max(taken - self._seconds[LAUNCH], LEAST_SHARE * taken)

    def local(self, way: Way) -> float:
        """Seconds of what a replica does for itself."""
        return self._own(way.local) + self._entry_seconds * way.added

    def exchange(self, call: Call) -> float:
        """Seconds of collectives: of as many as the messages are those of."""
        timed = self._timed[call.kind, call.axis]
        count = call.messages / timed[0].messages
        wire_bytes = call.wire_bytes / count if count else 0.0
        sizes, seconds = [x.wire_bytes for x in timed], list(map(self._own, timed))
        beyond = max(0.0, wire_bytes - sizes[-1])
        beta = self.links[call.kind, call.axis].bytes_per_second
        return count * (float(np.interp(wire_bytes, sizes, seconds)) + beyond / beta)

    def wire(self, axis: str) -> dict[str, float]:
        """Latency and bandwidth of all collectives over an axis."""
        calls = [y for x, group in self._timed.items() for y in group if x[1] == axis]
        link = fit(calls, map(self._own, calls))
        return {
            "bytes_per_second": link.bytes_per_second,
            "latency_seconds": link.latency_seconds,
        }

    def steps(self, rng: np.random.Generator | None = None) -> tuple[np.ndarray, float]:
        """Seconds of a step each way, and of compute; as they may be, if drawn."""
        exchange = lambda way: sum(map(self.exchange, way.calls))
        added = np.array([self.local(x) + exchange(x) for x in self._ways])
        if rng is not None:
            added *= np.exp(rng.normal(0, MODEL_ERROR, added.size))
        compute = self._seconds.get(COMPUTE, 0.0)
        steps = compute + added
        # Timed whole, a dense step is not predicted.
        steps[0] = self._seconds.get(STEP, steps[0])
        return steps, compute
