"""Send everything, in 32 or 16 bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _network, _refuse
from gravac_jax._encodings.base import Bucket, Encoding, Sent
from gravac_jax._network import Comm, Traffic

VALUES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, repr=False)
class Dense(Encoding):
    """Averages the whole bucket, as data-parallel training does without compression.

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
      >>> bucket = gravac.Bucket(1000)
      >>> gravac.Dense().traffic(bucket, replicas=4).wire_bytes
      6000.0
      >>> gravac.Dense("bfloat16").traffic(bucket, replicas=4).wire_bytes
      3000.0
    """

    suits_small_leaves = True
    values: str = "float32"

    def __post_init__(self) -> None:
        _refuse.one_of(self.values, "values", VALUES)

    @property
    def sends_whole_entries(self) -> bool:
        """Whether every entry is either sent or held back: in float32."""
        return self.values == "float32"

    def traffic(self, bucket: Bucket, replicas: int) -> Traffic:
        """Return the cost of 4 bytes an entry, or 2."""
        if self.values == "bfloat16":
            shard_bytes = _network.BFLOAT16_BYTES * -(-bucket.n // replicas)
            return _network.two_stage_traffic(shard_bytes, replicas)
        return _network.mean_traffic(bucket.n, replicas)

    def exchange(
        self, x: jax.Array, state: Any, *, comm: Comm, **_: Any
    ) -> tuple[Sent, Any]:
        """Average everything."""
        is_whole = self.sends_whole_entries
        sent = x if is_whole else _arrays.round_to_bfloat16(x)
        energy = _arrays.energy(sent)
        comm.tell(energy)
        mean = comm.mean(x) if is_whole else comm.bfloat16_mean(sent)
        return Sent(mean, jnp.zeros_like(x) if is_whole else x - sent, energy), state

    def share(self, looked: Any, bucket: Bucket, replicas: int) -> jax.Array:
        """Return 1: everything is sent."""
        return jnp.ones_like(looked, shape=())
