"""Gradients that are still local to their replica."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _accumulation, _checks, _step_checks
from gravac_jax._comm import AxisName, Comm


def value_and_grad(
    fun: Callable[..., Any],
    axis_name: AxisName = "data",
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    micro_batches: int = 1,
) -> Callable[..., Any]:
    """`jax.value_and_grad`, with each replica's own gradients.

    Under `shard_map`, `jax.grad` with respect to replicated params returns gradients
    that are already *summed* over the axis: the dense all-reduce has happened. Here
    the params are first marked as varying over the axis, so that nothing is exchanged
    before `gravac.transform` does. Under `check_vma=False`, `pmap`, `vmap`, and with
    `axis_name=None`, this is `jax.value_and_grad`.

    A loss that talks to other replicas (a mean over them, or a matrix of which each has
    a slice) counts once for each of them: what is differentiated is the sum of all
    losses, with and without `check_vma`. Divided by the number of replicas, as
    `gravac.transform` does, it is their mean.

    The value is local too; `jax.lax.pmean` it to report it (`gravac.data_parallel`
    averages whatever a step returns beside its state).

    Args:
      fun: the loss, as for `jax.value_and_grad`.
      axis_name: that of `gravac.transform`.
      argnums: which arguments to differentiate.
      has_aux: whether `fun` returns (loss, aux).
      micro_batches: into how many parts the batch is split, to save memory: the mean
        over all of them is exchanged once. All arguments but those to differentiate
        are split along their first axis; aux gets a new one.

    Returns:
      A function of the same arguments that returns (value, gradients).

    Raises:
      TypeError: if `axis_name` is no axis name; when called, if an argument to
        differentiate is not given by position, or holds what is not real.
      ValueError: if `micro_batches` is no positive number; when called outside the
        axis, with a batch that does not divide, or if `fun` changes its arguments.

    Law:
      Of a loss that is a mean over its batch, parts give the value and the gradients
      of the whole, but for the rounding of their float32 sums.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> @jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
      ... def gradients(x):
      ...     grad = gravac.value_and_grad(lambda w: jnp.sum(w * x))(jnp.float32(1))[1]
      ...     return grad[None]
      >>> sharding = jax.NamedSharding(mesh, jax.P("data"))
      >>> x = jax.device_put(jnp.array([1.0, 2.0]), sharding)
      >>> gradients(x).tolist()
      [1.0, 2.0]
    """
    _checks.axis(axis_name)
    _checks.count(micro_batches, "micro_batches", "parts of the batch")
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _step_checks.bound_axis(axis_name, "value_and_grad")
        _step_checks.positional(args, chosen)
        comm = Comm(axis_name)
        places = {i % len(args) for i in chosen}
        for i in places:
            _step_checks.gradients(
                jax.tree.map(jnp.asarray, args[i]), f"leaves of argument {i}"
            )
        cast = [comm.cast(x) if i in places else x for i, x in enumerate(args)]
        local = functools.partial(_local, fun, argnums, has_aux, comm)
        if micro_batches == 1:
            return local(*cast, **kwargs)
        return _accumulation.over_micro_batches(
            local,
            cast,
            kwargs,
            whole=places,
            micro_batches=micro_batches,
            has_aux=has_aux,
            comm=comm,
        )

    return wrapped


def _local(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    comm: Comm,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`jax.value_and_grad` of the sum of what all replicas' `fun` returns.

    A loss that JAX knows to be the same everywhere would count once, and one that it
    does not know so, as many times as there are replicas.
    """

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = jax.tree.map(lambda x: x, args)
        out = fun(*args, **kwargs)
        _step_checks.leaves_arguments(before, args)
        value, _ = _step_checks.with_aux(out) if has_aux else (out, None)
        return comm.cast(value), out

    grad = jax.value_and_grad(counted, argnums=argnums, has_aux=True)
    (_, out), grads = grad(*args, **kwargs)
    return out, grads
