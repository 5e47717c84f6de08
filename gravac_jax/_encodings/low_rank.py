"""Matrices of low rank: two thin matrices travel in place of a large one.

A step is one power iteration, Algorithm 1 of PowerSGD (Vogels et al., NeurIPS 2019).
For a matrix M_i on each replica the left basis P, orthonormal, is that of mean(M_i) Q.
Replica i sends P P^T M_i, and the next Q is the mean of M_i^T P.
"""

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gravac_jax import _arrays, _network, _refuse
from gravac_jax._encodings import selection
from gravac_jax._encodings.base import Bucket, Encoding, Sent
from gravac_jax._network import Comm, Traffic

# At lower precision, as on TPUs and on GPUs that round to TF32, a mean of products
# would not be the product of means.
_multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class PowerState(NamedTuple):
    """What is known about one matrix.

    Attributes:
      right: `[columns, ranks]` float32, where the next iteration begins: the mean right
        matrix of the last one, each column scaled to at most 1; random at first.
      remaining_shares: `[ranks]` float32, the share of the remaining energy that each
        further rank took when it was last sent.
    """

    right: jax.Array
    remaining_shares: jax.Array


class _Matrix(NamedTuple):
    """The shape of one array of a bucket, with its last axis against all others."""

    rows: int
    columns: int

    @property
    def entries(self) -> int:
        return self.rows * self.columns

    @property
    def top_rank(self) -> int:
        """The highest rank at which two thin matrices are smaller than the whole."""
        return max(0, self.entries - 1) // max(1, self.rows + self.columns)


def _matrices(bucket: Bucket) -> list[_Matrix]:
    """Return the arrays of a bucket, and what fills it up, as a vector."""
    filled = sum(map(math.prod, bucket.shapes))
    rest = [(bucket.n - filled,)] if bucket.n > filled else []
    shapes = [x if len(x) > 1 else (*x, 1) for x in (*bucket.shapes, *rest)]
    return [_Matrix(math.prod(others), last) for *others, last in shapes]


def _cut(x: jax.Array, bucket: Bucket) -> list[jax.Array]:
    """Return the matrices that a bucket holds, which `_arrays.ravel` joins again."""
    like = [jax.ShapeDtypeStruct(m, x.dtype) for m in _matrices(bucket)]
    return _arrays.unravel(x, like)


