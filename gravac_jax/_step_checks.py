"""Checks of what a step is given, while it is traced or called.

They raise before anything is changed. Trouble that only shows in the values becomes a
counter in StepInfo instead.
"""

import contextlib
import inspect
import numbers
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import core

from gravac_jax import _arrays


def scalar(value: Any, default: Any, dtype: Any, name: str) -> jax.Array:
    """Return `value`, or `default` for None, as a `[]` array of `dtype`."""
    array = jnp.asarray(default if value is None else value)
    if array.shape != ():
        raise ValueError(
            f"`{name}` must be a single number on each replica, got shape"
            f" {array.shape}. Pass this replica's number, or None if it is unknown."
        )
    return array.astype(dtype)


def bound_axis(axis_name: Any, caller: str) -> None:
    """Refuse a call outside the axis that the components were built for."""
    try:
        _ = axis_name is None or jax.lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"`{caller}` was called outside axis_name={axis_name!r} ({error}). Call it"
            f" inside shard_map, pmap or vmap over that axis, as gravac.data_parallel"
            f" does, and give the name that your mesh has. Under a plain jit with"
            f" sharding annotations XLA has averaged the gradients already, and there"
            f" is nothing left to compress. To run on one device alone pass"
            f" axis_name=None."
        ) from None


def path_and_leaf(compress: Callable[..., Any]) -> None:
    """Refuse a function that does not take a path and a leaf."""
    try:
        signature = inspect.signature(compress)
    except ValueError:  # of a builtin
        return
    try:
        signature.bind("['w']", None)
    except TypeError:
        raise TypeError(
            f"`compress` must be a function of (path, leaf), such as lambda path, leaf:"
            f" leaf.ndim == 2, got one of {signature}."
        ) from None


def is_loss(value: Any) -> None:
    """Refuse a loss that is not one number."""
    is_array = jax.tree_util.all_leaves([value])
    if not is_array or jnp.shape(value) != ():
        got = f"shape {jnp.shape(value)}" if is_array else f"a {type(value).__name__}"
        raise TypeError(
            f"the loss must be one number, got {got}. Return its mean over the"
            f" batch; if the function returns (loss, aux), say has_aux=True."
        )


def is_metric(path: str, x: Any) -> None:
    """Refuse a metric that is neither an array nor a number."""
    if not (hasattr(x, "dtype") or isinstance(x, numbers.Number)):
        raise TypeError(
            f"the metric at {path} that the step returns is a {type(x).__name__}:"
            f" return arrays and numbers only, and add names outside of the step."
        )


def gradients(tree: Any, name: str = "gradients") -> None:
    """Refuse leaves that are not real floating-point arrays."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    for path, leaf in _arrays.named_leaves(tree, is_masked):
        if is_masked(leaf):
            raise TypeError(
                f"the {name} hold a MaskedNode at {path}: optax.masked or"
                f" optax.partition stands around gravac.transform, and the leaves that"
                f" they hide would never be averaged over replicas. Put them around"
                f" the inner optimizer only, and choose which leaves are compressed"
                f" with gravac.transform(compress=...)."
            )
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            make = " Make it an array with jnp.asarray."
            raise TypeError(
                f"the {name} must be real floating-point arrays, got"
                f" {dtype or type(leaf).__name__} at {path}."
                f"{make if isinstance(leaf, float) else ''} Differentiate with respect"
                f" to the float params only, and keep counters, keys and complex"
                f" params out of what the optimizer sees. Of an nnx model with dropout,"
                f" batch statistics or counters gravac.nnx_value_and_grad takes the"
                f" gradients of its nnx.Param variables."
            )


def still_local(path: str, missing: Sequence[str]) -> None:
    """Refuse gradients that were summed over the axis before."""
    raise ValueError(
        f"the gradient at {path} does not vary over {tuple(missing)}: it was summed"
        f" over the replicas before gravac saw it, so there is nothing left to"
        f" compress. Remove any jax.lax.pmean of gradients, and take them with"
        f" gravac.value_and_grad(loss, axis_name): under shard_map jax.grad and"
        f" nnx.grad add them up by themselves for replicated params. (For an nnx model"
        f" that changes while it computes, gravac.nnx_value_and_grad.)"
        f" optax.MultiSteps and optax.apply_if_finite around the transform raise this"
        f" error, too: put them around what comes after it. So does a second transform"
        f" in the chain: one is enough."
    )


def is_pure(steps: Any) -> None:
    """Refuse a state whose arrays are wrapped in variables of Flax NNX."""
    if not jax.tree_util.all_leaves([steps]):
        raise TypeError(
            f"the optimizer state holds nnx variables in place of arrays, got"
            f" {type(steps).__name__}: pass nnx.as_pure(optimizer.opt_state)."
        )


def no_state(received: Any) -> None:
    """Refuse what is not the state of a transform."""
    raise ValueError(
        f"`update` was given a {type(received).__name__} in place of the transform's"
        f" state: write tx.update(grads, opt_state, params), in this order, with the"
        f" state of this tx. If its chain has changed, call init again."
    )


def state_matches(received: Any, expected: Any) -> None:
    """Refuse a state that was made for other params, or with other components."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        return {path: jnp.shape(x) for path, x in _arrays.named_leaves(tree)}

    if shapes(received) != shapes(expected):
        had, need = shapes(received), shapes(expected)
        for path in [path for path in had if need.get(path) == had[path]]:
            del had[path], need[path]
        raise ValueError(
            f"the state does not fit the gradients: it holds {had} where these"
            f" gradients and components need {need}. The params changed structure, or"
            f" the transform was built with other components: call init again. An axis"
            f" of replicas longer than 1 means that the state was placed, but the step"
            f" does not run under shard_map with gravac.state_specs, as"
            f" gravac.data_parallel does."
        )


