"""The rungs of one step: what each sends, and what the others would have sent.

The energy of the k largest of some squares is a minimum over thresholds (Rockafellar
and Uryasev, 2000, for the mean of a tail)::

    min over t of  sum_i max(squares_i - t, 0) + k t

The minimum is flat: a threshold that a tenth too many entries reach changes the result
by about a thousandth. So thresholds from a sample are enough, and nothing is sorted.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays
from gravac_jax._selection import entries, quantile
from gravac_jax._selection.entries import Marks
from gravac_jax._selection.quantile import Bracket

SHARES_SAMPLE_ENTRIES = 2**14  # arbitrary
_ROW_ENTRIES = 1024  # arbitrary


@dataclasses.dataclass(frozen=True)
class Rungs:
    """The rungs of one bucket in one step. An exchange of your own is handed one.

    Args:
      counts: static, what `Exchange.branch_sizes` returns: the entries that each rung
        sends, or its rank; `n` for a dense rung.
      n: static, entries of the bucket.
      taken: `[]` int32, the rung of this step, the same on every replica; an `np.int32`
        if it is known when the step is compiled.
      looks: whether the step estimates what other rungs would send, `[]` bool, the same
        on every replica; static True if all steps do.
      step: `[]` int32, steps before this one, or with rounds exchanges, the same on
        every replica. It says whose turn it is, if parts of the bucket go in turn.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> rungs = gravac.Rungs(counts=(100, 10, 1), n=100, taken=jnp.int32(1))
      >>> int(rungs.sent_count), bool(rungs.is_dense), rungs.is_taken.tolist()
      (10, False, [False, True, False])
    """

    counts: tuple[int, ...]
    n: int
    taken: jax.Array | np.int32
    looks: jax.Array | bool = True
    step: jax.Array | int = 0

    @property
    def are_all_dense(self) -> bool:
        """Whether every rung sends everything; static."""
        return min(self.counts) == self.n

    @property
    def is_dense(self) -> jax.Array:
        """Whether this step sends everything, `[]` bool."""
        return self.sent_count == self.n

    @property
    def sent_count(self) -> jax.Array:
        """Entries that this step sends, or its rank, `[]` int32."""
        return jnp.asarray(self.counts, jnp.int32)[self.taken]

    @property
    def sparse_count(self) -> jax.Array:
        """Entries of this step's payload, `[]` int32; 0 if dense."""
        sparse = [k if k < self.n else 0 for k in self.counts]
        return jnp.asarray(sparse, jnp.int32)[self.taken]

    @property
    def is_taken(self) -> jax.Array:
        """A mask of the rung of this step, `[rungs]` bool."""
        return jnp.arange(len(self.counts)) == self.taken


class Outlook(NamedTuple):
    """What a sample says about the bucket, before anything is marked.

    Attributes:
      places: `[m]` int32, the places of the sample.
      squares: `[m]` float32, the squares of the sample.
      thresholds: `[rungs]` float32, squares that about each rung's count reach.
      bracket: bounds of the magnitude that k entries reach.
      is_asked: whether rungs other than the one taken are asked for, `[]` bool or
        static.
    """

    places: jax.Array
    squares: jax.Array
    thresholds: jax.Array
    bracket: Bracket
    is_asked: jax.Array | bool


class SentEnergy(NamedTuple):
    """The energy of a payload.

    Attributes:
      energy: `[]` float32.
      excess: `[rungs]` float32, the sum of what its squares exceed each threshold by;
        zeros if other rungs are not asked for.
    """

    energy: jax.Array
    excess: jax.Array


def sample_bucket(
    bucket: jax.Array,
    counts: tuple[int, ...],
    k: jax.Array,
    key: jax.Array,
    looks: jax.Array | bool = True,
) -> Outlook:
    """Find thresholds for all `counts`, and a bracket for `k`, in a sample.

    Args:
      bucket: `[n]` float32.
      counts: static, entries that each rung sends.
      k: `[]` int32, entries to mark.
      key: a random key.
      looks: `[]` bool, whether the thresholds will be used; static True if always.
    """
    n = bucket.size
    places = quantile.sample_places(n, key)
    sampled = bucket.at[places].get(mode="promise_in_bounds")
    is_asked = looks if len(counts) > 1 else False  # a single rung is known exactly
    bits = quantile.thresholds(sampled, n, counts, is_asked)
    # A dense step that does not look marks nothing.
    is_marked = True if looks is True else k > 0
    bracket = quantile.bracket_from(sampled, n, k, is_marked)
    squares = jnp.square(_arrays.from_bits(bits))
    return Outlook(places, jnp.square(sampled), squares, bracket, is_asked)


def sent_energy(values: jax.Array, outlook: Outlook) -> SentEnergy:
    """Return the energy of the `values` (`[k]` float32) of a payload."""
    excess = _excess_if(outlook.is_asked, jnp.square(values), outlook.thresholds)
    return SentEnergy(_arrays.energy(values), excess)


