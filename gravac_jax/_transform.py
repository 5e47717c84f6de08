"""From arguments, or the name of a method, to one Optax gradient transformation.

A method of the literature is what a replica sends, and what it remembers::

    dense data parallelism    send=Dense()
    few bits                  send=Bits(2)
    top-k SGD                 send=TopK(100)
    DGC                       send=TopK(1000, select="sampled"), memory=Momentum()
    PowerSGD                  send=LowRank(4)
    GraVAC                    send=GraVAC(TopK.geometric(10, 1000))
    the default               send=Fastest(), which chooses while training runs
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import optax

from gravac_jax import _arrays, _refuse
from gravac_jax._controllers import Fastest, Scheduled, controller_of
from gravac_jax._controllers.base import Controller
from gravac_jax._encodings import Bits, Dense, Encoding, TopK
from gravac_jax._evidence.cost_model import WireCost
from gravac_jax._loop.outer import outer as step_on_means
from gravac_jax._memory import Momentum, OwnOptimizer, Residual
from gravac_jax._memory.base import Memory
from gravac_jax._network import AxisName
from gravac_jax._step import Components, bucketing, slicing, update
from gravac_jax._step.clipping import ClipByGlobalNorm

WARM_UP = (4, 16, 64, 250)  # factors of Deep Gradient Compression's stages
TWO_BITS, DENSE, FEW = Bits(2), Dense(), TopK(1000, select="sampled")


def transform(
    axis_name: AxisName = "data",
    *,
    send: Encoding | Controller | None = None,
    every: int | Callable[[Any], Any] = 1,
    delay: int = 0,
    memory: Memory | None = None,
    clip: ClipByGlobalNorm | None = None,
    weight_decay: float = 0.0,
    compress: bool | bucketing.Predicate | Any = None,
    fast_axis_name: AxisName = None,
    shardings: Any = None,
    network: WireCost | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Average gradients over replicas, sending few bits or few entries of them.

    It takes the place of `jax.lax.pmean(grads, axis_name)` in data-parallel training:
    `update` takes each replica's own gradients and returns their compressed mean, the
    same on every replica. Call it inside `shard_map`, `pmap` or `vmap` over
    `axis_name`, with gradients from `gravac.value_and_grad` at `gravac.own_params`. At
    the shared params the loss ends higher.

    `update(grads, state, params=None, *, step_seconds=None, steps_ago=None, at=None,
    is_due=None, rung=None, own_loss=None, deliver=None)` ignores every other argument.
    `step_seconds` is how long a step took, `[]` float32, 0 if unknown. `steps_ago`,
    `[]` int32, says which one: 1, the default, is the step before this one. `at`,
    static, says where gradients were taken: at the "shared" params, or at "own" ones,
    `gravac.own_params`, so that `gravac.Fastest` may let entries wait for some steps.
    By default they count as taken at the shared ones, or with `gravac.OwnOptimizer` at
    own ones, with a warning where that matters and own params were never asked for.
    `is_due`, static, is for who knows whether this step exchanges (`every`) and
    compiles two programs without a branch. `rung`, static, is the rung of this step, or
    the next below within reach, or the lowest if none is, for callers who compile one
    program for each; all replicas must pass the same. `own_loss`, `[]`, is this
    replica's loss: its mean travels with the exchange, but not with a delay, to `loss`
    of the state, `optax.tree.get(opt_state, "TransformState").loss`. `deliver` is for
    `gravac.flush` and `gravac.own_params`.

    Args:
      axis_name: the mapped axis, or several in a tuple (under shard_map); None for one
        replica alone.
      send: what a replica sends: an encoding, such as `gravac.Bits(2)`,
        `gravac.TopK(100)`, `gravac.LowRank(4)` or `gravac.Dense()`; or a controller
        with a ladder of encodings, such as `gravac.Fastest((gravac.Dense(),
        gravac.Bits(8), gravac.Bits(2)))`. Default: `gravac.Fastest()`, which chooses
        between 32 bits an entry and two bits of an eighth of the entries while training
        runs, and stops at two bits at the shared params. It should be told how long
        steps take (see `gravac.StepClock`), or it predicts that from `network`, and
        warns if there is none.
      every: H, to exchange in every H-th step, what has gathered until then; or a
        function from the step (`[]` int32, counted from 0) to H, the same on all hosts.
        The steps between are *local*: nothing at all is sent, and each replica goes on
        at its own params. (Decay and momentum that come after the transform act on the
        shared params in every step.) A controller sees the exchanges alone. Short
        rounds at first lose least.
      delay: 1 to exchange in each step what the step before left to send, so that the
        network works while the devices do. The exchange depends on nothing that its own
        step computes, and XLA may run both at once. Take gradients at
        `gravac.own_params`, which have what is on its way; otherwise momentum SGD may
        diverge. `gravac.flush` delivers the last of it.
      memory: what happens to entries that were not sent: `gravac.Residual()`, the
        default, `gravac.Momentum()`, or `gravac.OwnOptimizer(optimizer)`.
      clip: bounds each replica's own gradient before it is remembered:
        `gravac.ClipByGlobalNorm(1.0)`. Default: gradients are not clipped.
      weight_decay: share of the shared params that is added to each replica's gradient
        after the clip and before momentum: coupled decay, as in Deep Gradient
        Compression. `update` then needs the params. Put decoupled decay after the
        transform.
      compress: which leaves are encoded; the others go dense. True for all leaves, a
        function of (path, leaf), or a pytree of bools. Default: in few bits all leaves
        but the smallest, together 1/4096 of all entries (32 entries in a small model),
        because a scalar may run away in a row of few bits; if a ladder has `TopK` or
        `LowRank`, matrices of at least 16,384 entries, or of a thousandth of all
        entries if that is less.
      fast_axis_name: a second, fast axis, over which gradients are averaged whole
        before they are encoded: the devices of a host or a slice. All of them take the
        same rung.
      shardings: the params as they lie on a mesh, or their `jax.NamedSharding`s, if the
        compiler shards the model over all axes but `axis_name`, as under `jit` (FSDP,
        tensor parallel). Each device then encodes the slice of each leaf that it owns;
        the step runs by `gravac.data_parallel` without a fast axis, and `compress`
        chooses whole leaves.
      network: predicts step times until measured ones arrive. Default: `WireCost()`.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its state is a NamedTuple of arrays;
      `optax.tree.get(opt_state, "StepInfo")` returns `gravac.StepInfo`. The residual is
      float32 and differs per replica: see `gravac.place`.

    Raises:
      TypeError: if an argument is of the wrong kind; if both `fast_axis_name` and
        `shardings` are given. From `init` and `update`: for leaves that are not real
        floating-point arrays, and for `optax.MaskedNode`.
      ValueError: if a number is out of its range, the two axes are the same, or the
        arrays of `shardings` do not lie on one mesh or are sharded over `axis_name`.
        From `update`: outside the axes, and in a `gravac.data_parallel` over others;
        for gradients that were already summed over them, for a state that does not fit
        the gradients, for a ladder whose bytes rise with this many replicas, and, if
        JAX knows what varies, for params of which each device along the fast axis has a
        slice.

    Law:
      On every replica and step, sent + held back == gradient + residual: exactly where
      whole entries are sent (apart from numbers below 2**-126, which XLA may flush to
      zero), and to a rounding of float32 in few bits and at low rank; a mean in
      `Dense("bfloat16")` is rounded once more, for good. Clip, decay and
      momentum come before: the law holds for what they make of the gradient. Without
      them the update of `send=Dense()` is `jax.lax.pmean` of the gradients. What all
      replicas made in a round is what was sent plus what is held back. What
      `optax.apply_updates` rounds away in bfloat16 params counts as sent.

      A replica whose gradient is not finite, or has an entry of 2**50 or more, leaves
      that gradient out: its memory learns nothing from it, and it sends from what it
      holds back, as if it had made no step. The mean is still over all replicas. The
      others go on, and all count the step; with a delay or rounds at the next exchange.
      `gravac.guard` skips such a step on all replicas.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> mesh = gravac.make_mesh(devices=jax.devices()[:2])
      >>> tx = optax.chain(gravac.transform(send=gravac.Bits(2)), optax.sgd(0.1))
      >>> def train_step(params, opt_state, batch):
      ...     loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
      ...     own = gravac.own_params(tx, params, opt_state)
      ...     value, grads = gravac.value_and_grad(loss)(own, batch)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state, value
      >>> params = {"w": jnp.ones((256, 256))}
      >>> params, opt_state = gravac.place((params, tx.init(params)), mesh)
      >>> step = gravac.data_parallel(train_step, mesh)
      >>> params, opt_state, value = step(params, opt_state, jnp.ones((4, 256)))
      >>> float(value)
      65536.0

    References:
      Tyagi and Swany, GraVAC, IEEE CLOUD 2023, Algorithm 1; Lin et al., Deep Gradient
      Compression, ICLR 2018. For local steps: Stich, Local SGD converges fast and
      communicates little, ICLR 2019; Lin et al., Don't use large mini-batches, use
      local SGD, ICLR 2020, whose rounds begin short; Basu et al., Qsparse-local-SGD,
      NeurIPS 2019.
    """
    components = Components(
        axis_name=axis_name,
        **slicing.axes_and_slices(shardings, axis_name, fast_axis_name),
        compress=compress,
        clip=clip,
        weight_decay=weight_decay,
        memory=Residual() if memory is None else memory,
        controller=Fastest() if send is None else controller_of(send),
        every=every,
        delay=delay,
        network=network,
    )
    step = functools.partial(update, components)
    return optax.GradientTransformationExtraArgs(components.init, step)


