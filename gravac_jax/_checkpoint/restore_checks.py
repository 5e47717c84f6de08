"""Complaints about what is saved and restored: one function each.

They are raised before anything is written, or read into a run, and name what was found.
"""

import collections
import operator
import warnings
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

Path = tuple[str, ...]
Shapes = dict[Path, Any]

_SHOWN = 3  # differences, in a message


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, and why."""


def _differences(expected: Shapes, saved: Shapes) -> str:
    """The first few, as people read them."""
    lines = []
    for path in dict.fromkeys([*expected, *saved]):
        if expected.get(path) != saved.get(path):
            has = _shown(saved.get(path, "missing"))
            wants = _shown(expected.get(path, "nothing of that name"))
            lines.append(f"{'/'.join(path)}: {has} in the checkpoint, {wants} here")
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more


def _shown(x: Any) -> str:
    """A shape, alone or after its dtype."""
    is_pair = isinstance(x, tuple) and x and isinstance(x[0], str)
    return f"{x[0]}{x[1]}" if is_pair else str(x)


def fits(expected: Shapes, saved: Shapes) -> None:
    """Refuse the checkpoint of another model or optimizer."""
    if expected != saved:
        raise ValueError(
            f"the checkpoint is of another model, optimizer or training state:"
            f" {_differences(expected, saved)}. Restore into the state that the run"
            f" which saved it would begin with, or save to another directory."
        )


def memory(expected: Shapes, saved: Shapes) -> None:
    """Refuse residuals of other leaves, and those of another memory."""
    mine = {k: v[1:] for k, v in expected.items() if k[0] == "memory"}
    found = {k: v[1:] for k, v in saved.items() if k[0] == "memory"}
    if mine != found:
        raise ValueError(
            f"the checkpoint holds back something else than this transform does"
            f" (shapes without the axis of replicas): {_differences(mine, found)}."
            f" Build gravac.transform with the same `memory` (or `momentum`) and"
            f" `compress`, or deliver what is held back with gravac.flush before the"
            f" last save."
        )


def exchange(expected: Shapes, saved: Shapes) -> None:
    """Refuse the state of another exchange or compressor."""
    kinds = lambda x: {k[2:] for k in x if k[0] == "exchange"}
    if kinds(expected) != kinds(saved):
        show = lambda x: ", ".join(sorted("/".join(k) for k in kinds(x))) or "nothing"
        raise ValueError(
            f"the checkpoint is of another exchange or compressor: it keeps"
            f" {show(saved)}, and this one {show(expected)}. Build gravac.transform"
            f" with the same `exchange` and `compressor`, or deliver what is held back"
            f" with gravac.flush before the last save and begin with gravac.init."
        )


def has_transform(saved: Any, path: Path) -> bool:
    """Whether a transform's state was saved; say so if it was not."""
    if not saved:
        warnings.warn(
            f"the checkpoint holds no state of gravac.transform at"
            f" {'/'.join(path) or 'its root'}: it begins with empty residuals and a"
            f" controller that has seen nothing.",
            stacklevel=2,
        )
        return False
    if ("version",) not in saved or ("replicas",) not in saved:
        raise ValueError(
            f"what the checkpoint has at {'/'.join(path)} is no state of"
            f" gravac.transform: it is of another optimizer, or was saved by other"
            f" means than gravac_jax.checkpoint."
        )
    return True


def json_data(data: Any, error: Exception) -> NoReturn:
    """Refuse a data position that cannot be written down."""
    raise TypeError(
        f"`data` must be what JSON knows, numbers and strings in lists and dicts,"
        f" that come back as they are, got {data!r} ({error}). Bytes can be had as"
        f" text, data.hex()."
    ) from None


def version(found: Any, known: Any) -> None:
    """Refuse a state that was written otherwise."""
    if found != known:
        raise ValueError(
            f"the transform's state in the checkpoint has version {found}, and this"
            f" gravac_jax reads {known}. Restore it with the gravac_jax that saved it."
        )


