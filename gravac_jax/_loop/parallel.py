"""Run a train step, written for one replica, on all of them: on a mesh or simulated."""

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from gravac_jax import _arrays, _network, _refuse, _state
from gravac_jax._loop import placement
from gravac_jax._network import AxisName, Comm

Step = Callable[..., Any]


def data_parallel(
    train_step: Step,
    mesh: jax.sharding.Mesh | int,
    axis_name: AxisName = "data",
    fast_axis_name: AxisName = None,
    *,
    carried: int = 0,
    donate: bool = True,
    check_vma: bool = True,
    average_metrics: bool = True,
) -> Step:
    """Run a train step on every replica of a mesh, as one compiled program.

    `train_step(*state, batch)` is written for one replica and returns `(*state,
    *metrics)`, for example `(params, opt_state, batch) -> (params, opt_state, loss)` or
    `(train_state, batch) -> (train_state, loss)`. The last argument is the batch, split
    over the replicas along its first axis. The arguments before it are training state,
    placed by `gravac.place`, which is returned first. Keyword arguments, such as
    `step_seconds`, reach every replica whole.

    Of the metrics, floats are averaged over the replicas, in float32, or in float64 if
    they came so. Integers, booleans and random keys have no mean: they must be the same
    on all replicas, and are returned as they are. `gravac.Comm(axis_name).sum` counts
    over all replicas, exactly and in the message of the means.

    The first axis of the batch has rows. A batch of several steps for a scan, `(steps,
    rows, ...)`, would be split along the steps: make it `(rows, steps, ...)` and scan
    over its second axis.

    Args:
      train_step: a function of one replica.
      mesh: the mesh. If, without a fast axis, something in the state is sharded over
        another axis of it, the compiler shards the model over all other axes, as under
        `jit`, and arrays stay sharded as they lie on the mesh. All axes must be Auto.
        Or a number of replicas, which `gravac.simulate` runs on one device, along one
        axis.
      axis_name: the axis, or axes, of the transform.
      fast_axis_name: the transform's fast axis, if it has one. The batch is split over
        both axes, and every device holds all of the params.
      carried: the number of arguments, just before the batch, that are each replica's
        own, such as the states of a recurrent network that continue from batch to
        batch. They are arrays split along their first axis as the batch is, and are
        returned after the state with the same shapes and dtypes, not averaged. They
        need not be placed. They are donated as the state is, so copy an array that you
        want to use again.
      donate: whether the state's memory is reused for the new state.
      check_vma: as for `jax.shard_map`; nothing where the compiler shards the model.
      average_metrics: whether metrics are averaged, which takes a message in each step.
        Otherwise they are returned as each replica's own, `[replicas, ...]`.

    Returns:
      The step, jitted, with the same arguments.

    Raises:
      TypeError: if there is a `fast_axis_name` and no mesh. When called: for too few
        arguments; for a metric without a mean that is not known to be the same on all
        replicas.
      ValueError: if `mesh` is neither a mesh nor a positive number, the mesh does not
        have the axis, or `carried` is not a number of arguments. When called: if the
        state is not placed on the mesh; if the first axis of a batch or a carry does
        not divide over the replicas; if the step does not return its state, or returns
        it different on different replicas; if the compiler shards the model and the
        transform was not told how.

    Example:
      See `gravac.transform`.
    """
    axes = _network.join(axis_name, fast_axis_name)
    call = "gravac.data_parallel(train_step, mesh)"
    _refuse.function(train_step, "train_step", call)
    _refuse.mesh(mesh, axis_name, fast_axis_name)
    if not isinstance(mesh, jax.sharding.Mesh):
        return simulate(
            train_step,
            mesh,
            axis_name,
            carried=carried,
            donate=donate,
            average_metrics=average_metrics,
        )
    _count_carried(carried)
    everywhere = jax.NamedSharding(mesh, jax.P())
    replicas, devices = (placement.count_replicas(mesh, x) for x in (axis_name, axes))
    _refuse.instance(average_metrics, bool, "average_metrics", "False")
    body = _on_one_replica(train_step, axes, check_vma, average_metrics)
    body_of_vmap = _on_one_replica(train_step, axes, True, average_metrics)
    out = jax.P() if average_metrics else jax.P(axes)
    divided = functools.partial(
        _refuse.divided,
        carried=carried,
        replicas=max(1, devices // jax.process_count()),
        is_donated=donate,
    )
    has_others = bool(_network.inner_axes(mesh, axis_name))

    def run(
        state: Any, own: Any, batch: Any, shared: Any, specs: Any, has_slices: bool
    ) -> Any:
        if has_slices:
            _refuse.by_hand(mesh, axis_name)
            placement.check_has_slices(state, mesh.size)
            of_all = _by_vmap(body_of_vmap, replicas, axis_name, average_metrics, mesh)
            state, own, metrics = of_all(state, own, batch, shared)
            return placement.constrained(state, specs, mesh), own, metrics
        placement.check_placed(state, replicas)
        of_state = placement.state_specs(state, axis_name)
        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(of_state, jax.P(axes), jax.P(axes), jax.P()),
            out_specs=(of_state, jax.P(axes), out),
            check_vma=check_vma,
        )(state, own, batch, shared)

    jitted = jax.jit(
        run, donate_argnums=(0, 1) if donate else (), static_argnums=(4, 5)
    )

    @functools.wraps(train_step)
    def step(*args: Any, **shared: Any) -> Any:
        state, *split = divided(args, shared=shared)
        specs, has_slices = None, False
        if has_others:
            state = jax.tree.map(lambda x: _place(x, everywhere), state)
            specs = placement.specs_if_known(state)
            has_slices = fast_axis_name is None and placement.has_slices(
                state, specs, mesh, axis_name
            )
        put = functools.partial(_put, mesh, axes, has_slices)
        own, batch = jax.tree.map(put, split)
        shared = jax.tree.map(lambda x: _share(x, everywhere), shared)
        state, own, metrics = jitted(state, own, batch, shared, specs, has_slices)
        if specs and 1 in mesh.shape.values():
            # XLA drops the names of axes that are one device long.
            state = jax.device_put(state, placement.shardings(state, specs, mesh))
        return (*state, *own, *metrics)

    return step


