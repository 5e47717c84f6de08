"""The ways to average gradients that a probe compares, and what each sends."""

import dataclasses
import functools
import math
from typing import Any

import jax

from gravac_jax import _buckets, _comm, _report
from gravac_jax._controllers import Fastest, Fixed
from gravac_jax._controllers.base import Controller
from gravac_jax._encoding import Float32, Int32
from gravac_jax._exchanges import AllGather, DenseMean16, LeaderIndices, LowRank
from gravac_jax._exchanges.base import Exchange
from gravac_jax._exchanges.dense import dense_traffic
from gravac_jax._probe.verdict import DENSE, DENSE_RUNG, GATHER, REDUCE, Call, Way

# What each is called, and by what most of its bytes travel.
EXCHANGES: dict[str, tuple[Exchange, str]] = {
    "all-gather": (AllGather(), GATHER),
    "all-gather-8": (AllGather(values=Float32(), indices=Int32()), GATHER),
    "leader": (LeaderIndices(), REDUCE),
    "low-rank": (LowRank(), REDUCE),
    "dense-16": (DenseMean16(), GATHER),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A model, the mesh that it trains on, and what is tried.

    Attributes:
      mesh: compression is over its first axis; over the others, if any, gradients are
        averaged whole.
      params: a pytree of arrays, or of `jax.ShapeDtypeStruct`.
      rungs: factors above 1, rising.
      exchanges: names in `EXCHANGES`.
    """

    mesh: jax.sharding.Mesh
    params: Any
    rungs: tuple[float, ...]
    exchanges: tuple[str, ...]

    @functools.cached_property
    def buckets(self) -> _buckets.Buckets:
        """What is compressed, and what goes dense."""
        return _buckets.plan(self.params, None)

    @property
    def entries(self) -> int:
        """Of all params."""
        return sum(self.buckets.sizes) + self.buckets.dense_size

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Of the mesh, by name; of several, the last is all of them together."""
        names = self.mesh.axis_names
        every = {"+".join(names): tuple(names)}  # of one axis, itself
        return {name: (name,) for name in names} | every

    def replicas(self, axis: str) -> int:
        """Along an axis."""
        return math.prod(self.mesh.shape[x] for x in self.axes[axis])

    def controller(self, exchange: str) -> Controller:
        """The default one; `DenseMean16` sends the same at any factor."""
        if isinstance(EXCHANGES[exchange][0], DenseMean16):
            return Fixed(1)
        return Fastest((1.0, *self.rungs))

    def ways(self) -> tuple[Way, ...]:
        """A dense step, the transform's own, and every exchange at every rung."""
        slow, *fast = self.axes
        # Over fast axes gradients are averaged whole, before.
        before = tuple(self._mean(axis) for axis in fast[:-1])
        ways = [Way(DENSE, 1.0, DENSE, (self._mean(fast[-1] if fast else slow),))]
        for name in self.exchanges:
            ways += self._ways(name, slow, before)
        unique: dict[tuple[str, float], Way] = {}
        for way in ways:  # a dense rung is the same whatever the exchange
            unique.setdefault((way.exchange, way.factor), way)
        return tuple(unique.values())

    def _mean(self, axis: str) -> Call:
        traffic = dense_traffic(self.entries, self.replicas(axis))
        return Call(REDUCE, axis, traffic.wire_bytes, traffic.messages)

    def _ways(self, name: str, axis: str, before: tuple[Call, ...]) -> list[Way]:
        exchange, kind = EXCHANGES[name]
        replicas, buckets = self.replicas(axis), self.buckets
        ladder = self.controller(name).ladder
        shaped = [exchange.shaped(shapes) for shapes in buckets.shapes]
        table = _report.tables(buckets, shaped, self.controller(name), replicas)
        wire_bytes, messages = table.wire_bytes.tolist(), table.messages.tolist()
        # The last row is a step that sends its evidence, and what goes dense, alone.
        evidence = Call(REDUCE, axis, wire_bytes[-1], messages[-1])
        ways = []
        for i, factor in enumerate(ladder):
            sent = float(table.factors[i])
            is_mean = sent == 1 and len(ladder) > 1
            own = Call(
                kind=REDUCE if is_mean else kind,
                axis=axis,
                wire_bytes=wire_bytes[i] - evidence.wire_bytes,
                messages=messages[i] - evidence.messages,
            )
            is_gathered = kind == GATHER and sent > 1
            added = (replicas - 1) * sum(buckets.sizes) / sent * is_gathered
            title = DENSE_RUNG if is_mean and factor == 1 else name
            local = DENSE_RUNG if is_mean else local_name(name, factor)
            ways.append(Way(title, factor, local, (*before, evidence, own), added))
        return ways


def local_name(exchange: str, factor: float) -> str:
    """What one replica does for itself, as it is timed."""
    return f"{exchange} {factor:g}"


def call(kind: str, axis: str, payload_bytes: float, replicas: int) -> Call:
    """One collective of a payload from each replica."""
    if kind == GATHER:
        wire_bytes = _comm.gather_wire_bytes(payload_bytes, replicas)
        return Call(kind, axis, wire_bytes, _comm.gather_messages(replicas))
    wire_bytes = _comm.mean_wire_bytes(payload_bytes, replicas)
    return Call(kind, axis, wire_bytes, _comm.mean_messages(replicas))
