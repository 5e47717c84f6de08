"""Matrices of low rank: two thin matrices travel in place of a large one."""

import bisect
import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _buckets, _checks, _mean16, _power, _tree
from gravac_jax._comm import Comm
from gravac_jax._encoding import BFloat16, Float32
from gravac_jax._encoding.base import ValueEncoding
from gravac_jax._exchanges.base import Exchange, Exchanged, Traffic, in_branch
from gravac_jax._exchanges.dense import dense_exchange, dense_traffic, mean16_traffic


class _Array(NamedTuple):
    """One array of a bucket, as a matrix of its last axis against all others."""

    start: int
    rows: int
    columns: int

    @property
    def entries(self) -> int:
        return self.rows * self.columns

    @property
    def top_rank(self) -> int:
        """The highest rank at which two thin matrices are smaller than it."""
        return max(0, self.entries - 1) // (self.rows + self.columns)

    def sent(self, rank: int) -> int:
        return min(rank * (self.rows + self.columns), self.entries)

    def of(self, bucket: jax.Array) -> jax.Array:
        part = jax.lax.slice_in_dim(bucket, self.start, self.start + self.entries)
        return part.reshape(self.rows, self.columns)


def _arrays(shapes: tuple[tuple[int, ...], ...]) -> list[_Array]:
    arrays, start = [], 0
    for shape in shapes:
        *others, last = shape if len(shape) > 1 else (*shape, 1)
        arrays.append(_Array(start, math.prod(others), last))
        start += arrays[-1].entries
    return arrays


