"""Another exchange, of one fragment of the bucket in each step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _checks
from gravac_jax._collectives import Traffic
from gravac_jax._exchanges.base import Exchange, Exchanged

ALIGNED_ENTRIES = 128  # a fragment begins where a vector register may


@dataclasses.dataclass(frozen=True)
class InTurn(Exchange):
    """Exchanges one of H fragments of each bucket in each step, all of them in H steps.

    Every entry goes as rarely as in rounds of H steps (`gravac.Every`). But every step
    sends the same few bytes, which a delay hides behind computation, where the last
    step of a round sends them all. What is not sent waits in the memory, so take
    gradients at own params, as `gravac.train_step` does.

    The width or factor must be fixed, because a controller would not see that the other
    fragments wait. For the same reason an outer optimizer (`gravac.outer`) does not
    suit it: it would step in every step, also on fragments that are not due.

    Law:
      The due fragment obeys the law of `inner`. The rest of the bucket is kept. H steps
      in a row send each entry at least once, if none is bad. Energies and gains are
      those of the fragment.

    Cost:
      The cost of `inner` for a fragment: `n / H` entries, rounded up to a multiple of
      128, so that small buckets have fewer fragments than H.

    Args:
      fragments: H.
      inner: the exchange of a fragment; not `gravac.LowRank`, which needs matrices.
      step: `[]` int32, the number of the step, which picks the fragment.
        `gravac.transform` fills it in.

    Raises:
      TypeError: if `inner` is no exchange.
      ValueError: if `fragments` is not a positive integer, or `inner` needs matrices or
        is an `InTurn`; from `gravac.transform`, if the controller is not fixed or has
        rounds, or if the memory forgets what waits.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.InTurn(8, gravac.QuantizedAllReduce())
      >>> exchange.traffic(4_096_000, factor=32, replicas=4).wire_bytes
      99840.0

    References:
      Douillard et al., Streaming DiLoCo, arXiv 2501.18512.
    """

    fragments: int
    inner: Exchange
    step: Any = dataclasses.field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        what = "parts of a bucket that are sent in turn"
        _checks.positive_integer(self.fragments, "fragments", what)
        _checks.component(self.inner, Exchange, "inner", "gravac.QuantizedAllReduce()")
        needs_matrices = self.inner.shaped(((2, 2),)) is not self.inner
        if needs_matrices or self.inner.needs_every_step:
            raise ValueError(
                f"gravac.InTurn cuts buckets into fragments, which {self.inner!r}"
                " cannot exchange: use another exchange, such as"
                " gravac.QuantizedAllReduce()."
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

    def _count(self, n: int) -> int:
        """Return the fragments of a bucket, 1 of an empty one."""
        return -(-n // self._length(n)) if n else 1

    def at_step(self, step: jax.Array) -> "InTurn":
        """Return this exchange with the number of the step, which picks a fragment."""
        return dataclasses.replace(self, step=step)

    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """Return the states of the fragments' exchanges: `[fragments, ...]`."""
        one = self.inner.init(self._length(n), ladder)
        return jax.tree.map(lambda x: jnp.stack([x] * self._count(n)), one)

    def is_replaced(self, n: int, factor: float, replicas: int) -> bool:
        """Return whether `factor` is dense only because there are so many replicas."""
        return self.inner.is_replaced(self._length(n), factor, replicas)

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of exchanging one fragment."""
        return self.inner.traffic(self._length(n), factor, replicas)

    def energies_traffic(
        self, n: int, factor: float, rungs: int, replicas: int
    ) -> Traffic:
        """Return the cost of averaging the energies of one fragment."""
        return self.inner.energies_traffic(self._length(n), factor, rungs, replicas)

    def exchange(
        self, bucket: jax.Array, state: Any, rung: jax.Array | np.int32, **others: Any
    ) -> tuple[Exchanged, Any]:
        """Exchange the fragment that is due; `others` are for the exchange of it."""
        n, length = bucket.size, self._length(bucket.size)
        turn = self.step % self._count(n)
        start = jnp.minimum(turn * length, n - length)
        # Else XLA would make the bucket twice, for the fragment and for the rest.
        bucket = jax.lax.optimization_barrier(bucket)
        part = jax.lax.dynamic_slice(bucket, (start,), (length,))
        own = jax.tree.map(lambda x: x[turn], state)
        found, own = self.inner.exchange(part, own, rung, **others)
        put = lambda x, part: jax.lax.dynamic_update_slice(x, part, (start,))
        return found._replace(
            mean=put(jnp.zeros_like(found.mean, shape=(n,)), found.mean),
            residual=put(bucket, found.residual),
        ), jax.tree.map(lambda x, y: x.at[turn].set(y), state, own)
