"""Send everything: no compression."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax._selection.compressor import Choice, Compressor, Wanted


@dataclasses.dataclass(frozen=True)
class Identity(Compressor):
    """Sends every entry, zeros included, whatever the factor.

    Law:
      Nothing is left.

    Cost:
      The cost of a dense mean, which `AllGather` runs in its place.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.Identity().count(1_000_000, factor=1000)
      1000000
    """

    def count(self, n: int, factor: float) -> int:
        """Return `n`."""
        del factor
        return n

    def mark(self, bucket: jax.Array, state: Any, wanted: Wanted) -> tuple[Choice, Any]:
        """Mark all entries."""
        return Choice.from_mask(jnp.ones(bucket.shape, bool)), state
