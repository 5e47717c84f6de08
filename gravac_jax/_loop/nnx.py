"""Flax NNX: gradients and train steps whose objects change in place.

Flax is an extra, so it is imported where it is used.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from gravac_jax import _arrays, _network, _refuse
from gravac_jax._loop import delivery, gradients, parallel
from gravac_jax._network import AxisName, Comm


def nnx_value_and_grad(
    loss_fn: Callable[..., Any],
    axis_name: AxisName = "data",
    *,
    has_aux: bool = False,
    optimizer: Any = None,
    wrt: Any = None,
) -> Callable[..., Any]:
    """Return `flax.nnx.value_and_grad`, but with each replica's own gradients.

    The loss is differentiated with respect to the `nnx.Param` variables of its first
    argument, or to those that `wrt` chooses, or `optimizer` trains. The gradients stay
    local to the replica, as those of `gravac.value_and_grad` do. What else the loss
    changes in its nnx arguments is written back into them:

    - Batch statistics (`nnx.BatchStat`) become their mean over replicas, in float32.
    - Random keys (`nnx.RngKey`) are folded with the index of the replica before the
      loss sees them, so dropout masks differ between replicas. The keys in the objects
      stay as they are, and their counts go on: both are the same on all replicas. Keys
      that the step draws outside of the loss are the same on all replicas, too.
    - Variables that are trained stay as they are, whatever the loss writes to them, as
      `nnx.SpectralNorm`, `nnx.WeightNorm` and `nnx.remat` do.
    - Other variables are written back as they are. They must not differ between
      replicas: `gravac.nnx_data_parallel` refuses a step that returns them different;
      under `check_vma=False` and `pmap` nobody knows whether they do.

    With `axis_name=None` it is `flax.nnx.value_and_grad`, but for what the loss writes
    to variables that are trained and to keys.

    Args:
      loss_fn: `(model, *others) -> loss`, where the others are nnx objects or arrays in
        any nesting. Its loss is a mean over the batch of one replica.
      axis_name: the axis, or axes, of `gravac.transform`, and its fast axis if it has
        one.
      has_aux: whether `loss_fn` returns (loss, aux).
      optimizer: the `nnx.Optimizer` of the model, to take gradients at the replica's
        own params (`gravac.own_params`), as `gravac.adamw` needs, and with respect to
        the variables that it trains (its `wrt`). By default they are taken at the
        shared params.
      wrt: the variables to differentiate, as for `nnx.Optimizer`, such as
        `nnx.LoRAParam` where others are frozen. Default: what `optimizer` trains, and
        without it every `nnx.Param`.

    Returns:
      A function of the same arguments that returns (loss, gradients), or ((loss, aux),
      gradients). The gradients are the `nnx.State` that `optimizer.update(model,
      gradients)` takes.

    Raises:
      ImportError: if Flax is missing.
      TypeError: when called: if the first argument has no variables to train.
      ValueError: when called: outside the axis; if the loss adds, removes or changes
        anything but the values of variables. With an `optimizer`, as
        `gravac.own_params`.

    Law:
      The mean over replicas of the gradients, and the batch statistics that are written
      back, are the means of what each replica alone computes on its batch.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import gravac_jax as gravac
      >>> loss_fn = lambda model, batch: jnp.sum(model(batch))
      >>> def gradient_step(model, batch):
      ...     loss, grads = gravac.nnx_value_and_grad(loss_fn)(model, batch)
      ...     return grads
      >>> model = nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
      >>> model = gravac.place(model, 2)
      >>> gradient_step = gravac.nnx_data_parallel(gradient_step, 2)
      >>> grads = gradient_step(model, jnp.array([[1.0], [1.0], [3.0], [3.0]]))
      >>> grads["bias"].tolist(), model.mean.tolist()
      ([2.0], [1.0])
    """
    from flax import nnx

    if optimizer is not None:
        model_of = "the nnx.Optimizer of the model"
        _refuse.instance(optimizer, nnx.Optimizer, "optimizer", model_of)
    wrt = wrt or getattr(optimizer, "wrt", nnx.Param)
    is_trained = nnx.filterlib.to_predicate(wrt)

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _refuse.bound_axis(axis_name, "nnx_value_and_grad")
        comm, given, first = Comm(axis_name), (*args, kwargs), 0 if args else None
        is_param = lambda path, x: path[0] == first and is_trained(path[1:], x)
        graph, params, keys, rest = nnx.split(given, is_param, nnx.RngKey, ...)
        if not jax.tree.leaves(params):
            raise TypeError(
                f"the first argument must be a model with variables {wrt!r}, got"
                f" {type(given[0]).__name__}: pass it by position, or choose by `wrt`."
            )
        if optimizer is not None:
            shared, state = map(nnx.as_pure, (params[0], optimizer.opt_state))
            own = delivery.own_params(optimizer.tx, shared, state)
            params = jax.tree.structure(params).unflatten(jax.tree.leaves(own))
        if axis_name is not None:
            fold_in = jax.vmap(jax.random.fold_in, (0, None))
            fold = lambda x: fold_in(x.reshape(-1), comm.replica()).reshape(x.shape)
            keys = jax.tree.map(fold, keys)  # so that each replica has its own

        def of_params(params: Any) -> Any:
            own = nnx.merge(graph, params, keys, rest, copy=True)
            objects = _objects_in(own)
            flat = nnx.to_flat_state(nnx.state(objects))
            before = {path: jax.tree.leaves(x) for path, x in flat}
            with _only_values_change(objects, "the loss"):
                out = loss_fn(*own[:-1], **own[-1])
            loss, aux = out if has_aux else (out, None)
            # nnx.remat and nnx.jit write back all that they are given, changed or not.
            kept = {*map(id, jax.tree.leaves((params, keys)))}

            def is_new(path: Any, x: Any) -> bool:
                is_same = all(map(operator.is_, jax.tree.leaves(x), before[path]))
                return not is_same and kept.isdisjoint(map(id, before[path]))

            return loss, (aux, nnx.state(objects, is_new))

        value_and_grad = gradients.value_and_grad(of_params, axis_name, has_aux=True)
        (loss, (aux, changed)), grads = value_and_grad(params)
        all_float = lambda path, x: all(map(_arrays.is_float, jax.tree.leaves(x)))
        is_statistic = nnx.All(nnx.BatchStat, all_float)
        statistics, others = nnx.split_state(changed, is_statistic, ...)
        nnx.update(_objects_in(given), comm.mean(statistics), others)
        return ((loss, aux) if has_aux else loss), grads[0]

    return wrapped


def nnx_data_parallel(
    train_step: Callable[..., Any],
    mesh: jax.sharding.Mesh | int,
    axis_name: AxisName = "data",
    fast_axis_name: AxisName = None,
    *,
    donate: bool = True,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Run a train step that changes nnx objects in place on every replica of a mesh.

    It is `nnx.jit` for a step on many replicas: `gravac.data_parallel` of objects.
    `train_step(*objects, batch)` changes its objects (a model, an optimizer, metrics,
    random streams) in place, and returns None, a metric, or several in any nesting.
    Floats are averaged over the replicas, in float32 or wider. The objects must be
    placed by `gravac.place` first, with all their variables their own. The batch may
    also stand between objects: it is the one positional argument that is no nnx object.

    Each replica updates metrics (`nnx.metrics.Average`, `nnx.metrics.Accuracy` or a
    subclass, also in an `nnx.MultiMetric`) with its part of the batch, and their sums
    are then added up over replicas. Call `compute` after the step.

    Args:
      train_step: a function of one replica. It takes gradients with
        `gravac.nnx_value_and_grad`, or it is an evaluation and takes none.
      mesh: the mesh; or a number of replicas, to simulate them on one
        device.
      axis_name: as for `gravac.data_parallel`.
      fast_axis_name: as for `gravac.data_parallel`.
      donate: whether the memory of the objects' old values is reused for the new ones.
        Values that share it, such as those of an `nnx.clone`, are then gone: copy them
        before, or pass False. A step that fails while it is traced leaves its objects
        as they are. After one that fails while it runs they may be gone.
      check_vma: as for `gravac.data_parallel`.

    Returns:
      The step, compiled: called with the same arguments, it changes the objects of the
      caller in place and returns the metrics.

    Raises:
      ImportError: if Flax is missing.
      TypeError: if `train_step` is no function. When called: if another argument than
        the batch is no nnx object; if the step returns nnx objects.
      ValueError: if `mesh` is neither a mesh nor a positive number; otherwise as
        `gravac.data_parallel`, also for a variable that the step leaves different on
        different replicas. When called: if objects share a variable;
        if a metric cannot be added up over replicas, such as `nnx.metrics.Welford`, or
        is computed in the step; if the step adds, removes or changes anything but the
        values of variables.

    Law:
      Metrics are those of one device that has the whole batch: counts exactly, totals
      up to the rounding of float32 sums.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> import gravac_jax as gravac
      >>> mesh = gravac.make_mesh(devices=jax.devices()[:2])
      >>> model = nnx.Linear(256, 128, rngs=nnx.Rngs(0))
      >>> tx = optax.chain(gravac.transform(), optax.sgd(0.1))
      >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      >>> metrics = nnx.metrics.Average("loss")
      >>> def train_step(model, optimizer, metrics, batch):
      ...     loss_fn = lambda model, batch: jnp.mean(model(batch) ** 2)
      ...     loss, grads = gravac.nnx_value_and_grad(loss_fn)(model, batch)
      ...     optimizer.update(model, grads)
      ...     metrics.update(loss=loss)
      >>> objects = gravac.place((model, optimizer, metrics), mesh)
      >>> model, optimizer, metrics = objects
      >>> step = gravac.nnx_data_parallel(train_step, mesh)
      >>> step(model, optimizer, metrics, jnp.zeros((4, 256)))
      >>> float(metrics.total[...]), int(metrics.count[...])
      (0.0, 2)
    """
    from flax import nnx

    _refuse.function(train_step, "train_step", "gravac.nnx_data_parallel(step, mesh)")
    comm = Comm(_network.join(axis_name, fast_axis_name))

    def on_one_replica(objects: dict[int, Any], batch: Any, **shared: Any) -> Any:
        args = [objects.get(i, batch) for i in range(len(objects) + 1)]
        with _only_values_change(objects, "the step"), _metrics_of(objects, comm):
            metrics = train_step(*args, **shared)
        if any(isinstance(x, nnx.Pytree) for x in _objects_in(metrics)):
            raise TypeError(
                "the step must return metrics or None, got nnx objects: change its"
                " arguments in place."
            )
        return objects, metrics

    how = {"donate": donate, "check_vma": check_vma}
    run = parallel.data_parallel(on_one_replica, mesh, axis_name, fast_axis_name, **how)

    @functools.wraps(train_step)
    def step(*args: Any, **shared: Any) -> Any:
        objects = dict(enumerate(args))
        batch = objects.pop(_batch_among(args))
        _refuse.ties(objects)
        after, metrics = run(objects, batch, **shared)
        nnx.update(objects, nnx.state(after))
        return metrics

    return step


