"""Batches: shuffled, or text in order; sharded by replica, resumable; and for tests.

Built on grain; no worker processes, and no file is read here.
"""

from collections.abc import Iterator, Sequence

import grain
import jax
import numpy as np

from tasks.task import Batch, Example, Source

# The calling thread reads: accelerators run meanwhile, and CPUs have no core to spare.
READ = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def batches(
    source: Source, *, rows: int, replicas: int, seed: int, local: range | None = None
) -> grain.DatasetIterator:
    """Return endless batches for training, each epoch shuffled anew.

    The first `rows` rows of a batch are those of the first replica, and so on. Which
    they are depends on `seed` and the number of the batch alone, so processes that
    each ask for their own replicas see together what one process would see. What does
    not fill a batch is dropped at the end of an epoch; each epoch drops others.

    Args:
      source: The examples; its method `augment`, where it has one, varies each of them,
        every time otherwise.
      rows: Examples per replica and batch.
      replicas: N, the number of replicas of all processes.
      seed: The seed of order and variants, from 0 to 2**32 - 1.
      local: The replicas of this process. Default: all.

    Returns:
      An iterator over examples stacked to `[len(local) * rows, ...]`. Its `get_state()`
      is a small dict of where it stands, for `set_state()` of another.

    Raises:
      ValueError: If `rows` or `replicas` is below 1, `local` is not a part of
        `range(replicas)`, `seed` is out of range, or the source is smaller than one
        batch.

    Example:
      >>> from tasks.pipeline import batches
      >>> next(batches([10, 20, 30, 40], rows=1, replicas=4, seed=0)).shape
      (4,)
    """
    _check(source, rows, replicas)
    if not 0 <= seed < 2**32:
        raise ValueError(f"`seed` must be from 0 to {2**32 - 1}, got {seed}.")
    mine = _mine(rows, replicas, local)
    augment = getattr(source, "augment", None)

    def read(picks: np.ndarray) -> Batch:
        examples = [source[int(index)] for index, _ in picks[mine]]
        if augment is not None:
            seeds = [int(seed) for _, seed in picks[mine]]
            pairs = zip(examples, seeds, strict=True)
            examples = [augment(x, np.random.default_rng(seed)) for x, seed in pairs]
        return _stack(examples)

    # Every process draws all picks, numbers only, and reads no more than its own.
    picks = grain.MapDataset.range(len(source)).seed(seed).shuffle().random_map(_pick)
    picks = picks.batch(rows * replicas, drop_remainder=True).repeat()
    return iter(picks.map(read).to_iter_dataset(READ))


def tracks(
    tokens: np.ndarray,
    *,
    rows: int,
    replicas: int,
    length: int,
    epochs: int | None = None,
    local: range | None = None,
) -> grain.DatasetIterator:
    """Return batches of a text that go on where the last one ended: truncated BPTT.

    The text is cut into `rows * replicas` tracks, one after the other: each replica has
    a contiguous part of it, and each row of its batches a contiguous part of that. The
    last token of a window is the first of the next one, so that every token of a track
    but the first is a target once; what does not fill a window is dropped.

    Args:
      tokens: The text, `[tokens]` int32.
      rows: Tracks per replica.
      replicas: N, the number of replicas of all processes.
      length: Predictions per window.
      epochs: The number of times that the text is read; None for no end.
      local: The replicas of this process. Default: all.

    Returns:
      An iterator, as that of `batches`, over `{"tokens": [len(local) * rows, length +
      1] int32, "is_first": [len(local) * rows] bool}`; `is_first` where a track begins.

    Raises:
      ValueError: If `rows`, `replicas` or `length` is below 1, `local` is not a part of
        `range(replicas)`, or a track is shorter than one window.

    Example:
      >>> import numpy as np
      >>> from tasks.pipeline import tracks
      >>> windows = tracks(np.arange(10), rows=1, replicas=2, length=2)
      >>> next(windows)["tokens"].tolist(), next(windows)["tokens"].tolist()
      ([[0, 1, 2], [5, 6, 7]], [[2, 3, 4], [7, 8, 9]])
    """
    _positive(rows=rows, replicas=replicas, length=length)
    mine, track = _mine(rows, replicas, local), len(tokens) // (rows * replicas)
    windows = (track - 1) // length
    if windows < 1:
        raise ValueError(
            f"the text holds {len(tokens)} tokens; {rows} rows x {replicas} replicas "
            f"need at least {rows * replicas * (length + 1)} for a window of "
            f"{length + 1} each. Use fewer rows or replicas, or a smaller length."
        )
    own = tokens[: rows * replicas * track].reshape(-1, track)[mine]

    def read(window: int) -> Batch:
        at = window * length
        is_first = np.full(len(own), window == 0)
        return {"tokens": own[:, at : at + length + 1], "is_first": is_first}

    picks = grain.MapDataset.range(windows).repeat(epochs)
    return iter(picks.map(read).to_iter_dataset(READ))


def evaluation(
    source: Source, rows: int, *, replicas: int = 1, local: range | None = None
) -> Iterator[Batch]:
    """Return the source once, in order, in batches of `rows`; the rest is dropped.

    All batches are of one shape, so that nothing compiles twice.

    Args:
      source: The examples.
      rows: Examples per replica and batch.
      replicas: N, the number of replicas of all processes.
      local: The replicas of this process. Default: all.

    Raises:
      ValueError: If `rows` or `replicas` is below 1, `local` is not a part of
        `range(replicas)`, or the source is smaller than one batch.

    Example:
      >>> from tasks.pipeline import evaluation
      >>> [batch.tolist() for batch in evaluation([1, 2, 3, 4, 5], rows=2)]
      [[1, 2], [3, 4]]
    """
    _check(source, rows, replicas)
    mine, whole = _mine(rows, replicas, local), rows * replicas
    starts = range(0, len(source) - whole + 1, whole)
    return (_stack([source[i] for i in range(at, at + whole)[mine]]) for at in starts)


def _mine(rows: int, replicas: int, local: range | None) -> slice:
    """Return the rows of this process in a batch of all replicas."""
    local = range(replicas) if local is None else local
    if not local or local.step != 1 or local.start < 0 or local.stop > replicas:
        raise ValueError(
            f"`local` must be a part of range({replicas}), the replicas; got {local}."
        )
    return slice(local.start * rows, local.stop * rows)


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"`{name}` must be at least 1, got {count}.")


def _check(source: Source, rows: int, replicas: int) -> None:
    _positive(rows=rows, replicas=replicas)
    if len(source) < rows * replicas:
        raise ValueError(
            f"the source holds {len(source)} examples, fewer than one batch of "
            f"{rows * replicas} ({rows} rows x {replicas} replicas). Use fewer rows or "
            "replicas, or more data."
        )


def _pick(index: int, rng: np.random.Generator) -> np.ndarray:
    # The seed of the variant travels with the index, so that it depends on neither
    # process nor replica.
    return np.asarray([index, rng.integers(2**32)])


def _stack(examples: Sequence[Example]) -> Batch:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)
