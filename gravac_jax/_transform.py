"""transform(): from arguments to one Optax gradient transformation.

A recipe is a clip, a memory, an exchange (with its compressor) and a controller:

  dense data parallelism    NoMemory + DenseMean + Fixed(1)
  top-k SGD                 Residual + AllGather(TopK()) + Fixed(100)
  DGC                       Momentum + AllGather(SampledTopK()) + Scheduled(...)
  GraVAC                    Residual + AllGather(Threshold()) + GraVAC()
  the default               Residual + QuantizedAllReduce(least_bits=1) + Fastest(...)
"""

import functools
from typing import Any

import optax

from gravac_jax import _buckets, _checks, _slices
from gravac_jax._clipping import Clip
from gravac_jax._collectives import AxisName
from gravac_jax._controllers import Fastest
from gravac_jax._controllers.base import Controller
from gravac_jax._controllers.cost_model import WireCost
from gravac_jax._controllers.ladders import geometric
from gravac_jax._error_feedback import Momentum, Residual, Steps
from gravac_jax._error_feedback.base import Memory
from gravac_jax._exchanges import AllGather, Mixed, Quantized, QuantizedAllReduce
from gravac_jax._exchanges.base import Exchange
from gravac_jax._selection import Threshold
from gravac_jax._selection.compressor import Compressor
from gravac_jax._step import Components, update


