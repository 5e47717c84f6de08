"""What the transform is given: params, gradients, its state and figures."""

import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _arrays


def scalar(value: Any, default: Any, dtype: Any, name: str) -> jax.Array:
    """Return `value`, or `default` for None, as a `[]` array of `dtype`."""
    array = jnp.asarray(default if value is None else value)
    if array.shape != ():
        raise ValueError(
            f"`{name}` must be a single number on each replica, got shape"
            f" {array.shape}. Pass this replica's number, or None if it is unknown."
        )
    return array.astype(dtype)


def bound_axis(axis_name: Any, caller: str) -> None:
    """Refuse a call outside the axis that the components were built for."""
    try:
        _ = axis_name is None or jax.lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"`{caller}` was called outside axis_name={axis_name!r} ({error}). Call it"
            f" inside shard_map, pmap or vmap over that axis, as gravac.data_parallel"
            f" does, and give the name that your mesh has. Under a plain jit with"
            f" sharding annotations XLA has averaged the gradients already, and there"
            f" is nothing left to compress. To run on one device alone pass"
            f" axis_name=None."
        ) from None


def path_and_leaf(compress: Callable[..., Any]) -> None:
    """Refuse a function that does not take a path and a leaf."""
    try:
        signature = inspect.signature(compress)
    except ValueError:  # of a builtin
        return
    try:
        signature.bind("['w']", None)
    except TypeError:
        raise TypeError(
            f"`compress` must be a function of (path, leaf), such as lambda path, leaf:"
            f" leaf.ndim == 2, got one of {signature}."
        ) from None


def mask_matches(mask: Any, tree: Any) -> None:
    """Refuse a `compress` mask of another structure than the params."""
    is_bool = all(isinstance(leaf, bool) for leaf in jax.tree.leaves(mask))
    if not is_bool or jax.tree.structure(mask) != jax.tree.structure(tree):
        raise ValueError(
            f"`compress` must be a bool, a function of (path, leaf), or a pytree of"
            f" bools of the params' own structure, got {_arrays.brief(mask)} for"
            f" {jax.tree.structure(tree)}. With nnx, write a function."
        )


