"""One replica chooses the places for all: values are added up on the way."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _checks, _comm, _payload, _selection, _tree
from gravac_jax._codec import Codec
from gravac_jax._comm import Comm
from gravac_jax._compressors import Threshold
from gravac_jax._compressors.base import Compressor
from gravac_jax._encoding import Float32, Int32
from gravac_jax._exchanges.base import Exchange, Exchanged, Traffic, in_branch
from gravac_jax._exchanges.dense import VALUE_BYTES, cheaper, dense_exchange
from gravac_jax._payload import PAD, Payload

INDEX_BYTES = 4
LEADERS = ("turn", "energy")


class LeaderState(NamedTuple):
    """What is known of others' choices.

    Attributes:
      turn: `[]` int32, exchanges so far: whose turn it is.
      agreement: `[]` float32, the energy of this replica's bucket at the places chosen
        last, over that at its own; 1 at first.
      compressor: the compressor's state.
    """

    turn: jax.Array
    agreement: jax.Array
    compressor: Any


@dataclasses.dataclass(frozen=True)
class LeaderIndices(Exchange):
    """An all-reduce of k entries, at the places that one replica selects.

    Every replica sends its own values there, so that what travels does not grow with
    the replicas. It works as far as replicas agree on which entries are large, as the
    residuals of replicas that saw the same data stream do.

    Law:
      Only the leader sends its largest entries, so that gains are lower than those of
      an all-gather: near 1 / N where replicas have nothing in common. What the others
      would have sent at another rung is told from their own selection and from how
      well the leader's places suited them last; it is exact for the rung taken.

    Cost:
      Two ring all-reduces, of k indices and of k values: 4 (N - 1) alpha +
      2 (N - 1) / N 8 k beta, whatever N. Led by energy, an all-gather of one number
      more.

    Args:
      compressor: chooses the leader's entries.
      leader: "turn" for each replica in its turn, "energy" for the one whose selection
        holds the most, of equal ones the first.

    Raises:
      TypeError: if `compressor` is none.
      ValueError: if `leader` is neither.

    Example:
      >>> import gravac_jax as gravac
      >>> gravac.LeaderIndices().traffic(1000, factor=100, replicas=4)
      Traffic(entries=10, payload_bytes=80, wire_bytes=120.0, messages=12)

    References:
      Chen et al., ScaleCom, NeurIPS 2020, CLT-k; Tyagi and Swany, AR-Topk, 2023, STAR
      and VAR.
    """

    compressor: Compressor = dataclasses.field(default_factory=Threshold)
    leader: str = "turn"

    def __post_init__(self) -> None:
        _checks.component(self.compressor, Compressor, "compressor", "gravac.TopK()")
        _checks.one_of(self.leader, "leader", LEADERS)

    @property
    def is_blind(self) -> bool:
        """If the compressor is."""
        return self.compressor.is_blind

    @property
    def is_ordered(self) -> bool:
        """If they lead in turn."""
        return self.leader == "turn"

    def init(self, n: int, ladder: tuple[float, ...]) -> LeaderState:
        """The first replica's turn."""
        del ladder
        return LeaderState(jnp.int32(0), jnp.float32(1), self.compressor.init(n))

    def exchange(
        self,
        bucket: jax.Array,
        state: LeaderState,
        rung: jax.Array,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
        comm: Comm,
        looks: jax.Array | bool = True,
    ) -> tuple[Exchanged, LeaderState]:
        """Everybody selects, and the leader's indices are used."""
        n, rungs = bucket.size, jnp.arange(len(ladder))
        counts = self.entries(n, ladder, comm.replicas)
        if min(counts) == n:
            return dense_exchange(bucket, rung, len(ladder), comm), state
        slots = _selection.slots(counts, n, rung, looks)
        codec = Codec(Float32(), Int32(), n)
        own, compressor = _selection.select(
            self.compressor, codec, bucket, state.compressor, slots, key
        )
        mine = jnp.sum(jnp.where(rungs == rung, own.energies, 0))
        zero = comm.zeros(own.energy)
        empty = PAD + jnp.arange(max(slots.sparse)) + zero.astype(jnp.int32)

        def at_the_leaders(k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
            leads = self._leader(state, mine, comm) == comm.replica()
            indices = comm.share(own.payload.indices[:k], leads)
            values = _payload.take(bucket, indices).values
            mean = Payload(comm.mean(values), indices)
            places = jnp.concatenate([indices, empty[k:]])
            zeros = comm.zeros(bucket)
            return _payload.spread(mean, zeros), places, _tree.energy(values)

        mean, places, sent = in_branch(
            rung,
            counts,
            n,
            sparse=at_the_leaders,
            dense=lambda: (comm.mean(bucket), empty, own.energy),
            nothing=lambda: (comm.zeros(bucket), empty, comm.cast(zero)),
        )
        is_sparse = (slots.sent > 0) & (slots.sent < n)
        found = jnp.where(mine > 0, sent / jnp.where(mine > 0, mine, 1), 1)
        # A dense step shows no agreement. One bad leader must not end compression.
        forgotten = (state.agreement + 1) / 2
        agreement = jnp.where(is_sparse, jnp.clip(found, 0, 1), forgotten)
        foreseen = jnp.minimum(own.energies * agreement, own.energy)
        foreseen = jnp.where(jnp.asarray(counts) == n, own.energy, foreseen)
        energies = jnp.where(rungs == rung, sent, foreseen)
        rest = _payload.drop(bucket, places)
        residual = jnp.where(slots.sent == n, 0, rest)
        state = LeaderState(state.turn + 1, agreement, compressor)
        return Exchanged(mean, residual, energies, own.energy), state

    def _leader(self, state: LeaderState, mine: jax.Array, comm: Comm) -> jax.Array:
        """`[]` int32, which replica leads."""
        if self.leader == "turn":
            return state.turn % comm.replicas
        return jnp.argmax(comm.gather(mine)).astype(jnp.int32)

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """8 bytes an entry, and one number if it is led by energy."""
        k = self.compressor.count(n, factor)
        payload_bytes = (INDEX_BYTES + VALUE_BYTES) * k
        wire_bytes = _comm.mean_wire_bytes(payload_bytes, replicas)
        messages = 2 * _comm.mean_messages(replicas)
        if self.leader == "energy":
            payload_bytes += VALUE_BYTES
            wire_bytes += _comm.gather_wire_bytes(VALUE_BYTES, replicas)
            messages += _comm.gather_messages(replicas)
        traffic = Traffic(k, payload_bytes, wire_bytes, messages)
        return cheaper(traffic, n, replicas)
