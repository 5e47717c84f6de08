"""A causal transformer language model with norms before each part."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    """Causal self-attention, then a perceptron at each position."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, length, width]` to the same, float32."""
        width = x.shape[-1]
        qkv = nn.Dense(3 * width, name="qkv")(nn.LayerNorm()(x))
        per_head = lambda y: y.reshape(*y.shape[:2], self.heads, -1)
        q, k, v = map(per_head, jnp.split(qkv, 3, axis=-1))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(width, name="mix")(mixed.reshape(x.shape))
        inner = nn.gelu(nn.Dense(4 * width, name="inner")(nn.LayerNorm()(x)))
        return x + nn.Dense(width, name="outer")(inner)


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
        """`[batch, length]` int32 to logits `[batch, length, vocabulary]`, float32."""
        shape = (1, tokens.shape[1], self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), shape)
        x = nn.Embed(self.vocabulary, self.width, name="embed")(tokens)
        x = x + positions
        for layer in range(self.layers):
            x = Block(self.heads, name=f"block_{layer}")(x)
        return nn.Dense(self.vocabulary, name="head")(nn.LayerNorm()(x))
