"""A VGG for images of 32 x 32 (Simonyan and Zisserman, 2015).

Nothing leads around its convolutions, and two hidden layers follow them.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from tasks.norms import norms


class VGG(nn.Module):
    """Stages of convolutions of 3 x 3, a pooling after each, then three layers.

    Stages ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3) with 4,096 hidden
    units are VGG-16, but for its norms and for the first hidden layer, which gets one
    entry a channel where that of ImageNet gets 49.
    """

    classes: int
    stages: Sequence[Sequence[int]]
    hidden: int
    over_batch: bool = False

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Map uint8 images `[batch, 32, 32, 3]` to logits `[batch, classes]`."""
        init = nn.initializers.he_normal()
        norm = norms(over_batch=self.over_batch)
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
