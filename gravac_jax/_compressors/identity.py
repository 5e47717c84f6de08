"""Send everything: the off switch of the family."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax._compressors.base import Compressor
from gravac_jax._payload import Payload


@dataclasses.dataclass(frozen=True)
class Identity(Compressor):
    """Sends every entry, whatever the factor.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.Identity().count(1_000_000, factor=1000)
      1000000
    """

    def init(self, n: int) -> Any:
        """No state."""
        del n
        return ()

    def count(self, n: int, factor: float) -> int:
        """`n`."""
        del factor
        return n

    def compress(
        self, bucket: jax.Array, state: Any, *, k: int, key: jax.Array
    ) -> tuple[Payload, Any]:
        """The whole bucket."""
        del k, key
        return Payload(bucket, jnp.arange(bucket.size, dtype=jnp.int32)), state

    def narrow(self, payload: Payload, k: int) -> Payload:
        """The same payload."""
        del k
        return payload
