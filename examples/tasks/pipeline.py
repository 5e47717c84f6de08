"""Batches: shuffled, sharded by replica and resumable for training; in order for tests.

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
    """Endless batches for training, each epoch shuffled anew.

    The first `rows` rows of a batch are those of the first replica, and so on. Which
    they are depends on `seed` and the number of the batch alone, so processes that
    each ask for their own replicas see together what one process would see. What does
    not fill a batch is dropped at the end of an epoch; each epoch drops others.

    Args:
      source: examples; its method `augment`, where it has one, varies each of them,
        every time otherwise.
      rows: examples per replica and batch.
      replicas: N, of all processes.
      seed: of order and variants, from 0 to 2**32 - 1.
      local: the replicas of this process. Default: all.

    Returns:
      An iterator over examples stacked to `[len(local) * rows, ...]`. Its `get_state()`
      is a small dict of where it stands, for `set_state()` of another.

    Raises:
      ValueError: if `rows` or `replicas` is below 1, `local` is not a part of
        `range(replicas)`, `seed` is out of range, or the source is smaller than one
        batch.

    Example:
      >>> from tasks.pipeline import batches
      >>> next(batches([10, 20, 30, 40], rows=1, replicas=4, seed=0)).shape
      (4,)
    """
    local = range(replicas) if local is None else local
    _check(source, rows, replicas)
    if not 0 <= seed < 2**32:
        raise ValueError(f"`seed` must be from 0 to {2**32 - 1}, got {seed}.")
    if not local or local.step != 1 or local.start < 0 or local.stop > replicas:
        raise ValueError(
            f"`local` must be a part of range({replicas}), the replicas; got {local}."
        )
    mine = slice(local.start * rows, local.stop * rows)
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


def evaluation(source: Source, rows: int) -> Iterator[Batch]:
    """The source once, in order, in batches of `rows`; what is left over is dropped.

    All batches are of one shape, so that nothing compiles twice.

    Raises:
      ValueError: if `rows` is below 1, or the source is smaller than one batch.

    Example:
      >>> from tasks.pipeline import evaluation
      >>> [batch.tolist() for batch in evaluation([1, 2, 3, 4, 5], rows=2)]
      [[1, 2], [3, 4]]
    """
    _check(source, rows, 1)
    starts = range(0, len(source) - rows + 1, rows)
    return (_stack([source[i] for i in range(at, at + rows)]) for at in starts)


def _check(source: Source, rows: int, replicas: int) -> None:
    for name, count in {"rows": rows, "replicas": replicas}.items():
        if count < 1:
            raise ValueError(f"`{name}` must be at least 1, got {count}.")
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