def warn_of_guess(controller: Any) -> None:
    """Warn that a controller chooses for a network that nobody named."""
    warnings.warn(
        f"{type(controller).__name__} is told no step times, and chooses for a guess:"
        f" 10 ms of computation a step and a network of 1 Gbit/s. gravac.train_step"
        f" measures them. In a step of your own pass what gravac.StepClock measures to"
        f" tx.update(..., step_seconds=...), or say what your network can do:"
        f" gravac.transform(wire=gravac.WireCost(...)), or what the probe found there.",
        stacklevel=2,
    )


def needs_delay() -> None:
    """Refuse to receive before the gradient is there, without a delay."""
    raise ValueError(
        "overlap=True needs gravac.transform(delay=1): without a delay an exchange"
        " waits for the gradient. Add the delay, or leave `overlap` out."
    )


def params_given(params: Any, name: str) -> None:
    """Refuse an update without the params that `name` needs."""
    if params is None:
        raise ValueError(
            f"gravac.transform({name}=...) uses the params, and `update` was given"
            f" none: pass them, tx.update(grads, opt_state, params)."
        )


def comparable(tree: Any) -> None:
    """Refuse leaves whose bits cannot be compared or sent."""
    for path, leaf in _arrays.named_leaves(tree):
        if jnp.iscomplexobj(leaf):
            raise TypeError(
                f"the leaf at {path} is complex, and its bits cannot be compared or"
                f" sent: pass its real and imaginary parts."
            )


def mask_matches(mask: Any, tree: Any) -> None:
    """Refuse a `compress` mask of another structure than the params."""
    is_bool = all(isinstance(leaf, bool) for leaf in jax.tree.leaves(mask))
    if not is_bool or jax.tree.structure(mask) != jax.tree.structure(tree):
        raise ValueError(
            f"`compress` must be a bool, a function of (path, leaf), or a pytree of"
            f" bools of the params' own structure, got {_arrays.brief(mask)} for"
            f" {jax.tree.structure(tree)}. With nnx, write a function."
        )


def splits(arguments: dict[Any, Any], micro_batches: int) -> None:
    """Refuse a batch that does not divide into micro-batches."""
    for name, argument in arguments.items():
        for path, leaf in _arrays.named_leaves(argument):
            shape = jnp.shape(leaf)
            if not shape or shape[0] % micro_batches:
                raise ValueError(
                    f"micro_batches={micro_batches} does not divide the first axis of"
                    f" argument {name!r} ({path}), of shape {shape}. Arguments that are"
                    f" not differentiated are the batch, and split along it: choose a"
                    f" divisor of its rows. Close over arguments without rows. Give one"
                    f" random key for each row."
                )


def sharded_as_said(path: str, is_slice: bool, axis_name: Any) -> None:
    """Refuse a slice that is taken for a whole leaf, or the reverse."""
    found, said = ("a slice", "whole") if is_slice else ("whole", "a slice")
    raise ValueError(
        f"the leaf at {path} is {found} on each device along {axis_name!r}, and"
        f" gravac.transform takes it for {said}: its gradient would be averaged"
        f" wrongly. `sharded` must name the leaves that are sharded over"
        f" `dense_axis_name`, and no others."
    )


