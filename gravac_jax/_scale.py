"""Powers of two: multiplying by them and dividing is exact, in any order."""

import jax
import jax.numpy as jnp

from gravac_jax._marking import compaction

MANTISSA_BITS = 23
BIAS = 127  # the bits of the exponent of 1.0
# So that neither a scale nor its inverse leaves the normal numbers. In a block whose
# largest value is below 2**-95, what is sent may be zero.
LEAST, MOST = 32, 2 * BIAS


def exponents(magnitudes: jax.Array) -> jax.Array:
    """uint8, the bits of the exponents of float32 `magnitudes`, at least `LEAST`."""
    bits = compaction.magnitude_bits(magnitudes) >> MANTISSA_BITS
    return jnp.clip(bits, LEAST, MOST).astype(jnp.uint8)


def multiplied(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """`x` times 2**(exponents - BIAS)."""
    return x * compaction.from_bits(exponents << MANTISSA_BITS)


def divided(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """`x` over 2**(exponents - BIAS)."""
    return x * compaction.from_bits((2 * BIAS - exponents) << MANTISSA_BITS)
