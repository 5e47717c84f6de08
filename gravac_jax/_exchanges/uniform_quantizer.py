"""Entries in a few bits each: levels of equal distance, and a scale for every row.

A row of numbers x becomes codes, the nearest of 2^bits levels, and one scale::

    q = floor(x / (distance mean|x|)) + 1/2, clipped to +-(2^bits - 1) / 2
    scale = sum(x q) / sum(q^2),    decoded = scale q

The distances are those that lose least of a Gaussian (Max, Quantizing for minimum
distortion, 1960). The scale is the one that loses least of the row at hand, whatever
its distribution: what is sent is then orthogonal to what is lost, and never more than
the row. With one bit it is sign(x) mean|x|.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays

WORD_BITS = 32
# Bits, and the distance between levels for a Gaussian of root mean square 1, whose mean
# magnitude is sqrt(2 / pi).
_DISTANCES = {8: 0.0308, 4: 0.3352, 2: 0.9957, 1: 1.5958}
WIDTHS = tuple(_DISTANCES)
_MEAN_MAGNITUDE = np.sqrt(2 / np.pi)


class Coded(NamedTuple):
    """Rows in a few bits.

    Attributes:
      codes: `[rows, entries]` uint8, below 2^bits.
      scales: `[rows]` float32.
      sent: `[]` float32, the energy of what the codes stand for.
      energy: `[]` float32, the energy of the rows.
    """

    codes: jax.Array
    scales: jax.Array
    sent: jax.Array
    energy: jax.Array


def encode(x: jax.Array, entries: jax.Array, bits: jax.Array | int) -> Coded:
    """Return rows in `bits` bits an entry.

    Args:
      x: `[rows, entries]` float32; 0 in padding, at the end of rows.
      entries: `[rows]` float32, the entries of each row without padding.
      bits: one of `WIDTHS`, static or `[]` int32; the same program serves all.
    """
    total, energy = jnp.sum(jnp.abs(x), axis=1), _arrays.energy(x)
    magnitude = total / jnp.maximum(entries, 1)
    if isinstance(bits, int) and bits == 1:
        # The general case, written out: all squares of q are 1/4.
        is_large = 2 * magnitude >= _arrays.SMALLEST_NORMAL
        scales = jnp.where(is_large, 2 * magnitude, 0)
        sent = jnp.sum(scales * total / 2)
        return Coded((x >= 0).astype(jnp.uint8), scales, sent, energy)
    widths = jnp.asarray(WIDTHS)
    distances = jnp.asarray(list(_DISTANCES.values()), jnp.float32) / _MEAN_MAGNITUDE
    distance = magnitude * jnp.sum(jnp.where(widths == bits, distances, 0))
    # XLA may flush smaller distances to zero; such a row waits in the residual.
    is_large = distance >= _arrays.SMALLEST_NORMAL
    divisor = jnp.where(is_large, distance, 1)
    half = jnp.left_shift(jnp.int32(1), bits - 1).astype(jnp.float32)
    levels = jnp.clip(jnp.floor(x / divisor[:, None]), -half, half - 1)
    q = levels + 0.5
    matched, norms = _row_sums(x * q, jnp.square(q))
    norms = norms - 0.25 * (float(x.shape[1]) - entries)  # q is 1/2 in padding
    scales = jnp.where(is_large, matched / jnp.maximum(norms, 0.25), 0)
    codes, sent = (levels + half).astype(jnp.uint8), jnp.sum(scales * matched)
    return Coded(codes, scales, sent, energy)


def _row_sums(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Return the sums of the rows of two arrays.

    On CPUs XLA sums one array in a library that needs it in memory; sums of two at once
    are fused with what computes them.
    """
    shape = (x.shape[0], -1, WORD_BITS)
    zero = jnp.zeros((), jnp.float32)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    parts = jax.lax.reduce(
        (x.reshape(shape), y.reshape(shape)), (zero, zero), add, (1,)
    )
    return tuple(jnp.sum(part, axis=1) for part in parts)


def decode(codes: jax.Array, scales: jax.Array, bits: jax.Array | int) -> jax.Array:
    """Return what codes stand for: `[rows, entries]` float32."""
    middle = jnp.left_shift(1, bits - 1).astype(jnp.float32) - 0.5
    return scales[:, None] * (codes.astype(jnp.float32) - middle)


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Return codes as `[rows, bits, entries / 32]` uint32; `bits` is static.

    Codes that share a word are entries / 32 apart, so that packing adds up whole
    vectors on every device.
    """
    rows, entries = codes.shape
    shape = (rows, bits, WORD_BITS // bits, entries // WORD_BITS)
    planes = codes.reshape(shape).astype(jnp.uint32) << _shifts(bits)
    return jnp.sum(planes, axis=2, dtype=jnp.uint32)


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """Undo `pack`, as `[rows, entries]` uint32."""
    rows = words.shape[0]
    codes = (words[:, :, None] >> _shifts(bits)) & jnp.uint32(2**bits - 1)
    return codes.reshape(rows, -1)


def _shifts(bits: int) -> jax.Array:
    """Return how far each code is shifted in its word, `[1, 1, codes, 1]`."""
    shifts = jnp.arange(0, WORD_BITS, bits, dtype=jnp.uint32)
    return shifts.reshape(1, 1, -1, 1)
