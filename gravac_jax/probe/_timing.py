"""Times programs in turns, so that whatever else the machine does slows all alike."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

MIN_ROUNDS = 5  # the fewest samples that give a 90% confidence interval
WARM_UP_CALLS = 2  # the first call compiles, and sometimes the second

Run = Callable[[], Any]


def in_rounds(
    runs: Mapping[Any, Run], meet: Run, budget_seconds: float
) -> dict[Any, np.ndarray]:
    """Time every program once a round until the budget is spent.

    Each round starts with another program. A time is that of the slowest process.

    Args:
      runs: The programs, by any keys. Each returns arrays that are ready when it is
        done.
      meet: A short collective, after which all processes start a program together.
      budget_seconds: The time for all rounds together. At least five rounds run.

    Returns:
      `[rounds]` float32 seconds of each program, by key, the same on all processes.
    """
    for run in runs.values():
        for _ in range(WARM_UP_CALLS):
            jax.block_until_ready(run())
    keys, rounds, spent_seconds = list(runs), [], 0.0
    # All processes see the same times, and so stop after the same round.
    while len(rounds) < MIN_ROUNDS or spent_seconds < budget_seconds:
        first = len(rounds) % len(keys)
        start = time.perf_counter()
        taken = {x: _seconds(runs[x], meet) for x in keys[first:] + keys[:first]}
        own = [*(taken[x] for x in keys), time.perf_counter() - start]
        # A process alone gets back its own row.
        everyone = multihost_utils.process_allgather(np.array(own, np.float32))
        slowest = np.atleast_2d(everyone).max(0)
        rounds.append(slowest[:-1])
        spent_seconds += slowest[-1]
    return dict(zip(keys, np.array(rounds).T, strict=True))


def _seconds(run: Run, meet: Run) -> float:
    jax.block_until_ready(run())  # in training a step follows one like it
    jax.block_until_ready(meet())
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
