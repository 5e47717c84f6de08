"""transform(): all rooms wired as one Optax gradient transformation.

A recipe is a memory, an exchange (with its compressor) and a controller:

  dense data parallelism    NoMemory + DenseMean + Fixed(1)
  top-k SGD                 Residual + AllGather(TopK()) + Fixed(100)
  DGC                       Momentum + AllGather(SampledTopK()) + Scheduled(...)
  GraVAC                    Residual + AllGather(Threshold()) + GraVAC()
  the default               Residual + AllGather(Threshold()) + Fastest()
"""

from typing import Any

import optax

from gravac_jax import _buckets, _checks
from gravac_jax._clipping import Clip, NoClip
from gravac_jax._comm import AxisName
from gravac_jax._compressors import Threshold
from gravac_jax._compressors.base import Compressor
from gravac_jax._controllers import Fastest
from gravac_jax._controllers.base import Controller
from gravac_jax._exchanges import AllGather, Cheapest
from gravac_jax._exchanges.base import Exchange
from gravac_jax._memory import Momentum, Residual
from gravac_jax._memory.base import Memory
from gravac_jax._throughput import WireCost
from gravac_jax._wiring import Wiring


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
    wire: WireCost | None = None,
    seed: int = 0,
    check_every: int = 0,
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Average gradients over replicas, sending only the entries that matter.

    Takes the place of `jax.lax.pmean(grads, axis_name)` in data-parallel training: its
    `update` takes each replica's own gradients and returns their compressed mean, the
    same on every replica. Call it inside `shard_map`, `pmap` or `vmap` over
    `axis_name`, with gradients from `gravac.value_and_grad`.

    `update(grads, state, params=None, *, step_seconds=None, measured_step=None,
    deliver=None)` ignores every other argument. `step_seconds` is the time that a step
    took, `[]` float32, NaN if unknown; `measured_step`, `[]` int32, says which step
    that was, counted from 0; by default the one before. `deliver` is for `gravac.flush`
    and `gravac.local_params`.

    Args:
      axis_name: the mapped axis, or several in a tuple (under shard_map); None for one
        replica alone.
      dense_axis_name: a second, fast axis, over which gradients are averaged whole
        before they are compressed: the devices of a host or a slice. All devices take
        the same rung.
      exchange: how replicas average. Default: `AllGather(compressor)`.
      compressor: short for `exchange=AllGather(compressor)`. Default: `Threshold()`.
      memory: what becomes of entries that were not sent. Default: `Residual()`.
      momentum: short for `memory=Momentum(momentum)`: the optimizer after it must have
        none of its own then.
      clip: bounds each replica's own gradient before it is remembered, such as
        `ClipByGlobalNorm(1.0)`. Default: `NoClip()`.
      weight_decay: so many times the params are added to each replica's gradient after
        the clip, before momentum: coupled decay, as in Deep Gradient Compression.
        `update` needs the params then. Decoupled decay comes after the transform.
      controller: how few are sent. Default: `Fastest()`, which wants to be told how
        long steps take; see `gravac.StepClock`. Without, it chooses for `wire`.
      compress: which leaves are compressed; the others go dense. True for all, a
        function of (path, leaf), or a pytree of bools. Default: matrices of at least
        16,384 entries, or of a thousandth of all where that is less.
      sharded: which leaves are sharded over `dense_axis_name`, gathered to compute
        (FSDP) or computed with in slices (tensor parallel): all, or those of a pytree
        of bools. Each device compresses the slices that it owns, and all other leaves
        go dense. Gradients of slices must be those of the sum of all devices' losses,
        as `gravac.value_and_grad` has them; the mean is taken here.
      wire: predicts step times until measured ones come. Default: that of a `Cheapest`
        exchange, `WireCost()` for others.
      seed: of the random keys that randomized compressors draw from.
      check_every: after so many steps replicas compare checksums of their params
        (`update` needs them then), and `StepInfo.disagreements` counts where they
        differ; 0 for never. `gravac.resync` makes them the same again. These checks
        are not among the bytes that are counted.
      bucket_bytes: None to select over the whole model at once, which sends what
        matters most. A number makes buckets of whole leaves, each but the last with at
        least so many bytes of float32, 1 one bucket a leaf: unless there is a clip by
        norm, none waits for the gradients of the others, so that its exchange may begin
        while the backward pass goes on. Each selects for itself, and compiles its own
        branches. While a step runs its old residuals are kept, to be restored if it is
        skipped. XLA makes nothing of it on CPUs and TPUs, where collectives come last
        in the schedule (jax 0.10.2); collectives in the branches of a ladder wait for
        all operands of the branch on both, and with a single rung, as of `Fixed`,
        there are no branches. Without a number all replicas take the rung of the first
        one; with it each relies on having decided the same. Energies travel once a
        bucket.

    Returns:
      An `optax.GradientTransformationExtraArgs`. Its state is a NamedTuple of arrays;
      `optax.tree.get(opt_state, "StepInfo")` reads `gravac.StepInfo`. The residual is
      float32 and differs per replica: see `gravac.place`.

    Raises:
      TypeError: if a component is of the wrong family, if both `exchange` and
        `compressor`, `memory` and `momentum`, or `compress` and `sharded`, are given.
        By `init` and `update`: for leaves that are no real floating-point arrays, and
        for `optax.MaskedNode`.
      ValueError: if the two axes are one, or `sharded` lacks its axis. By `update`,
        outside the axes, for gradients that were already summed over them, and for a
        state that does not fit the gradients; where JAX knows what varies, for params
        that are sharded otherwise than `sharded` says.

    Law:
      On every replica and step, sent + kept == gradient + residual, exactly (but for
      numbers below 2**-126, which XLA may flush to zero; `LowRank` rounds); with a
      clip, decay or momentum, of what these make of the gradient. Without them, at
      factor 1 the update is `jax.lax.pmean` of the gradients, unless the exchange
      rounds. If any gradient of any replica is not finite, or without a clip has an
      entry of 2**50 and more, so that sums of squares would not be, the update is zero
      and the state but for its counters stays as it was, on all replicas.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import gravac_jax as gravac
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> tx = optax.chain(gravac.transform(), optax.sgd(0.1))
      >>> def train_step(params, opt_state, batch):
      ...     loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
      ...     value, grads = gravac.value_and_grad(loss)(params, batch)
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
        memory = Momentum(momentum)
    is_sharded = sharded is not None and sharded is not False
    if is_sharded:
        _checks.no_function(sharded)
        why = (
            "The sharded leaves are the compressed ones, and the others are averaged"
            " whole over both axes."
        )
        _checks.not_both(why, compress=compress, sharded=sharded)
        compress = sharded
    if isinstance(exchange, Cheapest):
        _checks.one_wire(exchange.wire, wire)
        wire = exchange.wire
    wiring = Wiring(
        axis_name=axis_name,
        dense_axis_name=dense_axis_name,
        is_sharded=is_sharded,
        clip=NoClip() if clip is None else clip,
        weight_decay=weight_decay,
        exchange=AllGather(Threshold()) if exchange is None else exchange,
        memory=Residual() if memory is None else memory,
        controller=Fastest() if controller is None else controller,
        compress=compress,
        wire=WireCost() if wire is None else wire,
        seed=seed,
        check_every=check_every,
        bucket_bytes=bucket_bytes,
    )
    return optax.GradientTransformationExtraArgs(wiring.init, wiring.update)
