"""The encodings of one bucket: which one a step takes, and what it costs.

Each encoding is a branch, from the bucket to the residual, compiled as if it were the
only one: nothing is laid out for those that are not taken, and XLA fuses what it can.
What the others would have sent is estimated before the branch, in a step that looks,
and travels along.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gravac_jax import _arrays, _network, _xla
from gravac_jax._encodings.base import LARGE, Bucket, Encoding, Sent
from gravac_jax._encodings.dense import Dense
from gravac_jax._network import Carrier, Comm, Traffic


class Exchanged(NamedTuple):
    """What came of the exchange of a bucket.

    Attributes:
      sent: what this replica has received, and what it holds back.
      energies: `[rungs]` float32, the mean over replicas of the energy that each
        encoding would have sent; 0 where nobody looked. Right for the one taken.
      energy: `[]` float32, the mean energy of the whole bucket.
      figures: the mean over replicas of the figures that travelled along.
    """

    sent: Sent
    energies: jax.Array
    energy: jax.Array
    figures: Any


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The encodings among which a controller chooses, for one bucket.

    Args:
      encodings: by falling bytes.
      bucket: what is encoded.
      is_looked_at: whether steps may estimate what other encodings would have sent.
    """

    encodings: tuple[Encoding, ...]
    bucket: Bucket
    is_looked_at: bool = False

    def init(self) -> dict[str, Any]:
        """Return the state of each class of encodings, by its name: the largest one."""
        state = lambda encoding: jax.eval_shape(lambda: encoding.init(self.bucket))
        size = lambda encoding: sum(x.size for x in jax.tree.leaves(state(encoding)))
        # The last of a name stays: the largest, and of equal ones the first rung.
        largest = {_name(x): x for x in sorted(reversed(self.encodings), key=size)}
        return {name: x.init(self.bucket) for name, x in largest.items()}

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def sent_at(self, replicas: int) -> tuple[Encoding, ...]:
        """Return what is sent at each rung with so many replicas.

        Where its encoding would cost more than that, a rung is a dense step, or sends
        what the rung before it does: of few entries turns may save less than the scales
        of more rows weigh.
        """
        taken: list[Encoding] = []
        cost = lambda x: x.traffic(self.bucket, replicas).wire_bytes
        for encoding in self.encodings if self.bucket.n else ():
            before = [x for x in taken[-1:] if isinstance(x, (Dense, type(encoding)))]
            before = [x for x in before if _of_many(encoding) < _of_many(x)]
            taken.append(min([encoding, *before, Dense()], key=cost))
        return tuple(taken) or (Dense(),) * len(self.encodings)

    def traffic(self, rung: int, figures: int, replicas: int) -> Traffic:
        """Return the cost of a rung, with its energies and so many figures beside."""
        own = self.sent_at(replicas)[rung].traffic(self.bucket, replicas)
        energies = 2 + len(self.encodings) * self.is_looked_at
        carries_all = _carries_all(own, replicas)
        beside = own.figures(energies + figures * carries_all, replicas)
        if figures and not carries_all:
            beside = beside.plus(_network.mean_traffic(figures, replicas))
        return own.plus(beside)._replace(bits=own.bits)

    def shares(
        self, x: jax.Array, states: Any, key: jax.Array, replicas: int, waiting: bool
    ) -> jax.Array:
        """Estimate what each encoding would send of `x`, `[rungs]` float32.

        Args:
          x: `[n]` float32.
          states: from `init` or the last step.
          key: a random key, the same on every replica.
          replicas: N.
          waiting: whether to return, in place of the share of `x` that is sent now, the
            share 1 / (1 + w), where w is how many steps entries of `x`, a gradient
            without a residual, wait (`Encoding.waits`).
        """
        looked: dict[str, Any] = {}
        found = []
        for encoding in self.sent_at(replicas):
            name = _name(encoding)
            if name not in looked:
                looked[name] = encoding.look(x, states.get(name, ()), self.bucket, key)
            estimate = encoding.waits if waiting else encoding.share
            found.append(estimate(looked[name], self.bucket, replicas))
        # Waits as shares of energy, which add up over buckets.
        return 1 / (1 + jnp.stack(found)) if waiting else jnp.stack(found)

    def exchange(
        self,
        x: jax.Array,
        states: Any,
        figures: Any,
        *,
        rung: jax.Array | np.int32,
        reach: Sequence[int],
        looks: jax.Array | bool,
        key: jax.Array,
        step: jax.Array | int,
        comm: Comm,
    ) -> tuple[Exchanged, Any]:
        """Average a bucket over replicas, in the branch of the rung.

        Args:
          x: `[n]` float32, the compensated gradient of this replica.
          states: from `init` or the last step.
          figures: a tree of float32 arrays, to be averaged over replicas at every rung.
          rung: `[]` int32, the same on every replica; an `np.int32` if it is known when
            the step is compiled.
          reach: the rungs that may come, rising, of which `rung` is one.
          looks: whether the step estimates what other rungs would send, `[]` bool, the
            same on every replica, or static.
          key: as for `Encoding.exchange`.
          step: as for `Encoding.exchange`.
          comm: the other replicas.
        """
        # Branches leave these alone or make them anew, and must be marked alike.
        x, states, figures = comm.cast((x, states, figures))
        given = {"bucket": self.bucket, "key": key, "step": step}
        replicas = comm.replicas
        energy = _arrays.energy(x)
        looked: list[jax.Array] = []
        if self.is_looked_at:
            look = lambda: self.shares(x, states, key, replicas, waiting=False) * energy
            nothing = jnp.zeros_like(x, shape=(len(self.encodings),))
            looked = [_xla.chosen(looks, look, nothing)]
        # One vector goes into a branch and comes out of it: in every branch each array
        # would have a kernel of its own.
        leaves, structure = jax.tree.flatten(figures)
        own, others = _arrays.ravel([energy, *looked]), _arrays.ravel(leaves)
        all_figures = jnp.concatenate([own, others])

        def branch(encoding: Encoding) -> tuple[Sent, jax.Array, Any]:
            name, traffic = _name(encoding), encoding.traffic(self.bucket, replicas)
            carries_all = _carries_all(traffic, replicas)
            carrier = Carrier(comm.axis_name, all_figures if carries_all else own)
            state = states.get(name, ())
            sent, after = encoding.exchange(x, state, **given, comm=carrier)
            means = carrier.mean_of_figures(sent.energy)
            if not carries_all:
                means = jnp.concatenate([means, comm.mean(others)])
            return sent, means, states | {name: after} if name in states else states

        taken = self.sent_at(replicas)
        if is_known := isinstance(rung, np.integer):
            reach = (int(rung),)
        branches = [functools.partial(branch, taken[i]) for i in reach]
        at = jnp.sum(jnp.asarray(reach) < rung, dtype=jnp.int32)
        sent, means, after = jax.lax.switch(at, branches)
        if is_known and sent.residual.size:
            # In the branch of a conditional it would cost a pass over the bucket.
            # `jnp.where` would lose its mark of what varies.
            last = _xla.after_reads(sent.residual, sent.energy, energy)
            sent = sent._replace(residual=last)
        mean, whole, *means = _arrays.unravel(means, [energy, energy, *looked, *leaves])
        energies = means.pop(0) if looked else jnp.zeros_like(mean, shape=len(taken))
        energies = jnp.where(jnp.arange(len(taken)) == rung, mean, energies)
        return Exchanged(sent, energies, whole, structure.unflatten(means)), after


def _name(encoding: Encoding) -> str:
    """Return the name under which encodings share a state."""
    return type(encoding).__name__


def _of_many(encoding: Encoding) -> float:
    """Return the bytes that an encoding sends of many entries."""
    return encoding.traffic(LARGE, 2).wire_bytes


def _carries_all(own: Traffic, replicas: int) -> bool:
    """Return whether all figures travel along, or only the few of the encoding.

    A gather sends them N - 1 times, and dense leaves may be among them.
    """
    return replicas <= 2 or own.carries != "gather"
