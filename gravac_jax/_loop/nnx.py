"""Flax NNX: gradients and train steps whose objects change in place.

Flax is an extra, so it is imported where it is used.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _network, _refuse
from gravac_jax._loop import delivery, gradients, parallel, placement
from gravac_jax._network import AxisName, Comm

Objects = tuple[Any, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _BatchAt:
    """The place of the batch among a step's arguments; a tree without arrays."""

    index: int


def nnx_value_and_grad(
    loss_fn: Callable[..., Any],
    axis_name: AxisName = "data",
    *,
    has_aux: bool = False,
    optimizer: Any = None,
) -> Callable[..., Any]:
    """Return `flax.nnx.value_and_grad`, but with each replica's own gradients.

    The loss is differentiated with respect to the `nnx.Param` variables of its first
    argument, or to what `optimizer` trains. The gradients stay local to the replica, as
    those of `gravac.value_and_grad` do. What else the loss changes in its nnx arguments
    is written back into them:

    - Batch statistics (`nnx.BatchStat`) become their mean over replicas, in float32.
    - Random keys (`nnx.RngKey`) are folded with the index of the replica before the
      loss sees them, so dropout masks differ between replicas. The keys in the objects
      stay as they are, and their counts go on: both are the same on all replicas. Keys
      that the step draws outside of the loss are the same on all replicas, too.
    - Other variables are written back as they are. They must not differ between
      replicas; under `check_vma=False` and `pmap` nobody knows whether they do.

    With `axis_name=None` it is `flax.nnx.value_and_grad`.

    Args:
      loss_fn: `(model, *others) -> loss`, where the others are nnx objects or arrays in
        any nesting. Its loss is a mean over the batch of one replica.
      axis_name: the axis, or axes, of `gravac.transform`, and its fast axis if it has
        one.
      has_aux: whether `loss_fn` returns (loss, aux).
      optimizer: the `nnx.Optimizer` of the model, to take gradients at the replica's
        own params (`gravac.own_params`), as `gravac.adamw` needs, and with respect to
        the variables that it trains (its `wrt`). By default they are taken at the
        shared params, with respect to every `nnx.Param`.

    Returns:
      A function of the same arguments that returns (loss, gradients), or ((loss, aux),
      gradients). The gradients are the `nnx.State` that `optimizer.update(model,
      gradients)` takes.

    Raises:
      ImportError: if Flax is missing.
      TypeError: when called: if the first argument has no variables to train.
      ValueError: when called: outside the axis; if the loss changes a variable that is
        known to differ between replicas then; if it adds, removes or changes anything
        but the values of variables. With an `optimizer`, as `gravac.own_params`.

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
    nnx = _flax("nnx_value_and_grad")
    if optimizer is not None:
        _refuse_optimizer(optimizer)
    wrt = nnx.Param if optimizer is None else optimizer.wrt
    is_trained = nnx.filterlib.to_predicate(wrt)

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _refuse.bound_axis(axis_name, "nnx_value_and_grad")
        comm = Comm(axis_name)
        given = (*args, kwargs)
        is_param = lambda path, x: path[0] == 0 and is_trained(path[1:], x)
        graph, params, rest = nnx.split(given, is_param, ...)
        if not jax.tree.leaves(params):
            kind = type(args[0]).__name__ if args else "no positional argument"
            raise TypeError(
                f"the first argument must be a model with variables {wrt!r}, got"
                f" {kind}: pass it by position, or to gravac.value_and_grad a pytree."
            )
        if optimizer is not None:
            params = _own_params(params, optimizer)
        rest = _with_own_keys(rest, comm)

        def of_params(params: Any) -> Any:
            own = nnx.merge(graph, params, rest, copy=True)
            objects = _objects_in(own)
            before, structures = _values(objects), _structures(objects)
            out = loss_fn(*own[:-1], **own[-1])
            _refuse_structure(objects, structures, "the loss")
            changed = _changed(before, objects)
            loss, aux = _refuse.loss(out, has_aux)
            return loss, (aux, changed)

        value_and_grad = gradients.value_and_grad(of_params, axis_name, has_aux=True)
        (loss, (aux, changed)), grads = value_and_grad(params)
        _write_back(_objects_in(given), changed, comm)
        return ((loss, aux) if has_aux else loss), grads[0]

    return wrapped


def nnx_data_parallel(
    train_step: Callable[..., Any],
    mesh: jax.sharding.Mesh | int,
    axis_name: Any = "data",
    fast_axis_name: AxisName = None,
    *,
    donate: bool = True,
) -> Callable[..., Any]:
    """Run a train step that changes nnx objects in place on every replica of a mesh.

    It is to a step on many replicas what `nnx.jit` is to a step on one device, and
    `gravac.data_parallel` with objects for its state. `train_step(*objects, batch)`
    changes its objects (a model, an optimizer, metrics, random streams) in place, and
    returns None, a metric, or several in any nesting. They are averaged over the
    replicas, in float32. The objects must be placed by `gravac.place` first, with all
    their variables their own. The batch may also stand between objects: it is the one
    positional argument that is no nnx object.

    Each replica updates metrics (`nnx.metrics.Average`, `nnx.metrics.Accuracy` or a
    subclass, also in an `nnx.MultiMetric`) with its part of the batch, and their sums
    are then added up over replicas. Call `compute` after the step.

    Args:
      train_step: a function of one replica. It takes gradients with
        `gravac.nnx_value_and_grad`, or it is an evaluation and takes none.
      mesh: the mesh; or a number of replicas, to simulate them on one device
        (`gravac.simulate`).
      axis_name: as for `gravac.data_parallel`.
      fast_axis_name: as for `gravac.data_parallel`.
      donate: whether the memory of the objects' old values is reused for the new ones.
        Values that share it, such as those of an `nnx.clone`, are then gone: copy them
        before, or pass False. A step that fails while it is traced leaves its objects
        as they are. After one that fails while it runs they may be gone.

    Returns:
      The step, compiled: called with the same arguments, it changes the objects of the
      caller in place and returns the metrics.

    Raises:
      ImportError: if Flax is missing.
      TypeError: when called: if another argument than the batch is no nnx object; if
        the step returns nnx objects.
      ValueError: if `mesh` is neither a mesh nor a positive number; otherwise as
        `gravac.data_parallel`. When called: if objects share a variable;
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
    nnx = _flax("nnx_data_parallel")
    comm = Comm(_network.join(axis_name, fast_axis_name))

    def on_one_replica(at: _BatchAt, *args: Any, **shared: Any) -> Any:
        *state, batch = args
        objects = tuple(state)
        in_order = (*state[: at.index], batch, *state[at.index :])
        before, structures = _values(objects), _structures(objects)
        with _metrics_of(objects, comm):
            metrics = train_step(*in_order, **shared)
        _refuse_structure(objects, structures, "the step")
        _check_alike(objects, before, nnx.state(objects), comm, "the step")
        is_object = lambda x: isinstance(x, nnx.Pytree)
        returned = jax.tree.leaves(metrics, is_leaf=is_object)
        if kinds := [type(x).__name__ for x in returned if is_object(x)]:
            raise TypeError(
                f"the step must return metrics or None, got nnx objects, {kinds}:"
                f" change its arguments in place."
            )
        return (at, *objects, metrics)

    run = parallel.data_parallel(
        on_one_replica, mesh, axis_name, fast_axis_name, donate=donate
    )

    @functools.wraps(train_step)
    def step(*args: Any, **shared: Any) -> Any:
        at = _batch_among(args)
        objects = (*args[:at], *args[at + 1 :])
        _refuse_shared(objects)
        _, *after, metrics = run(_BatchAt(at), *objects, args[at], **shared)
        nnx.update(objects, nnx.state(tuple(after)))
        return metrics

    return step


