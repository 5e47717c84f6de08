"""Values in 8 bits, scaled block by block: a quarter of the bytes."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._encoding.base import ValueEncoding
from gravac_jax._scale import divided, multiplied

HEADROOM = 6  # the largest value of a block comes to lie below 2**7
LARGEST = 127


@dataclasses.dataclass(frozen=True)
class Int8(ValueEncoding):
    """Values travel as integers from -127 to 127 times a power of two per block.

    A power of two, so that what is received is known exactly, however a compiler
    orders multiplications and subtractions.

    Law:
      Off by at most 2**-6 of the largest in its block, which stays in the residual;
      values below 2**-8 of it are sent as zero.

    Cost:
      1 byte an entry, a byte a block, and one more pass over the bucket.

    Args:
      block: entries of the bucket that share an exponent.

    Raises:
      ValueError: if `block` is no number of entries.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.AllGather(values=gravac.Int8()).traffic(10_000, 100, replicas=2)
      Traffic(entries=100, payload_bytes=306, wire_bytes=306, messages=1)

    References:
      Dettmers, 8-bit approximations for parallelism in deep learning, ICLR 2016, and
      others since; the powers of two are ours.
    """

    dtype: ClassVar[Any] = jnp.uint8
    block: int = 8192

    def __post_init__(self) -> None:
        _checks.count(self.block, "block", "entries")

    def rounded(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """To a multiple of the block's power of two, ties to even."""
        x = jnp.clip(jnp.round(divided(x, exponents - HEADROOM)), -LARGEST, LARGEST)
        return multiplied(x, exponents - HEADROOM)

    def encode(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """The multiple, in two's complement."""
        multiples = divided(x, exponents - HEADROOM).astype(jnp.int8)
        return jax.lax.bitcast_convert_type(multiples, jnp.uint8)

    def decode(self, encoded: jax.Array, exponents: jax.Array) -> jax.Array:
        """Multiplied again."""
        multiples = jax.lax.bitcast_convert_type(encoded, jnp.int8)
        return multiplied(multiples.astype(jnp.float32), exponents - HEADROOM)
