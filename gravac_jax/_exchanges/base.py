"""The interface of exchanges, and what all of them share.

An exchange averages the buckets of all replicas. Most go through three phases:
`prepare` what needs no other replica, `send` it in the branch of the rung, and
`conclude` what was kept. For these, rungs that send everything or nothing, and the
residual that they leave, are handled here. `by_rung.py` is the other way: all phases in
the branch of the rung.
"""

import abc
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _collectives
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._selection.rungs import Rungs, shares_of_rungs
from gravac_jax._selection.waiting import shares_by_chance


class Exchanged(NamedTuple):
    """The outcome of an exchange on one replica.

    Attributes:
      mean: `[n]` float32, the mean over replicas of what was sent.
      residual: `[n]` float32, what this replica did not send.
      energies: `[rungs]` float32, the energy of this replica's bucket that each rung
        would have sent. Exact for the rung that was taken; the others are only
        estimated in a step that looks.
      energy: `[]` float32, the energy of the whole bucket.
      mean_energies: `[rungs + 1]` float32, the means over replicas of `energies` and of
        `energy`, the last one.
      figures: the mean over replicas of the `figures` that `exchange` was given.

    Example:
      See `gravac.Exchange`.
    """

    mean: jax.Array
    residual: jax.Array
    energies: jax.Array
    energy: jax.Array
    mean_energies: jax.Array
    figures: Any = ()


class Kept(NamedTuple):
    """What a sparse step leaves on one replica, as `Exchange.conclude` returns it.

    Attributes:
      residual: `[n]` float32, what this replica did not send.
      energies: `[rungs]` float32, as in `Exchanged`.
      energy: `[]` float32, the energy of the whole bucket.
      mean_energies: `[rungs + 1]` float32, as in `Exchanged`, if they travelled with
        the entries; None if they still have to be averaged.

    Example:
      See `gravac.Exchange`.
    """

    residual: jax.Array
    energies: jax.Array
    energy: jax.Array
    mean_energies: jax.Array | None = None


