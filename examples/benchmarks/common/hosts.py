"""Jobs with one process in each host of an emulated network, and their processes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tasks import Task, pipeline

from common import network
from common.journal import Line, write
from common.network import Network, NetworkError
from gravac_jax import make_mesh
from gravac_jax.launch import Job, ProcessDiedError

PROGRAM = str(Path(__file__).parents[1] / "__main__.py")


def run(hosts: int, script: Sequence[str], timeout_seconds: float) -> None:
    """Run a script in each of so many hosts as one `jax.distributed` job, to its end.

    Args:
      hosts: The number of hosts of the network.
      script: The name of a benchmark's part, such as "step_seconds.worker", and its
        arguments.
      timeout_seconds: Time for all of it.

    Raises:
      SystemExit: If there can be no network, a process died, or the time is over.
    """
    finish(hosts, lambda network: network.launch([PROGRAM, *script]), timeout_seconds)


def finish(hosts: int, start: Callable[[Network], Job], timeout_seconds: float) -> None:
    """Make a network, start a job on it and wait for its end; otherwise as `run`."""
    if reason := Network.unavailable():
        raise SystemExit(reason)
    try:
        with Network(hosts) as network:
            start(network).wait(timeout_seconds)
    except (NetworkError, ProcessDiedError, TimeoutError) as error:
        raise SystemExit(f"{hosts} hosts: {error}") from None


class Member:
    """This process in such a job: one replica, in a host of its own.

    Attributes:
      links: The links of all hosts.
      index: The number of this process, from 0.
      replicas: N, the number of processes.
      mesh: All replicas, along the axis "data".
    """

    def __init__(self) -> None:
        self.links = network.attach()
        self.index, self.replicas = jax.process_index(), jax.process_count()
        self.mesh = make_mesh()
        specs = {"mesh": self.mesh, "in_specs": jax.P("data"), "out_specs": jax.P()}
        total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), **specs)
        sharding = jax.NamedSharding(self.mesh, jax.P("data"))
        local = np.ones(1, np.float32)
        self._ones = jax.make_array_from_process_local_data(sharding, local)
        self._total = jax.jit(total)

    def meet(self) -> None:
        """Wait for an empty all-reduce: nobody is through before everybody is there."""
        jax.block_until_ready(self._total(self._ones))

    def set_bandwidth(self, bandwidth_mbit: float | None) -> None:
        """Give every link this bandwidth, in Mbit/s, while nothing is under way."""
        self.meet()
        if self.index == 0:
            self.links.set_bandwidth(bandwidth_mbit)
        self.meet()

    def batches(self, task: Task, rows: int, seed: int) -> Any:
        """Return this replica's training batches, without an end."""
        local = range(self.index, self.index + 1)
        return pipeline.batches(
            task.train, rows=rows, replicas=self.replicas, seed=seed, local=local
        )

    def gather(self, figures: Any) -> np.ndarray:
        """Return `[replicas, ...]`, the figures of every process."""
        return multihost_utils.process_allgather(np.asarray(figures, np.float32))

    def write(self, path: Path, *lines: Line) -> None:
        """Append lines to the record, if this is the first process."""
        if self.index == 0:
            write(path, *lines)