@dataclasses.dataclass(frozen=True, repr=False)
class LowRank(Encoding):
    """PowerSGD: all-reduces two thin matrices in place of every large one.

    One power iteration, begun where the last one ended, finds the directions that the
    mean of all replicas' matrices has most of; every replica sends what its own matrix
    has along them. The rank is the same for all matrices of a bucket. Vectors are sent
    whole, as are matrices that two thin ones would not make smaller, and the parts of a
    leaf of more than 2**30 entries. Arrays of more than two axes count as matrices of
    their last axis against all others.

    Law:
      With P the orthonormal left matrix, replica i sends P P^T M_i. The mean is
      P (mean of P^T M_i), and what is left of M_i is orthogonal to P. Sums of products
      round, so sent + held back is the bucket within one unit in the last place of the
      larger. The energy of a rank above the one in use is estimated from the share of
      the rest that it took when it was last sent.

    Cost:
      Two ring all-reduces, of rank * rows and of rank * columns a matrix: 4 (N - 1)
      alpha + 2 (N - 1) / N 4 rank (rows + columns) beta, whatever N. About 8 rank
      multiplications and additions an entry, a QR decomposition of every left matrix,
      and `rank * columns` numbers of state, of the highest rank of a ladder.

    Args:
      rank: columns of the thin matrices.

    Raises:
      ValueError: if `rank` is not a positive number.

    Example:
      >>> import gravac_jax as gravac
      >>> bucket = gravac.Bucket(10_050, shapes=((50,), (100, 100)))
      >>> gravac.LowRank(4).traffic(bucket, replicas=4).wire_bytes
      5100.0

    References:
      Vogels et al., PowerSGD, NeurIPS 2019, Algorithms 1 and 2. The error is that of
      each replica's own projection, as in the authors' code.
    """

    rank: int

    def __post_init__(self) -> None:
        _refuse.count(self.rank, "rank", "columns of thin matrices")

    @property
    def sends_whole_entries(self) -> bool:
        """Whether entries are either sent or held back: no, a part of each is sent."""
        return False

    def _low(self, bucket: Bucket) -> list[int]:
        """Return which arrays go as two thin matrices; the others go whole."""
        return [i for i, x in enumerate(_matrices(bucket)) if self.rank <= x.top_rank]

    def _sent(self, bucket: Bucket) -> tuple[int, int]:
        """Return the entries of the first message, and of the second."""
        matrices, low = _matrices(bucket), self._low(bucket)
        saved = sum(matrices[i].entries - self.rank * matrices[i].rows for i in low)
        return bucket.n - saved, self.rank * sum(matrices[i].columns for i in low)

    def traffic(self, bucket: Bucket, replicas: int) -> Traffic:
        """Return the cost of 4 bytes an entry of the thin matrices."""
        first, second = (_network.mean_traffic(x, replicas) for x in self._sent(bucket))
        return first.plus(second) if second.bits else first

    def init(self, bucket: Bucket) -> tuple[PowerState, ...]:
        """Return random directions; each takes a fair share of what is left."""
        states = []
        for i, x in enumerate(_matrices(bucket)):
            rank = min(self.rank, x.top_rank)
            key = jax.random.fold_in(jax.random.key(0), i)
            right = jax.random.normal(key, (rank, x.columns), jnp.float32).T
            left = min(x.rows, x.columns) - jnp.arange(rank, dtype=jnp.float32)
            states.append(PowerState(right, 1 / left))
        return tuple(states)

    def exchange(
        self, x: jax.Array, state: Any, *, bucket: Bucket, comm: Comm, **_: Any
    ) -> tuple[Sent, tuple[PowerState, ...]]:
        """Run one power iteration, in two collectives, or in one if none is low."""
        mine = _cut(x, bucket)
        states, low = list(state), self._low(bucket)
        sketch = lambda i: _multiply(mine[i], states[i].right[:, : self.rank])
        first = [sketch(i) if i in low else x for i, x in enumerate(mine)]
        energies = [_arrays.energy(x) for i, x in enumerate(first) if i not in low]
        if not low:
            comm.tell(_arrays.total(energies))
        first_means = comm.mean(first)
        lefts = [jnp.linalg.qr(first_means[i])[0] for i in low]
        pairs = zip(low, lefts, strict=True)
        rights = [_multiply(mine[i].T, left) for i, left in pairs]
        # Left matrices are orthonormal.
        energy = _arrays.total([*energies, *map(_arrays.energy, rights)])
        comm.tell(energy)
        right_means = comm.mean(rights)
        sent, means = list(first), list(first_means)  # of those that went whole
        for i, left, right, mean in zip(low, lefts, rights, right_means, strict=True):
            sent[i], means[i] = _multiply(left, right.T), _multiply(left, mean.T)
            states[i] = _learn(states[i], right, mean, _arrays.energy(mine[i]))
        residual = x - _arrays.ravel(sent)
        return Sent(_arrays.ravel(means), residual, energy), tuple(states)

    def look(self, x: jax.Array, state: Any, bucket: Bucket, key: jax.Array) -> Any:
        """Return the state, energies of arrays, and of the largest of a sample."""
        energies = list(map(_arrays.energy, _cut(x, bucket)))
        return state, energies, selection.energies_of_largest(x, key)

    def share(self, looked: Any, bucket: Bucket, replicas: int) -> jax.Array:
        """Return what each further rank took of the rest when it was last sent."""
        states, energies, _ = looked
        shares: list[Any] = [1.0] * len(states)
        for i in self._low(bucket):
            shares[i] = 1 - jnp.prod(1 - states[i].remaining_shares[: self.rank])
        sent = _arrays.total(map(operator.mul, energies, shares))
        return sent / jnp.maximum(_arrays.total(energies), _arrays.SMALLEST_NORMAL)

    def waits(self, looked: Any, bucket: Bucket, replicas: int) -> jax.Array:
        """Estimate as if the largest entries were sent, and small ones soon."""
        (_, _, of_largest), k = looked, sum(self._sent(bucket))
        share = selection.share_of_largest(of_largest, k, bucket.n)
        return (1 - share) / share


def _learn(
    state: PowerState, right: jax.Array, mean: jax.Array, energy: jax.Array
) -> PowerState:
    """Return the state after `right` (`[columns, rank]`) with this `mean` was sent.

    A direction in which nothing was found is kept. Scaled columns neither overflow nor
    vanish, and span the same space.
    """
    rank = right.shape[1]
    largest = jnp.max(jnp.abs(mean), axis=0, keepdims=True)
    is_found = largest >= _arrays.SMALLEST_NORMAL
    scaled = mean / jnp.where(is_found, largest, 1)
    sent = jnp.sum(jnp.square(right), axis=0)
    left = energy - jnp.cumsum(sent) + sent
    shares = jnp.clip(sent / jnp.where(left > 0, left, 1), 0, 1)
    begun = jnp.where(is_found, scaled, state.right[:, :rank])
    return PowerState(
        state.right.at[:, :rank].set(begun),
        state.remaining_shares.at[:rank].set(shares),
    )
