"""What the controller gets to see: scalars of a step, the same on every replica."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _report, _tree
from gravac_jax._comm import Comm
from gravac_jax._controllers.base import Controller, Evidence
from gravac_jax._exchanges.base import Exchange, Exchanged
from gravac_jax._report import Tables
from gravac_jax._throughput import WireCost


class Energies(NamedTuple):
    """Averaged over replicas, in one collective.

    Attributes:
      sent: `[rungs]` float32, what each rung would have sent of what it
        was given.
      compensated: `[]` float32, of that.
      gradient: `[rungs]` float32, what each would have sent of the gradient alone,
        with the leaves that go dense; `[0]` if the controller does not ask.
    """

    sent: jax.Array
    compensated: jax.Array
    gradient: jax.Array


def dense_energy(
    controller: Controller, dense: jax.Array, fast: Comm, is_sharded: bool
) -> jax.Array:
    """`[]` float32, of the leaves that go dense; 0 if the controller does not ask.

    A device's share of it: of slices each has its own, of these leaves all the same.
    """
    if not controller.foresees:
        return jnp.zeros((), jnp.float32)
    return _tree.energy(fast.mean(dense)) / (fast.replicas if is_sharded else 1)


def energies(
    exchanged: Sequence[Exchanged],
    gradients: Sequence[jax.Array],
    dense_energy: jax.Array,
    exchanges: Sequence[Exchange],
    controller: Controller,
    key: jax.Array,
    comm: Comm,
) -> Energies:
    """This replica's own, of all buckets together; `dense_energy` always goes."""
    gradient = jnp.zeros(0, jnp.float32)
    if controller.foresees:
        gradient = dense_energy + _tree.total(
            exchange.shares(x, controller.ladder, key, comm) * _tree.energy(x)
            for exchange, x in zip(exchanges, gradients, strict=True)
        )
    return Energies(
        sent=_tree.total(x.energies for x in exchanged),
        compensated=_tree.total(x.energy for x in exchanged),
        gradient=gradient,
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
    foreseen = jnp.zeros_like(mean.sent)
    if mean.gradient.size:
        # A rung that is dense by another name sends what rung 0 sends.
        is_dense = jnp.asarray(tables.factors[:-1] == 1)
        foreseen = jnp.where(is_dense, mean.gradient[0], mean.gradient)
    return Evidence(
        step=step,
        replicas=comm.replicas,
        first_sparse=_report.first_sparse(tables),
        energies=mean.sent,
        energy=mean.compensated,
        gradient_energy=gradient_energy,
        gradient_energies=foreseen,
        predicted_parts=_report.predicted_parts(tables, wire),
        measured_seconds=seconds,
    )
