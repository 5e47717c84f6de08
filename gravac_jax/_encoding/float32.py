"""Values as they are: the off switch of the family."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gravac_jax._encoding.base import ValueEncoding


@dataclasses.dataclass(frozen=True)
class Float32(ValueEncoding):
    """Values travel as they are: the default.

    Cost:
      4 bytes an entry.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(values=gravac.Float32()).traffic(10_000, 100, replicas=2)
      Traffic(entries=100, payload_bytes=604, wire_bytes=604, messages=1)
    """

    dtype: ClassVar[Any] = jnp.int32
    is_exact: ClassVar[bool] = True

    def rounded(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """As it is."""
        del exponents
        return x

    def encode(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """The same bits."""
        del exponents
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    def decode(self, encoded: jax.Array, exponents: jax.Array) -> jax.Array:
        """The same bits."""
        del exponents
        return jax.lax.bitcast_convert_type(encoded, jnp.float32)
