"""A transformer language model with norms before each part."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    """Self-attention, then a perceptron at each position.

    Attributes:
      heads: The number of attention heads.
      dtype: The dtype of all computation; params are float32.
      is_causal: Whether a position sees none after it.
    """

    heads: int
    dtype: Any = jnp.float32
    is_causal: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, length, width]` to the same shape."""
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        qkv = dense(3 * width, name="qkv")(norm()(x))
        per_head = lambda y: y.reshape(*y.shape[:2], self.heads, -1)
        q, k, v = map(per_head, jnp.split(qkv, 3, axis=-1))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + dense(width, name="mix")(mixed.reshape(x.shape))
        inner = nn.gelu(dense(4 * width, name="inner")(norm()(x)))
        return x + dense(width, name="outer")(inner)


class TransformerLanguageModel(nn.Module):
    """Embeddings of tokens and positions, blocks, a linear head of its own; no dropout.

    It reads windows as long as the one that it was initialized with.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map int32 `[batch, length]` to logits `[batch, length, vocabulary]`."""
        shape = (1, tokens.shape[1], self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), shape)
        x = nn.Embed(self.vocabulary, self.width, name="embed")(tokens)
        x = x + positions
        for layer in range(self.layers):
            x = Block(self.heads, name=f"block_{layer}")(x)
        return nn.Dense(self.vocabulary, name="head")(nn.LayerNorm()(x))
