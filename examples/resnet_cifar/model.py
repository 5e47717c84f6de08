"""A residual network of bottlenecks, with norms over the batch (He et al., 2016)."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

EXPANSION = 4  # channels that leave a bottleneck, for each inside it


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, and a way around them."""

    width: int
    stride: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, side, side, channels]` to `[..., side / stride, 4 * width]`."""
        out, stride = EXPANSION * self.width, (self.stride, self.stride)
        y = nn.relu(self.norm()(self.conv(self.width, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.width, (3, 3), stride)(y)))
        # Zero at first, a block is its way around (Goyal et al., 2017).
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(out, (1, 1))(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(out, (1, 1), stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Stages of bottlenecks, each but the first at half of the side before.

    With (3, 4, 23, 3) blocks, width 64, ImageNet's stem and 1,000 outputs it is
    ResNet-101, of 44,549,160 params as in torchvision.

    Attributes:
      blocks: Bottlenecks of each stage.
      width: The width of the first stage.
      has_imagenet_stem: Whether ImageNet's convolution and pooling come first.
      head: The number of outputs.
      dtype: The dtype of convolutions and norms; params, statistics and the head are
        float32.
    """

    blocks: Sequence[int]
    width: int
    has_imagenet_stem: bool
    head: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, *, is_training: bool) -> jax.Array:
        """Map images `[batch, 32, 32, 3]` uint8 to float32 logits `[batch, head]`.

        In training, norms use the batch's own statistics and "batch_stats" keeps their
        running means; else they use these.
        """
        conv = functools.partial(
            nn.Conv,
            use_bias=False,
            dtype=self.dtype,
            kernel_init=nn.initializers.he_normal(),
        )
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not is_training,
            momentum=0.9,
            dtype=self.dtype,
        )
        x = images.astype(self.dtype) / 127.5 - 1  # from -1 to 1
        if self.has_imagenet_stem:
            x = conv(self.width, (7, 7), (2, 2), padding=3)(x)
            x = nn.relu(norm()(x))
            padding: Any = [(1, 1), (1, 1)]
            x = nn.max_pool(x, (3, 3), (2, 2), padding)
        else:
            x = nn.relu(norm()(conv(self.width, (3, 3))(x)))
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Bottleneck(self.width * 2**stage, stride, conv, norm)(x)
        x = x.mean(axis=(1, 2)).astype(jnp.float32)
        return nn.Dense(self.head, name="head")(x)
