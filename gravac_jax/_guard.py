"""Freeze a whole optimizer on the steps that the transform skips."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _chain_checks, _state


def guard(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Keep params and optimizer as they are when some gradient is not finite.

    `gravac.transform` skips a step whose gradients are not finite on any replica, but
    it can only emit zeros, and an optimizer with momentum or weight decay moves on
    zeros too. Around the whole chain, `guard` emits zero updates then and restores
    every state but the transform's own, whose counters go on.

    Args:
      tx: a chain with exactly one `gravac.transform` in it.

    Returns:
      The same optimizer, guarded; its state is that of `tx`.

    Raises:
      ValueError: by `init` and `update`, if `tx` holds no `gravac.transform`, or more
        than one.

    Cost:
      One select per leaf, which XLA fuses into the optimizer's own pass.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> transform = gravac.transform(axis_name=None, compress=True)
      >>> sgd = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1))
      >>> tx = gravac.guard(optax.chain(transform, sgd))
      >>> params = {"w": jnp.ones(3)}
      >>> bad = {"w": jnp.array([1.0, jnp.nan, 1.0])}
      >>> updates, opt_state = tx.update(bad, tx.init(params), params)
      >>> updates["w"].tolist()
      [0.0, 0.0, 0.0]
      >>> int(optax.tree.get(opt_state, "skipped_steps"))
      1
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        state = tx.init(params)
        _state.check_momentum(state)
        _chain_checks.has_transform(_state.find(state), "gravac.guard")
        return state

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        _chain_checks.has_transform(_state.find(state), "gravac.guard")
        updates, new_state = tx.update(updates, state, params, **extra)
        (transform,) = _state.find(new_state)
        is_finite = transform.info.is_finite

        def restore(new: Any, old: Any) -> Any:
            if _state.is_transform_state(new):
                return new
            return jnp.where(is_finite, new, old)

        updates = jax.tree.map(lambda x: jnp.where(is_finite, x, 0), updates)
        return updates, jax.tree.map(
            restore, new_state, state, is_leaf=_state.is_transform_state
        )

    return optax.GradientTransformationExtraArgs(init, update)
