"""VGG with norms over the batch (Simonyan and Zisserman, 2015)."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class VGG(nn.Module):
    """Stages of convolutions of 3 x 3, then three layers.

    With VGG-16's stages, 4,096 hidden units, 1,000 outputs and `pooled` 7 it has
    138,365,992 params, as torchvision's `vgg16_bn()`: most of them in the first hidden
    layer, of which an image of 32 x 32 brings each input 49 times.

    Attributes:
      stages: Channels of each convolution; a pooling ends a stage.
      hidden: Units of each of the two layers before the head.
      head: The number of outputs.
      pooled: The side of what these layers get.
      dropout: The share of units dropped after each of them.
      dtype: The dtype of all computation but the head's; params and statistics are
        float32.
    """

    stages: Sequence[Sequence[int]]
    hidden: int
    head: int
    pooled: int
    dropout: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, *, is_training: bool) -> jax.Array:
        """Map images `[batch, 32, 32, 3]` uint8 to float32 logits `[batch, head]`.

        In training, norms use the batch's own statistics and "batch_stats" keeps their
        running means; else they use these. Dropout draws from the keys "dropout".
        """
        init = nn.initializers.he_normal()
        x = images.astype(self.dtype) / 127.5 - 1  # from -1 to 1
        for widths in self.stages:
            for width in widths:
                x = nn.Conv(width, (3, 3), dtype=self.dtype, kernel_init=init)(x)
                x = nn.BatchNorm(not is_training, momentum=0.9, dtype=self.dtype)(x)
                x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        # One entry a channel is left, which an adaptive pooling repeats.
        side = self.pooled
        x = jnp.broadcast_to(x, (len(x), side, side, x.shape[-1]))
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, kernel_init=init)(x))
            x = nn.Dropout(self.dropout, deterministic=not is_training)(x)
        return nn.Dense(self.head, name="head")(x.astype(jnp.float32))
