"""One replica chooses the places for all: values are added up on the way."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _checks, _collectives
from gravac_jax._collectives import FLOAT32_BYTES, Comm, Traffic
from gravac_jax._exchanges.base import Exchange, Kept, dense_if_cheaper
from gravac_jax._selection import Threshold, select_entries
from gravac_jax._selection.compressor import Compressor
from gravac_jax._selection.entries import PAD, Payload, drop, scatter, take
from gravac_jax._selection.rungs import Rungs
from gravac_jax._selection.select_entries import Selected
from gravac_jax._selection.wire_format import WireFormat

INDEX_BYTES = 4


class LeaderState(NamedTuple):
    """What one replica carries from step to step.

    Attributes:
      agreement: `[]` float32, the energy of this replica's bucket at the places chosen
        last, divided by that at its own choice; 1 at first.
      compressor: the compressor's state.
    """

    agreement: jax.Array
    compressor: Any


class _Prepared(NamedTuple):
    selected: Selected
    compressor: Any  # its new state
    turn: jax.Array  # [] int32, whose turn it is to lead, modulo N


class _Found(NamedTuple):
    places: jax.Array  # [capacity] int32, chosen by the leader; as in a payload
    energy: jax.Array  # [] of this replica's bucket at these places


@dataclasses.dataclass(frozen=True)
class LeaderIndices(Exchange):
    """All-reduces k entries at the places that one replica selects, each in its turn.

    Every replica sends its own values at these places, so the bytes do not grow with
    the number of replicas. It works as far as replicas agree on which entries are
    large, as the residuals of replicas that saw similar data do.

    Law:
      Only the leader sends its largest entries, so gains are lower than those of an
      all-gather: near 1 / N if replicas have nothing in common. The energy of the rung
      taken is exact. Those of other rungs are estimated from this replica's own
      selection and from how well the leader's places suited it last.

    Cost:
      Two ring all-reduces, of k indices and of k values: 4 (N - 1) alpha +
      2 (N - 1) / N 8 k beta, whatever N.

    Args:
      compressor: chooses the leader's entries.

    Raises:
      TypeError: if `compressor` is not a `gravac.Compressor`.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.LeaderIndices().traffic(1000, factor=100, replicas=4)
      Traffic(entries=10, payload_bytes=80, wire_bytes=120.0, messages=12)

    References:
      Chen et al., ScaleCom, NeurIPS 2020, CLT-k; Tyagi and Swany, AR-Topk, 2023, STAR.
    """

    compressor: Compressor = dataclasses.field(default_factory=Threshold)

    def __post_init__(self) -> None:
        _checks.component(self.compressor, Compressor, "compressor", "gravac.TopK()")

    @property
    def is_blind(self) -> bool:
        """Whether the compressor is blind."""
        return self.compressor.is_blind

    def init(self, n: int, ladder: tuple[float, ...]) -> LeaderState:
        """Return full agreement, and the compressor's state."""
        del ladder
        return LeaderState(jnp.float32(1), self.compressor.init(n))

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of 8 bytes an entry, in two collectives."""
        k = self.compressor.count(n, factor)
        payload_bytes = (INDEX_BYTES + FLOAT32_BYTES) * k
        traffic = _collectives.all_reduce_traffic(k, payload_bytes, replicas)
        traffic = traffic._replace(messages=2 * traffic.messages)
        return dense_if_cheaper(traffic, n, replicas)

    def prepare(
        self,
        bucket: jax.Array,
        state: LeaderState,
        rungs: Rungs,
        key: jax.Array,
        comm: Comm,
    ) -> _Prepared:
        """Select, on every replica: each may be the leader."""
        wire_format = WireFormat("float32", "int32", bucket.size)
        selected, compressor = select_entries.select(
            self.compressor, wire_format, bucket, state.compressor, rungs, key
        )
        return _Prepared(selected, compressor, jnp.asarray(rungs.step))

    def send(
        self, bucket: jax.Array, prepared: _Prepared, k: int, comm: Comm
    ) -> tuple[jax.Array, _Found]:
        """Share the leader's indices, then average everybody's values there."""
        leads = prepared.turn % comm.replicas == comm.replica()
        indices = comm.share(prepared.selected.payload.indices[:k], leads)
        values = take(bucket, indices).values
        mean = Payload(comm.mean(values), indices)
        places = jnp.concatenate([indices, _no_places(prepared, comm)[k:]])
        found = _Found(places, _arrays.energy(values))
        return scatter(mean, comm.zeros(bucket)), found

    def found_dense(
        self, bucket: jax.Array, prepared: _Prepared, mean: jax.Array, comm: Comm
    ) -> _Found:
        """Return no places, and the energy of the bucket."""
        return _Found(_no_places(prepared, comm), prepared.selected.energy)

    def conclude(
        self,
        bucket: jax.Array,
        state: LeaderState,
        prepared: _Prepared,
        found: _Found,
        rungs: Rungs,
    ) -> tuple[Kept, LeaderState]:
        """Keep what is not at the leader's places; learn how well they suited."""
        selected = prepared.selected
        own = jnp.sum(jnp.where(rungs.is_taken, selected.energies, 0))
        suited = jnp.where(own > 0, found.energy / jnp.where(own > 0, own, 1), 1)
        # A dense step shows no agreement. One bad leader must not end compression.
        forgotten = (state.agreement + 1) / 2
        is_sparse = rungs.sparse_count > 0
        agreement = jnp.where(is_sparse, jnp.clip(suited, 0, 1), forgotten)
        foreseen = jnp.minimum(selected.energies * agreement, selected.energy)
        is_dense = jnp.asarray(rungs.counts) == rungs.n
        foreseen = jnp.where(is_dense, selected.energy, foreseen)
        energies = jnp.where(rungs.is_taken, found.energy, foreseen)
        after = LeaderState(agreement, prepared.compressor)
        return Kept(drop(bucket, found.places), energies, selected.energy), after


def _no_places(prepared: _Prepared, comm: Comm) -> jax.Array:
    """Return indices of empty slots, marked as the same on all replicas."""
    capacity = prepared.selected.payload.indices.size
    zero = comm.zeros(prepared.selected.energy).astype(jnp.int32)
    return PAD + jnp.arange(capacity) + zero
