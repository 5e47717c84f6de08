"""Matrices of low rank: two thin matrices travel in place of a large one."""

import bisect
import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _buckets, _checks, _collectives
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._exchanges import power_iteration
from gravac_jax._exchanges.base import Exchange, Kept
from gravac_jax._exchanges.power_iteration import Collective, PowerState
from gravac_jax._selection.rungs import Rungs

VALUES = ("float32", "bfloat16")


class _Matrix(NamedTuple):
    """One array of a bucket, as a matrix of its last axis against all others."""

    start: int
    rows: int
    columns: int

    @property
    def entries(self) -> int:
        return self.rows * self.columns

    @property
    def top_rank(self) -> int:
        """The highest rank at which two thin matrices are smaller than the whole."""
        return max(0, self.entries - 1) // (self.rows + self.columns)

    def sent(self, rank: int) -> int:
        return min(rank * (self.rows + self.columns), self.entries)

    def of(self, bucket: jax.Array) -> jax.Array:
        part = jax.lax.slice_in_dim(bucket, self.start, self.start + self.entries)
        return part.reshape(self.rows, self.columns)


def _matrices(shapes: tuple[tuple[int, ...], ...]) -> list[_Matrix]:
    matrices, start = [], 0
    for shape in shapes:
        *others, last = shape if len(shape) > 1 else (*shape, 1)
        matrices.append(_Matrix(start, math.prod(others), last))
        start += matrices[-1].entries
    return matrices


class _Prepared(NamedTuple):
    mine: list[jax.Array]
    states: tuple[PowerState, ...]
    energies: list[jax.Array]


class _Found(NamedTuple):
    residual: jax.Array  # [n], what this replica did not send
    energy: jax.Array  # [] of what it sent
    states: list[PowerState]


