"""A view of a run in the terminal, or lines where there is none."""

import collections
import datetime
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gravac_jax import _checks

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WINDOW = 20  # steps that loss and seconds are means of; arbitrary
_REFRESH_HZ = 2  # a frame takes milliseconds of a core that may have steps to do


class LiveView:
    """Shows where a run is: loss, factor, gain, bytes against dense, time left.

    In a terminal it is a table of 80 columns that changes in place. Elsewhere a line is
    printed every so often. What is not among the figures is left out. Loss and seconds
    are means of 20 steps; seconds those of `step_seconds`, or from write to write.

    Args:
      total_steps: of the run.
      title: its name.
      console: a `rich.console.Console`; default: standard output.
      transient: whether the table goes away at the end.
      every_seconds: between two lines, where there is no terminal.

    Raises:
      ImportError: if rich is not there.
      ValueError: if `total_steps` is no positive number.

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
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise ImportError(
                f"metrics.LiveView needs {error.name}: pip install 'gravac_jax[tools]'"
            ) from error
        _checks.count(total_steps, "total_steps", "the steps of the run")
        self.total_steps = total_steps
        self.title = title
        self.every_seconds = every_seconds
        self._console = console or Console()
        self._scalars: Mapping[str, float] = {}
        self._steps = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._seconds: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._written = math.nan  # when
        self._bytes = {"wire": 0.0, "dense_wire": 0.0}  # so far
        self._printed = -math.inf
        self._live = Live(
            console=self._console,
            get_renderable=self.frame,
            refresh_per_second=_REFRESH_HZ,
            transient=transient,
        )
        if self._console.is_terminal:
            self._live.start()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the figures of a step."""
        now, steps = time.perf_counter(), step + 1 - self._steps
        taken = scalars.get("step_seconds", math.nan)
        if math.isnan(taken):
            taken = (now - self._written) / max(1, steps)
        self._scalars, self._steps, self._written = scalars, step + 1, now
        self._losses.append(float(scalars.get("loss", math.nan)))
        self._seconds.append(taken)
        for name in self._bytes:
            self._bytes[name] += scalars.get(f"gravac/{name}_bytes", 0.0)
        if not self._console.is_terminal:
            is_last = self._steps == self.total_steps
            if is_last or now - self._printed >= self.every_seconds:
                self._printed = now
                self._console.print(self.line(), highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """Show the newest figures now."""
        if self._live.is_started:
            self._live.refresh()

    def close(self) -> None:
        """Leave the last table where it is, or remove it."""
        self._live.stop()

    def line(self) -> str:
        """The figures in a line."""
        cells = self._cells()
        title = [self.title] if self.title else []
        place = f"step {cells.pop('step').replace('/', 'of')}"
        figures = [f"{name} {x}" for name, x in cells.items()]
        return ", ".join([*title, place, *figures, *self._alarms()])

    def frame(self) -> "RenderableType":
        """The table as it is now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        cells = {"run": self.title} | self._cells() if self.title else self._cells()
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in cells:
            side = "left" if name == "run" else "right"
            table.add_column(name, justify=side, no_wrap=True)
        table.add_row(*cells.values())
        course = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=self.total_steps, completed=self._steps, width=50)
        course.add_row(bar, self._left())
        return Group(table, course, *self._alarms())

    def _cells(self) -> dict[str, str]:
        """What there is to show, by name."""
        from rich.filesize import decimal

        given = lambda name: self._scalars.get(f"gravac/{name}", math.nan)
        cells = {
            "step": f"{self._steps} / {self.total_steps}",
            "loss": self._loss(),
            "factor": _text(given("factor"), ".0f"),
            "gain": _text(given("gain"), ".2f"),
        }
        if self._bytes["dense_wire"]:
            cells["sent"] = decimal(int(self._bytes["wire"]))
            cells["dense"] = decimal(int(self._bytes["dense_wire"]))
        cells["ms/step"] = _text(1e3 * _mean(self._seconds), ".0f")
        return {name: x for name, x in cells.items() if x}

    def _loss(self) -> str:
        newest = self._scalars.get("loss")
        if newest is not None and not math.isfinite(newest):
            return str(newest)  # the mean of those before would hide it
        return _text(_mean(self._losses), ".4f")

    def _left(self) -> str:
        """How long it will take yet."""
        seconds = _mean(self._seconds) * max(0, self.total_steps - self._steps)
        if math.isnan(seconds):
            return ""
        return f"{datetime.timedelta(seconds=round(seconds))} left"

    def _alarms(self) -> list[str]:
        """What should not be overlooked."""
        sentences = {
            "skipped_steps": "{:.0f} steps skipped: some gradient was not finite",
            "disagreements": "replicas held other params {:.0f} times: gravac.resync",
        }
        found = [(self._scalars.get(f"gravac/{x}"), y) for x, y in sentences.items()]
        return [sentence.format(count) for count, sentence in found if count]


def _mean(figures: "collections.deque[float]") -> float:
    """The mean of those that are known."""
    # A copy, for the other thread may be adding one.
    known = [x for x in tuple(figures) if math.isfinite(x)]
    return math.fsum(known) / len(known) if known else math.nan


def _text(x: float, form: str) -> str:
    """A figure, or nothing where there is none."""
    return "" if math.isnan(x) else format(x, form)
