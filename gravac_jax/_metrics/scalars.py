"""The figures of a step as plain numbers, fetched in one transfer."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from gravac_jax._info import StepInfo

_PREFIX = "gravac/"


def scalars(opt_state: Any, **others: Any) -> dict[str, float]:
    """Fetch what the last step sent, and wait for the step to be done.

    `Recorder` does not wait. On several hosts any one may call it alone.

    Args:
      opt_state: anything that holds the state of one `gravac.transform`: of a chain, in
        `gravac.guard`, a Flax `TrainState`, an `nnx.Optimizer`, replicated by
        `jax.pmap`; or a `StepInfo` itself.
      others: more of this step, such as its loss: arrays with one entry, or numbers.

    Returns:
      `gravac/factor`, `gravac/gain` and so on for every field of `StepInfo`,
      `gravac/gains/0` and so on for every rung, then `others` by their names. Whole
      numbers are exact up to 2**24, `gravac/is_finite` is 0 or 1.

    Raises:
      ValueError: if `opt_state` holds no `StepInfo`, several, those of several steps,
        or one that a later step has overwritten; if one of `others` has several
        entries.

    Cost:
      One small program and one transfer, of 4 bytes a figure.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> tx = optax.chain(gravac.transform(axis_name=None), optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> updates, opt_state = tx.update(params, tx.init(params))
      >>> found = metrics.scalars(opt_state, loss=jnp.float32(0.5))
      >>> found["gravac/is_finite"], found["loss"]
      (1.0, 0.5)
    """
    (figures,) = fetch(snapshot(opt_state, **others))
    return figures


def scalars_of_steps(infos: Any, **others: Any) -> list[dict[str, float]]:
    """`scalars` of many steps, such as those of `jax.lax.scan`, in one transfer.

    Args:
      infos: a `StepInfo` whose leaves have a leading axis of steps: what a scan stacks
        of `optax.tree.get(opt_state, "StepInfo")`.
      others: more of these steps, `[steps]` each.

    Returns:
      What `scalars` returns, for every step.

    Raises:
      ValueError: as `scalars`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> tx = optax.chain(gravac.transform(axis_name=None), optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> def step(opt_state, grads):
      ...     updates, opt_state = tx.update(grads, opt_state)
      ...     return opt_state, optax.tree.get(opt_state, "StepInfo")
      >>> grads = {"w": jnp.ones((3, 256, 256))}
      >>> opt_state, infos = jax.lax.scan(step, tx.init(params), grads)
      >>> [x["gravac/skipped_steps"] for x in metrics.scalars_of_steps(infos)]
      [0.0, 0.0, 0.0]
    """
    return fetch(_snapshot(infos, others))


def snapshot(opt_state: Any, **others: Any) -> tuple[list[str], jax.Array]:
    """The names of `scalars` and their `[1, names]` on the device, not waited for.

    Later steps may overwrite `opt_state`, which they do where it is donated.
    """
    names, table = _snapshot(opt_state, others)
    if len(table) != 1:
        raise ValueError(
            f"there are {len(table)} steps or replicas in this StepInfo. Of the steps "
            "of a jax.lax.scan make metrics.scalars_of_steps(infos); of replicas that "
            "jax.vmap has stacked take the first, jax.tree.map(lambda x: x[0], info)."
        )
    return names, table


def fetch(shot: tuple[list[str], jax.Array]) -> list[dict[str, float]]:
    """A snapshot as plain numbers, a dict a step."""
    names, table = shot
    rows = np.asarray(table, np.float64).tolist()
    return [dict(zip(names, row, strict=True)) for row in rows]


def _snapshot(tree: Any, others: Mapping[str, Any]) -> tuple[list[str], jax.Array]:
    info = _find(tree)
    columns = {}
    for name, value in info._asdict().items():
        columns[_PREFIX + name] = _local(_PREFIX + name, value)
    steps = columns[_PREFIX + "factor"].size
    for name, value in others.items():
        columns[name] = _local(name, value)
        if columns[name].size != steps:
            raise ValueError(
                f"`{name}` must have one entry for each of {steps} steps, got the"
                f" shape {columns[name].shape}. Take its mean, or leave it out."
            )
    names = []
    for name, x in columns.items():
        width = x.size // max(1, steps)
        is_list = name == _PREFIX + "gains"
        names += [f"{name}/{i}" for i in range(width)] if is_list else [name]
    return names, _table(list(columns.values()))


def _find(tree: Any) -> StepInfo:
    """The only StepInfo in `tree`."""

    def is_info(x: Any) -> bool:
        # flax.nnx.split turns NamedTuples into mappings from their fields.
        is_split = isinstance(x, Mapping) and set(StepInfo._fields) <= set(x)
        return is_split or isinstance(x, StepInfo)

    found = list(filter(is_info, jax.tree.leaves(tree, is_leaf=is_info)))
    if len(found) != 1:
        raise ValueError(
            f"expected one StepInfo, found {len(found)} in a {type(tree).__name__}. "
            "Give the state of an optimizer with one gravac.transform in it, such as "
            "optax.chain(gravac.transform(), optax.sgd(0.1)); of several give one's."
        )
    (info,) = found
    return info if isinstance(info, StepInfo) else StepInfo(**dict(info))


def _local(name: str, value: Any) -> Any:
    """A leaf as this process has it; on the device, and on one alone."""
    (x,) = jax.tree.leaves(value)  # within a variable of nnx
    if isinstance(x, Tracer):
        raise ValueError(
            f"`{name}` has no value yet, for the step is being traced. Return "
            'optax.tree.get(opt_state, "StepInfo") from it, or its state, and read '
            "them outside."
        )
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    if x.is_deleted():
        raise ValueError(
            f"`{name}` is gone: this state was donated to a later step. Read the state "
            "that the step has returned, before the next one."
        )
    # A program over all devices would be one that every host has to run.
    return x.addressable_data(0)


@jax.jit
def _table(columns: list[jax.Array]) -> jax.Array:
    """`[steps, figures]` float32; the first column has one entry a step."""
    steps = columns[0].size
    rows = [jnp.reshape(x, (steps, -1)).astype(jnp.float32) for x in columns]
    return jnp.concatenate(rows, axis=1)
