"""Exchanges whose rungs are branches that know nothing of each other."""

import abc
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _collectives
from gravac_jax._carrier import Carrier
from gravac_jax._collectives import Comm, Traffic
from gravac_jax._exchanges.base import Exchange, Exchanged


class ByRung(Exchange):
    """An exchange with a whole branch for each rung, from the bucket to the residual.

    Each branch is compiled as if its rung were the only one. So nothing is laid out for
    rungs that are not taken, and XLA fuses what it can. What the others would have sent
    is estimated before the branch, in a step that looks, and travels along.
    """

    @abc.abstractmethod
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
        """Average a bucket over replicas at a factor that is not dense.

        Args:
          bucket: `[n]` float32, the compensated gradient of this replica.
          state: from `init` or the last step.
          factor: static.
          key: as for `exchange`.
          comm: the other replicas.
          step: as for `exchange`.

        Returns:
          What came of it, as if this were the only rung, and the new state.
        """

    def energies_traffic(
        self, n: int, factor: float, rungs: int, replicas: int
    ) -> Traffic:
        """Return the cost of the energies of this rung, and of what all would send."""
        if self.is_dense(n, factor, replicas):
            return _collectives.energies_beside_mean_traffic(n, rungs + 1, replicas)
        looked = rungs if rungs > 1 else 0
        own, others = (self._carried(x, factor, replicas) for x in (2, looked))
        return own.plus(others)

    def stages(self, factor: float, replicas: int) -> int:
        """Return the stages of a rung that is not dense: 2, a swap and a gather, or 1.

        The only stage is a gather.
        """
        del factor, replicas
        return 1

    def carries(self, factor: float, replicas: int) -> bool:
        """Return whether figures travel along at a factor that is not dense.

        They do in two stages. A gather sends them N - 1 times, so with more than two
        replicas they have a mean of their own. Dense leaves may be among them.
        """
        return replicas <= 2 or self.stages(factor, replicas) == 2

    def _carried(self, figures: int, factor: float, replicas: int) -> Traffic:
        """Return the cost of figures that travel along."""
        is_gathered = self.stages(factor, replicas) == 1
        return _collectives.carried_traffic(figures, replicas, is_gathered)

    def figures_traffic(
        self, n: int, factor: float, figures: int, replicas: int
    ) -> Traffic:
        """Return the cost of averaging figures at this rung."""
        if self.is_dense(n, factor, replicas):  # with the energies
            return _collectives.mean_traffic(figures, replicas)._replace(messages=0)
        if self.carries(factor, replicas):
            return self._carried(figures, factor, replicas)
        return super().figures_traffic(n, factor, figures, replicas)

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
        """Average a bucket over replicas, in the branch of the rung.

        Arguments and results are those of `Exchange.exchange`.
        """
        # Branches leave these alone or make them anew, and must be marked alike.
        bucket, state, figures = comm.cast((bucket, state, figures))
        energy = lambda: _arrays.energy(bucket)
        looked = jnp.zeros_like(bucket, shape=(len(ladder),))
        if len(ladder) > 1:
            look = lambda: self.bucket_shares(bucket, ladder, key, comm) * energy()
            looked = _arrays.chosen(looks, look, looked)

        def dense(i: int) -> tuple[Exchanged, Any]:
            whole, nothing = energy(), jnp.zeros_like(bucket)
            energies = looked.at[i].set(whole)
            carrier = Carrier.on(comm, (jnp.append(energies, whole), figures))
            mean = carrier.mean(bucket)
            return Exchanged(
                mean, nothing, energies, whole, *carrier.mean_of_figures()
            ), state

        def sparse(i: int) -> tuple[Exchanged, Any]:
            carrier = Carrier.on(comm, figures)
            beneath = carrier if self.carries(ladder[i], comm.replicas) else comm
            at = functools.partial(
                self.at_rung, bucket, state, ladder[i], key=key, step=step
            )
            if len(ladder) == 1:
                exchanged, after = at(comm=beneath)
            else:
                energies = Carrier.on(beneath, looked)
                exchanged, after = at(comm=energies)
                exchanged = _among_others(exchanged, i, looked, energies)
            return exchanged._replace(figures=carrier.mean_of_figures()), after

        is_dense = lambda factor: self.is_dense(bucket.size, factor, comm.replicas)
        branches = [
            functools.partial(dense if is_dense(factor) else sparse, i)
            for i, factor in enumerate(ladder)
        ]
        if not isinstance(rung, np.integer):
            return jax.lax.switch(rung, branches)
        exchanged, after = branches[rung]()
        return exchanged._replace(residual=_last(exchanged)), after


def _last(exchanged: Exchanged) -> jax.Array:
    """Return the residual, which CPUs compute last and in place of the bucket.

    A condition computed from the energies makes XLA wait until nothing reads the bucket
    any more. In the branch of a conditional it would cost a pass over the bucket.
    """
    if not exchanged.residual.size:  # `jnp.where` would lose its mark of what varies
        return exchanged.residual
    in_place = lambda x: jnp.where(_arrays.is_never(exchanged.energies), 0, x)
    return jax.lax.platform_dependent(
        exchanged.residual, cpu=in_place, default=lambda x: x
    )


def _among_others(
    exchanged: Exchanged, rung: int, looked: jax.Array, carrier: Carrier
) -> Exchanged:
    """Return what came of the only rung of a ladder as one of several.

    Args:
      exchanged: what came of it.
      rung: which one it is.
      looked: `[rungs]` float32, the energies that all rungs were estimated to send.
      carrier: took these along.
    """
    taken, energy = exchanged.mean_energies
    means = carrier.mean_of_figures().at[rung].set(taken)
    return exchanged._replace(
        energies=looked.at[rung].set(exchanged.energies[0]),
        mean_energies=jnp.append(means, energy),
    )
