"""Values in bfloat16: half the bytes, eight significant bits."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gravac_jax._encoding.base import ValueEncoding

LARGEST = (2 - 2.0**-7) * 2.0**127  # what is above would round to infinity


@dataclasses.dataclass(frozen=True)
class BFloat16(ValueEncoding):
    """Values travel as bfloat16, to nearest, ties to even.

    Law:
      Off by at most 2**-8 of the value, which stays in the residual.

    Cost:
      2 bytes an entry.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(values=gravac.BFloat16()).traffic(10_000, 100, replicas=2)
      Traffic(entries=100, payload_bytes=404, wire_bytes=404, messages=1)
    """

    dtype: ClassVar[Any] = jnp.uint16

    def rounded(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """To 8 significant bits."""
        del exponents
        # Not a cast there and back, which XLA may leave out.
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return jnp.clip(x, -LARGEST, LARGEST)

    def encode(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """The upper half of the bits."""
        del exponents
        return (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16)

    def decode(self, encoded: jax.Array, exponents: jax.Array) -> jax.Array:
        """The lower half is zeros."""
        del exponents
        bits = encoded.astype(jnp.uint32) << 16
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
