"""Runs programs on every device of a mesh, and times them in turns.

All have been compiled before; then every round takes each once, beginning with another
one, so that whatever else the machine does falls on all alike. A time is that of the
slowest process, from when all were ready.
"""

import functools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gravac_jax._comm import Comm

WARM_UP = 2
LEAST_ROUNDS, MOST_ROUNDS = 5, 50

Run = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)


class Bench:
    """The devices of a mesh.

    Args:
      mesh: it.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self.mesh = mesh
        self._same = jax.NamedSharding(mesh, jax.P())
        self._meet = self.program(Comm(mesh.axis_names).mean, self.make(_nothing))

    def make(self, function: Callable[[], Any]) -> Any:
        """What it returns, on every device."""
        return jax.jit(function, out_shardings=self._same)()

    def mapped(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> Any:
        """A function that every device runs with its own of all arguments."""
        # Nothing is marked as varying: whatever is not exchanged is the same anyway.
        specs: dict[str, Any] = {"in_specs": jax.P(), "out_specs": jax.P()}
        own = jax.shard_map(function, mesh=self.mesh, check_vma=False, **specs)
        return jax.jit(own, donate_argnums=donate)

    def program(self, function: Callable[..., Any], *args: Any) -> Run:
        """One that runs `function(*args)` on every device."""
        return functools.partial(self.mapped(function), *args)

    def launch(self) -> Run:
        """A program that does nothing."""
        return self.program(lambda x: x + 1, self.make(_nothing))

    def seconds(self, run: Run) -> float:
        """Of one call, on the slowest process."""
        return float(_slowest([self._own_seconds(run)])[0])

    def _own_seconds(self, run: Run) -> float:
        jax.block_until_ready(self._meet())
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    def take_turns(
        self, runs: Mapping[Name, Run], budget_seconds: float
    ) -> dict[Name, np.ndarray]:
        """`[rounds]` seconds of each, with as many rounds as the budget allows."""
        names = list(runs)
        for run in runs.values():
            for _ in range(WARM_UP):
                jax.block_until_ready(run())
        rounds: list[np.ndarray] = []
        spent = 0.0
        # All processes know the same times, and stop together.
        while len(rounds) < LEAST_ROUNDS or (
            spent < budget_seconds and len(rounds) < MOST_ROUNDS
        ):
            first = len(rounds) % len(names)
            turn = [*names[first:], *names[:first]]
            taken = {name: self._own_seconds(runs[name]) for name in turn}
            rounds.append(_slowest([taken[name] for name in names]))
            spent += float(rounds[-1].sum())
        return dict(zip(names, np.array(rounds).T, strict=True))


def _slowest(seconds: Sequence[float]) -> np.ndarray:
    """The most that any process took, of each; the same on all of them."""
    own = np.asarray(seconds, np.float32)
    if jax.process_count() == 1:
        return own
    return multihost_utils.process_allgather(own).max(0)


def _nothing() -> jax.Array:
    return jnp.zeros(1, jnp.float32)
