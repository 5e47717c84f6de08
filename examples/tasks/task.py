"""The parts of a task, and the error that readers of its files raise."""

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
        """Return the number of examples."""
        ...

    def __getitem__(self, index: int) -> Example:
        """Return the example at `index`, from 0 to `len(self) - 1`."""
        ...


@dataclasses.dataclass(frozen=True)
class Task:
    """Data, a model and a loss; see `tasks.load`.

    Attributes:
      name: The name in `tasks.TASKS`.
      train: Examples to train on.
      validation: Held-out examples to choose settings by.
      test: Held-out examples to report.
      init: A function from a random key to fresh params.
      metrics: A function from params and a batch to means over the batch, `[]` float32:
        "loss" in nats, and "accuracy" for images.
      rows: Examples per replica and step that suit the task.
      unit: The unit of the loss: "nats a byte".
      learning_rate: A sensible peak for SGD with momentum 0.9 and clipping at norm 1.
    """

    name: str
    train: Source
    validation: Source
    test: Source
    init: Callable[[jax.Array], Params]
    metrics: Callable[[Params, Batch], dict[str, jax.Array]]
    rows: int
    unit: str
    learning_rate: float

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Return the mean over the batch, `[]` float32, in nats."""
        return self.metrics(params, batch)["loss"]
