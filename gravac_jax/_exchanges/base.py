"""The interface of exchanges, and its laws.

An exchange is the only thing that both selects and communicates. It works in two
halves, because GraVAC decides between them: `select` is local and says how much energy
each rung would send; `exchange` runs the rung that was decided, collectives inside.
An exchange that must communicate before it knows what it sends does all its work in
the second half, and estimates in the first.
"""

import abc
from typing import Any, NamedTuple

import jax

from gravac_jax._comm import Comm


class Selection(NamedTuple):
    """What `select` hands to the decision and to `exchange`.

    Attributes:
      energies: `[rungs]` float32, the energy of this replica that each rung would send.
      energy: `[]` float32, the energy of the whole bucket.
      payload: whatever `exchange` needs to send it; opaque to everybody else.
    """

    energies: jax.Array
    energy: jax.Array
    payload: Any


class Traffic(NamedTuple):
    """What one exchange costs one replica; all static.

    Attributes:
      entries: how many entries of the bucket are sent.
      payload_bytes: what one replica puts into the collective.
      wire_bytes: what one replica sends for it.
    """

    entries: int
    payload_bytes: float
    wire_bytes: float


class Exchange(abc.ABC):
    """Averages buckets over replicas, sending as much of them as the rung says.

    Law:
      On every replica `sent = bucket - residual` holds exactly, `mean` is the mean of
      `sent` over replicas (float32, payloads added in the order of the replicas) and
      the same on all of them, and a rung of factor 1 sends everything.
    """

    @abc.abstractmethod
    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """This replica's state for a bucket of `n` entries."""

    @abc.abstractmethod
    def select(
        self,
        bucket: jax.Array,
        state: Any,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
    ) -> tuple[Selection, Any]:
        """Choose what each rung would send; no communication.

        Args:
          bucket: `[n]` float32, the compensated gradient of this replica.
          state: from `init` or the last step.
          ladder: static factors, rising.
          key: a random key, the same on every replica, new at every step.

        Returns:
          The selection and the new state.
        """

    @abc.abstractmethod
    def exchange(
        self,
        bucket: jax.Array,
        selection: Selection,
        rung: jax.Array,
        *,
        ladder: tuple[float, ...],
        comm: Comm,
    ) -> tuple[jax.Array, jax.Array]:
        """Send what `rung` says.

        Args:
          bucket: `[n]` float32, as given to `select`.
          selection: from `select`.
          rung: `[]` int32, the same on every replica.
          ladder: static factors, rising.
          comm: the other replicas.

        Returns:
          mean: `[n]` float32, the mean over replicas of what was sent.
          residual: `[n]` float32, what this replica did not send.
        """

    @abc.abstractmethod
    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """The cost of one exchange of a bucket of `n` entries at `factor`."""