def nnx_flush(
    model: Any,
    optimizer: Any,
    mesh: jax.sharding.Mesh | int,
    axis_name: Any = "data",
    fast_axis_name: AxisName = None,
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

    Returns:
      None: the objects have changed.

    Raises:
      ImportError: if Flax is missing.
      TypeError: if `optimizer` is no `nnx.Optimizer`.
      ValueError: as `gravac.nnx_data_parallel` and `gravac.flush`.

    Cost:
      A float32 all-reduce of the compressed leaves.

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
    _flax("nnx_flush")
    _refuse_optimizer(optimizer)
    axes = _network.join(axis_name, fast_axis_name)
    _refuse.mesh(mesh, axis_name, fast_axis_name)
    deliver = _delivery(mesh, axis_name, fast_axis_name)
    replicas = placement.count_replicas(mesh, axes)
    deliver(model, optimizer, np.zeros(replicas, np.float32))


@functools.cache  # or each call would compile
def _delivery(mesh: Any, axis_name: Any, fast_axis_name: Any) -> Callable[..., Any]:
    """Return what delivers into a model and an optimizer of all replicas."""
    nnx = _flax("nnx_flush")

    def deliver(model: Any, optimizer: Any, batch: Any) -> None:
        del batch
        shared = nnx.as_pure(nnx.state(model, optimizer.wrt))
        opt_state = nnx.as_pure(optimizer.opt_state)
        params, opt_state = delivery.flush(optimizer.tx, shared, opt_state)
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(opt_state))

    return nnx_data_parallel(deliver, mesh, axis_name, fast_axis_name)


