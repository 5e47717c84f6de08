"""Complaints about what is restored: one function each.

They are raised before anything is read into a run, and name what was found.
"""

import warnings
from typing import Any, NoReturn

Path = tuple[str, ...]
Shapes = dict[Path, tuple[int, ...]]

_SHOWN = 3  # differences, in a message


def _differences(expected: Shapes, saved: Shapes) -> str:
    """The first few, as people read them."""
    lines = []
    for path in dict.fromkeys([*expected, *saved]):
        if expected.get(path) != saved.get(path):
            has = saved.get(path, "missing")
            wants = expected.get(path, "nothing of that name")
            lines.append(f"{'/'.join(path)}: {has} in the checkpoint, {wants} here")
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more


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
        version(None, "one of this package")
    return True


def json_data(data: Any, error: Exception) -> NoReturn:
    """Refuse a data position that cannot be written down."""
    raise TypeError(
        f"`data` must be what JSON knows, numbers and strings in lists and dicts,"
        f" got {data!r} ({error}). Of an iterator of grain pass get_state()."
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
            f" the params that tx.init was given, as they lie on the devices."
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
