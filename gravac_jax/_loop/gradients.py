"""Gradients that are still local to their replica."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _refuse
from gravac_jax._network import AxisName, Comm


def value_and_grad(
    fun: Callable[..., Any],
    axis_name: AxisName = "data",
    *,
    has_aux: bool = False,
    micro_batches: int = 1,
) -> Callable[..., Any]:
    """Return `jax.value_and_grad`, but with each replica's own gradients.

    Under `shard_map`, `jax.grad` with respect to replicated params returns gradients
    that are already *summed* over the axis: the dense all-reduce has happened. This
    function first marks the params as varying over the axis, so that nothing is
    exchanged before `gravac.transform` does it. Under `check_vma=False`, `pmap` and
    `vmap`, and with `axis_name=None`, it is `jax.value_and_grad`.

    A loss that talks to other replicas (a mean over them, or a matrix of which each has
    a slice) counts once for each of them: the sum of all losses is differentiated, with
    and without `check_vma`. `gravac.transform` divides it by the number of replicas.

    The value is local, too. To report it, average it with `jax.lax.pmean`;
    `gravac.data_parallel` averages whatever a step returns beside its state.

    Args:
      fun: the loss, as for `jax.value_and_grad`.
      axis_name: the axis of `gravac.transform`; with a fast one both, in a tuple.
      has_aux: whether `fun` returns (loss, aux).
      micro_batches: the number of parts into which the batch is split, to save memory.
        Their mean is exchanged once. All arguments but the first are split along their
        first axis; aux gets a new first axis.

    Returns:
      A function of the same arguments that returns (value, gradients), the gradients
      with respect to the first argument.

    Raises:
      TypeError: if `fun` is no function or `axis_name` not an axis name. When called:
        if the first argument has leaves that are not real, the loss is not one number,
        or with `has_aux` no pair is returned.
      ValueError: if `micro_batches` is not a positive number. When called: outside the
        axis, if `fun` changes its arguments, or if the batch does not divide.

    Law:
      If the loss is a mean over its batch, micro-batches give the value and the
      gradients of the whole batch, up to the rounding of float32 sums.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> mesh = gravac.make_mesh(devices=jax.devices()[:2])
      >>> @jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
      ... def gradients(x):
      ...     grad = gravac.value_and_grad(lambda w: jnp.sum(w * x))(jnp.float32(1))[1]
      ...     return grad[None]
      >>> sharding = jax.NamedSharding(mesh, jax.P("data"))
      >>> x = jax.device_put(jnp.array([1.0, 2.0]), sharding)
      >>> gradients(x).tolist()
      [1.0, 2.0]
    """
    _refuse.function(fun, "fun", "gravac.value_and_grad(loss_fn, axis_name)")
    _refuse.axis(axis_name)
    _refuse.count(micro_batches, "micro_batches", "parts of the batch")

    @functools.wraps(fun)
    def wrapped(params: Any, /, *others: Any, **kwargs: Any) -> Any:
        _refuse.bound_axis(axis_name, "value_and_grad")
        _refuse.gradients(jax.tree.map(jnp.asarray, params), "leaves of the params")
        comm = Comm(axis_name)
        params = comm.cast(params)

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = jax.tree.map(lambda x: x, args)
            out = fun(*args, **kwargs)
            _refuse.changed_arguments(before, args)
            if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
                return out  # for JAX to refuse
            value, aux = out if has_aux else (out, None)
            # Without the cast, a loss that JAX knows to be the same on all replicas
            # would count once, and any other loss once for each replica.
            return comm.cast(value), (value, aux)

        grad = jax.value_and_grad(counted, has_aux=True)

        def of_part(part: Any) -> Any:
            (_, out), grads = grad(params, *part[0], **part[1])
            return out, grads

        batch = others, kwargs
        if micro_batches == 1:
            (value, aux), grads = of_part(batch)
        else:
            (value, aux), grads = _mean_over_parts(of_part, batch, micro_batches, comm)
        return ((value, aux) if has_aux else value), grads

    return wrapped


def _mean_over_parts(
    of_part: Callable[[Any], Any], batch: Any, parts: int, comm: Comm
) -> Any:
    """Return the mean of `of_part` over parts of the batch, one by one.

    Args:
      of_part: returns ((value, aux), gradients) of one part.
      batch: arrays that are split along their first axis.
      parts: the number of parts.
      comm: the replicas; nothing is exchanged with them.

    Returns:
      What `of_part` returns; the aux of all parts is stacked along a new first axis.
    """
    _refuse.divides(batch, parts, "a replica's batch", "micro-batches")
    split = lambda x: jnp.reshape(x, (parts, -1, *jnp.shape(x)[1:]))
    batches = jax.tree.map(split, batch)
    (value, _), grads = jax.eval_shape(of_part, jax.tree.map(lambda x: x[0], batches))
    like = value, grads
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)

    def add(total: Any, part: Any) -> tuple[Any, Any]:
        (value, aux), grads = of_part(part)
        plus = lambda t, x: t + x.astype(jnp.float32)
        return jax.tree.map(plus, total, (value, grads)), aux

    total, aux = jax.lax.scan(add, comm.cast(zeros), batches, length=parts)
    value, grads = jax.tree.map(lambda t, x: (t / parts).astype(x.dtype), total, like)
    return (value, aux), grads
