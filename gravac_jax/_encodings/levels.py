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

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _xla

WORD_BITS = 32
WIDTHS = (8, 4, 2, 1)
SCALES = 2  # of a row; widths that need one leave the other at 0
BIG = 1.3  # root mean squares; in two bits larger magnitudes have their own scale
TOP = 8.0  # root mean squares; with four bits, the largest magnitude, about
MAX_UNROLLED = 32  # replicas whose words one kernel adds up
CACHED = 2**20  # entries; CPUs read fewer as fast in any order


class Levels(NamedTuple):
    """What rows are rounded to.

    Attributes:
      units: `[rows]` float32, by which `encode` measures the entries of each row.
      scales: `[rows, 2]` float32.
      sent: `[rows]` float32, the energy of what the codes of each row stand for.
    """

    units: jax.Array
    scales: jax.Array
    sent: jax.Array


class Rounded(NamedTuple):
    """Rows after rounding.

    Attributes:
      message: `[parts, words]` uint32, the words and scales of some parts of the rows.
        Parts have the same number of rows, with rows of 0 in the last ones.
      sent: `[rows]` float32, the energy of what the codes of each row stand for.
      dropped: `[rows, entries]` float32, what rounding drops.
    """

    message: jax.Array
    sent: jax.Array
    dropped: jax.Array


def round_rows(x: jax.Array, entries: jax.Array, bits: int, parts: int = 1) -> Rounded:
    """Round rows, and put them into a message of some parts.

    Args:
      x: `[rows, entries]` float32, a multiple of 32 entries; 0 in padding, at the end
        of rows.
      entries: `[rows]` float32, the entries of each row without padding.
      bits: one of `WIDTHS`.
      parts: of the message.
    """
    x = _in_blocks(x)
    levels = fit(x, entries, bits)
    kept = decode(encode(x, levels.units, bits), levels.scales, bits)
    dropped = _xla.in_its_shape(x - kept).reshape(len(x), -1)
    message = _join(pack(x, levels.units, bits), levels.scales, parts)
    return Rounded(message, levels.sent, dropped)


def mean(messages: jax.Array, rows: int, bits: int) -> jax.Array:
    """Return the mean over replicas of the rows that they sent, `[rows, entries]`.

    Args:
      messages: `[replicas, words]` uint32, a part of the message of each.
      rows: how many rows a part has.
      bits: one of `WIDTHS`.
    """
    return _mean(*_split(messages, rows, bits), bits)


def in_order(messages: jax.Array, rows: int, bits: int, whole: int) -> jax.Array:
    """Return the rows of several replicas, one after the other: `[whole, entries]`.

    The arguments are those of `mean`, with the whole message of each replica, and how
    many rows they have without the fill of the last ones.
    """
    words, scales = _split(messages, rows, bits)
    joined = lambda x: x.reshape(1, -1, *x.shape[2:])[:, :whole]
    return _mean(joined(words), joined(scales), bits)


def sent_energy(x: jax.Array, entries: jax.Array, bits: int) -> jax.Array:
    """Return the energy that rounding would send of rows, `[]` float32."""
    return jnp.sum(fit(_in_blocks(x), entries, bits).sent)


def _in_blocks(x: jax.Array) -> jax.Array:
    """Return rows, `[rows, entries]`, in 32 blocks each, as words have them.

    On a TPU a row of 4,096 is then whole tiles, and no array is laid out anew.
    """
    return x.reshape(len(x), WORD_BITS, -1)


def fit(x: jax.Array, entries: jax.Array, bits: int) -> Levels:
    """Return the levels that suit rows.

    Args:
      x: `[rows, ...]` float32; 0 in padding, at the end of rows.
      entries: `[rows]` float32, the entries of each row without padding.
      bits: one of `WIDTHS`.
    """
    fits = {1: _fit_one_bit, 2: _fit_two_bits, 4: _fit_four_bits, 8: _fit_eight_bits}
    return fits[bits](x, jnp.maximum(entries, 1))


def _fit_one_bit(x: jax.Array, entries: jax.Array) -> Levels:
    total = jnp.sum(jnp.abs(x), axis=(1, 2))
    mean = _normal(total / entries)
    return Levels(jnp.ones_like(mean), _alone(mean), mean * total)


