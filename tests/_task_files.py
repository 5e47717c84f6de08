"""Tiny data sets in the official formats, made up."""

from pathlib import Path

import numpy as np
from tasks.cifar import CIFAR10, CIFAR100

WORDS = ["the", "cat", "sat", "on", "<unk>", "mat", "and", "slept", "there", "all", "N"]
TEXT = b"the quick brown fox jumps over. " * 400


def records(count: int, labels: tuple[int, ...], seed: int) -> np.ndarray:
    """Return `[count, len(labels) + 3072]` uint8: labels below `labels`, pixels."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, bound, (count, 1)) for bound in labels]
    pixels = rng.integers(0, 256, (count, 3 * 32 * 32))
    return np.concatenate([*heads, pixels], axis=1).astype(np.uint8)


def write_all(folder: Path) -> Path:
    """Write every data set in a folder of its own below this one, and a text."""
    rng, files = np.random.default_rng(0), {"input.txt": TEXT}
    for part in ("train", "valid", "test"):
        lines = [f" {' '.join(x)} \n" for x in rng.choice(WORDS, (400, 5))]
        files[f"ptb/ptb.{part}.txt"] = "".join(lines).encode()
    for layout, count in ((CIFAR10, 8), (CIFAR100, 80)):
        for i, name in enumerate((*layout.train, layout.test), 1):
            content = records(count, layout.labels, i).tobytes()
            files[f"{layout.folder}/{name}"] = content
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
