"""What a task is made of, and the one error that its readers raise."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

Params = Any  # a plain pytree of float32 arrays
Example = Any  # a pytree of NumPy arrays
Batch = Any  # examples stacked along a new first axis


class DataError(ValueError):
    """A data file is missing, truncated or foreign; programs print it and exit."""


class Source(Protocol):
    """Examples by position.

    A source may have a method `augment(example, rng)`, which returns a random variant
    of an example; `tasks.pipeline.batches` calls it, `evaluation` does not.
    """

    def __len__(self) -> int:
        """How many examples there are."""
        ...

    def __getitem__(self, index: int) -> Example:
        """The example at `index`, from 0 to `len(self) - 1`."""
        ...


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, a model and a loss; see `tasks.load`."""

    name: str
    """As in `tasks.TASKS`."""
    train: Source
    """Examples to train on."""
    validation: Source
    """Held-out examples to choose settings by."""
    test: Source
    """Held-out examples to report."""
    init: Callable[[jax.Array], Params]
    """From a random key to fresh params."""
    loss: Callable[[Params, Batch], jax.Array]
    """The mean over the batch, `[]` float32, in nats."""
    metrics: Callable[[Params, Batch], dict[str, jax.Array]]
    """Means over the batch, `[]` float32: "loss", and "accuracy" for images."""
    rows: int
    """Examples per replica and step that the preset suggests."""
    unit: str
    """Of the loss: "nats a byte"."""
    learning_rate: float
    """A sensible peak for SGD with momentum 0.9 and clipping at norm 1."""