def _batch_among(args: Sequence[Any]) -> int:
    """Return the index of the one argument that is no nnx object."""
    leaves = [jax.tree.leaves(x, is_leaf=_is_object) for x in args]
    others = [i for i, found in enumerate(leaves) if not all(map(_is_object, found))]
    places = others or [i for i, found in enumerate(leaves) if not found][-1:]
    if len(places) != 1:
        kinds = [f"argument {i} ({type(args[i]).__name__})" for i in places]
        raise TypeError(
            f"an nnx step takes nnx objects and one batch by position, got"
            f" {len(args)} arguments, and those that are no nnx objects are:"
            f" {', '.join(kinds) or 'none'}. Make the batch one tuple or dict, pass"
            f" what all replicas share by keyword, or use gravac.data_parallel."
        )
    return places[0]


def _is_object(x: Any) -> bool:
    from flax import nnx

    return isinstance(x, nnx.Pytree | nnx.Variable)


def _objects_in(tree: Any) -> tuple[Any, ...]:
    """Return the nnx objects in `tree` that are not parts of others."""
    return tuple(filter(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)))


@contextlib.contextmanager
def _only_values_change(objects: Any, who: str) -> Iterator[None]:
    """Refuse to change more of nnx objects than the values of their variables."""
    before = jax.tree.structure(objects)
    yield
    if jax.tree.structure(objects) != before:
        raise ValueError(
            f"{who} may change values of variables only, got other attributes or"
            f" variables, {[path for path, _ in _arrays.named_leaves(objects)]}: call"
            f" model.train() or model.eval() outside, and take out by"
            f" nnx.pop(model, nnx.Intermediate) what self.sow stored."
        )


