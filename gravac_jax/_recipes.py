"""Recipes in one line each: published methods, and optimizers that exchange steps."""

from collections.abc import Callable
from typing import Any

import optax

from gravac_jax import _checks, _outer
from gravac_jax._clipping import ClipByGlobalNorm
from gravac_jax._collectives import AxisName
from gravac_jax._controllers import STAGES, Every, Fixed, warm_up
from gravac_jax._error_feedback import Momentum, Steps
from gravac_jax._exchanges import DenseMean, QuantizedAllReduce, QuantizedTopK
from gravac_jax._selection import SampledTopK
from gravac_jax._slices import tells_leaves
from gravac_jax._transform import transform


def dgc(
    axis_name: AxisName = "data",
    *,
    factor: float = 1000,
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
      factor: the factor after the warm-up; 1000 sends 0.1% of the entries.
      momentum: m of momentum correction.
      nesterov: whether momentum looks ahead.
      max_norm: bound of the averaged gradient's norm, for local clipping; None for no
        clip.
      warm_up_steps: steps in which the factor rises by the paper's stages of 4, 16, 64
        and 250, as far as these are below `factor`.
      others: further arguments of `gravac.transform`, which take precedence.

    Returns:
      `gravac.transform(...)` with these components.

    Raises:
      TypeError: as `gravac.transform`.
      ValueError: if an argument is out of its range.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> tx = optax.chain(gravac.dgc(axis_name=None, factor=100), optax.sgd(0.1))
      >>> params = {"w": jnp.ones((256, 256))}
      >>> updates, opt_state = jax.jit(tx.update)(params, tx.init(params))
      >>> float(optax.tree.get(opt_state, "StepInfo").factor) > 99
      True

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018. The authors' code has another
      warm-up, and clips only if told to.
    """
    _checks.factor(factor)
    stages = [x for x in STAGES if x < factor] if warm_up_steps else []
    controller = warm_up(warm_up_steps, (*stages, factor)) if stages else Fixed(factor)
    components: dict[str, Any] = {
        "compressor": SampledTopK(),
        "memory": Momentum(momentum, nesterov, masking=True),
        "controller": controller,
        "clip": None if max_norm is None else ClipByGlobalNorm(max_norm),
    }
    return transform(axis_name, **_beside(others, components))


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: AxisName = "data",
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
    **others: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW of each replica's own gradients, exchanging its steps in two bits.

    It is the whole optimizer, in place of `optax.adamw`. `gravac.train_step` takes
    gradients at each replica's own params. A loop of your own has to do so, or most of
    the gain is lost::

        tx = gravac.adamw(1e-3)
        ...
        own = gravac.local_params(tx, params, opt_state)
        loss, grads = gravac.value_and_grad(loss_fn)(own, batch)
        updates, opt_state = tx.update(grads, opt_state, params)

    A step is scaled by the learning rate at which it was made, even if it is sent
    later. Weight decay is decoupled and acts on the shared params at every step. (It
    counts a flush as a step in its schedule of the learning rate; Adam does not.)

    Args:
      learning_rate: a number, or a schedule of Optax, as tuned for dense AdamW. With N
        replicas steps are shorter than AdamW's, by up to sqrt(N): see `gravac.Steps`.
      axis_name: as for `gravac.transform`.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: number added to the square root of the second moment.
      weight_decay: decoupled weight decay, in units of the learning rate.
      mask: which leaves decay, as for `optax.adamw`; None for all.
      others: further arguments of `gravac.transform`, except its memory. They take
        precedence over `QuantizedAllReduce()` at factor 16, two bits an entry.
        `controller=gravac.Fixed(64)` sends two bits of a quarter of the entries in each
        step; the quarters take turns. A clip belongs here:
        `clip=gravac.ClipByGlobalNorm(1.0)`.

    Returns:
      `optax.chain(gravac.transform(memory=gravac.Steps(optax.adam(learning_rate, ...)),
      ...), optax.add_decayed_weights(-learning_rate * weight_decay, mask))`.

    Raises:
      TypeError: as `gravac.transform`, and for a `memory` or `momentum`.
      ValueError: if an argument is out of its range.

    Law:
      With one replica that sends everything it is `optax.adamw`.

    Cost:
      The costs of `gravac.Steps` and of `gravac.local_params`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> mesh = gravac.make_mesh(devices=jax.devices()[:2])
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> step = gravac.train_step(loss_fn, gravac.adamw(1e-3), mesh)
      >>> params, opt_state = step.init({"w": jnp.ones((256, 256))})
      >>> params, opt_state, loss = step(params, opt_state, jnp.ones((4, 256)))
      >>> float(loss)
      65536.0
    """
    _checks.learning_rate(learning_rate)
    _checks.no_memory_beside(others, "gravac.adamw", "Adam")
    _checks.decay(b1, "b1")
    _checks.decay(b2, "b2")
    why = "It is added to a root mean square that may be 0."
    _checks.above_zero(eps, "eps", why)
    steps = Steps(optax.adam(learning_rate, b1, b2, eps))
    return optax.chain(
        transform(axis_name, **_in_two_bits(steps, others)),
        optax.add_decayed_weights(_times(-weight_decay, learning_rate), mask),
    )


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: AxisName = "data",
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    **others: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return SGD with momentum of each replica's own gradients, in two bits.

    It is the whole optimizer, in place of `optax.sgd`, and exchanges each replica's
    steps, scaled by the learning rate at which they were made. Take gradients at each
    replica's own params, as `gravac.train_step` does; a loop of your own needs
    `gravac.local_params`.

    Args:
      learning_rate: a number, or a schedule of Optax, as tuned for `optax.sgd`.
      axis_name: as for `gravac.transform`.
      momentum: decay of the momentum.
      nesterov: whether momentum looks ahead.
      others: further arguments of `gravac.transform`, except its memory. They take
        precedence over `QuantizedAllReduce()` at factor 16, two bits an entry. A clip
        belongs here, as does coupled weight decay: `weight_decay=1e-4`.

    Returns:
      `gravac.transform(memory=gravac.Steps(optax.sgd(learning_rate, ...)), ...)`.

    Raises:
      TypeError: as `gravac.transform`, and for a `memory`.
      ValueError: if an argument is out of its range.

    Law:
      If everything is sent it is `optax.sgd` of the mean gradient, to rounding, with
      any number of replicas.

    Cost:
      The costs of `gravac.Steps` and of `gravac.local_params`.

    Example:
      >>> import gravac_jax as gravac
      >>> tx = gravac.sgd(0.1, momentum=0.9, nesterov=True)
    """
    _checks.learning_rate(learning_rate)
    _checks.no_memory_beside(others, "gravac.sgd", "momentum")
    _checks.decay(momentum, "momentum")
    _checks.flag(nesterov, "nesterov")
    steps = Steps(optax.sgd(learning_rate, momentum, nesterov))
    return transform(axis_name, **_in_two_bits(steps, others))


def diloco(
    inner: optax.GradientTransformation,
    steps: int | Callable[[Any], Any] = 30,
    axis_name: AxisName = "data",
    *,
    outer: optax.GradientTransformation | None = None,
    **others: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return DiLoCo: rounds of local steps, and an outer optimizer of their mean.

    Each replica takes `steps` steps of its own optimizer from the shared params. Then
    the mean of what they made, its negative called the pseudo-gradient, is the gradient
    of an outer optimizer. Use it with `gravac.train_step`, or take gradients at
    `gravac.local_params`.

    Args:
      inner: the whole optimizer of each replica, learning rate and weight decay
        included, such as `optax.adamw(1e-3)`.
      steps: H, the steps of a round, as for `gravac.Every`.
      axis_name: as for `gravac.transform`.
      outer: the outer optimizer. Default: Nesterov's momentum as published,
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`. `optax.sgd(1.0)` is local SGD.
      others: further arguments of `gravac.transform`, except its memory. They take
        precedence over a mean in float32, as published. A `controller` brings rounds of
        its own: `controller=gravac.Every(30, gravac.Fixed(16))` and
        `exchange=gravac.QuantizedAllReduce()` send two bits.

    Returns:
      `gravac.outer(gravac.transform(memory=gravac.Steps(inner),
      controller=gravac.Every(steps, gravac.Fixed(1)), ...), outer)`.

    Raises:
      TypeError: as `gravac.transform`, and for a `memory`.
      ValueError: if an argument is out of its range.

    Law:
      With one replica, rounds of one step and `outer=optax.sgd(1.0)` it is `inner`.

    Example:
      >>> import optax
      >>> import gravac_jax as gravac
      >>> tx = gravac.diloco(optax.adamw(1e-3), steps=30)

    References:
      Douillard et al., DiLoCo, arXiv 2311.08105, Algorithm 1.
    """
    _checks.no_memory_beside(others, "gravac.diloco", "the inner optimizer")
    if outer is None:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    usual = {
        "memory": Steps(inner),
        "exchange": DenseMean(),
        "controller": Every(steps, Fixed(1)),
        "compress": True,
    }
    compressed = transform(axis_name, **_beside(others, usual))
    return _outer.outer(compressed, outer)


def sparse_loco(
    inner: optax.GradientTransformation,
    steps: int | Callable[[Any], Any] = 15,
    axis_name: AxisName = "data",
    *,
    factor: float = 32,
    residual_decay: float = 0.95,
    learning_rate: float = 1.0,
    **others: Any,
) -> optax.GradientTransformationExtraArgs:
    """Return SparseLoCo: rounds of local steps, of which the largest entries are sent.

    Each replica takes `steps` steps of its own optimizer from the shared params, and
    adds them to a residual that decays by `residual_decay` a round. The largest entries
    of each row of 4,096 are exchanged in 14 bits, and the params move by
    `learning_rate` times their mean over all replicas: error feedback takes the place
    of an outer momentum. Rows are those of the flat model, where the paper cuts blocks
    of 64 x 64 from each matrix, and the two levels of a value are those of
    `gravac.QuantizedTopK`.

    Args:
      inner: the whole optimizer of each replica, such as `optax.adamw(1e-3)`.
      steps: H, the steps of a round, as for `gravac.Every`.
      axis_name: as for `gravac.transform`.
      factor: entries over entries sent; the paper's 128 of 4,096 are 32.
      residual_decay: share of the residual that is kept from round to round.
      learning_rate: of the outer step.
      others: further arguments of `gravac.transform`, except its memory. They take
        precedence over `QuantizedTopK()`.

    Returns:
      `gravac.outer(gravac.transform(...), optax.sgd(learning_rate))`.

    Raises:
      TypeError: as `gravac.transform`, and for a `memory`.
      ValueError: if an argument is out of its range.

    Example:
      >>> import optax
      >>> import gravac_jax as gravac
      >>> tx = gravac.sparse_loco(optax.adamw(1e-3), steps=15, factor=64)

    References:
      Sarfi et al., SparseLoCo, arXiv 2508.15706, Algorithm 1.
    """
    _checks.no_memory_beside(others, "gravac.sparse_loco", "the inner optimizer")
    _checks.above_zero(learning_rate, "learning_rate", "It scales the outer step.")
    usual = {
        "memory": Steps(inner, residual_decay, begin_at_shared=True),
        "exchange": QuantizedTopK(),
        "controller": Every(steps, Fixed(factor)),
        "compress": True,
    }
    compressed = transform(axis_name, **_beside(others, usual))
    return _outer.outer(compressed, optax.sgd(learning_rate))


def _times(factor: float, rate: Any) -> Any:
    """Return a learning rate, a number or a schedule, times a factor."""
    schedule: Any = rate
    return (lambda step: factor * schedule(step)) if callable(rate) else factor * rate


def _in_two_bits(memory: Steps, others: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `transform`, with `others` in place of the usual ones."""
    usual = {"exchange": QuantizedAllReduce(), "controller": Fixed(16)}
    return {"memory": memory, **_beside(others, usual)}


def _beside(others: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `transform`: `others`, and the usual ones that fit them."""
    replaced = []
    if others.get("compressor") is not None:
        replaced.append("exchange")
    if others.get("exchange") is not None:
        replaced.append("compressor")
    if tells_leaves(others.get("sharded")):
        replaced.append("compress")  # the sharded leaves are the compressed ones
    kept = {name: x for name, x in usual.items() if name not in replaced}
    return {**kept, **others}
