"""How long steps take, measured without waiting for them."""

import collections
import queue
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

AHEAD = 4  # steps that the host may be ahead of the devices; a late time is of no use

_compilations = [0]  # in this process, since the first clock


class _Step(NamedTuple):
    number: int
    begin: float
    output: Any
    is_compiled: bool


class StepClock:
    """Gives `step_seconds` and `measured_step` of steps that are done.

    Steps are dispatched ahead of the devices as without it. A thread waits for what
    each one returned. A step's time runs from the end of the step before it, or from
    its own beginning if that was later: so pauses between steps, for an evaluation
    whose result is waited for, do not count. Steps that compile have no time.

    The host is kept from running more than four steps ahead, which leaves the devices
    busy, and times of use: `gravac.transform` takes none of more than eight steps ago.

    Args:
      steps: taken before, as the optimizer's state has them; 0 for a new run.

    Raises:
      ValueError: if `steps` is negative.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> train_step = jax.jit(lambda params, step_seconds, measured_step: params + 1)
      >>> clock, params = gravac.StepClock(), jnp.zeros(2)
      >>> for _ in range(8):
      ...     params = train_step(params, **clock.times())
      ...     clock.record(params)
      >>> clock.wait()
      >>> bool(clock.times()["step_seconds"] > 0)
      True
    """

    def __init__(self, steps: int = 0):
        if steps < 0:
            raise ValueError(f"steps must be 0 or more, got {steps}")
        _count_compilations()
        self._number = steps
        self._begin, self._compiled = 0.0, 0
        self._pending: queue.SimpleQueue[_Step] = queue.SimpleQueue()
        self._done: collections.deque[tuple[int, float]] = collections.deque()
        self._finished = threading.Condition()
        self._last = steps  # all before it are done
        self._end = 0.0
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()

    def times(self) -> dict[str, Any]:
        """What to hand to the step that begins now.

        Returns:
          `step_seconds`, float32, NaN if no step was finished since the last call; and
          `measured_step`, int32, the one that took them.
        """
        self._await(self._number - AHEAD + 1)
        with self._finished:
            number, seconds = self._number - 1, np.nan
            while self._done:
                number, seconds = self._done.popleft()
        self._begin, self._compiled = time.perf_counter(), _compilations[0]
        return {
            "step_seconds": np.float32(seconds),
            "measured_step": np.int32(number),
        }

    def record(self, output: Any) -> None:
        """Say what the step returned.

        Args:
          output: arrays that are there when the step is done, and that nobody donates:
            its loss, say.
        """
        is_compiled = _compilations[0] > self._compiled
        step = _Step(self._number, self._begin, output, is_compiled)
        self._number += 1
        self._pending.put(step)

    def wait(self) -> None:
        """Return when all steps that were recorded are done."""
        self._await(self._number)

    def _await(self, number: int) -> None:
        with self._finished:
            self._finished.wait_for(lambda: self._last >= number)

    def _watch(self) -> None:
        while True:
            step = self._pending.get()
            seconds = self._time(step)
            with self._finished:
                if seconds is not None:
                    self._done.append((step.number, seconds))
                self._last = step.number + 1
                self._finished.notify_all()
            del step  # what it returned is not kept alive

    def _time(self, step: _Step) -> float | None:
        try:
            jax.block_until_ready(step.output)
            is_there = True
        except Exception:
            is_there = False
        before, self._end = self._end, time.perf_counter()
        if step.is_compiled or not is_there:
            return None
        return self._end - max(before, step.begin)


def _count_compilations() -> None:
    if _compilations[0]:
        return
    _compilations[0] = 1

    def listener(event: str, duration_secs: float, **more: Any) -> None:
        del duration_secs, more
        _compilations[0] += "compile" in event

    jax.monitoring.register_event_duration_secs_listener(listener)
