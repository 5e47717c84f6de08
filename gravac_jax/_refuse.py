"""Refuse what cannot work: wrong arguments, and what a step must not be given.

Each function raises before anything is changed, and in one voice: what must be, what
was received, the remedy; `warn` warns. Trouble that shows in values alone becomes a
counter of `StepInfo` instead. `_loop/chain.py` refuses optimizers that are put together
wrongly. Here is also what both ask for: names of axes, and what a function reaches.
"""

import math
import numbers
import operator
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core
from jax.extend.core import Literal

from gravac_jax import _arrays

_LIBRARIES = {"gravac_jax", "jax", "optax", "flax"}


def warn(text: str) -> None:
    """Warn at the line of the user's code that led here."""
    frame, level = sys._getframe(1), 2
    package = lambda frame: frame.f_globals.get("__name__", "").partition(".")[0]
    while frame.f_back and package(frame) in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


# Any argument. ----------------------------------------------------------------------

_BOUNDS = {
    "low": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def is_number(value: Any, is_whole: bool = False) -> bool:
    """Return whether `value` is a finite number, and no bool."""
    kind = numbers.Integral if is_whole else numbers.Real
    is_real = isinstance(value, kind) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def number(
    value: Any, name: str, hint: str = "", *, is_whole: bool = False, **bounds: float
) -> None:
    """Refuse what is no finite number within bounds: `low`, `above`, `high`, `below`.

    `low` and `high` are themselves allowed.
    """
    fits = lambda: all(_BOUNDS[end][1](value, x) for end, x in bounds.items())
    if not is_number(value, is_whole) or not fits():
        limits = " and ".join(f"{_BOUNDS[end][0]} {x:g}" for end, x in bounds.items())
        if isinstance(value, jax.Array) and not is_whole:
            hint = "pass float(x); optax.inject_hyperparams takes a lambda of the rate"
        raise ValueError(
            f"`{name}` must be a {'whole ' * is_whole}number {limits}, got"
            f" {_arrays.brief(value)}{': ' * bool(hint)}{hint}."
        )


def count(value: Any, name: str, what: str) -> None:
    """Refuse anything but a positive whole number."""
    number(value, name, f"it counts {what}", is_whole=True, low=1)


def one_of(value: Any, name: str, allowed: Sequence[Any]) -> None:
    """Refuse a value that is not among `allowed`."""
    wrong = bool | float | np.floating | np.ndarray | jax.Array  # 2.0 == 2
    if isinstance(value, wrong) or value not in allowed:
        words = " or ".join(map(repr, allowed))
        raise ValueError(f"`{name}` must be {words}, got {_arrays.brief(value)}.")


def instance(value: Any, kind: type, name: str, example: str) -> None:
    """Refuse what is not of a class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(
            f"`{name}` must be {article} {kind.__name__}, such as {example}, got"
            f" {_arrays.brief(value)}."
        )


def function(value: Any, name: str, call: str) -> None:
    """Refuse what cannot be called in the place of a function."""
    # A mesh decorates functions, so it can be called.
    if not callable(value) or isinstance(value, jax.sharding.Mesh):
        raise TypeError(
            f"`{name}` must be a function, as in {call}, got {_arrays.brief(value)}."
        )


def optimizer(tx: Any, call: str) -> None:
    """Refuse what lacks the two functions of an optimizer of Optax."""
    if not (callable(getattr(tx, "init", None)) and hasattr(tx, "update")):
        raise TypeError(
            f"`tx` must be an optimizer of Optax, as in {call}, got"
            f" {type(tx).__name__}: of an nnx.Optimizer pass optimizer.tx."
        )


# Axes, meshes, and where a state lies. ----------------------------------------------


def axis_names(axis_name: Any) -> tuple[Any, ...]:
    """Return the axes that `axis_name` names; none for None."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def names_in(spec: Any) -> set[Any]:
    """Return the axes over which a `PartitionSpec` shards."""
    return {name for part in spec for name in axis_names(part)}


def axis(axis_name: Any, name: str = "axis_name") -> None:
    """Refuse a value that cannot name a mapped axis."""
    names = axis_names(axis_name)
    if axis_name is not None and not (names and all(isinstance(x, str) for x in names)):
        raise TypeError(
            f"`{name}` must be an axis, axes in a tuple, or None, got"
            f" {_arrays.brief(axis_name)}: what is sent is send=gravac.Bits(2)."
        )


def two_axes(axis_name: Any, fast_axis_name: Any) -> None:
    """Refuse a fast axis that is also the slow one, or has no slow one beside it."""
    axis(axis_name)
    axis(fast_axis_name, "fast_axis_name")
    slow, fast = axis_names(axis_name), axis_names(fast_axis_name)
    if fast and (not slow or set(slow) & set(fast)):
        raise ValueError(
            f"`fast_axis_name` must be another axis beside `axis_name`, the slow one,"
            f" got {fast_axis_name!r} beside {axis_name!r}."
        )


def mesh(mesh: Any, axis_name: Any, fast_axis_name: Any = None) -> None:
    """Refuse what is neither a mesh with the axes nor a number of replicas."""
    two_axes(axis_name, fast_axis_name)
    if not isinstance(mesh, jax.sharding.Mesh):
        if fast_axis_name is not None or not isinstance(axis_name, str):
            raise TypeError(
                f"`mesh` must be a jax.sharding.Mesh, got {_arrays.brief(mesh)}:"
                f" simulated replicas lie along one axis, such as 'data', got"
                f" {axis_name!r} and fast_axis_name={fast_axis_name!r}."
            )
        return count(mesh, "mesh", "replicas to simulate, where it is no mesh")
    for name in (*axis_names(axis_name), *axis_names(fast_axis_name)) or (None,):
        if name not in mesh.axis_names:
            raise ValueError(
                f"`axis_name` and `fast_axis_name` must be among {mesh.axis_names}, got"
                f" {name!r}: give the mesh, the step and gravac.transform the same."
            )


def by_hand(mesh: Any, axis_name: Any) -> None:
    """Refuse a mesh on which the compiler cannot be left to shard the model."""
    is_auto = set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    if not is_auto or not isinstance(axis_name, str):
        raise ValueError(
            f"where the compiler shards the model, `axis_name` must be one axis and all"
            f" must be Auto, got {axis_name!r} and {mesh.axis_types}: take"
            f" jax.sharding.Mesh(mesh.devices, mesh.axis_names)."
        )


def bound_axis(axis_name: Any, caller: str) -> None:
    """Refuse a call outside the axis that the components were built for."""
    if not is_bound(axis_name):
        raise ValueError(
            f"`{caller}` was called outside axis_name={axis_name!r}: give the step the"
            f" same axis, in a shard_map, not in a plain jit, where XLA has averaged"
            f" gradients unless params are `reduced`, or alone with axis_name=None."
        )


def is_bound(axis_name: Any) -> bool:
    """Return whether the axis is there, as inside of a shard_map; none always is."""
    try:
        return axis_name is None or bool(jax.lax.axis_size(axis_name))
    except NameError:
        return False


def placed(leading: int | None, parts: int, is_sliced: bool = False) -> None:
    """Refuse a state that was not placed on this many replicas, or slices of them."""
    if leading == parts:
        return
    where = "not placed" if leading is None else f"placed on {leading} replicas, not"
    made = "gravac.transform(shardings=params)" if is_sliced else "tx.init(params)"
    raise ValueError(
        f"the state is {where} on {parts}: make it by {made} and gravac.place with the"
        f" mesh of the step, which with `shardings` has no fast axis; in a shard_map of"
        f" your own take gravac.state_specs. gravac_jax.checkpoint moves what replicas"
        f" hold back to other meshes."
    )


def no_array(path: str, x: Any) -> None:
    """Refuse a leaf that is neither an array nor a number, such as a function."""
    if not (hasattr(x, "dtype") or isinstance(x, numbers.Number)):
        raise TypeError(
            f"gravac.place takes arrays and numbers, got {_arrays.brief(x)} at {path}:"
            f" place eqx.filter(model, eqx.is_array), and eqx.combine it in the step."
        )


def cut(path: str, sharding: Any, axis_name: Any) -> NoReturn:
    """Refuse a leaf that would have to be gathered for each replica."""
    raise ValueError(
        f"the leaf at {path} is sharded over {getattr(sharding, 'spec', sharding)}, and"
        f" each replica along {axis_name!r} needs all of it: shard it over other axes"
        f" of the mesh, or first jax.device_put(x, jax.NamedSharding(mesh, jax.P()))."
        f" If pmap made it, take jax.tree.map(lambda x: x[0], params), and tx.init."
    )


def ties(tree: Any) -> None:
    """Refuse nnx objects that share a variable, as each would be changed by itself."""
    nnx: Any = sys.modules.get("flax.nnx")
    is_object = lambda x: isinstance(x, nnx.Pytree | nnx.Variable)
    # States are values: Optax may hold the same ones as the params.
    is_leaf = lambda x: is_object(x) or isinstance(x, nnx.State)
    leaves = jax.tree.leaves(tree, is_leaf=is_leaf) if nnx else ()
    only = lambda _, x: bool(jax.tree.leaves(x))
    if twice := nnx and nnx.find_duplicates([*filter(is_object, leaves)], only=only):
        raise ValueError(
            f"nnx objects share variables, got one at each of {twice[0]}: keep one, and"
            f" hand it over where the other is used."
        )


def members(states: Sequence[Any]) -> None:
    """Refuse the states of an ensemble, whose axis would count as that of replicas."""
    for shape in filter(None, (jnp.shape(x.steps) for x in states)):
        raise ValueError(
            f"the state has an axis, {shape}. If it is pmap's, take jax.tree.map(lambda"
            f" x: x[0], params), and tx.init. If it is that of {shape} members, call"
            f" tx.init and tx.update once for stacked params, and vmap the loss alone."
        )


def not_whole(path: str, axis_name: Any) -> NoReturn:
    """Refuse a slice of params in a step that is mapped over a fast axis."""
    raise ValueError(
        f"the leaf at {path} is a slice along the fast axis {axis_name!r}: write"
        f" gravac.transform(shardings=params) in place of `fast_axis_name`."
    )


# The function that is differentiated. -----------------------------------------------


def changed_arguments(before: Any, after: Any) -> None:
    """Refuse a loss that changes its arguments, which are copies."""
    old, new = _arrays.named_leaves(before), _arrays.named_leaves(after)
    changed = [path for (path, x), (_, y) in zip(old, new, strict=False) if x is not y]
    if changed or len(old) != len(new):
        raise ValueError(
            f"the loss changes its arguments, at {changed or 'new leaves'}: return what"
            f" changes, with has_aux=True, or take gravac.nnx_value_and_grad."
        )


# What the transform is given. -------------------------------------------------------


def gradients(tree: Any, name: str = "gradients") -> None:
    """Refuse leaves that are not real floating-point arrays."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    for path, leaf in _arrays.named_leaves(tree, is_masked):
        if is_masked(leaf):
            raise TypeError(
                f"the {name} hold a MaskedNode at {path}: mask what comes after the"
                f" transform, and choose leaves by gravac.transform(compress=...)."
            )
        dtype = getattr(leaf, "dtype", None)
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        if not is_float or jnp.finfo(dtype).bits < 16:  # JAX adds up none of 8 bits
            raise TypeError(
                f"the {name} must be real floating-point arrays of 16 bits or more, got"
                f" {dtype or type(leaf).__name__} at {path}: differentiate only float"
                f" params (gravac.nnx_value_and_grad, eqx.partition) of jnp.asarray."
            )


def summed(path: str, axes: Sequence[str]) -> NoReturn:
    """Refuse a gradient that was summed over the axes before."""
    raise ValueError(
        f"the gradient at {path} does not vary over {tuple(axes)}, as if summed before:"
        f" take it by gravac.value_and_grad (gravac.nnx_value_and_grad), and remove any"
        f" jax.lax.pmean, second transform, or wrapper around the transform."
    )


def no_params(name: str) -> NoReturn:
    """Refuse an update without the params that `name` needs."""
    raise ValueError(
        f"gravac.transform({name}=...) uses the params, and `update` was given none:"
        f" write tx.update(grads, opt_state, params)."
    )


def pure(steps: Any) -> None:
    """Refuse a state whose arrays are wrapped in variables of Flax NNX."""
    if not jax.tree_util.all_leaves([steps]):
        raise TypeError(
            f"the optimizer state must hold arrays, got {type(steps).__name__}: pass"
            f" nnx.as_pure(optimizer.opt_state)."
        )


def by_leaf(why: str) -> NoReturn:
    """Refuse a memory that runs on whole leaves where leaves are cut."""
    raise ValueError(
        f"`memory` runs an optimizer on whole leaves, and {why}: use one that works"
        f" entry by entry, memory=gravac.OwnOptimizer(optax.adam(1e-3))."
    )


def state_of_others(received: Any, expected: Any) -> None:
    """Refuse a state that was made for other params, or with other components."""
    shapes = lambda tree: {path: jnp.shape(x) for path, x in _arrays.named_leaves(tree)}
    had, need = shapes(received), shapes(expected)
    if had != need:
        for path in [path for path in had if need.get(path) == had[path]]:
            del had[path], need[path]
        raise ValueError(
            f"the state does not fit the gradients, which need {need}, got {had}: call"
            f" init again, or if it is placed take gravac.state_specs."
        )


def mask(compress: Any, tree: Any) -> None:
    """Refuse a `compress` mask of another structure than the params."""
    is_bool = all(isinstance(leaf, bool) for leaf in jax.tree.leaves(compress))
    if not is_bool or jax.tree.structure(compress) != jax.tree.structure(tree):
        raise ValueError(
            f"`compress` must be a bool, a function, or a pytree of bools like the"
            f" params, got {_arrays.brief(compress)}."
        )


# What a step is called with, and what it returns. -----------------------------------


def divided(
    args: Sequence[Any],
    carried: int,
    replicas: int,
    is_donated: bool,
    shared: dict[str, Any],
) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Split a step's arguments into its state, what replicas carry, and its batch.

    Refuse a carry or a batch that does not divide over the replicas, a state whose
    memory an earlier step has reused, and one that cannot be donated.
    """
    if len(args) < 2 + carried:
        carries = "".join(f", carry_{i}" for i in range(1, carried + 1))
        raise TypeError(
            f"the step takes a state and a batch by position, got {len(args)}"
            f" arguments: call step(params, opt_state{carries}, batch)."
        )
    (*given, batch), first = args, len(args) - 1 - carried
    state, own = tuple(given[:first]), tuple(given[first:])
    leaves = [jax.tree.leaves(x) for x in given]  # once: this is done in every step
    reused(leaves)
    if is_donated:
        _passed_twice(leaves, given, (batch, shared))
    divides(own, replicas, "what is carried")
    what = "the batch, the last argument or the one that is no nnx object,"
    divides(batch, replicas, what)
    return state, own, batch


def reused(arguments: Sequence[list[Any]]) -> None:
    """Refuse leaves that an earlier step has reused; jaxlib may crash on them."""
    for first in (leaves[0] for leaves in arguments if leaves):
        is_array = isinstance(first, jax.Array) and not isinstance(first, core.Tracer)
        if is_array and first.is_deleted():
            raise ValueError(
                "the state was given to an earlier step, which reused its memory: go on"
                " with what that step returned, or take data_parallel(donate=False)."
            )


def _passed_twice(
    leaves: Sequence[list[Any]], given: Sequence[Any], others: tuple[Any, Any]
) -> None:
    """Refuse a state with an array that is passed twice: jaxlib crashes on it."""
    ids = [id(x) for argument in leaves for x in argument]
    if len(set(ids)) == len(ids) and not set(map(id, jax.tree.leaves(others))) & {*ids}:
        return
    is_array = lambda x: isinstance(x, jax.Array) and not isinstance(x, core.Tracer)
    of_state = {id(x): path for path, x in _arrays.named_leaves(tuple(given))}
    for path, x in _arrays.named_leaves((*given, *others)):
        other = of_state.get(id(x), path)
        if other != path and is_array(x):
            raise ValueError(
                f"an array of the state, whose memory a step reuses, is passed twice,"
                f" at {other} and at {path}: copy it by jnp.copy."
            )


def divides(tree: Any, parts: int, what: str, of: str = "replicas") -> None:
    """Refuse arrays whose rows do not divide into so many parts."""
    for path, leaf in _arrays.named_leaves(tree):
        shape = jnp.shape(leaf)
        if not shape or not shape[0] or shape[0] % parts:
            raise ValueError(
                f"{what} cannot be split over {parts} {of}, got shape {shape} at"
                f" {path}: give rows first, a multiple of {parts} above 0; close over"
                f" others, or give them to a step of gravac.data_parallel by keyword."
            )


def traced(given: Any) -> None:
    """Refuse a whole step of `gravac.train_step` in a function that JAX traces."""
    if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(given)):
        raise TypeError(
            "the step of gravac.train_step reads on the host what comes next, got a"
            " tracer: call it outside of jit and scan, or take gravac.data_parallel."
        )


