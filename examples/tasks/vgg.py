"""A VGG for images of 32 x 32 (Simonyan and Zisserman, 2015).

Nothing leads around its convolutions, and two hidden layers follow them. Its norms are
over groups of channels, as those of the residual network here, or over the batch.
"""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

CHANNELS_PER_GROUP = 16


class VGG(nn.Module):
    """Stages of convolutions of 3 x 3, a pooling after each, then three layers.

    Stages ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3) with 4,096 hidden
    units are VGG-16, but for its norms and for the first hidden layer, which gets one
    entry a channel where that of ImageNet gets 49.

    Norms over the batch (Ioffe and Szegedy, 2015) are by the moments of the images at
    hand: each replica's own in training, those of the held-out batch in evaluation.
    """

    classes: int
    stages: Sequence[Sequence[int]]
    hidden: int
    over_batch: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Map uint8 images `[batch, 32, 32, 3]` to logits `[batch, classes]`."""
        init = nn.initializers.he_normal()
        norm = functools.partial(nn.GroupNorm, None, group_size=CHANNELS_PER_GROUP)
        if self.over_batch:
            norm = functools.partial(nn.LayerNorm, reduction_axes=(0, 1, 2))
        x = images.astype(jnp.float32) / 127.5 - 1  # from -1 to 1
        for widths in self.stages:
            for width in widths:
                x = nn.Conv(width, (3, 3), use_bias=False, kernel_init=init)(x)
                x = nn.relu(norm()(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(self.hidden, kernel_init=init)(x))
        return nn.Dense(self.classes)(x)
