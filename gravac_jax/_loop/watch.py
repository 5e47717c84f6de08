"""Warn on the host when replicas part, without making a step wait.

A count that the transform keeps on the devices shows it. Each step returns a copy,
because the state is donated. The host reads it in a later step, when it is there.
"""

import math
import warnings
from typing import Any

from jax import core


class Watch:
    """Looks, in every step, at how often replicas have disagreed, and warns once."""

    def __init__(self) -> None:
        self._calls = 0
        self._given: tuple[int, list[Any]] = 0, []  # at which call, and the counts
        # Of a restored state, whose replicas were mended since.
        self._before = -1.0

    def see(self, counts: list[Any]) -> None:
        """Take the counts after a step, and look at earlier ones if they are there."""
        if any(isinstance(x, core.Tracer) for x in counts):
            return
        self._calls += 1
        call, earlier = self._given
        if not all(x.is_ready() for x in earlier):
            return
        self._given = self._calls, counts
        now = sum(int(x.addressable_data(0)) for x in earlier)
        if call and self._before < 0:
            self._before = now
        elif call and now > self._before:
            self._before = math.inf
            warnings.warn(
                f"replicas hold different params, seen in step {call:,} of this run:"
                f" skip or scale steps by what all agree on, as gravac.guard does;"
                f" gravac.resync makes the params the same again.",
                stacklevel=3,
            )