def _fit_two_bits(x: jax.Array, entries: jax.Array) -> Levels:
    units = BIG * _root_mean_square(x, entries)
    is_big = jnp.abs(x) > _of_rows(units, x)
    big = jnp.where(is_big, jnp.abs(x), 0)
    total, above, count = _xla.row_sums(jnp.abs(x), big, is_big)
    # A row of equal magnitudes has none above; one whose squares are all 0 has all.
    high = _normal(above / jnp.maximum(count, 1))
    low = _normal(jnp.maximum(total - above, 0) / (entries - count))
    sent = jnp.square(high) * count + jnp.square(low) * (entries - count)
    return Levels(units, jnp.stack([low, high], axis=1), sent)


def _fit_four_bits(x: jax.Array, entries: jax.Array) -> Levels:
    units = TOP * _root_mean_square(x, entries)
    power = _power_of_half(_halvings(x, units))
    matched, norms = _xla.row_sums(jnp.abs(x) * power, jnp.square(power))
    norms = norms - 2.0**-14 * (float(x[0].size) - entries)  # 7 halvings in padding
    scale = _normal(matched / norms)
    return Levels(units, _alone(scale), scale * matched)


def _fit_eight_bits(x: jax.Array, entries: jax.Array) -> Levels:
    units = _normal(jnp.max(jnp.abs(x), axis=(1, 2)) / 127.5)
    q = _steps(x, units) + 0.5
    matched, norms = _xla.row_sums(x * q, jnp.square(q))
    norms = norms - 0.25 * (float(x[0].size) - entries)  # q is 1/2 in padding
    scale = jnp.where(units > 0, _normal(matched / norms), 0)
    return Levels(units, _alone(scale), scale * matched)


def encode(x: jax.Array, units: jax.Array, bits: int) -> jax.Array:
    """Return the codes of rows: `[rows, ...]` uint32, below 2^bits.

    Args:
      x: `[rows, ...]` float32.
      units: `[rows]` float32, of their `Levels`.
      bits: one of `WIDTHS`.
    """
    is_positive = (x >= 0).astype(jnp.uint32)
    if bits == 1:
        return is_positive
    if bits == 2:
        return 2 * is_positive + (jnp.abs(x) > _of_rows(units, x)).astype(jnp.uint32)
    if bits == 4:
        return 8 * is_positive + _halvings(x, units).astype(jnp.uint32)
    return (_steps(x, units) + 128).astype(jnp.uint32)


