"""The k entries of largest magnitude, exactly: the yardstick."""

import dataclasses
from typing import Any

import jax

from gravac_jax._compressors.base import Choice, Compressor, chosen
from gravac_jax._marking import compaction, quantile
from gravac_jax._marking.quantile import Bracket


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """Sends the k entries of largest magnitude, k = max(1, floor(n / factor)).

    Of equal magnitudes the earlier entry wins. No k entries hold more energy, so this
    is what the other selectors are measured against.

    A sample gives a bracket of the k-th magnitude; the few entries inside are compacted
    and searched. If the bracket missed, all entries are searched: slower, and exact.

    Law:
      `narrow(compress(x, k), j)` is `compress(x, j)` for every `j <= k`: multi-level
      compression (GraVAC) is exact.

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

    def mark(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, Any]:
        """What is above the bracket, what is in it, and the mark."""
        del key
        bits = compaction.magnitude_bits(bucket)
        cut = quantile.kth_between(bits, k, bracket.low, bracket.high)
        return chosen(quantile.reaching(bits, cut)), state
