"""Selected entries: take them, send values and indices in one buffer, add them up.

A value may be rounded on the way; what rounding drops stays in the residual, exactly.
Indices travel without loss. The words of a buffer are int32 if every part has words of
32 bits, otherwise uint16: XLA's CPU backend would turn bfloat16 into float32.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays
from gravac_jax._encodings.selection import PAD, Marks, clear

BLOCK_BITS = 16  # of an index: its place within a block of 65,536 entries
BLOCK = 2**BLOCK_BITS
MAX_UNROLLED = 16  # payloads that one kernel adds up; arbitrary


class Payload(NamedTuple):
    """Selected entries of a bucket, followed by empty slots.

    Attributes:
      values: `[k]` float32; 0 in an empty slot.
      indices: `[k]` int32, the place of each value in the bucket, rising. `PAD` or
        above in an empty slot.
    """

    values: jax.Array
    indices: jax.Array


class ValueEncoding(NamedTuple):
    """How the values of a payload travel.

    Law:
      `decode(encode(x)) == x` for rounded values `x`. Rounding twice is rounding once,
      and `x - rounded(x)` is exact in float32, so that nothing is lost (except below
      2**-126, which XLA may flush to zero).

    Attributes:
      dtype: what travels for each value.
      rounded: returns what the other replicas receive of float32 values: float32.
      encode: returns rounded values as they travel, `dtype`.
      decode: undoes `encode`.
    """

    dtype: Any
    rounded: Callable[[jax.Array], jax.Array]
    encode: Callable[[jax.Array], jax.Array]
    decode: Callable[[jax.Array], jax.Array]


class IndexEncoding(NamedTuple):
    """How the indices of a payload travel: without loss.

    Law:
      `decode(encode(indices, n), k)` returns `indices`, empty slots included.

    Attributes:
      encode: takes `[k]` int32 indices, as in a payload, and n, the entries of the
        bucket; returns vectors of unsigned or 32-bit integers.
      decode: takes these vectors and k; returns the indices.
    """

    encode: Callable[[jax.Array, int], tuple[jax.Array, ...]]
    decode: Callable[[tuple[jax.Array, ...], int], jax.Array]


def _encode_uint16(indices: jax.Array, n: int) -> tuple[jax.Array, ...]:
    """Return places in blocks, and the entries before the end of each block.

    Indices rise, so the ends tell the block of every slot. The receiver pays a running
    sum over k slots.
    """
    ends = jnp.minimum(jnp.arange(1, -(-n // BLOCK) + 1) * BLOCK, n)
    search = lambda method: functools.partial(jnp.searchsorted, method=method)
    reached = jax.lax.platform_dependent(
        indices,
        ends.astype(jnp.int32),
        cpu=search("scan"),
        default=search("scan_unrolled"),
    )
    return (indices & (BLOCK - 1)).astype(jnp.uint16), reached.astype(jnp.int32)


def _decode_uint16(parts: tuple[jax.Array, ...], k: int) -> jax.Array:
    """Add to each place the start of its block: the number of ends before the slot."""
    places, ends = parts
    over = jnp.zeros(k, jnp.int32).at[ends].add(1, mode="drop")
    block = jnp.cumsum(over, dtype=jnp.int32)
    slots = jnp.arange(k, dtype=jnp.int32)
    indices = (block << BLOCK_BITS) + places.astype(jnp.int32)
    return jnp.where(slots < ends[-1], indices, PAD + slots)


# 16-bit values travel as integers: XLA's CPU backend turns a collective of bfloat16
# into one of float32.
VALUES = {
    "bfloat16": ValueEncoding(
        jnp.uint16,
        _arrays.round_to_bfloat16,
        _arrays.bfloat16_to_bits,
        _arrays.bfloat16_from_bits,
    ),
    "float32": ValueEncoding(
        jnp.int32,
        lambda x: x,
        lambda x: jax.lax.bitcast_convert_type(x, jnp.int32),
        lambda x: jax.lax.bitcast_convert_type(x, jnp.float32),
    ),
}
INDICES = {
    "uint16": IndexEncoding(_encode_uint16, _decode_uint16),
    "int32": IndexEncoding(lambda indices, n: (indices,), lambda parts, k: parts[0]),
}


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """How payloads of a bucket of `n` entries travel.

    Attributes:
      value_name: key of `VALUES`.
      index_name: key of `INDICES`.
      n: entries of the bucket.
    """

    value_name: str
    index_name: str
    n: int

    @property
    def _values(self) -> ValueEncoding:
        return VALUES[self.value_name]

    @property
    def _indices(self) -> IndexEncoding:
        return INDICES[self.index_name]

    def rounded(self, values: jax.Array) -> jax.Array:
        """Return what others receive of `values`, float32."""
        return self._values.rounded(values)

    def kept(self, bucket: jax.Array, marks: Marks) -> jax.Array:
        """Return what others do not receive: unmarked entries, and what rounding drops.

        The result is `[n]` float32.
        """
        lost = 0 if self.value_name == "float32" else bucket - self.rounded(bucket)
        return clear(bucket, marks, lost)

    def encode(self, payload: Payload) -> jax.Array:
        """Return a payload as one buffer, `[words]` int32 or uint16."""
        values = self._values.encode(payload.values)
        parts = (values, *self._indices.encode(payload.indices, self.n))
        return jnp.concatenate([_arrays.to_words(x, _word(parts)) for x in parts])

    def decode(self, buffer: jax.Array, k: int) -> Payload:
        """Return the payload of `k` slots that `encode` was given."""
        values, *indices = _split(buffer, self._parts(k))
        places = self._indices.decode(tuple(indices), k)
        return Payload(self._values.decode(values), places)

    def payload_bytes(self, k: int) -> int:
        """Return the bytes of a payload of `k` slots."""
        parts = self._parts(k)
        return _words_of(parts, _word(parts)) * _word(parts).itemsize

    def _parts(self, k: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the parts of a buffer of `k` slots."""
        encode = lambda indices: self._indices.encode(indices, self.n)
        indices = jax.eval_shape(encode, jax.ShapeDtypeStruct((k,), jnp.int32))
        return [jax.ShapeDtypeStruct((k,), self._values.dtype), *indices]


