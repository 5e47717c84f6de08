"""Few bits of all entries at some factors, and few entries at others."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _checks
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._exchanges.all_gather import AllGather
from gravac_jax._exchanges.base import Exchange, Exchanged
from gravac_jax._exchanges.by_rung import ByRung
from gravac_jax._exchanges.quantized import Quantized
from gravac_jax._exchanges.quantized_all_reduce import QuantizedAllReduce
from gravac_jax._exchanges.quantized_top_k import QuantizedTopK


@dataclasses.dataclass(frozen=True)
class Mixed(ByRung):
    """Sends few entries at the factors named, and few bits at all others.

    Which of the two keeps more of a gradient depends on the model. Where a step sees
    few rows of a large embedding, a hundredth of the entries has most of a gradient's
    energy. Where entries are of like size, a few bits of all of them have. With rungs
    of both, a controller takes what the gradients ask for. Without a controller,
    `gravac.transform(exchange=gravac.Mixed())` has `Fastest` with all of these rungs.

    Small leaves go dense by default, as with other exchanges that select entries;
    `compress=True` compresses them.

    Take gradients at own params, as `gravac.train_step` does. Where entries are of like
    size, a factor of 1000 is worth less than is predicted (the record
    2026-11-26_sparse_progress), and programs with selections take longer to compile, so
    `Mixed` is not the default.

    Law:
      At every rung, that of the exchange that takes it. What other rungs would send is
      estimated by both, in a step that looks. `init` warns if a sparse factor is none
      of the controller's.

    Cost:
      At every rung, that of the exchange that takes it; the energies of all rungs
      travel along. Nothing is selected at a rung of few bits.

    Args:
      sparse_factors: the factors of the ladder at which `sparse` exchanges, rising.
      few_bits: the exchange at all other factors: `Quantized`, or `QuantizedAllReduce`,
        the default.
      sparse: the exchange at `sparse_factors`: `AllGather`, the default, or
        `QuantizedTopK`.

    Raises:
      TypeError: if `few_bits` or `sparse` is another exchange, or `sparse_factors` is
        not a tuple of numbers.
      ValueError: if a factor is below 1, or they do not rise.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.Mixed(sparse_factors=(100.0,))
      >>> exchange.traffic(409_600, factor=16, replicas=4).entries
      25600
      >>> exchange.traffic(409_600, factor=100, replicas=4).entries
      4096
    """

    sparse_factors: tuple[float, ...] = (100.0, 1000.0)
    few_bits: Quantized = dataclasses.field(default_factory=QuantizedAllReduce)
    sparse: AllGather | QuantizedTopK = dataclasses.field(default_factory=AllGather)

    def __post_init__(self) -> None:
        _checks.ladder(self.sparse_factors, "sparse_factors")
        few_bits = "gravac.QuantizedAllReduce()"
        _checks.component(self.few_bits, Quantized, "few_bits", few_bits)
        if not isinstance(self.sparse, QuantizedTopK):
            _checks.component(self.sparse, AllGather, "sparse", "gravac.AllGather()")

    @property
    def _exchanges(self) -> tuple[Exchange, Exchange]:
        return self.few_bits, self.sparse

    def _place(self, factor: float) -> int:
        """Return the place of the exchange that takes a rung."""
        return int(factor in self.sparse_factors)

    def _at(self, factor: float) -> Exchange:
        """Return the exchange that takes a rung."""
        return self._exchanges[self._place(factor)]

    def _factors(self, place: int, ladder: Sequence[float]) -> tuple[float, ...]:
        """Return the factors of a ladder that one of the exchanges takes."""
        return tuple(factor for factor in ladder if self._place(factor) == place)

    @property
    def sends_whole_entries(self) -> bool:
        """Whether entries are either sent or kept: no, in few bits all are rounded."""
        return False

    def shaped(self, shapes: tuple[tuple[int, ...], ...]) -> "Mixed":
        """Return this exchange with few bits of arrays of these `shapes`."""
        return dataclasses.replace(self, few_bits=self.few_bits.shaped(shapes))

    def padded_size(self, n: int) -> int:
        """Return the size of a bucket that suits few bits."""
        return self.few_bits.padded_size(n)

    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """Return the states of both exchanges."""
        if missing := sorted({*self.sparse_factors} - {*ladder}):
            warnings.warn(
                f"Mixed(sparse_factors={self.sparse_factors}) never sends few entries"
                f" at {missing}: the controller's ladder is {ladder}. Give it all of"
                f" them, {tuple(sorted({*ladder, *self.sparse_factors}))}, or leave the"
                f" controller out.",
                stacklevel=2,
            )
        pairs = enumerate(self._exchanges)
        return tuple(x.init(n, self._factors(place, ladder)) for place, x in pairs)

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of the exchange that takes `factor`."""
        return self._at(factor).traffic(n, factor, replicas)

    def stages(self, factor: float, replicas: int) -> int:
        """Return the stages of the exchange that takes `factor`."""
        exchange = self._at(factor)
        return exchange.stages(factor, replicas) if isinstance(exchange, ByRung) else 1

    def shares(
        self, gradient: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Return what the exchange of each rung says of it."""
        own = lambda exchange, factors: exchange.shares(gradient, factors, key, comm)
        return self._in_order(own, ladder)

    def bucket_shares(
        self, bucket: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Return the share of a bucket's energy that each rung would send."""
        own = lambda exchange, factors: exchange.bucket_shares(
            bucket, factors, key, comm
        )
        return self._in_order(own, ladder)

    def _in_order(
        self,
        own: Callable[[Exchange, tuple[float, ...]], jax.Array],
        ladder: Sequence[float],
    ) -> jax.Array:
        """Ask each exchange for the shares of its own rungs, and put them in order."""
        found = {}
        for place, exchange in enumerate(self._exchanges):
            if factors := self._factors(place, ladder):
                found |= dict(zip(factors, own(exchange, factors), strict=True))
        return jnp.stack([found[factor] for factor in ladder])

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
        """Let the exchange that takes `factor` average the bucket."""
        place, states = self._place(factor), list(state)
        exchange, own = self._exchanges[place], state[place]
        given = {"key": key, "comm": comm, "step": step}
        if isinstance(exchange, ByRung):
            exchanged, after = exchange.at_rung(bucket, own, factor, **given)
        else:  # at the only rung of a ladder of its own
            only = np.int32(0)
            exchanged, after = exchange.exchange(
                bucket, own, only, ladder=(factor,), **given
            )
        states[place] = after
        return exchanged, tuple(states)
