"""Values in float16, scaled block by block: half the bytes, eleven significant bits."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._encoding.base import ValueEncoding
from gravac_jax._scale import divided, multiplied

HEADROOM = 14  # the largest value of a block comes to lie below 2**15,
LARGEST = (2 - 2.0**-10) * 2.0**14  # and stays there when it is rounded


@dataclasses.dataclass(frozen=True)
class Float16(ValueEncoding):
    """Values travel as float16, divided by a power of two per block of the bucket.

    Gradients are too small for plain float16, and their sums may be too large for it.
    Divided so that the largest of its block lies between 2**14 and 2**15, no value
    overflows, and those above 2**-28 of the largest keep all 11 bits; the rest is sent
    as zero.

    Law:
      Off by at most 2**-10 of the value, or 2**-28 of the largest in its block, which
      stays in the residual.

    Cost:
      2 bytes an entry, a byte a block, and one more pass over the bucket.

    Args:
      block: entries of the bucket that share an exponent.

    Raises:
      ValueError: if `block` is no number of entries.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(values=gravac.Float16()).traffic(10_000, 100, replicas=2)
      Traffic(entries=100, payload_bytes=406, wire_bytes=406, messages=1)
    """

    dtype: ClassVar[Any] = jnp.uint16
    block: int = 8192

    def __post_init__(self) -> None:
        _checks.count(self.block, "block", "entries")

    def rounded(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """To 11 significant bits."""
        x = jnp.clip(divided(x, exponents - HEADROOM), -LARGEST, LARGEST)
        # Not a cast there and back, which XLA may leave out.
        x = jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
        return multiplied(x, exponents - HEADROOM)

    def encode(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """The bits of a float16."""
        x = divided(x, exponents - HEADROOM).astype(jnp.float16)
        return jax.lax.bitcast_convert_type(x, jnp.uint16)

    def decode(self, encoded: jax.Array, exponents: jax.Array) -> jax.Array:
        """Multiplied again."""
        x = jax.lax.bitcast_convert_type(encoded, jnp.float16).astype(jnp.float32)
        return multiplied(x, exponents - HEADROOM)
