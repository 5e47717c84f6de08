"""The default: correct the last step's threshold by how far it missed."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays
from gravac_jax._selection.compressor import Choice, Compressor, Wanted, safe_bits

AIM = 0.97  # of the slots, so that few steps mark more entries than there are slots

# Powers round differently in differently compiled programs. Dropping 12 of 23 mantissa
# bits, an arbitrary number, makes all of them select alike.
COARSE = ~0xFFF


class ThresholdState(NamedTuple):
    """The last step's threshold.

    Attributes:
      threshold: `[]` float32; 0 before the first step.
      reached: `[]` float32, how many entries reached it.
    """

    threshold: jax.Array
    reached: jax.Array


@dataclasses.dataclass(frozen=True)
class Threshold(Compressor):
    """Sends the entries that reach a threshold carried from step to step: the default.

    The tail of a gradient is close to a power law: t(k) = t (count / k)^slope, with the
    threshold t and the count of the last step. This formula corrects the last miss and
    follows the controller to another factor. A sample of the bucket gives the slope,
    the bounds of the threshold (one standard deviation below, two above), and the first
    threshold.

    Law:
      It aims at 97% of the slots. Entries beyond the slots stay behind, whichever they
      are; too few entries leave slots empty.

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

    def init(self, n: int) -> ThresholdState:
        """Return the state before the first step."""
        return ThresholdState(jnp.float32(0), jnp.float32(n))

    def mark(
        self, bucket: jax.Array, state: ThresholdState, wanted: Wanted
    ) -> tuple[Choice, ThresholdState]:
        """Correct the threshold, then mark in one pass."""
        bracket = wanted.bracket
        aim = jnp.maximum(AIM * wanted.k.astype(jnp.float32), 1)
        guess = state.threshold * jnp.power(state.reached / aim, bracket.slope)
        # The bracket is four deviations wide on each side. Sending too little is better
        # than marking too much: large entries might have to stay behind.
        low = bracket.middle - (bracket.middle - bracket.low) // 4
        high = safe_bits(bracket)
        guess = jnp.clip(_arrays.magnitude_bits(guess) & COARSE, low, high)
        bits = jnp.where(state.threshold > 0, guess, high)
        choice = Choice.from_threshold(bucket, bits)
        reached = jnp.maximum(choice.marks.total.astype(jnp.float32), 0.5)
        return choice, ThresholdState(_arrays.from_bits(bits), reached)
