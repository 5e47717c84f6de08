"""Entries drawn at random: cheap, unbiased, and worse than every choice that looks."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._selection import quantile
from gravac_jax._selection.compressor import Choice, Compressor, Wanted
from gravac_jax._selection.entries import PAD

LAST = PAD - 1  # priorities have 30 bits, as many as indices


def priorities(indices: jax.Array, key: jax.Array) -> jax.Array:
    """Return a random number for each of `indices` (int32), none twice.

    The map is a bijection of 30 bits: additions, odd multiples and xor-shifts can all
    be undone. The mixing constants are MurmurHash3's (Appleby, 2011).
    """
    one, two = _arrays.draws(key)
    x = (indices.astype(jnp.uint32) + one) & LAST
    x = ((x ^ (x >> 15)) * jnp.uint32(0x85EBCA6B)) & LAST
    x = ((x ^ (x >> 13)) + two) & LAST
    x = (x * jnp.uint32(0xC2B2AE35)) & LAST
    return (x ^ (x >> 15)).astype(jnp.int32) + 1


def drawn(n: int, k: jax.Array, key: jax.Array) -> Choice:
    """Mark the `k` (`[]` int32) of `n` entries that have the highest priorities."""
    numbers = priorities(jnp.arange(n, dtype=jnp.int32), key)
    spread = quantile.SPREAD * jnp.sqrt(k.astype(jnp.float32)) + 1
    at = lambda rank: LAST - (jnp.clip(rank / n, 0, 1) * LAST).astype(jnp.int32)
    rank = k.astype(jnp.float32)
    low, high = at(rank + spread), at(rank - spread)
    cut = quantile.kth_between(numbers, k, low, high)
    return Choice.from_mask(numbers >= cut.bits)


@dataclasses.dataclass(frozen=True)
class RandomK(Compressor):
    """Sends k entries drawn uniformly, at the same places on every replica.

    Each entry has a priority that depends only on its index and the step; the k highest
    priorities are sent, zeros included.

    Law:
      Every place is drawn with probability k / n, so that k / n of the energy is sent
      on average.

    Cost:
      Three passes over the indices. Marking does not read the bucket.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> compressor = gravac.RandomK()
      >>> payload, _ = compressor.compress(
      ...     jnp.ones(1000), (), k=10, key=jax.random.key(0)
      ... )
      >>> int(jnp.sum(payload.values))
      10

    References:
      Stich et al., Sparsified SGD with memory, NeurIPS 2018, rand-k.
    """

    is_blind: ClassVar[bool] = True

    def mark(self, bucket: jax.Array, state: Any, wanted: Wanted) -> tuple[Choice, Any]:
        """Mark the k highest priorities, whatever the bucket holds."""
        return drawn(bucket.size, wanted.k, wanted.key), state
