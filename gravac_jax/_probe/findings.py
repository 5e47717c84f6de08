"""What a probe has found, as data and in words."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gravac_jax._probe.verdict import (
    DENSE_RUNG,
    LAUNCH,
    LEAST_SPEED_UP,
    STEP,
    Measured,
    Predicted,
    Row,
)
from gravac_jax._probe.ways import Plan

ALWAYS = (
    "Ranges are what rounds of timing differ by (90% of bootstrap draws); on a network"
    " that is no bottleneck steps were up to 18% longer. A dense step averages float32"
    " gradients in one all-reduce; what is not"
    f" {LEAST_SPEED_UP:g} times as fast does not pay.",
    "Speed-ups are per step. A compressed step teaches less than a dense one: how much"
    " less, a probe cannot know, and the controller measures while you train.",
)
ADDED_UP = (
    "Parts are added up. Where a dense all-reduce overlaps with the backward pass,"
    " dense steps are faster than this; with --headroom they are timed whole."
)
NO_COMPUTE = (
    "Compute is not known (give --loss), and only exchanges are compared: a step gains"
    " as many milliseconds, which are a smaller share of it."
)
NO_NETWORK = (
    "All replicas are CPU devices of one process: there is no network between them, a"
    " collective is a copy in memory, and this says nothing about a cluster."
)


def report(plan: Plan, measured: Measured, predicted: Predicted) -> dict[str, Any]:
    """Everything, ready for JSON."""
    axes: dict[str, Any] = {}
    for (kind, axis), link in predicted.links.items():
        links = axes.setdefault(axis, {"replicas": plan.replicas(axis)})
        links[kind] = {
            "latency_seconds": link.latency_seconds,
            "bytes_per_second": link.bytes_per_second,
        }
    return {
        "devices": f"{jax.device_count()} {jax.devices()[0].platform}",
        "processes": jax.process_count(),
        "params": plan.entries,
        "rounds": len(measured.seconds[LAUNCH]),
        "axes": axes,
        "wire": predicted.wire,
        "compute_seconds": predicted.compute_seconds,
        "ceiling": predicted.ceiling and list(predicted.ceiling),
        "dense": _figures(predicted.dense),
        "rows": [_figures(x) for x in predicted.rows],
        "break_even": break_evens(predicted.rows),
        "verdict": verdict(predicted),
        "notes": _notes(measured, predicted),
    }


def _figures(row: Row) -> dict[str, Any]:
    # Of several axes, over the one that is compressed; a dense step knows but one.
    calls = [x for x in row.way.calls if x.axis == row.way.calls[-1].axis]
    return {
        "exchange": row.way.exchange,
        "factor": row.way.factor,
        "wire_bytes": sum(x.wire_bytes for x in calls),
        "messages": sum(x.messages for x in calls),
        "selection_seconds": row.selection_seconds,
        "exchange_seconds": row.exchange_seconds,
        "step_seconds": list(row.step_seconds),
        "speed_up": list(row.speed_up),
        "pays": row.pays,
    }


def verdict(predicted: Predicted) -> str:
    """Whether compression pays, in a sentence."""
    rows = [x for x in predicted.rows if x.way.exchange != DENSE_RUNG]
    best = max(rows, key=lambda x: x.speed_up.middle)
    name = best.way.exchange
    if best.way.factor > 1:
        name += f" at factor {best.way.factor:g}"
    # Without compute nothing is known of whole steps.
    thing = "an exchange" if predicted.compute_seconds is None else "a step"
    times = lambda x: f"{thing} is {x} times as fast as a dense one"
    if best.pays == "yes":
        return f"compression pays here: with {name} {times(best.speed_up)}"
    if best.pays != "no":
        rest = f"with {name}, the fastest, {times(best.speed_up)}"
        return f"too close to call: {rest}"
    ceiling = predicted.ceiling
    rest = f"with {name}, the fastest, {times(best.speed_up)}"
    if ceiling is not None and ceiling.high < LEAST_SPEED_UP:
        rest = f"even without any exchange {times(ceiling)}"
    return f"compression will not pay here: {rest}"


def break_evens(rows: Sequence[Row]) -> dict[str, float | None]:
    """For each exchange the factor from which on its steps are faster than dense ones.

    Between two rungs by the seconds as they change with the entries sent; that of the
    first rung, if it is faster already; None if no rung is.
    """
    rungs: dict[str, list[Row]] = {}
    for row in rows:
        if row.way.factor > 1:
            rungs.setdefault(row.way.exchange, []).append(row)
    return {name: _break_even(x) for name, x in rungs.items()}


def _break_even(rungs: Sequence[Row]) -> float | None:
    shares = [1 / x.way.factor for x in rungs]
    saved = [1 - 1 / x.speed_up.middle for x in rungs]
    first = next((i for i, x in enumerate(saved) if x > 0), None)
    if not first:
        return None if first is None else rungs[0].way.factor
    pair = slice(first - 1, first + 1)
    return 1 / float(np.interp(0.0, saved[pair], shares[pair]))


def _notes(measured: Measured, predicted: Predicted) -> list[str]:
    is_local = jax.process_count() == 1 and jax.devices()[0].platform == "cpu"
    said = {
        ADDED_UP: STEP not in measured.seconds,
        NO_COMPUTE: predicted.compute_seconds is None,
        NO_NETWORK: is_local,
    }
    return [*ALWAYS, *(note for note, is_so in said.items() if is_so)]
