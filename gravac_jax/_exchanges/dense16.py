"""The mean of everything in 16 bits: what a sparse exchange has to beat."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _mean16, _tree
from gravac_jax._comm import Comm
from gravac_jax._exchanges.base import Exchange, Exchanged, Traffic
from gravac_jax._exchanges.dense import mean16_traffic


@dataclasses.dataclass(frozen=True)
class DenseMean16(Exchange):
    """A mean of the whole bucket that travels as bfloat16, whatever the rung.

    Every replica adds up a shard of its own, in float32, and the rounded means are
    gathered. What the first rounding drops stays in the residual; the second one, of
    the mean, is seen by nobody.

    Law:
      With r rounding to bfloat16 and x_1 .. x_N the buckets, the mean is
      r((r(x_1) + ... + r(x_N)) / N), the sum in float32.

    Cost:
      All-to-all and all-gather: 2 (N - 1) alpha + 2 (N - 1) / N 2 n beta, half of a
      float32 ring's.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.DenseMean16().traffic(1000, factor=1, replicas=4)
      Traffic(entries=1000, payload_bytes=2500, wire_bytes=3000, messages=6)
    """

    @property
    def is_rounded(self) -> bool:
        """To 8 bits."""
        return True

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
        """Shards of all buckets, added up; then shards of the mean."""
        del key, looks
        sent = _mean16.rounded(bucket)
        is_skipped = rung == len(ladder)
        energies = jnp.broadcast_to(_tree.energy(sent), (len(ladder),))
        return Exchanged(
            mean=jax.lax.cond(
                is_skipped,
                lambda: comm.zeros(bucket),
                lambda: _mean16.mean([sent], comm)[0],
            ),
            residual=jnp.where(is_skipped, bucket, bucket - sent),
            energies=energies,
            energy=_tree.energy(bucket),
        ), state

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """2 bytes an entry, once whole and once a shard."""
        del factor
        return mean16_traffic(n, replicas)
