"""Last step's threshold, corrected by its miss: one pass a step."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax._compressors.base import Choice, Compressor, Deviation, reaching, safe
from gravac_jax._marking import compaction
from gravac_jax._marking.quantile import Bracket

AIM = 0.97  # of the slots, so that most steps leave nothing behind for want of one

# Powers round differently in differently compiled programs. Rounded further, so that
# all these programs select alike: 12 of 23 bits stay, arbitrary.
ROUNDED = ~0xFFF


class ThresholdState(NamedTuple):
    """What was last seen.

    Attributes:
      threshold: `[]` float32; 0 before the first step.
      reached: `[]` float32, how many entries reached it.
    """

    threshold: jax.Array
    reached: jax.Array


@dataclasses.dataclass(frozen=True)
class Threshold(Compressor):
    """Sends what reaches a threshold that is carried from step to step: the default.

    The tail of a gradient is close to a power law: t(k) = t (count / k)^slope with the
    threshold t and the count of the last step. One formula corrects the last miss and
    follows the controller to another factor. A sample of the bucket tells the slope,
    within what bounds the threshold must lie (one standard deviation below, two above),
    and the first threshold.

    Law:
      It aims at 97% of the slots. What is too much stays behind, whichever that is;
      what is too little leaves slots empty.

    Cost:
      One pass over the bucket, and a sample of about 65,536 entries, whatever the
      factor.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> bucket = jnp.array([0.1, 2.0, -3.0, 0.0])
      >>> compressor = gravac.Threshold()
      >>> state, key = compressor.init(4), jax.random.key(0)
      >>> payload, state = compressor.compress(bucket, state, k=2, key=key)
      >>> payload.indices.tolist(), 0.1 < float(state.threshold) <= 2.0
      ([1, 2], True)

    References:
      Aji and Heafield, EMNLP 2017, for thresholds in place of ranks; the correction is
      ours.
    """

    deviation: ClassVar[Deviation] = Deviation(entries=0.5, energy=0.6)

    def init(self, n: int) -> ThresholdState:
        """Nothing seen yet."""
        return ThresholdState(jnp.float32(0), jnp.float32(n))

    def mark(
        self,
        bucket: jax.Array,
        state: ThresholdState,
        *,
        k: jax.Array,
        bracket: Bracket,
        key: jax.Array,
    ) -> tuple[Choice, ThresholdState]:
        """One pass."""
        del key
        aim = jnp.maximum(AIM * k.astype(jnp.float32), 1)
        guess = state.threshold * jnp.power(state.reached / aim, bracket.slope)
        # The bounds are four deviations away. Too little is sent rather than too much,
        # of which some would have to stay behind that may be large.
        low = bracket.middle - (bracket.middle - bracket.low) // 4
        high = safe(bracket)
        guess = jnp.clip(compaction.magnitude_bits(guess) & ROUNDED, low, high)
        bits = jnp.where(state.threshold > 0, guess, high)
        choice = reaching(bucket, bits)
        reached = jnp.maximum(choice.marks.total.astype(jnp.float32), 0.5)
        return choice, ThresholdState(compaction.from_bits(bits), reached)
