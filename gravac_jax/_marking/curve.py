"""What other factors would have sent, from the payload of one and a sample.

The energy of the k largest of some squares is a minimum over thresholds (Rockafellar
and Uryasev, 2000, for the mean of a tail)::

    min over t of  sum_i max(squares_i - t, 0) + k t

It is flat at its minimum, so that a threshold which a tenth too many entries reach
costs about a thousandth of the energy: thresholds from a sample will do, and no sort.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _tree
from gravac_jax._marking import compaction, quantile
from gravac_jax._marking.collect import Collected
from gravac_jax._marking.compaction import Marks
from gravac_jax._marking.quantile import Bracket

FORESEEN_ENTRIES = 2**14  # of the sample for `shares`, arbitrary


class Outlook(NamedTuple):
    """What a sample says of the bucket, before anything is marked.

    Attributes:
      places: `[m]` int32, of the sample.
      squares: `[m]` float32.
      thresholds: `[rungs]` float32, squares that about the rung's count reach.
      bracket: of the magnitude that k entries reach.
      is_asked: whether other rungs than that taken are asked for, `[]` bool or static.
    """

    places: jax.Array
    squares: jax.Array
    thresholds: jax.Array
    bracket: Bracket
    is_asked: jax.Array | bool


def look(
    bucket: jax.Array,
    counts: tuple[int, ...],
    k: jax.Array,
    key: jax.Array,
    looks: jax.Array | bool = True,
) -> Outlook:
    """Find thresholds for all `counts`, and a bracket for `k`, in a sample.

    Args:
      bucket: `[n]` float32.
      counts: static, entries per rung.
      k: `[]` int32.
      key: a random key.
      looks: `[]` bool, whether the thresholds will be used; static True if always.
    """
    n = bucket.size
    places = quantile.sample_places(n, key)
    sampled = bucket.at[places].get(mode="promise_in_bounds")
    is_asked = looks if len(counts) > 1 else False  # of one rung all is known
    bits = quantile.thresholds(sampled, n, counts, is_asked)
    # A step that is dense and does not look marks nothing.
    is_marked = True if looks is True else k > 0
    bracket = quantile.bracket_from(sampled, n, k, is_marked)
    squares = jnp.square(compaction.from_bits(bits))
    return Outlook(places, jnp.square(sampled), squares, bracket, is_asked)


def shares(
    gradient: jax.Array, counts: tuple[int, ...], key: jax.Array, is_blind: bool = False
) -> jax.Array:
    """`[rungs]` float32, the share of its energy that each of `counts` would send.

    By a sample alone: within a few percent on gradients, once several are averaged.

    Args:
      gradient: `[n]` float32.
      counts: static, entries per rung.
      key: a random key.
      is_blind: static, whether entries are chosen without regard to their size.
    """
    n = gradient.size
    k = jnp.asarray(counts, jnp.float32)
    if is_blind or not n:
        return k / max(n, 1)
    places = quantile.sample_places(n, key, FORESEEN_ENTRIES)
    squares = jnp.sort(jnp.square(gradient.at[places].get(mode="promise_in_bounds")))
    sums = jnp.append(jnp.zeros(1, jnp.float32), jnp.cumsum(squares[::-1]))
    ranks = jnp.arange(squares.size + 1, dtype=jnp.float32)
    # Of which there may be less than one in the sample: linear in between.
    reached = jnp.interp(k * (squares.size / n), ranks, sums)
    share = reached / jnp.maximum(sums[-1], _tree.SMALLEST_NORMAL)
    return jnp.where(k == n, 1.0, jnp.minimum(share, 1.0))


def energies(
    outlook: Outlook,
    marks: Marks,
    counts: tuple[int, ...],
    k: jax.Array,
    sent: Collected,
    energy: jax.Array,
    n: int,
    is_blind: bool = False,
) -> jax.Array:
    """`[rungs]` float32, what each of `counts` would have sent of the bucket.

    Exact for `k` and for n; within 2% for others on gradients, where asked for.
    Smaller counts are read from the payload, which holds what they would send (GraVAC's
    multi-level compression); larger ones add what the sample says of the rest.

    Args:
      outlook: from `look`.
      marks: what was sent.
      counts: static, entries per rung.
      k: `[]` int32, what the rung taken sends: `n` if dense, when the marks are only
        looked at; 0 if skipped.
      sent: what was marked.
      energy: `[]` float32, of the bucket.
      n: static, entries of the bucket.
      is_blind: static, whether entries were chosen without regard to their size, so
        that each rung sends its share of them.
    """
    entries, sent_entries = jnp.asarray(counts, jnp.int32), marks.total
    within = sent.excess + entries.astype(jnp.float32) * outlook.thresholds
    is_left = ~compaction.is_marked(marks, outlook.places)
    squares = jnp.where(is_left, outlook.squares, 0)
    # What a sample says of the tail errs as what it says of the whole, which is known.
    kept = jnp.maximum(energy - sent.energy, 0)
    share = kept / jnp.maximum(jnp.sum(squares), _tree.SMALLEST_NORMAL)
    left = _tree.excess_if(outlook.is_asked, squares, outlook.thresholds) * share
    missing = (entries - sent_entries).astype(jnp.float32)
    beyond = left + missing * outlook.thresholds
    if is_blind:
        shares = entries / jnp.maximum(sent_entries, 1)
        within = sent.energy * shares.astype(jnp.float32)
        rest = jnp.maximum(n - sent_entries, 1).astype(jnp.float32)
        beyond = kept * missing / rest
    return jnp.select(
        [entries == n, entries == k, entries < sent_entries],
        [
            jnp.broadcast_to(energy, entries.shape),
            jnp.broadcast_to(sent.energy, entries.shape),
            jnp.minimum(within, sent.energy),
        ],
        jnp.minimum(sent.energy + beyond, energy),
    )
