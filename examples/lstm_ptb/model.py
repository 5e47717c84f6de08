"""The language model of GraVAC's LSTM workload."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from tasks.lstm import LSTM, State


class LanguageModel(nn.Module):
    """Embedding, LSTM layers, a linear head of its own, dropout between all of them.

    With 10,000 words, two layers and width 1500 it has 66.02 million params; PyTorch's
    has a second bias in each layer, and 66.03.

    Attributes:
      vocabulary: The number of words.
      width: The width of embedding and state.
      layers: The number of LSTM layers.
      dropout: The share of entries that are dropped.
      dtype: The dtype of all computation but the head's; params are float32.
    """

    vocabulary: int
    width: int
    layers: int
    dropout: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, tokens: jax.Array, states: Sequence[State], *, is_training: bool
    ) -> tuple[jax.Array, tuple[State, ...]]:
        """Predict the word after each word.

        Args:
          tokens: `[batch, length]` int32.
          states: The state of each layer before the first token.
          is_training: Whether there is dropout; it draws from the keys "dropout".

        Returns:
          Logits `[batch, length, vocabulary]`, float32, and the states after the last
          token.
        """
        drop = lambda x: nn.Dropout(self.dropout, deterministic=not is_training)(x)
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="embed")
        x, ends = drop(embed(tokens)), []
        for layer, state in enumerate(states):
            x, end = LSTM(self.width, self.dtype, name=f"layer_{layer}")(x, state)
            x, ends = drop(x), [*ends, end]
        head = nn.Dense(self.vocabulary, dtype=self.dtype, name="head")
        return head(x).astype(jnp.float32), tuple(ends)

    def silent(self, rows: int) -> tuple[State, ...]:
        """Return the states before a text: zeros."""
        zeros = lambda: jnp.zeros((rows, self.width), self.dtype)
        return tuple((zeros(), zeros()) for _ in range(self.layers))
