"""At every rung the exchange that is the fastest by a cost model."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gravac_jax import _checks
from gravac_jax._comm import Comm
from gravac_jax._exchanges.base import Exchange, Exchanged, Traffic
from gravac_jax._exchanges.dense import mean_of_energies, with_mean_energies
from gravac_jax._throughput import WireCost


@dataclasses.dataclass(frozen=True)
class Cheapest(Exchange):
    """Chooses among exchanges, rung by rung, by what each costs on a network.

    An all-gather sends few messages and many bytes, leader's indices the other way
    round: with more replicas, more entries or a thinner wire the second becomes the
    cheaper one at low factors, where the first would even be a dense step. The choice
    is made when a step is traced, from the number of replicas, and changes with the
    rung alone. It is one of time, not of quality: offer exchanges that are as good as
    each other at the same factor, or whose difference is worth it.

    Law:
      At every rung it is the one it chose. What rungs of others would send is told by
      the one in use, as if they were its own.

    Cost:
      That of the exchange chosen: of those equal in bytes and messages, energies
      included, the first. The state of all of them; each that is chosen anywhere is
      compiled with all rungs.

    Args:
      exchanges: to choose from, of equal ones the first.
      wire: the network, also that of the transform; its `compute_seconds` do not matter
        here.

    Raises:
      TypeError: if an exchange or the wire is of another kind.
      ValueError: if there is no exchange.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.Cheapest((gravac.AllGather(), gravac.LeaderIndices()))
      >>> [type(x).__name__ for x in exchange.choices(10**6, (10, 1000), replicas=16)]
      ['LeaderIndices', 'AllGather']

    References:
      Thakur et al., Optimization of collective communication operations in MPICH,
      2005, for the costs of rings.
    """

    exchanges: tuple[Exchange, ...]
    wire: WireCost = dataclasses.field(default_factory=WireCost)

    def __post_init__(self) -> None:
        for exchange in _checks.listed(self.exchanges, "exchanges"):
            _checks.component(exchange, Exchange, "exchanges", "gravac.AllGather()")
        _checks.component(self.wire, WireCost, "wire", "gravac.WireCost()")
        object.__setattr__(self, "exchanges", tuple(self.exchanges))

    @property
    def is_ordered(self) -> bool:
        """If it is for one of them."""
        return any(x.is_ordered for x in self.exchanges)

    @property
    def is_rounded(self) -> bool:
        """If one of them rounds."""
        return any(x.is_rounded for x in self.exchanges)

    @property
    def tolerance(self) -> float:
        """The largest."""
        return max(x.tolerance for x in self.exchanges)

    def shaped(self, shapes: tuple[tuple[int, ...], ...]) -> "Cheapest":
        """All of them with these `shapes`."""
        shaped = tuple(x.shaped(shapes) for x in self.exchanges)
        return dataclasses.replace(self, exchanges=shaped)

    def init(self, n: int, ladder: tuple[float, ...]) -> tuple[Any, ...]:
        """The states of all."""
        return tuple(x.init(n, ladder) for x in self.exchanges)

    def choices(
        self, n: int, ladder: tuple[float, ...], replicas: int
    ) -> list[Exchange]:
        """The exchange of each rung for a bucket of `n` entries."""
        return [self.exchanges[self._choice(n, x, replicas)] for x in ladder]

    def _choice(self, n: int, factor: float, replicas: int) -> int:
        def seconds(i: int) -> float:
            exchange = self.exchanges[i]
            entries = exchange.traffic(n, factor, replicas)
            # What counts of the energies is whether they are messages of their own.
            energies = _energies_traffic(exchange, n, factor, 1, replicas)
            messages = entries.messages + energies.messages
            return self.wire.exchange_seconds(entries.wire_bytes, messages)

        return min(range(len(self.exchanges)), key=seconds)

    def exchange(
        self,
        bucket: jax.Array,
        state: tuple[Any, ...],
        rung: jax.Array,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
        comm: Comm,
        looks: jax.Array | bool = True,
    ) -> tuple[Exchanged, tuple[Any, ...]]:
        """In the branch of the exchange that the rung has, the branch of the rung."""
        chosen = [self._choice(bucket.size, x, comm.replicas) for x in ladder]
        travel = self._carries_energies(bucket.size, comm.replicas)

        def run(i: int) -> tuple[Exchanged, tuple[Any, ...]]:
            exchanged, own = self.exchanges[i].exchange(
                bucket, state[i], rung, ladder=ladder, key=key, comm=comm, looks=looks
            )
            if travel:
                exchanged = with_mean_energies(exchanged, rung, comm)
            same = {x: getattr(exchanged, x) for x in ("mean", "mean_energies")}
            after = comm.cast((*state[:i], own, *state[i + 1 :]))
            return comm.cast(exchanged)._replace(**same), after

        branches = sorted(set(chosen))
        if len(branches) == 1:
            return run(branches[0])
        skipped = chosen[-1]
        which = jnp.asarray([branches.index(i) for i in (*chosen, skipped)])[rung]
        return jax.lax.switch(which, [functools.partial(run, i) for i in branches])

    def shares(
        self, gradient: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Each rung's by the exchange that it has."""
        chosen = [self._choice(gradient.size, x, comm.replicas) for x in ladder]
        shares = lambda i: self.exchanges[i].shares(gradient, ladder, key, comm)
        given = {i: shares(i) for i in set(chosen)}
        return jnp.stack([given[i][rung] for rung, i in enumerate(chosen)])

    def is_replaced(self, n: int, factor: float, replicas: int) -> bool:
        """Whether it is for the one chosen."""
        (chosen,) = self.choices(n, (factor,), replicas)
        return chosen.is_replaced(n, factor, replicas)

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """That of the one chosen."""
        (chosen,) = self.choices(n, (factor,), replicas)
        return chosen.traffic(n, factor, replicas)

    def energies_traffic(
        self, n: int, factor: float, rungs: int, replicas: int
    ) -> Traffic | None:
        """That of the one chosen, or a mean's; None if they travel with none."""
        if not self._carries_energies(n, replicas):
            return None
        (chosen,) = self.choices(n, (factor,), replicas)
        return _energies_traffic(chosen, n, factor, rungs, replicas)

    def _carries_energies(self, n: int, replicas: int) -> bool:
        traffic = [x.energies_traffic(n, 1, 1, replicas) for x in self.exchanges]
        return any(x is not None for x in traffic)


def _energies_traffic(
    exchange: Exchange, n: int, factor: float, rungs: int, replicas: int
) -> Traffic:
    traffic = exchange.energies_traffic(n, factor, rungs, replicas)
    return mean_of_energies(rungs, replicas) if traffic is None else traffic
