"""From a payload to the one buffer that a collective carries, and back.

A buffer is values, indices, the exponents of blocks where values are scaled, and a few
figures that travel along. Its words are int32 where all of it comes in those, uint16
elsewhere: XLA's CPU backend would turn a collective of bfloat16 into one of float32.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _scale
from gravac_jax._encoding.base import IndexEncoding, ValueEncoding
from gravac_jax._marking import compaction
from gravac_jax._marking.compaction import Marks
from gravac_jax._payload import Payload


@dataclasses.dataclass(frozen=True)
class Codec:
    """How payloads of a bucket of `n` entries travel."""

    values: ValueEncoding
    indices: IndexEncoding
    n: int

    def exponents(self, bucket: jax.Array, marks: Marks) -> jax.Array:
        """`[blocks]` uint8, of the largest marked magnitude in each block."""
        block = min(self.values.block, self.n)
        if not block:
            return jnp.zeros(0, jnp.uint8)
        sent = jnp.abs(bucket - compaction.clear(bucket, marks))
        rows = jnp.pad(sent, (0, -self.n % block)).reshape(-1, block)
        return _scale.exponents(jnp.max(rows, axis=1))

    def _exponents_at(self, exponents: jax.Array, indices: jax.Array) -> jax.Array:
        if not self.values.block:
            return jnp.int32(0)
        blocks = indices // self.values.block
        found = exponents.at[blocks].get(mode="fill", fill_value=_scale.LEAST)
        return found.astype(jnp.int32)

    def rounded(
        self, values: jax.Array, exponents: jax.Array, indices: jax.Array
    ) -> jax.Array:
        """What will be received of the `values` (`[k]`) at `indices`."""
        return self.values.rounded(values, self._exponents_at(exponents, indices))

    def kept(self, bucket: jax.Array, exponents: jax.Array, marks: Marks) -> jax.Array:
        """`[n]`, what is not received: what is not marked, and what rounding drops."""
        if self.values.is_exact:
            return compaction.clear(bucket, marks)
        spread = jnp.int32(0)
        if block := self.values.block:
            spread = jnp.repeat(exponents, block)[: self.n].astype(jnp.int32)
        lost = bucket - self.values.rounded(bucket, spread)
        return compaction.clear(bucket, marks, lost)

    def encode(
        self, payload: Payload, exponents: jax.Array, figures: jax.Array
    ) -> jax.Array:
        """`[words]` int32 or uint16; the last of them are `figures`, `[m]` float32."""
        at = self._exponents_at(exponents, payload.indices)
        values = self.values.encode(payload.values, at)
        indices = self.indices.encode(payload.indices, self.n)
        scales = (exponents,) if self.values.block else ()
        return _join((values, *indices, *scales), figures)

    def decode(self, buffer: jax.Array, k: int) -> Payload:
        """The payload of `k` slots that `encode` was given."""
        values, *rest = _split(buffer, self._parts(k))
        exponents = rest.pop() if self.values.block else jnp.zeros(0, jnp.uint8)
        indices = self.indices.decode(tuple(rest), k, self.n)
        at = self._exponents_at(exponents, indices)
        return Payload(self.values.decode(values, at), indices)

    def figures(self, buffer: jax.Array, m: int) -> jax.Array:
        """The `m` of them that `encode` was given."""
        like = jax.ShapeDtypeStruct((m,), jnp.float32)
        return _from_words(buffer[-_words_of([like], buffer.dtype) :], like)

    def payload_bytes(self, k: int) -> int:
        """Of a payload of `k` slots, without figures."""
        parts = self._parts(k)
        return _words_of(parts, _word(parts)) * _word(parts).itemsize

    def _parts(self, k: int) -> list[jax.ShapeDtypeStruct]:
        """What a buffer of `k` slots is made of."""
        encode = functools.partial(self.indices.encode, n=self.n)
        indices = jax.eval_shape(encode, jax.ShapeDtypeStruct((k,), jnp.int32))
        values = jax.ShapeDtypeStruct((k,), self.values.dtype)
        if not (block := self.values.block):
            return [values, *indices]
        exponents = jax.ShapeDtypeStruct((-(-self.n // block),), jnp.uint8)
        return [values, *indices, exponents]


def _word(parts: Sequence[Any]) -> np.dtype:
    """What a buffer of `parts` is counted in."""
    is_narrow = any(x.dtype.itemsize < 4 for x in parts)
    return np.dtype(np.uint16 if is_narrow else np.int32)


def _words_of(parts: Sequence[Any], word: np.dtype) -> int:
    return sum(-(-x.size * x.dtype.itemsize // word.itemsize) for x in parts)


def _join(parts: Sequence[jax.Array], figures: jax.Array) -> jax.Array:
    """One array of the words of all `parts`, then those of `figures`."""
    return jnp.concatenate([_to_words(x, _word(parts)) for x in (*parts, figures)])


def _to_words(x: jax.Array, word: np.dtype) -> jax.Array:
    if x.dtype.itemsize < word.itemsize:
        pairs = jnp.pad(x, (0, x.size % 2)).reshape(-1, 2)
        return jax.lax.bitcast_convert_type(pairs, word)
    return jax.lax.bitcast_convert_type(x, word).reshape(-1)


def _split(buffer: jax.Array, parts: Sequence[Any]) -> list[jax.Array]:
    """The inverse of `_join`, for parts of these shapes, without the figures."""
    sizes = [_words_of([x], buffer.dtype) for x in parts]
    borders = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    pairs = zip(borders, parts, strict=True)
    return [_from_words(buffer[start:stop], part) for (start, stop), part in pairs]


def _from_words(words: jax.Array, like: Any) -> jax.Array:
    if like.dtype.itemsize > words.dtype.itemsize:
        words = words.reshape(-1, 2)
    x = jax.lax.bitcast_convert_type(words, like.dtype)
    return x.reshape(-1)[: like.size]
