"""The half of an exchange that needs no other replica: mark, collect, keep.

Everything that reads the whole bucket happens here, once, for the rung that was
decided; what depends on shapes is left to the branches of the exchange.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _tree
from gravac_jax._codec import Codec
from gravac_jax._compressors.base import Compressor, thinned
from gravac_jax._marking import collect, compaction, curve
from gravac_jax._marking.compaction import Marks
from gravac_jax._marking.quantile import Bracket
from gravac_jax._payload import Payload


class Slots(NamedTuple):
    """How many slots a rung has.

    Attributes:
      counts: static, entries that each rung sends; `n` where it is dense.
      sparse: static, those of `counts` that are below `n`, in the order of the ladder.
      marked: `[]` int32, how many to mark.
      sent: `[]` int32, how many the step sends: `n` if dense, 0 if skipped.
      looks: whether the step looks at what other rungs would have sent.
    """

    counts: tuple[int, ...]
    sparse: tuple[int, ...]
    marked: jax.Array
    sent: jax.Array
    looks: jax.Array | bool


def slots(
    counts: Sequence[int], n: int, rung: jax.Array, looks: jax.Array | bool
) -> Slots:
    """Those of `rung` (`[]` int32); a rung beyond the ladder is a skipped step.

    A dense step sends no payload, but may look at one: whether it pays to compress
    again is what a controller has to know. Otherwise it marks nothing, as a skipped
    step does.

    Args:
      counts: entries per rung, at least one of them below `n`.
      n: entries of the bucket.
      rung: traced.
      looks: whether the step looks at what other rungs would have sent.
    """
    sparse = tuple(k for k in counts if k < n)
    looked_at = sparse[len(sparse) // 2]
    table = [(k, k) if k < n else (looked_at, n) for k in counts]
    marked, sent = jnp.asarray([*table, (0, 0)], jnp.int32)[rung]
    marked = jnp.where((sent == n) & ~jnp.asarray(looks), 0, marked)
    return Slots(tuple(counts), sparse, marked, sent, looks)


class Selected(NamedTuple):
    """A selection from a bucket: the payload, then as in an exchange's result.

    Attributes:
      payload: of as many slots as the largest sparse rung; those from `marked` on are
        void.
      exponents: of the blocks of its values.
      residual: `[n]` float32.
      energies: `[rungs]` float32.
      energy: `[]` float32.
    """

    payload: Payload
    exponents: jax.Array
    residual: jax.Array
    energies: jax.Array
    energy: jax.Array


def select(
    compressor: Compressor,
    codec: Codec,
    bucket: jax.Array,
    state: Any,
    slots: Slots,
    key: jax.Array,
) -> tuple[Selected, Any]:
    """Mark what `slots` says and take it out of the bucket.

    Args:
      compressor: chooses the entries.
      codec: rounds their values.
      bucket: `[n]` float32.
      state: the compressor's.
      slots: of the rung.
      key: a random key.

    Returns:
      The selection and the new state.
    """
    n, energy, k = bucket.size, _tree.energy(bucket), slots.marked
    outlook = curve.look(bucket, slots.counts, k, key, slots.looks)
    marks, state = _marked(compressor, bucket, state, slots, outlook.bracket, key)
    exponents = codec.exponents(bucket, marks)
    rounded = lambda values, indices: codec.rounded(values, exponents, indices)
    filled = slots.sparse[0] if len(set(slots.sparse)) == 1 else k
    collected = collect.collect(
        bucket,
        marks,
        filled,
        max(slots.sparse),
        outlook.thresholds,
        rounded,
        outlook.is_asked,
    )
    energies = curve.energies(
        outlook,
        marks,
        slots.counts,
        slots.sent,
        collected,
        energy,
        n,
        compressor.is_blind,
    )
    is_empty = (slots.sent == n) | _tree.is_never(energies)
    residual = jnp.where(is_empty, 0, codec.kept(bucket, exponents, marks))
    return Selected(collected.payload, exponents, residual, energies, energy), state


def _marked(
    compressor: Compressor,
    bucket: jax.Array,
    state: Any,
    slots: Slots,
    bracket: Bracket,
    key: jax.Array,
) -> tuple[Marks, Any]:
    """The marks, and the compressor's new state; a step that marks nothing keeps it."""

    def some() -> tuple[Marks, Any]:
        choice, after = compressor.mark(
            bucket, state, k=slots.marked, bracket=bracket, key=key
        )
        after = _tree.where(slots.marked > 0, after, state)
        return thinned(choice, slots.marked, key), after

    def none() -> tuple[Marks, Any]:
        words = jnp.zeros(-(-bucket.size // compaction.WORD_BITS), jnp.uint32)
        return Marks(words, words.astype(jnp.int32), jnp.int32(0)), state

    # Marking is the costliest pass, and of dense steps few look.
    if slots.looks is True or bucket.size not in slots.counts:
        return some()
    # Of the bucket's kind: it varies over the axis of replicas where that does.
    is_number = compaction.magnitude_bits(bucket[0]) >= 0
    alike = lambda tree: jax.tree.map(lambda x: jnp.where(is_number, x, x), tree)
    return jax.lax.cond(slots.marked > 0, lambda: alike(some()), lambda: alike(none()))