@dataclasses.dataclass(frozen=True)
class LowRank(Exchange):
    """PowerSGD: all-reduces two thin matrices in place of every large one.

    One power iteration, begun where the last one ended, finds the directions that the
    mean of all replicas' matrices has most of; every replica sends what its own matrix
    has along them. A rung is a rank, the same for all matrices of a bucket: the highest
    that sends no more than the factor allows, and at least 1. Vectors are sent whole,
    as are matrices that two thin ones would not make smaller, and the parts of a leaf
    that was cut because the model has more than 2**30 params. Arrays of more than two
    axes count as matrices of their last axis against all others.

    Law:
      With P the orthonormal left matrix, replica i sends P P^T M_i. The mean is
      P (mean of P^T M_i), and what is left of M_i is orthogonal to P. In bfloat16, with
      r rounding, it sends P r(P^T M_i) and the mean is P r(mean of r(P^T M_i)). Sums of
      products round, so sent + kept is the bucket within one unit in the last place of
      the larger. The energy of a rank above the one in use is estimated from the share
      of the rest that it took when it was last sent; a dense step shows all ranks.

    Cost:
      Two ring all-reduces, of rank * rows and of rank * columns a matrix: 4 (N - 1)
      alpha + 2 (N - 1) / N 4 rank (rows + columns) beta, whatever N; in bfloat16 half
      of these bytes, by all-to-all and all-gather. About 8 rank multiplications and
      additions an entry, a QR decomposition of every left matrix, and `rank * columns`
      numbers of state.

    Args:
      shapes: shapes of the arrays of a bucket, one after the other. `gravac.transform`
        fills in those of the params. A bucket without shapes is sent whole.
      values: "float32" or "bfloat16", how thin matrices and whole arrays travel. What
        rounding drops of a replica's own stays in its residual; what it drops of the
        mean is lost, as in `DenseMean("bfloat16")`. A dense rung is float32.

    Raises:
      ValueError: if `values` is neither; if a bucket has another number of entries than
        the shapes.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.LowRank(shapes=((100, 100), (50,)))
      >>> exchange.rank(10_050, factor=10)
      4
      >>> exchange.traffic(10_050, factor=10, replicas=4)
      Traffic(entries=850, payload_bytes=3400, wire_bytes=5100.0, messages=12)

    References:
      Vogels et al., PowerSGD, NeurIPS 2019, Algorithms 1 and 2. The error is that of
      each replica's own projection, as in the authors' code.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    values: str = "float32"

    def __post_init__(self) -> None:
        _checks.one_of(self.values, "values", VALUES)

    @property
    def sends_whole_entries(self) -> bool:
        """Whether entries are either sent or kept: no, a part of each is sent."""
        return False

    def shaped(self, shapes: tuple[tuple[int, ...], ...]) -> "LowRank":
        """Return this exchange with these `shapes`."""
        return dataclasses.replace(self, shapes=shapes)

    def _matrices(self, n: int) -> list[_Matrix]:
        matrices = _matrices(self.shapes or ((n,),))
        _checks.holds_shapes(n, self.shapes, sum(x.entries for x in matrices))
        return matrices

    def rank(self, n: int, factor: float) -> int:
        """Return the rank that `factor` means for `n` entries; `n` if dense."""
        matrices = self._matrices(n)
        ranks = range(1, 1 + max((x.top_rank for x in matrices), default=0))
        if factor == 1 or not ranks:
            return n
        sent = lambda rank: sum(x.sent(rank) for x in matrices)
        allowed = n / factor * (1 + 1e-9)  # n / (n / sent) may round down
        return max(1, bisect.bisect_right(ranks, allowed, key=sent))

    def branch_sizes(self, n: int, ladder: Sequence[float], replicas: int) -> list[int]:
        """Return the rank of each rung."""
        del replicas
        return [self.rank(n, factor) for factor in ladder]

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of 4 bytes an entry of the thin matrices, or 2."""
        rank = self.rank(n, factor)
        if rank == n:
            return _collectives.mean_traffic(n, replicas)
        matrices = self._matrices(n)
        right = sum(rank * x.columns for x in matrices if rank <= x.top_rank)
        left = sum(x.sent(rank) for x in matrices) - right
        is_short = self.values == "bfloat16"
        cost = _collectives.mean_traffic
        cost = _collectives.bfloat16_mean_traffic if is_short else cost
        return cost(left, replicas).plus(cost(right, replicas))

    def init(self, n: int, ladder: tuple[float, ...]) -> tuple[PowerState, ...]:
        """Return random directions; each takes a fair share of what is left."""
        ranks = (self.rank(n, factor) for factor in ladder)
        top = max((r for r in ranks if r < n), default=0)
        states = []
        for i, x in enumerate(self._matrices(n)):
            rank = min(top, x.top_rank)
            key = jax.random.fold_in(jax.random.key(0), i)
            right = jax.random.normal(key, (rank, x.columns), jnp.float32).T
            left = min(x.rows, x.columns) - jnp.arange(rank, dtype=jnp.float32)
            states.append(PowerState(right, 1 / left))
        return tuple(states)

    def shares(
        self, gradient: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Estimate shares as if the largest entries were sent, and small ones soon."""
        return self.bucket_shares(gradient, ladder, key, comm)

    def prepare(
        self,
        bucket: jax.Array,
        state: tuple[PowerState, ...],
        rungs: Rungs,
        key: jax.Array,
        comm: Comm,
    ) -> _Prepared:
        """Cut the bucket into matrices."""
        mine = [x.of(bucket) for x in self._matrices(bucket.size)]
        return _Prepared(mine, comm.cast(state), [_arrays.energy(x) for x in mine])

    def _is_low(self, n: int, rank: int) -> list[bool]:
        return [rank <= x.top_rank for x in self._matrices(n)]

    def send(
        self, bucket: jax.Array, prepared: _Prepared, k: int, comm: Comm
    ) -> tuple[jax.Array, _Found]:
        """Run one power iteration at rank `k`."""
        collective = Collective(lambda x: x, comm.mean)
        if self.values == "bfloat16":
            collective = Collective(_arrays.round_to_bfloat16, comm.bfloat16_mean)
        is_low = self._is_low(bucket.size, k)
        sent = power_iteration.send(*prepared, is_low, k, collective)
        energy = _arrays.total(map(_arrays.energy, sent.own))
        residual = bucket - _arrays.ravel(sent.own)
        found = _Found(residual, energy, comm.cast(sent.states))
        return _arrays.ravel(sent.means), found

    def found_dense(
        self, bucket: jax.Array, prepared: _Prepared, mean: jax.Array, comm: Comm
    ) -> _Found:
        """Learn about all ranks from the mean of whole matrices."""
        means = [x.of(mean) for x in self._matrices(bucket.size)]
        learned = list(map(power_iteration.learn_from_whole, means, *prepared))
        energy = _arrays.total(prepared.energies)
        return _Found(jnp.zeros_like(bucket), energy, comm.cast(learned))

    def conclude(
        self,
        bucket: jax.Array,
        state: Any,
        prepared: _Prepared,
        found: _Found,
        rungs: Rungs,
    ) -> tuple[Kept, tuple[PowerState, ...]]:
        """Keep what was not sent; estimate what every other rank would send."""
        foreseen = []
        for rank in rungs.counts:
            shares = [
                power_iteration.sent_share(s, rank) if low else 1.0
                for s, low in zip(
                    found.states, self._is_low(rungs.n, rank), strict=True
                )
            ]
            foreseen.append(_arrays.total(map(operator.mul, prepared.energies, shares)))
        energies = jnp.where(rungs.is_taken, found.energy, jnp.stack(foreseen))
        energy = _arrays.total(prepared.energies)
        return Kept(found.residual, energies, energy), tuple(found.states)


def by_rank(
    params: Any,
    ranks: Sequence[int] = (32, 16, 8, 4, 2, 1),
    compress: bool | _buckets.Predicate | Any = None,
) -> tuple[float, ...]:
    """Return the ladder whose rungs are ranks of `LowRank`, after a dense first rung.

    Args:
      params: the params of the model, or their shapes; with sharded params, one slice
        of each.
      ranks: the ranks, each at least 1.
      compress: the argument of `gravac.transform`.

    Returns:
      For each rank the factor that it means, entries over entries sent. Ranks that send
      as much as the rank above them are left out.

    Raises:
      ValueError: if a rank is below 1, or nothing of `params` is compressed.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> gravac.by_rank({"w": jnp.ones((300, 600))}, ranks=(20, 2))
      (1.0, 10.0, 100.0)
    """
    for rank in _checks.listed(ranks, "ranks"):
        _checks.positive_integer(
            rank, "ranks", "columns of thin matrices, each of them"
        )
    plan = _buckets.plan(params, compress)
    _checks.compresses_something(sum(plan.sizes))
    matrices = [x for shapes in plan.shapes for x in _matrices(shapes)]
    entries = lambda rank: sum(x.sent(rank) for x in matrices)
    return tuple(sorted({1.0, *(sum(plan.sizes) / entries(r) for r in ranks)}))
