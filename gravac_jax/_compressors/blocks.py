"""Top-k block by block, which keeps indices small."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gravac_jax import _checks, _tree
from gravac_jax._compressors.base import Choice, Compressor, Deviation, chosen
from gravac_jax._marking import compaction, quantile
from gravac_jax._marking.quantile import Bracket


@dataclasses.dataclass(frozen=True)
class BlockTopK(Compressor):
    """Sends the largest entries of every block of fixed size, as many of each.

    Where k is no multiple of the number of blocks, some blocks send one more; which
    ones is drawn anew at every step. Where there are fewer slots than blocks, most
    blocks wait for a later step, whatever they hold.

    Law:
      In each block, what is sent is not smaller than what is not. With one block it is
      `TopK`.

    Cost:
      About a dozen passes over the bucket: all blocks are searched at once, and the
      slowest decides. An index needs log2(block) bits.

    Args:
      block: entries of a block.

    Raises:
      ValueError: if `block` is no number of entries.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> bucket = jnp.array([0.1, 2.0, -3.0, 4.0])
      >>> compressor = gravac.BlockTopK(block=2)
      >>> payload, _ = compressor.compress(bucket, (), k=2, key=jax.random.key(0))
      >>> payload.indices.tolist()
      [1, 3]

    References:
      Wangni et al. and others select by layer or block; see Shi et al., Understanding
      top-k sparsification in distributed deep learning, 2019.
    """

    block: int = 4096
    deviation: ClassVar[Deviation] = Deviation(entries=0.9, energy=0.3)

    def __post_init__(self) -> None:
        _checks.count(self.block, "block", "entries")

    def mark(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, Any]:
        """Search all blocks at once."""
        del bracket
        n = bucket.size
        size = min(self.block, n)
        bits = jnp.pad(compaction.magnitude_bits(bucket), (0, -n % size))
        bits = bits.reshape(-1, size)
        blocks = bits.shape[0]
        draw, other = _tree.draws(key)
        # The last block may be short, and its share of the slots no whole number: then
        # it gets one more so often that the share is right on average.
        short = n % size
        share = k.astype(jnp.float32) * (short / n)
        chance = (other >> 8).astype(jnp.float32) * 2.0**-24
        last = jnp.floor(share + chance).astype(jnp.int32)
        full = blocks - (short > 0)
        rest = k - last
        turn = (jnp.arange(blocks, dtype=jnp.uint32) + draw % full) % full
        quotas = rest // full + (turn.astype(jnp.int32) < rest % full).astype(jnp.int32)
        if short:
            quotas = quotas.at[-1].set(last)
        is_sent = jax.vmap(quantile.largest)(bits, jnp.maximum(quotas, 1))
        is_sent = is_sent & (quotas[:, None] > 0)
        return chosen(is_sent.reshape(-1)[:n]), state
