"""A residual network for images of 32 x 32 (He et al., 2016)."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tasks.norms import norms


def _conv(features: int, side: int, stride: int = 1) -> nn.Conv:
    strides, init = (stride, stride), nn.initializers.he_normal()
    return nn.Conv(features, (side, side), strides, use_bias=False, kernel_init=init)


class Block(nn.Module):
    """Two convolutions and a way around them."""

    width: int
    stride: int
    norm: Callable[[], Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, side, side, channels]` to `[..., side / stride, width]`."""
        y = nn.relu(self.norm()(_conv(self.width, 3, self.stride)(x)))
        y = self.norm()(_conv(self.width, 3)(y))
        if x.shape != y.shape:
            x = self.norm()(_conv(self.width, 1, self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Stages of blocks, each but the first at half of the side before.

    Widths (64, 128, 256, 512) with two blocks are ResNet-18 and widths (16, 32, 64)
    with three blocks ResNet-20, but for norms, for convolutions in the ways around
    blocks of another width, and for ResNet-18's first convolution, which is 3 x 3
    without a stride as suits small images.
    """

    classes: int
    widths: Sequence[int]
    blocks: int
    over_batch: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Map uint8 images `[batch, 32, 32, 3]` to logits `[batch, classes]`."""
        norm = norms(over_batch=self.over_batch)
        # From -1 to 1; the first norm makes more of it unnecessary.
        x = images.astype(jnp.float32) / 127.5 - 1
        x = nn.relu(norm()(_conv(self.widths[0], 3)(x)))
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                x = Block(width, 2 if stage and not block else 1, norm)(x)
        return nn.Dense(self.classes, name="head")(x.mean(axis=(1, 2)))
