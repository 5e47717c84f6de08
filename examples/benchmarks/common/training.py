"""What the benchmarks that train a task share."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from tasks import Source, Task, pipeline

import gravac_jax as gravac

AVERAGED = 0.02  # weight of the newest params in averaged params
EVERY = 25  # steps from one evaluation to the next, where times to a loss are measured


def train_step(
    tx: optax.GradientTransformationExtraArgs,
    loss: Callable[..., Any],
    is_own: bool = False,
    axis_name: str | None = "data",
    brings_loss: bool = False,
) -> Callable[..., Any]:
    """Return a step of one replica: `(params, opt_state, batch)` to both and a loss.

    Args:
      tx: The optimizer, with the exchange in it.
      loss: The loss of params and a batch.
      is_own: Whether a replica takes its gradient at its own params.
      axis_name: The axis of the replicas; None for one alone.
      brings_loss: Whether to return the mean loss, which the exchange brings.
    """

    def step(params: Any, opt_state: Any, batch: Any, **others: Any) -> Any:
        where = gravac.own_params(tx, params, opt_state) if is_own else params
        value, grads = gravac.value_and_grad(loss, axis_name)(where, batch)
        at = "own" if is_own else "shared"
        others |= {"at": at, "own_loss": value if brings_loss else None}
        updates, opt_state = tx.update(grads, opt_state, params, **others)
        if brings_loss:
            value = optax.tree.get(opt_state, "TransformState").loss
        return optax.apply_updates(params, updates), opt_state, value

    return step


def averaged(average: Any, params: Any, weight: Any = AVERAGED) -> Any:
    """Move averaged params towards `params`: losses of averages fluctuate less."""
    return jax.tree.map(lambda x, y: x + weight * (y - x), average, params)


def held_out(
    task: Task, source: Source, rows: int = 128, batches: int = 8
) -> Callable[[Any], dict[str, float]]:
    """Return a function from params to their mean metrics over held-out batches.

    Args:
      task: The task, for its metrics.
      source: Held-out examples; the same first ones are used each time.
      rows: Examples in a batch, if there are as many.
      batches: Number of batches, at most.
    """
    found = pipeline.evaluation(source, min(rows, len(source)))
    examples, metrics = list(itertools.islice(found, batches)), jax.jit(task.metrics)

    def evaluate(params: Any) -> dict[str, float]:
        found = jax.device_get([metrics(params, batch) for batch in examples])
        mean = lambda name: float(np.mean([x[name] for x in found], dtype=np.float64))
        return {name: mean(name) for name in found[0]}

    return evaluate


def size(params: Any) -> int:
    """Return the number of params."""
    return sum(x.size for x in jax.tree.leaves(params))
