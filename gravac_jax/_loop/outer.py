"""An outer optimizer: it steps on what arrives at the end of each round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _network, _refuse
from gravac_jax._memory.own_optimizer import OwnOptimizerState
from gravac_jax._step.states import is_transform_state


class OuterState(NamedTuple):
    """The state of `outer`.

    Attributes:
      transform: the state of the transform.
      optimizer: the state of the outer optimizer, the same on all replicas.
    """

    transform: Any
    optimizer: Any


def outer(
    transform: optax.GradientTransformation, optimizer: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Return a transform with an optimizer that steps on the mean of each round.

    What arrives is the mean of the steps that replicas made. Its negative, the
    *pseudo-gradient*, is the gradient of `optimizer`. In local steps (`every`)
    nothing arrives, and it stands still. It steps on entries of which nothing arrived,
    too, as in parts that take turns. Own params
    (`gravac.own_params`) and a flush leave it out: both add what is held back as it
    is.

    Args:
      transform: a `gravac.transform` whose memory is `gravac.OwnOptimizer`, of a whole
        optimizer.
      optimizer: any optimizer of Optax, such as `optax.sgd(0.7, 0.9, nesterov=True)`.

    Returns:
      An `optax.GradientTransformationExtraArgs`, in place of the transform.

    Raises:
      TypeError: if one of both is not a transformation of Optax.
      ValueError: from `init`, if `transform` is no `gravac.transform`, or its memory is
        not `gravac.OwnOptimizer`.

    Law:
      `outer(transform, optax.sgd(1.0))` is the transform.

    Example:
      >>> import optax
      >>> import gravac_jax as gravac
      >>> inner = gravac.OwnOptimizer(optax.adamw(1e-3))
      >>> tx = gravac.outer(
      ...     gravac.transform(send=gravac.Bits(2), every=30, memory=inner),
      ...     optax.sgd(0.7, momentum=0.9, nesterov=True),
      ... )

    References:
      Douillard et al., DiLoCo, arXiv 2311.08105; Reddi et al., Adaptive federated
      optimization, ICLR 2021.
    """
    kind, sgd = optax.GradientTransformation, "optax.sgd(0.7, momentum=0.9)"
    _refuse.instance(transform, kind, "transform", "gravac.transform(...)")
    _refuse.instance(optimizer, kind, "optimizer", sgd)
    optimizer = optax.with_extra_args_support(optimizer)
    take_step: Any = optax.with_extra_args_support(transform).update

    def init(params: Any) -> OuterState:
        state: Any = transform.init(params)
        is_one = is_transform_state(state)
        if not is_one or {*map(type, state.local.memory)} != {OwnOptimizerState}:
            got = "a transform with another memory" if is_one else "a chain or the like"
            raise ValueError(
                f"gravac.outer steps on what optimizers made, got {got}: give it"
                f" gravac.transform(memory=gravac.OwnOptimizer(optax.adamw(1e-3)))."
            )
        return OuterState(state, optimizer.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, OuterState]:
        arrived, inner = take_step(updates, state.transform, params, **extra)
        # An outer optimizer is not asked how to deliver, or whether a step exchanges.
        deliver, is_due = extra.pop("deliver", None), extra.pop("is_due", None)
        if deliver is not None and deliver.how:
            return arrived, state._replace(transform=inner)

        still = arrived, state.optimizer  # zeros

        def step() -> tuple[Any, Any]:
            gradients = jax.tree.map(jnp.negative, arrived)
            made = optimizer.update(gradients, state.optimizer, params, **extra)
            # Optimizers in float32 of params in bfloat16 may return float32.
            return optax.tree.cast_like(made, still)

        is_due = is_due if inner.round else True
        has_arrived = inner.info.local_steps == 0 if is_due is None else is_due
        stepped, kept = _network.if_due(has_arrived, step, lambda: still)
        return stepped, OuterState(inner, kept)

    return optax.GradientTransformationExtraArgs(init, update)
