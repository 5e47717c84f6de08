"""Deliver what the residuals still hold."""

from typing import Any

import optax

from gravac_jax import _state, _step_checks


def flush(
    tx: optax.GradientTransformation, params: Any, opt_state: Any, **extra: Any
) -> tuple[Any, Any]:
    """Take a step whose gradient is what all replicas have not sent yet.

    At the end of training, before an evaluation that counts, or before the learning
    rate drops. Call it where the train step is called, under the same collectives. What
    comes after the transform sees the mean of the residuals as any other gradient; an
    optimizer such as Adam takes a whole step on them. What comes before it is not used.

    Args:
      tx: the optimizer, with exactly one `gravac.transform` in it.
      params: the params.
      opt_state: its state.
      extra: what else `tx.update` takes, such as a loss.

    Returns:
      The params and the state, with empty residuals. Counters and controller of
      `gravac.transform` stay as they are, and its momentum but for what masking takes.
      What comes after it counts a step of its own: schedules go on, momentum and
      decoupled decay are applied once more.

    Raises:
      ValueError: if there is no `gravac.transform` in `tx`, or more than one.

    Cost:
      A float32 all-reduce of the compressed leaves.

    Law:
      What is delivered is the mean over replicas of what `gravac.transform` held back.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> exchange = gravac.transform(
      ...     axis_name=None, compress=True, controller=gravac.Fixed(2)
      ... )
      >>> tx = optax.chain(exchange, optax.sgd(1.0))
      >>> params = jnp.zeros(4)
      >>> grads = jnp.array([4.0, 3.0, 2.0, 1.0])
      >>> updates, opt_state = tx.update(grads, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> params, opt_state = gravac.flush(tx, params, opt_state)
      >>> params.tolist()
      [-4.0, -3.0, -2.0, -1.0]
    """
    _step_checks.has_transform(_state.find(opt_state), "gravac.flush")
    tx = optax.with_extra_args_support(tx)
    updates, opt_state = tx.update(params, opt_state, params, flush=True, **extra)
    return optax.apply_updates(params, updates), opt_state
