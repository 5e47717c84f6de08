"""A large batch in parts, of whose gradients only the mean is exchanged."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _step_checks
from gravac_jax._comm import Comm


def over_micro_batches(
    value_and_grad: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    whole: Collection[int],
    micro_batches: int,
    has_aux: bool,
    comm: Comm,
) -> Any:
    """The mean of `value_and_grad` over parts of its arguments, one after the other.

    Args:
      value_and_grad: of the arguments.
      args: by position.
      kwargs: by name.
      whole: which of `args` every part receives whole; all other arguments are split
        along their first axis.
      micro_batches: how many parts.
      has_aux: whether it returns ((value, aux), gradients).
      comm: the other replicas, with whom nothing is exchanged.

    Returns:
      As `value_and_grad`; aux of all parts, stacked along a new first axis.
    """
    split_args = {i: x for i, x in enumerate(args) if i not in whole}
    _step_checks.splits({**split_args, **kwargs}, micro_batches)
    parts = jax.tree.map(
        lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), (split_args, kwargs)
    )

    def part_of(part: Any) -> tuple[Any, Any]:
        mine, named = part
        value, grads = value_and_grad(
            *(mine.get(i, x) for i, x in enumerate(args)), **named
        )
        value, aux = value if has_aux else (value, ())
        return (value, grads), aux

    like, _ = jax.eval_shape(part_of, jax.tree.map(lambda x: x[0], parts))

    def add(total: Any, part: Any) -> tuple[Any, Any]:
        mine, aux = part_of(part)
        return jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total, mine), aux

    zeros = comm.cast(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like))
    total, aux = jax.lax.scan(add, zeros, parts)
    value, grads = jax.tree.map(
        lambda t, x: (t / micro_batches).astype(x.dtype), total, like
    )
    return ((value, aux) if has_aux else value), grads
