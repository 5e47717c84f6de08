"""Every replica sends the largest entries of each row, in a few bits each."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _checks, _collectives
from gravac_jax._collectives import FLOAT32_BYTES, Comm, Traffic
from gravac_jax._exchanges import row_codes
from gravac_jax._exchanges.base import Exchanged, dense_if_cheaper
from gravac_jax._exchanges.rounding import Energies, RoundingExchange
from gravac_jax._selection.entries import Payload, mean_of_payloads
from gravac_jax._selection.row_top_k import GROUP_ENTRIES, row_top_k


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

    def _send(
        self, bucket: jax.Array, factor: float, step: jax.Array | int, comm: Comm
    ) -> Exchanged:
        """Gather all codes and magnitudes; the energies travel with them."""
        del step
        n, row, rows = bucket.size, self._row(bucket.size), self._rows(bucket.size)
        k = self.traffic(n, factor, comm.replicas).entries
        width = self._width(n)
        top = row_top_k(bucket, row, k // rows)
        levels = row_codes.fit(top.values, self.bits)
        codes = row_codes.encode(top, levels, self.bits)
        figures = jnp.sum(levels.sent), _arrays.energy(bucket)
        comm = Energies.on(comm, figures)
        words = row_codes.pack(codes.ravel(), width)
        scales = _arrays.to_words(levels.scales.ravel())
        gathered = comm.gather(jnp.concatenate([words, scales]))

        def decode(buffer: jax.Array) -> Payload:
            codes = row_codes.unpack(buffer[: words.size], k, width).reshape(rows, -1)
            scales = _arrays.from_words(buffer[words.size :]).reshape(rows, -1)
            return row_codes.decode(codes, scales, row)

        mean = mean_of_payloads(
            gathered, decode, comm.zeros(bucket), indices_are_sorted=False
        )
        sent = row_codes.decode(codes, levels.scales, row)
        kept = bucket.at[sent.indices].add(
            -sent.values, mode="drop", unique_indices=True
        )
        return comm.exchanged(mean, kept)