def sharded_over(used: set[str], fast: Sequence[str]) -> None:
    """Refuse params that are sharded over any axis but those of `dense_axis_name`."""
    if others := sorted(used - set(fast)):
        raise ValueError(
            f"the params are sharded over {others}, and may be sharded over"
            f" `dense_axis_name` {tuple(fast)} only: along `axis_name` a replica needs"
            f" all of the model, and other axes take no part. Leave {others} out of the"
            f" params' specs, also an axis that is one device long."
        )


def one_mesh(shardings: Sequence[Any]) -> Any:
    """Return the mesh of shardings; refuse several, or none."""
    meshes = {x.mesh for x in shardings if isinstance(x, jax.NamedSharding)}
    if len(meshes) != 1:
        raise ValueError(
            f"`sharded` must be the params as they lie on one mesh, or their"
            f" jax.NamedSharding, got {len(meshes)} meshes, and"
            f" {sorted({type(x).__name__ for x in shardings})}. Under a trace JAX does"
            f" not tell how params are sharded: take them from outside of jit."
        )
    return meshes.pop()


def sharded_inside(used: set[str], slow: Sequence[str]) -> None:
    """Refuse params that are sharded over the slow axis."""
    if both := sorted(used & set(slow)):
        raise ValueError(
            f"the params are sharded over {both}, and a replica along `axis_name` needs"
            f" all of the model: leave {both} out of their specs."
        )


def sharded_alike(leaves: Sequence[Any], specs: Sequence[Any]) -> None:
    """Refuse leaves that are not those of which `sharded` told how they are sharded."""
    is_alike = lambda x, spec: len(spec) <= len(x.shape)
    if len(leaves) != len(specs) or not all(map(is_alike, leaves, specs)):
        raise ValueError(
            f"`sharded` told of {len(specs)} leaves sharded by {_arrays.brief(specs)},"
            f" and there are {len(leaves)}, of the shapes"
            f" {_arrays.brief([x.shape for x in leaves])}. Give gravac.transform the"
            f" params that the optimizer sees: sharded=params."
        )


def is_auto(mesh: Any, axis_name: Any) -> None:
    """Refuse a mesh on which the compiler cannot be left to shard the model."""
    if not isinstance(axis_name, str):
        raise ValueError(
            f"where the compiler shards the model over other axes of a mesh, replicas"
            f" lie along one axis, got {axis_name!r}: make one axis of these."
        )
    if set(mesh.axis_types) != {jax.sharding.AxisType.Auto}:
        raise ValueError(
            f"where the compiler shards the model, all axes of the mesh must be Auto,"
            f" got {mesh.axis_types}: jax.make_mesh(shape, names, axis_types="
            f"(jax.sharding.AxisType.Auto,) * {len(mesh.axis_types)})."
        )


def is_spread(is_mapped_by_vmap: bool, axis_name: Any) -> None:
    """Refuse a transform that knows of slices, in a step that is mapped otherwise."""
    if not is_mapped_by_vmap:
        raise ValueError(
            f"gravac.transform(sharded=params) leaves the model to the compiler, and"
            f" this step is mapped over {axis_name!r} by shard_map or pmap. Run it by"
            f" gravac.data_parallel(step, mesh, {axis_name!r}), without a"
            f" `dense_axis_name`."
        )


def is_placed(leading: Any, replicas: int) -> None:
    """Refuse a state that was not placed on this many replicas."""
    if leading is None:
        raise ValueError(
            f"the state is not placed: what the transform keeps per replica has no"
            f" leading axis of {replicas} replicas. Call params, opt_state ="
            f" gravac.place((params, opt_state), mesh) first (for gravac.simulate, with"
            f" the number of replicas in place of the mesh), and in a shard_map of your"
            f" own take its specs from gravac.state_specs."
        )
    if leading != replicas:
        raise ValueError(
            f"the state is placed on {leading} replicas, and the step runs on"
            f" {replicas}. Give gravac.place the same mesh or number as the step."
        )


def is_sliced(leading: Any, devices: int) -> None:
    """Refuse a state that was made without knowing how the params are sharded."""
    if leading != devices:
        raise ValueError(
            f"the state holds what the transform keeps of {leading} devices of a"
            f" replica, which has {devices}. Make it by gravac.init(tx, params, mesh,"
            f" axis_name), with a transform that knows how the params are sharded:"
            f" sharded=params."
        )