# Recipes: published methods, and optimizers that exchange updates. ------------------


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
            f"`warm_up_steps` lead to a gravac.TopK, got send={_arrays.brief(send)}:"
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
    """Return AdamW of each replica's own gradients, exchanging its updates in two bits.

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
      `optax.chain(gravac.transform(memory=gravac.OwnOptimizer(optax.adam(...),
      keeps_norm=True), ...), optax.add_decayed_weights(-learning_rate * weight_decay,
      mask))`.

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
    _refuse_rate(learning_rate, "gravac.adamw(1e-3)")
    _refuse.number(b1, "b1", low=0, below=1)
    _refuse.number(b2, "b2", low=0, below=1)
    _refuse.number(eps, "eps", above=0)
    _refuse.number(weight_decay, "weight_decay", low=0)
    steps = OwnOptimizer(optax.adam(learning_rate, b1, b2, eps), keeps_norm=True)
    return optax.chain(
        transform(axis_name, send=send, memory=steps, **others),
        optax.add_decayed_weights(_scaled(-weight_decay, learning_rate), mask),
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
    _refuse_rate(learning_rate, "gravac.sgd(0.1)")
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
    return step_on_means(tx, outer)


def _refuse_rate(rate: Any, call: str) -> None:
    is_array = getattr(rate, "shape", None) == ()
    if not (callable(rate) or is_array or _refuse.is_number(rate)):
        raise TypeError(
            f"`learning_rate` must be a number or a schedule of Optax, and comes first,"
            f" as in {call}, got {_arrays.brief(rate)}."
        )


def _scaled(factor: float, rate: Any) -> Any:
    """Return a learning rate, a number or a schedule, times a factor."""
    schedule: Any = rate
    return (lambda step: factor * schedule(step)) if callable(rate) else factor * rate
