"""Entries in a few bits each, with two scales for every row.

The first bit of a code is the sign; the others choose one of a few magnitudes::

    bits  magnitudes of a row                                    scales
       1  its mean magnitude                                     1
       2  the means of those above, and not above, 1.3 times     2
          its root mean square
       4  s / 2^k for k = 0 .. 7                                 1
       8  s (k + 1/2) for k = 0 .. 127, up to the largest        1

Gradients have heavy tails, and steps of Adam nearly none. The levels do for both: of
SGD's momentum on an LSTM, two bits kept 0.71 of the energy, where four levels at equal
distances, the best for a Gaussian, kept 0.46; of Adam's steps 0.83 and 0.81. Four bits
kept 0.95 and 0.96, where sixteen equal distances kept 0.69 and 0.96.

Scales are means or least squares, so that what is sent is orthogonal to what is kept,
and never more than the row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays

WORD_BITS = 32
WIDTHS = (8, 4, 2, 1)
SCALES = 2  # of a row; widths that need one leave the other at 0
BIG = 1.3  # root mean squares; in two bits larger magnitudes have their own scale
TOP = 8.0  # root mean squares; with four bits, the largest magnitude, about


class Coded(NamedTuple):
    """Rows in a few bits.

    Attributes:
      codes: `[rows, entries]` uint8, below 2^bits.
      scales: `[rows, 2]` float32.
      sent: `[rows]` float32, the energy of what the codes of each row stand for.
    """

    codes: jax.Array
    scales: jax.Array
    sent: jax.Array


def encode(x: jax.Array, entries: jax.Array, bits: int) -> Coded:
    """Return rows in `bits` bits an entry.

    Args:
      x: `[rows, entries]` float32; 0 in padding, at the end of rows.
      entries: `[rows]` float32, the entries of each row without padding.
      bits: one of `WIDTHS`.
    """
    encoders = {1: _one_bit, 2: _two_bits, 4: _four_bits, 8: _eight_bits}
    return encoders[bits](x, jnp.maximum(entries, 1))


def _one_bit(x: jax.Array, entries: jax.Array) -> Coded:
    total = jnp.sum(jnp.abs(x), axis=1)
    mean = _normal(total / entries)
    return Coded((x >= 0).astype(jnp.uint8), _alone(mean), mean * total)


def _two_bits(x: jax.Array, entries: jax.Array) -> Coded:
    total, size = jnp.sum(jnp.abs(x), axis=1), _root_mean_square(x, entries)
    is_big = jnp.abs(x) > BIG * size[:, None]
    above, count = _row_sums(jnp.where(is_big, jnp.abs(x), 0), is_big)
    # A row of equal magnitudes has none above, and a row has never all above.
    high = _normal(above / jnp.maximum(count, 1))
    low = _normal(jnp.maximum(total - above, 0) / (entries - count))
    sent = jnp.square(high) * count + jnp.square(low) * (entries - count)
    codes = 2 * (x >= 0).astype(jnp.uint8) + is_big.astype(jnp.uint8)
    return Coded(codes, jnp.stack([low, high], axis=1), sent)


def _four_bits(x: jax.Array, entries: jax.Array) -> Coded:
    top = TOP * _root_mean_square(x, entries)
    # The exponent of a number times the square root of two is its rounded logarithm.
    ratio = jnp.abs(x) * jnp.sqrt(2.0) / jnp.where(top > 0, top, 1)[:, None]
    exponent = (_arrays.magnitude_bits(ratio) >> 23).astype(jnp.int32) - 127
    k = jnp.clip(-exponent, 0, 7)
    power = _power_of_half(k)
    matched, norms = _row_sums(jnp.abs(x) * power, jnp.square(power))
    norms = norms - 2.0**-14 * (float(x.shape[1]) - entries)  # k is 7 in padding
    scale = _normal(matched / norms)
    codes = 8 * (x >= 0).astype(jnp.uint8) + k.astype(jnp.uint8)
    return Coded(codes, _alone(scale), scale * matched)


def _eight_bits(x: jax.Array, entries: jax.Array) -> Coded:
    distance = _normal(jnp.max(jnp.abs(x), axis=1) / 127.5)
    levels = jnp.floor(x / jnp.where(distance > 0, distance, 1)[:, None])
    levels = jnp.clip(levels, -128, 127)
    q = levels + 0.5
    matched, norms = _row_sums(x * q, jnp.square(q))
    norms = norms - 0.25 * (float(x.shape[1]) - entries)  # q is 1/2 in padding
    scale = jnp.where(distance > 0, _normal(matched / norms), 0)
    return Coded((levels + 128).astype(jnp.uint8), _alone(scale), scale * matched)


def decode(codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """Return what codes stand for: `[rows, entries]` float32."""
    first, second = scales[:, :1], scales[:, 1:]
    if bits == 8:
        return first * (codes.astype(jnp.float32) - 127.5)
    if bits == 4:
        magnitude = first * _power_of_half((codes & 7).astype(jnp.int32))
    elif bits == 2:
        magnitude = jnp.where((codes & 1) > 0, second, first)
    else:
        magnitude = first
    is_positive = codes >= 2 ** (bits - 1)
    return jnp.where(is_positive, magnitude, -magnitude)


def _alone(scale: jax.Array) -> jax.Array:
    """Return the one scale of each row beside a 0, `[rows, 2]`."""
    return jnp.stack([scale, jnp.zeros_like(scale)], axis=1)


def _root_mean_square(x: jax.Array, entries: jax.Array) -> jax.Array:
    """Return that of each row, `[rows]`; 0 where squares leave float32."""
    return jnp.sqrt(_normal(jnp.sum(jnp.square(x), axis=1) / entries))


def _normal(x: jax.Array) -> jax.Array:
    """Return 0 for what XLA may flush to zero: such a row waits in the residual."""
    return jnp.where(x >= _arrays.SMALLEST_NORMAL, x, 0)


def _power_of_half(k: jax.Array) -> jax.Array:
    """Return 2^-k for `k` int32, exactly."""
    return jax.lax.bitcast_convert_type((127 - k) << 23, jnp.float32)


def _row_sums(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Return the sums of the rows of two arrays, in float32.

    On CPUs XLA sums one array in a library that needs it in memory; sums of two at once
    are fused with what computes them.
    """
    shape = (x.shape[0], -1, WORD_BITS)
    both = (x.reshape(shape), y.astype(jnp.float32).reshape(shape))
    zero = jnp.zeros((), jnp.float32)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    parts = jax.lax.reduce(both, (zero, zero), add, (1,))
    return tuple(jnp.sum(part, axis=1) for part in parts)


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
    """Undo `pack`, as `[rows, entries]` uint8."""
    rows = words.shape[0]
    codes = (words[:, :, None] >> _shifts(bits)) & jnp.uint32(2**bits - 1)
    return codes.reshape(rows, -1).astype(jnp.uint8)


def _shifts(bits: int) -> jax.Array:
    """Return how far each code is shifted in its word, `[1, 1, codes, 1]`."""
    shifts = jnp.arange(0, WORD_BITS, bits, dtype=jnp.uint32)
    return shifts.reshape(1, 1, -1, 1)
