"""SIDCo's threshold: fit a distribution to the magnitudes, stage by stage."""

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

STAGE_SHARE = 0.25  # of the entries that a stage keeps, as in the paper
MAX_STAGES = 16  # 4**16 is more than any bucket has


class _Stage(NamedTuple):
    threshold: jax.Array
    reached: jax.Array  # float32, how many entries reach it
    stages: jax.Array
    is_last: jax.Array


@dataclasses.dataclass(frozen=True)
class SIDCo(Compressor):
    """Sends what reaches a threshold that follows from a fitted distribution.

    What exceeds a threshold t is taken to be exponential with the mean excess b, so
    that a share s of it exceeds t + b log(1 / s) (SIDCo-E). A fit of the whole is poor
    far out in the tail; hence stages, each of which keeps a quarter of what the last
    one kept and fits again, until k are left. The paper adapts the number of stages
    from step to step; ours follows from the counts that are found.

    Law:
      What is sent is not smaller than what is not, except for entries beyond the k
      slots. Where a stage would leave nothing, as on constants, it is not done.

    Cost:
      Two passes over the bucket a stage, log4(factor) + 1 stages or so.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> bucket = jax.random.laplace(jax.random.key(0), (10_000,))
      >>> compressor = gravac.SIDCo()
      >>> payload, _ = compressor.compress(bucket, (), k=100, key=jax.random.key(0))
      >>> 50 < int(jnp.sum(payload.values != 0)) <= 100
      True

    References:
      Abdelmoniem et al., An efficient statistical-based gradient compression technique
      for distributed training systems, MLSys 2021, algorithm 1.
    """

    deviation: ClassVar[Deviation] = Deviation(entries=0.5, energy=0.6)

    def mark(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, Any]:
        """Fit, then one pass."""
        del bracket, key
        magnitudes, wanted = jnp.abs(bucket), k.astype(jnp.float32)
        bits = compaction.magnitude_bits(bucket)

        def fit(s: _Stage) -> _Stage:
            mean_excess = _tree.excess(magnitudes, s.threshold[None])[0] / s.reached
            aim = jnp.maximum(wanted, STAGE_SHARE * s.reached)
            threshold = s.threshold + mean_excess * jnp.log(s.reached / aim)
            count = compaction.count(bits >= bits_of(threshold)).astype(jnp.float32)
            is_empty = count == 0
            return _Stage(
                threshold=jnp.where(is_empty, s.threshold, threshold),
                reached=jnp.where(is_empty, s.reached, count),
                stages=s.stages + 1,
                is_last=is_empty | (count <= wanted) | (aim == wanted),
            )

        is_open = lambda s: ~s.is_last & (s.stages < MAX_STAGES)
        zero = 0 * bits[0]
        none = zero.astype(jnp.float32)
        reached = compaction.count(bits >= bits_of(none)).astype(jnp.float32)
        all_of_it = jnp.maximum(reached, 1)
        start = _Stage(none, all_of_it, zero, all_of_it <= wanted)
        end = jax.lax.while_loop(is_open, fit, start)
        return reaching(bucket, bits_of(end.threshold)), state