def _place(x: Any, sharding: jax.NamedSharding) -> Any:
    # A linen TrainState begins with the Python number 0 for its step.
    return x if isinstance(x, jax.Array) else _share(np.asarray(x), sharding)


def _share(x: Any, sharding: jax.NamedSharding) -> Any:
    # Each of several processes may bring its own values, such as its step times.
    if sharding.is_fully_addressable or not isinstance(x, (np.ndarray, np.generic)):
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(x.shape, sharding, lambda at: np.asarray(x)[at])


def _put(mesh: jax.sharding.Mesh, axes: AxisName, stays: bool, x: Any) -> jax.Array:
    """Split a batch over replicas; if it `stays`, what lies on the mesh does."""
    lies = None if isinstance(x, core.Tracer) else getattr(x, "sharding", None)
    is_there = isinstance(x, core.Tracer) or getattr(lies, "mesh", None) == mesh
    return x if stays and is_there else _shard(x, jax.NamedSharding(mesh, jax.P(axes)))


def _shard(x: Any, sharding: jax.NamedSharding) -> jax.Array:
    # Several processes each bring their own part of the batch.
    is_global = lambda: isinstance(x, jax.Array) and not x.is_fully_addressable
    if sharding.is_fully_addressable or is_global():
        return jax.device_put(x, sharding)
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))


def simulate(
    train_step: Step,
    replicas: int,
    axis_name: Any = "data",
    *,
    carried: int = 0,
    donate: bool = True,
    average_metrics: bool = True,
) -> Step:
    """Run a train step on `replicas` replicas that share one device, by `vmap`.

    Use it on laptops, in tests, and for experiments with many replicas. Arguments and
    results are those of `gravac.data_parallel`, with a state placed by
    `gravac.place(tree, replicas)`. The rung stays one scalar for all replicas, so that
    one branch runs, not all of them.

    Args:
      train_step: a function of one replica, as for `gravac.data_parallel`.
      replicas: N, the number of replicas.
      axis_name: the axis of the transform.
      carried: as for `gravac.data_parallel`.
      donate: as for `gravac.data_parallel`.
      average_metrics: as for `gravac.data_parallel`.

    Returns:
      The step, jitted.

    Raises:
      ValueError: if `replicas` is not a positive number; otherwise as
        `gravac.data_parallel`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> exchange = gravac.transform(send=gravac.Bits(2))
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
      >>> def train_step(params, opt_state, batch):
      ...     loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
      ...     own = gravac.own_params(tx, params, opt_state)
      ...     value, grads = gravac.value_and_grad(loss)(own, batch)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state, value
      >>> params = {"w": jnp.ones((256, 256))}
      >>> params, opt_state = gravac.place((params, tx.init(params)), 8)
      >>> step = gravac.simulate(train_step, replicas=8)
      >>> params, opt_state, value = step(params, opt_state, jnp.ones((16, 256)))
      >>> float(value)
      65536.0
    """
    call = "gravac.simulate(train_step, replicas)"
    _refuse.function(train_step, "train_step", call)
    _refuse.count(replicas, "replicas", "replicas")
    _count_carried(carried)
    _refuse.instance(average_metrics, bool, "average_metrics", "False")
    body = _on_one_replica(train_step, axis_name, True, average_metrics)
    of_all = _by_vmap(body, replicas, axis_name, average_metrics)

    @functools.partial(jax.jit, donate_argnums=(0, 1) if donate else ())
    def run(state: Any, own: Any, batch: Any, shared: Any) -> Any:
        placement.check_placed(state, replicas)
        return of_all(state, own, batch, shared)

    @functools.wraps(train_step)
    def step(*args: Any, **shared: Any) -> Any:
        divided = _refuse.divided(args, carried, replicas, donate, shared)
        state, own, batch = divided
        state, own, metrics = run(state, own, batch, shared)
        return (*state, *own, *metrics)

    return step


