"""Checks of arguments, when a component is built.

Each error says what was wrong, what was received, and what to do. `_step_checks` has
the checks of what a step is given.
"""

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax

from gravac_jax import _arrays, _collectives


def _is_number(value: Any, kind: type = numbers.Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _quoted(name: str) -> str:
    return name if "`" in name else f"`{name}`"


def factor(value: Any, name: str = "factor") -> None:
    """Refuse a number that is not a factor; the likely slip is a density."""
    if not _is_number(value):
        raise TypeError(
            f"{_quoted(name)} must be a number of at least 1, got {value!r}. A factor"
            f" is n / k (10 sends one entry in ten)."
        )
    if not (math.isfinite(value) and value >= 1):
        hint = "factor 1 sends everything"
        if 0 < value < 1:
            hint = f"for a density of {value} write {1 / value:g}"
        raise ValueError(
            f"{_quoted(name)} must be finite and at least 1, got {value}. A factor is"
            f" n / k (10 sends one entry in ten); {hint}."
        )


def ladder(factors: Any, name: str = "ladder") -> None:
    """Refuse no factors, factors out of order, and what is no factor."""
    if not isinstance(factors, tuple) or not factors:
        raise TypeError(
            f"`{name}` must be a tuple of factors such as (1, 10, 100), got"
            f" {factors!r}. See gravac.exponential and gravac.geometric."
        )
    for value in factors:
        factor(value, f"a factor of `{name}`")
    if any(low >= high for low, high in itertools.pairwise(factors)):
        raise ValueError(
            f"`{name}` must rise from the smallest factor to the largest without"
            f" repeats, got {tuple(factors)}. Write"
            f" {tuple(sorted(set(factors)))}."
        )


def dense_first(factors: Sequence[float], owner: str) -> None:
    """Refuse a ladder from which a controller could not fall back to dense."""
    if factors[0] != 1 or len(factors) < 2:
        raise ValueError(
            f"the ladder of {owner} must begin with factor 1, the dense step that it"
            f" falls back to, and go on from there, got {tuple(factors)}. Write"
            f" {(1, *(f for f in factors if f != 1)) if factors != (1,) else (1, 10)}."
        )


def within(value: Any, name: str, low: float, high: float, why: str) -> None:
    """Refuse a number outside `[low, high]`."""
    if not (_is_number(value) and low <= value <= high):
        raise ValueError(
            f"`{name}` must be a number between {low:g} and {high:g}, got {value!r}."
            f" {why}"
        )


def positive_integer(value: Any, name: str, what: str) -> None:
    """Refuse anything but a positive whole number."""
    if not (_is_number(value, numbers.Integral) and value >= 1):
        raise ValueError(
            f"`{name}` must be a whole number of at least 1, got"
            f" {_arrays.brief(value)}. It counts {what}."
        )


def rising(minimum: float, maximum: float) -> None:
    """Refuse a smallest factor that is not below the largest."""
    if minimum >= maximum:
        raise ValueError(
            f"`minimum` must be below `maximum`, got {minimum} and {maximum}. They are"
            f" the first compressed factor and the last."
        )


def one_of(value: Any, name: str, allowed: Sequence[Any]) -> None:
    """Refuse a value that is not among `allowed`."""
    if value not in allowed:
        words = " or ".join(repr(word) for word in allowed)
        raise ValueError(f"`{name}` must be {words}, got {value!r}.")


def component(value: Any, kind: type, name: str, example: str) -> None:
    """Refuse a component of another family."""
    if not isinstance(value, kind):
        is_class = isinstance(value, type)
        got = f"the class {value.__name__}" if is_class else _arrays.brief(value)
        raise TypeError(
            f"`{name}` must be {_a(kind.__name__)}, got {got}. Did you mean {example}?"
        )


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOU" else f"a {noun}"


def axis(axis_name: Any) -> None:
    """Refuse a value that cannot name a mesh axis."""
    names = _collectives.axis_names(axis_name)
    if axis_name is not None and not (names and all(isinstance(x, str) for x in names)):
        raise TypeError(
            f"`axis_name` must be the name of the mapped axis, several names in a"
            f" tuple, or None to run alone, got {_arrays.brief(axis_name)}. A factor is"
            f" given by name: gravac.transform(controller=gravac.Fixed(16))."
        )


def two_axes(axis_name: Any, dense_axis_name: Any, is_sharded: bool) -> None:
    """Refuse a fast axis that is also the slow one, or has no slow one beside it."""
    axis(dense_axis_name)
    slow = _collectives.axis_names(axis_name)
    fast = _collectives.axis_names(dense_axis_name)
    if fast and (not slow or set(slow) & set(fast)):
        raise ValueError(
            f"`dense_axis_name` must be another axis beside `axis_name`, got"
            f" {dense_axis_name!r} and {axis_name!r}. Compression happens over"
            f" `axis_name`, the slow one; over the other, gradients are averaged whole."
        )
    if is_sharded and not fast:
        raise ValueError(
            "`sharded` names the leaves of which each device along `dense_axis_name`"
            " owns a slice, and there is no such axis: give its name, such as"
            " dense_axis_name='ici'."
        )


def no_function(sharded: Any) -> None:
    """Refuse a function of (path, leaf), which would see slices."""
    if callable(sharded):
        raise TypeError(
            f"`sharded` must be True or a pytree of bools, got {sharded!r}. Inside a"
            f" step a function would see the slice of a leaf, not the leaf: decide"
            f" before, jax.tree.map(is_sharded, params)."
        )


def not_both(why: str, **given: Any) -> None:
    """Refuse two arguments of which only one may be given."""
    if all(value is not None for value in given.values()):
        names = " or ".join(f"`{name}`" for name in given)
        values = " and ".join(map(repr, given.values()))
        raise TypeError(f"give {names}, not both: got {values}. {why}")


def not_swapped(first: Any, mesh: Any, call: str) -> None:
    """Refuse a mesh, or a number of replicas, in the place of the tree."""
    is_place = lambda x: isinstance(x, (jax.sharding.Mesh, int))
    if is_place(first) and not is_place(mesh):
        raise TypeError(
            f"the arguments are swapped: write {call}, got"
            f" {type(first).__name__} before {type(mesh).__name__}."
        )


def function(value: Any, name: str, call: str) -> None:
    """Refuse what cannot be called in the place of a function."""
    # A mesh decorates functions, so it can be called.
    if not callable(value) or isinstance(value, jax.sharding.Mesh):
        raise TypeError(
            f"`{name}` must be a function, as in {call}, got {_arrays.brief(value)}."
        )


def learning_rate(value: Any) -> None:
    """Refuse what is neither a number nor a schedule."""
    is_array = getattr(value, "shape", None) == ()
    if not (_is_number(value) or is_array or callable(value)):
        raise TypeError(
            f"`learning_rate` must be a number or a schedule of Optax, and comes first,"
            f" got {_arrays.brief(value)}. Write gravac.adamw(1e-3) or gravac.sgd(0.1)."
        )


def seed(value: Any) -> None:
    """Refuse a seed that is no whole number."""
    if not _is_number(value, numbers.Integral):
        raise TypeError(
            f"`seed` must be a whole number, got {_arrays.brief(value)}. The transform"
            f" makes its random keys from it."
        )


def optimizer(tx: Any, call: str) -> None:
    """Refuse what has not the two functions of an optimizer of Optax."""
    if not (callable(getattr(tx, "init", None)) and hasattr(tx, "update")):
        raise TypeError(
            f"`tx` must be an optimizer of Optax, as in {call}, got"
            f" {type(tx).__name__}: write optax.chain(gravac.transform(),"
            f" optax.sgd(0.1)), or, of an nnx.Optimizer, optimizer.tx."
        )


def mesh_axis(mesh: jax.sharding.Mesh, axis_name: Any) -> None:
    """Refuse an axis that the mesh does not have."""
    axis(axis_name)
    if not set(_collectives.axis_names(axis_name) or [None]) <= set(mesh.axis_names):
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of the mesh, which has"
            f" {mesh.axis_names}. Give the same name to the mesh, to gravac.transform"
            f" and here."
        )


