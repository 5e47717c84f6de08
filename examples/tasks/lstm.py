"""A language model of stacked LSTM layers."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

State = tuple[jax.Array, jax.Array]  # hidden and cell, `[batch, width]` each


def _loop(inputs: jax.Array, recurrent: jax.Array, state: State) -> Any:
    def step(state: State, projected: jax.Array) -> tuple[State, jax.Array]:
        hidden, cell = state
        i, f, g, o = jnp.split(projected + hidden @ recurrent, 4, axis=-1)
        cell = nn.sigmoid(f) * cell + nn.sigmoid(i) * jnp.tanh(g)
        hidden = nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    state, hidden = jax.lax.scan(step, state, inputs)
    return hidden, state


@jax.custom_vjp
def recur(
    inputs: jax.Array, recurrent: jax.Array, state: State
) -> tuple[jax.Array, State]:
    """Apply the recurrence of one layer.

    The gradient of `recurrent` is one product after the loop; JAX by itself would add
    to the whole matrix at every position, which takes half of the time on a CPU.

    Args:
      inputs: The projected inputs `[length, batch, 4 * width]` of the four gates
        (input, forget, cell, output).
      recurrent: The recurrent matrix `[width, 4 * width]`.
      state: The state before the first position.

    Returns:
      `[length, batch, width]`, the hidden states; and the state after the last one.
    """
    return _loop(inputs, recurrent, state)


def _recur_forward(inputs: jax.Array, recurrent: jax.Array, state: State) -> Any:
    results, pull = jax.vjp(lambda x, s: _loop(x, recurrent, s), inputs, state)
    return results, (results[0], state[0], pull)


def _recur_backward(saved: Any, cotangents: Any) -> tuple[jax.Array, jax.Array, State]:
    hidden, first, pull = saved
    inputs, state = pull(cotangents)
    recurrent = jnp.einsum("tbi,tbo->io", hidden[:-1], inputs[1:])
    return inputs, recurrent + first.T @ inputs[0], state


recur.defvjp(_recur_forward, _recur_backward)


class LSTM(nn.Module):
    """One layer; its four gates share one matrix for inputs and one for the state."""

    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, state: State | None = None
    ) -> tuple[jax.Array, State]:
        """Map `[batch, length, features]` to `[batch, length, width]` and a last state.

        Args:
          x: the inputs.
          state: before the first of them; None for zeros.
        """
        dense = nn.Dense(
            4 * self.width, bias_init=_remember, dtype=self.dtype, name="input"
        )
        inputs = dense(x).swapaxes(0, 1)
        shape = (self.width, 4 * self.width)
        recurrent = self.param("recurrent", nn.initializers.orthogonal(), shape)
        if state is None:
            # Made from the inputs, so that they vary over replicas where these do.
            zeros = jnp.zeros_like(inputs[0, :, : self.width])
            state = zeros, zeros
        hidden, last = recur(inputs, recurrent.astype(self.dtype), state)
        return hidden.swapaxes(0, 1), last


def _remember(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return zeros, but ones for the forget gate: the cell keeps most at first."""
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
        """Map int32 `[batch, length]` to logits `[batch, length, vocabulary]`."""
        x = nn.Embed(self.vocabulary, self.width, name="embed")(tokens)
        for layer in range(self.layers):
            x, _ = LSTM(self.width, name=f"layer_{layer}")(x)
        return nn.Dense(self.vocabulary, name="head")(x)
