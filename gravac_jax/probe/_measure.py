"""Times steps and the network, and compares compressed steps with dense ones."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gravac_jax as gravac
from gravac_jax.probe import _steps, _timing
from gravac_jax.probe._results import Range, Results, Row
from gravac_jax.probe._steps import DENSE

# What is timed beside the steps.
LAUNCH, NO_EXCHANGE = "launch", "no exchange"
SMALL_ALL_REDUCE, LARGE_ALL_REDUCE = "small all-reduce", "large all-reduce"


def measure(
    mesh: jax.sharding.Mesh,
    model: _steps.Model,
    exchanges: Sequence[str],
    factors: tuple[float, ...],
    budget_seconds: float,
) -> Results:
    """Compile all steps, time them, and compare them with dense ones.

    Args:
      mesh: The mesh to train on. Steps compress over its first axis.
      model: The model to train.
      exchanges: Names from `_steps.EXCHANGES`. Without any, only dense steps and steps
        without an exchange are timed.
      factors: The compression factors, each above 1, rising; () for the usual ones
        of each exchange.
      budget_seconds: How long to time. Compiling comes on top.

    Returns:
      The results, the same on all processes.
    """
    trainer = _steps.Trainer(mesh, model)
    steps = {(DENSE, 1.0): trainer.dense()}
    for name in exchanges:
        for step in trainer.compressed(name, factors):
            # Every exchange has the same dense rung: the first one stands for all.
            steps.setdefault((step.exchange, step.factor), step)
    axis, *_ = mesh.axis_names
    mean = lambda x: jax.lax.pmean(x, axis)
    runs = {
        LAUNCH: _program(mesh, lambda x: x + 1, entries=1),
        SMALL_ALL_REDUCE: _program(mesh, mean, entries=1),
        LARGE_ALL_REDUCE: _program(mesh, mean, trainer.entries),
        NO_EXCHANGE: trainer.without_exchange(),
        **{key: step.run for key, step in steps.items()},
    }
    meet = _program(mesh, lambda x: jax.lax.pmean(x, mesh.axis_names), entries=1)
    seconds = _timing.in_rounds(runs, meet, budget_seconds)
    rows = compare(seconds, steps.values())
    wire = network(seconds, steps.values(), trainer.entries, mesh.shape[axis])
    headroom = None
    if model.has_compute:
        wire["compute_seconds"] = float(np.median(seconds[NO_EXCHANGE]))
        headroom = median_range(seconds[DENSE, 1] / seconds[NO_EXCHANGE])
    return Results(
        devices=f"{mesh.size} {mesh.devices.flat[0].platform}",
        processes=jax.process_count(),
        params=trainer.entries,
        axis=axis,
        replicas=mesh.shape[axis],
        rounds=len(seconds[LAUNCH]),
        wire=wire,
        headroom=headroom,
        rows=rows,
    )


def compare(
    seconds: Mapping[Any, np.ndarray], steps: Iterable[_steps.Step]
) -> list[Row]:
    """Compare the `[rounds]` seconds of each step with those of dense steps."""
    rows: list[Row] = []
    for x in steps:
        times = seconds[x.exchange, x.factor]
        ranges = median_range(times), median_range(seconds[DENSE, 1] / times)
        rows.append(Row(x.exchange, x.factor, x.wire_bytes, *ranges))
    return rows


def median_range(samples: np.ndarray) -> Range:
    """Return the median of `[n]` samples and its 90% confidence interval.

    Each sample lies below the true median with probability 1/2, so the number of
    samples below it is binomial, whatever their distribution. The interval lies between
    two of the sorted samples; for five samples these are the smallest and the largest.

    Example:
      >>> print(median_range(np.array([3.0, 1.0, 2.0, 5.0, 4.0])))
      3.00 (1.00 to 5.00)
    """
    n = len(samples)
    tails = np.cumsum([math.comb(n, i) for i in range(n)]) / 2**n
    cut = max(0, int(np.sum(tails <= 0.05)) - 1)
    ordered = np.sort(samples)
    low, middle, high = ordered[cut], np.median(samples), ordered[n - 1 - cut]
    return Range(float(low), float(middle), float(high))


def network(
    seconds: Mapping[Any, np.ndarray],
    steps: Iterable[_steps.Step],
    entries: int,
    replicas: int,
) -> dict[str, float]:
    """Return latency, bandwidth and selection as arguments of `gravac.WireCost`.

    Args:
      seconds: `[rounds]` seconds of the steps, and of what is timed beside them.
      steps: The steps. Without a compressed one, selection is left out.
      entries: The number of entries in the large all-reduce.
      replicas: N, the number of replicas.
    """
    median = lambda what: float(np.median(seconds[what]))
    wait = max(0.0, median(SMALL_ALL_REDUCE) - median(LAUNCH))
    transfer = median(LARGE_ALL_REDUCE) - median(SMALL_ALL_REDUCE)
    traffic = gravac.DenseMean().traffic(entries, 1, replicas)
    byte_seconds = max(transfer / traffic.wire_bytes, 1e-15)
    latency = wait / traffic.messages
    exchange = lambda x: x.messages * latency + x.wire_bytes * byte_seconds
    selection = [
        median((x.exchange, x.factor)) - median(NO_EXCHANGE) - exchange(x)
        for x in steps
        if x.factor > 1
    ]
    wire = {"bytes_per_second": 1 / byte_seconds, "latency_seconds": latency}
    if selection:
        wire["selection_seconds"] = max(0.0, float(np.median(selection)))
    return wire


def _program(
    mesh: jax.sharding.Mesh, function: Callable[[jax.Array], jax.Array], entries: int
) -> Callable[[], Any]:
    """Return a program that every device runs on its own `[entries]` float32."""
    x = jnp.ones(entries, jnp.float32, device=jax.NamedSharding(mesh, jax.P()))
    specs: dict[str, Any] = {"in_specs": jax.P(), "out_specs": jax.P()}
    mapped = jax.shard_map(function, mesh=mesh, check_vma=False, **specs)
    return functools.partial(jax.jit(mapped), x)
