"""Run a train step, written for one replica, on all of them: on a mesh or simulated."""

import contextlib
import functools
import numbers
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from gravac_jax import _arrays, _network, _refuse
from gravac_jax._loop import placement, watch
from gravac_jax._network import AxisName, Comm
from gravac_jax._step import states
from gravac_jax._step.update import SPLIT_OVER

_NOTES = {
    "update_fn() missing": """
gravac: what is told more than gradients comes after the transform: write step.flush(
..., value=loss), and in a step of your own tx.update(..., value=jax.lax.pmean(loss)).
""",
    "manual ax": """
gravac: "V:" marks what may differ between replicas: accumulate gradients by
gravac.value_and_grad(loss, micro_batches=...), tell an optimizer
value=jax.lax.pmean(loss, axis_name), skip updates by zeros like the params, and begin
other loops with jax.lax.pcast. For one in a library, such as an RNN, give what makes
the step check_vma=False.
""",
    "AssertionError": """
gravac: if no assert of yours failed, JAX has met a mean over the axis of a jax.vmap, as
equinox.nn.BatchNorm has one: give what makes the step check_vma=False.
""",
    "The context mesh": """
gravac: the step runs in a shard_map over all axes of the mesh. In place of a second one
call its function, on this replica's rows. Where jit shards the model it may stay.
""",
    "vmap spmd_axis_name": """
gravac: sharding constraints, and Flax's logical rules, must not name the axis of the
replicas: write ("batch", "fsdp") in place of ("batch", ("dcn", "fsdp")).
""",
}


