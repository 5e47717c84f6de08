"""Send everything: the off switch of the family."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax._compressors.base import Choice, Compressor, chosen
from gravac_jax._marking.quantile import Bracket
from gravac_jax._payload import Payload


@dataclasses.dataclass(frozen=True)
class Identity(Compressor):
    """Sends every entry, zeros too, whatever the factor.

    Law:
      Nothing is left.

    Cost:
      That of a dense mean, which `AllGather` makes of it.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.Identity().count(1_000_000, factor=1000)
      1000000
    """

    def count(self, n: int, factor: float) -> int:
        """`n`."""
        del factor
        return n

    def mark(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, Any]:
        """All of them."""
        del k, bracket, key
        return chosen(jnp.ones(bucket.shape, bool)), state

    def narrow(self, payload: Payload, *, k: int, key: jax.Array) -> Payload:
        """The same payload."""
        del k, key
        return payload
