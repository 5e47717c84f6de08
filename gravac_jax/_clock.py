"""How long steps take, measured without waiting for them."""

import concurrent.futures
import threading
import time
import warnings
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


class _Finished:
    """What is known of steps that are done."""

    def __init__(self, steps: int):
        self.changed = threading.Condition()
        self.steps = steps  # all before it are done
        self.end = 0.0  # of the last of them
        self.newest: tuple[int, float] | None = None
        self.error: BaseException | None = None

    def wait_for(self, steps: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.steps >= steps)

    def take(self) -> tuple[tuple[int, float] | None, BaseException | None]:
        with self.changed:
            taken = self.newest, self.error
            self.newest = self.error = None
        return taken

    def watch(self, step: _Step) -> None:
        """Wait for a step, and note its time."""
        error = None
        try:
            jax.block_until_ready(step.output)
        except Exception as caught:
            error = caught
        now = time.perf_counter()
        with self.changed:
            if error is None and not step.is_compiled:
                self.newest = step.number, now - max(self.end, step.begin)
            self.end, self.error = now, error or self.error
            self.steps = step.number + 1
            self.changed.notify_all()


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
      >>> step = jax.jit(lambda x, step_seconds, measured_step: (x + 1, x.sum()))
      >>> clock, x = gravac.StepClock(), jnp.zeros(2)
      >>> for _ in range(8):
      ...     x, loss = step(x, **clock.times())
      ...     clock.record(loss)
      >>> clock.wait()
      >>> bool(clock.times()["step_seconds"] > 0)
      True
    """

    def __init__(self, steps: int = 0):
        if steps < 0:
            raise ValueError(
                f"steps must be 0 or more, got {steps}. They are those that the state "
                "of gravac.transform has counted: 0 in a new run."
            )
        _count_compilations()
        self._number = steps
        self._begin, self._compiled = 0.0, 0
        self._finished = _Finished(steps)
        # Ends with the clock, and the interpreter waits for it before it ends.
        self._watcher = concurrent.futures.ThreadPoolExecutor(1)

    def times(self) -> dict[str, Any]:
        """What to hand to the step that begins now.

        Returns:
          `step_seconds`, float32, of the newest step that is done, NaN if none was
          since the last call; and `measured_step`, int32, which one it was.
        """
        self._finished.wait_for(self._number - AHEAD + 1)
        newest, error = self._finished.take()
        if error is not None:
            warnings.warn(
                f"the time of a step is not known: {error}. Give gravac.StepClock what"
                " the step returns and nobody donates, such as its loss.",
                stacklevel=2,
            )
        number, seconds = newest or (self._number - 1, np.nan)
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

        Raises:
          ValueError: if there are none.
        """
        if not jax.tree.leaves(output):
            raise ValueError(
                f"there is nothing to wait for in {output!r}: give record what the step"
                " returns, such as its loss"
            )
        is_compiled = _compilations[0] > self._compiled
        step = _Step(self._number, self._begin, output, is_compiled)
        self._number += 1
        self._watcher.submit(self._finished.watch, step)

    def wait(self) -> None:
        """Return when all steps that were recorded are done."""
        self._finished.wait_for(self._number)


def _count_compilations() -> None:
    if _compilations[0]:
        return
    _compilations[0] = 1

    def listener(event: str, duration_secs: float, **more: Any) -> None:
        del duration_secs, more
        _compilations[0] += "compile" in event

    jax.monitoring.register_event_duration_secs_listener(listener)
