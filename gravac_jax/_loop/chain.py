"""Recognise what an optimizer does around the transform in it, and refuse what fails.

Where the optimizer is at hand it is traced. A state alone shows less: there, a state of
Optax that holds whole arrays is taken to remember gradients, and wrappers are known by
their names.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _refuse, _state
from gravac_jax._encodings import Bits, Dense
from gravac_jax._memory.momentum import MomentumState
from gravac_jax._outer import OuterState
from gravac_jax._state import (
    Round,
    TransformState,
    is_transform_state,
    placed_replicas,
    transform_states,
)

# They keep gradients, or decide by them, before the optimizer inside sees them.
_WRAPPERS = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
)

_MOMENTA = (MomentumState, optax.TraceState)

# With these, momentum should come before an exchange in rounds.
_WHOLE = frozenset(
    _state.names([Dense(), Dense("bfloat16"), Bits(8), Bits(4)]).tolist()
)


def the_transform(state: Any, caller: str) -> TransformState:
    """Return the one transform state in `state`; refuse none, or several."""
    if hasattr(state, "tx") and hasattr(state, "opt_state"):
        raise TypeError(
            f"{caller} takes the state of an optimizer, got {type(state).__name__}:"
            f" pass nnx.as_pure(optimizer.opt_state), or train_state.opt_state."
        )
    found = transform_states(state)
    if len(found) != 1:
        raise ValueError(
            f"{caller} needs exactly one gravac.transform in the optimizer, found"
            f" {len(found)}: write optax.chain(gravac.transform(), optax.sgd(0.1)), or"
            f" gravac.adamw(1e-3)."
        )
    _refuse.pure(found[0].steps)
    return found[0]


def checked(
    tx: optax.GradientTransformation, caller: str
) -> optax.GradientTransformationExtraArgs:
    """Return `tx`, whose `init` refuses an optimizer without a transform at work."""
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        state = tx.init(params)
        check_momentum(state)
        the_transform(state, caller)
        return state

    return optax.GradientTransformationExtraArgs(init, tx.update)


def waits(state: Any) -> bool:
    """Return whether steps wait in the memory before other replicas hear of them."""
    return bool(the_transform(state, "gravac.train_step").local.told)


def is_linear(tx: Any, params: Any, opt_state: Any, **extra: Any) -> bool:
    """Return whether what stands around the transform is linear in the updates.

    It is traced, with a transform that hands on what it is given. What is linear has a
    derivative that does not depend on the updates; a sign has none.
    """
    tx = optax.with_extra_args_support(tx)

    def jvp(x: Any, dx: Any, state: Any, params: Any) -> Any:
        around = lambda x: tx.update(x, state, params, deliver="probe", **extra)[0]
        return jax.jvp(around, (x,), (dx,))

    def traced(shape: Callable[[Any], tuple[int, ...]]) -> Any:
        like = lambda x: jax.ShapeDtypeStruct(shape(x), jnp.result_type(x))
        update = lambda x: jax.ShapeDtypeStruct(shape(x), jnp.float32)
        updates = jax.tree.map(update, params)
        given = jax.tree.map(like, (opt_state, params))
        return jax.make_jaxpr(jvp)(updates, updates, *given).jaxpr

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:  # on single entries, as JAX traces functions of one shape once
            jaxpr = traced(lambda x: (1,) * jnp.ndim(x))
        except (TypeError, ValueError):  # from an optimizer that knows its shapes
            jaxpr = traced(jnp.shape)
    n, m = len(jax.tree.leaves(params)), len(jaxpr.outvars) // 2
    others = [False] * (len(jaxpr.invars) - 2 * n)
    of_x = _refuse.reached(jaxpr, [True] * n + [False] * n + others)
    of_dx = _refuse.reached(jaxpr, [False] * n + [True] * n + others)
    has_none = map(lambda x, dx: x and not dx, of_x[:m], of_dx[m:])
    return not any(of_x[m:]) and not any(has_none)


def check_momentum(state: Any) -> None:
    """Refuse an optimizer with a momentum beside the one in its transform's memory."""
    for ours in transform_states(state):
        axes = 0 if placed_replicas(ours.local) is None else 1
        others = []
        if _instances(ours.local.memory, _MOMENTA):
            # An Adam may be one without a first moment, which its state does not tell.
            others = _instances(state, optax.TraceState)
        elif _remembering(ours.local.memory, axes):
            others = _remembering(state)
        if others:
            raise ValueError(
                f"the optimizer after gravac.transform keeps a momentum of its own, got"
                f" {type(others[0]).__name__} after a memory that has one: keep one, as"
                f" in optax.chain(gravac.transform(memory=gravac.Momentum()),"
                f" optax.sgd(0.1))."
            )