@contextlib.contextmanager
def _metrics_of(objects: Any, comm: Comm) -> Iterator[None]:
    """Let each replica count for itself, then add up what all have counted.

    The first replica goes on from the sums so far and all others begin at zero, so that
    a sum over replicas is right also where the step resets a metric.
    """
    from flax import nnx

    nodes = dict(nnx.iter_graph(objects))
    metrics = [x for x in nodes.values() if isinstance(x, nnx.metrics.Metric)]
    is_sum = lambda x: isinstance(x, nnx.metrics.MetricState)
    sums = {path: x for path, x in nodes.items() if is_sum(x)}
    for path in sums:
        if not isinstance(metric := nodes[path[:-1]], nnx.metrics.Average):
            raise ValueError(
                f"the {type(metric).__name__} at {path[:-1]} cannot be added up over"
                f" replicas: use a subclass of nnx.metrics.Average, or return values"
                f" from the step and update it outside."
            )
    for x in sums.values():
        x.set_value(comm.owned(x.get_value()))
    for x in metrics:  # a function of the instance hides that of the class
        vars(x)["compute"] = _refuse_to_compute
    yield
    for x in metrics:
        del vars(x)["compute"]
    totals = comm.sum([x.get_value() for x in sums.values()])
    for x, total in zip(sums.values(), totals, strict=True):
        x.set_value(total)