def transform(
    axis_name: AxisName = "data",
    *,
    dense_axis_name: AxisName = None,
    exchange: Exchange | None = None,
    compressor: Compressor | None = None,
    memory: Memory | None = None,
    momentum: float | None = None,
    clip: Clip | None = None,
    weight_decay: float = 0.0,
    controller: Controller | None = None,
    compress: bool | _buckets.Predicate | Any = None,
    sharded: bool | Any = False,
    delay: int = 0,
    wire: WireCost | None = None,
    seed: int = 0,
    check_every: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Average gradients over replicas, sending few bits or few entries of them.

    It takes the place of `jax.lax.pmean(grads, axis_name)` in data-parallel training:
    `update` takes each replica's own gradients and returns their compressed mean, the
    same on every replica. Call it inside `shard_map`, `pmap` or `vmap` over
    `axis_name`, with gradients from `gravac.value_and_grad` at `gravac.local_params`.
    At the shared params the loss ends higher.

    `update(grads, state, params=None, *, step_seconds=None, measured_step=None,
    at_own_params=False, is_due=None, rung=None, deliver=None)` ignores every other
    argument. `step_seconds` is how long a step took, `[]` float32, NaN if unknown.
    `measured_step`, `[]` int32, says which step that was, counted from 0; by default
    the previous one. `at_own_params`, static, says that the gradients were taken at
    `gravac.local_params`, so that the default controller may let entries wait for some
    steps. `is_due`, static, is for who knows whether this step exchanges
    (`gravac.Every`) and compiles two programs without a branch. `rung`, static, is the
    rung of this step, for callers who compile one program for each; all replicas must
    pass the same. `deliver` is for `gravac.flush` and `gravac.local_params`.

    Args:
      axis_name: the mapped axis, or several in a tuple (under shard_map); None for one
        replica alone.
      dense_axis_name: a second, fast axis, over which gradients are averaged whole
        before they are compressed: the devices of a host or a slice. All of them take
        the same rung.
      exchange: how replicas average. Default: few bits an entry, with the default
        memory and controller `QuantizedAllReduce(least_bits=1)`, with others
        `QuantizedAllReduce()`. `AllGather(Threshold())`, which selects entries, if the
        memory masks what was sent, or if a factor of a given controller is above 32 and
        the memory is no `Steps` that keeps everything (`residual_decay=1`,
        `begin_at_shared=False`).
      compressor: short for `exchange=AllGather(compressor)`.
      memory: what happens to entries that were not sent. Default: `Residual()`.
      momentum: short for `memory=Momentum(momentum)`. The optimizer after the transform
        must then have no momentum of its own.
      clip: bounds each replica's own gradient before it is remembered, such as
        `ClipByGlobalNorm(1.0)`. Default: gradients are not clipped.
      weight_decay: share of the shared params that is added to each replica's gradient
        after the clip and before momentum: coupled decay, as in Deep Gradient
        Compression. `update` then needs the params. Put decoupled decay after the
        transform.
      controller: decides how many bits or entries are sent. Default:
        `Fastest(gravac.geometric(4, 256), largest_at_shared=16)`. Its factors 4, 8 and
        16 are 8, 4 and 2 bits. At own params it goes on to factor 32, one bit, and to
        256, one bit of an eighth of the entries, in turn. If the memory is a `Steps`
        that keeps everything, `Fastest(gravac.geometric(4, 256))`, whose factors above
        16 are two bits in 2 to 16 turns; for other memories but `Residual` `Fastest()`,
        which ends at 32; if the exchange is `Mixed`, whatever the memory, `Fastest()`
        with its sparse factors besides; for exchanges of other than few bits
        `Fastest(gravac.geometric(10, 1000))`. It should be told how long steps take
        (see `gravac.StepClock`), or it predicts that from `wire`, and warns if there is
        none; and where gradients are taken (`at_own_params`).
      compress: which leaves are compressed; the others go dense. True for all leaves, a
        function of (path, leaf), or a pytree of bools. Default: all leaves if the
        exchange is `QuantizedAllReduce` or `Quantized`; for all others, matrices of at
        least 16,384 entries, or of a thousandth of all entries if that is less.
      sharded: the params as they lie on a mesh, or their `jax.NamedSharding`s, if the
        compiler shards the model over all axes but `axis_name`, as under `jit`. Each
        device then compresses what it owns; the step runs by `gravac.data_parallel`
        without a fast axis, and `compress` chooses whole leaves. Or, with a
        `dense_axis_name`, which leaves the step itself holds in slices, either gathered
        to compute (FSDP) or computed with (tensor parallel): True for all, or a pytree
        of bools. Each device compresses its slices, and all other leaves go dense.
        Gradients of slices must be those of the sum of all devices' losses, as
        `gravac.value_and_grad` returns them; the mean is taken here.
      delay: 1 to exchange in each step what the step before left to send, so that the
        network works while the devices do. The exchange depends on nothing that its own
        step computes, and XLA may run both at once. Take gradients at
        `gravac.local_params`, which have what is on its way; otherwise momentum SGD may
        diverge. `gravac.flush` delivers the last of it.
      wire: predicts step times until measured ones arrive. Default: `WireCost()`.
      seed: seed of the random keys that randomized compressors draw from.
      check_every: steps between comparisons of the params of all replicas (`update`
        then needs them); 0 for never. `StepInfo.disagreements` counts comparisons that
        found a difference, and `gravac.resync` mends it. The bytes of these comparisons
        are not counted.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its state is a NamedTuple of arrays;
      `optax.tree.get(opt_state, "StepInfo")` returns `gravac.StepInfo`. The residual is
      float32 and differs per replica: see `gravac.place`.

    Raises:
      TypeError: if a component is of the wrong family; if both `exchange` and
        `compressor`, `memory` and `momentum`, or `compress` and `sharded` are given.
        From `init` and `update`: for leaves that are not real floating-point arrays,
        and for `optax.MaskedNode`.
      ValueError: if the two axes are the same, `sharded` lacks its axis, or its arrays
        do not lie on one mesh or are sharded over `axis_name`. From
        `update`: outside the axes, for gradients that were already summed over them,
        for a state that does not fit the gradients, and, if JAX knows what varies, for
        params that are sharded otherwise than `sharded` says.

    Law:
      On every replica and step, sent + kept == gradient + residual: exactly where whole
      entries are sent (apart from numbers below 2**-126, which XLA may flush to zero),
      and to a rounding of float32 in few bits and at low rank. Clip, decay and momentum
      come before: the law holds for what they make of the gradient. Without them the
      update at factor 1 is `jax.lax.pmean` of the gradients, unless the exchange
      rounds. A replica whose gradient is not finite, or without a clip has an entry of
      2**50 or more, leaves that gradient out: its memory learns nothing from it, and it
      sends from what it holds back, as if it had made no step. The mean is still over
      all replicas. The others go on, and all count the step; with a delay or rounds at
      the next exchange. `gravac.guard` skips such a step on all replicas.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> mesh = gravac.make_mesh(devices=jax.devices()[:2])
      >>> exchange = gravac.transform(controller=gravac.Fixed(16))  # 2 bits an entry
      >>> tx = optax.chain(exchange, optax.sgd(0.1))
      >>> def train_step(params, opt_state, batch):
      ...     loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
      ...     own = gravac.local_params(tx, params, opt_state)
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
      Compression, ICLR 2018.
    """
    if compressor is not None:
        _checks.component(compressor, Compressor, "compressor", "gravac.TopK()")
        why = "compressor=X is short for exchange=AllGather(X)."
        _checks.not_both(why, exchange=exchange, compressor=compressor)
        exchange = AllGather(compressor)
    if momentum is not None:
        why = "momentum=m is short for memory=Momentum(m)."
        _checks.not_both(why, momentum=momentum, memory=memory)
        _checks.decay(momentum, "momentum")
        memory = Momentum(momentum)
    slices = _slices.slices_of(sharded, axis_name)
    if slices is not None:
        why = "`sharded` tells the other axes, if it is the params or their shardings."
        _checks.not_both(why, dense_axis_name=dense_axis_name, sharded=slices.mesh)
        sharded, dense_axis_name = False, slices.axes or None
        slices = slices if slices.axes else None  # nothing is cut
    is_sharded = _slices.tells_leaves(sharded)
    if is_sharded:
        _checks.no_function(sharded)
        why = (
            "The sharded leaves are the compressed ones, and the others are averaged"
            " whole over both axes."
        )
        _checks.not_both(why, compress=compress, sharded=sharded)
        compress = sharded
    memory = Residual() if memory is None else memory
    memories = "gravac.Residual(), or gravac.Steps(optax.adam(1e-3))"
    _checks.component(memory, Memory, "memory", memories)
    if exchange is None:
        exchange = _exchange_for(controller, memory)
    _checks.component(exchange, Exchange, "exchange", "gravac.AllGather()")
    if controller is None:
        controller = _controller_for(exchange, memory)
    _checks.component(controller, Controller, "controller", "gravac.Fixed(16)")
    if compress is None and exchange.suits_small_leaves:
        compress = True
    components = Components(
        axis_name=axis_name,
        dense_axis_name=dense_axis_name,
        is_sharded=is_sharded or slices is not None,
        slices=slices,
        clip=clip,
        weight_decay=weight_decay,
        exchange=exchange,
        memory=memory,
        controller=controller,
        compress=compress,
        delay=delay,
        wire=wire,
        seed=seed,
        check_every=check_every,
    )
    return optax.GradientTransformationExtraArgs(
        components.init, functools.partial(update, components)
    )


def _exchange_for(controller: Any, memory: Memory) -> Exchange:
    """Return the default exchange: few bits, or few entries if less must be sent."""
    is_given = isinstance(controller, Controller)  # others are refused later
    is_high = is_given and max(controller.ladder) > max(Fastest.ladder)
    if memory.masks or (is_high and not _may_wait(memory)):
        return AllGather(Threshold())
    if controller is None and isinstance(memory, Residual):
        return QuantizedAllReduce(least_bits=1)
    return QuantizedAllReduce()


def _controller_for(exchange: Exchange, memory: Memory) -> Controller:
    """Return the default controller, with factors that the exchange has."""
    if isinstance(exchange, Mixed):
        return Fastest(tuple(sorted({*Fastest.ladder, *exchange.sparse_factors})))
    if not isinstance(exchange, Quantized):
        return Fastest(geometric(10, 1000))
    if _may_wait(memory):
        return Fastest(geometric(4, 256))
    if isinstance(memory, Residual):
        # At the shared params a step in two bits was worth 0.77 dense ones, in one bit
        # 0.43 (examples/benchmarks/records/2026-11-27_second_model).
        return Fastest(geometric(4, 256), largest_at_shared=16)
    return Fastest()


def _may_wait(memory: Memory) -> bool:
    """Return whether entries may wait for long: at the shared params they must not."""
    return isinstance(memory, Steps) and not memory.forgets
