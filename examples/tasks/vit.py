"""A vision transformer for images of 32 x 32 (Dosovitskiy et al., ICLR 2021)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from tasks.transformer import Block


class VisionTransformer(nn.Module):
    """Patches of an image as tokens, blocks that see all of them, the mean, a head.

    ViT-Base of the paper is 768 wide, with 12 layers and 12 heads, on patches of 16.
    The mean over tokens stands in place of its class token; no dropout.
    """

    classes: int
    patch: int
    width: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Map uint8 images `[batch, 32, 32, 3]` to logits `[batch, classes]`."""
        x = images.astype(jnp.float32) / 127.5 - 1  # from -1 to 1
        side = (self.patch, self.patch)
        x = nn.Conv(self.width, side, strides=side, name="embed")(x)
        x = x.reshape(len(x), -1, self.width)
        shape = (1, *x.shape[1:])
        x = x + self.param("positions", nn.initializers.normal(0.02), shape)
        for layer in range(self.layers):
            x = Block(self.heads, is_causal=False, name=f"block_{layer}")(x)
        return nn.Dense(self.classes, name="head")(nn.LayerNorm()(x).mean(axis=1))
