"""Which optimizers each replica may run for itself, on vectors in place of params."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core

from gravac_jax import _refuse


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
            "gravac.OwnOptimizer runs its optimizer on flat vectors of many leaves, got"
            " one that looks at the tree of the params: For Muon and others of its kind"
            " write gravac.OwnOptimizer(..., by_leaf=True), or put what is masked after"
            " the transform."
        )


def refuse_start(optimizer: optax.GradientTransformation, by_leaf: bool) -> None:
    """Refuse an optimizer that remembers the params that it began with.

    The steps of the other replicas move the params, and it would not know.
    """
    of = lambda x: {"['leaf']": x[None]} if by_leaf else x
    begun = lambda x: optimizer.init(of(x))
    try:
        # Hardly any optimizer is run for this: jax.distributed.initialize, which may
        # come later, wants to be called before any program runs.
        remembers = _reads_params(begun) and _remembers(begun)
    except (ValueError, TypeError, KeyError):  # one that asks for certain leaves
        return
    if remembers:
        raise ValueError(
            "gravac.OwnOptimizer needs an optimizer of gradients alone, got one that"
            " remembers the params that it began with: let it come after the exchange,"
            " optax.chain(gravac.transform(), optimizer), with gradients at the shared"
            " params."
        )


def _reads_params(begun: Callable[[jax.Array], Any]) -> bool:
    """Return whether something that is computed from params is in the state."""
    traced = jax.make_jaxpr(begun)(jax.ShapeDtypeStruct((1,), jnp.float32)).jaxpr
    return any(_refuse.reached(traced, [True]))


def _remembers(begun: Callable[[jax.Array], Any]) -> bool:
    """Return whether the state of other params is another one."""
    with jax.ensure_compile_time_eval():
        states = [begun(jnp.full(1, x)) for x in (0.0, 1.0)]
    return any(
        not np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)
        for x, y in zip(*map(jax.tree.leaves, states), strict=True)
        if not isinstance(x, core.Tracer)
        and not jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)
    )