def mesh_or_replicas(mesh: Any, axis_name: Any, dense_axis_name: Any = None) -> None:
    """Refuse what is neither a mesh with the axes nor a number of replicas."""
    if isinstance(mesh, jax.sharding.Mesh):
        mesh_axis(mesh, _collectives.join(axis_name, dense_axis_name))
        return
    if dense_axis_name is not None:
        raise TypeError(
            f"`mesh` must be a jax.sharding.Mesh, got {_arrays.brief(mesh)}: simulated"
            f" replicas have no fast axis. Leave `dense_axis_name` out."
        )
    what = "simulated replicas, where it is no mesh such as gravac.make_mesh()"
    positive_integer(mesh, "mesh", what)


def holds_shapes(n: int, shapes: Any, entries: int) -> None:
    """Refuse a bucket that does not hold arrays of the given shapes."""
    if n != entries:
        raise ValueError(
            f"arrays of the shapes {shapes} have {entries:,} entries, but the bucket"
            f" has {n:,}. gravac.transform fills in the shapes of the params: leave"
            f" `shapes` out."
        )


def compresses_something(entries: int) -> None:
    """Refuse a model of which nothing is compressed."""
    if not entries:
        raise ValueError(
            "none of `params` is compressed: all are one-dimensional or small. Pass"
            " compress=True, or gravac.matrices(min_entries=...), here and to"
            " gravac.transform."
        )


