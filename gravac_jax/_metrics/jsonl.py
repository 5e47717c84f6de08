"""A file with a line of JSON for every step, whole whenever the run is killed."""

import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_OWN = ("step", "seconds")


class JsonlWriter:
    """Writes a line a step: `{"step": 3, "seconds": 1.5, "loss": 0.25}`.

    `seconds` are those since it was opened. What is no number in JSON is a string as in
    protobuf's JSON: "NaN", "Infinity", "-Infinity", which Python's `float` reads.

    A run that goes on writes to the same file. Its first line, at step k, takes the
    place of all from step k on that were written before it was killed; other lines
    stay. Every line is handed to the system whole, so that none is lost when the
    process dies; `flush` waits for the disk.

    Args:
      path: the file; its folder is made if it is not there.

    Raises:
      ValueError: if the file is there and has lines of something else.
      OSError: if it cannot be written.

    Example:
      >>> import pathlib, tempfile
      >>> from gravac_jax import metrics
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
      >>> for steps in (range(4), range(2, 6)):  # killed after 3, begun again from 2
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
            next(_lines(self.path), None)  # tells whose file it is
        self._file = self.path.open("ab")
        self._opened = time.perf_counter()
        self._has_written = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a line.

        Args:
          step: its number.
          scalars: its figures, by name.

        Raises:
          ValueError: if a figure is called `step` or `seconds`.
          OSError: if it cannot be written, such as on a full disk.
        """
        if taken := [name for name in _OWN if name in scalars]:
            raise ValueError(
                f"a figure cannot be called {taken[0]!r}, which every line has of its "
                "own: choose another name, such as 'step_seconds'."
            )
        if not self._has_written:
            self._drop(step)
        line = {"step": int(step), "seconds": time.perf_counter() - self._opened}
        line |= {name: _strict(float(x)) for name, x in scalars.items()}
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def flush(self) -> None:
        """Wait until all lines are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _drop(self, step: int) -> None:
        """Drop the lines from a step on and one that was cut, in one replacement."""
        before = b"".join(x for x, line in _lines(self.path) if line["step"] < step)
        if len(before) < self.path.stat().st_size:
            beside = self.path.with_name(self.path.name + ".new")
            beside.write_bytes(before)
            self._file.close()
            beside.replace(self.path)
            self._file = self.path.open("ab")
        self._has_written = True


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """Read what `JsonlWriter` wrote; a last line that was cut off is left out.

    Args:
      path: the file.

    Returns:
      A line a step: `step`, `seconds` and the figures.

    Raises:
      ValueError: if a line is none of `JsonlWriter`; it says which.
      OSError: if the file cannot be read.

    Warns:
      UserWarning: if a line was left out.

    Example:
      See `metrics.JsonlWriter`.
    """
    path = Path(path)
    lines = [line for _, line in _lines(path)]
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        if file.read() not in (b"", b"\n"):
            warnings.warn(
                f"{path}: the last line was cut off and is left out", stacklevel=2
            )
    return lines


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    """Every whole line, as it is and as what it says."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                line = {x: float(value) for x, value in json.loads(text).items()}
                [line[name] for name in _OWN]
            except (ValueError, TypeError, AttributeError, KeyError):
                raise ValueError(
                    f"{path}, line {number}, is no line of metrics.JsonlWriter: "
                    f"{text[:60]!r}. Give another file, or remove the line."
                ) from None
            yield text, line


def _strict(x: float) -> float | str:
    """A number as strict JSON has it."""
    if math.isfinite(x):
        return x
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
