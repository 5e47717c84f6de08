"""The function that is differentiated."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _arrays


def is_loss(value: Any) -> None:
    """Refuse a loss that is not one number."""
    is_array = jax.tree_util.all_leaves([value])
    if not is_array or jnp.shape(value) != ():
        got = f"shape {jnp.shape(value)}" if is_array else f"a {type(value).__name__}"
        raise TypeError(
            f"the loss must be one number, got {got}. Return its mean over the"
            f" batch; if the function returns (loss, aux), say has_aux=True."
        )


def with_aux(out: Any) -> tuple[Any, Any]:
    """Return (loss, aux); refuse anything else."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"has_aux=True is for a function that returns (loss, aux), got"
            f" {_arrays.brief(out)}."
        )
    return out


def positional(args: Sequence[Any], argnums: Sequence[int]) -> None:
    """Refuse to differentiate an argument that was not given by position."""
    if any(not -len(args) <= i < len(args) for i in argnums):
        raise TypeError(
            f"value_and_grad differentiates the arguments {tuple(argnums)}, counted by"
            f" position, got {len(args)} positional arguments. Pass them by position,"
            f" not by name."
        )


def splits(arguments: dict[Any, Any], micro_batches: int) -> None:
    """Refuse a batch that does not divide into micro-batches."""
    for name, argument in arguments.items():
        for path, leaf in _arrays.named_leaves(argument):
            shape = jnp.shape(leaf)
            if not shape or shape[0] % micro_batches:
                raise ValueError(
                    f"micro_batches={micro_batches} does not divide the first axis of"
                    f" argument {name!r} ({path}), of shape {shape}. Arguments that are"
                    f" not differentiated are the batch, and split along it: choose a"
                    f" divisor of its rows. Close over arguments without rows. Give one"
                    f" random key for each row."
                )


def leaves_arguments(before: Any, after: Any) -> None:
    """Refuse a loss that changes its arguments, which are copies."""
    old, new = _arrays.named_leaves(before), _arrays.named_leaves(after)
    changed = [path for (path, x), (_, y) in zip(old, new, strict=False) if x is not y]
    if changed or len(old) != len(new):
        raise ValueError(
            f"the loss changes its arguments, at {changed or 'new leaves'}: it sees a"
            f" copy, and the change would be lost. Return it, with has_aux=True. For an"
            f" nnx model use gravac.nnx_value_and_grad, which writes changes back."
        )
