"""A language model of stacked LSTM layers."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def _loop(inputs: jax.Array, recurrent: jax.Array) -> jax.Array:
    def step(state: tuple[jax.Array, jax.Array], projected: jax.Array) -> Any:
        hidden, cell = state
        i, f, g, o = jnp.split(projected + hidden @ recurrent, 4, axis=-1)
        cell = nn.sigmoid(f) * cell + nn.sigmoid(i) * jnp.tanh(g)
        hidden = nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    # Made from the inputs, so that it varies over the replicas where they do.
    zeros = jnp.zeros_like(inputs[0, :, : len(recurrent)])
    return jax.lax.scan(step, (zeros, zeros), inputs)[1]


@jax.custom_vjp
def recur(inputs: jax.Array, recurrent: jax.Array) -> jax.Array:
    """The recurrence of one layer, from a zero state.

    Its gradient is the usual one, but that of `recurrent` is one product after the
    loop, where JAX by itself would add to the whole matrix at every position: on a CPU
    that takes half of the time.

    Args:
      inputs: `[length, batch, 4 * width]`, the projected inputs of the four gates
        (input, forget, cell, output).
      recurrent: `[width, 4 * width]`.

    Returns:
      `[length, batch, width]`, the hidden states.
    """
    return _loop(inputs, recurrent)


def _recur_forward(inputs: jax.Array, recurrent: jax.Array) -> Any:
    hidden, pull = jax.vjp(lambda x: _loop(x, recurrent), inputs)
    return hidden, (hidden, pull)


def _recur_backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden, pull = saved
    (inputs,) = pull(cotangent)
    return inputs, jnp.einsum("tbi,tbo->io", hidden[:-1], inputs[1:])


recur.defvjp(_recur_forward, _recur_backward)


class LSTM(nn.Module):
    """One layer; its four gates share one matrix for inputs and one for the state."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, length, features]` to `[batch, length, width]`, float32."""
        inputs = nn.Dense(4 * self.width, bias_init=_remember, name="input")(x)
        shape = (self.width, 4 * self.width)
        recurrent = self.param("recurrent", nn.initializers.orthogonal(), shape)
        return recur(inputs.swapaxes(0, 1), recurrent).swapaxes(0, 1)


def _remember(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros, but ones for the forget gate, so that the cell keeps most at first."""
    del key
    return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), shape[0] // 4)


class LSTMLanguageModel(nn.Module):
    """Embedding, LSTM layers, a linear head of its own; no dropout.

    Every window starts from a zero state, so that nothing but params is carried from
    step to step.
    """

    vocabulary: int
    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[batch, length]` int32 to logits `[batch, length, vocabulary]`, float32."""
        x = nn.Embed(self.vocabulary, self.width, name="embed")(tokens)
        for layer in range(self.layers):
            x = LSTM(self.width, name=f"layer_{layer}")(x)
        return nn.Dense(self.vocabulary, name="head")(x)