def decay(value: Any, name: str) -> None:
    """Refuse a decay that is not in [0, 1)."""
    if not (_is_number(value) and 0 <= value < 1):
        injected = (
            " It is an array here: with optax.inject_hyperparams name what is injected,"
            " optax.inject_hyperparams(lambda learning_rate:"
            " gravac.adamw(learning_rate))(learning_rate=1e-3)."
        )
        hint = injected if isinstance(value, jax.Array) else ""
        raise ValueError(
            f"`{name}` must be at least 0 and below 1, got {value!r}. It is the share"
            f" of an average that is kept from step to step, such as 0.9.{hint}"
        )


def above_zero(value: Any, name: str, why: str) -> None:
    """Refuse a number that is not finite and above 0."""
    if not (_is_number(value) and math.isfinite(value) and value > 0):
        raise ValueError(
            f"`{name}` must be a finite number above 0, got {value!r}. {why}"
        )


def cannot_mask(memory: Any, exchange: Any) -> None:
    """Refuse masking if the exchange sends a part of every entry."""
    raise ValueError(
        f"{memory!r} masks the momentum of entries that were sent, and {exchange!r}"
        f" sends a part of every entry: use"
        f" memory=gravac.Momentum(0.9, masking=False)."
    )


def delay(value: Any) -> None:
    """Refuse a delay that is not 0 or 1 steps."""
    if not _is_number(value, numbers.Integral) or value not in (0, 1):
        raise ValueError(
            f"`delay` must be 0 (a step exchanges its own gradient) or 1 (that of the"
            f" step before), got {value!r}."
        )


def no_rounds(controller: Any, owner: str) -> None:
    """Refuse a controller with rounds inside another one."""
    if controller.has_rounds:
        raise ValueError(
            f"the controller inside {owner} has rounds itself, got {controller!r}. Put"
            f" gravac.Every around the others: gravac.Every(8,"
            f" gravac.Capped(gravac.GraVAC(), cap=100))."
        )


def steps_of_a_round(value: Any) -> None:
    """Refuse what is neither a number of steps nor a function to one."""
    if not callable(value):
        what = "the steps of a round; a function from the step to them will do, too"
        positive_integer(value, "steps", what)


def lengths_of_rounds(value: Any) -> None:
    """Refuse what is not 1 and then rising numbers of steps, in a tuple."""
    if not isinstance(value, tuple):
        raise TypeError(f"`rounds` must be a tuple such as (1, 4, 16), got {value!r}.")
    for steps in value:
        positive_integer(steps, "rounds", "the steps of each round")
    is_rising = all(x < y for x, y in itertools.pairwise(value))
    if value[:1] != (1,) or not is_rising:
        raise ValueError(
            f"`rounds` must begin with 1 and rise, got {value!r}: rounds of one step"
            f" are what longer ones are compared with. To exchange in every eighth step"
            f" only, use gravac.Every(8, gravac.Fastest())."
        )


def schedule(value: Any, name: str = "schedule") -> None:
    """Refuse a value that is not a function of the step."""
    if not callable(value):
        raise TypeError(
            f"`{name}` must be a function of the step, as Optax's schedules are, got"
            f" {value!r}. For one that does not change use"
            f" optax.constant_schedule({value!r}); for always the same factor,"
            f" gravac.Fixed(factor=100)."
        )


def no_memory_beside(others: dict[str, Any], recipe: str, optimizer: str) -> None:
    """Refuse another memory for a recipe whose memory runs an optimizer."""
    for name in ("memory", "momentum"):
        if others.get(name) is not None:
            raise TypeError(
                f"{recipe} has {optimizer} for its memory, got {name}={others[name]!r}"
                f" beside. For another memory use gravac.transform({name}=...)."
            )


def listed(values: Any, name: str) -> tuple[Any, ...]:
    """Return `values` as a tuple; refuse an empty one, and a single value."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(
            f"`{name}` must be several in a tuple, got {values!r}. For one write"
            f" ({values!r},)."
        )
    if not values:
        raise ValueError(f"`{name}` is empty; give at least one.")
    return tuple(values)


def flag_or_none(value: Any, name: str) -> None:
    """Refuse a value that is neither True, False nor None."""
    if value is not None:
        flag(value, name)


def flag(value: Any, name: str) -> None:
    """Refuse a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")