def energies_of_rungs(
    outlook: Outlook,
    marks: Marks,
    rungs: Rungs,
    sent: SentEnergy,
    energy: jax.Array,
    is_blind: bool = False,
) -> jax.Array:
    """Estimate the energy that each rung would have sent of the bucket.

    The result is exact for the rung taken and for dense rungs, and within 2% for others
    on gradients.
    Smaller counts are read from the payload, which holds what they would send (GraVAC's
    multi-level compression); larger ones add what the sample says about the rest.

    Args:
      outlook: from `sample_bucket`.
      marks: the entries that were marked; in a dense step only for this estimate.
      rungs: what each rung sends, and which one is taken.
      sent: the energy of the marked entries.
      energy: `[]` float32, the energy of the bucket.
      is_blind: static, whether entries were chosen without regard to their size, so
        that each rung sends its share of the energy.

    Returns:
      `[rungs]` float32.
    """
    asked, sent_entries = jnp.asarray(rungs.counts, jnp.int32), marks.total
    within = sent.excess + asked.astype(jnp.float32) * outlook.thresholds
    is_left = ~entries.is_marked(marks, outlook.places)
    squares = jnp.where(is_left, outlook.squares, 0)
    # The sample's error in the tail is that of its total, which is known exactly.
    kept = jnp.maximum(energy - sent.energy, 0)
    share = kept / jnp.maximum(jnp.sum(squares), _arrays.SMALLEST_NORMAL)
    left = _excess_if(outlook.is_asked, squares, outlook.thresholds) * share
    missing = (asked - sent_entries).astype(jnp.float32)
    beyond = left + missing * outlook.thresholds
    if is_blind:
        shares = asked / jnp.maximum(sent_entries, 1)
        within = sent.energy * shares.astype(jnp.float32)
        rest = jnp.maximum(rungs.n - sent_entries, 1).astype(jnp.float32)
        beyond = kept * missing / rest
    return jnp.select(
        [asked == rungs.n, asked == rungs.sent_count, asked < sent_entries],
        [
            jnp.broadcast_to(energy, asked.shape),
            jnp.broadcast_to(sent.energy, asked.shape),
            jnp.minimum(within, sent.energy),
        ],
        jnp.minimum(sent.energy + beyond, energy),
    )


def shares_of_rungs(
    gradient: jax.Array, counts: tuple[int, ...], key: jax.Array, is_blind: bool = False
) -> jax.Array:
    """Estimate the share of a gradient's energy that each rung would send.

    Only a sample is read: the result is within a few percent on gradients, once several
    are averaged.

    Args:
      gradient: `[n]` float32.
      counts: static, entries that each rung sends.
      key: a random key.
      is_blind: static, whether entries are chosen without regard to their size.

    Returns:
      `[rungs]` float32.
    """
    n = gradient.size
    k = jnp.asarray(counts, jnp.float32)
    if is_blind or not n:
        return k / max(n, 1)
    places = quantile.sample_places(n, key, SHARES_SAMPLE_ENTRIES)
    squares = jnp.sort(jnp.square(gradient.at[places].get(mode="promise_in_bounds")))
    sums = jnp.append(jnp.zeros(1, jnp.float32), jnp.cumsum(squares[::-1]))
    ranks = jnp.arange(squares.size + 1, dtype=jnp.float32)
    # The sample may hold less than one of the k entries: interpolate linearly.
    reached = jnp.interp(k * (squares.size / n), ranks, sums)
    share = reached / jnp.maximum(sums[-1], _arrays.SMALLEST_NORMAL)
    return jnp.where(k == n, 1.0, jnp.minimum(share, 1.0))


def _excess_if(
    predicate: jax.Array | bool, x: jax.Array, thresholds: jax.Array
) -> jax.Array:
    """Return `_excess` if `predicate` (`[]` bool, or static) holds, else zeros."""
    # Made from both, the zeros are marked as varying over the replicas if these are.
    none = jnp.where(x[0] < 0, thresholds, 0.0)
    return _arrays.chosen(predicate, lambda: _excess(x, thresholds), none)


def _excess(x: jax.Array, thresholds: jax.Array) -> jax.Array:
    """Return the sum of what `x` (`[m]`) exceeds each threshold by: `[rungs]`."""
    above = lambda x, thresholds: jnp.maximum(x[None] - thresholds[:, None], 0)

    def row_by_row(x: jax.Array, thresholds: jax.Array) -> jax.Array:
        # Into as many sums as a row has entries. A plain sum adds one entry after the
        # other on a CPU, which takes ten times as long and rounds more.
        rows = jnp.pad(x, (0, -x.size % _ROW_ENTRIES)).reshape(-1, _ROW_ENTRIES)
        add = lambda total, row: (total + above(row, thresholds), None)
        # Begun from the first row, not from zeros, it is marked as varying if rows are.
        total, _ = jax.lax.scan(add, above(rows[0], thresholds), rows[1:])
        return jnp.sum(total, axis=1)

    def at_once(x: jax.Array, thresholds: jax.Array) -> jax.Array:
        return jnp.sum(above(x, thresholds), axis=1)

    return jax.lax.platform_dependent(x, thresholds, cpu=row_by_row, default=at_once)