def gradients(tree: Any, name: str = "gradients") -> None:
    """Refuse leaves that are not real floating-point arrays."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    for path, leaf in _arrays.named_leaves(tree, is_masked):
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
            make = " Make it an array with jnp.asarray."
            raise TypeError(
                f"the {name} must be real floating-point arrays, got"
                f" {dtype or type(leaf).__name__} at {path}."
                f"{make if isinstance(leaf, float) else ''} Differentiate with respect"
                f" to the float params only, and keep counters, keys and complex"
                f" params out of what the optimizer sees. Of an nnx model with dropout,"
                f" batch statistics or counters gravac.nnx_value_and_grad takes the"
                f" gradients of its nnx.Param variables."
            )


def still_local(path: str, missing: Sequence[str]) -> None:
    """Refuse gradients that were summed over the axis before."""
    raise ValueError(
        f"the gradient at {path} does not vary over {tuple(missing)}: it was summed"
        f" over the replicas before gravac saw it, so there is nothing left to"
        f" compress. Remove any jax.lax.pmean of gradients, and take them with"
        f" gravac.value_and_grad(loss, axis_name): under shard_map jax.grad and"
        f" nnx.grad add them up by themselves for replicated params. (For an nnx model"
        f" that changes while it computes, gravac.nnx_value_and_grad.)"
        f" optax.MultiSteps and optax.apply_if_finite around the transform raise this"
        f" error, too: put them around what comes after it. So does a second transform"
        f" in the chain: one is enough."
    )


def params_given(params: Any, name: str) -> None:
    """Refuse an update without the params that `name` needs."""
    if params is None:
        raise ValueError(
            f"gravac.transform({name}=...) uses the params, and `update` was given"
            f" none: pass them, tx.update(grads, opt_state, params)."
        )


def no_state(received: Any) -> None:
    """Refuse what is not the state of a transform."""
    raise ValueError(
        f"`update` was given a {type(received).__name__} in place of the transform's"
        f" state: write tx.update(grads, opt_state, params), in this order, with the"
        f" state of this tx. If its chain has changed, call init again."
    )


def is_pure(steps: Any) -> None:
    """Refuse a state whose arrays are wrapped in variables of Flax NNX."""
    if not jax.tree_util.all_leaves([steps]):
        raise TypeError(
            f"the optimizer state holds nnx variables in place of arrays, got"
            f" {type(steps).__name__}: pass nnx.as_pure(optimizer.opt_state)."
        )


def state_matches(received: Any, expected: Any) -> None:
    """Refuse a state that was made for other params, or with other components."""
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    if shapes(received) != shapes(expected):
        had, need = (
            {path: jnp.shape(x) for path, x in _arrays.named_leaves(tree)}
            for tree in (received, expected)
        )
        for path in [path for path in had if need.get(path) == had[path]]:
            del had[path], need[path]
        raise ValueError(
            f"the state does not fit the gradients: it holds {had} where these"
            f" gradients and components need {need}. The params changed structure, or"
            f" the transform was built with other components: call init again. An axis"
            f" of replicas longer than 1 means that the state was placed, but the step"
            f" does not run under shard_map with gravac.state_specs, as"
            f" gravac.data_parallel does."
        )


def comparable(tree: Any) -> None:
    """Refuse leaves whose bits cannot be compared or sent."""
    for path, leaf in _arrays.named_leaves(tree):
        if jnp.iscomplexobj(leaf):
            raise TypeError(
                f"the leaf at {path} is complex, and its bits cannot be compared or"
                f" sent: pass its real and imaginary parts."
            )


def warn_of_guess(controller: Any) -> None:
    """Warn that a controller chooses for a network that nobody named."""
    warnings.warn(
        f"{type(controller).__name__} is told no step times, and chooses for a guess:"
        f" 10 ms of computation a step and a network of 1 Gbit/s. gravac.train_step"
        f" measures them. In a step of your own pass what gravac.StepClock measures to"
        f" tx.update(..., step_seconds=...), or say what your network can do:"
        f" gravac.transform(network=gravac.WireCost(...)), or what the probe found"
        f" there.",
        stacklevel=2,
    )


def known_rung(rung: Any, rungs: int) -> None:
    """Raise if a rung that a caller knows is not on the ladder."""
    is_number = isinstance(rung, int) and not isinstance(rung, bool)
    if not (is_number and 0 <= rung < rungs):
        raise ValueError(
            f"rung must be a number of the ladder, static: 0 to {rungs - 1}, got"
            f" {rung!r}."
        )


def bytes_fall(
    encodings: Sequence[Any], wire_bytes: Sequence[float], replicas: int, n: int
) -> None:
    """Refuse a ladder on which some encoding sends more than the one before it."""
    if any(low < high for low, high in itertools.pairwise(wire_bytes)):
        rows = zip(encodings, wire_bytes, strict=True)
        table = "".join(f"\n  {x!r:<28} {sent:14,.0f}" for x, sent in rows)
        raise ValueError(
            f"a ladder goes from the encoding that sends most to the one that sends"
            f" least, and this one does not, in bytes that each of {replicas} replicas"
            f" sends in a step of {n:,} entries:{table}\nPut the encodings in the"
            f" order of their bytes, or leave one out."
        )


def holds_all(sizes: tuple[int, ...], entries: tuple[int, ...]) -> None:
    """Raise if an encoding of a user's own asks for buckets that are too small."""
    if any(size < filled for size, filled in zip(sizes, entries, strict=True)):
        raise ValueError(
            f"`padded_size` of the encoding returned {list(sizes)} for"
            f" {list(entries)} entries: return as many or more."
        )