def placed_on(state_replicas: int, mesh_replicas: int) -> None:
    """Refuse to move per-replica state onto another number of replicas."""
    if state_replicas != mesh_replicas:
        raise ValueError(
            f"the state is placed on {state_replicas} replicas, and the mesh has"
            f" {mesh_replicas}: what each replica still holds back would be lost or"
            f" doubled. Place it on {state_replicas} replicas, or start from"
            f" gravac.init."
        )


def divided(
    args: Sequence[Any], carried: int, replicas: int
) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Split a step's arguments into its state, what replicas carry, and its batch.

    Refuse a carry or a batch that does not divide over the replicas, and a state whose
    memory an earlier step has reused.
    """
    if len(args) < 2 + carried:
        carry = ", what replicas carry" if carried else ""
        carries = "".join(f", carry_{i}" for i in range(1, carried + 1))
        raise TypeError(
            f"the step takes its state{carry} and then a batch, all by position, got"
            f" {len(args)} arguments. Call it as step(params, opt_state{carries},"
            f" batch), or step(train_state{carries}, batch)."
        )
    (*given, batch), first = args, len(args) - 1 - carried
    state, own = tuple(given[:first]), tuple(given[first:])
    _still_there(given)
    _divides(own, replicas, "what is carried")
    what = "the batch, the last argument or the one that is no nnx object,"
    _divides(batch, replicas, what)
    return state, own, batch


def _still_there(given: Sequence[Any]) -> None:
    """Refuse arguments that an earlier step has reused; jaxlib may crash on them."""
    for argument in given:
        first = next(iter(jax.tree.leaves(argument)), None)
        is_traced = isinstance(first, core.Tracer)
        if isinstance(first, jax.Array) and not is_traced and first.is_deleted():
            raise ValueError(
                "the state was given to an earlier step, which reused its memory: go on"
                " with what that step returned, params, opt_state, loss ="
                " step(params, opt_state, batch). In a notebook, run the cell again"
                " that makes the state. gravac.data_parallel(..., donate=False) keeps"
                " it, at the cost of its memory."
            )


def _divides(tree: Any, replicas: int, what: str) -> None:
    for path, leaf in _arrays.named_leaves(tree):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % replicas:
            raise ValueError(
                f"{what} cannot be split over {replicas} replicas: {path} has shape"
                f" {shape}. Its first axis must be a multiple of {replicas}; pass what"
                f" is the same for all by keyword. A batch of several steps has its"
                f" rows first, too: (rows, steps, ...)."
            )


def with_aux(out: Any) -> tuple[Any, Any]:
    """Return (loss, aux); refuse anything else."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"has_aux=True is for a function that returns (loss, aux), got"
            f" {_arrays.brief(out)}."
        )
    return out


def positional(args: Sequence[Any], argnums: Sequence[int]) -> None:
    """Refuse to differentiate an argument that was not given by position."""
    if any(not -len(args) <= i < len(args) for i in argnums):
        raise TypeError(
            f"value_and_grad differentiates the arguments {tuple(argnums)}, counted by"
            f" position, got {len(args)} positional arguments. Pass them by position,"
            f" not by name."
        )


def stays_alike(path: str, names: Sequence[str]) -> None:
    """Refuse state that is returned different on devices on which it was the same."""
    raise ValueError(
        f"the leaf at {path} of the state that the step returns differs between the"
        f" devices along {tuple(names)}, and it came in the same on all of them. Local"
        f" gradients become the same in gravac.transform: it comes first in"
        f" optax.chain. What is no gradient needs a jax.lax.pmean, such as the"
        f" statistics of a BatchNorm or a loss that the optimizer is told, or a"
        f" jax.lax.psum, such as counts. For metrics of Flax NNX"
        f" gravac.nnx_data_parallel does it, and gravac.nnx_value_and_grad for batch"
        f" statistics. The last argument alone is the batch: give all of it there,"
        f" such as (x, y). Where params are sharded, a norm over slices differs"
        f" too: in place of optax.clip_by_global_norm use gravac.transform("
        f"clip=gravac.ClipByGlobalNorm(...)). check_vma=False would only hide it."
    )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Add to errors of JAX and Optax in a step what they mean for its author."""
    try:
        yield
    except TypeError as error:
        for words, note in _NOTES.items():
            if words in str(error):
                error.add_note(note)
        raise


_NOTES = {
    "argument 'measured_step'": """
