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
        hint = "to send all entries take gravac.Dense()"
        if 0 < value < 1:
            hint = f"for a density of {value} write {1 / value:g}"
        raise ValueError(
            f"{_quoted(name)} must be finite and at least 1, got {value}. A factor is"
            f" n / k (10 sends one entry in ten); {hint}."
        )


def starts(value: Any, encodings: int) -> None:
    """Refuse what is not one rising step for each encoding but the first."""
    is_whole = lambda x: _is_number(x, numbers.Integral) and x >= 0
    is_fine = isinstance(value, tuple) and all(map(is_whole, value))
    if is_fine:
        is_fine = all(low <= high for low, high in itertools.pairwise(value))
    if not is_fine or len(value) != encodings - 1:
        raise ValueError(
            f"`starts` must be a tuple of rising steps, counted from 0: where each of"
            f" {encodings} encodings but the first begins. Got {value!r}."
        )


def multiple_of(value: Any, unit: int, name: str) -> None:
    """Refuse a number that is not a positive multiple of another one."""
    if not (_is_number(value, numbers.Integral) and value >= 1 and value % unit == 0):
        raise ValueError(
            f"`{name}` must be a positive multiple of {unit}, got {value!r}: codes of a"
            f" row share words of {unit} bits."
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
        raise TypeError(
            f"`{name}` must be {_a(kind.__name__)}, got {shown(value)}. Did you mean"
            f" {example}?"
        )


def shown(value: Any) -> str:
    """Return what an error shows of a value in the place of a component."""
    is_class = isinstance(value, type)
    return f"the class {value.__name__}" if is_class else _arrays.brief(value)


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOU" else f"a {noun}"


def axis(axis_name: Any) -> None:
    """Refuse a value that cannot name a mesh axis."""
    names = _collectives.axis_names(axis_name)
    if axis_name is not None and not (names and all(isinstance(x, str) for x in names)):
        raise TypeError(
            f"`axis_name` must be the name of the mapped axis, several names in a"
            f" tuple, or None to run alone, got {_arrays.brief(axis_name)}. What is"
            f" sent is given by name: gravac.transform(send=gravac.Bits(2))."
        )


def two_axes(axis_name: Any, dense_axis_name: Any) -> None:
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


def cannot_mask(memory: Any, encoding: Any) -> None:
    """Refuse masking if an encoding sends a part of every entry."""
    raise ValueError(
        f"{memory!r} masks the momentum of entries that were sent, and {encoding!r}"
        f" sends a part of every entry: use"
        f" memory=gravac.Momentum(0.9, masking=False), or send=gravac.TopK(100)."
    )


def delay(value: Any) -> None:
    """Refuse a delay that is not 0 or 1 steps."""
    if not _is_number(value, numbers.Integral) or value not in (0, 1):
        raise ValueError(
            f"`delay` must be 0 (a step exchanges its own gradient) or 1 (that of the"
            f" step before), got {value!r}."
        )


def every(value: Any, controller: Any) -> None:
    """Refuse what is neither a number of steps nor a function to one."""
    if not callable(value):
        what = "the steps of a round; a function from the step to them will do, too"
        positive_integer(value, "every", what)
    if value != 1 and controller.has_rounds:
        raise ValueError(
            f"give the length of rounds once, got every={_arrays.brief(value)} and"
            f" {controller!r}, which chooses among lengths itself. Leave `every` out,"
            f" or `rounds`."
        )


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
            f" only, use gravac.transform(every=8)."
        )


def schedule(value: Any, name: str) -> None:
    """Refuse a value that is not a function of the step."""
    if not callable(value):
        raise TypeError(
            f"`{name}` must be a function of the step, as Optax's schedules are, got"
            f" {value!r}. For one that does not change use"
            f" optax.constant_schedule({value!r})."
        )


def no_memory_beside(others: dict[str, Any], recipe: str, optimizer: str) -> None:
    """Refuse another memory for a recipe whose memory runs an optimizer."""
    if "memory" in others:
        memory = others["memory"]
        raise TypeError(
            f"{recipe} has {optimizer} for its memory, got memory={memory!r} beside."
            f" For another memory use gravac.transform(memory=...)."
        )


def flag(value: Any, name: str) -> None:
    """Refuse a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")
