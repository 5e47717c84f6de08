"""Which optimizers each replica may run for itself, on vectors in place of params."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core


def refuse_masks(optimizer: optax.GradientTransformation) -> None:
    """Refuse an optimizer that treats leaves differently: it would see none."""
    is_mask = lambda x: isinstance(x, optax.MaskedState)
    try:
        state = jax.eval_shape(lambda: optimizer.init(jnp.zeros(1, jnp.float32)))
        has_mask = any(map(is_mask, jax.tree.leaves(state, is_leaf=is_mask)))
    except (ValueError, TypeError):  # a mask that has the form of the params
        has_mask = True
    if has_mask:
        raise ValueError(
            "gravac.Steps cannot run an optimizer with a mask, or one that looks at"
            " the tree of the params: it sees flat vectors of many leaves. For Muon"
            " and others that treat leaves differently, write gravac.Steps(...,"
            " by_leaf=True). Or put what is masked after the transform, as"
            " gravac.adamw(1e-3, mask=...) does with its decay."
        )


def refuse_start(optimizer: optax.GradientTransformation, by_leaf: bool) -> None:
    """Refuse an optimizer that remembers the params that it began with.

    The steps of the other replicas move the params, and it would not know.
    """
    of = lambda x: {"['leaf']": x[None]} if by_leaf else x
    try:
        with jax.ensure_compile_time_eval():
            states = [optimizer.init(of(jnp.full(1, x))) for x in (0.0, 1.0)]
    except (ValueError, TypeError, KeyError):  # one that asks for certain leaves
        return
    pairs = zip(*map(jax.tree.leaves, states), strict=True)
    if any(_are_known_apart(*x) for x in pairs):
        raise ValueError(
            "gravac.Steps cannot run an optimizer that remembers the params that it"
            " began with, as schedule-free ones, Prodigy and COCOB do: the steps of"
            " other replicas move the params, and it would not know. Let it come after"
            " the exchange: optax.chain(gravac.transform(), optimizer), with gradients"
            " at the shared params."
        )


def _are_known_apart(x: Any, y: Any) -> bool:
    """Return whether two arrays have other values, as far as they are known."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if is_key or isinstance(x, core.Tracer):
        return False
    return not np.array_equal(np.asarray(x), np.asarray(y))
