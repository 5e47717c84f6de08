"""Is an optimizer put together so that the transform in it can work?

These checks run when an optimizer's state is made, placed or asked for. They look for
states of Optax that remember or rescale gradients in a place where they must not.
"""

import warnings
from typing import Any

import jax
import optax

from gravac_jax import _state, _step_checks
from gravac_jax._encodings import Bits, Dense
from gravac_jax._error_feedback.momentum import MomentumState
from gravac_jax._outer import OuterState
from gravac_jax._state import (
    Round,
    TransformState,
    is_transform_state,
    transform_states,
)

# Their steps are not linear in the updates. Of some, such as sign SGD, LARS,
# optax.contrib.normalize and clips, the state does not tell.
_NORMALIZED = (
    optax.FactoredState,  # Adafactor
    optax.ScaleByAdaDeltaState,
    optax.ScaleByAdamState,
    optax.ScaleByAdanState,
    optax.ScaleByAmsgradState,
    optax.ScaleByBeliefState,
    optax.ScaleByLBFGSState,
    optax.ScaleByLionState,
    optax.ScaleByNovogradState,
    optax.ScaleByRmsState,
    optax.ScaleByRpropState,
    optax.ScaleByRssState,  # Adagrad
    optax.ScaleByRStdDevState,
    optax.ScaleBySM3State,
    optax.contrib.COCOBState,
    optax.contrib.DAdaptAdamWState,
    optax.contrib.DoGState,
    optax.contrib.DoWGState,
    optax.contrib.MadgradState,
    optax.contrib.MomoAdamState,
    optax.contrib.MomoState,
    optax.contrib.MuonState,
    optax.contrib.ProdigyState,
    optax.contrib.ScaleByAdemamixState,
    optax.contrib.ScaleBySimplifiedAdEMAMixState,
    optax.contrib.SophiaState,
)

# Theirs are not linear either, and their own state has no average of gradients.
_RESCALED = (
    optax.ScaleByBacktrackingLinesearchState,
    optax.ScaleByZoomLinesearchState,
    optax.contrib.MechanicState,
)

_REMEMBERING = (optax.TraceState, optax.EmaState, *_NORMALIZED)

# They keep gradients, or decide by them, before the optimizer inside sees them.
_WRAPPERS = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
)

_NOT_LINEAR = (*_NORMALIZED, *_RESCALED, *_WRAPPERS)

# With these, momentum should come before an exchange in rounds.
_WHOLE = frozenset(
    _state.names([Dense(), Dense("bfloat16"), Bits(8), Bits(4)]).tolist()
)

# What a memory keeps, and states of Optax that would keep the same after it. An Adam
# after momentum is one without a first moment of its own, as far as can be seen.
_TWICE = (
    ((MomentumState, optax.TraceState), optax.TraceState),
    (_NORMALIZED, (optax.TraceState, *_NORMALIZED)),
)


def the_transform(state: Any, caller: str) -> TransformState:
    """Return the one transform state in `state`; refuse none, or several."""
    if hasattr(state, "tx") and hasattr(state, "opt_state"):
        raise TypeError(
            f"{caller} takes the state of an optimizer, got {type(state).__name__}:"
            f" pass nnx.as_pure(optimizer.opt_state) of an nnx.Optimizer, and"
            f" train_state.opt_state of a linen TrainState."
        )
    found = transform_states(state)
    if len(found) != 1:
        raise ValueError(
            f"{caller} needs exactly one gravac.transform in the optimizer, found"
            f" {len(found)}. For SGD write optax.chain(gravac.transform(),"
            f" optax.sgd(0.1)), for Adam gravac.adamw(1e-3)."
        )
    _step_checks.update.is_pure(found[0].steps)
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


def is_linear(state: Any) -> bool:
    """Return whether no optimizer is known not to be linear in its updates."""
    return not _instances(state, _NOT_LINEAR)


def check_linear(state: Any) -> None:
    """Refuse an optimizer that is known not to be linear in its updates."""
    for x in _instances(state, _NOT_LINEAR):
        raise ValueError(
            f"gravac.own_params needs an optimizer that is linear in the updates,"
            f" found a {type(x).__name__}: its step on what is held back, taken now,"
            f" differs from the one that it will take. Let each replica run its own"
            f" optimizer before the exchange: gravac.adamw(1e-3), or"
            f" memory=gravac.Steps(optax.adam(1e-3)) and nothing after the transform."
            f" Or take gradients at the shared params."
        )


