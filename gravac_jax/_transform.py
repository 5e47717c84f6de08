"""transform(): from arguments to one Optax gradient transformation.

A method of the literature is what a replica sends, and what it remembers::

    dense data parallelism    send=Dense()
    few bits                  send=Bits(2)
    top-k SGD                 send=TopK(100)
    DGC                       send=TopK(1000, select="sampled"), memory=Momentum()
    PowerSGD                  send=LowRank(4)
    GraVAC                    send=GraVAC(TopK.geometric(10, 1000))
    the default               send=Fastest(), which chooses while training runs
"""

import functools
from collections.abc import Callable
from typing import Any

import optax

from gravac_jax._controllers import Fastest, controller_of
from gravac_jax._controllers.base import Controller
from gravac_jax._encodings import Encoding
from gravac_jax._evidence.cost_model import WireCost
from gravac_jax._memory import Residual
from gravac_jax._memory.base import Memory
from gravac_jax._network import AxisName
from gravac_jax._step import Components, bucketing, slicing, update
from gravac_jax._step.clipping import Clip


def transform(
    axis_name: AxisName = "data",
    *,
    send: Encoding | Controller | None = None,
    every: int | Callable[[Any], Any] = 1,
    delay: int = 0,
    memory: Memory | None = None,
    clip: Clip | None = None,
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

    `update(grads, state, params=None, *, step_seconds=None, steps_ago=None,
    at="shared", is_due=None, rung=None, deliver=None)` ignores every other argument.
    `step_seconds` is how long a step took, `[]` float32, NaN if unknown. `steps_ago`,
    `[]` int32, says which one: 1, the default, is the step before this one. `at`,
    static, says where gradients were taken: at the "shared" params, or at "own" ones,
    `gravac.own_params`, so that `gravac.Fastest` may let entries wait for some steps.
    `is_due`, static, is for who knows whether this step exchanges (`every`) and
    compiles two programs without a branch. `rung`, static, is the rung of this step,
    for callers who compile one program for each; all replicas must pass the same.
    `deliver` is for `gravac.flush` and `gravac.own_params`.

    Args:
      axis_name: the mapped axis, or several in a tuple (under shard_map); None for one
        replica alone.
      send: what a replica sends: an encoding, such as `gravac.Bits(2)`,
        `gravac.TopK(100)`, `gravac.LowRank(4)` or `gravac.Dense()`; or a controller
        with a ladder of encodings, such as `gravac.Fastest((gravac.Dense(),
        gravac.Bits(8), gravac.Bits(2)))`. Default: `gravac.Fastest()`, which chooses
        between 32 bits an entry and one bit of an eighth of the entries while training
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
      clip: bounds each replica's own gradient before it is remembered, such as
        `ClipByGlobalNorm(1.0)`. Default: gradients are not clipped.
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
      ValueError: if the two axes are the same, or the arrays of `shardings` do not lie
        on one mesh or are sharded over `axis_name`. From `update`: outside
        the axes, for gradients that were already summed over them, for a state that
        does not fit the gradients, for a ladder whose bytes rise with this many
        replicas, and, if JAX knows what varies, for params of which each device along
        the fast axis has a slice.

    Law:
      On every replica and step, sent + held back == gradient + residual: exactly where
      whole entries are sent (apart from numbers below 2**-126, which XLA may flush to
      zero), and to a rounding of float32 in few bits and at low rank. Clip, decay and
      momentum come before: the law holds for what they make of the gradient. Without
      them the update of `send=Dense()` is `jax.lax.pmean` of the gradients. What all
      replicas made in a round is what was sent plus what is held back. A replica whose
      gradient is not finite, or has an entry of 2**50 or more, leaves
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
        **slicing.said(shardings, axis_name, fast_axis_name),
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
