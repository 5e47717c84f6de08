"""A GPT and its train step by any method, in a few sizes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from common.training import train_step
from training.methods import OPTIMIZERS, method
from transformer_lm.model import LanguageModel

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


def step(name: str, millions: int) -> Step:
    """Return the step of a method; Adam follows an exchange of gradients.

    Args:
      name: The method, as in training/methods.py.
      millions: Of `SIZES`.
    """
    chosen, (layers, width) = method(name), SIZES[millions]
    tx = chosen.optimizer(OPTIMIZERS["adam"], 1e-3)
    module = LanguageModel(VOCABULARY, LENGTH, layers, width, heads=width // 64)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = module.apply(params, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(losses(logits[:, :-1], tokens[:, 1:]))

    return Step(module, tx, train_step(tx, loss_fn, chosen.is_own))
