"""The objects of Flax NNX that a step changes in place."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from gravac_jax import _arrays


def is_nnx_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer without the state that own params need."""
    if not (hasattr(optimizer, "tx") and hasattr(optimizer, "opt_state")):
        raise TypeError(
            f"`optimizer` must be the nnx.Optimizer of the model, for its state, got"
            f" {type(optimizer).__name__}. For gradients at the shared params leave it"
            f" out."
        )


def has_params(params: Any, args: Sequence[Any], wrt: Any) -> None:
    """Refuse to differentiate a first argument without variables to train."""
    if not jax.tree.leaves(params):
        kind = type(args[0]).__name__ if args else "no positional argument"
        raise TypeError(
            f"nnx_value_and_grad differentiates with respect to the variables {wrt!r}"
            f" of its first argument, and there are none, got {kind}. Pass the model"
            f" first, by position; gravac.value_and_grad takes a pytree of arrays."
        )


def batch_among(args: Sequence[Any], is_object: Callable[[Any], bool]) -> int:
    """Return the index of the one argument that is no nnx object."""
    leaves = [jax.tree.leaves(x, is_leaf=is_object) for x in args]
    others = [i for i, found in enumerate(leaves) if not all(map(is_object, found))]
    places = others or [i for i, found in enumerate(leaves) if not found][-1:]
    if len(places) != 1 or len(args) < 2:
        kinds = [f"argument {i} ({type(args[i]).__name__})" for i in places]
        raise TypeError(
            f"an nnx step takes nnx objects, which it changes in place, and one batch,"
            f" all by position; of {len(args)} arguments those that are no nnx objects"
            f" are: {', '.join(kinds) or 'none'}. Give a batch of several arrays as one"
            f" tuple or dict, and arrays that are the same for all replicas by keyword."
            f" For state that is no nnx object there is gravac.data_parallel."
        )
    return places[0]


def shares_nothing(objects: Sequence[Any], is_variable: Callable[[Any], bool]) -> None:
    """Refuse a variable that two objects, or two attributes, share."""
    seen: dict[int, str] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tuple(objects), is_leaf=is_variable)
    for path, x in leaves:
        name = jax.tree_util.keystr(path)
        if is_variable(x) and (first := seen.setdefault(id(x), name)) != name:
            raise ValueError(
                f"the step's arguments share the {type(x).__name__} at {first} and at"
                f" {name}: replicas would each change two copies of it. Keep one, and"
                f" hand it to the other place when it is called."
            )


def keeps_structure(
    objects: Sequence[Any], structures: Sequence[Any], who: str
) -> None:
    """Refuse to change more of nnx objects than the values of their variables."""
    for x, before in zip(objects, structures, strict=True):
        if jax.tree.structure(x) != before:
            paths = [path for path, _ in _arrays.named_leaves(x)]
            raise ValueError(
                f"{who} adds, removes or changes something in its {type(x).__name__}"
                f" that is not the value of a variable; it has now {paths}. Only values"
                f" can be written back. Change attributes outside of {who}"
                f" (model.train(), model.eval()), and take what self.sow has stored"
                f" out again, nnx.pop(model, nnx.Intermediate), where it is used."
            )


def no_objects(returned: Any, is_object: Callable[[Any], bool]) -> None:
    """Refuse a step that returns its objects instead of changing them in place."""
    leaves = jax.tree.leaves(returned, is_leaf=is_object)
    if kinds := [type(x).__name__ for x in leaves if is_object(x)]:
        raise TypeError(
            f"the step returns nnx objects, {kinds}. Its arguments are changed in"
            f" place: return metrics only, or None."
        )


def variable_stays_alike(path: str, kind: str, who: str) -> None:
    """Refuse an nnx variable that is left different on different replicas."""
    raise ValueError(
        f"{who} changes {path}, of type {kind}, to something that may differ between"
        f" replicas, and it was the same on all of them. Params change by the gradients"
        f" of gravac.nnx_value_and_grad (or gravac.value_and_grad) and a"
        f" gravac.transform that comes first in the optimizer's chain. If it is a"
        f" statistic of the batch, make it an nnx.BatchStat that the loss of"
        f" gravac.nnx_value_and_grad changes: its mean over replicas is kept. Otherwise"
        f" average what is written with jax.lax.pmean, or return it: from a loss as"
        f" aux, with has_aux=True."
    )


def adds_up(
    objects: Sequence[Any],
    is_metric: Callable[[Any], bool],
    is_average: Callable[[Any], bool],
    is_sum: Callable[[Any], bool],
) -> None:
    """Refuse metrics that are no sums over the batch."""
    leaves = jax.tree_util.tree_leaves_with_path(tuple(objects), is_leaf=is_metric)
    for path, x in leaves:
        held = any(map(is_sum, jax.tree.leaves(x, is_leaf=is_sum)))
        if held and not is_average(x):
            raise ValueError(
                f"the {type(x).__name__} at {jax.tree_util.keystr(path)} of the step's"
                f" arguments cannot be added up over replicas: only subclasses of"
                f" nnx.metrics.Average (such as Accuracy) are known to be sums over the"
                f" batch. Use nnx.metrics.Average of the values and of their squares,"
                f" or a subclass of Average whose MetricStates are sums, or return the"
                f" values from the step and update the metric outside."
            )


def computed_after_step() -> None:
    """Refuse to compute a metric of which a replica has its own part only."""
    raise ValueError(
        "the step calls `compute` of a metric, which holds on each replica the sums of"
        " that replica alone until the step ends. Call it after the step, on the same"
        " metric."
    )
