"""Replicas: one on each device of all processes, or all simulated on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gravac_jax as gravac

AXIS = "data"
SIMULATED = 4  # replicas, where there is one device and nobody says how many


class Replicas:
    """N replicas.

    Args:
      asked: The number of replicas. Default: one on every device, or four on a single
        one.

    Raises:
      SystemExit: If `asked` is below 1, or is not what a job of several processes has.

    Attributes:
      count: N.
      local: The replicas of this process, which brings their rows of a batch.
      where: The mesh; or N, if all replicas are on one device.
    """

    def __init__(self, asked: int | None = None):
        devices = sorted(jax.devices(), key=lambda x: (x.process_index, x.id))
        default = len(devices) if len(devices) > 1 else SIMULATED
        self.count = default if asked is None else asked
        if self.count < 1:
            raise SystemExit(f"--replicas must be at least 1, got {asked}")
        if jax.process_count() > 1 and self.count != len(devices):
            raise SystemExit(
                f"--replicas {asked} in a job of {len(devices)} devices, which has one "
                "replica on each; leave --replicas out"
            )
        self.where: jax.sharding.Mesh | int = self.count
        self.local = range(self.count)
        if self.count <= len(devices):
            used = devices[: self.count]
            self.where = jax.sharding.Mesh(np.asarray(used), (AXIS,))
            processes = [x.process_index for x in used]
            first = processes.index(jax.process_index())
            self.local = range(first, first + processes.count(jax.process_index()))

    @property
    def is_simulated(self) -> bool:
        """Whether all replicas share one device, so that nothing is sent."""
        return isinstance(self.where, int)

    def parallel(self, train_step: Any, carried: int = 0) -> Any:
        """Return the step on all replicas of a `train_step(*state, batch)` of one.

        The last `carried` parts of the state are each replica's own: see
        `gravac.data_parallel`.
        """
        return gravac.data_parallel(train_step, self.where, carried=carried)

    def flush(self, tx: Any, params: Any, opt_state: Any) -> Any:
        """Return both after all has been sent that was held back."""
        deliver = lambda params, state, _: gravac.flush(tx, params, state)
        step = gravac.data_parallel(deliver, self.where, donate=False)
        return step(params, opt_state, ())

    def shard(self, batch: Any) -> Any:
        """Return this process's rows on its devices, as a part of the whole batch."""
        if isinstance(self.where, int):
            return jax.tree.map(jnp.asarray, batch)
        sharding = jax.NamedSharding(self.where, jax.P(AXIS))
        put = functools.partial(jax.make_array_from_process_local_data, sharding)
        return jax.tree.map(put, batch)


def replica_key(seed: int, opt_state: Any) -> jax.Array:
    """Return a random key of this replica and step: call it in the train step.

    It follows from the number of the step, so that a run that goes on draws the same.
    """
    steps = optax.tree.get(opt_state, "steps")  # those that gravac.transform counts
    key = jax.random.fold_in(jax.random.key(seed), steps)
    return jax.random.fold_in(key, jax.lax.axis_index(AXIS))
