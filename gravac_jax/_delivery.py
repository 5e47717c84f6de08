"""Deliver what the residuals still hold: to all replicas, or to each its own."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _chain_checks, _state
from gravac_jax._buckets import Buckets
from gravac_jax._comm import Comm
from gravac_jax._memory.base import Memory
from gravac_jax._state import LocalState, TransformState

Delivery = Literal["mean", "own", "nothing"]


def deliver(
    delivery: Delivery,
    memory: Memory,
    local: LocalState,
    state: TransformState,
    buckets: Buckets,
    comm: Comm,
) -> tuple[Any, TransformState]:
    """The updates, and the state without what all have got.

    Args:
      delivery: "mean" sends it to all, "own" and "nothing" only look.
      memory: knows what is held.
      local: this replica's state, in its local form.
      state: the state as it came.
      buckets: where it belongs.
      comm: the other replicas.
    """
    held = tuple(map(memory.held, local.memory, buckets.sizes))
    if delivery == "mean":
        emptied = tuple(
            memory.retain(jnp.zeros_like(x), x, s)
            for x, s in zip(held, local.memory, strict=True)
        )
        local, held = local._replace(memory=emptied), comm.mean(held)
    elif delivery == "nothing":
        held = tuple(map(jnp.zeros_like, held))
    # gravac.guard must not take what is delivered for a step that is skipped.
    is_finite = jnp.ones_like(state.info.is_finite)
    dense = jnp.zeros(buckets.dense_size)
    return buckets.unpack(held, dense), state._replace(
        local=_state.leave(local, state.local),
        info=state.info._replace(is_finite=is_finite),
    )


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
    _chain_checks.has_transform(_state.find(opt_state), "gravac.flush")
    tx = optax.with_extra_args_support(tx)
    updates, opt_state = tx.update(params, opt_state, params, deliver="mean", **extra)
    return optax.apply_updates(params, updates), opt_state


def local_params(
    tx: optax.GradientTransformation, params: Any, opt_state: Any, **extra: Any
) -> Any:
    """This replica's own params: as if all that it holds back had arrived.

    What a replica holds back is a step that it knows already. Where its gradient is
    taken at its own params it does not ask for that step again, and what comes late is
    the others' part alone::

        own = gravac.local_params(tx, params, opt_state)
        loss, grads = gravac.value_and_grad(loss_fn)(own, batch)
        updates, opt_state = tx.update(grads, opt_state, params)

    Everything else goes on with the params that all share. Call it in the train step,
    under the same collectives.

    Args:
      tx: the optimizer, with exactly one `gravac.transform` in it. What comes after it
        must be linear in the updates, as learning rates, decay and momentum are. A clip
        is not, and would clip all that is held back: give the transform its `clip`; in
        place of Adam, give it `memory=gravac.Adam()`.
      params: the params that all share.
      opt_state: its state, which stays as it is.
      extra: what else `tx.update` takes, such as a loss.

    Returns:
      The params of this replica, in the same shapes and dtypes.

    Raises:
      ValueError: if there is no `gravac.transform` in `tx`, or more than one; if `tx`
        has an optimizer of Optax that makes whole steps of parts, such as Adam's.

    Cost:
      No collective; one pass over the params, and the memory of another copy.

    Law:
      Their mean over replicas is where `gravac.flush` takes the params, but for what
      momentum and decay do in a step of their own. They are the params where nothing
      is held back.

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
      >>> params.tolist()
      [-4.0, -3.0, 0.0, 0.0]
      >>> gravac.local_params(tx, params, opt_state).tolist()
      [-4.0, -3.0, -2.0, -1.0]

    References:
      Xie et al., CSER, NeurIPS 2020, for SGD, where steps that were not sent are
      applied locally.
    """
    _chain_checks.has_transform(_state.find(opt_state), "gravac.local_params")
    _state.check_linear(opt_state)
    tx = optax.with_extra_args_support(tx)
    # Nothing but the shapes counts; a narrower dtype would round what is held.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    look = lambda delivery: tx.update(
        zeros, opt_state, params, deliver=delivery, **extra
    )[0]
    # The difference is the residual's part: decay and momentum act on nothing, too.
    own = jax.tree.map(lambda x, y: x - y, look("own"), look("nothing"))
    return optax.apply_updates(params, own)