def _refuse_to_compute() -> None:
    raise ValueError(
        "the step calls `compute` of a metric, which has the sums of one replica alone:"
        " call it after the step, on the same metric."
    )


def nnx_flush(
    model: Any,
    optimizer: Any,
    mesh: jax.sharding.Mesh | int,
    axis_name: AxisName = "data",
    fast_axis_name: AxisName = None,
    **extra: Any,
) -> None:
    """Deliver what all replicas hold back, into a model and its optimizer.

    It is `gravac.flush` of `nnx` objects. Call it outside of a step, where the step
    itself is called: at the end of training, or before an evaluation that counts.

    Args:
      model: the model, placed by `gravac.place`; it changes in place.
      optimizer: its `nnx.Optimizer`, placed too, with exactly one `gravac.transform`.
        It changes in place, but for its count of steps.
      mesh: the mesh, or the number of simulated replicas.
      axis_name: as for `gravac.nnx_data_parallel`.
      fast_axis_name: as for `gravac.nnx_data_parallel`.
      extra: further arguments of the optimizer's `update`, such as a loss.

    Returns:
      None: the objects have changed.

    Raises:
      ImportError: if Flax is missing.
      TypeError: if `optimizer` is no nnx.Optimizer.
      ValueError: as `gravac.nnx_data_parallel` and `gravac.flush`.

    Cost:
      A float32 all-reduce of all leaves.

    Law:
      The params and the optimizer's state are those of `gravac.flush`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import gravac_jax as gravac
      >>> mesh = gravac.make_mesh(devices=jax.devices()[:2])
      >>> model = nnx.Linear(256, 128, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, gravac.adamw(1e-3), wrt=nnx.Param)
      >>> model, optimizer = gravac.place((model, optimizer), mesh)
      >>> gravac.nnx_flush(model, optimizer, mesh)
    """
    from flax import nnx

    _refuse.instance(optimizer, nnx.Optimizer, "optimizer", "nnx.Optimizer(model, tx)")
    _flush_step(mesh, axis_name, fast_axis_name)(model, optimizer, (), **extra)


@functools.cache  # or each call would compile
def _flush_step(mesh: Any, axis_name: Any, fast_axis_name: Any) -> Callable[..., Any]:
    """Return what delivers into a model and an optimizer of all replicas."""
    from flax import nnx

    def deliver(model: Any, optimizer: Any, _: Any, **extra: Any) -> None:
        shared = nnx.as_pure(nnx.state(model, optimizer.wrt))
        opt_state = nnx.as_pure(optimizer.opt_state)
        params, opt_state = delivery.flush(optimizer.tx, shared, opt_state, **extra)
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(opt_state))

    return nnx_data_parallel(deliver, mesh, axis_name, fast_axis_name)
