"""Recipes in one line each: published methods, and optimizers that exchange steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from gravac_jax import _arrays, _outer, _refuse
from gravac_jax._controllers import Scheduled, controller_of
from gravac_jax._controllers.base import Controller
from gravac_jax._encodings import Bits, Dense, Encoding, TopK
from gravac_jax._memory import Momentum, OwnOptimizer
from gravac_jax._network import AxisName
from gravac_jax._step.clipping import ClipByGlobalNorm
from gravac_jax._transform import transform

WARM_UP = (4, 16, 64, 250)  # factors of Deep Gradient Compression's stages
TWO_BITS, DENSE, FEW = Bits(2), Dense(), TopK(1000, select="sampled")


def dgc(
    axis_name: AxisName = "data",
    *,
    send: Encoding | Controller = FEW,
    momentum: float = 0.9,
    nesterov: bool = False,
    max_norm: float | None = None,
    warm_up_steps: int = 0,
    **others: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return Deep Gradient Compression, with all five of its parts.

    They are accumulation, momentum correction, local clipping, momentum factor masking
    and warm-up. Two things differ from the paper: the threshold, estimated from a
    sample, is that of the whole model, not of each tensor; and values travel as
    bfloat16, with what rounding drops kept in the residual. The optimizer after it must
    have no momentum: `optax.chain(gravac.dgc(), optax.sgd(0.1))`. For coupled weight
    decay pass `weight_decay`.

    Args:
      axis_name: as for `gravac.transform`.
      send: as for `gravac.transform`. Default: 0.1% of the entries,
        `TopK(1000, select="sampled")`. What sends a part of every entry, such as
        `Bits(2)`, leaves nothing to mask, and momentum factor masking is left out.
      momentum: m of momentum correction.
      nesterov: whether momentum looks ahead.
      max_norm: bound of the averaged gradient's norm, for local clipping; None for no
        clip.
      warm_up_steps: steps in which the factor rises by the paper's stages of 4, 16, 64
        and 250, as far as these are below that of `send`, which then is a `TopK`. Make
        other stages with `gravac.Scheduled`.
      others: further arguments of `gravac.transform`, which take precedence.

    Returns:
      `gravac.transform(...)` with these components.

    Raises:
      TypeError: as `gravac.transform`.
      ValueError: if an argument is out of its range.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> tx = optax.chain(gravac.dgc(None, send=gravac.TopK(100)), optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> updates, opt_state = jax.jit(tx.update)(params, tx.init(params))
      >>> float(optax.tree.get(opt_state, "StepInfo").factor) > 99
      True

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018. The authors' code has another
      warm-up, and clips only if told to.
    """
    if warm_up_steps:
        send = _warmed_up(send, warm_up_steps)
    masking = all(x.sends_whole_entries for x in controller_of(send).ladder)
    clip = None if max_norm is None else ClipByGlobalNorm(max_norm)
    others = {"memory": Momentum(momentum, nesterov, masking), "clip": clip} | others
    return transform(axis_name, send=send, **others)