gravac: the times of gravac.StepClock reach a step by name. Let it take them, as
train_step(params, opt_state, batch, **times), and hand them on to tx.update(...,
**times).
""",
    "manual ax": """
gravac: "V:" marks what may differ between replicas. Here it meets what is known to be
the same on all of them, in a loop or a branch.
- To accumulate gradients over parts of a batch, leave the loop to
  gravac.value_and_grad(loss, micro_batches=...).
- What an optimizer is told, such as optax.contrib.reduce_on_plateau, must be the same
  on all replicas: tx.update(..., value=jax.lax.pmean(loss, axis_name)).
- The carry of any other loop begins with jax.lax.pcast(zeros, axis_name, to="varying").
""",
    "update_fn() missing": """
gravac: a part of the optimizer is told more than gradients. In a step of your own write
tx.update(grads, opt_state, params, value=jax.lax.pmean(loss, axis_name)), for example.
gravac.train_step tells the optimizer no more than the times of steps.
""",
}


def variable_stays_alike(path: str, kind: str, who: str) -> None:
    """Refuse an nnx variable that is left different on different replicas."""
    raise ValueError(
        f"{who} changes {path}, of type {kind}, to something that may differ between"
        f" replicas, and it was the same on all of them. Params change by the gradients"
        f" of gravac.nnx_value_and_grad (or gravac.value_and_grad) and a"
        f" gravac.transform that comes first in the optimizer's chain. If it is a"
        f" statistic of the batch, make it an nnx.BatchStat that the loss of"
        f" gravac.nnx_value_and_grad changes: its mean over replicas is kept. Otherwise"
        f" average what is written with jax.lax.pmean, or return it: from a loss as"
        f" aux, with has_aux=True."
    )


def is_nnx_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer without the state that own params need."""
    if not (hasattr(optimizer, "tx") and hasattr(optimizer, "opt_state")):
        raise TypeError(
            f"`optimizer` must be the nnx.Optimizer of the model, for its state, got"
            f" {type(optimizer).__name__}. For gradients at the shared params leave it"
            f" out."
        )


def has_params(params: Any, args: Sequence[Any]) -> None:
    """Refuse to differentiate a first argument without nnx params."""
    if not jax.tree.leaves(params):
        kind = type(args[0]).__name__ if args else "no positional argument"
        raise TypeError(
            f"nnx_value_and_grad differentiates with respect to the nnx.Param variables"
            f" of its first argument, and there are none, got {kind}. Pass the model"
            f" first, by position; gravac.value_and_grad takes a pytree of arrays."
        )


def keeps_structure(
    objects: Sequence[Any], structures: Sequence[Any], who: str
) -> None:
    """Refuse to change more of nnx objects than the values of their variables."""
    for x, before in zip(objects, structures, strict=True):
        if jax.tree.structure(x) != before:
            paths = [path for path, _ in _arrays.named_leaves(x)]
            raise ValueError(
                f"{who} adds, removes or changes something in its {type(x).__name__}"
                f" that is not the value of a variable; it has now {paths}. Only values"
                f" can be written back. Change attributes outside of {who}"
                f" (model.train(), model.eval()), and take what self.sow has stored"
                f" out again, nnx.pop(model, nnx.Intermediate), where it is used."
            )


def batch_among(args: Sequence[Any], is_object: Callable[[Any], bool]) -> int:
    """Return the index of the one argument that is no nnx object."""
    leaves = [jax.tree.leaves(x, is_leaf=is_object) for x in args]
    others = [i for i, found in enumerate(leaves) if not all(map(is_object, found))]
    places = others or [i for i, found in enumerate(leaves) if not found][-1:]
    if len(places) != 1 or len(args) < 2:
        kinds = [f"argument {i} ({type(args[i]).__name__})" for i in places]
        raise TypeError(
            f"an nnx step takes nnx objects, which it changes in place, and one batch,"
            f" all by position; of {len(args)} arguments those that are no nnx objects"
            f" are: {', '.join(kinds) or 'none'}. Give a batch of several arrays as one"
            f" tuple or dict, and arrays that are the same for all replicas by keyword."
            f" For state that is no nnx object there is gravac.data_parallel."
        )
    return places[0]