@dataclasses.dataclass(frozen=True)
class LowRank(Exchange):
    """PowerSGD: an all-reduce of two thin matrices in place of every large one.

    One step of the power method, begun where the last one ended, gives the directions
    that the mean of all replicas' matrices has most of; every replica sends what its
    own matrix has along them. A rung is a rank, the same for all matrices of a bucket:
    the highest that sends no more than its factor allows, and at least 1. Vectors, and
    matrices that this would not make smaller, are sent whole, as is what a leaf of a
    model of more than 2**30 params was cut into.

    Arrays of more than two axes are matrices of their last axis against the others.

    Law:
      With P the orthonormal left matrix, replica i sends P P^T M_i: the mean is
      P (mean of P^T M_i), and what is left of M_i is orthogonal to P; in 16 bits, with
      r rounding, P r(P^T M_i) and P r(mean of r(P^T M_i)). Sums of products
      round: the mean is that of what was sent within `tolerance`, and sent + kept is
      the bucket within one unit in the last place of the larger. What ranks above the
      one in use would send is what they sent when they were last used, as a share of
      what the others leave; a dense step shows all of them.

    Cost:
      Two ring all-reduces, of rank * rows and of rank * columns a matrix: 4 (N - 1)
      alpha + 2 (N - 1) / N 4 rank (rows + columns) beta, whatever N; half of these
      bytes in 16 bits, by all-to-all and all-gather. About 8 rank
      multiplications and additions an entry, and a QR decomposition of every left
      matrix. `rank * columns` of state.

    Args:
      shapes: of the arrays of a bucket, one after the other; `gravac.transform` enters
        those of the params. Of a bucket without shapes nothing is known: it is dense.
      values: `Float32()` or `BFloat16()`, of the thin matrices and what is sent whole.
        What rounding drops of a replica's own stays in its residual; that of the mean,
        as of `DenseMean16`, is seen by nobody. A dense rung is float32.

    Raises:
      TypeError: if `values` is no encoding.
      ValueError: if it is neither of the two; if a bucket has another number of entries
        than the shapes.

    Example:
      >>> import gravac_jax as gravac
      >>> exchange = gravac.LowRank(shapes=((100, 100), (50,)))
      >>> exchange.rank(10_050, factor=10)
      4
      >>> exchange.traffic(10_050, factor=10, replicas=4)
      Traffic(entries=850, payload_bytes=3400, wire_bytes=5100.0, messages=12)

    References:
      Vogels et al., PowerSGD, NeurIPS 2019, Algorithms 1 and 2; the error is that of
      each replica's own projection, as in their code.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    values: ValueEncoding = dataclasses.field(default_factory=Float32)

    def __post_init__(self) -> None:
        _checks.component(self.values, ValueEncoding, "values", "gravac.BFloat16()")
        _checks.one_of(self.values, "values", (Float32(), BFloat16()))

    @property
    def _is_short(self) -> bool:
        return isinstance(self.values, BFloat16)

    @property
    def tolerance(self) -> float:
        """That of a long sum of products; or of a mean that is rounded to 8 bits."""
        return 2.0**-6 if self._is_short else 2.0**-16

    def shaped(self, shapes: tuple[tuple[int, ...], ...]) -> "LowRank":
        """With these `shapes`."""
        return dataclasses.replace(self, shapes=shapes)

    def _arrays(self, n: int) -> list[_Array]:
        arrays = _arrays(self.shapes or ((n,),))
        _checks.holds_shapes(n, self.shapes, sum(x.entries for x in arrays))
        return arrays

    def rank(self, n: int, factor: float) -> int:
        """The rank that `factor` means for a bucket of `n` entries; `n` if dense."""
        arrays = self._arrays(n)
        ranks = range(1, 1 + max((x.top_rank for x in arrays), default=0))
        if factor == 1 or not ranks:
            return n
        sent = lambda rank: sum(x.sent(rank) for x in arrays)
        allowed = n / factor * (1 + 1e-9)  # n / (n / sent) may round down
        return max(1, bisect.bisect_right(ranks, allowed, key=sent))

    def init(self, n: int, ladder: tuple[float, ...]) -> tuple[_power.PowerState, ...]:
        """Random directions, which rank by rank take a fair share of what is left."""
        top = max((r for r in self._ranks(n, ladder) if r < n), default=0)
        states = []
        for i, x in enumerate(self._arrays(n)):
            ranks = min(top, x.top_rank)
            key = jax.random.fold_in(jax.random.key(0), i)
            right = jax.random.normal(key, (ranks, x.columns), jnp.float32).T
            left = min(x.rows, x.columns) - jnp.arange(ranks, dtype=jnp.float32)
            states.append(_power.PowerState(right, 1 / left))
        return tuple(states)

    def _ranks(self, n: int, ladder: Sequence[float]) -> list[int]:
        return [self.rank(n, factor) for factor in ladder]

    def exchange(
        self,
        bucket: jax.Array,
        state: tuple[_power.PowerState, ...],
        rung: jax.Array,
        *,
        ladder: tuple[float, ...],
        key: jax.Array,
        comm: Comm,
        looks: jax.Array | bool = True,
    ) -> tuple[Exchanged, tuple[_power.PowerState, ...]]:
        """One step of the power method, in the branch of its rank."""
        del key, looks
        n, arrays = bucket.size, self._arrays(bucket.size)
        ranks = self._ranks(n, ladder)
        if min(ranks) == n:
            return dense_exchange(bucket, rung, len(ladder), comm), state
        state, mine = comm.cast(state), [x.of(bucket) for x in arrays]
        energies = [_tree.energy(x) for x in mine]

        is_low = lambda rank: [rank <= x.top_rank for x in arrays]
        mean16 = functools.partial(_mean16.mean, comm=comm)
        travel = (_mean16.rounded, mean16) if self._is_short else (_as_is, comm.mean)

        def factored(rank: int) -> Any:
            sent, means, learned = _power.send(
                mine, state, energies, is_low(rank), rank, *travel
            )
            total = _tree.total(map(_tree.energy, sent))
            residual = bucket - _tree.ravel(sent)
            return _tree.ravel(means), residual, total, comm.cast(learned)

        def dense() -> Any:
            mean = comm.mean(bucket)
            means = [x.of(mean) for x in arrays]
            learned = list(map(_power.look, means, mine, state, energies))
            total = _tree.total(energies)
            return mean, jnp.zeros_like(bucket), total, comm.cast(learned)

        mean, residual, sent, learned = in_branch(
            rung,
            ranks,
            n,
            sparse=factored,
            dense=dense,
            nothing=lambda: (comm.zeros(bucket), bucket, energies[0] * 0, list(state)),
        )
        foreseen = []
        for rank in ranks:
            shares = [
                _power.taken(s, rank) if low else 1.0
                for s, low in zip(learned, is_low(rank), strict=True)
            ]
            foreseen.append(_tree.total(map(operator.mul, energies, shares)))
        is_here = jnp.arange(len(ladder)) == rung
        return Exchanged(
            mean=mean,
            residual=residual,
            energies=jnp.where(is_here, sent, jnp.stack(foreseen)),
            energy=_tree.total(energies),
        ), tuple(learned)

    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """4 bytes an entry of the thin matrices, or 2."""
        rank = self.rank(n, factor)
        if rank == n:
            return dense_traffic(n, replicas)
        arrays = self._arrays(n)
        right = sum(rank * x.columns for x in arrays if rank <= x.top_rank)
        left = sum(x.sent(rank) for x in arrays) - right
        cost = mean16_traffic if self._is_short else dense_traffic
        first, then = cost(left, replicas), cost(right, replicas)
        return Traffic(
            entries=first.entries + then.entries,
            payload_bytes=first.payload_bytes + then.payload_bytes,
            wire_bytes=first.wire_bytes + then.wire_bytes,
            messages=first.messages + then.messages,
        )


def _as_is(x: jax.Array) -> jax.Array:
    return x


def by_rank(
    params: Any,
    ranks: Sequence[int] = (32, 16, 8, 4, 2, 1),
    compress: bool | _buckets.Predicate | Any = None,
    bucket_bytes: int | None = None,
) -> tuple[float, ...]:
    """The ladder whose rungs are ranks of `LowRank`, after a dense first rung.

    Args:
      params: those of the model, or their shapes; with sharded params, one slice of
        each.
      ranks: each at least 1.
      compress: that of `gravac.transform`.
      bucket_bytes: that of `gravac.transform`. Every bucket then has the highest rank
        that the factor allows it, and a factor is what the rank means for all of them.

    Returns:
      For each rank the factor that it means, entries over entries sent. Ranks that
      send nothing less than the rank above them are left out.

    Raises:
      ValueError: if a rank is below 1, or nothing of `params` is compressed.

    Example:
      >>> import jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> gravac.by_rank({"w": jnp.ones((300, 600))}, ranks=(20, 2))
      (1.0, 10.0, 100.0)
    """
    for rank in _checks.listed(ranks, "ranks"):
        _checks.count(rank, "ranks", "columns of thin matrices, each of them")
    plan = _buckets.plan(params, compress, bucket_bytes)
    _checks.compresses_something(sum(plan.sizes))
    arrays = [x for shapes in plan.shapes for x in _arrays(shapes)]
    entries = lambda rank: sum(x.sent(rank) for x in arrays)
    return tuple(sorted({1.0, *(sum(plan.sizes) / entries(r) for r in ranks)}))
