"""Send everything, in 32 or 16 bits: the baselines of every sparse exchange."""

import dataclasses
from typing import Any

import jax

from gravac_jax import _arrays, _checks, _collectives
from gravac_jax._carrier import Carrier
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._exchanges.base import Exchange

VALUES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class DenseMean(Exchange):
    """Averages the whole bucket, whatever the rung.

    In bfloat16 every replica adds up a shard of its own, in float32, and the rounded
    means are gathered. What the first rounding drops stays in the residual. What the
    second one drops, of the mean, is lost.

    Law:
      In float32, the mean is `jax.lax.pmean`. In bfloat16, with r rounding to bfloat16
      and x_1 .. x_N the buckets, it is r((r(x_1) + ... + r(x_N)) / N), summed in
      float32.

    Cost:
      Ring all-reduce: 2 (N - 1) alpha + 2 (N - 1) / N 4 n beta. In bfloat16, all-to-all
      and all-gather: as many messages and half the bytes.

    Args:
      values: "float32" or "bfloat16", how values travel.

    Raises:
      ValueError: if `values` is neither.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.DenseMean().traffic(1000, factor=100, replicas=4)
      Traffic(entries=1000, payload_bytes=4000, wire_bytes=6000.0, messages=6)
      >>> gravac.DenseMean("bfloat16").traffic(1000, factor=1, replicas=4)
      Traffic(entries=1000, payload_bytes=2500, wire_bytes=3000, messages=6)
    """

    values: str = "float32"

    def __post_init__(self) -> None:
        _checks.one_of(self.values, "values", VALUES)

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of 4 bytes an entry, or 2."""
        del factor
        if self.values == "bfloat16":
            return _collectives.bfloat16_mean_traffic(n, replicas)
        return _collectives.mean_traffic(n, replicas)

    def figures_traffic(
        self, n: int, factor: float, figures: int, replicas: int
    ) -> Traffic:
        """Return the cost of figures that travel along, or with the energies."""
        del n, factor
        if self.values == "bfloat16":
            return _collectives.carried_traffic(figures, replicas)
        return _collectives.mean_traffic(figures, replicas)._replace(messages=0)

    def energies_traffic(
        self, n: int, factor: float, rungs: int, replicas: int
    ) -> Traffic:
        """Return the cost of energies, which travel along if the bucket is small."""
        if self.values == "bfloat16":
            return self.figures_traffic(n, factor, rungs + 1, replicas)
        return _collectives.energies_beside_mean_traffic(n, rungs + 1, replicas)

    @property
    def sends_whole_entries(self) -> bool:
        """Whether every entry is either sent or kept: in float32."""
        return self.values == "float32"

    def rounded(self, bucket: jax.Array) -> jax.Array:
        """Round to `values`."""
        if self.values == "bfloat16":
            return _arrays.round_to_bfloat16(bucket)
        return bucket

    def mean_beside(
        self, sent: jax.Array, figures: tuple[Any, ...], comm: Comm
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Return the mean, which travels as `values` and takes figures along."""
        carrier = Carrier.on(comm, figures)
        if self.values == "bfloat16":
            mean = carrier.bfloat16_mean([sent])[0]
        else:
            mean = carrier.mean(sent)
        return mean, carrier.mean_of_figures()
