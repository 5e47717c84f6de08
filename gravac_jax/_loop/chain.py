"""Recognise what an optimizer does around the transform in it, and refuse what fails.

Where the optimizer is at hand it is traced. A state alone shows less: there, a state of
Optax that holds whole arrays is taken to remember gradients, and wrappers are known by
their names.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _arrays, _refuse
from gravac_jax._encodings.base import LARGE
from gravac_jax._loop.outer import OuterState
from gravac_jax._memory.momentum import MomentumState
from gravac_jax._step import states
from gravac_jax._step.states import TransformState, transform_states
from gravac_jax._step.update import Delivery

# They keep gradients, or decide or step by them, before the optimizer inside sees them.
_WRAPPERS = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
    optax.contrib.SAMState,
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
            f"{caller} needs one gravac.transform in the optimizer, found {len(found)}:"
            f" write optax.chain(gravac.transform(), optax.sgd(0.1))."
        )
    _refuse.pure(found[0].steps)
    return found[0]


def ask(tx: Any, asked: Delivery, *given: Any, **extra: Any) -> Any:
    """Return `tx.update(*given)` of a delivery; refuse what would take a step."""
    found, why = None, None
    try:
        found = optax.with_extra_args_support(tx).update(*given, deliver=asked, **extra)
    except Exception as error:
        if asked.components:
            raise
        why = error
    if not asked.components:
        raise ValueError(
            f"a wrapper drops arguments of `update`, got {type(given[1]).__name__}, so"
            f" that gravac.transform would take a step in place of a delivery: put it"
            f" around what comes after the transform, or hand on **extra, as"
            f" optax.GradientTransformationExtraArgs do. It said: {why}"
        ) from why
    return found


def is_linear(tx: Any, params: Any, opt_state: Any, **extra: Any) -> bool:
    """Return whether what comes after the transform is linear in the updates.

    It is traced, with a transform that hands on a share of what it is given. What is
    linear has a derivative by the share that does not depend on it; a sign has none.
    """

    def jvp(share: Any, dshare: Any, *given: Any) -> Any:
        after = lambda x: ask(tx, Delivery("identity", x), *given, **extra)[0]
        return jax.jvp(after, (share,), (dshare,))

    like = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    state, params = jax.tree.map(like, (opt_state, params))
    updates = jax.tree.map(lambda x: x.update(dtype=jnp.float32), params)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        jaxpr = jax.make_jaxpr(jvp)(1.0, 1.0, updates, state, params).jaxpr
    others, half = [False] * (len(jaxpr.invars) - 2), len(jaxpr.outvars) // 2
    of_share = _refuse.reached(jaxpr, [True, False, *others])
    of_dshare = _refuse.reached(jaxpr, [False, True, *others])
    has_none = map(lambda x, dx: x and not dx, of_share[:half], of_dshare[half:])
    return not any(of_share[half:]) and not any(has_none)


def gradients_at(tx: Any, params: Any, opt_state: Any) -> str:
    """Return at which params gradients should be taken, "own" or "shared".

    Warn of what is not linear, such as Adam, after an exchange of few bits.
    """
    # What waits needs own params, and says so where it cannot.
    local = the_transform(opt_state, "gravac.train_step").local
    if local.told or is_linear(tx, params, opt_state, value=-jnp.inf):
        return "own"
    asked = Delivery("identity")
    look = lambda *given: ask(tx, asked, *given, value=-jnp.inf)
    jax.eval_shape(look, params, opt_state, params)
    ours: Any = asked.components
    coarsest = ours.controller.ladder[max(ours.controller.reach(False))]
    # Two bits cost Lion 0.5% of the loss, and whatever sends less was not tried.
    few = 2 if {*map(type, _remembering(opt_state))} == {optax.ScaleByLionState} else 3
    is_coarse = coarsest.traffic(LARGE, 2).bits < few * LARGE.n
    if is_coarse and not ours.memory.is_at_own_params:
        _refuse.warn(
            f"what follows gravac.transform is not linear (Adam, clips, MultiSteps) and"
            f" sees what {coarsest!r} sends, so that the loss ends higher: in its place"
            f" take gravac.adamw, transform(clip=...), micro_batches=2, or Bits(8)."
        )
    return "shared"


def warn_if_held_up(opt_state: Any) -> None:
    """Warn that what is delivered waits for a later step of the optimizer."""
    if _instances(opt_state, optax.MultiStepsState):
        _refuse.warn(
            "optax.MultiSteps keeps what gravac.flush delivers for a step of its own:"
            " in its place take gravac.train_step(..., micro_batches=...)."
        )


def check_momentum(state: Any) -> None:
    """Refuse an optimizer with a momentum beside the one in its transform's memory."""
    for ours in transform_states(state):
        axes = 0 if states.placed_replicas(ours.local) is None else 1
        others = []
        if _instances(ours.local.memory, (MomentumState, optax.TraceState)):
            # An Adam may be one without a first moment, which its state does not tell.
            others = _instances(state, optax.TraceState)
        elif _remembering(ours.local.memory, axes):
            others = _remembering(state)
        if others:
            raise ValueError(
                f"what follows gravac.transform keeps a momentum of its own, got"
                f" {type(others[0]).__name__} after a memory that has one: keep one,"
                f" gravac.transform(memory=gravac.Momentum()) before optax.sgd(0.1)."
            )