def data_parallel(
    train_step: Callable[..., Any],
    mesh: jax.sharding.Mesh | int,
    axis_name: AxisName = "data",
    fast_axis_name: AxisName = None,
    *,
    carried: int = 0,
    donate: bool = True,
    check_vma: bool = True,
    average_metrics: bool = True,
) -> jax.stages.Wrapped:
    """Run a train step on every replica of a mesh, as one compiled program.

    `train_step(*state, batch)` is written for one replica and returns `(*state,
    *metrics)`, for example `(params, opt_state, batch) -> (params, opt_state, loss)` or
    `(train_state, batch) -> (train_state, loss)`. The last argument is the batch, split
    over the replicas along its first axis. The arguments before it are training state,
    placed by `gravac.place`, which is returned first. Keyword arguments, such as
    `step_seconds`, reach every replica whole.

    Of the metrics, floats are averaged over the replicas, in float32, or in float64 if
    they came so. A count that is returned as a float is the mean count of a replica.
    Integers, booleans and random keys have no mean: they must be the same on all
    replicas, and are returned as they are. `gravac.Comm(axis_name).sum` counts over all
    replicas, exactly and in the message of the means.

    Inside of the step everything is one replica's own, also where the compiler shards
    the model, and `jax.lax` talks to the others over `axis_name`. What a loop under
    `jit` computed from the whole batch needs a word:

    - Divide a loss by `jax.lax.pmean(count.astype(jnp.float32), axis_name)` where it
      was divided by a count of rows or tokens, which differs between replicas.
    - A key in the state or given by keyword is the same on all replicas. For dropout
      masks of their own write `jax.random.fold_in(key, jax.lax.axis_index(axis_name))`.
    - Skip a step, or scale a loss, by what all replicas agree on, such as
      `jax.lax.pmin(is_finite.astype(jnp.int32), axis_name)`, or take `gravac.guard`.
      The step warns once its replicas hold different params
      (`StepInfo.disagreements`).

    The first axis of the batch has rows. A batch of several steps for a scan, `(steps,
    rows, ...)`, would be split along the steps: make it `(rows, steps, ...)` and scan
    over its second axis.

    Args:
      train_step: a function of one replica.
      mesh: the mesh. If, without a fast axis, something in the state is sharded over
        another axis of it, the compiler shards the model over all other axes, as under
        `jit`, and arrays stay sharded as they lie on the mesh. All axes must be Auto.
        Or a number of replicas, which are simulated on one device, by `vmap` along
        one axis.
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
      check_vma: as for `jax.shard_map`: whether JAX refuses what differs between
        replicas where it must not. Pass False for a loss with library code that begins
        a loop with zeros, such as an RNN of Flax: gradients are the same. It does
        nothing where the compiler shards the model.
      average_metrics: whether metrics are averaged, which takes a message in each
        step, but for those that JAX knows to be the same on all replicas. Otherwise
        they are returned as each replica's own, `[replicas, ...]`.

    Returns:
      The step, jitted, with the same arguments. Its `lower` shows the program, and
      takes `jax.ShapeDtypeStruct`s, too. What it compiles has other arguments: to keep
      an executable, take `jax.jit(step).trace(...).lower().compile()`.

    Raises:
      TypeError: if `train_step` is no function or `average_metrics` no bool, or if
        there is a `fast_axis_name` and no mesh. When called: for too few
        arguments; for a metric without a mean that is not known to be the same on all
        replicas.
      ValueError: if `mesh` is neither a mesh nor a positive number, the mesh does not
        have the axis, or `carried` is not a number of arguments. When called: if the
        state is not placed on the mesh; if the first axis of a batch or a carry does
        not divide over the replicas; if the step does not return its state, or returns
        it different on different replicas; if the transform lacks an axis along which
        its gradients may differ, or the step an axis of the transform; if the compiler
        shards the model and the transform was not told how.

    Example:
      See `gravac.transform`.
    """
    _refuse.function(train_step, "train_step", "gravac.data_parallel(train_step, mesh)")
    _refuse.mesh(mesh, axis_name, fast_axis_name)
    _refuse.number(carried, "carried", "it counts arguments", is_whole=True, low=0)
    _refuse.instance(average_metrics, bool, "average_metrics", "False")
    axes = _network.join(axis_name, fast_axis_name)
    parts = placement.count_replicas(mesh, axes)
    may_be_sliced = fast_axis_name is None and _network.inner_axes(mesh, axis_name)
    is_mesh = isinstance(mesh, jax.sharding.Mesh)
    # Each process brings its own part of a batch.
    parts = max(1, parts // jax.process_count()) if is_mesh else parts
    both = axis_name, fast_axis_name
    body = functools.partial(_on_one_replica, train_step, both, average_metrics)
    by_vmap = functools.partial(_by_vmap, body, mesh, axis_name, average_metrics)

    def by_shard_map(state: Any, *others: Any) -> Any:
        _check_parts(state, placement.count_replicas(mesh, axis_name))
        specs = placement.state_specs(state, axis_name), jax.P(axes)
        return jax.shard_map(
            body,
            mesh=cast(jax.sharding.Mesh, mesh),
            in_specs=(*specs, jax.P(axes), jax.P()),
            out_specs=(*specs, jax.P() if average_metrics else jax.P(axes), jax.P()),
            check_vma=check_vma,
        )(state, *others)

    @functools.cache
    def program(is_vmapped: bool, lies: placement.Lies) -> Any:
        return jax.jit(
            by_vmap if is_vmapped else by_shard_map,
            donate_argnums=(0, 1) if donate else (),
            # XLA drops the names of axes that are one device long.
            out_shardings=(placement.shardings(lies, mesh), None, None, None),
        )

    def run(how: str, /, *args: Any, **shared: Any) -> Any:
        state, own, batch = _refuse.divided(args, carried, parts, donate, shared)
        is_vmapped, lies = not is_mesh, None
        if may_be_sliced:
            is_vmapped, lies = placement.how_it_lies(state, mesh, axis_name)
        put = functools.partial(_put_batch, placement.on_mesh(mesh, axes), is_vmapped)
        own, batch = jax.tree.map(put, (own, batch))
        put_whole = functools.partial(_put_batch, placement.on_mesh(mesh), False)
        shared = jax.tree.map(put_whole, shared)
        return getattr(program(is_vmapped, lies), how)(state, own, batch, shared)

    watched = watch.Watch()

    @functools.wraps(train_step)
    def step(*args: Any, **shared: Any) -> Any:
        state, own, metrics, counts = run("__call__", *args, **shared)
        watched.see(counts)
        return (*state, *own, *metrics)

    # Not `trace`, by which jax.eval_shape would see what the jitted part returns.
    vars(step)["lower"] = functools.partial(run, "lower")
    return cast(jax.stages.Wrapped, step)


def _put_batch(sharding: Any, stays: bool, x: Any) -> Any:
    """Put a batch, or what all replicas share; if it `stays`, not what lies there."""
    if sharding is None:
        return x
    if _arrays.is_shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    is_traced = isinstance(x, core.Tracer)
    lies = None if is_traced else getattr(x, "sharding", None)
    if stays and (is_traced or getattr(lies, "mesh", None) == sharding.mesh):
        return x
    if not sharding.is_fully_addressable and _arrays.is_key(x):
        return _arrays.by_bits(functools.partial(_put_batch, sharding, stays), x)
    # Each of several processes brings its own part of a batch, in NumPy or JAX, and may
    # bring its own values of what is shared, such as its step times, in NumPy.
    is_host = isinstance(x, (np.ndarray, np.generic))
    is_part = lambda: not sharding.is_fully_replicated and x.is_fully_addressable
    if sharding.is_fully_addressable or not (is_host or is_part()):
        return jax.device_put(x, sharding)
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))