class Exchange(abc.ABC):
    """Averages buckets over replicas, sending as much as the rung says.

    To write your own, implement `traffic`, `send` and `conclude`, and `prepare` if some
    work does not depend on the rung. An exchange may also override `exchange` itself,
    and then averages the `figures` that it is given. `padded_size` may ask for buckets
    that end with zeros, and `suits_small_leaves` for all leaves in them.

    Law:
      On every replica `sent = bucket - residual` holds exactly, and `mean` is the mean
      of `sent` over replicas, the same bits on all of them (in float32, payloads added
      in the order of the replicas). A rung of factor 1 sends everything.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> @dataclasses.dataclass(frozen=True)
      ... class FirstEntries(gravac.Exchange):
      ...     def traffic(self, n, factor, replicas):
      ...         k = max(1, int(n / factor))
      ...         return gravac.DenseMean().traffic(k, 1, replicas)
      ...     def send(self, bucket, prepared, k, comm):
      ...         mean = comm.mean(bucket[:k])
      ...         return jnp.pad(mean, (0, bucket.size - k)), ()
      ...     def conclude(self, bucket, state, prepared, found, rungs):
      ...         squares = jnp.cumsum(bucket**2)
      ...         energies = squares[jnp.asarray(rungs.counts) - 1]
      ...         is_sent = jnp.arange(bucket.size) < rungs.sparse_count
      ...         residual = jnp.where(is_sent, 0, bucket)
      ...         return gravac.Kept(residual, energies, squares[-1]), state
      >>> tx = gravac.transform(
      ...     None, compress=True, exchange=FirstEntries(), controller=gravac.Fixed(2)
      ... )
      >>> grads = jnp.array([1.0, 2.0, 3.0, 4.0])
      >>> tx.update(grads, tx.init(grads))[0].tolist()
      [1.0, 2.0, 0.0, 0.0]
    """

    @property
    def is_blind(self) -> bool:
        """Whether entries are chosen without regard to their size."""
        return False

    @property
    def sends_whole_entries(self) -> bool:
        """Whether each entry is sent, apart from rounding, or kept whole: yes.

        An exchange that rounds every entry sends a part of each.
        """
        return True

    @property
    def suits_small_leaves(self) -> bool:
        """Whether small leaves are compressed if `compress` does not say: no.

        `compress` is an argument of `gravac.transform`.
        """
        return False

    def shaped(self, shapes: tuple[tuple[int, ...], ...]) -> "Exchange":
        """Return this exchange for buckets that hold arrays of these `shapes`.

        Leaves come in ascending order of size; the first and the last may be cut.
        """
        del shapes
        return self

    def padded_size(self, n: int) -> int:
        """Return the size of a bucket for `n` entries of leaves; default: n.

        It is at least n. Zeros fill up the bucket, and what is kept of them is dropped.
        The optimizer of `Steps` sees them, too, as gradients and params, and must make
        steps of 0 of them.
        """
        return n

    def init(self, n: int, ladder: tuple[float, ...]) -> Any:
        """Return this replica's state for a bucket of `n` entries; default: none."""
        del n, ladder
        return ()

    @abc.abstractmethod
    def traffic(self, n: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of exchanging a bucket of `n` entries at `factor`."""

    def energies_traffic(
        self, n: int, factor: float, rungs: int, replicas: int
    ) -> Traffic:
        """Return the cost of averaging `Exchanged.mean_energies`."""
        del n, factor
        return _collectives.mean_traffic(rungs + 1, replicas)

    def is_dense(self, n: int, factor: float, replicas: int) -> bool:
        """Return whether `factor` sends a bucket of `n` entries whole."""
        return self.traffic(n, factor, replicas).entries == n

    def entries(self, n: int, ladder: Sequence[float], replicas: int) -> list[int]:
        """Return how many entries of a bucket of `n` each rung sends."""
        return [self.traffic(n, factor, replicas).entries for factor in ladder]

    def branch_sizes(self, n: int, ladder: Sequence[float], replicas: int) -> list[int]:
        """Return the `k` that `send` gets at each rung; `n` if the rung is dense."""
        return self.entries(n, ladder, replicas)

    def figures_traffic(
        self, n: int, factor: float, figures: int, replicas: int
    ) -> Traffic:
        """Return the cost of averaging the `figures` of `exchange`, so many floats.

        It has no messages where they travel along with what the exchange sends.
        """
        del n, factor
        return _collectives.mean_traffic(figures, replicas)

    def is_replaced(self, n: int, factor: float, replicas: int) -> bool:
        """Return whether `factor` is dense only because there are so many replicas."""
        return self.is_dense(n, factor, replicas) and not self.is_dense(n, factor, 1)

    def shares(
        self, gradient: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Estimate the share of a gradient's energy that each rung would send.

        Args:
          gradient: `[n]` float32, this replica's own, without a residual.
          ladder: static factors.
          key: as for `exchange`.
          comm: the other replicas.

        Returns:
          `[rungs]` float32, for a selection, few bits and parts in turn the share of an
          exchange by chance in which entries wait as long. The largest entries stand in
          for other choices, such as places that another replica chose.
        """
        counts = tuple(self.entries(gradient.size, ladder, comm.replicas))
        shares = self.bucket_shares(gradient, ladder, key, comm)
        return (
            shares if self.is_blind else shares_by_chance(shares, counts, gradient.size)
        )

    def bucket_shares(
        self, bucket: jax.Array, ladder: Sequence[float], key: jax.Array, comm: Comm
    ) -> jax.Array:
        """Estimate the share of a bucket's energy that each rung would send.

        As `shares`, but of what is exchanged, the residual included, and of this step
        alone: the share of the largest entries, or of the part that is due.
        """
        counts = tuple(self.entries(bucket.size, ladder, comm.replicas))
        return shares_of_rungs(bucket, counts, key, self.is_blind)

    def prepare(
        self, bucket: jax.Array, state: Any, rungs: Rungs, key: jax.Array, comm: Comm
    ) -> Any:
        """Do what needs no other replica and does not depend on the rung's shapes.

        Args:
          bucket: `[n]` float32, the compensated gradient of this replica.
          state: from `init` or the last step.
          rungs: what each rung sends, and which one this step takes.
          key: a random key, the same on every replica, new at every step.
          comm: the other replicas.

        Returns:
          `prepared`, handed to the methods below; default: None.
        """
        del bucket, state, rungs, key, comm

    def send(
        self, bucket: jax.Array, prepared: Any, k: int, comm: Comm
    ) -> tuple[jax.Array, Any]:
        """Exchange what a sparse rung sends; runs inside the branch of the rung.

        Args:
          bucket: as for `prepare`.
          prepared: from `prepare`.
          k: static, from `branch_sizes`.
          comm: the other replicas.

        Returns:
          mean: `[n]` float32, the mean over replicas.
          found: what else the branch found out, of the same shapes at every rung.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sparse rungs")

    def found_dense(
        self, bucket: jax.Array, prepared: Any, mean: jax.Array, comm: Comm
    ) -> Any:
        """Return the `found` of a dense rung; runs inside its branch."""
        del bucket, prepared, mean, comm
        return ()

    def conclude(
        self, bucket: jax.Array, state: Any, prepared: Any, found: Any, rungs: Rungs
    ) -> tuple[Kept, Any]:
        """Work out what was kept, and the new state, after the branch of the rung.

        The residual matters at sparse rungs only: `exchange` itself sees to dense ones.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sparse rungs")

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
        step: jax.Array | int = 0,
        figures: Any = (),
    ) -> tuple[Exchanged, Any]:
        """Average a bucket over replicas: prepare, send in one branch, conclude.

        Args:
          bucket: `[n]` float32, the compensated gradient of this replica.
          state: from `init` or the last step.
          rung: `[]` int32, the same on every replica; an `np.int32` if it is known when
            the step is compiled.
          ladder: static factors, rising.
          key: a random key, the same on every replica, new at every step.
          comm: the other replicas.
          looks: whether the step estimates what other rungs would send, `[]` bool, the
            same on every replica; static True if all steps do.
          step: `[]` int32, steps before this one, the same on every replica; with
            rounds, exchanges before this one.
          figures: a tree of float32 arrays, to be averaged over replicas at every rung.

        Returns:
          What came of it, and the new state.
        """
        counts = self.branch_sizes(bucket.size, ladder, comm.replicas)
        rungs = Rungs(tuple(counts), bucket.size, rung, looks, step)
        if rungs.are_all_dense:
            return self._exchange_whole(bucket, rungs, comm, figures), state
        figures = comm.mean(figures)
        prepared = self.prepare(bucket, state, rungs, key, comm)

        def dense() -> tuple[jax.Array, Any]:
            mean = comm.mean(bucket)
            return mean, self.found_dense(bucket, prepared, mean, comm)

        sparse = lambda k: functools.partial(self.send, bucket, prepared, k, comm)
        branches = [dense if k == rungs.n else sparse(k) for k in rungs.counts]
        if isinstance(rung, np.integer):
            mean, found = branches[rung]()
        else:
            mean, found = jax.lax.switch(rung, branches)

        kept, after = self.conclude(bucket, state, prepared, found, rungs)
        exchanged = Exchanged(
            mean=mean,
            residual=_held_back(kept, rungs),
            energies=kept.energies,
            energy=kept.energy,
            mean_energies=_averaged_energies(kept, comm),
            figures=figures,
        )
        return exchanged, after

    def rounded(self, bucket: jax.Array) -> jax.Array:
        """Return what a rung that is dense at any factor sends of `bucket`."""
        return bucket

    def mean_beside(
        self, sent: jax.Array, figures: tuple[Any, ...], comm: Comm
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Return the means over replicas of what such a rung sends, and of figures."""
        return comm.mean(sent), tuple(map(comm.mean, figures))

    def _exchange_whole(
        self, bucket: jax.Array, rungs: Rungs, comm: Comm, figures: Any
    ) -> Exchanged:
        """Average the whole bucket."""
        sent, energy = self.rounded(bucket), _arrays.energy(bucket)
        sent_energy = energy if sent is bucket else _arrays.energy(sent)
        energies = jnp.broadcast_to(sent_energy, (len(rungs.counts),))
        own = jnp.append(energies, energy)
        mean, averaged = self.mean_beside(sent, (own, figures), comm)
        residual = jnp.zeros_like(bucket) if sent is bucket else bucket - sent
        return Exchanged(mean, residual, energies, energy, *averaged)


def _held_back(kept: Kept, rungs: Rungs) -> jax.Array:
    """Return the residual at any rung; that of `kept` is right at sparse ones."""
    # The residual overwrites the bucket in place. A condition computed from the
    # energies makes XLA do that last, when nothing reads the bucket any more.
    is_empty = rungs.is_dense | _arrays.is_never(kept.energies)
    return jnp.where(is_empty, 0, kept.residual)


def _averaged_energies(kept: Kept, comm: Comm) -> jax.Array:
    """Return the mean energies, by a collective of their own if none carried them."""
    if kept.mean_energies is not None:
        return kept.mean_energies
    return comm.mean(jnp.append(kept.energies, kept.energy))


def dense_if_cheaper(traffic: Traffic, n: int, replicas: int) -> Traffic:
    """Return the cost of a dense mean of `n` entries, unless `traffic` is no more."""
    dense = _collectives.mean_traffic(n, replicas)
    is_worse = traffic.entries == n or traffic.wire_bytes > dense.wire_bytes
    return dense if is_worse else traffic
