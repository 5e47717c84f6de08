"""What the controller gets to see: scalars of a step, the same on every replica."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _gain, _report, _tree
from gravac_jax._comm import Comm
from gravac_jax._controllers.base import Controller, Evidence
from gravac_jax._exchanges.base import Exchange, Exchanged
from gravac_jax._report import Tables
from gravac_jax._throughput import WireCost


class Energies(NamedTuple):
    """Averaged over replicas.

    Attributes:
      sent: `[rungs]` float32, what each rung would have sent of what it
        was given.
      compensated: `[]` float32, of that.
      gradient: `[rungs]` float32, what each would have sent of the gradient alone,
        with the leaves that go dense; zeros in a step that does not look, `[0]` if the
        controller never asks.
    """

    sent: jax.Array
    compensated: jax.Array
    gradient: jax.Array


def energies(
    exchanged: Sequence[Exchanged],
    controller: Controller,
    looks: jax.Array | bool,
    sample: Callable[[], jax.Array],
    slices: Comm,
    every: Comm,
) -> Energies:
    """Of all buckets together; averaged here unless they travelled with the entries.

    Args:
      exchanged: what came of each bucket.
      controller: says whether it wants to know of the gradient alone.
      looks: whether it does in this step.
      sample: gives `sampled`, at its price.
      slices: those who hold the other slices of the buckets, if any.
      every: all who hold part of a gradient.
    """
    travelled = [x.mean_energies for x in exchanged if x.mean_energies is not None]
    if travelled:  # then those of all buckets did
        mean = slices.mean(_tree.total(travelled))
    else:
        mean = every.mean(_tree.total(x.own_energies for x in exchanged))
    sent, gradient = mean[:-1], jnp.zeros(0, jnp.float32)
    if controller.samples_gradient:
        nothing = lambda: every.zeros(sent)
        gradient = jax.lax.cond(looks, lambda: every.mean(sample()), nothing)
    return Energies(sent, mean[-1], gradient)


def gains(
    mean: Energies, before: jax.Array, looks: jax.Array | bool, rung: jax.Array
) -> jax.Array:
    """`[rungs]` float32: what is not known of this step is that of the last look.

    Args:
      mean: the energies, averaged.
      before: `[rungs]` float32, the gains so far.
      looks: whether this step looked at all rungs.
      rung: `[]` int32, that of the step; beyond the ladder if it was skipped, when
        nothing is learned.
    """
    now = _gain.gain(mean.sent, mean.compensated)
    is_known = (looks | (jnp.arange(now.size) == rung)) & (rung < now.size)
    return jnp.where(is_known, now, before)


def sampled(
    gradients: Sequence[jax.Array],
    dense: jax.Array,
    exchanges: Sequence[Exchange],
    ladder: tuple[float, ...],
    key: jax.Array,
    comm: Comm,
    fast: Comm,
    is_sharded: bool,
) -> jax.Array:
    """`[rungs]` float32, what each would send of a gradient alone, by a sample of it.

    Args:
      gradients: its buckets.
      dense: of the leaves that go dense, with every rung.
      exchanges: of the buckets.
      ladder: the factors.
      key: a random key.
      comm: the replicas.
      fast: the other devices of this one; of slices each has its own, of the dense
        leaves all have the same.
      is_sharded: whether buckets are slices.
    """
    always = _tree.energy(fast.mean(dense)) / (fast.replicas if is_sharded else 1)
    return always + _tree.total(
        exchange.shares(x, ladder, key, comm) * _tree.energy(x)
        for exchange, x in zip(exchanges, gradients, strict=True)
    )


def evidence(
    step: jax.Array,
    comm: Comm,
    tables: Tables,
    wire: WireCost,
    mean: Energies,
    gradient_energy: jax.Array,
    seconds: jax.Array,
) -> Evidence:
    """Of a step whose energies were averaged.

    Args:
      step: `[]` int32.
      comm: the replicas.
      tables: what each rung sends.
      wire: the cost model.
      mean: the energies.
      gradient_energy: `[]` float32.
      seconds: `[rungs]` float32, measured; NaN where not.
    """
    sampled = jnp.zeros_like(mean.sent)
    if mean.gradient.size:
        # A rung that is dense by another name sends what rung 0 sends.
        is_dense = jnp.asarray(tables.factors[:-1] == 1)
        sampled = jnp.where(is_dense, mean.gradient[0], mean.gradient)
    return Evidence(
        step=step,
        replicas=comm.replicas,
        first_sparse=_report.first_sparse(tables),
        energies=mean.sent,
        energy=mean.compensated,
        gradient_energy=gradient_energy,
        gradient_energies=sampled,
        predicted_parts=_report.predicted_parts(tables, wire),
        measured_seconds=seconds,
    )
