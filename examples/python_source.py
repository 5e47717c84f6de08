"""The text that small examples learn from, and batches of it."""

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np


@functools.cache
def read_text(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return training bytes and held-out bytes, a tenth.

    Args:
      path: Any text file, whose end is held out. None for the source code of the
        running Python's standard library, whose files are shuffled before the split.

    Raises:
      SystemExit: If the file is too small.
    """
    if path is not None:
        text = np.frombuffer(path.read_bytes(), np.uint8)
        if len(text) < 10_000:
            raise SystemExit(f"{path} holds {len(text)} bytes; give at least 10,000")
        cut = len(text) * 9 // 10
        return text[:cut], text[cut:]
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    np.random.default_rng(0).shuffle(files)
    cut = len(files) * 9 // 10
    train, held_out = [
        np.frombuffer(b"".join(p.read_bytes() for p in part), np.uint8)
        for part in (files[:cut], files[cut:])
    ]
    return train, held_out


def draw(text: np.ndarray, rows: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yield batches `[rows, length + 1]` int32 from random places, without an end."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length, rows)
        yield text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
