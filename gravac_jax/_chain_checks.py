"""Complaints about how an optimizer is put together: one function each.

They are raised when its state is made, placed or asked for.
"""

from collections.abc import Sequence
from typing import Any


def has_transform(found: Sequence[Any], where: str) -> None:
    """Refuse an optimizer state without exactly one gravac state in it."""
    if len(found) != 1:
        raise ValueError(
            f"{where} needs exactly one gravac.transform in the optimizer, found"
            f" {len(found)}. Write optax.chain(gravac.transform(), optax.sgd(0.1))."
        )


def linear(kind: str) -> None:
    """Refuse to ask an optimizer that is not linear for a part of a step."""
    raise ValueError(
        f"gravac.local_params needs an optimizer that is linear in the updates, found a"
        f" {kind}: it would make a whole step of what is held back. Let each replica"
        f" run its own before the exchange: optax.chain(gravac.transform("
        f"memory=gravac.Adam()), optax.scale_by_learning_rate(1e-3))."
    )


def single_momentum(memory: str, other: str) -> None:
    """Refuse an optimizer that keeps what the memory keeps already."""
    raise ValueError(
        f"the optimizer after gravac.transform keeps a {other} of its own, and so does"
        f" its memory, {memory}: gradients would be averaged over time twice. Keep one:"
        f" optax.chain(gravac.transform(momentum=0.9), optax.sgd(0.1)), without"
        f" `momentum` in optax.sgd; after gravac.Adam() only"
        f" optax.scale_by_learning_rate(...)."
    )


def comes_first(before: str) -> None:
    """Refuse to average after what remembers each replica's own gradients."""
    raise ValueError(
        f"gravac.transform comes after a {before} in the chain, which would remember"
        f" each replica's own gradients as if they were the same on all. Put it first:"
        f" optax.chain(gravac.transform(), optax.sgd(0.1, momentum=0.9)). For momentum"
        f" or Adam of each replica's own use gravac.transform(momentum=0.9) or"
        f" gravac.adamw(1e-3)."
    )


def outermost(wrapper: str) -> None:
    """Refuse what keeps or drops gradients before they are exchanged."""
    raise ValueError(
        f"gravac.transform is inside of an optax.{wrapper}, which keeps each replica's"
        f" own gradients, or decides by them, as if they were the same on all. Put it"
        f" around what comes after the transform; to accumulate, use"
        f" gravac.value_and_grad(loss, micro_batches=...), and for gradients that are"
        f" not finite, gravac.guard around the whole chain."
    )
