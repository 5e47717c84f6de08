"""Measures how long training steps take, without making the host wait for them."""

import collections
import concurrent.futures
import functools
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from gravac_jax import _refuse

AHEAD = 4  # steps that the host may be ahead of the devices; later times are of no use


class _Step(NamedTuple):
    number: int
    begin: float
    is_compiled: bool
    end: concurrent.futures.Future[float]


class StepClock:
    """Measures step times for `gravac.transform` without blocking the host.

    The host dispatches steps ahead of the devices, as it does without a clock. A
    thread waits for what each step returns. The time of a step runs from the end of the
    step before it, or from its own beginning if that came later. So a pause between
    steps does not count, such as an evaluation whose result the host waits for. A step
    that compiles has no time.

    The clock keeps the host from running more than four steps ahead. That is enough to
    keep the devices busy. Older times would be of no use: `gravac.transform` ignores a
    time that is more than eight steps old.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> step = jax.jit(lambda x, step_seconds, steps_ago: (x + 1, x.sum()))
      >>> clock, x = gravac.StepClock(), jnp.zeros(2)
      >>> for _ in range(8):
      ...     x, loss = step(x, **clock.times())
      ...     clock.record(loss)
      >>> clock.wait()
      >>> bool(clock.times()["step_seconds"] > 0)
      True
    """

    def __init__(self) -> None:
        self._number = 0  # of the step that comes next
        self._begin, self._compilations = time.perf_counter(), len(_compilations())
        self._done_at = 0.0  # the end of the last step that is known to be done
        self._running: collections.deque[_Step] = collections.deque()
        # Its thread ends with the clock. The interpreter waits for it before it exits.
        self._waiting = concurrent.futures.ThreadPoolExecutor(1)

    def times(self) -> dict[str, Any]:
        """Return the arguments for the step that begins now.

        Returns:
          `step_seconds`, float32, the time of the newest step that is done, or 0 if no
          step has finished since the last call. `steps_ago`, int32, which step that
          was: 1 is the one before the step that begins.
        """
        ago, seconds = 1, 0.0  # of NaN, jax.debug_nans would complain
        while self._running and (
            len(self._running) >= AHEAD or self._running[0].end.done()
        ):
            step = self._running.popleft()
            if error := step.end.exception():
                _refuse.warn(
                    f"the time of step {step.number} is unknown: {error}. Give"
                    " gravac.StepClock what no other step donates, such as its loss."
                )
                continue
            begin, self._done_at = max(self._done_at, step.begin), step.end.result()
            if not step.is_compiled:
                ago, seconds = self._number - step.number, self._done_at - begin
        self._begin, self._compilations = time.perf_counter(), len(_compilations())
        return {"step_seconds": np.float32(seconds), "steps_ago": np.int32(ago)}

    def record(self, output: Any) -> None:
        """Record that the step was dispatched.

        Args:
          output: Arrays that the step returns and that no other step donates, such as
            its loss.

        Raises:
          ValueError: If `output` has no arrays.
        """
        if not jax.tree.leaves(output):
            raise ValueError(f"nothing to wait for in {output!r}: give the loss.")
        is_compiled = len(_compilations()) > self._compilations
        end = self._waiting.submit(_end_of, output)
        self._running.append(_Step(self._number, self._begin, is_compiled, end))
        self._number += 1

    def wait(self) -> None:
        """Wait until all recorded steps are done."""
        concurrent.futures.wait([step.end for step in self._running])


def _end_of(output: Any) -> float:
    """Wait for `output` and return the time."""
    jax.block_until_ready(output)
    return time.perf_counter()


@functools.cache
def _compilations() -> list[str]:
    """Return a list that grows whenever this process compiles."""
    events: list[str] = []

    def listener(event: str, *_: Any, **__: Any) -> None:
        if "compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    return events
