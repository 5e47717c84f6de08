"""A JSONL file that long runs append to, and that says what it is a record of.

The first line describes what all others share: the configuration, the versions, the
machine. Nothing in the file depends on the time at which it was written, so the same
command writes the same bytes again.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

Line = dict[str, Any]

PARTS = ("configuration", "versions", "machine")  # of the first line
PACKAGES = ("gravac-jax", "jax", "jaxlib", "optax", "flax", "grain", "numpy")
PATHS = ("data_dir", "out")  # which no measurement depends on


class Journal:
    """The lines of a record. Every change is written before the call returns.

    Args:
      path: The JSONL file; it is begun if it does not exist.
      configuration: What every line of the record depends on.

    Raises:
      SystemExit: If the file has another configuration; the message names the
        difference.

    Attributes:
      lines: All lines but the first one.
    """

    def __init__(self, path: Path, configuration: Line):
        self.path = path
        head = {"configuration": configuration, **_surroundings()}
        head = json.loads(json.dumps(head))  # tuples become lists in JSON
        lines: list[Line] = []
        if path.exists() and path.stat().st_size:
            found, lines = read(path)
            _check_same(path, found, head)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._head = head
        self._write(lines)  # without a last line that was cut off

    def append(self, *lines: Line) -> None:
        """Add lines at the end."""
        self.lines += lines
        write(self.path, *lines)

    def find(self, **key: Any) -> list[Line]:
        """Return the lines that have all these values."""
        return [line for line in self.lines if key.items() <= line.items()]

    def once(self, make: Callable[[], Line], **key: Any) -> Line:
        """Return the line with this key; if there is none, make and append it."""
        if not (found := self.find(**key)):
            self.append({**key, **make()})
            found = self.lines[-1:]
        return found[0]

    def drop(self, is_stale: Callable[[Line], bool]) -> None:
        """Remove lines for which `is_stale` is true, in one atomic replacement."""
        self._write([line for line in self.lines if not is_stale(line)])

    def _write(self, lines: list[Line]) -> None:
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text("")
        write(beside, self._head, *lines)
        beside.replace(self.path)
        self.lines = lines


def write(path: Path, *lines: Line) -> None:
    """Append lines to a file, as JSON."""
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def read(path: Path) -> tuple[Line, list[Line]]:
    """Return the first line and the others, without a last line that was cut off.

    Raises:
      SystemExit: If the file is missing or no record.
    """
    try:
        texts = path.read_text().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    try:
        head, *lines = [json.loads(x) for x in texts if x.endswith("\n")]
        [head[part] for part in PARTS]
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"{path} is no record of a benchmark") from None
    return head, lines


def configuration(args: Any, *left_out: str) -> Line:
    """Return the fields of a dataclass that every line of its record depends on.

    Args:
      args: The command line's dataclass.
      left_out: Fields that say only which lines are made, beside the usual paths.
    """
    fields = dataclasses.asdict(args)
    return {k: x for k, x in fields.items() if k not in (*PATHS, *left_out)}


def _surroundings() -> Line:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
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
        old, new = (x[part] for x in (found, wanted))
        if not isinstance(old, dict):
            old, new = {"": old}, {"": new}
        for key in old.keys() | new.keys():
            if old.get(key) != new.get(key):
                raise SystemExit(
                    f"{path} holds runs with {part} {key} {old.get(key)!r}, and this "
                    f"would be {new.get(key)!r}: give another --out, or what it began "
                    "with"
                )