def check_momentum(state: Any) -> None:
    """Refuse an optimizer with a momentum beside the one in its transform's memory."""
    memories = [x for ours in transform_states(state) for x in ours.local.memory]
    for kept, same in _TWICE:
        mine, others = _instances(memories, kept), _instances(state, same)
        if mine and others:
            raise ValueError(
                f"the optimizer after gravac.transform keeps a momentum of its own, in"
                f" its {type(others[0]).__name__}, and so does the transform's memory,"
                f" in its {type(mine[0]).__name__}: gradients would be averaged over"
                f" time twice. Keep one: optax.chain(gravac.transform("
                f"memory=gravac.Momentum()), optax.sgd(0.1)), without `momentum` in"
                f" optax.sgd; after gravac.Steps(optax.adam(1e-3)) nothing."
            )


def warn_of_late_momentum(state: Any) -> None:
    """Warn about rounds of nearly whole gradients with momentum after the exchange.

    In rounds of 8 whole gradients a step was worth 0.45 dense steps, and 0.82 with
    momentum before the exchange; in two bits and one there was no such difference
    (examples/benchmarks/records/2026-11-25_progress).
    """
    in_rounds = [x for x in transform_states(state) if isinstance(x.round, Round)]
    is_whole = any(int(x.ladder[0]) in _WHOLE for x in in_rounds)
    if is_whole and _instances(state, optax.TraceState):
        warnings.warn(
            "momentum comes after an exchange in rounds: with whole gradients a step in"
            " rounds of 8 was worth 0.45 dense steps, and 0.82 with momentum before the"
            " exchange. Keep it there: gravac.sgd(0.1), gravac.adamw(1e-3), or"
            " memory=gravac.Steps(optax.sgd(0.1, momentum=0.9)) and nothing after the"
            " transform.",
            stacklevel=4,
        )


def check_chains(tree: Any) -> None:
    """Refuse any optimizer in `tree` that is put together wrongly."""
    for wrapper in _instances(tree, _WRAPPERS):
        if transform_states(wrapper):
            raise ValueError(
                f"gravac.transform is inside an"
                f" optax.{type(wrapper).__name__.removesuffix('State')}, which keeps"
                f" each replica's own gradients, or decides by them, as if they were"
                f" the same on all. Put it around what comes after the transform. To"
                f" accumulate, use gravac.value_and_grad(loss, micro_batches=...); for"
                f" gradients that are not finite, gravac.guard around the whole chain."
            )

    for sam in _instances(tree, optax.contrib.SAMState):
        if sam.cache is not None and transform_states(sam):
            raise ValueError(
                "gravac.transform is inside an optax.contrib.sam that moves the params"
                " by each replica's own gradients, so that replicas would differ. Give"
                " it opaque_mode=True, and pass tx.update(grads, opt_state, params,"
                " grad_fn=lambda params, _: grad(params, batch)[1]), where grad is a"
                " gravac.value_and_grad: then no replica's params are changed."
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
    for before in _instances(chain[:at], _REMEMBERING):
        raise ValueError(
            f"gravac.transform comes after a {type(before).__name__} in the chain,"
            f" which would remember each replica's own gradients as if they were the"
            f" same on all. Put it first: optax.chain(gravac.transform(),"
            f" optax.sgd(0.1, momentum=0.9)). For momentum or Adam of each replica's"
            f" own use gravac.transform(memory=gravac.Momentum()) or"
            f" gravac.adamw(1e-3)."
        )


def _is_transform(x: Any) -> bool:
    return is_transform_state(x) or isinstance(x, OuterState)


def _instances(tree: Any, kind: Any) -> list[Any]:
    """Return every instance of a class, or of several classes, in `tree`.

    The optimizer inside a transform's memory is not one of the chain's, nor is an outer
    one: what is held back does not pass through either.
    """
    is_leaf = lambda x: isinstance(x, kind) or _is_transform(x)
    found = jax.tree.leaves(tree, is_leaf=is_leaf)
    return [x for x in found if isinstance(x, kind)]
