"""The train step: what it is called with, what it returns, and JAX's own errors."""

import contextlib
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from gravac_jax import _arrays


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
        carry = ", what replicas carry" if carried else ""
        carries = "".join(f", carry_{i}" for i in range(1, carried + 1))
        raise TypeError(
            f"the step takes its state{carry} and then a batch, all by position, got"
            f" {len(args)} arguments. Call it as step(params, opt_state{carries},"
            f" batch), or step(train_state{carries}, batch)."
        )
    (*given, batch), first = args, len(args) - 1 - carried
    state, own = tuple(given[:first]), tuple(given[first:])
    leaves = [jax.tree.leaves(x) for x in given]  # once: this is done in every step
    _still_there(leaves)
    if is_donated:
        _are_apart(leaves, given, (batch, shared))
    _divides(own, replicas, "what is carried")
    what = "the batch, the last argument or the one that is no nnx object,"
    _divides(batch, replicas, what)
    return state, own, batch


def still_there(given: Sequence[Any]) -> None:
    """Refuse arguments that an earlier step has reused; jaxlib may crash on them."""
    _still_there([jax.tree.leaves(x) for x in given])


def _still_there(leaves: Sequence[list[Any]]) -> None:
    for argument in leaves:
        first = next(iter(argument), None)
        is_traced = isinstance(first, core.Tracer)
        if isinstance(first, jax.Array) and not is_traced and first.is_deleted():
            raise ValueError(
                "the state was given to an earlier step, which reused its memory: go on"
                " with what that step returned, params, opt_state, loss ="
                " step(params, opt_state, batch). In a notebook, run the cell again"
                " that makes the state. gravac.data_parallel(..., donate=False) keeps"
                " it, at the cost of its memory."
            )


def _are_apart(
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
                f"the state holds an array that is passed twice, at {other} and at"
                f" {path}, and a step takes over the memory of its state. Copy it, as"
                f" by jax.tree.map(jnp.copy, params), or place both at once,"
                f" gravac.place((params, opt_state, params), mesh), which copies."
                f" gravac.data_parallel(..., donate=False) leaves the memory alone."
            )


def outside_of_a_program(x: Any) -> None:
    """Refuse to take a step of `gravac.train_step` while another function is traced."""
    if isinstance(x, core.Tracer):
        raise TypeError(
            "a step of gravac.train_step is compiled already, and asks its state which"
            " program comes next: call it outside of jax.jit, jax.lax.scan and"
            " jax.eval_shape. To scan over steps, write the step for"
            " gravac.data_parallel."
        )


def one_batch(others: Sequence[Any], named: Sequence[str]) -> None:
    """Refuse more than a state and a batch."""
    if others or named:
        raise TypeError(
            f"a step of gravac.train_step takes params, opt_state and one batch, got"
            f" {len(others) + 3} arguments and the names {list(named)}. Make the batch"
            f" a tuple or a dict, such as (x, y), all of whose arrays have a row for"
            f" each example. For what has no rows, such as a random key, write the step"
            f" for gravac.data_parallel, which passes on what it is given by name."
        )


def _divides(tree: Any, replicas: int, what: str) -> None:
    for path, leaf in _arrays.named_leaves(tree):
        shape = jnp.shape(leaf)
        if not shape or not shape[0] or shape[0] % replicas:
            raise ValueError(
                f"{what} cannot be split over {replicas} replicas: {path} has shape"
                f" {shape}. Its first axis must be a multiple of {replicas}, above 0;"
                f" pass what is the same for all by keyword. A batch of several steps"
                f" has its rows first, too: (rows, steps, ...). A step that changes nnx"
                f" objects in place needs gravac.nnx_data_parallel."
            )


def returned_state(results: Any, state: Sequence[Any]) -> None:
    """Refuse a step that does not return the state that it was given."""
    received = [jax.tree.structure(x) for x in results[: len(state)]]
    if received != [jax.tree.structure(x) for x in state]:
        raise ValueError(
            f"the step must return its {len(state)} state arguments first, each of the"
            f" structure that it came in, then any metrics, as a tuple; got"
            f" {len(results)} results of the structures {_arrays.brief(received)}. A"
            f" step that changes nnx objects in place needs gravac.nnx_data_parallel."
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
        f" such as (x, y). check_vma=False would only hide it."
    )


def is_metric(path: str, x: Any) -> None:
    """Refuse a metric that is neither an array nor a number."""
    if not (hasattr(x, "dtype") or isinstance(x, numbers.Number)):
        raise TypeError(
            f"the metric at {path} that the step returns is a {type(x).__name__}:"
            f" return arrays and numbers only, and add names outside of the step."
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


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Add to errors of JAX and Optax in a step what they mean for its author."""
    try:
        yield
    except (TypeError, ValueError) as error:
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
    "vmap spmd_axis_name": """
gravac: where the compiler shards the model, a step sees the rows of one replica. Its
sharding constraints, and Flax's logical rules for them, must not name the axis of the
replicas: write ("batch", "fsdp") in place of ("batch", ("dcn", "fsdp")).
""",
    "update_fn() missing": """
gravac: a part of the optimizer is told more than gradients. In a step of your own write
tx.update(grads, opt_state, params, value=jax.lax.pmean(loss, axis_name)), for example.
gravac.own_params and gravac.flush ask the optimizer, too, and hand on what they are
told: gravac.own_params(tx, params, opt_state, value=0.0), where any value will do.
gravac.train_step tells the optimizer no more than the times of steps.
""",
}
