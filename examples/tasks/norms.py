"""The norms of the nets for images."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn

CHANNELS_PER_GROUP = 16


def norms(*, over_batch: bool) -> Callable[[], Any]:
    """Return what makes a norm: over groups of channels, or over the batch.

    Those over groups (Wu and He, 2018) keep no statistics that replicas would have to
    average besides their gradients. Those over the batch (Ioffe and Szegedy, 2015) are
    by the moments of the images at hand: each replica's own in training, those of the
    held-out batch in evaluation.
    """
    if over_batch:
        return functools.partial(nn.LayerNorm, reduction_axes=(0, 1, 2))
    return functools.partial(nn.GroupNorm, None, group_size=CHANNELS_PER_GROUP)
