"""Every complaint of the library, one function each.

A complaint says what was wrong, what was received, and what to do. All of them are
raised while a component is built or a step is traced, before anything is changed.
"""

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _tree


def _is_number(value: Any, kind: type = numbers.Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def factor(value: Any, name: str = "factor") -> None:
    """Refuse what is not a factor; the likely slip is a density."""
    if not _is_number(value):
        raise TypeError(
            f"`{name}` must be a number of at least 1, got {value!r}. A factor is n / k"
            " (10 sends one entry in ten)."
        )
    if not (math.isfinite(value) and value >= 1):
        is_density = 0 < value < 1
        hint = f" for a density of {value} write {name}={1 / value:g}." * is_density
        raise ValueError(
            f"`{name}` must be finite and at least 1, got {value}. A factor is n / k"
            f" (10 sends one entry in ten);{hint or ' factor 1 sends everything.'}"
        )


def ladder(factors: Any) -> None:
    """Refuse a ladder that is empty, out of order, or holds something else."""
    if not isinstance(factors, tuple) or not factors:
        raise TypeError(
            f"`ladder` must be a tuple of factors such as (1, 10, 100), got"
            f" {factors!r}. See gravac.exponential and gravac.geometric."
        )
    for value in factors:
        factor(value, "ladder")
    if any(low >= high for low, high in itertools.pairwise(factors)):
        raise ValueError(
            f"`ladder` must rise from the smallest factor to the largest without"
            f" repeats, got {tuple(factors)}. Write"
            f" {tuple(sorted(set(factors)))}."
        )


def dense_first(factors: Sequence[float], owner: str) -> None:
    """Refuse a ladder from which a controller could not fall back to dense."""
    if factors[0] != 1 or len(factors) < 2:
        raise ValueError(
            f"the ladder of {owner} must begin with factor 1, the dense step that it"
            f" falls back to, and go on from there, got {tuple(factors)}. Write"
            f" {(1, *(f for f in factors if f != 1)) if len(factors) > 1 else (1, 10)}."
        )


def within(value: Any, name: str, low: float, high: float, why: str) -> None:
    """Refuse a knob outside `[low, high]`."""
    if not (_is_number(value) and low <= value <= high):
        raise ValueError(
            f"`{name}` must be a number between {low:g} and {high:g}, got {value!r}."
            f" {why}"
        )


def count(value: Any, name: str, what: str) -> None:
    """Refuse what is no positive whole number."""
    if not (_is_number(value, numbers.Integral) and value >= 1):
        raise ValueError(
            f"`{name}` must be a whole number of at least 1, got {value!r}. It counts"
            f" {what}."
        )


def rising(minimum: float, maximum: float) -> None:
    """Refuse two factors between which there is nothing to climb."""
    if minimum >= maximum:
        raise ValueError(
            f"`minimum` must be below `maximum`, got {minimum} and {maximum}. They are"
            f" the first compressed factor and the last."
        )


def one_of(value: Any, name: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not among `allowed`."""
    if value not in allowed:
        words = " or ".join(repr(word) for word in allowed)
        raise ValueError(f"`{name}` must be {words}, got {value!r}.")


def component(value: Any, kind: type, name: str, example: str) -> None:
    """Refuse a component that is of another family, or no component at all."""
    if not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        raise TypeError(
            f"`{name}` must be a {kind.__name__}, got {got}. Did you mean {example}?"
        )


def only_one(exchange: Any, compressor: Any) -> None:
    """Refuse an exchange and a compressor at once."""
    if exchange is not None:
        raise TypeError(
            f"give `exchange` or `compressor`, not both: got {exchange!r} and"
            f" {compressor!r}. compressor=X is short for exchange=AllGather(X)."
        )


def scalar(value: Any, default: Any, dtype: Any, name: str) -> jax.Array:
    """`value` as a `[]` array of `dtype`; `default` for None."""
    array = jnp.asarray(default if value is None else value)
    if array.shape != ():
        raise ValueError(
            f"`{name}` must be a single number on each replica, got shape"
            f" {array.shape}. Pass the step time of this replica, or NaN."
        )
    return array.astype(dtype)


def axis(axis_name: Any) -> None:
    """Refuse what cannot name a mesh axis."""
    names = axis_name if isinstance(axis_name, tuple) and axis_name else (axis_name,)
    if axis_name is not None and not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"`axis_name` must be the name of the mapped axis, several names in a"
            f" tuple, or None to run alone, got {axis_name!r}."
        )


def bound_axis(axis_name: Any, caller: str) -> None:
    """Refuse a call outside the axis that the components were built for."""
    try:
        _ = axis_name is None or jax.lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"`{caller}` was called outside axis_name={axis_name!r} ({error}). Call it"
            f" inside shard_map, pmap or vmap over that axis (gravac.data_parallel"
            f" does), give the name that your mesh has, or pass axis_name=None to run"
            f" alone."
        ) from None


def gradients(tree: Any, name: str = "gradients") -> None:
    """Refuse leaves that are no real floating-point arrays, by name."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    for path, leaf in _tree.named_leaves(tree, is_masked):
        if is_masked(leaf):
            raise TypeError(
                f"the {name} hold a MaskedNode at {path}: optax.masked or"
                f" optax.partition stands around gravac.transform, and the leaves that"
                f" they hide would never be averaged over replicas. Put them around"
                f" the inner optimizer only, and choose which leaves are compressed"
                f" with gravac.transform(compress=...)."
            )
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"the {name} must be real floating-point arrays, got"
                f" {dtype or type(leaf).__name__} at {path}. Differentiate with respect"
                f" to the float params only, and keep counters, keys and complex"
                f" params out of what the optimizer sees."
            )


def still_local(path: str, missing: Sequence[str]) -> None:
    """Refuse gradients that were summed over the axis before they got here."""
    raise ValueError(
        f"the gradient at {path} does not vary over {tuple(missing)}: it was summed"
        f" over the replicas before gravac saw it, so there is nothing left to"
        f" compress. Under shard_map jax.grad does this for replicated params. Take"
        f" gradients with gravac.value_and_grad(loss, axis_name), or cast the params"
        f" first: jax.lax.pcast(params, axis_name, to='varying')."
    )


def state_matches(received: Any, expected: Any) -> None:
    """Refuse a state that was made for other params, or with other components."""

    def shapes(tree: Any) -> list[tuple[int, ...]]:
        return [x.shape for x in jax.tree.leaves(tree)]

    if jax.tree.structure(received) != jax.tree.structure(expected) or (
        shapes(received) != shapes(expected)
    ):
        raise ValueError(
            f"the state does not fit the gradients: it holds per-replica arrays of"
            f" shapes {shapes(received)} where these gradients and components need"
            f" {shapes(expected)}. The params changed structure, or the transform was"
            f" built with other components: call init again. A leading axis longer"
            f" than 1 means that the state was placed but the step does not run under"
            f" shard_map with gravac.state_specs (gravac.data_parallel does this)."
        )


def mask_matches(mask: Any, tree: Any) -> None:
    """Refuse a `compress` mask of another structure than the params."""
    is_bool = all(isinstance(leaf, bool) for leaf in jax.tree.leaves(mask))
    if not is_bool or jax.tree.structure(mask) != jax.tree.structure(tree):
        raise ValueError(
            f"`compress` must be a bool, a function of (path, leaf), or a pytree of"
            f" bools of the params' own structure, got {mask!r} for"
            f" {jax.tree.structure(tree)}. With nnx, write a function."
        )


def placed_on(state_replicas: int, mesh_replicas: int) -> None:
    """Refuse to move per-replica state onto another number of replicas."""
    if state_replicas != mesh_replicas:
        raise ValueError(
            f"the state is placed on {state_replicas} replicas, and the mesh has"
            f" {mesh_replicas}: what each replica still holds back would be lost or"
            f" doubled. Place it on {state_replicas} replicas, or start from"
            f" gravac.init."
        )


def mesh_axis(mesh: Any, axis_name: Any) -> None:
    """Refuse an axis that the mesh does not have."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not set(names) <= set(mesh.axis_names):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh, which has"
            f" {mesh.axis_names}. Give the same name to the mesh, to gravac.transform"
            f" and here."
        )


def divides(batch: Any, replicas: int) -> None:
    """Refuse a batch that cannot be split evenly over the replicas."""
    for path, leaf in _tree.named_leaves(batch):
        if not leaf.shape or leaf.shape[0] % replicas:
            raise ValueError(
                f"the batch cannot be split over {replicas} replicas: {path} has shape"
                f" {leaf.shape}. Its first axis must be a multiple of {replicas}."
            )


def has_transform(found: Sequence[Any], where: str) -> None:
    """Refuse an optimizer state without exactly one gravac state in it."""
    if len(found) != 1:
        raise ValueError(
            f"{where} needs exactly one gravac.transform in the optimizer, found"
            f" {len(found)}. Write optax.chain(gravac.transform(), optax.sgd(0.1))."
        )