def _flax(name: str) -> Any:
    try:
        from flax import nnx
    except ImportError as error:
        raise ImportError(
            f"gravac.{name} needs Flax, which is an extra of gravac_jax, and it could"
            f" not be imported ({error}): pip install flax."
        ) from error
    return nnx


def _refuse_optimizer(optimizer: Any) -> None:
    if not (hasattr(optimizer, "tx") and hasattr(optimizer, "opt_state")):
        raise TypeError(
            f"`optimizer` must be the nnx.Optimizer of the model, or None for gradients"
            f" at the shared params, got {type(optimizer).__name__}."
        )


def _batch_among(args: Sequence[Any]) -> int:
    """Return the index of the one argument that is no nnx object."""
    is_object = _is_object()
    leaves = [jax.tree.leaves(x, is_leaf=is_object) for x in args]
    others = [i for i, found in enumerate(leaves) if not all(map(is_object, found))]
    places = others or [i for i, found in enumerate(leaves) if not found][-1:]
    if len(places) != 1 or len(args) < 2:
        kinds = [f"argument {i} ({type(args[i]).__name__})" for i in places]
        raise TypeError(
            f"an nnx step takes nnx objects and one batch by position, got"
            f" {len(args)} arguments, and those that are no nnx objects are:"
            f" {', '.join(kinds) or 'none'}. Make the batch one tuple or dict, pass"
            f" what all replicas share by keyword, or use gravac.data_parallel."
        )
    return places[0]


def _refuse_shared(objects: Objects) -> None:
    """Refuse a variable that two objects, or two attributes, share."""
    from flax import nnx

    is_variable = lambda x: isinstance(x, nnx.Variable)
    seen: dict[int, str] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tuple(objects), is_leaf=is_variable)
    for path, x in leaves:
        name = jax.tree_util.keystr(path)
        if is_variable(x) and (first := seen.setdefault(id(x), name)) != name:
            raise ValueError(
                f"the step's arguments share the {type(x).__name__} at {first} and at"
                f" {name}: keep one, and hand it over where the other is used."
            )


def _refuse_structure(objects: Objects, structures: Sequence[Any], who: str) -> None:
    """Refuse to change more of nnx objects than the values of their variables."""
    for x, before in zip(objects, structures, strict=True):
        if jax.tree.structure(x) != before:
            paths = [path for path, _ in _arrays.named_leaves(x)]
            raise ValueError(
                f"{who} may change values of variables only, got a {type(x).__name__}"
                f" with {paths}: call model.train() or model.eval() outside, and take"
                f" out what self.sow stored, nnx.pop(model, nnx.Intermediate)."
            )


def _refuse_to_compute() -> None:
    raise ValueError(
        "the step calls `compute` of a metric, which has the sums of one replica alone:"
        " call it after the step, on the same metric."
    )


def _is_object() -> Callable[[Any], bool]:
    from flax import nnx

    return lambda x: isinstance(x, (nnx.Pytree, nnx.Variable))