def _warmed_up(send: Any, steps: int) -> Encoding | Controller:
    """Return what comes to `send`, a `TopK`, in stages of equal length."""
    _refuse.count(steps, "warm_up_steps", "the steps before the last stage")
    if not isinstance(send, TopK):
        raise TypeError(
            f"`warm_up_steps` lead to a gravac.TopK, got send={_refuse.shown(send)}:"
            f" write send=gravac.TopK(1000), or make stages with gravac.Scheduled(...)."
        )
    below = [x for x in WARM_UP if x < send.factor]
    stages = [dataclasses.replace(send, factor=x) for x in below]
    if not stages:
        return send
    ends = tuple(-(-steps * (i + 1) // len(stages)) for i in range(len(stages)))
    return Scheduled((*stages, send), ends)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: AxisName = "data",
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
    send: Encoding | Controller = TWO_BITS,
    **others: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW of each replica's own gradients, exchanging its steps in two bits.

    It is the whole optimizer, in place of `optax.adamw`. `gravac.train_step` takes
    gradients at each replica's own params. A loop of your own has to do so, or most of
    the gain is lost::

        tx = gravac.adamw(1e-3)
        ...
        own = gravac.own_params(tx, params, opt_state)
        loss, grads = gravac.value_and_grad(loss_fn)(own, batch)
        updates, opt_state = tx.update(grads, opt_state, params)

    A step is scaled by the learning rate at which it was made, even if it is sent
    later. Weight decay is decoupled and acts on the shared params at every step. (It
    counts a flush as a step in its schedule of the learning rate; Adam does not.) The
    schedule's own count differs in shape, one for each replica: a loop that reads the
    step takes `optax.tree.get(opt_state, "TransformState").steps`, one number.

    Args:
      learning_rate: a number, or a schedule of Optax, as tuned for dense AdamW. Steps
        are as long as AdamW's with any number of replicas (`keeps_norm` of
        `gravac.OwnOptimizer`).
      axis_name: as for `gravac.transform`.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: number added to the square root of the second moment.
      weight_decay: decoupled weight decay, in units of the learning rate; 0 for Adam.
      mask: which leaves decay, as for `optax.adamw`; None for all.
      send: as for `gravac.transform`. Default: `Bits(2)`. `Bits(2, turns=4)` sends a
        quarter of the entries in each step; the quarters take turns.
      others: further arguments of `gravac.transform`, except its memory. A clip belongs
        here: `clip=gravac.ClipByGlobalNorm(1.0)`.

    Returns:
      `optax.chain(gravac.transform(memory=gravac.OwnOptimizer(optax.adam(...)), ...),
      optax.add_decayed_weights(-learning_rate * weight_decay, mask))`.

    Raises:
      TypeError: as `gravac.transform`, and for a `memory`.
      ValueError: if an argument is out of its range.

    Law:
      With one replica that sends everything it is `optax.adamw`.

    Cost:
      The costs of `gravac.OwnOptimizer` and of `gravac.own_params`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> mesh = gravac.make_mesh(devices=jax.devices()[:2])
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> step = gravac.train_step(loss_fn, gravac.adamw(1e-3), mesh)
      >>> params, opt_state = step.init({"w": jnp.ones((256, 256))})
      >>> params, opt_state, loss = step(params, opt_state, jnp.ones((4, 256)))
      >>> float(loss), int(optax.tree.get(opt_state, "TransformState").steps)
      (65536.0, 1)
    """
    _refuse_rate(learning_rate)
    _refuse.number(b1, "b1", low=0, below=1)
    _refuse.number(b2, "b2", low=0, below=1)
    _refuse.number(eps, "eps", above=0)
    _refuse.number(weight_decay, "weight_decay", low=0)
    steps = OwnOptimizer(optax.adam(learning_rate, b1, b2, eps), keeps_norm=True)
    return optax.chain(
        transform(axis_name, send=send, memory=steps, **others),
        optax.add_decayed_weights(_times(-weight_decay, learning_rate), mask),
    )


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: AxisName = "data",
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    send: Encoding | Controller = TWO_BITS,
    **others: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return SGD with momentum of each replica's own gradients, in two bits.

    It is the whole optimizer, in place of `optax.sgd`, and exchanges each replica's
    steps, scaled by the learning rate at which they were made. Take gradients at each
    replica's own params, as `gravac.train_step` does; a loop of your own needs
    `gravac.own_params`.

    Args:
      learning_rate: a number, or a schedule of Optax, as tuned for `optax.sgd`.
      axis_name: as for `gravac.transform`.
      momentum: decay of the momentum.
      nesterov: whether momentum looks ahead.
      send: as for `gravac.transform`. Default: `Bits(2)`.
      others: further arguments of `gravac.transform`, except its memory. A clip belongs
        here, as does coupled weight decay: `weight_decay=1e-4`.

    Returns:
      `gravac.transform(memory=gravac.OwnOptimizer(optax.sgd(...)), ...)`.

    Raises:
      TypeError: as `gravac.transform`, and for a `memory`.
      ValueError: if an argument is out of its range.

    Law:
      If everything is sent it is `optax.sgd` of the mean gradient, to rounding, with
      any number of replicas.

    Cost:
      The costs of `gravac.OwnOptimizer` and of `gravac.own_params`.

    Example:
      >>> import gravac_jax as gravac
      >>> tx = gravac.sgd(0.1, momentum=0.9, nesterov=True)
    """
    _refuse_rate(learning_rate)
    _refuse.number(momentum, "momentum", low=0, below=1)
    _refuse.instance(nesterov, bool, "nesterov", "False")
    steps = OwnOptimizer(optax.sgd(learning_rate, momentum, nesterov))
    return transform(axis_name, send=send, memory=steps, **others)


def diloco(
    inner: optax.GradientTransformation,
    every: int | Callable[[Any], Any] = 30,
    axis_name: AxisName = "data",
    *,
    outer: optax.GradientTransformation | None = None,
    send: Encoding | Controller = DENSE,
    **others: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return DiLoCo: rounds of local steps, and an outer optimizer of their mean.

    Each replica takes `every` steps of its own optimizer from the shared params. Then
    the mean of what they made, its negative called the pseudo-gradient, is the gradient
    of an outer optimizer. Use it with `gravac.train_step`, or take gradients at
    `gravac.own_params`.

    Args:
      inner: the whole optimizer of each replica, learning rate and weight decay
        included, such as `optax.adamw(1e-3)`.
      every: H, the steps of a round, as for `gravac.transform`.
      axis_name: as for `gravac.transform`.
      outer: the outer optimizer. Default: Nesterov's momentum as published,
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`. `optax.sgd(1.0)` is local SGD.
      send: as for `gravac.transform`. Default: a mean in float32, as published.
        `gravac.Bits(2)` sends two bits.
      others: further arguments of `gravac.transform`, except its memory.

    Returns:
      `gravac.outer(gravac.transform(memory=gravac.OwnOptimizer(inner), every=every,
      ...), outer)`.

    Raises:
      TypeError: as `gravac.transform`, and for a `memory`.
      ValueError: if an argument is out of its range.

    Law:
      With one replica, rounds of one step and `outer=optax.sgd(1.0)` it is `inner`.

    Example:
      >>> import optax
      >>> import gravac_jax as gravac
      >>> tx = gravac.diloco(optax.adamw(1e-3), every=30)

    References:
      Douillard et al., DiLoCo, arXiv 2311.08105, Algorithm 1.
    """
    outer = outer or optax.sgd(0.7, momentum=0.9, nesterov=True)
    memory = OwnOptimizer(inner)
    tx = transform(axis_name, send=send, every=every, memory=memory, **others)
    return _outer.outer(tx, outer)


def _refuse_rate(rate: Any) -> None:
    is_array = getattr(rate, "shape", None) == ()
    if not (callable(rate) or is_array or _refuse.is_number(rate)):
        raise TypeError(
            f"`learning_rate` must be a number or a schedule of Optax, and comes first,"
            f" as in gravac.adamw(1e-3), got {_arrays.brief(rate)}."
        )


def _times(factor: float, rate: Any) -> Any:
    """Return a learning rate, a number or a schedule, times a factor."""
    schedule: Any = rate
    return (lambda step: factor * schedule(step)) if callable(rate) else factor * rate
