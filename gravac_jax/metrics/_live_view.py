"""A live view of a run in the terminal."""

import collections
import math
import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gravac_jax.metrics import _explain
from gravac_jax.metrics._scalars import taken

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_LOSSES = 20  # steps in the mean of the loss; arbitrary
_REFRESH_HZ = 2  # a frame takes milliseconds of a core that may have steps to run
_FIGURES = {"gravac/factor": "factor {:.0f}", "gravac/gain": "gain {:.2f}"}
_ALIKE = "gravac/alike_steps"
_ALARMS = {
    "gravac/bad_steps": "{:.0f} bad steps: a gradient was not finite",
    "gravac/disagreements": "replicas held other params {:.0f} times: gravac.resync",
    _ALIKE: "all replicas had the same gradient in {:.0f} steps",
}
_CHANCE = 0.01  # of steps may have different gradients of one norm


class LiveView:
    """Shows progress, loss, encoding, factor, gain, bytes and the time left.

    In a terminal a progress bar changes in place, with the figures below it. Elsewhere,
    such as in the log of a cluster, one line is printed every few seconds. The loss is
    the mean of the last 20 steps; the bytes are those of one replica since the view was
    opened, beside those of dense steps. Figures that are not written are not shown.

    If `metrics.Recorder` is given the transform's `send`, the encoding that was taken
    is named, and a line says whenever a controller changes its mind, and why.

    Args:
      total_steps: Number of steps of the run.
      title: Name of the run.
      console: A `rich.console.Console`; by default standard output.
      transient: Whether the view disappears when it is closed.
      every_seconds: Time between two lines outside of a terminal, in seconds.

    Raises:
      ImportError: If rich is not installed.

    Example:
      >>> from gravac_jax import metrics
      >>> view = metrics.LiveView(2, every_seconds=0)
      >>> view.write(0, {"loss": 2.5, "gravac/factor": 40, "gravac/gain": 0.5})
      step 1 of 2, loss 2.5000, factor 40, gain 0.50
      >>> view.close()
    """

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "",
        console: "Console | None" = None,
        transient: bool = False,
        every_seconds: float = 10.0,
    ) -> None:
        try:
            from rich import live, progress
            from rich.console import Console
        except ImportError as error:
            raise ImportError(
                f"metrics.LiveView needs {error.name}: pip install '.[tools]' in the"
                f" clone"
            ) from error
        self.title = title
        self.total_steps = total_steps
        self.every_seconds = every_seconds
        self._console = console or Console()
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[pace]}"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            expand=True,
        )
        self._task = self._progress.add_task(title, total=total_steps, pace="")
        self._losses: collections.deque[float] = collections.deque(maxlen=_LOSSES)
        self._sent = self._dense = 0.0  # bytes so far
        self._known: list[str] = []  # figures of the last step that sent
        self._printed_at = -math.inf
        self._choice: float | None = None
        self._live = live.Live(
            self._progress,
            console=self._console,
            refresh_per_second=_REFRESH_HZ,
            transient=transient,
        )
        if self._console.is_terminal:
            self._live.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the figures of a step."""
        from rich.console import Group

        self._explain(step, scalars)
        self._progress.update(self._task, completed=step + 1)
        if speed := self._progress.tasks[0].speed:  # steps per second
            self._progress.update(self._task, pace=f"{1e3 / speed:.0f} ms/step")
        figures, total = self._figures(scalars), self._total(scalars)
        by_chance = max(1, _CHANCE * step)
        is_loud = lambda key: scalars.get(key, 0) > by_chance * (key == _ALIKE)
        alarms = [x.format(scalars[k]) for k, x in _ALARMS.items() if is_loud(k)]
        self._live.update(Group(self._progress, "  ".join(figures), *total, *alarms))
        now, is_last = time.monotonic(), step + 1 == self.total_steps
        is_time = is_last or now - self._printed_at >= self.every_seconds
        if is_time and not self._console.is_terminal:
            self._printed_at = now
            pace = self._progress.tasks[0].fields["pace"]
            place = f"step {step + 1} of {self.total_steps}"
            words = [self.title, place, *figures, *total, pace, *alarms]
            line = ", ".join(filter(None, words))
            self._console.print(line, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """Show the newest figures now."""
        if self._live.is_started:
            self._live.refresh()

    def close(self) -> None:
        """Leave the last view in the terminal, or remove it if `transient`."""
        self._live.stop()

    def frame(self) -> "RenderableType":
        """Return what the terminal shows now."""
        return self._live.get_renderable()

    def _explain(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print why the controller chose, if it has chosen otherwise."""
        words, choice = _explain.in_words(scalars), scalars.get(_explain.HOME)
        if words and choice != self._choice:
            self._choice = choice
            line = f"step {step + 1}: {words}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _figures(self, scalars: Mapping[str, float]) -> list[str]:
        """Return the loss, and what the last step that sent anything has sent."""
        if math.isfinite(scalars.get("gravac/factor", math.nan)):
            figures = [
                x.format(scalars[k]) for k, x in _FIGURES.items() if k in scalars
            ]
            self._known = [*filter(None, [taken(scalars)]), *figures]
        if "loss" not in scalars:
            return self._known
        self._losses.append(scalars["loss"])
        return [f"loss {statistics.fmean(self._losses):.4f}", *self._known]

    def _total(self, scalars: Mapping[str, float]) -> list[str]:
        """Return the bytes so far."""
        from rich.filesize import decimal

        if "gravac/dense_wire_bytes" not in scalars:
            return []
        self._sent += scalars.get("gravac/wire_bytes", 0.0)
        self._dense += scalars["gravac/dense_wire_bytes"]
        sent, dense = decimal(int(self._sent)), decimal(int(self._dense))
        fewer = self._dense / max(self._sent, 1.0)
        return [f"sent {sent} (dense {dense}, {fewer:.1f}x)"]