def begins_anew(is_other_controller: bool) -> None:
    """Say that decisions are not carried on."""
    what = "controller, or one of another ladder," if is_other_controller else "ladder"
    warnings.warn(
        f"the checkpoint was saved with another {what}: what is held back is restored,"
        f" and the controller begins anew.",
        stacklevel=2,
    )


def params_are_those(expected: list[int], found: list[int]) -> None:
    """Refuse params that the state was not made for."""
    if expected != found:
        raise ValueError(
            f"the params are not those that the state was made for: its compressed"
            f" leaves have {expected[:8]} entries on a device, theirs {found[:8]}. Pass"
            f" the params that tx.init was given, as they lie on the devices. Where two"
            f" models have an optimizer each, each is saved in a directory of its own."
        )


def is_not_of_pmap(steps: Any) -> None:
    """Refuse a state in which everything has an axis of devices."""
    if steps.ndim:
        raise ValueError(
            f"the state has an axis of devices on every leaf (`steps` has shape"
            f" {steps.shape}), as jax.pmap wants it, so that nobody can tell what the"
            f" replicas share. Checkpoints are for states as gravac.place makes them:"
            f" run the step with gravac.data_parallel."
        )


def is_on_devices(replica: Any) -> None:
    """Refuse a state that was fetched to the host."""
    if not isinstance(replica, jax.Array):
        raise ValueError(
            f"the state holds {type(replica).__name__} where arrays of JAX must be:"
            f" pass it as it lies on the devices, as gravac.place makes it."
        )


def is_whole(locals_found: int, states_found: int) -> None:
    """Refuse what nnx.split makes of an optimizer."""
    if locals_found != states_found:
        raise ValueError(
            "the state of gravac.transform was taken apart, as nnx.split does: pass the"
            " nnx.Optimizer itself in `tree`."
        )


def can_be_saved(leaves: dict[Path, Any]) -> None:
    """Refuse leaves that Orbax would drop, or could not tell apart."""
    if () in leaves:
        raise ValueError(
            "`tree` is a single array: pass what holds it, such as (params, opt_state)."
        )
    for path, x in leaves.items():
        is_number = type(x) in (int, float) and abs(x) < 2**63
        if not (is_number or (hasattr(x, "dtype") and _is_kept(x.dtype))):
            kind = getattr(x, "dtype", None) or type(x).__name__
            raise TypeError(
                f"`tree` holds a {kind} at {'/'.join(path)}, which cannot be saved:"
                f" make it an array of real numbers, or keep it out of the state."
            )
    counts = collections.Counter(map(".".join, leaves))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            f"`tree` has two leaves that would be saved as {twice[0]}: rename one."
        )


def _is_kept(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits >= 8
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    return np.dtype(dtype) == bool


def step_number(step: Any) -> int:
    """The step as an int; refuse what is no count."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise ValueError(
            f"`step` must be the number of steps so far, 0 or more, got {step!r}."
        )
    return number


def is_there(step: Any, steps: list[int], directory: Any) -> int:
    """The step as an int; refuse one of which there is no checkpoint."""
    number = step_number(step)
    if number not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {number} in {directory}; there are those"
            f" of {steps}."
        )
    return number


def goes_on(step: int, steps: list[int], directory: Any) -> None:
    """Refuse to save before checkpoints that a run did not begin from."""
    if steps and steps[-1] >= step:
        raise CheckpointError(
            f"step {step} cannot be saved: {directory} has checkpoints of {steps}, and"
            f" this run began without them. Restore one, or save to another directory."
        )


def went_back(began: int, later: list[int], directory: Any) -> None:
    """Say that a run has left others behind."""
    warnings.warn(
        f"the run went back to step {began}: the checkpoints of {later} in {directory},"
        f" of another course, are deleted.",
        stacklevel=4,
    )
