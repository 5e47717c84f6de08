"""The interfaces of encodings, and their laws.

A payload is values and indices. How each travels is chosen by itself, and whatever a
value loses on the way stays in the residual.
"""

import abc
from typing import Any, ClassVar

import jax


class ValueEncoding(abc.ABC):
    """How the values of a payload travel.

    Law:
      `decode(encode(x, e), e) == rounded(x, e)`, which rounding leaves as it is, and
      `x - rounded(x, e)` is exact in float32 (but for numbers below 2**-126, which XLA
      may flush to zero): nothing is lost.

    Attributes:
      dtype: what travels for each value.
      is_exact: whether `rounded` changes nothing.
      block: entries of the bucket that share an exponent; 0 where there is none.
    """

    dtype: ClassVar[Any]
    is_exact: ClassVar[bool] = False
    block: int = 0

    @abc.abstractmethod
    def rounded(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """What will be received of `x`.

        Args:
          x: float32, finite.
          exponents: int32, broadcasts with `x`: the bits of the exponent of the largest
            magnitude in the block of each value; anything where `block` is 0.

        Returns:
          float32, the shape of `x`; finite.
        """

    @abc.abstractmethod
    def encode(self, x: jax.Array, exponents: jax.Array) -> jax.Array:
        """`dtype`, the shape of `x`: rounded values as they travel."""

    @abc.abstractmethod
    def decode(self, encoded: jax.Array, exponents: jax.Array) -> jax.Array:
        """float32: the inverse of `encode`."""


class IndexEncoding(abc.ABC):
    """How the indices of a payload travel: without loss.

    Law:
      `decode(encode(indices, n), k, n)` are the indices, empty slots included.
    """

    @abc.abstractmethod
    def encode(self, indices: jax.Array, n: int) -> tuple[jax.Array, ...]:
        """What travels, one-dimensional arrays of unsigned or 32-bit integers.

        Args:
          indices: `[k]` int32, as in a payload.
          n: static, entries of the bucket.
        """

    @abc.abstractmethod
    def decode(self, parts: tuple[jax.Array, ...], k: int, n: int) -> jax.Array:
        """The `[k]` indices that `encode` was given."""
