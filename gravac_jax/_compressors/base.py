"""The interface of compressors, and its laws.

A compressor marks the entries of one flat bucket that are to travel. It knows nothing
of replicas, of pytrees or of what was left over from earlier steps, and nothing of
shapes: how many entries are sent is decided while the program runs. What is marked is
compacted into a payload in the same way for all of them.
"""

import abc
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _ladder, _payload, _tree
from gravac_jax._marking import compaction, quantile
from gravac_jax._marking.compaction import Marks
from gravac_jax._marking.quantile import Bracket
from gravac_jax._payload import Payload


class Deviation(NamedTuple):
    """How far from exact top-k a compressor may stay on gradients.

    At factors up to 1000. Of rarer entries a sample of 65,536 holds hardly any: at
    10,000 those that estimate from it may use a third of their slots only.

    Attributes:
      entries: the least share of its k slots that are used.
      energy: the least share of the energy that the k largest entries hold.
    """

    entries: float
    energy: float


EXACT = Deviation(entries=1, energy=1)


class Choice(NamedTuple):
    """What a compressor marks.

    Attributes:
      marks: the entries that are to be sent, if there is a slot for each.
      first: `[ceil(n / 32)]` uint32, those of them that no other may displace.
    """

    marks: Marks
    first: jax.Array


class Compressor(abc.ABC):
    """Chooses which entries of a bucket travel.

    Where more than k are marked, some stay behind for the next step, when they will be
    larger: not those of at least twice the threshold, and of the others a run that
    begins at a random one and goes round, so that no position is preferred.

    Law:
      The payload has `count(n, factor)` slots. It holds entries of the bucket,
      unchanged and none twice, in the order of their indices, and empty slots after
      them; no zero is sent by those that look. What is sent holds at least the average
      energy, `|bucket - sent|**2 <= (1 - entries / n) |bucket|**2`; for random choices
      on average.

    Attributes:
      deviation: what the tests hold it to, on gradients recorded from training.
      is_blind: whether it chooses without looking at the bucket.
    """

    deviation: ClassVar[Deviation] = EXACT
    is_blind: ClassVar[bool] = False

    def init(self, n: int) -> Any:
        """The state carried from step to step, for a bucket of `n` entries: none."""
        del n
        return ()

    def count(self, n: int, factor: float) -> int:
        """k, the slots of the payload for `n` entries at `factor`; static.

        `max(1, floor(n / factor))`.
        """
        return _ladder.entries(n, factor)

    @abc.abstractmethod
    def mark(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, Any]:
        """Mark about `k` entries of `bucket`.

        Args:
          bucket: `[n]` float32.
          state: from `init` or the last step.
          k: `[]` int32, from `count`.
          bracket: of the k-th magnitude, from a sample.
          key: a random key, the same on every replica, new at every step.

        Returns:
          What is marked, and the new state.
        """

    def compress(
        self, bucket: jax.Array, state: Any, *, k: int, key: jax.Array
    ) -> tuple[Payload, Any]:
        """The payload of `k` slots, and the new state: all at once for a static k."""
        slots = jnp.int32(k)
        bracket = quantile.bracket(bucket, slots, key)
        choice, state = self.mark(bucket, state, k=slots, bracket=bracket, key=key)
        marks = thinned(choice, slots, key)
        return _payload.take(bucket, compaction.select(marks, k)), state

    def narrow(self, payload: Payload, *, k: int, key: jax.Array) -> Payload:
        """Compress a payload further, to `k` slots, without the bucket.

        The second level of GraVAC's multi-level compression (Tyagi and Swany, 2023):
        the `k` largest entries of the payload. It is what `compress` would have sent,
        with the same `key`, if the payload holds the largest of the bucket, as that of
        an exact top-k does. For selectors that only come near both are near to each
        other, and for those that look at blocks it is another selection.
        """
        del key
        return narrowed(payload, compaction.magnitude_bits(payload.values), k)


def chosen(mask: jax.Array) -> Choice:
    """Mark the entries of `mask` (`[n]` bool), which a compressor has counted."""
    marks = compaction.mark(mask)
    return Choice(marks, marks.words)


def safe(bracket: Bracket) -> jax.Array:
    """int32, bits two standard deviations above the k-th; it, if there is no bound."""
    is_bound = bracket.high < quantile.BEYOND
    return bracket.middle + jnp.where(is_bound, bracket.high - bracket.middle, 0) // 2


def reaching(bucket: jax.Array, bits: jax.Array) -> Choice:
    """Mark the entries whose magnitude bits are at least `bits`; twice that is sure."""
    found = compaction.magnitude_bits(bucket)
    twice = jnp.minimum(bits, quantile.BEYOND - quantile.OCTAVE) + quantile.OCTAVE
    words = (
        compaction.pack(found >= bits),
        compaction.pack(found >= twice),
    )
    words, first = jax.lax.optimization_barrier(words)
    return Choice(compaction.marks_of(words), first)


def thinned(choice: Choice, k: jax.Array, key: jax.Array) -> Marks:
    """At most `k` of the marks; which ones are left out is drawn with `key`."""

    def thin(marks: Marks) -> Marks:
        firsts = compaction.count_bits(choice.first)
        is_crowded = firsts > k  # then the others are out, and some of the first too
        others = marks.words & ~choice.first
        drawn = compaction.marks_of(jnp.where(is_crowded, choice.first, others))
        stay = Marks(choice.first, marks.starts - drawn.starts, firsts)
        stay = jax.tree.map(lambda x: jnp.where(is_crowded, 0, x), stay)
        # Bits of the key do for a draw; jax.random would take longer to compile than
        # all the rest here.
        gap = _tree.draws(key)[1] % jnp.maximum(drawn.total, 1).astype(jnp.uint32)
        drawn = compaction.thin(drawn, k - stay.total, gap.astype(jnp.int32))
        # No entry is in both, so that bits add up as counts do.
        return jax.tree.map(jnp.add, stay, drawn)

    return _tree.only_if(choice.marks.total > k, thin, choice.marks)


def bits_of(threshold: jax.Array) -> jax.Array:
    """int32, the magnitude bits of a threshold that arithmetic has made.

    At least those of the smallest normal number: arithmetic takes what is below for
    zero, and zeros are not sent.
    """
    smallest = compaction.magnitude_bits(jnp.float32(_tree.SMALLEST_NORMAL))
    return jnp.maximum(compaction.magnitude_bits(threshold), smallest)


def narrowed(payload: Payload, numbers: jax.Array, k: int) -> Payload:
    """The entries of the `k` largest `numbers` (int32); of equal ones the earlier."""
    slots = compaction.select(compaction.mark(quantile.largest(numbers, k)), k)
    indices = payload.indices.at[slots].get(mode="fill", fill_value=0)
    is_empty = slots >= _payload.PAD
    values = _payload.take(payload.values, slots).values
    return Payload(values, jnp.where(is_empty, slots, indices))
