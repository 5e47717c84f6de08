"""What exchanges share that round rows of entries to a few values.

They know what each rung would send of the rows that they look at. These are all rows of
a bucket with fewer than 512 whole rows. Of a larger one they are 256 to 383 rows at
equal distances, so that a look costs little.
"""

import abc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays
from gravac_jax._carrier import Carrier
from gravac_jax._collectives import Comm
from gravac_jax._exchanges.base import Exchanged
from gravac_jax._exchanges.by_rung import ByRung

LOOKED_AT_ROWS = 256  # at least, of a bucket that has as many; arbitrary


class Energies(Carrier):
    """The other replicas, for an exchange that tells them what it has sent.

    Its figures are two energies, `[]` float32: that of what is sent of this replica's
    bucket, and that of the bucket.
    """

    def exchanged(self, mean: jax.Array, kept: jax.Array) -> Exchanged:
        """Return the outcome of the exchange; see `Exchanged`."""
        sent, energy = self.figures
        means = jnp.stack(self.mean_of_figures())
        return Exchanged(mean, kept, sent[None], energy, means)


class RoundingExchange(ByRung):
    """An exchange of rows, of which it knows what each rung would send."""

    @abc.abstractmethod
    def _row(self, n: int) -> int:
        """Return the entries of a row of a bucket of `n`."""

    def _rows(self, n: int) -> int:
        return -(-n // self._row(n))

    @abc.abstractmethod
    def _energies(
        self, rows: jax.Array, entries: jax.Array, each: Sequence[int]
    ) -> list[jax.Array]:
        """Return the energy of some rows that rungs would send.

        Args:
          rows: `[rows, entries]` float32, 0 in padding at their ends.
          entries: `[rows]` float32, the entries of each row without padding.
          each: what each rung sends of a row, in the unit of its count: entries of a
            payload, or words.
        """

    @abc.abstractmethod
    def _send(
        self, bucket: jax.Array, factor: float, step: jax.Array | int, comm: Comm
    ) -> Exchanged:
        """Exchange what a rung sends that is not dense.

        Args:
          bucket: `[n]` float32.
          factor: static.
          step: as for `exchange`.
          comm: the other replicas.
        """

    def at_rung(
        self,
        bucket: jax.Array,
        state: Any,
        factor: float,
        *,
        key: jax.Array,
        comm: Comm,
        step: jax.Array | int,
    ) -> tuple[Exchanged, Any]:
        """Average a bucket over replicas at a factor that is not dense."""
        return self._send(bucket, factor, step, comm), state

    def _in_rows(self, part: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        """Return entries in rows, padded by zeros, and the entries of each row."""
        n, rows = part.size, -(-part.size // length)
        padded = jnp.pad(part, (0, rows * length - n)).reshape(rows, length)
        # XLA would move the reshape into a sum, which its CPU backend then does slowly.
        padded = jax.lax.platform_dependent(
            padded, cpu=jax.lax.optimization_barrier, default=lambda x: x
        )
        entries = np.minimum(n - length * np.arange(rows), length)
        return padded, jnp.asarray(entries, jnp.float32)

    def _looked_at(
        self, bucket: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return all rows of a bucket, or some of many, and the entries of each."""
        length = self._row(bucket.size)
        whole = bucket.size // length
        apart = whole // LOOKED_AT_ROWS
        if apart < 2:
            return self._in_rows(bucket, length)
        rows = whole // apart
        groups = bucket[: rows * apart * length].reshape(rows, apart, length)
        first = (_arrays.draws(key)[0] % apart).astype(jnp.int32)
        some = jax.lax.dynamic_index_in_dim(groups, first, axis=1, keepdims=False)
        # Else XLA would find them in the leaves again, for everything that reads them.
        some = jax.lax.optimization_barrier(some)
        return some, jnp.full(rows, length, jnp.float32)

    def _shares(
        self, bucket: jax.Array, counts: Sequence[int], key: jax.Array
    ) -> jax.Array:
        """Return the share of a bucket's energy that rungs would send, `[rungs]`."""
        n, rows = bucket.size, self._rows(bucket.size)
        sparse = {k: k // rows for k in counts if k < n}
        if not sparse:
            return jnp.ones_like(bucket, shape=(len(counts),))
        some, entries = self._looked_at(bucket, key)
        energy = jnp.maximum(_arrays.energy(some), _arrays.SMALLEST_NORMAL)
        sent = self._energies(some, entries, [*sparse.values()])
        shares = {k: x / energy for k, x in zip(sparse, sent, strict=True)}
        one = jnp.ones_like(energy)
        return jnp.stack([shares.get(k, one) for k in counts])

    def bucket_shares(
        self, bucket: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Return the share of a bucket's energy that each rung would send.

        It is exact for fewer than 512 whole rows; for more, it is the share of the rows
        that are looked at.
        """
        counts = self.entries(bucket.size, ladder, comm.replicas)
        return self._shares(bucket, counts, key)
