"""Top-k as TPUs do it: almost all of the largest, in one pass."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._compressors.base import Choice, Compressor, Deviation, reaching
from gravac_jax._marking import compaction, quantile
from gravac_jax._marking.quantile import Bracket


@dataclasses.dataclass(frozen=True)
class ApproxTopK(Compressor):
    """Sends what reaches the threshold that `jax.lax.approx_max_k` finds.

    That one misses some of the largest entries, so that its k-th is a little too small
    and a few more than k reach it. It is called once, for the smallest factor, whose
    list holds the thresholds of all others; for factors below it a sample tells the
    threshold.

    Law:
      What is sent is not smaller than what is not, except for a few entries that find
      no slot. On CPUs and GPUs the threshold is exact.

    Cost:
      One pass on a TPU, and a sort of n / smallest_factor entries. Elsewhere a sort of
      all of them, which nobody wants: see the record of bench_compressors.

    Args:
      smallest_factor: the smallest factor above 1 that the ladder has.
      recall: the share of the largest entries that it must find, in (0, 1].

    Raises:
      ValueError: if an argument is out of its range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> bucket = jnp.array([0.1, 2.0, -3.0, 0.0])
      >>> compressor = gravac.ApproxTopK(smallest_factor=2)
      >>> payload, _ = compressor.compress(bucket, (), k=2, key=jax.random.key(0))
      >>> payload.indices.tolist()
      [1, 2]

    References:
      Chern et al., TPU-KNN: K nearest neighbor search at peak FLOP/s, NeurIPS 2022.
    """

    smallest_factor: float = 10
    recall: float = 0.95
    deviation: ClassVar[Deviation] = Deviation(entries=0.8, energy=0.9)

    def __post_init__(self) -> None:
        _checks.factor(self.smallest_factor)
        _checks.within(self.recall, "recall", 1e-6, 1, "It is a share of entries.")

    def mark(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, Any]:
        """One search, one pass."""
        del key
        largest = self.count(bucket.size, self.smallest_factor)
        magnitudes, _ = jax.lax.approx_max_k(
            jnp.abs(bucket), largest, recall_target=self.recall
        )
        found = magnitudes[jnp.minimum(k, largest) - 1]
        bits = jnp.where(k <= largest, compaction.magnitude_bits(found), bracket.middle)
        return reaching(bucket, jnp.maximum(bits, quantile.SMALLEST)), state
