"""Send the largest entries: mark them, take them, and send values and places.

The bucket is not sorted. A sample of it bounds the magnitude of the k-th largest
entry, a mask marks what reaches a threshold (`selection.py`), and a payload of k slots
takes what is marked to the wire (`payload.py`).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _network, _refuse, _xla
from gravac_jax._encodings import dense, payload, selection
from gravac_jax._encodings.base import Bucket, Encoding, Sent
from gravac_jax._encodings.selection import BEYOND, OCTAVE, Bracket, Marks
from gravac_jax._network import Comm, Traffic

SELECT = ("threshold", "sampled", "exact")
AIM = 0.97  # of the slots, so that few steps mark more entries than there are slots
# Of n / k steps, how long the smaller entries wait. Fitted to sparse exchanges of
# gradients, whose progress it predicts within a tenth or so.
SMALL_ENTRIES_WAIT = 1 / 32
# Powers round differently in differently compiled programs. Dropping 12 of 23 mantissa
# bits, an arbitrary number, makes all of them select alike.
COARSE = ~0xFFF


class TopKState(NamedTuple):
    """The last step's threshold.

    Attributes:
      threshold: `[]` float32; 0 before the first step.
      reached: `[]` float32, how many entries reached it.
    """

    threshold: jax.Array
    reached: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class TopK(Encoding):
    """Sends one entry in `factor`, the largest, to all other replicas.

    Which entries are the largest is found in one of three ways:

    - "threshold" carries a threshold from step to step, and corrects it by how far it
      missed. The tail of a gradient is close to a power law, t(k) = t (count / k)^s,
      with the threshold t and the count of the last step. A sample gives the slope s,
      the bounds of the threshold (one standard deviation below, two above), and the
      first threshold. It aims at 97% of the slots. One pass over the bucket.
    - "sampled" is Deep Gradient Compression's: a threshold from a sample, two standard
      deviations on the safe side; if more than k entries reach it, the exact one is
      searched. Nothing that is sent is smaller than anything that is held back.
    - "exact" sends the k largest, and of equal magnitudes the earlier. Counting finds
      the k-th magnitude bit by bit, in 31 passes over the bucket.

    If more entries reach the threshold than there are slots, some stay behind for the
    next step, when they will have grown: never those of at least twice the threshold,
    and of the others a run that begins at a random one and wraps around.

    Payloads go to all replicas, so that bytes grow with N. Where a dense step sends
    less, `gravac.transform` takes one instead.

    Law:
      At most k = max(1, floor(n / factor)) entries are sent, none twice and no zeros,
      and at least the average energy: |residual|^2 <= (1 - entries / n) |x|^2.

    Cost:
      (N - 1) alpha + (N - 1) b k beta with b bytes an entry: 4 by default, 6 with
      values of 32 bits. A dense ring costs 2 (N - 1) / N 4 n beta.

    Args:
      factor: n / k; 100 sends one entry in a hundred.
      select: "threshold", "sampled" or "exact".
      values: how values travel: "bfloat16" (2 bytes; what rounding drops stays in the
        residual) or "float32" (4 bytes).

    Raises:
      ValueError: if `factor` is below 1, or a name is none of these.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.TopK(100).traffic(gravac.Bucket(1000), replicas=4).wire_bytes
      132

    References:
      Aji and Heafield, Sparse communication for distributed gradient descent, EMNLP
      2017; Lin et al., Deep Gradient Compression, ICLR 2018, section 5; Tyagi and
      Swany, GraVAC, IEEE CLOUD 2023.
    """

    factor: float
    select: str = dataclasses.field(default="threshold", kw_only=True)
    values: str = dataclasses.field(default="bfloat16", kw_only=True)

    def __post_init__(self) -> None:
        _refuse_density(self.factor, "factor")
        _refuse.one_of(self.select, "select", SELECT)
        _refuse.one_of(self.values, "values", dense.VALUES)

    @classmethod
    def geometric(
        cls, minimum: float, maximum: float, multiplier: float = 2, **options: Any
    ) -> tuple[Encoding, ...]:
        """Return GraVAC's geometric scaling policy: a ladder of rising factors.

        Args:
          minimum: the first factor after a dense step, the paper's theta_min.
          maximum: the last factor, the paper's theta_max.
          multiplier: each factor divided by the one before it.
          options: `select` and `values` of all.

        Raises:
          ValueError: if a factor is below 1, `minimum` is not below `maximum`, or
            `multiplier` is below 1.01.

        Example:
          >>> import gravac_jax as gravac
          >>> gravac.TopK.geometric(10, 50)
          (Dense(), TopK(10), TopK(20), TopK(40), TopK(50))
        """
        _refuse.number(multiplier, "multiplier", low=1.01, high=1e6)
        return _scaled(minimum, maximum, multiplier, lambda x: x * multiplier, options)

    @classmethod
    def exponential(
        cls, minimum: float, maximum: float, **options: Any
    ) -> tuple[Encoding, ...]:
        """Return GraVAC's exponential scaling policy: a ladder of rising factors.

        The multiplier of `minimum` is squared from one to the next: 2, 4, 16, 256.

        Args:
          minimum: the first factor after a dense step, the paper's theta_min.
          maximum: the last factor, the paper's theta_max.
          options: `select` and `values` of all.

        Raises:
          ValueError: if a factor is below 1, or `minimum` is not below `maximum`.

        Example:
          >>> import gravac_jax as gravac
          >>> gravac.TopK.exponential(10, 1000)
          (Dense(), TopK(10), TopK(20), TopK(40), TopK(160), TopK(1000))
        """
        return _scaled(minimum, maximum, 2, lambda x: x**2, options)

    def slots(self, n: int) -> int:
        """Return k, how many entries of `n` are sent at most."""
        return min(n, max(1, math.floor(n / self.factor)))

    def traffic(self, bucket: Bucket, replicas: int) -> Traffic:
        """Return the cost of gathering all payloads."""
        format_ = payload.WireFormat(self.values, bucket.n)
        payload_bytes = format_.payload_bytes(self.slots(bucket.n))
        return _network.all_gather_traffic(payload_bytes, replicas)

    def init(self, bucket: Bucket) -> TopKState:
        """Return the state before the first step."""
        return TopKState(jnp.float32(0), jnp.float32(bucket.n))

    def exchange(
        self,
        x: jax.Array,
        state: TopKState,
        *,
        bucket: Bucket,
        key: jax.Array,
        step: jax.Array | int,
        comm: Comm,
    ) -> tuple[Sent, TopKState]:
        """Gather the selections of all replicas, and add them up in their order."""
        format_, k = payload.WireFormat(self.values, bucket.n), self.slots(bucket.n)
        marks, state = self._choose(x, state, k, key)
        chosen = payload.take(x, selection.places_of_first(marks, k))
        chosen = chosen._replace(values=format_.rounded(chosen.values))
        energy = _arrays.energy(chosen.values)
        comm.tell(energy)
        buffers = comm.gather(format_.encode(chosen))
        decode = lambda buffer: format_.decode(buffer, k)
        mean = payload.mean_of_payloads(buffers, decode, comm.zeros(x))
        return Sent(mean, format_.kept(x, marks), energy), state

    def _choose(
        self, x: jax.Array, state: TopKState, k: int, key: jax.Array
    ) -> tuple[Marks, TopKState]:
        """Mark at most k entries."""
        bits = _arrays.magnitude_bits(x)
        k_largest = lambda: selection.mark(selection.k_largest(bits, k))
        if self.select == "exact":
            return k_largest(), state
        bracket = selection.bracket(x, k, key)
        if self.select == "threshold":
            return _by_threshold(x, state, k, bracket, key)
        marks = selection.mark(bits >= _safe_bits(bracket))
        return _xla.only_if(marks.total > k, lambda _: k_largest(), marks), state

    def look(self, x: jax.Array, state: Any, bucket: Bucket, key: jax.Array) -> Any:
        """Return the energies of the largest entries of a sample, summed up."""
        return selection.energies_of_largest(x, key)

    def share(self, looked: jax.Array, bucket: Bucket, replicas: int) -> jax.Array:
        """Return the share of the largest entries of a sample.

        At one step of a GPT it missed by 1% at factor 10, 2 to 7% at 100, and 12 to 29%
        at 1000 (standard deviations); averages over steps miss by less. Tails that are
        far heavier read low.
        """
        return selection.share_of_largest(looked, self.slots(bucket.n), bucket.n)

    def waits(self, looked: jax.Array, bucket: Bucket, replicas: int) -> jax.Array:
        """Return the steps that an entry waits, longer than by chance.

        Small entries wait until what is held back of them is as large as the large
        ones. They are 1 - a of the energy, and wait for n / k / 32 steps more.
        """
        n, k = bucket.n, self.slots(bucket.n)
        share = self.share(looked, bucket, replicas)
        longer = (1 - share) * jnp.float32(n / max(k, 1)) * SMALL_ENTRIES_WAIT
        return (1 - share) / share + longer


def _by_threshold(
    x: jax.Array, state: TopKState, k: int, bracket: Bracket, key: jax.Array
) -> tuple[Marks, TopKState]:
    """Correct the threshold of the last step, then mark in one pass."""
    aim = jnp.maximum(AIM * jnp.float32(k), 1)
    guess = state.threshold * jnp.power(state.reached / aim, bracket.slope)
    # The bracket is four deviations wide on each side. Sending too little is better
    # than marking too much: large entries might have to stay behind.
    low = bracket.middle - (bracket.middle - bracket.low) // 4
    high = _safe_bits(bracket)
    guess = jnp.clip(_arrays.magnitude_bits(guess) & COARSE, low, high)
    bits = jnp.where(state.threshold > 0, guess, high)
    marks = selection.mark(_arrays.magnitude_bits(x) >= bits)
    reached = jnp.maximum(marks.total.astype(jnp.float32), 0.5)
    thin = lambda marks: _thin(marks, k, x, bits, key)
    thinned = _xla.only_if(marks.total > k, thin, marks)
    return thinned, TopKState(bits.view(jnp.float32), reached)


def _thin(marks: Marks, k: int, x: jax.Array, bits: jax.Array, key: jax.Array) -> Marks:
    """Return `k` of too many marks: those of twice the threshold, and others by lot."""
    is_sure = _arrays.magnitude_bits(x) >= jnp.minimum(bits, BEYOND - OCTAVE) + OCTAVE
    sure = selection.marks_of(selection.pack(is_sure) & marks.words)
    # If even the sure entries are too many, only they are drawn from.
    is_crowded = sure.total > k
    drawn = jnp.where(is_crowded, sure.words, marks.words & ~sure.words)
    stay = jnp.where(is_crowded, 0, sure.words)
    room = k - jnp.where(is_crowded, 0, sure.total)
    drawn = selection.marks_of(drawn)
    # Bits of the key do for a draw; jax.random would take longer to compile than
    # everything else here.
    gap = _arrays.draws(key)[1] % jnp.maximum(drawn.total, 1).astype(jnp.uint32)
    some = selection.thin(drawn, room, gap.astype(jnp.int32))
    return selection.marks_of(_xla.once(stay | some))


def _safe_bits(bracket: Bracket) -> jax.Array:
    """Return magnitude bits two standard deviations above the k-th, int32.

    Return those of the k-th itself if the sample gives no upper bound.
    """
    is_bound = bracket.high < BEYOND
    return bracket.middle + jnp.where(is_bound, bracket.high - bracket.middle, 0) // 2


def _refuse_density(value: Any, name: str) -> None:
    """Refuse what is no factor n / k."""
    hint = "10 sends one entry in ten, and gravac.Dense() all of them"
    if _refuse.is_number(value) and 0 < value < 1:
        hint = f"for a density of {value} write {1 / value:g}"
    _refuse.number(value, name, hint, low=1)


def _scaled(
    minimum: float, maximum: float, multiplier: float, scale: Any, options: Any
) -> tuple[Encoding, ...]:
    """Return Dense(), then the largest of n / factor entries, factors rising."""
    _refuse_density(minimum, "minimum")
    _refuse_density(maximum, "maximum")
    if minimum >= maximum:
        raise ValueError(
            f"`minimum` must be below `maximum`, got {minimum} and {maximum}."
        )
    factors = [minimum] if minimum > 1 else []
    while minimum * multiplier < maximum * (1 - 1e-9):  # a product may round down
        # Products make names of many digits.
        factors.append(float(f"{minimum * multiplier:.12g}"))
        multiplier = scale(multiplier)
    return (dense.Dense(), *(TopK(x, **options) for x in (*factors, maximum)))