def decode(codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """Return what codes stand for, float32.

    Args:
      codes: `[rows, ...]` uint32, below 2^bits.
      scales: `[rows, 2]` float32, of their `Levels`.
      bits: one of `WIDTHS`.
    """
    first, second = (_of_rows(scales[:, i], codes) for i in range(SCALES))
    if bits == 8:
        return first * (codes.astype(jnp.int32).astype(jnp.float32) - 127.5)
    magnitude = first
    if bits == 4:
        magnitude = first * _power_of_half((codes & 7).astype(jnp.int32))
    if bits == 2:
        magnitude = jnp.where((codes & 1) > 0, second, first)
    return jnp.where(codes >= 2 ** (bits - 1), magnitude, -magnitude)


def pack(x: jax.Array, units: jax.Array, bits: int) -> jax.Array:
    """Return the codes of `[rows, ...]` as `[rows, bits, entries / 32]` uint32.

    The arguments are those of `encode`. Codes that share a word are entries / 32 apart,
    so that packing adds up whole vectors on every device.
    """
    shape = (len(x), bits, WORD_BITS // bits, x[0].size // WORD_BITS)
    coded = functools.partial(encode, bits=bits)

    def add_up(x: jax.Array, units: jax.Array) -> jax.Array:
        given = x.reshape(shape), units
        codes = coded(*given) if x.size < CACHED else _xla.in_bytes(coded, *given)
        planes = codes << _shifts(bits)
        total = lambda x: jnp.sum(x, axis=2, dtype=jnp.uint32)
        # A GPU would sum over 32 codes in two kernels, with all of them in memory.
        each = lambda x: jnp.split(x, x.shape[2], axis=2)
        one_by_one = lambda x: sum(each(x), jnp.uint32(0))[:, :, 0]
        return jax.lax.platform_dependent(planes, cuda=one_by_one, default=total)

    return _xla.apart(add_up, x, units)


def unpack(words: jax.Array, bits: int) -> jax.Array:
    """Undo `pack`: return codes, `[rows, bits, 32 / bits, entries / 32]` uint32."""
    return (words[:, :, None] >> _shifts(bits)) & jnp.uint32(2**bits - 1)


def _join(words: jax.Array, scales: jax.Array, parts: int) -> jax.Array:
    """Return the words and scales of some parts of the rows, uint32: `[parts, ...]`.

    Parts have the same number of rows, with rows of 0 in the last ones.
    """
    fill = lambda x: jnp.pad(x, [(0, -len(x) % parts), *[(0, 0)] * (x.ndim - 1)])
    cut = lambda x: fill(x).reshape(parts, -1)
    return jnp.concatenate([cut(words), cut(_arrays.to_words(scales))], axis=1)


def _split(joined: jax.Array, rows: int, bits: int) -> tuple[jax.Array, jax.Array]:
    """Undo `_join`: return words `[parts, rows, bits, ...]` and scales."""
    parts = len(joined)
    words, scales = jnp.split(joined, [joined.shape[1] - SCALES * rows], axis=1)
    scales = scales.view(jnp.float32).reshape(parts, rows, SCALES)
    return words.reshape(parts, rows, bits, -1), scales


def _mean(words: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """Return the mean over replicas of what they sent.

    Up to 32 replicas are added in their order; a kernel of more would take long to
    compile.

    Args:
      words: `[replicas, rows, bits, entries / 32]` uint32, from `pack`.
      scales: `[replicas, rows, 2]` float32.
      bits: one of `WIDTHS`.

    Returns:
      `[rows, entries]` float32.
    """
    decoded = lambda words, scales: decode(unpack(words, bits), scales, bits)

    def add_up(words: jax.Array, scales: jax.Array) -> jax.Array:
        if len(words) > MAX_UNROLLED:
            return jnp.mean(jax.vmap(decoded)(words, scales), axis=0)
        # One kernel reads all words and writes the mean.
        total = _arrays.total(map(decoded, words, scales))
        return _xla.in_its_shape(total / len(words))

    return _xla.apart(add_up, words, scales).reshape(words.shape[1], -1)


def _halvings(x: jax.Array, units: jax.Array) -> jax.Array:
    """Return how often, rounded, each unit is halved to give |x|: 0 to 7, int32."""
    units = _of_rows(jnp.where(units > 0, units, 1), x)
    # The exponent of a number times the square root of two is its rounded logarithm.
    ratio = jnp.abs(x) * jnp.sqrt(2.0) / units
    exponent = (_arrays.magnitude_bits(ratio) >> 23).astype(jnp.int32) - 127
    return jnp.clip(-exponent, 0, 7)


def _steps(x: jax.Array, units: jax.Array) -> jax.Array:
    """Return the whole units below each x: -128 to 127, float32."""
    units = _of_rows(jnp.where(units > 0, units, 1), x)
    return jnp.clip(jnp.floor(x / units), -128, 127)


def _of_rows(figures: jax.Array, like: jax.Array) -> jax.Array:
    """Return a figure a row, `[rows]`, in a shape that goes with `[rows, ...]`."""
    return figures.reshape(-1, *[1] * (like.ndim - 1))


def _alone(scale: jax.Array) -> jax.Array:
    """Return the one scale of each row beside a 0, `[rows, 2]`."""
    return jnp.stack([scale, jnp.zeros_like(scale)], axis=1)


def _root_mean_square(x: jax.Array, entries: jax.Array) -> jax.Array:
    """Return the root mean square of each row; 0 where squares leave float32."""
    return jnp.sqrt(_normal(jnp.sum(jnp.square(x), axis=(1, 2)) / entries))


def _normal(x: jax.Array) -> jax.Array:
    """Return 0 for what XLA may flush to zero: such a row waits in the residual."""
    return jnp.where(x >= _arrays.SMALLEST_NORMAL, x, 0)


def _power_of_half(k: jax.Array) -> jax.Array:
    """Return 2^-k for `k` int32, exactly."""
    return jax.lax.bitcast_convert_type((127 - k) << 23, jnp.float32)


def _shifts(bits: int) -> jax.Array:
    """Return how far each code is shifted in its word, `[1, 1, codes, 1]`."""
    return jnp.arange(0, WORD_BITS, bits, dtype=jnp.uint32).reshape(1, 1, -1, 1)