def _by_vmap(
    body: Any, mesh: Any, axis_name: Any, averages: bool, state: Any, *others: Any
) -> Any:
    """Run the step of one replica on all: on one device, or in slices on a mesh.

    On a mesh the compiler shards the model over all axes but that of the replicas. vmap
    maps that axis, and not shard_map, because XLA cannot partition all of a model where
    only some axes are mapped by shard_map: a look-up in a sharded table ends the
    process (jaxlib 0.10.2).
    """
    is_mesh = isinstance(mesh, jax.sharding.Mesh)
    replicas = placement.count_replicas(mesh, axis_name)
    if is_mesh:
        _refuse.by_hand(mesh, axis_name)
    _check_parts(state, mesh.size if is_mesh else replicas, is_mesh)

    def split(x: jax.Array) -> jax.Array:
        rows = x.reshape(replicas, x.shape[0] // replicas, *x.shape[1:])
        if not is_mesh:
            return rows
        spec = jax.P(axis_name, *[jax.P.UNCONSTRAINED] * (rows.ndim - 1))
        return jax.lax.with_sharding_constraint(rows, jax.NamedSharding(mesh, spec))

    axes = states.per_leaf(state, 0, None)
    mapped = jax.vmap(
        body,
        in_axes=(axes, 0, 0, None),
        out_axes=(axes, 0, None if averages else 0, None),
        axis_name=axis_name,
        spmd_axis_name=axis_name if is_mesh else None,
    )
    *rows, shared = others
    own, batch = jax.tree.map(split, rows)
    state = states.change_local(split, state)
    state, own, metrics, counts = mapped(state, own, batch, shared)
    join = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    metrics = metrics if averages else jax.tree.map(join, metrics)
    return states.change_local(join, state), jax.tree.map(join, own), metrics, counts


def _check_parts(state: Any, parts: int, is_sliced: bool = False) -> None:
    for local in states.locals_of(state):
        _refuse.placed(states.placed_replicas(local), parts, is_sliced)


def _on_one_replica(train_step: Any, both: Any, averages: bool, *came: Any) -> Any:
    """Take a step: split its results into state and metrics, and average these."""
    comm, (state, own, batch, shared) = Comm(_network.join(*both)), came
    given = (*state, *own)
    # A step may change nnx objects in place: it has a copy of what came in.
    copy = jax.tree.map(lambda x: x, given)
    before = SPLIT_OVER.set(both)
    try:
        with _explained():
            results = train_step(*copy, batch, **shared)
    finally:
        SPLIT_OVER.reset(before)
    # Decided by type: a single NamedTuple is a state, not several results.
    results = results if type(results) is tuple else (results,)
    _refuse.other_state(results, given)
    first, last = len(state), len(given)
    after, own_after, metrics = results[:first], results[first:last], results[last:]
    _refuse.other_carry(own_after, own)
    comm.check_alike(state, after)
    if averages:
        metrics = _reported(metrics, comm)
    else:
        metrics = comm.cast(jax.tree.map(lambda x: jnp.asarray(x)[None], metrics))
    counts = [x.info.disagreements for x in states.transform_states(after)]
    return after, comm.cast(own_after), metrics, jax.tree.leaves(counts)


def _reported(metrics: Any, comm: Comm) -> Any:
    """Return the mean of floats over replicas; what is no float is the same on all."""
    for path, x in _arrays.named_leaves(metrics):
        is_number = hasattr(x, "dtype") or isinstance(x, numbers.Number)
        is_ours = isinstance(x, jax.Array) and not _arrays.is_float(x)
        if not is_number or (is_ours and not comm.is_known_alike(x)):
            raise TypeError(
                f"the metric at {path} must be a float, which is averaged, got a"
                f" {getattr(x, 'dtype', type(x).__name__)}: count over all replicas by"
                f" gravac.Comm({comm.axis_name!r}).sum(x), under check_vma=False with"
                f" .astype(jnp.float32) behind, and add names outside of the step."
            )
    return comm.reported_mean(jax.tree.map(jnp.asarray, metrics))


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Add to errors of JAX and Optax in a step what they mean for its author."""
    try:
        yield
    except (AssertionError, TypeError, ValueError) as error:
        for words, note in _NOTES.items():
            if words in (str(error) or type(error).__name__):
                error.add_note(note)
        raise
