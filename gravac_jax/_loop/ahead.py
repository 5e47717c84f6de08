"""What the host knows of the next step, and which program it starts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax._state import Round, TransformState


class Kind(NamedTuple):
    """The kind of a step. Each kind has its own program; both fields are static.

    Attributes:
      is_due: whether it exchanges; None if all steps do.
      rung: the rung that it takes; None if the program has a branch for each.
    """

    is_due: bool | None = None
    rung: int | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether it tells the host what follows: some exchanges do, no local step."""
        return bool(self.is_due) or self.rung is not None


class Ahead:
    """Counts steps on the host, so that the host knows the kind of the next one.

    The rung and the round of a step are agreed on one exchange before the host asks.
    When it starts a step, it waits for the one before the last: the devices then still
    have the last one to do.

    Args:
      state: the transform's state before the first step.
      has_branches: whether each program has a branch for each rung.
    """

    def __init__(self, state: TransformState, has_branches: bool):
        self._has_rounds = isinstance(state.round, Round)
        self._has_branches = has_branches or state.ladder.size == 1
        self._local_steps = int(state.info.local_steps)
        rungs, lengths = _numbers(state.ahead), (1, 1)
        if self._has_rounds:
            lengths = (int(state.round.length), int(state.round.next_length))
        now, self._following = zip(rungs, lengths, strict=True)
        self._ready: Any = now

    def next(self) -> Kind:
        """Return the kind of the next step."""
        if self._has_branches and not self._has_rounds:
            return Kind()
        rung, length = self._ready = _numbers(self._ready)
        is_due = self._local_steps + 1 >= length if self._has_rounds else None
        is_known = not self._has_branches and is_due is not False
        return Kind(is_due, rung if is_known else None)

    def count(self, kind: Kind, metrics: list[Any]) -> list[Any]:
        """Count a step that was taken, and return its metrics without what is ahead."""
        if not kind.looks_ahead:
            self._local_steps += 1
            return metrics
        *metrics, following = metrics
        self._local_steps = 0
        self._ready, self._following = self._following, following
        return metrics


def what_follows(state: TransformState) -> jax.Array:
    """Return the rung and the round after the next ones, `[2]` int32."""
    length = state.round.next_length if state.round else jnp.int32(1)
    return jnp.stack([state.ahead[1], length])


def _numbers(x: Any) -> tuple[int, int]:
    """Return two numbers that all replicas have; a process reads its own copy."""
    own = x.addressable_data(0) if isinstance(x, jax.Array) else x
    first, second, *_ = map(int, np.ravel(own))  # simulated replicas each have both
    return first, second
