"""Tiny data sets in the official formats, made up."""

from pathlib import Path

import numpy as np

WORDS = ["the", "cat", "sat", "on", "<unk>", "mat", "and", "slept", "there", "all", "N"]
PLANES = 3 * 32 * 32


def write_ptb(folder: Path, words: int = 2000, seed: int = 0) -> Path:
    """The three files of the Penn Treebank, in sentences of five words."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for part in ("train", "valid", "test"):
        drawn = rng.choice(WORDS, (words // 5, 5))
        lines = [f" {' '.join(sentence)} \n" for sentence in drawn]
        (folder / f"ptb.{part}.txt").write_text("".join(lines))
    return folder


def records(count: int, labels: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """`[count, len(labels) + 3072]` uint8: labels below each of `labels`, pixels."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, bound, (count, 1)) for bound in labels]
    pixels = rng.integers(0, 256, (count, PLANES))
    return np.concatenate([*heads, pixels], axis=1).astype(np.uint8)


def write_cifar10(folder: Path, count: int = 8) -> Path:
    """The six files of CIFAR-10, `count` records each."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(1, 6):
        (folder / f"data_batch_{i}.bin").write_bytes(records(count, (10,), i).tobytes())
    (folder / "test_batch.bin").write_bytes(records(count, (10,)).tobytes())
    return folder


def write_cifar100(folder: Path, count: int = 40) -> Path:
    """The two files of CIFAR-100, `count` records each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.bin").write_bytes(records(count, (20, 100), 1).tobytes())
    (folder / "test.bin").write_bytes(records(count, (20, 100)).tobytes())
    return folder


def write_all(folder: Path) -> Path:
    """Every data set in a folder of its own below this one, and a text of bytes."""
    write_ptb(folder / "ptb")
    write_cifar10(folder / "cifar-10-batches-bin")
    write_cifar100(folder / "cifar-100-binary", 80)
    (folder / "input.txt").write_bytes(b"the quick brown fox jumps over. " * 400)
    return folder
