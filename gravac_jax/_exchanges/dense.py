"""The mean of everything: the off switch of the family, and others' first rung."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _comm, _mean16, _tree
from gravac_jax._comm import Comm
from gravac_jax._exchanges.base import Exchange, Exchanged, Traffic

VALUE_BYTES = 4


def dense_exchange(
    bucket: jax.Array, rung: jax.Array, rungs: int, comm: Comm
) -> Exchanged:
    """The mean of whole buckets, which leaves nothing; or nothing if skipped."""
    energy = _tree.energy(bucket)
    is_skipped = rung == rungs
    nothing = lambda: comm.zeros(bucket)
    return Exchanged(
        mean=jax.lax.cond(is_skipped, nothing, lambda: comm.mean(bucket)),
        residual=jnp.where(is_skipped, bucket, 0),
        energies=jnp.broadcast_to(energy, (rungs,)),
        energy=energy,
    )


def with_mean_energies(exchanged: Exchanged, rung: jax.Array, comm: Comm) -> Exchanged:
    """With its energies averaged, in a collective of their own if need be."""
    if exchanged.mean_energies is not None:
        return exchanged
    own = exchanged.own_energies
    nothing = lambda: comm.zeros(own)
    is_skipped = rung == exchanged.energies.size
    mean = jax.lax.cond(is_skipped, nothing, lambda: comm.mean(own))
    return exchanged._replace(mean_energies=mean)


def dense_traffic(entries: int, replicas: int) -> Traffic:
    """The cost of a float32 mean of `entries`."""
    payload_bytes = VALUE_BYTES * entries
    wire_bytes = _comm.mean_wire_bytes(payload_bytes, replicas)
    return Traffic(entries, payload_bytes, wire_bytes, _comm.mean_messages(replicas))


def mean16_traffic(entries: int, replicas: int) -> Traffic:
    """The cost of a mean of `entries` in 16 bits, once whole and once a shard."""
    shard_bytes = _mean16.shard_bytes(entries, replicas)
    return Traffic(
        entries=entries,
        payload_bytes=(replicas + 1) * shard_bytes,
        wire_bytes=2 * _comm.gather_wire_bytes(shard_bytes, replicas),
        messages=2 * _comm.gather_messages(replicas),
    )


def mean_of_energies(rungs: int, replicas: int) -> Traffic:
    """The cost of a mean of its own for `Exchanged.own_energies`."""
    return dense_traffic(rungs + 1, replicas)._replace(entries=0)


def cheaper(traffic: Traffic, n: int, replicas: int) -> Traffic:
    """That of a dense mean of `n` entries, unless `traffic` is less or as much."""
    dense = dense_traffic(n, replicas)
    is_worse = traffic.entries == n or traffic.wire_bytes > dense.wire_bytes
    return dense if is_worse else traffic


@dataclasses.dataclass(frozen=True)
class DenseMean(Exchange):
    """A float32 all-reduce of the whole bucket, whatever the rung.

    Cost:
      Ring all-reduce: 2 (N - 1) alpha + 2 (N - 1) / N 4 n beta.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.DenseMean().traffic(1000, factor=100, replicas=4)
      Traffic(entries=1000, payload_bytes=4000, wire_bytes=6000.0, messages=6)
    """

    def exchange(
        self,
        bucket: jax.Array,
        state: Any,
        rung: jax.Array,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
        comm: Comm,
        looks: jax.Array | bool = True,
    ) -> tuple[Exchanged, Any]:
        """The mean of whole buckets."""
        del key, looks
        return dense_exchange(bucket, rung, len(ladder), comm), state

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """4 bytes an entry."""
        del factor
        return dense_traffic(n, replicas)
