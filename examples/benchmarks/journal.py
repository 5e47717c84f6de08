"""A JSONL file that long runs append to, and that says what it is a record of.

The first line describes what all others share: the configuration, the versions, the
machine. Nothing in the file depends on the time it was written at, so that the same
command writes the same bytes again.
"""

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]

PARTS = ("configuration", "versions", "machine")  # of the first line
PACKAGES = ("gravac-jax", "jax", "jaxlib", "optax", "flax", "grain", "numpy")


class Journal:
    """The lines of `path`; every change is written when the call returns."""

    def __init__(self, path: Path, configuration: Line):
        """Open the file, or begin it.

        Raises:
          SystemExit: if the file is of another configuration; it names the difference.
        """
        self.path = path
        head = {"configuration": configuration, **surroundings()}
        # Through JSON and back: tuples become lists there.
        head = json.loads(json.dumps(head))
        if path.exists() and path.stat().st_size:
            found, lines = read(path)
            _check_same(path, found, head)
        else:
            lines = []
            path.parent.mkdir(parents=True, exist_ok=True)
        self.head = head
        self._write(lines)  # without a last line that was cut off

    def append(self, line: Line) -> None:
        """Add one line."""
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def drop(self, is_stale: Callable[[Line], bool]) -> None:
        """Remove the lines of which `is_stale`, in one atomic replacement."""
        self._write([line for line in self.lines if not is_stale(line)])

    def _write(self, lines: list[Line]) -> None:
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text("".join(json.dumps(x) + "\n" for x in [self.head, *lines]))
        beside.replace(self.path)
        self.lines = lines


def read(path: Path) -> tuple[Line, list[Line]]:
    """The first line and the others; a last line that was cut off is left out.

    Raises:
      SystemExit: if the file is missing or no journal.
    """
    try:
        texts = path.read_text().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    try:
        head, *lines = [json.loads(x) for x in texts if x.endswith("\n")]
        [head[part] for part in PARTS]
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"{path} is no record of this program") from None
    return head, lines


def quartiles(figures: Any, digits: int = 6) -> list[float]:
    """The first, the median and the third, rounded."""
    found = np.quantile(figures, (0.25, 0.5, 0.75))
    return [round(float(x), digits) for x in found]


def surroundings() -> Line:
    """Versions and machine."""
    lines = Path("/proc/cpuinfo")
    text = lines.read_text().splitlines() if lines.exists() else []
    names = {x.split(":")[1].strip() for x in text if x.startswith("model name")}
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "machine": f"{os.cpu_count()} cores, {', '.join(names) or platform.machine()}",
    }


def _check_same(path: Path, found: Line, wanted: Line) -> None:
    for part in PARTS:
        for key in _keys(found[part]) | _keys(wanted[part]):
            old, new = _get(found[part], key), _get(wanted[part], key)
            if old != new:
                raise SystemExit(
                    f"{path} holds runs with {part} {key} {old!r}, and this would be "
                    f"{new!r}: give another --out, or what it began with"
                )


def _keys(part: Any) -> set[str]:
    return set(part) if isinstance(part, dict) else {""}


def _get(part: Any, key: str) -> Any:
    return part.get(key) if isinstance(part, dict) else part
