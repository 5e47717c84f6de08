"""1-bit Adam: momentum in one bit, after dense steps that find the second moments."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gravac_jax as gravac


class OneBitAdamState(NamedTuple):
    """State of `one_bit_adam`.

    Attributes:
      exchange: That of `gravac.transform`, with what each replica holds back, and the
        number of steps.
      mu: The first moments, the same on all replicas.
      nu: The second moments, which no longer change after the warm-up.
    """

    exchange: Any
    mu: Any
    nu: Any


def one_bit_adam(
    send: gravac.Scheduled,
    max_norm: float,
    axis_name: str = "data",
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Return 1-bit Adam, without a learning rate, of each replica's own gradients.

    In the warm-up it is Adam of the mean gradient, in float32. Then each replica adds
    its gradient to the shared first moments, and all exchange the result in one bit,
    with error feedback in both stages. The second moments stay those of the warm-up's
    end.

    Args:
      send: Dense steps, and then one bit: `Scheduled((Dense(), Bits(1)), (200,))`. The
        second moments freeze at its start; the authors take 15% to 25% of all steps.
      max_norm: Bound of the mean gradient's norm; a replica's own gradient is clipped
        at sqrt(N) times this bound.
      axis_name: The axis of the replicas.
      b1: Decay of the first moments.
      b2: Decay of the second moments.
      eps: Number added to the square root of the second moments.

    Returns:
      A transformation from a replica's gradient to steps that all replicas share, to
      use as `optax.scale_by_adam` is used, in place of an exchange.

    References:
      Tang et al., 1-bit Adam, ICML 2021, Algorithm 1. It has no correction for the
      bias of the moments; here they have Adam's, that of the second ones up to the
      warm-up's end.
    """
    exchange = gravac.transform(axis_name, send=send)
    (warm_up_steps,) = send.starts

    def init(params: Any) -> OneBitAdamState:
        mu, nu = optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        return OneBitAdamState(exchange.init(params), mu, nu)

    def update(updates: Any, state: Any, params: Any = None, **others: Any) -> Any:
        clip = optax.clip_by_global_norm(max_norm * jax.lax.axis_size(axis_name) ** 0.5)
        clipped, _ = clip.update(updates, clip.init(updates))
        mine = optax.tree.update_moment(clipped, state.mu, b1, 1)
        mu, sent = exchange.update(mine, state.exchange, params, **others)
        # Moments are exchanged; the second ones need the gradient in their mean.
        mean = jax.tree.map(lambda new, old: (new - b1 * old) / (1 - b1), mu, state.mu)
        count = optax.tree.get(sent, "steps")
        nu = optax.tree.where(
            count <= warm_up_steps,
            optax.tree.update_moment(mean, state.nu, b2, 2),
            state.nu,
        )
        first = optax.tree.bias_correction(mu, b1, count)
        measured = jnp.minimum(count, warm_up_steps)
        second = optax.tree.bias_correction(nu, b2, measured)
        steps = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), first, second)
        return steps, OneBitAdamState(sent, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)
