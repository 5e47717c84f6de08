"""Every replica sends every entry, in a few bits each."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _checks, _collectives
from gravac_jax._collectives import FLOAT32_BYTES, Comm, Traffic
from gravac_jax._exchanges import quantizer
from gravac_jax._exchanges.base import Kept, dense_if_cheaper
from gravac_jax._exchanges.quantizer import SCALES, WIDTHS, WORD_BITS, Levels
from gravac_jax._exchanges.rounding import Local, RoundingExchange
from gravac_jax._selection.rungs import Rungs

SMALL_BUCKET_ROWS = 16  # rows of a bucket that is too small for rows of full length


class Told(NamedTuple):
    """What the branch of a rung found out.

    Attributes:
      kept: `[n]` float32, what rounding dropped; zeros if the rung is dense, and the
        bucket if it is silent.
      own: `[rungs + 1]` float32, as `Local.energies`, with the rung that was taken.
      energies: `[rungs + 1]` float32, their means over replicas.
    """

    kept: jax.Array
    own: jax.Array
    energies: jax.Array


@dataclasses.dataclass(frozen=True)
class Quantized(RoundingExchange):
    """All-gathers all entries in 8, 4, 2 or 1 bits, with two scales for every row.

    A rung of factor 4 sends 8 bits an entry in place of 32, factor 8 sends 4 bits,
    factor 16 sends 2, and factor 32 sends 1; between them, the next fewer. Nothing is
    selected and no index travels. It suits what has entries of like size, such as the
    steps of Adam, of which a sparse exchange would send little.

    Law:
      What is sent of a row is orthogonal to what is kept of it, so the gain of a row is
      the squared cosine between both: at least 1 / `row_entries`, and 0.64, 0.87, 0.96
      of a Gaussian at 1, 2 and 4 bits. Products round, so sent + kept is the bucket
      within one unit in the last place of the larger. `Traffic.entries` counts words of
      32 bits.

    Cost:
      (N - 1) alpha + (N - 1) b n / 8 beta with b bits an entry, and 8 bytes a row.
      A dense ring costs 2 (N - 1) / N 4 n beta: 64 / (N b) times as much. Widths for
      which that is below 1 are dense.

    Args:
      row_entries: entries that share a scale, a multiple of 32. They are fewer, down to
        a quarter, if a bucket then divides into whole rows, and in buckets of fewer
        than 16 such rows.

    Raises:
      ValueError: if `row_entries` is not a positive multiple of 32.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.Quantized()
      >>> exchange.traffic(409_600, factor=32, replicas=4)
      Traffic(entries=12800, payload_bytes=52000, wire_bytes=156000, messages=3)

    References:
      Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et
      al., Error feedback fixes SignSGD, ICML 2019, whose scale is this one.
    """

    row_entries: int = 4096

    def __post_init__(self) -> None:
        _checks.positive_integer(
            self.row_entries, "row_entries", "entries that share a scale"
        )
        if self.row_entries % WORD_BITS:
            raise ValueError(
                f"row_entries must be a multiple of {WORD_BITS}, got"
                f" {self.row_entries}: codes of a row share words of 32 bits."
            )

    @property
    def sends_whole_entries(self) -> bool:
        """Whether entries are either sent or kept: no, all are sent rounded."""
        return False

    def _row(self, n: int) -> int:
        """Return the entries of a row: at best as many as divide `n` without a rest.

        Padding would cost passes over the bucket. A small bucket has shorter rows, so
        that a few replicas can own equal parts of it.
        """
        part = -(-n // (SMALL_BUCKET_ROWS * WORD_BITS)) * WORD_BITS
        longest = min(self.row_entries, max(part, WORD_BITS))
        shortest = longest // 4
        lengths = range(longest, max(shortest, WORD_BITS) - 1, -WORD_BITS)
        return next((x for x in lengths if n % x == 0), longest)

    def bits(self, factor: float) -> int:
        """Return the bits of an entry at `factor`: as many as it allows, at least 1."""
        return next((b for b in WIDTHS if b * factor <= WORD_BITS), min(WIDTHS))

    def _plane_words(self, n: int) -> int:
        """Return the words that one bit of every entry takes."""
        return self._rows(n) * self._row(n) // WORD_BITS

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of the packed words, or of a dense mean if that is less."""
        if factor == 1:
            return _collectives.mean_traffic(n, replicas)
        words = self.bits(factor) * self._plane_words(n)
        payload_bytes = FLOAT32_BYTES * (words + SCALES * self._rows(n))
        traffic = _collectives.all_gather_traffic(words, payload_bytes, replicas)
        return dense_if_cheaper(traffic, n, replicas)

    def _energies(
        self, rows: jax.Array, entries: jax.Array, each: Sequence[int]
    ) -> list[jax.Array]:
        """Return the energy of some rows that rungs would send."""
        widths = [words * WORD_BITS // rows.shape[1] for words in each]

        def look(rows: jax.Array) -> list[jax.Array]:
            return [jnp.sum(quantizer.fit(rows, entries, x).sent) for x in widths]

        return quantizer.by_blocks(look, rows)

    def _round(
        self, bucket: jax.Array, bits: int
    ) -> tuple[jax.Array, Levels, jax.Array]:
        """Return the bucket's words, their levels, and what rounding drops."""
        words, levels, kept = quantizer.round_rows(*self._in_rows(bucket), bits)
        return words, levels, kept.reshape(-1)[: bucket.size]

    def send(
        self, bucket: jax.Array, local: Local, k: int, comm: Comm
    ) -> tuple[jax.Array, Any]:
        """Gather all words and scales; the energies travel with them."""
        bits, rows = k // self._plane_words(bucket.size), self._rows(bucket.size)
        words, levels, kept = self._round(bucket, bits)
        own = local.own(jnp.sum(levels.sent))
        figures = jnp.concatenate([levels.scales.reshape(-1), own])
        as_words = jax.lax.bitcast_convert_type(figures, jnp.uint32)
        gathered = comm.gather(jnp.concatenate([words.reshape(-1), as_words]))

        figures = jax.lax.bitcast_convert_type(gathered[:, k:], jnp.float32)
        scales, energies = jnp.split(figures, [SCALES * rows], axis=1)

        def add_up() -> jax.Array:
            sent = gathered[:, :k].reshape(-1, *words.shape)
            return quantizer.mean(sent, scales.reshape(-1, rows, SCALES), bits)

        mean = _arrays.kernel(add_up, scales).reshape(-1)[: bucket.size]
        return mean, Told(kept, own, jnp.mean(energies, axis=0))

    def told_dense(
        self, bucket: jax.Array, local: Local, mean: jax.Array, comm: Comm
    ) -> Any:
        """Keep nothing, and average the energies."""
        own = local.own(local.energies[-1])
        return Told(jnp.zeros_like(bucket), own, comm.mean(own))

    def told_silent(self, bucket: jax.Array, local: Local, comm: Comm) -> Any:
        """Send nothing, not even energies, and keep the bucket."""
        return Told(bucket, local.energies, comm.zeros(local.energies))

    def conclude(
        self,
        bucket: jax.Array,
        state: Any,
        local: Local,
        told: Told,
        rungs: Rungs,
    ) -> tuple[Kept, Any]:
        """Keep what rounding dropped."""
        return Kept(told.kept, told.own[:-1], told.own[-1], told.energies), state

    def _held_back(self, bucket: jax.Array, kept: Kept, rungs: Rungs) -> jax.Array:
        """Return the residual: where there are branches, each has said it."""
        if len(rungs.counts) > 1:
            return kept.residual
        return super()._held_back(bucket, kept, rungs)
