"""Deep Gradient Compression's selection: estimate the threshold from a sample."""

import dataclasses
from typing import Any

import jax

from gravac_jax import _arrays
from gravac_jax._selection import entries, quantile
from gravac_jax._selection.compressor import Choice, Compressor, Wanted, safe_bits
from gravac_jax._selection.entries import Marks


@dataclasses.dataclass(frozen=True)
class SampledTopK(Compressor):
    """Sends the entries that reach a threshold estimated from a sample.

    If more than k entries reach it, the exact threshold is searched: the paper's
    hierarchical selection. (The paper searches again only if far more reach it, and
    otherwise sends more.) The paper samples 0.1% to 1% of the gradient. Here the sample
    has about 65,536 entries, or all of a smaller bucket, and the threshold lies two
    standard deviations of its count on the safe side.

    Law:
      Nothing that is sent is smaller than anything that is kept.

    Cost:
      One pass over the bucket; about a dozen more in the rare second selection.

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

    def mark(self, bucket: jax.Array, state: Any, wanted: Wanted) -> tuple[Choice, Any]:
        """Mark in one pass; if too many reach the threshold, search the exact one."""
        choice = Choice.from_threshold(bucket, safe_bits(wanted.bracket))

        def search(_: Marks) -> Marks:
            bits = _arrays.magnitude_bits(bucket)
            return entries.mark(quantile.k_largest(bits, wanted.k))

        marks = _arrays.only_if(choice.marks.total > wanted.k, search, choice.marks)
        return choice._replace(marks=marks), state
