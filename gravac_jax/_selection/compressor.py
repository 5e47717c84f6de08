"""The interface of compressors, and the laws that hold for all of them.

A compressor marks the entries of one flat bucket that should be sent. It knows nothing
about replicas, pytrees or earlier residuals. The number of entries is decided while the
program runs, so nothing here depends on it statically; one function, the same for all
compressors, compacts what is marked into a payload.
"""

import abc
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._selection import entries, quantile
from gravac_jax._selection.entries import Marks, Payload, take
from gravac_jax._selection.quantile import Bracket


class Choice(NamedTuple):
    """The entries that a compressor marks; build it with one of the two methods below.

    Attributes:
      marks: the marked entries.
      sure_bits: `[]` int32, magnitude bits. If more entries are marked than there are
        slots, those of at least this magnitude are sent before all others. None if all
        entries are alike.

    Example:
      See `gravac.Compressor`.
    """

    marks: Marks
    sure_bits: jax.Array | None

    @classmethod
    def from_mask(cls, mask: jax.Array) -> "Choice":
        """Mark the entries where `mask` (`[n]` bool) is set.

        If more than k are set, the ones that are sent are drawn at random.
        """
        return cls(entries.mark(mask), None)

    @classmethod
    def from_threshold(cls, bucket: jax.Array, bits: jax.Array) -> "Choice":
        """Mark the entries of `bucket` that reach a threshold.

        Entries of twice the threshold and more are sure to be sent.

        Args:
          bucket: `[n]` float32.
          bits: `[]` int32, the threshold's magnitude bits: those of a positive float32,
            by `jax.lax.bitcast_convert_type(threshold, jnp.int32)`.
        """
        found = _arrays.magnitude_bits(bucket)
        below_infinity = jnp.minimum(bits, quantile.BEYOND - quantile.OCTAVE)
        return cls(entries.mark(found >= bits), below_infinity + quantile.OCTAVE)


class Wanted(NamedTuple):
    """What a compressor is asked for.

    Attributes:
      k: `[]` int32, how many entries to mark, from `Compressor.count`.
      bracket: bounds of the k-th largest magnitude, estimated from a sample.
      key: a random key, the same on every replica, new at every step.

    Example:
      See `gravac.Compressor`.
    """

    k: jax.Array
    bracket: Bracket
    key: jax.Array


class Compressor(abc.ABC):
    """Chooses which entries of a bucket are sent. Subclass it to write your own.

    If more than k entries are marked, some stay behind for the next step, when they
    will have grown: never those of at least twice the threshold, and of the others a
    run that begins at a random one and wraps around, so that no position is preferred.

    Law:
      The payload has `count(n, factor)` slots. It holds entries of the bucket,
      unchanged, none twice, in the order of their indices, and then empty slots.
      Compressors that look at magnitudes send no zeros, and what they send holds at
      least the average energy:
      `|bucket - sent|**2 <= (1 - entries / n) |bucket|**2`. Random choices satisfy this
      on average.

    Attributes:
      is_blind: whether it chooses without looking at the bucket.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> @dataclasses.dataclass(frozen=True)
      ... class FirstEntries(gravac.Compressor):
      ...     def mark(self, bucket, state, wanted):
      ...         mask = jnp.arange(bucket.size) < wanted.k
      ...         return gravac.Choice.from_mask(mask), state
      >>> payload, _ = FirstEntries().compress(
      ...     jnp.arange(4.0), (), k=2, key=jax.random.key(0)
      ... )
      >>> payload.indices.tolist()
      [0, 1]
    """

    is_blind: ClassVar[bool] = False

    def init(self, n: int) -> Any:
        """Return the state for a bucket of `n` entries; by default there is none."""
        del n
        return ()

    def count(self, n: int, factor: float) -> int:
        """Return k, the slots of the payload: `max(1, floor(n / factor))`; static."""
        return min(n, max(1, math.floor(n / factor)))

    @abc.abstractmethod
    def mark(self, bucket: jax.Array, state: Any, wanted: Wanted) -> tuple[Choice, Any]:
        """Mark about `wanted.k` entries of `bucket`.

        Args:
          bucket: `[n]` float32.
          state: from `init` or the last step.
          wanted: how many entries, and what is known about them.

        Returns:
          The marked entries, and the new state.
        """

    def compress(
        self, bucket: jax.Array, state: Any, *, k: int, key: jax.Array
    ) -> tuple[Payload, Any]:
        """Return the payload of a static number of `k` slots, and the new state."""
        slots = jnp.int32(k)
        wanted = Wanted(slots, quantile.bracket(bucket, slots, key), key)
        choice, state = self.mark(bucket, state, wanted)
        marks = at_most(slots, choice, bucket, key)
        return take(bucket, entries.places(marks, k)), state


def at_most(k: jax.Array, choice: Choice, bucket: jax.Array, key: jax.Array) -> Marks:
    """Return at most `k` of the marks; `key` draws which ones are left out."""

    def thin(marks: Marks) -> Marks:
        sure = jnp.zeros_like(marks.words)
        if choice.sure_bits is not None:
            is_sure = _arrays.magnitude_bits(bucket) >= choice.sure_bits
            sure = entries.pack(is_sure) & marks.words
        sure_count = entries.count_bits(sure)
        # If even the sure entries are too many, only they are drawn from.
        is_crowded = sure_count > k
        drawn = jnp.where(is_crowded, sure, marks.words & ~sure)
        drawn = entries.marks_of(drawn)
        stay = Marks(sure, marks.starts - drawn.starts, sure_count)
        stay = jax.tree.map(lambda x: jnp.where(is_crowded, 0, x), stay)
        # Bits of the key do for a draw; jax.random would take longer to compile than
        # everything else here.
        gap = _arrays.draws(key)[1] % jnp.maximum(drawn.total, 1).astype(jnp.uint32)
        drawn = entries.thin(drawn, k - stay.total, gap.astype(jnp.int32))
        # No entry is in both, so bits add up as counts do.
        return jax.tree.map(jnp.add, stay, drawn)

    return _arrays.only_if(choice.marks.total > k, thin, choice.marks)


def safe_bits(bracket: Bracket) -> jax.Array:
    """Return magnitude bits two standard deviations above the k-th, int32.

    Return those of the k-th itself if the sample gives no upper bound.
    """
    is_bound = bracket.high < quantile.BEYOND
    return bracket.middle + jnp.where(is_bound, bracket.high - bracket.middle, 0) // 2