def warn_of_late_momentum(state: Any) -> None:
    """Warn about rounds of nearly whole gradients with momentum after the exchange.

    In rounds of 8 whole gradients a step was worth 0.45 dense steps, and 0.82 with
    momentum before the exchange; in two bits and one there was no such difference
    (docs/results.md).
    """
    in_rounds = [x for x in transform_states(state) if isinstance(x.round, Round)]
    is_whole = any(int(x.ladder[0]) in _WHOLE for x in in_rounds)
    if is_whole and _instances(state, optax.TraceState):
        warnings.warn(
            "momentum comes after an exchange in rounds: with whole gradients a step in"
            " rounds of 8 was worth 0.45 dense steps, and 0.82 with momentum before the"
            " exchange, as in gravac.sgd(0.1) and"
            " memory=gravac.OwnOptimizer(optax.sgd(0.1, momentum=0.9)).",
            stacklevel=4,
        )


def check_chains(tree: Any) -> None:
    """Refuse any optimizer in `tree` that is put together wrongly."""
    for wrapper in _instances(tree, _WRAPPERS):
        if transform_states(wrapper):
            raise ValueError(
                f"gravac.transform is inside an"
                f" optax.{type(wrapper).__name__.removesuffix('State')}, which sees"
                f" each replica's own gradients: put it around what comes after the"
                f" transform, or use gravac.value_and_grad(loss, micro_batches=...), or"
                f" gravac.guard for gradients that are not finite."
            )

    for sam in _instances(tree, optax.contrib.SAMState):
        if sam.cache is not None and transform_states(sam):
            raise ValueError(
                "gravac.transform is inside an optax.contrib.sam that moves the params"
                " by each replica's own gradients: give it opaque_mode=True, and pass"
                " tx.update(..., grad_fn=lambda params, _: grad(params, batch)[1])."
            )

    def is_chain(x: Any) -> bool:
        parts = x.values() if isinstance(x, dict) else x if type(x) is tuple else ()
        return any(map(_is_transform, parts))

    for chain in filter(is_chain, jax.tree.leaves(tree, is_leaf=is_chain)):
        check_momentum(chain)
        if type(chain) is tuple:
            _check_order(chain)


def _check_order(chain: tuple[Any, ...]) -> None:
    """Refuse a chain in which something that remembers gradients comes first."""
    at = [_is_transform(part) for part in chain].index(True)
    for before in _remembering(chain[:at]):
        raise ValueError(
            f"gravac.transform comes after a {type(before).__name__}, which remembers"
            f" each replica's own gradients: put it first, as in optax.chain("
            f"gravac.transform(), optax.sgd(0.1, momentum=0.9)), or use"
            f" gravac.adamw(1e-3)."
        )


def _is_transform(x: Any) -> bool:
    return is_transform_state(x) or isinstance(x, OuterState)


def _instances(tree: Any, kind: Any) -> list[Any]:
    """Return every instance of a class, or of several classes, in `tree`."""
    return _found(tree, lambda x: isinstance(x, kind))


def _remembering(tree: Any, axes: int = 0) -> list[Any]:
    """Return every state of Optax in `tree` with arrays of more than `axes` axes."""
    is_float = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
    is_array = lambda x: jnp.ndim(x) > axes and is_float(x)
    of_optax = lambda x: type(x).__module__.startswith("optax.")
    # What wraps a transform, such as optax.inject_hyperparams, holds its arrays, too.
    states = _found(tree, lambda x: of_optax(x) and not transform_states(x))
    return [x for x in states if any(map(is_array, jax.tree.leaves(x)))]


def _found(tree: Any, is_wanted: Callable[[Any], bool]) -> list[Any]:
    """Return what is wanted in `tree`.

    The optimizer inside a transform's memory is not one of the chain's, nor is an outer
    one: what is held back does not pass through either.
    """
    is_leaf = lambda x: is_wanted(x) or _is_transform(x)
    return list(filter(is_wanted, jax.tree.leaves(tree, is_leaf=is_leaf)))