def _word(parts: Sequence[Any]) -> np.dtype:
    """Return the dtype of the words of a buffer of `parts`."""
    is_narrow = any(x.dtype.itemsize < 4 for x in parts)
    return np.dtype(np.uint16 if is_narrow else np.int32)


def _words_of(parts: Sequence[Any], word: np.dtype) -> int:
    return sum(-(-x.size * x.dtype.itemsize // word.itemsize) for x in parts)


def _split(buffer: jax.Array, parts: Sequence[Any]) -> list[jax.Array]:
    """Undo the concatenation of parts of these shapes."""
    sizes = [_words_of([x], buffer.dtype) for x in parts]
    borders = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    pairs = zip(borders, parts, strict=True)
    read = lambda words, part: _arrays.from_words(words, part.dtype)[: part.size]
    return [read(buffer[start:stop], part) for (start, stop), part in pairs]


def take(bucket: jax.Array, indices: jax.Array) -> Payload:
    """Return the entries of `bucket` (`[n]`) at `indices` (`[k]`, as in a payload)."""
    values = bucket.at[indices].get(
        mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
    )
    return Payload(values, indices)


def mean_of_payloads(
    buffers: jax.Array,
    decode: Callable[[jax.Array], Payload],
    zeros: jax.Array,
) -> jax.Array:
    """Return the mean over replicas of the payloads in `buffers`.

    Payloads are added one after the other, in the order of the replicas and without
    repeated indices. So the sum does not depend on the order in which a device runs its
    threads, and replicas stay bit-identical. Each value is divided before it is added:
    k divisions, not n.

    Args:
      buffers: `[replicas, words]`, one encoded payload a row.
      decode: returns the payload of one row.
      zeros: `[n]` float32.

    Returns:
      `[n]` float32.
    """
    replicas = buffers.shape[0]

    def add(replica: jax.Array | int, total: jax.Array) -> jax.Array:
        buffer = jax.lax.dynamic_index_in_dim(buffers, replica, keepdims=False)
        payload = decode(buffer)
        return total.at[payload.indices].add(
            payload.values / replicas,
            mode="drop",
            unique_indices=True,
            indices_are_sorted=True,
        )

    looped = lambda zeros: jax.lax.fori_loop(0, replicas, add, zeros)

    def unrolled(total: jax.Array) -> jax.Array:
        # A GPU would copy the total into a loop.
        for replica in range(replicas):
            total = add(replica, total)
        return total

    if replicas > MAX_UNROLLED:
        return looped(zeros)
    return jax.lax.platform_dependent(zeros, cpu=looped, default=unrolled)
