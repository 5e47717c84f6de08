"""Skip a step on all replicas when the gradient of one is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _arrays, _refuse
from gravac_jax._loop import chain
from gravac_jax._memory.own_optimizer import OwnOptimizerState
from gravac_jax._step.states import is_transform_state


def guard(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skip a step on all replicas when the gradient of one is not finite.

    Without it, a replica whose gradient is not finite leaves that gradient out, and the
    others go on. With `guard` around the whole chain, all updates of such a step are
    zero and every state stays as it is, but for what the transform counts and reports.
    That suits a loss scale, and an optimizer that must not move when all gradients are
    bad: momentum and weight decay move on zeros, too. With a delay or rounds,
    replicas hear of a gradient too late: `guard` then does nothing, and warns.

    Args:
      tx: a chain with exactly one `gravac.transform` in it.

    Returns:
      The same optimizer, guarded; its state is that of `tx`.

    Raises:
      TypeError: if `tx` is no optimizer of Optax.
      ValueError: by `init` and `update`, if `tx` holds no `gravac.transform`, or more
        than one; by `init`, if there are two momentums.

    Cost:
      One select per leaf of the state, and as much memory as the state takes: the old
      one is kept until the exchange is over.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> transform = gravac.transform(
      ...     axis_name=None, send=gravac.TopK(2), compress=True
      ... )
      >>> sgd = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1))
      >>> tx = gravac.guard(optax.chain(transform, sgd))
      >>> params = {"w": jnp.ones(3)}
      >>> bad = {"w": jnp.array([1.0, jnp.nan, 1.0])}
      >>> updates, opt_state = jax.jit(tx.update)(bad, tx.init(params), params)
      >>> updates["w"].tolist()
      [0.0, 0.0, 0.0]
      >>> int(optax.tree.get(opt_state, "bad_steps"))
      1
    """
    _refuse.optimizer(tx, "gravac.guard(tx)")
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        state: Any = tx.init(params)
        chain.check_momentum(state)
        local = chain.the_transform(state, "gravac.guard").local
        has_optimizer = isinstance(local.memory[0], OwnOptimizerState)
        if local.told:
            _refuse.warn(
                "gravac.guard does nothing with a delay or rounds, where replicas hear"
                " too late of a gradient that is not finite: leave out one of the two."
            )
        elif is_transform_state(state) and not has_optimizer:
            _refuse.warn(
                "gravac.guard holds gravac.transform alone, and momentum or decay after"
                " it could move params in a bad step: guard the whole chain, as"
                " gravac.guard(optax.chain(gravac.transform(), optax.sgd(0.1)))."
            )
        return state

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        updates, after = tx.update(updates, state, params, **extra)
        is_finite = chain.the_transform(after, "gravac.guard").info.is_finite

        def undone(new: Any, old: Any) -> Any:
            if not is_transform_state(new):
                return old
            local = old.local._replace(replica=new.local.replica)
            kept = {"decided": old.decided, "controller": old.controller}
            return new._replace(local=local, **kept)  # with the step counted

        before = jax.tree.map(undone, after, state, is_leaf=is_transform_state)
        nothing = jax.tree.map(jnp.zeros_like, updates)
        return _arrays.where(is_finite, (updates, after), (nothing, before))

    return optax.GradientTransformationExtraArgs(init, update)
