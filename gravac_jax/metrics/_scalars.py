"""The figures of a step as Python floats, fetched from the device in one transfer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays
from gravac_jax._info import StepInfo

GAINS = "gravac/gains/"


def scalars(opt_state: Any, **others: Any) -> dict[str, float]:
    """Return the figures of the last step; wait until the step is done.

    `Recorder` does not wait. In a job of several processes any one of them may call
    this function without the others. It runs one small program and one transfer of 4
    bytes for each figure.

    Args:
      opt_state: Any tree that holds the state of exactly one `gravac.transform`: of an
        `optax.chain`, of `gravac.guard`, a Flax `TrainState`, an `nnx.Optimizer`, or a
        state replicated by `jax.pmap`. A `StepInfo` alone is such a tree too.
      others: More figures of the step, such as the loss: numbers, or arrays with one
        entry.

    Returns:
      A float for every name: `gravac/factor`, `gravac/gain` and so on for the fields of
      `StepInfo`; `gravac/gains/0` and so on for the rungs of the ladder, of which only
      `Recorder(send=...)` knows the names; then the names of `others`. Integers above
      2**24 are rounded to float32, and `gravac/is_finite` is 0 or 1.

    Raises:
      ValueError: If `opt_state` holds no `StepInfo`, more than one, or the `StepInfo`
        of several steps, or if one of `others` has more than one entry.
      RuntimeError: If the state was donated to a later step.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> exchange = gravac.transform(axis_name=None, send=gravac.TopK(100))
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> updates, opt_state = tx.update(params, tx.init(params))
      >>> figures = metrics.scalars(opt_state, loss=jnp.float32(0.5))
      >>> figures["gravac/is_finite"], figures["loss"]
      (1.0, 0.5)
    """
    (figures,) = fetch(snapshot(opt_state, others))
    return figures


def scalars_of_steps(infos: Any, **others: Any) -> list[dict[str, float]]:
    """Return the figures of many steps, such as those of a `jax.lax.scan`.

    Args:
      infos: A `StepInfo` whose leaves have a leading axis `[steps, ...]`. A scan makes
        it if its body returns `optax.tree.get(opt_state, "StepInfo")`.
      others: More figures of these steps, `[steps]` each.

    Returns:
      For every step, what `scalars` returns.

    Raises:
      ValueError: If `infos` holds no `StepInfo` or more than one, or if one of `others`
        does not have one entry for each step.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> from gravac_jax import metrics
      >>> exchange = gravac.transform(axis_name=None, send=gravac.TopK(100))
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> def step(opt_state, grads):
      ...     updates, opt_state = tx.update(grads, opt_state)
      ...     return opt_state, optax.tree.get(opt_state, "StepInfo")
      >>> grads = {"w": jnp.ones((3, 256, 256))}
      >>> opt_state, infos = jax.lax.scan(step, tx.init(params), grads)
      >>> [x["gravac/bad_steps"] for x in metrics.scalars_of_steps(infos)]
      [0.0, 0.0, 0.0]
    """
    return fetch(snapshot(infos, others, of_many=True))


# Figures on the device, copied from a state that a later step may overwrite: the names
# of the columns, and `[steps, names]` float32.
Snapshot = tuple[list[str], jax.Array]


def snapshot(
    tree: Any,
    others: Mapping[str, Any],
    rungs: Sequence[str] = (),
    more: Sequence[tuple[Any, list[str]]] = (),
    *,
    of_many: bool = False,
) -> Snapshot:
    """Copy figures on the device, without waiting for the step that they are of.

    Args:
      tree: the state after the step, or what many steps reported.
      others: more figures, by name.
      rungs: the names of the encodings; by default their places.
      more: more arrays, each with the names of its entries.
      of_many: whether they may be of many steps.
    """
    info = {f"gravac/{name}": x for name, x in _find(tree)._asdict().items()}
    columns = {name: on_this_host(name, x) for name, x in {**info, **others}.items()}
    steps, gains = columns["gravac/factor"].size, columns.pop("gravac/gains")
    if steps != 1 and not of_many:
        raise ValueError(
            f"expected the StepInfo of one step, got one with {steps} entries in each"
            " field. Give one of them, or call metrics.scalars_of_steps(infos)."
        )
    for name, x in others.items():
        # Of what each replica has for itself, this host may hold one entry of many.
        shape = np.shape(jax.tree.leaves(x)[0])
        if math.prod(shape) != steps:
            raise ValueError(
                f"`{name}` must have one entry for each step ({steps}), got an array"
                f" of shape {shape}. Give its mean; where all entries are the same, as"
                f" from jax.pmap, {name}[0]; or leave it out."
            )
    places = range(gains.size // max(1, steps))
    if rungs and len(rungs) != len(places):
        raise ValueError(
            f"`send` has the encodings {', '.join(rungs)}, and the state is of"
            f" {len(places)}. Give what the transform was given as `send`."
        )
    more = [(gains, [f"{GAINS}{x}" for x in rungs or places]), *more]
    names = [*columns, *(name for _, entries in more for name in entries)]
    arrays = [on_this_host("predictions", x) for x, _ in more]
    return names, _table([*columns.values(), *arrays])


def fetch(shot: Snapshot) -> list[dict[str, float]]:
    """Return the figures of every step of a snapshot; wait until they are computed."""
    names, table = shot
    rows = np.asarray(table, np.float64).tolist()
    return [dict(zip(names, row, strict=True)) for row in rows]


def _find(tree: Any) -> StepInfo:
    """Return the only `StepInfo` of a tree."""

    def is_info(x: Any) -> bool:
        # flax.nnx.split turns NamedTuples into mappings from their fields.
        is_split = isinstance(x, Mapping) and set(StepInfo._fields) <= set(x)
        return is_split or isinstance(x, StepInfo)

    infos = list(filter(is_info, jax.tree.leaves(tree, is_leaf=is_info)))
    if len(infos) != 1:
        raise ValueError(
            f"expected one StepInfo, found {len(infos)} in a {type(tree).__name__}."
            " Give the state of an optimizer with one gravac.transform in it."
        )
    (info,) = infos
    return info if isinstance(info, StepInfo) else StepInfo(**dict(info))


def on_this_host(name: str, value: Any) -> Any:
    """Return a copy of one array that this process may read by itself."""
    leaves = jax.tree.leaves(value)  # nnx wraps arrays in variables
    if len(leaves) != 1 or isinstance(leaves[0], str):
        raise ValueError(
            f"`{name}` must be a number or an array, got {_arrays.brief(value)}."
            f" Leave it out, or give each of its numbers a name."
        )
    (x,) = leaves
    # One local copy: a program on all devices would have to run on every host.
    return x.addressable_data(0) if hasattr(x, "addressable_data") else np.asarray(x)


@jax.jit
def _table(columns: list[jax.Array]) -> jax.Array:
    steps = columns[0].size
    rows = [jnp.reshape(x, (steps, -1)).astype(jnp.float32) for x in columns]
    return jnp.concatenate(rows, axis=1)


def taken(scalars: Mapping[str, float]) -> str:
    """Return the name of the encoding that a step has sent; "" if it is not known."""
    names = [x.removeprefix(GAINS) for x in scalars if x.startswith(GAINS)]
    rung = scalars.get("gravac/rung", math.inf)
    name = names[int(rung)] if rung < len(names) else ""
    return "" if name.isdecimal() else name