def _by_vmap(
    body: Step,
    replicas: int,
    axis_name: Any,
    averages: bool,
    mesh: jax.sharding.Mesh | None = None,
) -> Step:
    """Return what runs the step of one replica on all: on one device, or on a mesh.

    On a mesh, `axis_name` is the axis along which replicas lie, and all others are the
    compiler's. A step is then mapped by vmap and not by shard_map, because XLA cannot
    partition all of a model where only some axes are mapped by shard_map: a look-up in
    a sharded table ends the process (jaxlib 0.10.2).
    """

    def split(x: jax.Array) -> jax.Array:
        rows = x.reshape(replicas, x.shape[0] // replicas, *x.shape[1:])
        if mesh is None:
            return rows
        spec = jax.P(axis_name, *[jax.P.UNCONSTRAINED] * (rows.ndim - 1))
        return jax.lax.with_sharding_constraint(rows, jax.NamedSharding(mesh, spec))

    join = lambda x: x.reshape(-1, *x.shape[2:])
    of_each = lambda change, state: _state.map_local(
        state, lambda local: jax.tree.map(change, local), lambda x: x
    )

    def run(state: Any, own: Any, batch: Any, shared: Any) -> Any:
        state = state if mesh is None else of_each(split, state)
        own, batch = jax.tree.map(split, (own, batch))
        axes = _state.per_leaf(state, 0, None)
        mapped = jax.vmap(
            body,
            in_axes=(axes, 0, 0, None),
            out_axes=(axes, 0, None if averages else 0),
            axis_name=axis_name,
            spmd_axis_name=None if mesh is None else axis_name,
        )
        state, own, metrics = mapped(state, own, batch, shared)
        state = state if mesh is None else of_each(join, state)
        metrics = metrics if averages else jax.tree.map(join, metrics)
        return state, jax.tree.map(join, own), metrics

    return run


def _count_carried(carried: int) -> None:
    if carried:
        _refuse.count(carried, "carried", "arguments, or is 0 for none")


def _on_one_replica(
    train_step: Step, axis_name: AxisName, is_checked: bool, averages: bool
) -> Step:
    """Wrap a step: split its results into state and metrics, and average these.

    Without the check nobody can tell what differs between replicas.
    """
    comm = Comm(axis_name)

    def body(
        state: tuple[Any, ...], own: tuple[Any, ...], batch: Any, shared: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        given = (*state, *own)
        # A step may change nnx objects in place: it has a copy of what came in.
        copy = jax.tree.map(lambda x: x, given)
        with _refuse.explained():
            results = train_step(*copy, batch, **shared)
        # Decided by type: a single NamedTuple is a state, not several results.
        results = results if type(results) is tuple else (results,)
        _refuse.other_state(results, given)
        first, last = len(state), len(given)
        after, own_after = results[:first], results[first:last]
        _refuse.other_carry(own_after, own)
        comm.check_alike(state, after)
        if averages:
            metrics = _reported(results[last:], comm, is_checked)
        else:
            each = lambda x: jnp.asarray(x)[None]
            metrics = comm.cast(jax.tree.map(each, results[last:]))
        return after, comm.cast(own_after), metrics

    return body


def _reported(metrics: Any, comm: Comm, is_checked: bool) -> Any:
    """Return the mean of floats over replicas; what is no float is the same on all."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    known = lambda x: (
        not isinstance(x, jax.Array) or (is_checked and comm.is_known_alike(x))
    )
    for path, x in _arrays.named_leaves(metrics):
        if not (hasattr(x, "dtype") or isinstance(x, numbers.Number)):
            raise TypeError(
                f"the metric at {path} must be an array or a number, got"
                f" {type(x).__name__}: add names outside of the step."
            )
        if not is_float(jnp.asarray(x)) and not known(x):
            raise TypeError(
                f"the metric at {path} must be a float, which is averaged, got a"
                f" {jnp.result_type(x)}: write gravac.Comm({comm.axis_name!r}).sum(x),"
                f" or under check_vma=False return a float."
            )
    metrics = jax.tree.map(jnp.asarray, metrics)
    floats = jax.tree.map(lambda x: x if is_float(x) else None, metrics)
    pick = lambda x, mean: x if mean is None else mean
    means = comm.reported_mean(floats)
    return jax.tree.map(pick, metrics, means, is_leaf=lambda x: x is None)
