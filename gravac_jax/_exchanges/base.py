"""The interface of exchanges, and its laws.

An exchange is the only thing that both selects and communicates. The rung is decided
before it begins, from the evidence of earlier steps; what it returns beside the mean is
the evidence for the next decision.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax._comm import Comm
from gravac_jax._marking import curve


class Exchanged(NamedTuple):
    """What an exchange leaves on one replica.

    Attributes:
      mean: `[n]` float32, the mean over replicas of what was sent.
      residual: `[n]` float32, what this replica did not send.
      energies: `[rungs]` float32, the energy of this replica's bucket that each rung
        would have sent; exact for the rung that was taken, and all that is known if the
        step does not look at others.
      energy: `[]` float32, the energy of the whole bucket.
      mean_energies: `[rungs + 1]` float32, the means over replicas of `energies` and,
        last, of `energy`, where these travelled with the entries; None where they are
        still to be averaged.
    """

    mean: jax.Array
    residual: jax.Array
    energies: jax.Array
    energy: jax.Array
    mean_energies: jax.Array | None = None

    @property
    def own_energies(self) -> jax.Array:
        """What `mean_energies` is the mean of."""
        return jnp.append(self.energies, self.energy)


class Traffic(NamedTuple):
    """What one exchange costs one replica; all static.

    Attributes:
      entries: how many entries of the bucket are sent.
      payload_bytes: what one replica puts into the collective.
      wire_bytes: what one replica sends for it.
      messages: how many it sends one after the other, each when the one before has
        arrived: 2 (N - 1) in a ring all-reduce, N - 1 in a ring all-gather.
    """

    entries: int
    payload_bytes: float
    wire_bytes: float
    messages: int


class Exchange(abc.ABC):
    """Averages buckets over replicas, sending as much of them as the rung says.

    Law:
      On every replica `sent = bucket - residual` holds exactly, `mean` is the mean of
      `sent` over replicas (float32, payloads added in the order of the replicas, within
      `tolerance`) and the same on all of them. A rung of factor 1 sends everything, and
      a rung beyond the ladder, that of a step that is skipped, nothing.
    """

    @property
    def is_blind(self) -> bool:
        """Whether entries are chosen without regard to their size."""
        return False

    @property
    def is_ordered(self) -> bool:
        """Whether it matters which replica is which."""
        return False

    @property
    def is_rounded(self) -> bool:
        """Whether the mean is rounded further, and a dense rung leaves a residual."""
        return False

    @property
    def tolerance(self) -> float:
        """How far float32 may take the mean from that of what was sent.

        As a share of the largest entry of a bucket; 0 where a part of every entry is
        sent, and added up as it is.
        """
        return 0.0

    def shaped(self, shapes: tuple[tuple[int, ...], ...]) -> "Exchange":
        """The same exchange for buckets that hold arrays of these `shapes`: itself."""
        del shapes
        return self

    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """This replica's state for a bucket of `n` entries: none."""
        del n, ladder
        return ()

    @abc.abstractmethod
    def exchange(
        self,
        bucket: jax.Array,
        state: Any,
        rung: jax.Array,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
        comm: Comm,
        looks: jax.Array | bool = True,
    ) -> tuple[Exchanged, Any]:
        """Send what `rung` says.

        Args:
          bucket: `[n]` float32, the compensated gradient of this replica.
          state: from `init` or the last step.
          rung: `[]` int32, the same on every replica; `len(ladder)` to send nothing.
          ladder: static factors, rising.
          key: a random key, the same on every replica, new at every step.
          comm: the other replicas.
          looks: whether the step looks at what other rungs would have sent, `[]` bool,
            the same on every replica; static True if all steps do.

        Returns:
          What came of it, and the new state.
        """

    def entries(self, n: int, ladder: Sequence[float], replicas: int) -> list[int]:
        """How many entries of a bucket of `n` each rung sends."""
        return [self.traffic(n, factor, replicas).entries for factor in ladder]

    def shares(
        self, gradient: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """What each rung would send of a gradient, had nothing been held back.

        Args:
          gradient: `[n]` float32, this replica's own.
          ladder: static factors.
          key: as for `exchange`.
          comm: the other replicas.

        Returns:
          `[rungs]` float32, shares of its energy: of the largest entries, which stand
          in for directions and for places that another replica chose, too.
        """
        counts = tuple(self.entries(gradient.size, ladder, comm.replicas))
        return curve.shares(gradient, counts, key, self.is_blind)

    def is_replaced(self, n: int, factor: float, replicas: int) -> bool:
        """Whether `factor` is a dense step for so many replicas, and not for one."""
        entries = lambda replicas: self.traffic(n, factor, replicas).entries
        return entries(replicas) == n > entries(1)

    @abc.abstractmethod
    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """The cost of one exchange of a bucket of `n` entries at `factor`."""

    def energies_traffic(
        self, n: int, factor: float, rungs: int, replicas: int
    ) -> Traffic | None:
        """What is added where the energies of `rungs` travel with the entries.

        None where they do not: `Exchanged.mean_energies` is None then, for any bucket.
        """
        del n, factor, rungs, replicas
        return None


def in_branch(
    rung: jax.Array,
    counts: Sequence[int],
    n: int,
    *,
    sparse: Callable[[int], Any],
    dense: Callable[[], Any],
    nothing: Callable[[], Any],
) -> Any:
    """Run the branch of `rung` (`[]` int32): shapes are static in XLA.

    Args:
      rung: traced.
      counts: how many entries each rung sends,
      n: of so many; a rung that sends all is dense.
      sparse: the branch of so many slots.
      dense: that of a dense rung.
      nothing: that of a step that is skipped, beyond the ladder.
    """
    branch = lambda k: dense if k == n else functools.partial(sparse, k)
    return jax.lax.switch(rung, [*map(branch, counts), nothing])
