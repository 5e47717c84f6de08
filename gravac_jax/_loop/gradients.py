"""Gradients that are still local to their replica."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _refuse
from gravac_jax._network import AxisName, Comm


def value_and_grad(
    fun: Callable[..., Any],
    axis_name: AxisName = "data",
    *,
    argnums: int | Sequence[int] = 0,
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
      axis_name: the axis of `gravac.transform`.
      argnums: which arguments to differentiate.
      has_aux: whether `fun` returns (loss, aux).
      micro_batches: the number of parts into which the batch is split, to save memory.
        Their mean is exchanged once. All arguments that are not differentiated are
        split along their first axis; aux gets a new first axis.

    Returns:
      A function of the same arguments that returns (value, gradients).

    Raises:
      TypeError: if `fun` is no function or `axis_name` not an axis name. When called:
        if an argument to differentiate is not given by position, or has leaves that
        are not real; if the loss is not one number.
      ValueError: if `micro_batches` is not a positive number. When called: outside the
        axis, with a batch that does not divide, or if `fun` changes its arguments.

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
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _refuse.bound_axis(axis_name, "value_and_grad")
        if any(not -len(args) <= i < len(args) for i in chosen):
            raise TypeError(
                f"value_and_grad differentiates the arguments {chosen}, got {len(args)}"
                f" positional arguments: pass them by position."
            )
        comm = Comm(axis_name)
        places = {i % len(args) for i in chosen}
        for i in places:
            _refuse.gradients(
                jax.tree.map(jnp.asarray, args[i]), f"leaves of argument {i}"
            )
        cast = [comm.cast(x) if i in places else x for i, x in enumerate(args)]
        local = functools.partial(_local, fun, argnums, has_aux, comm)
        if micro_batches == 1:
            return local(*cast, **kwargs)
        split_args = {i: x for i, x in enumerate(cast) if i not in places}
        _refuse.micro_batches({**split_args, **kwargs}, micro_batches)

        def part_of(part: Any) -> Any:
            mine, named = part
            return local(*(mine.get(i, x) for i, x in enumerate(cast)), **named)

        batch = (split_args, kwargs)
        return _over_micro_batches(part_of, batch, micro_batches, has_aux, comm)

    return wrapped


def _local(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    comm: Comm,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Differentiate the sum of what all replicas' `fun` returns.

    Without the cast, a loss that JAX knows to be the same on all replicas would count
    once, and any other loss once for each replica.
    """

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = jax.tree.map(lambda x: x, args)
        out = fun(*args, **kwargs)
        _refuse.changed_arguments(before, args)
        value, _ = _refuse.loss(out, has_aux)
        return comm.cast(value), out

    grad = jax.value_and_grad(counted, argnums=argnums, has_aux=True)
    (_, out), grads = grad(*args, **kwargs)
    return out, grads


def _over_micro_batches(
    value_and_grad: Callable[[Any], Any],
    batch: Any,
    micro_batches: int,
    has_aux: bool,
    comm: Comm,
) -> Any:
    """Return the mean of `value_and_grad` over parts of the batch, one by one.

    Args:
      value_and_grad: returns the value and the gradients of one part.
      batch: arrays that are split along their first axis.
      micro_batches: the number of parts.
      has_aux: whether `value_and_grad` returns ((value, aux), gradients).
      comm: the replicas; nothing is exchanged with them.

    Returns:
      What `value_and_grad` returns; the aux of all parts is stacked along a new first
      axis.
    """
    split = lambda x: x.reshape(micro_batches, -1, *x.shape[1:])
    parts = jax.tree.map(split, batch)

    def part_of(part: Any) -> tuple[Any, Any]:
        value, grads = value_and_grad(part)
        value, aux = value if has_aux else (value, ())
        return (value, grads), aux

    like, _ = jax.eval_shape(part_of, jax.tree.map(lambda x: x[0], parts))

    def add(total: Any, part: Any) -> tuple[Any, Any]:
        mine, aux = part_of(part)
        return jax.tree.map(lambda t, x: t + x.astype(jnp.float32), total, mine), aux

    zeros = comm.cast(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like))
    total, aux = jax.lax.scan(add, zeros, parts)
    value, grads = jax.tree.map(
        lambda t, x: (t / micro_batches).astype(x.dtype), total, like
    )
    return ((value, aux) if has_aux else value), grads