def other_state(results: Any, state: Sequence[Any]) -> None:
    """Refuse a step that does not return the state that it was given."""
    received = [jax.tree.structure(x) for x in results[: len(state)]]
    if received != [jax.tree.structure(x) for x in state]:
        raise ValueError(
            f"the step must return its {len(state)} state arguments first, in a tuple,"
            f" got {len(results)} results, {_arrays.brief(received)}: for nnx objects"
            f" take gravac.nnx_data_parallel."
        )


def other_carry(results: Any, own: Any) -> None:
    """Refuse a step that returns a carry of other shapes or dtypes."""
    before, after = _arrays.named_leaves(own), jax.tree.leaves(results)
    for (path, old), new in zip(before, after, strict=True):
        if (jnp.shape(new), jnp.result_type(new)) != (old.shape, old.dtype):
            raise ValueError(
                f"the step must return {path}, which it carries, as it came:"
                f" {jax.typeof(old).str_short()}, got {jax.typeof(new).str_short()}."
            )


def differs(path: str, names: Sequence[str]) -> NoReturn:
    """Refuse state that is returned different on devices on which it was the same."""
    raise ValueError(
        f"the leaf at {path} of the returned state differs along {tuple(names)}, and"
        f" came in the same on all: put gravac.transform first in the chain, the batch"
        f" in one argument such as (x, y), micro-batches in one step, and jax.lax.pmean"
        f" around what else varies (metrics of Flax take gravac.nnx_data_parallel)."
    )


# What a function does. --------------------------------------------------------------


def reached(
    jaxpr: Any, marks: Sequence[bool], begins: Callable[[Any], bool] = lambda _: False
) -> list[bool]:
    """Return which outputs of a jaxpr may depend on what is marked.

    It looks into functions under `jit`. Of loops and branches, whose choice may depend
    on data, each output counts as made of all inputs.

    Args:
      jaxpr: a traced function.
      marks: whether each of its inputs is marked.
      begins: returns whether what an equation makes is marked, too.
    """
    seen = {x for x, is_marked in zip(jaxpr.invars, marks, strict=True) if is_marked}
    is_seen = lambda x: not isinstance(x, Literal) and x in seen
    for eqn in jaxpr.eqns:
        given = list(map(is_seen, eqn.invars))
        made = [any(given) or begins(eqn)] * len(eqn.outvars)
        if eqn.primitive.name == "jit":
            made = reached(eqn.params["jaxpr"].jaxpr, given, begins)
        seen.update(x for x, is_made in zip(eqn.outvars, made, strict=True) if is_made)
    return list(map(is_seen, jaxpr.outvars))
