"""Warn on the host when replicas part, without making a step wait.

A count that the transform keeps on the devices shows it. Each step returns a copy,
because the state is donated. The host reads it in a later step, when it is there.
"""

import math
from typing import Any

from jax import core

from gravac_jax import _refuse


class Watch:
    """Looks, in every step, at how often replicas have disagreed, and warns once."""

    def __init__(self) -> None:
        self._given: list[Any] = []
        # The count of the first state seen: that of a checkpoint may have been mended.
        self._before = -1.0

    def see(self, counts: list[Any]) -> None:
        """Take the counts after a step, and look at earlier ones if they are there."""
        if any(isinstance(x, core.Tracer) for x in counts):
            return
        earlier = self._given
        if not all(x.is_ready() for x in earlier):
            return
        self._given = counts
        now = sum(int(x.addressable_data(0)) for x in earlier)
        if earlier and self._before < 0:
            self._before = now
        elif earlier and now > self._before:
            self._before = math.inf
            _refuse.warn(
                "replicas hold different params: skip or scale steps by what all agree"
                " on, as gravac.guard does; gravac.resync makes the params the same."
            )
