"""Readers of text: Penn Treebank by words, any file by bytes."""

import collections
from pathlib import Path

import numpy as np

from tasks.files import find
from tasks.task import DataError

PTB_FILES = ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")
HELD_OUT = 0.05  # of a file of bytes, twice: before its end, and at its end


class Windows:
    """Consecutive windows of `length + 1` tokens that share none, as examples.

    An example is `{"tokens": [length + 1] int32}`: all but the last are inputs, all but
    the first are targets. What is left over at the end is dropped.
    """

    def __init__(self, tokens: np.ndarray, length: int, path: Path):
        if len(tokens) <= length:
            raise DataError(
                f"{path}: a part of {len(tokens)} tokens does not fill one window of "
                f"{length + 1}. Give a longer text, or a smaller length."
            )
        count = len(tokens) // (length + 1)
        self._windows = tokens[: count * (length + 1)].reshape(count, length + 1)

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return the window at `index`."""
        return {"tokens": self._windows[index].astype(np.int32)}


def read_bytes(data_dir: Path, length: int) -> tuple[list[Windows], int]:
    """Return windows of bytes of any text: the first 90%, the next 5%, the last 5%.

    Args:
      data_dir: The file; or a folder with `input.txt`, or with
        `tinyshakespeare/input.txt`.
      length: Predictions per window.

    Returns:
      Training, validation and test windows, and the vocabulary's size, 256.

    Raises:
      DataError: If there is no such file, it is no text, or too short.
    """
    path = data_dir
    if not path.is_file():
        path = find(data_dir, ["input.txt"], ["", "tinyshakespeare"])[0]
    tokens = np.frombuffer(_read(path), np.uint8)
    needed = int(np.ceil((length + 1) / HELD_OUT))
    if len(tokens) < needed:
        raise DataError(
            f"{path} holds {len(tokens)} bytes; windows of {length + 1} need at least "
            f"{needed}, of which {HELD_OUT:.0%} are held out twice."
        )
    last = round(len(tokens) * HELD_OUT)
    parts = tokens[: -2 * last], tokens[-2 * last : -last], tokens[-last:]
    return [Windows(part, length, path) for part in parts], 256


def read_ptb(data_dir: Path, length: int) -> tuple[list[Windows], int]:
    """Return windows of words of the Penn Treebank's language-modelling files.

    Args:
      data_dir: The folder, as for `ptb_tokens`.
      length: Predictions per window.

    Returns:
      Training, validation and test windows, and the vocabulary's size.

    Raises:
      DataError: as `ptb_tokens`, and if a file is too short.
    """
    parts, vocabulary = ptb_tokens(data_dir)
    paths = find(data_dir, PTB_FILES, ["", "ptb"])
    pairs = zip(parts, paths, strict=True)
    return [Windows(tokens, length, path) for tokens, path in pairs], vocabulary


def ptb_tokens(data_dir: Path) -> tuple[list[np.ndarray], int]:
    """Return the words of the Penn Treebank's language-modelling files, numbered.

    Words are separated by whitespace and a line ends with the word `<eos>`. The
    vocabulary is that of the training file, most frequent first, ties by alphabet; of
    the original files it has 10,000 words.

    Args:
      data_dir: The folder with `ptb.train.txt`, `ptb.valid.txt` and `ptb.test.txt`, or
        one with a folder `ptb` that has them.

    Returns:
      Training, validation and test words, `[words]` int32 each, and the vocabulary's
      size.

    Raises:
      DataError: If a file is missing or no text, or holds an unknown word where the
        training file has no `<unk>` to put in its place.
    """
    paths = find(data_dir, PTB_FILES, ["", "ptb"])
    texts = [_words(path) for path in paths]
    counts = collections.Counter(texts[0])
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    vocabulary = {word: i for i, word in enumerate(ranked)}
    pairs = zip(texts, paths, strict=True)
    return [_encode(words, vocabulary, path) for words, path in pairs], len(vocabulary)


def _words(path: Path) -> list[str]:
    try:
        text = _read(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}.") from error
    if not text.endswith("\n"):
        raise DataError(
            f"{path} seems truncated: it breaks off in a line, after {len(text)} "
            "characters. Fetch it again, or end it with a newline if it is whole."
        )
    return text.replace("\n", " <eos> ").split()


def _read(path: Path) -> bytes:
    content = path.read_bytes()
    if not content:
        raise DataError(f"{path} is empty. Fetch it again.")
    if b"\0" in content:
        raise DataError(f"{path} is not text: it holds NUL bytes.")
    return content


def _encode(words: list[str], vocabulary: dict[str, int], path: Path) -> np.ndarray:
    unknown = vocabulary.get("<unk>")
    indices = [vocabulary.get(word, unknown) for word in words]
    if unknown is None and None in indices:
        raise DataError(
            f"{path} holds {words[indices.index(None)]!r}, which the training file "
            "does not, nor an <unk> to put in its place. Are they of one data set?"
        )
    return np.asarray(indices, np.int32)
