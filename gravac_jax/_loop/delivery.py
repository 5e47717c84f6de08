"""Use what is held back: deliver it to all replicas, or go on at own params.

Both ask the transform for a *delivery* (`_step/update.py`), which is no step: no
gradient is exchanged, and nothing is decided or counted.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _refuse, _xla
from gravac_jax._loop import chain
from gravac_jax._step.update import Delivery


def flush(
    tx: optax.GradientTransformation, params: Any, opt_state: Any, **extra: Any
) -> tuple[Any, Any]:
    """Take a step whose gradient is what the replicas have not sent yet.

    Use it at the end of training, before an evaluation that counts, or before a
    learning rate that follows the transform drops. Call it where the train step is
    called, under the same collectives. The optimizer after the transform sees the mean
    of the residuals as it would see any gradient; one such as Adam takes a whole step
    on it, and `optax.MultiSteps` keeps it for a step of its own, with a warning here.
    Transformations before the transform are not used.

    Args:
      tx: the optimizer, with exactly one `gravac.transform` in it.
      params: the params.
      opt_state: the optimizer's state.
      extra: further arguments of `tx.update`, such as a loss.

    Returns:
      The params and the state, with empty residuals. The transform's counters and
      controller stay as they are, as does its momentum. The rest of the chain counts a
      step: its schedules go on, and momentum and decoupled decay are applied once more.

    Raises:
      TypeError: if `opt_state` holds nnx variables, as that of an `nnx.Optimizer` does:
        pass `nnx.as_pure(optimizer.opt_state)`. If `tx` is no optimizer of Optax.
      ValueError: if there is no `gravac.transform` in `tx`, or more than one, or a
        wrapper around the transform drops the arguments of `update`.

    Cost:
      A float32 all-reduce of all leaves.

    Law:
      The delivered gradient is the mean over replicas of what they held back.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> half = gravac.TopK(2, select="exact")
      >>> exchange = gravac.transform(None, send=half, compress=True)
      >>> tx = optax.chain(exchange, optax.sgd(1.0))
      >>> params = jnp.zeros(4)
      >>> grads = jnp.array([4.0, 3.0, 2.0, 1.0])
      >>> updates, opt_state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> flush = jax.jit(gravac.flush, static_argnums=0)
      >>> params, opt_state = flush(tx, params, opt_state)
      >>> params.tolist()
      [-4.0, -3.0, -2.0, -1.0]
    """
    _refuse.optimizer(tx, "gravac.flush(tx, params, opt_state)")
    chain.the_transform(opt_state, "gravac.flush")
    chain.warn_if_held_up(opt_state)
    given = params, opt_state, params
    updates, opt_state = chain.ask(tx, Delivery("mean"), *given, **extra)
    return optax.apply_updates(params, updates), opt_state


def own_params(
    tx: optax.GradientTransformation, params: Any, opt_state: Any, **extra: Any
) -> Any:
    """Return this replica's own params: the shared ones plus all that it holds back.

    What a replica holds back is a step that it already knows. If it takes its gradient
    at its own params, it does not ask for that step again, and only the other replicas'
    steps come late::

        own = gravac.own_params(tx, params, opt_state)
        loss, grads = gravac.value_and_grad(loss_fn)(own, batch)
        updates, opt_state = tx.update(grads, opt_state, params)

    Everything else goes on with the params that all replicas share. Call it in the
    train step, under the same collectives.

    Args:
      tx: the optimizer, with exactly one `gravac.transform` in it. The chain after it
        must be linear in the updates, as learning rates, decay and momentum are, with
        the derivative that `jax.jvp` finds. A clip is not linear: give it to the
        transform, `clip=...`. Adam is not linear: use `gravac.adamw`.
      params: the params that all replicas share.
      opt_state: the optimizer's state, which stays as it is.
      extra: further arguments of `tx.update`: zeros for what a rule compares, since it
        is not known yet. Optax's `value`, the loss, is -inf by default.

    Returns:
      The params of this replica, in the same shapes and dtypes.

    Raises:
      TypeError: if `opt_state` holds nnx variables, as that of an `nnx.Optimizer` does:
        pass `nnx.as_pure(optimizer.opt_state)`. If `tx` is no optimizer of Optax.
      ValueError: if there is no `gravac.transform` in `tx`, or more than one; if a
        wrapper around the transform drops the arguments of `update`; if what comes
        after the transform is not linear in the updates, as Adam and clips are not, as
        far as its derivative shows.

    Cost:
      No collective; one pass over the params, and memory for another copy of them.

    Law:
      The mean over replicas of their own params is where `gravac.flush` takes the
      params, apart from what momentum and decay do in that step. Without anything held
      back, own params are the shared ones.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> half = gravac.TopK(2, select="exact")
      >>> exchange = gravac.transform(None, send=half, compress=True)
      >>> tx = optax.chain(exchange, optax.sgd(1.0))
      >>> params = jnp.zeros(4)
      >>> grads = jnp.array([4.0, 3.0, 2.0, 1.0])
      >>> updates, opt_state = jax.jit(tx.update)(grads, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> params.tolist()
      [-4.0, -3.0, 0.0, 0.0]
      >>> gravac.own_params(tx, params, opt_state).tolist()
      [-4.0, -3.0, -2.0, -1.0]

    References:
      Xie et al., CSER, NeurIPS 2020, which applies steps of SGD that were not sent
      locally.
    """
    _refuse.optimizer(tx, "gravac.own_params(tx, params, opt_state)")
    chain.the_transform(opt_state, "gravac.own_params")
    extra = {"value": -jnp.inf, **extra}  # no rule of Optax finds this loss too high
    if not chain.is_linear(tx, params, opt_state, **extra):
        raise ValueError(
            "after gravac.transform, gravac.own_params needs what is linear in the"
            " updates, got what is not, such as Adam or a clip: take gravac.adamw(1e-3)"
            " and gravac.transform(clip=...), or gradients at the shared params."
        )
    # XLA might compute own params and the next shared ones in one kernel. With a delay,
    # the loss would then wait for the exchange. What is not used stays so.
    params, opt_state = _xla.once(params), jax.tree.map(_xla.once, opt_state)
    # Only the shapes matter; a narrower dtype would round what is held back.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    asked = zeros, opt_state, params
    look = lambda share: chain.ask(tx, Delivery("own", share), *asked, **extra)[0]
    with jax.numpy_dtype_promotion("standard"):  # momentum may be narrower
        # A derivative, since decay and momentum act even on an update of zeros.
        _, own = jax.jvp(look, (jnp.float32(0),), (jnp.float32(1),))
        return optax.apply_updates(params, own)
