"""RedSync's threshold: bisect between zero and the largest entry."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._selection import entries
from gravac_jax._selection.compressor import Choice, Compressor, Wanted

ENOUGH = 0.8  # of the slots; arbitrary
MAX_TRIES = 30


class _Search(NamedTuple):
    low: jax.Array  # more than k entries reach it
    middle: jax.Array
    high: jax.Array  # too few entries reach it
    reached: jax.Array  # how many entries reach the middle
    tries: jax.Array


@dataclasses.dataclass(frozen=True)
class RedSync(Compressor):
    """Sends the entries that reach a threshold found by bisection.

    The first try is the root mean square, the bounds are zero and the largest
    magnitude. The search ends when 80% to 100% of the slots are used, or after 30
    tries. (RedSync starts from the mean and accepts any count between k and 2 k; its
    messages have no fixed size.)

    Law:
      Nothing that is sent is smaller than anything that is kept. A search that does not
      end, as around one huge entry, takes its upper bound: few entries are sent, and
      they are the largest.

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

    def mark(self, bucket: jax.Array, state: Any, wanted: Wanted) -> tuple[Choice, Any]:
        """Bisect, then mark in one pass."""
        k, bits = wanted.k, _arrays.magnitude_bits(bucket)
        count = lambda threshold: entries.count(bits >= _normal_bits(threshold))
        enough = jnp.maximum(ENOUGH * k.astype(jnp.float32), 1).astype(jnp.int32)

        def is_wrong(s: _Search) -> jax.Array:
            return (s.reached > k) | (s.reached < enough)

        def bisect(s: _Search) -> _Search:
            low = jnp.where(s.reached > k, s.middle, s.low)
            high = jnp.where(s.reached > k, s.high, s.middle)
            middle = (low + high) / 2
            return _Search(low, middle, high, count(middle), s.tries + 1)

        largest = _arrays.from_bits(jnp.max(bits))
        # Divided first, so that squares stay within float32.
        shares = bucket / jnp.maximum(largest, _arrays.SMALLEST_NORMAL)
        root = largest * jnp.sqrt(_arrays.energy(shares) / bucket.size)
        start = _Search(0 * root, root, largest, count(root), 0 * bits[0])
        is_open = lambda s: is_wrong(s) & (s.tries < MAX_TRIES)
        end = jax.lax.while_loop(is_open, bisect, start)
        threshold = jnp.where(is_wrong(end), end.high, end.middle)
        return Choice.from_threshold(bucket, _normal_bits(threshold)), state


def _normal_bits(threshold: jax.Array) -> jax.Array:
    """Return the magnitude bits of a computed threshold, at least of a normal number.

    Arithmetic may flush smaller numbers to zero, and zeros are not sent.
    """
    smallest = _arrays.magnitude_bits(jnp.float32(_arrays.SMALLEST_NORMAL))
    return jnp.maximum(_arrays.magnitude_bits(threshold), smallest)
