"""The k entries of largest magnitude, exactly: the yardstick."""

import dataclasses
from typing import Any

import jax

from gravac_jax import _arrays
from gravac_jax._selection import quantile
from gravac_jax._selection.compressor import Choice, Compressor, Wanted


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """Sends the k entries of largest magnitude, k = max(1, floor(n / factor)).

    Of equal magnitudes the earlier entry wins. No k entries hold more energy, so the
    other compressors are compared with this one.

    A sample gives a bracket of the k-th magnitude; the few entries inside are compacted
    and searched. If the bracket missed, all entries are searched: slower, and exact.

    Law:
      The entries sent at a larger factor are the largest of those sent at a smaller
      one, so that GraVAC's multi-level compression is exact.

    Cost:
      Three passes over the bucket, and a sample of about 65,536 entries; some dozen
      passes more where the bracket missed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> bucket = jnp.array([0.1, 2.0, -3.0, 0.0])
      >>> top = gravac.TopK()
      >>> payload, _ = top.compress(bucket, top.init(4), k=2, key=jax.random.key(0))
      >>> payload.values.tolist(), payload.indices.tolist()
      ([2.0, -3.0], [1, 2])

    References:
      Aji and Heafield, Sparse communication for distributed gradient descent, EMNLP
      2017; Tyagi and Swany, GraVAC, IEEE CLOUD 2023.
    """

    def mark(self, bucket: jax.Array, state: Any, wanted: Wanted) -> tuple[Choice, Any]:
        """Find the k-th magnitude within the bracket, then mark in one pass."""
        bits = _arrays.magnitude_bits(bucket)
        cut = quantile.kth_between(
            bits, wanted.k, wanted.bracket.low, wanted.bracket.high
        )
        return Choice.from_mask(quantile.at_or_above(bits, cut)), state
