"""Deep Gradient Compression's own selection: a sample tells the threshold."""

import dataclasses
from typing import Any, ClassVar

import jax

from gravac_jax import _tree
from gravac_jax._compressors.base import (
    Choice,
    Compressor,
    Deviation,
    chosen,
    reaching,
    safe,
)
from gravac_jax._marking import compaction, quantile
from gravac_jax._marking.quantile import Bracket


@dataclasses.dataclass(frozen=True)
class SampledTopK(Compressor):
    """Sends what reaches a threshold that was estimated from a sample.

    If more than k entries reach it, the exact threshold is searched: DGC's hierarchical
    selection, which they make where far more do, and else send more. Their sample is
    0.1% to 1% of the gradient; ours is about 65,536 entries of it, or all, and the
    threshold lies two standard deviations of its count on the safe side.

    Law:
      What is sent is not smaller than what is not.

    Cost:
      One pass over the bucket; in the rare second selection about a dozen more.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> bucket = jnp.array([0.1, 2.0, -3.0, 0.0])
      >>> compressor = gravac.SampledTopK()
      >>> payload, _ = compressor.compress(bucket, (), k=2, key=jax.random.key(0))
      >>> payload.indices.tolist()
      [1, 2]

    References:
      Lin et al., Deep Gradient Compression, ICLR 2018, section 5.
    """

    deviation: ClassVar[Deviation] = Deviation(entries=0.5, energy=0.6)

    def mark(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, Any]:
        """One pass, mostly."""
        del key
        choice = reaching(bucket, safe(bracket))
        bits = compaction.magnitude_bits(bucket)
        again = lambda _: chosen(quantile.largest(bits, k))
        return _tree.only_if(choice.marks.total > k, again, choice), state
