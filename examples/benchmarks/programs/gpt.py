"""A GPT and its train step by any method, in a few sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from training.methods import after, arguments, is_local
from transformer_lm.model import LanguageModel

import gravac_jax as gravac

SIZES = {1: (1, 256), 25: (2, 1024), 100: (2, 2048)}  # layers and width, by million
VOCABULARY, LENGTH = 256, 128  # bytes, in windows


class Step(NamedTuple):
    """A train step of one replica.

    Attributes:
      model: The GPT.
      tx: The optimizer, with the exchange in it.
      take: `(params, opt_state, tokens)` to the same after a step, and the loss.
    """

    model: LanguageModel
    tx: Any
    take: Callable[..., Any]


def model(millions: int) -> LanguageModel:
    """Return the GPT of one of `SIZES`."""
    layers, width = SIZES[millions]
    return LanguageModel(VOCABULARY, LENGTH, layers, width, heads=width // 64)


def mean_loss(logits: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next tokens."""
    losses = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(losses(logits[:, :-1], tokens[:, 1:]))


def step(
    method: str,
    millions: int,
    known: Any = None,
    axis_name: str = "data",
    sharded: Any = False,
) -> Step:
    """Return the step of a method of training/methods.py.

    Args:
      method: Its name; Adam follows if the memory has no optimizer.
      millions: Of `SIZES`.
      known: What is known of the step when it is compiled: `is_due`, `rung`.
      axis_name: The axis of the replicas.
      sharded: As for `gravac.transform`.
    """
    chosen = arguments(method)
    tx = optax.chain(
        gravac.transform(axis_name, sharded=sharded, **chosen),
        *after(chosen, optax.scale_by_adam(), None),
        optax.scale_by_learning_rate(1e-3),
    )
    module = model(millions)
    loss_fn = lambda params, tokens: mean_loss(module.apply(params, tokens), tokens)

    def take(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        is_own = is_local(method)
        where = gravac.local_params(tx, params, opt_state) if is_own else params
        loss, grads = gravac.value_and_grad(loss_fn, axis_name)(where, tokens)
        updates, opt_state = tx.update(
            grads, opt_state, params, at_own_params=is_own, **(known or {})
        )
        return optax.apply_updates(params, updates), opt_state, loss

    return Step(module, tx, take)
