"""An outer optimizer: it steps on what arrives at the end of each round."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _checks
from gravac_jax._controllers.every import ends_round


class OuterState(NamedTuple):
    """The state of `outer`, the same on all replicas.

    Attributes:
      optimizer: the state of the outer optimizer.
      steps: `[]` int32, steps so far.
      local_steps: `[]` int32, steps since the last exchange.
    """

    optimizer: Any
    steps: jax.Array
    local_steps: jax.Array


def outer(
    optimizer: optax.GradientTransformation, steps: int | Callable[[Any], Any]
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that steps on the mean of what replicas made in a round.

    It comes after a `gravac.transform` whose memory is `gravac.Steps` and whose
    controller is `gravac.Every` with the same `steps`. What arrives is the mean of the
    replicas' steps; its negative, the *pseudo-gradient*, is the gradient of
    `optimizer`. In local steps nothing arrives, and it stands still. Own params
    (`gravac.local_params`) and a flush leave it out: both add what is held back as
    it is.

    Args:
      optimizer: any optimizer of Optax, such as `optax.sgd(0.7, 0.9, nesterov=True)`.
      steps: H, as for `gravac.Every`.

    Returns:
      An `optax.GradientTransformationExtraArgs`, whose state is the same everywhere.

    Raises:
      TypeError: if `optimizer` is not a transformation of Optax.
      ValueError: if `steps` is neither a positive integer nor a function.

    Law:
      `outer(optax.sgd(1.0), steps)` changes nothing: it is local SGD.

    Example:
      >>> import optax
      >>> import gravac_jax as gravac
      >>> inner = gravac.Steps(optax.adamw(1e-3))
      >>> tx = optax.chain(
      ...     gravac.transform(
      ...         memory=inner, controller=gravac.Every(30, gravac.Fixed(16))
      ...     ),
      ...     gravac.outer(optax.sgd(0.7, momentum=0.9, nesterov=True), steps=30),
      ... )

    References:
      Douillard et al., DiLoCo, arXiv 2311.08105; Reddi et al., Adaptive federated
      optimization, ICLR 2021.
    """
    example = "optax.sgd(0.7, momentum=0.9, nesterov=True)"
    _checks.component(optimizer, optax.GradientTransformation, "optimizer", example)
    _checks.steps_of_a_round(steps)
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> OuterState:
        zero = jnp.zeros((), jnp.int32)
        return OuterState(optimizer.init(params), zero, jnp.copy(zero))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        deliver: Any = None,
        is_due: bool | jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Any, OuterState]:
        if deliver is not None:
            return updates, state

        def step() -> tuple[Any, Any]:
            gradients = jax.tree.map(jnp.negative, updates)
            return optimizer.update(gradients, state.optimizer, params, **extra)

        if is_due is None:
            is_due = ends_round(steps, state.steps, state.local_steps)
        still = jax.tree.map(jnp.zeros_like, updates), state.optimizer
        if isinstance(is_due, bool):
            updates, inner = step() if is_due else still
        else:
            updates, inner = jax.lax.cond(is_due, step, lambda: still)
        counted = optax.safe_increment(state.steps)
        since = jnp.where(is_due, 0, state.local_steps + 1)
        return updates, OuterState(inner, jnp.asarray(counted), since)

    return optax.GradientTransformationExtraArgs(init, update)
