"""A file with one line of JSON for each step."""

import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonlWriter:
    """Writes one line for each step: `{"step": 3, "seconds": 1.5, "loss": 0.25}`.

    `seconds` counts from the moment when the writer was opened. JSON has no infinity
    and no NaN: they are written as the strings "Infinity", "-Infinity" and "NaN".

    A run that resumes writes to the same file. When it writes step k first, the lines
    from step k on, which an earlier process wrote before it was killed, are removed.
    Every line is handed to the operating system at once, so that no line is lost when
    the process dies; `flush` waits for the disk.

    Args:
      path: The file; its folder is created if needed.

    Raises:
      ValueError: If the file exists and its first line is not a line of this writer.
      OSError: If the file cannot be written.

    Example:
      >>> import pathlib, tempfile
      >>> from gravac_jax import metrics
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
      >>> for steps in (range(4), range(2, 6)):  # killed after step 3, resumed at 2
      ...     with metrics.JsonlWriter(path) as writer:
      ...         for step in steps:
      ...             writer.write(step, {"loss": 1 / (step + 1)})
      >>> [int(line["step"]) for line in metrics.read_jsonl(path)]
      [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            next(_lines(self.path), None)  # refuses a file of something else
        self._file = self.path.open("ab")
        self._opened = time.perf_counter()
        self._has_written = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the line of a step.

        Args:
          step: Number of the step.
          scalars: Figures of the step, by name.

        Raises:
          ValueError: If a figure is named `step` or `seconds`.
          OSError: If the line cannot be written, for example because the disk is full.
        """
        if taken := {"step", "seconds"} & scalars.keys():
            raise ValueError(
                f"a figure cannot be named {taken.pop()!r}, which JsonlWriter writes"
                " itself: choose another name, such as 'step_seconds'."
            )
        if not self._has_written:
            self._remove_from(step)
        line: dict[str, Any] = {"step": int(step)}
        line["seconds"] = time.perf_counter() - self._opened
        for name, value in scalars.items():
            x = float(value)
            line[name] = x if math.isfinite(x) else json.dumps(x)
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def flush(self) -> None:
        """Wait until all lines are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _remove_from(self, step: int) -> None:
        """Remove the lines from a step on, and a last line that was cut off."""
        is_before = lambda text_and_line: text_and_line[1]["step"] < step
        kept = itertools.takewhile(is_before, _lines(self.path))
        self._file.truncate(sum(len(text) for text, _ in kept))
        self._has_written = True


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Read a file of `JsonlWriter`, also while it is being written.

    Args:
      path: The file.

    Returns:
      One dictionary for each line: `step`, `seconds` and the figures. A last line that
      was cut off is left out, with a warning.

    Raises:
      ValueError: If a line is not a line of `JsonlWriter`; the message says which.
      OSError: If the file cannot be read.

    Example:
      See `metrics.JsonlWriter`.
    """
    return [line for _, line in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    """Yield every whole line, as bytes and parsed."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                warnings.warn(
                    f"{path}: the last line was cut off and is left out", stacklevel=3
                )
                return
            try:
                line = {name: float(x) for name, x in json.loads(text).items()}
                if not {"step", "seconds"} <= line.keys():
                    raise ValueError
            except (ValueError, TypeError, AttributeError):
                raise ValueError(
                    f"{path}, line {number}, is not a line of metrics.JsonlWriter:"
                    f" {text[:60]!r}. Give another file, or remove the line."
                ) from None
            yield text, line