def shares_nothing(objects: Sequence[Any], is_variable: Callable[[Any], bool]) -> None:
    """Refuse a variable that two objects, or two attributes, share."""
    seen: dict[int, str] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tuple(objects), is_leaf=is_variable)
    for path, x in leaves:
        name = jax.tree_util.keystr(path)
        if is_variable(x) and (first := seen.setdefault(id(x), name)) != name:
            raise ValueError(
                f"the step's arguments share the {type(x).__name__} at {first} and at"
                f" {name}: replicas would each change two copies of it. Keep one, and"
                f" hand it to the other place when it is called."
            )


def no_objects(returned: Any, is_object: Callable[[Any], bool]) -> None:
    """Refuse a step that returns its objects instead of changing them in place."""
    leaves = jax.tree.leaves(returned, is_leaf=is_object)
    if kinds := [type(x).__name__ for x in leaves if is_object(x)]:
        raise TypeError(
            f"the step returns nnx objects, {kinds}. Its arguments are changed in"
            f" place: return metrics only, or None."
        )


def adds_up(
    objects: Sequence[Any],
    is_metric: Callable[[Any], bool],
    is_average: Callable[[Any], bool],
    is_sum: Callable[[Any], bool],
) -> None:
    """Refuse metrics that are no sums over the batch."""
    leaves = jax.tree_util.tree_leaves_with_path(tuple(objects), is_leaf=is_metric)
    for path, x in leaves:
        held = any(map(is_sum, jax.tree.leaves(x, is_leaf=is_sum)))
        if held and not is_average(x):
            raise ValueError(
                f"the {type(x).__name__} at {jax.tree_util.keystr(path)} of the step's"
                f" arguments cannot be added up over replicas: only subclasses of"
                f" nnx.metrics.Average (such as Accuracy) are known to be sums over the"
                f" batch. Use nnx.metrics.Average of the values and of their squares,"
                f" or a subclass of Average whose MetricStates are sums, or return the"
                f" values from the step and update the metric outside."
            )


def computed_after_step() -> None:
    """Refuse to compute a metric of which a replica has its own part only."""
    raise ValueError(
        "the step calls `compute` of a metric, which holds on each replica the sums of"
        " that replica alone until the step ends. Call it after the step, on the same"
        " metric."
    )


def leaves_arguments(before: Any, after: Any) -> None:
    """Refuse a loss that changes its arguments, which are copies."""
    old, new = _arrays.named_leaves(before), _arrays.named_leaves(after)
    changed = [path for (path, x), (_, y) in zip(old, new, strict=False) if x is not y]
    if changed or len(old) != len(new):
        raise ValueError(
            f"the loss changes its arguments, at {changed or 'new leaves'}: it sees a"
            f" copy, and the change would be lost. Return it, with has_aux=True. For an"
            f" nnx model use gravac.nnx_value_and_grad, which writes changes back."
        )


def returned_state(results: Any, state: Sequence[Any]) -> None:
    """Refuse a step that does not return the state that it was given."""
    received = [jax.tree.structure(x) for x in results[: len(state)]]
    if received != [jax.tree.structure(x) for x in state]:
        raise ValueError(
            f"the step must return its {len(state)} state arguments first, each of the"
            f" structure that it came in, then any metrics, as a tuple; got"
            f" {len(results)} results of the structures {_arrays.brief(received)}."
        )


def has_no_mean(path: str, dtype: Any, axis_name: Any) -> None:
    """Refuse a metric that would have to be averaged, and loses by it."""
    raise TypeError(
        f"the metric at {path} that the step returns is {dtype}, and not known to be"
        f" the same on all replicas, and its mean would be a rounded float. Count over"
        f" all of them with gravac.Comm({axis_name!r}).sum(x), flags as int32, or"
        f" return a float, whose mean is reported. Under check_vma=False only floats"
        f" can be returned."
    )


def returned_carry(results: Any, own: Any) -> None:
    """Refuse a step that returns a carry of other shapes or dtypes."""
    before, after = _arrays.named_leaves(own), jax.tree.leaves(results)
    for (path, old), new in zip(before, after, strict=True):
        if (jnp.shape(new), jnp.result_type(new)) != (old.shape, old.dtype):
            raise ValueError(
                f"the step must return what it carries in the shapes and dtypes in"
                f" which it came: {path} came as {old.dtype}{list(old.shape)} and was"
                f" returned as {jnp.result_type(new)}{list(jnp.shape(new))}."
            )
