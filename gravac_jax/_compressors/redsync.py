"""RedSync's threshold: bisect between zero and the largest entry."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _tree
from gravac_jax._compressors.base import (
    Choice,
    Compressor,
    Deviation,
    bits_of,
    reaching,
)
from gravac_jax._marking import compaction
from gravac_jax._marking.quantile import Bracket

ENOUGH = 0.8  # of the slots; arbitrary
MAX_TRIES = 30


class _Search(NamedTuple):
    low: jax.Array  # more than k entries reach it
    middle: jax.Array
    high: jax.Array  # too few do
    reached: jax.Array  # of the middle
    tries: jax.Array


@dataclasses.dataclass(frozen=True)
class RedSync(Compressor):
    """Sends what reaches a threshold that is found by bisection.

    The first try is the root of the mean square, the bounds are zero and the largest
    magnitude, and the search ends when between 80% and 100% of the slots are used, or
    after 30 tries. RedSync begins with the mean, and takes any count between k and 2 k,
    for which its messages have no fixed size; ours have.

    Law:
      What is sent is not smaller than what is not. A search that does not end, as
      around one huge entry, ends at its upper bound: few are sent, and the largest.

    Cost:
      Two passes over the bucket and one for each try: about ten at factor 100.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> bucket = jnp.array([0.1, 2.0, -3.0, 0.0])
      >>> compressor = gravac.RedSync()
      >>> payload, _ = compressor.compress(bucket, (), k=2, key=jax.random.key(0))
      >>> payload.indices.tolist()
      [1, 2]

    References:
      Fang et al., RedSync: Reducing synchronization bandwidth for distributed deep
      learning training system, JPDC 2019, algorithm 3 (threshold binary search).
    """

    deviation: ClassVar[Deviation] = Deviation(entries=0.8, energy=0.8)

    def mark(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, Any]:
        """Bisect, then one pass."""
        del bracket, key
        bits = compaction.magnitude_bits(bucket)
        count = lambda threshold: compaction.count(bits >= bits_of(threshold))
        enough = jnp.maximum(ENOUGH * k.astype(jnp.float32), 1).astype(jnp.int32)

        def is_wrong(s: _Search) -> jax.Array:
            return (s.reached > k) | (s.reached < enough)

        def bisect(s: _Search) -> _Search:
            low = jnp.where(s.reached > k, s.middle, s.low)
            high = jnp.where(s.reached > k, s.high, s.middle)
            middle = (low + high) / 2
            return _Search(low, middle, high, count(middle), s.tries + 1)

        largest = compaction.from_bits(jnp.max(bits))
        # Divided first, or squares leave float32.
        shares = bucket / jnp.maximum(largest, _tree.SMALLEST_NORMAL)
        root = largest * jnp.sqrt(_tree.energy(shares) / bucket.size)
        start = _Search(0 * root, root, largest, count(root), 0 * bits[0])
        is_open = lambda s: is_wrong(s) & (s.tries < MAX_TRIES)
        end = jax.lax.while_loop(is_open, bisect, start)
        threshold = jnp.where(is_wrong(end), end.high, end.middle)
        return reaching(bucket, bits_of(threshold)), state
