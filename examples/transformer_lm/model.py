"""A language model like GPT-2 (Radford et al., 2019)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from tasks.transformer import Block


class LanguageModel(nn.Module):
    """Embeddings of tokens and positions, blocks, and the embedding again as head.

    With GPT-2's 50,257 tokens, 1,024 positions, 12 layers and width 768 it has
    124,439,808 params, as the published one. No dropout.

    Attributes:
      vocabulary: The number of tokens.
      length: The most tokens in a window.
      layers: The number of blocks.
      width: The width of the model.
      heads: The number of attention heads.
      dtype: The dtype of all computation; params are float32.
    """

    vocabulary: int
    length: int
    layers: int
    width: int
    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map int32 `[batch, length]` to logits `[batch, length, vocabulary]`."""
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(
            self.vocabulary,
            self.width,
            dtype=self.dtype,
            embedding_init=init,
            name="embed",
        )
        positions = self.param("positions", init, (1, self.length, self.width))
        x = embed(tokens) + positions[:, : tokens.shape[1]].astype(self.dtype)
        for layer in range(self.layers):
            x = Block(self.heads, self.dtype, name=f"block_{layer}")(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x).astype(jnp.float32)
