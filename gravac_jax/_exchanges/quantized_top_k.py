"""Every replica sends the largest entries of each row, in a few bits each."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _checks, _collectives
from gravac_jax._collectives import FLOAT32_BYTES, Comm, Traffic
from gravac_jax._exchanges import row_codes
from gravac_jax._exchanges.base import Kept, dense_if_cheaper
from gravac_jax._exchanges.rounding import Local, RoundingExchange
from gravac_jax._selection.entries import PAD, Payload, mean_of_payloads
from gravac_jax._selection.row_top_k import GROUP_ENTRIES, row_top_k
from gravac_jax._selection.rungs import Rungs


class _Told(NamedTuple):
    sent: Payload  # [capacity], what this replica sent, as others decode it
    own: jax.Array  # [rungs + 1], as `Local.energies`, with the rung that was taken
    energies: jax.Array  # [rungs + 1], their means over replicas


class _TopKLocal(NamedTuple):
    looked: Local
    no_entries: Payload  # [capacity] empty slots, as many as the largest payload has


@dataclasses.dataclass(frozen=True)
class QuantizedTopK(RoundingExchange):
    """All-gathers the largest entries of every row, in 14 or 13 bits each.

    For very high factors. A bucket is cut into rows of 4,096 entries. Of each row the
    k = max(1, round(row entries / factor)) largest magnitudes are sent: a place of 12
    bits, and a value of 2 bits (a sign and one of two magnitudes) or 1 bit (a sign). An
    entry takes 1.75 or 1.63 bytes, where `AllGather` takes 4, and each row 8 or 4 bytes
    for its magnitudes. Zeros are not sent.

    Law:
      What is sent of a row is orthogonal to what is kept of it, and no other two
      magnitudes would keep less of the k entries. Entries that are not selected stay in
      the residual to the last bit. Of those that are, sent + kept is the bucket within
      one unit in the last place of the larger. The energy of the rung taken is exact;
      those of others are estimated in buckets of 512 whole rows and more.

    Cost:
      (N - 1) alpha + (N - 1) (1.75 k + 8) beta a row, with 2 bits. On a CPU selection
      takes as long as ten passes over the bucket for 64 of 4,096 entries, and as one
      for 4. A step that looks at other rungs selects as many as the largest of them.

    Args:
      bits: of a value: 2 or 1.
      row_entries: entries that share magnitudes. Rows are shorter, by up to a half, if
        the bucket then divides into whole rows; a smaller bucket is one row.

    Raises:
      ValueError: if `bits` is neither 2 nor 1, or `row_entries` is not a positive whole
        number.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.QuantizedTopK()
      >>> exchange.traffic(409_600, factor=64, replicas=4)
      Traffic(entries=6400, payload_bytes=12000, wire_bytes=36000, messages=3)

    References:
      Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706, for rows of 4,096 and values of
      2 bits. Its values are the means of four cells at equal distances around the mean.
      A sign and the best two magnitudes drop about a third as much energy.
    """

    bits: int = 2
    row_entries: int = 4096

    def __post_init__(self) -> None:
        _checks.one_of(self.bits, "bits", row_codes.BITS)
        _checks.positive_integer(
            self.row_entries, "row_entries", "entries that share magnitudes"
        )

    def _row(self, n: int) -> int:
        """Return the entries of a row; groups of entries divide it if they can.

        Padding would cost a pass over the bucket.
        """
        if n <= self.row_entries:
            return max(n, 1)
        longest = self.row_entries // GROUP_ENTRIES * GROUP_ENTRIES
        lengths = range(longest, self.row_entries // 2, -GROUP_ENTRIES)
        return next((x for x in lengths if n % x == 0), self.row_entries)

    def _width(self, n: int) -> int:
        """Return the bits of an entry."""
        return row_codes.place_bits(self._row(n)) + self.bits

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of codes and magnitudes, or of a dense mean if it is less."""
        row, rows = self._row(n), self._rows(n)
        k = rows * max(1, round(row / factor))
        if factor == 1 or k >= n:
            return _collectives.mean_traffic(n, replicas)
        words = row_codes.words_of(k, self._width(n)) + self.bits * rows
        traffic = _collectives.all_gather_traffic(k, FLOAT32_BYTES * words, replicas)
        return dense_if_cheaper(traffic, n, replicas)

    def _energies(
        self, rows: jax.Array, entries: jax.Array, each: Sequence[int]
    ) -> list[jax.Array]:
        """Return the energy of some rows that rungs would send."""
        # The largest entries of a row are the first of more of them.
        values = row_top_k(rows.reshape(-1), rows.shape[1], max(each)).values
        levels = lambda m: row_codes.fit(values[:, :m], self.bits)
        return [jnp.sum(levels(m).sent) for m in each]

    def prepare(
        self, bucket: jax.Array, state: Any, rungs: Rungs, key: jax.Array, comm: Comm
    ) -> _TopKLocal:
        """Look at the rungs that are not taken, and lay out an empty payload."""
        looked = super().prepare(bucket, state, rungs, key, comm)
        capacity = max(k for k in rungs.counts if k < rungs.n)
        values = jnp.zeros_like(bucket, shape=(capacity,))
        slots = jnp.zeros_like(bucket, shape=(capacity,), dtype=jnp.int32)
        indices = slots + PAD + jnp.arange(capacity, dtype=jnp.int32)
        return _TopKLocal(looked, Payload(values, indices))

    def send(
        self, bucket: jax.Array, local: _TopKLocal, k: int, comm: Comm
    ) -> tuple[jax.Array, _Told]:
        """Gather all codes and magnitudes; the energies travel with them."""
        n, row, rows = bucket.size, self._row(bucket.size), self._rows(bucket.size)
        width = self._width(n)
        top = row_top_k(bucket, row, k // rows)
        levels = row_codes.fit(top.values, self.bits)
        codes = row_codes.encode(top, levels, self.bits)
        own = local.looked.own(jnp.sum(levels.sent))
        figures = jnp.concatenate([levels.scales.ravel(), own])
        words = row_codes.pack(codes.ravel(), width)
        as_words = jax.lax.bitcast_convert_type(figures, jnp.uint32)
        gathered = comm.gather(jnp.concatenate([words, as_words]))

        def decode(buffer: jax.Array) -> Payload:
            codes = row_codes.unpack(buffer[: words.size], k, width).reshape(rows, -1)
            scales = buffer[words.size : words.size + levels.scales.size]
            scales = jax.lax.bitcast_convert_type(scales, jnp.float32)
            return row_codes.decode(codes, scales.reshape(rows, -1), row)

        mean = mean_of_payloads(
            gathered, decode, comm.zeros(bucket), indices_are_sorted=False
        )
        energies = gathered[:, words.size + levels.scales.size :]
        energies = jax.lax.bitcast_convert_type(energies, jnp.float32)
        sent = row_codes.decode(codes, levels.scales, row)
        pairs = zip(sent, local.no_entries, strict=True)
        sent = Payload(*(jnp.concatenate([x, empty[k:]]) for x, empty in pairs))
        return mean, _Told(sent, own, jnp.mean(energies, axis=0))

    def told_dense(
        self, bucket: jax.Array, local: _TopKLocal, mean: jax.Array, comm: Comm
    ) -> _Told:
        """Take no entries, and average the energies."""
        own = local.looked.own(local.looked.energies[-1])
        return _Told(local.no_entries, own, comm.mean(own))

    def told_silent(self, bucket: jax.Array, local: _TopKLocal, comm: Comm) -> _Told:
        """Send nothing, not even energies."""
        own = local.looked.energies
        return _Told(local.no_entries, own, comm.zeros(own))

    def conclude(
        self,
        bucket: jax.Array,
        state: Any,
        local: _TopKLocal,
        told: _Told,
        rungs: Rungs,
    ) -> tuple[Kept, Any]:
        """Keep what was not selected, and what rounding dropped."""
        residual = bucket.at[told.sent.indices].add(
            -told.sent.values, mode="drop", unique_indices=True
        )
        return Kept(residual, told.own[:-1], told.own[-1], told.energies), state