def _objects_in(tree: Any) -> Objects:
    """Return the nnx objects in `tree` that are not parts of others."""
    is_object = _is_object()
    return tuple(filter(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


def _structures(objects: Objects) -> list[Any]:
    return [jax.tree.structure(x) for x in objects]


def _values(objects: Objects) -> dict[Any, list[Any]]:
    """Return the arrays of each variable, by its path."""
    from flax import nnx

    return {
        path: jax.tree.leaves(x) for path, x in nnx.to_flat_state(nnx.state(objects))
    }


def _changed(before: dict[Any, list[Any]], objects: Objects) -> Any:
    """Return the state of those variables that hold other arrays than `before`."""
    from flax import nnx

    return nnx.from_flat_state(
        [
            (path, x)
            for path, x in nnx.to_flat_state(nnx.state(objects))
            if any(
                new is not old
                for new, old in zip(jax.tree.leaves(x), before[path], strict=True)
            )
        ]
    )


def _own_params(params: Any, optimizer: Any) -> Any:
    from flax import nnx

    shared, opt_state = nnx.as_pure(params[0]), nnx.as_pure(optimizer.opt_state)
    own = delivery.own_params(optimizer.tx, shared, opt_state)
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(own))


def _with_own_keys(state: Any, comm: Comm) -> Any:
    """Fold every random key of `state` with the index of the replica."""
    from flax import nnx

    if comm.axis_name is None:
        return state
    fold_in = jax.vmap(jax.random.fold_in, (0, None))

    def own(keys: jax.Array) -> jax.Array:
        return fold_in(keys.reshape(-1), comm.replica()).reshape(keys.shape)

    return jax.tree.map(
        lambda x: jax.tree.map(own, x) if isinstance(x, nnx.RngKey) else x,
        state,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def _write_back(objects: Objects, changed: Any, comm: Comm) -> None:
    """Write the state that a loss has changed into the objects that it was given."""
    from flax import nnx

    def is_statistic(path: Any, x: Any) -> bool:
        del path
        is_real = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
        return isinstance(x, nnx.BatchStat) and all(map(is_real, jax.tree.leaves(x)))

    statistics, others = nnx.split_state(changed, is_statistic, ...)
    _check_alike(objects, _values(objects), others, comm, "the loss")
    if jax.tree.leaves(statistics):
        nnx.update(objects, comm.mean(statistics))
    nnx.update(objects, others)


def _check_alike(
    objects: Objects, before: dict[Any, list[Any]], state: Any, comm: Comm, who: str
) -> None:
    """Refuse variables in `state` that were the same on all replicas and may differ."""
    from flax import nnx

    alike = lambda x: comm.is_known_alike(jnp.asarray(x))
    flat: Any = nnx.to_flat_state(state)
    for path, x in flat:
        pairs = zip(before[path], jax.tree.leaves(x), strict=True)
        if any(old is not new and alike(old) and not alike(new) for old, new in pairs):
            first, *names = path
            owner = type(objects[first]).__name__
            name = ".".join(map(str, (owner, *names)))
            raise ValueError(
                f"{who} changes {name}, of type {type(x).__name__}, to what may differ"
                f" between replicas: make a statistic of the batch an nnx.BatchStat of"
                f" the loss, average by jax.lax.pmean, or return it as aux, with"
                f" has_aux=True; params change by a gravac.transform that comes first."
            )


@contextlib.contextmanager
def _metrics_of(objects: Objects, comm: Comm) -> Iterator[None]:
    """Let each replica count for itself, then add up what all have counted.

    The first replica goes on from the sums so far and all others begin at zero, so that
    a sum over replicas is right also where the step resets a metric.
    """
    from flax import nnx

    is_average = lambda x: isinstance(x, nnx.metrics.Average)
    is_metric = lambda x: isinstance(x, nnx.metrics.Metric)
    is_single = lambda x: is_metric(x) and not isinstance(x, nnx.MultiMetric)
    is_sum = lambda x: isinstance(x, nnx.metrics.MetricState)
    is_held = lambda x: is_single(x) or is_sum(x)
    at_paths = jax.tree_util.tree_leaves_with_path(tuple(objects), is_leaf=is_held)
    for path, x in at_paths:
        held = any(map(is_sum, jax.tree.leaves(x, is_leaf=is_sum)))
        if held and not is_average(x):
            raise ValueError(
                f"the {type(x).__name__} at {jax.tree_util.keystr(path)} cannot be"
                f" added up over replicas: use a subclass of nnx.metrics.Average, or"
                f" return values from the step and update it outside."
            )
    sums = [x for x in jax.tree.leaves(objects, is_leaf=is_sum) if is_sum(x)]
    is_first = comm.replica() == 0
    for x in sums:
        x.set_value(jnp.where(is_first, x.get_value(), jnp.zeros_like(x.get_value())))
    metrics = [x for _, x in nnx.iter_graph(objects) if is_metric(x)]
    for x in metrics:  # a function of the instance hides that of the class
        vars(x)["compute"] = _refuse_to_compute
    yield
    for x in metrics:
        del vars(x)["compute"]
    totals = comm.sum([x.get_value() for x in sums])
    for x, total in zip(sums, totals, strict=True):
        x.set_value(total)
