"""Another exchange, of one fragment of the bucket in each step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _checks
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._exchanges.base import Exchange, Exchanged

ALIGNED_ENTRIES = 128  # a fragment begins where a vector register may


@dataclasses.dataclass(frozen=True)
class InTurn(Exchange):
    """Exchanges one of H fragments of each bucket in each step, all of them in H steps.

    Every entry goes as rarely as in rounds of H steps (`gravac.Every`), but every step
    sends the same few bytes, which a delay hides behind computation, where the last
    step of a round sends them all. What is not sent waits in the memory, so gradients
    are to be taken at own params: `gravac.train_step` does it.

    Law:
      Of the fragment whose turn it is, that of the other exchange; of the rest nothing
      is sent and all is kept. H steps send each entry at least once. Energies and
      gains are those of the fragment.

    Cost:
      That of the other exchange for `n / H` entries in each step.

    Args:
      fragments: H.
      inner: the exchange of a fragment; not `gravac.LowRank`, which needs matrices.

    Raises:
      TypeError: if `inner` is no exchange.
      ValueError: if `fragments` is not a positive integer, or `inner` needs matrices;
        from `gravac.transform`, if the controller has rounds.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.InTurn(8, gravac.QuantizedAllReduce())
      >>> exchange.traffic(4_096_000, factor=32, replicas=4).wire_bytes
      97500.0

    References:
      Douillard et al., Streaming DiLoCo, arXiv 2501.18512.
    """

    fragments: int
    inner: Exchange
    _turn: Any = dataclasses.field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        what = "parts of a bucket that are sent in turn"
        _checks.positive_integer(self.fragments, "fragments", what)
        _checks.component(self.inner, Exchange, "inner", "gravac.QuantizedAllReduce()")
        if self.inner.shaped(((2, 2),)) is not self.inner:
            raise ValueError(
                f"gravac.InTurn cuts buckets where {self.inner!r} needs whole matrices:"
                " use another exchange, such as gravac.QuantizedAllReduce()."
            )

    @property
    def is_blind(self) -> bool:
        """Whether entries are chosen without regard to their size."""
        return self.inner.is_blind

    @property
    def sends_whole_entries(self) -> bool:
        """Whether every entry is either sent or kept, apart from rounding."""
        return self.inner.sends_whole_entries

    @property
    def needs_every_step(self) -> bool:
        """Whether no step may be local: its number says whose turn it is."""
        return True

    def _length(self, n: int) -> int:
        """Return the entries of a fragment; the last one overlaps the one before."""
        length = -(-n // self.fragments)
        return min(n, -(-length // ALIGNED_ENTRIES) * ALIGNED_ENTRIES)

    def at_step(self, step: jax.Array) -> "InTurn":
        """Return this exchange with the fragment whose turn it is."""
        found = dataclasses.replace(self)
        object.__setattr__(found, "_turn", step % self.fragments)
        return found

    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """Return the states of the fragments' exchanges: `[fragments, ...]`."""
        one = self.inner.init(self._length(n), ladder)
        return jax.tree.map(lambda x: jnp.stack([x] * self.fragments), one)

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of exchanging one fragment."""
        return self.inner.traffic(self._length(n), factor, replicas)

    def energies_traffic(
        self, n: int, factor: float, rungs: int, replicas: int
    ) -> Traffic:
        """Return the cost of averaging the energies of one fragment."""
        return self.inner.energies_traffic(self._length(n), factor, rungs, replicas)

    def shares(
        self, gradient: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Estimate the share of a gradient's energy that each rung would send."""
        return self.inner.shares(gradient, ladder, key, comm)

    def exchange(
        self,
        bucket: jax.Array,
        state: Any,
        rung: jax.Array | np.int32,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
        comm: Comm,
        looks: jax.Array | bool = True,
    ) -> tuple[Exchanged, Any]:
        """Exchange the fragment whose turn it is."""
        n, length = bucket.size, self._length(bucket.size)
        start = jnp.minimum(self._turn * length, n - length)
        # Else XLA would make the bucket twice, for the fragment and for the rest.
        bucket = jax.lax.optimization_barrier(bucket)
        part = jax.lax.dynamic_slice(bucket, (start,), (length,))
        own = jax.tree.map(lambda x: x[self._turn], state)
        found, own = self.inner.exchange(
            part, own, rung, ladder=ladder, key=key, comm=comm, looks=looks
        )
        put = lambda x, part: jax.lax.dynamic_update_slice(x, part, (start,))
        return found._replace(
            mean=put(jnp.zeros_like(found.mean, shape=(n,)), found.mean),
            residual=put(bucket, found.residual),
        ), jax.tree.map(lambda x, y: x.at[self._turn].set(y), state, own)