def check_chains(tree: Any) -> None:
    """Refuse any optimizer in `tree` that is put together wrongly."""
    for around in _instances(tree, _WRAPPERS):
        # In opaque mode optax.contrib.sam has no cache, and asks for gradients itself.
        if transform_states(around) and getattr(around, "cache", around) is not None:
            raise ValueError(
                f"gravac.transform is inside an"
                f" optax.{type(around).__name__.removesuffix('State')}, which sees each"
                f" replica's own gradients: put it around what comes after the"
                f" transform, or take gravac.value_and_grad(loss, micro_batches=...) in"
                f" place of optax.MultiSteps, and gravac.guard of apply_if_finite; give"
                f" optax.contrib.sam opaque_mode=True, and pass tx.update(...,"
                f" grad_fn=lambda params, _: grad(params, batch)[1])."
            )

    def is_chain(x: Any) -> bool:
        parts = x.values() if isinstance(x, dict) else x if type(x) is tuple else ()
        return any(map(_is_transform, parts))

    for chain in filter(is_chain, jax.tree.leaves(tree, is_leaf=is_chain)):
        check_momentum(chain)
        at = list(map(_is_transform, chain)).index(True) if type(chain) is tuple else 0
        for before in _remembering(chain[:at]) if at else ():
            raise ValueError(
                f"gravac.transform comes after a {type(before).__name__}, which"
                f" remembers a replica's own gradients: put it first, or use"
                f" gravac.adamw(1e-3) or gravac.sgd(0.1)."
            )


def _is_transform(x: Any) -> bool:
    return states.is_transform_state(x) or isinstance(x, OuterState)


def _instances(tree: Any, kind: Any) -> list[Any]:
    """Return every instance of a class, or of several classes, in `tree`."""
    return _found(tree, lambda x: isinstance(x, kind))


def _remembering(tree: Any, axes: int = 0) -> list[Any]:
    """Return every state of Optax in `tree` with arrays of more than `axes` axes."""
    is_array = lambda x: jnp.ndim(x) > axes and _arrays.is_float(x)
    of_optax = lambda x: type(x).__module__.startswith("optax.")
    # What wraps a transform, such as optax.inject_hyperparams, holds its arrays, too.
    found = _found(tree, lambda x: of_optax(x) and not transform_states(x))
    return [x for x in found if any(map(is_array, jax.tree.leaves(x)))]


def _found(tree: Any, is_wanted: Callable[[Any], bool]) -> list[Any]:
    """Return what is wanted in `tree`.

    The optimizer inside a transform's memory is not one of the chain's, nor is an outer
    one: what is held back does not pass through either.
    """
    is_leaf = lambda x: is_wanted(x) or _is_transform(x)
    return list(filter(is_wanted, jax.tree.leaves(tree, is_leaf=is_leaf)))
