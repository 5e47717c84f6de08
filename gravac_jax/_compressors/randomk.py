"""Entries drawn at random: cheap, unbiased, and worse than any that looks."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gravac_jax import _payload, _tree
from gravac_jax._compressors.base import Choice, Compressor, Deviation, chosen, narrowed
from gravac_jax._marking import quantile
from gravac_jax._marking.quantile import Bracket
from gravac_jax._payload import Payload

LAST = _payload.PAD - 1  # priorities have 30 bits, as many as indices


def priorities(indices: jax.Array, key: jax.Array) -> jax.Array:
    """int32, a number for each of `indices` (int32), none twice, random by `key`.

    A bijection of 30 bits: additions, odd multiples and shifts that are added to what
    they came from can all be undone. The mixing is MurmurHash3's (Appleby, 2011).
    """
    one, two = _tree.draws(key)
    x = (indices.astype(jnp.uint32) + one) & LAST
    x = ((x ^ (x >> 15)) * jnp.uint32(0x85EBCA6B)) & LAST
    x = ((x ^ (x >> 13)) + two) & LAST
    x = (x * jnp.uint32(0xC2B2AE35)) & LAST
    return (x ^ (x >> 15)).astype(jnp.int32) + 1


def drawn(n: int, k: jax.Array, key: jax.Array) -> Choice:
    """Mark `k` (`[]` int32) of `n` entries: those of the highest priorities."""
    numbers = priorities(jnp.arange(n, dtype=jnp.int32), key)
    spread = quantile.SPREAD * jnp.sqrt(k.astype(jnp.float32)) + 1
    at = lambda rank: LAST - (jnp.clip(rank / n, 0, 1) * LAST).astype(jnp.int32)
    rank = k.astype(jnp.float32)
    low, high = at(rank + spread), at(rank - spread)
    cut = quantile.kth_between(numbers, k, low, high)
    return chosen(numbers >= cut.bits)


@dataclasses.dataclass(frozen=True)
class RandomK(Compressor):
    """Sends k entries drawn uniformly, the same places on every replica.

    Each entry has a priority that depends on its index and the step alone, and those of
    the k highest are sent, zeros too.

    Law:
      Every place is drawn with probability k / n, so that k / n of the energy is sent
      on average. The k places are among the K of a smaller factor: `narrow` is exact.

    Cost:
      Three passes over the indices; marking reads nothing of the bucket.

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

    deviation: ClassVar[Deviation] = Deviation(entries=1, energy=0)
    is_blind: ClassVar[bool] = True

    def mark(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, Any]:
        """The k highest priorities, whatever the bucket holds."""
        del bracket
        return drawn(bucket.size, k, key), state

    def narrow(self, payload: Payload, *, k: int, key: jax.Array) -> Payload:
        """Those of the k highest priorities among the entries of the payload."""
        is_filled = payload.indices < _payload.PAD
        numbers = jnp.where(is_filled, priorities(payload.indices, key), 0)
        return narrowed(payload, numbers, k)
