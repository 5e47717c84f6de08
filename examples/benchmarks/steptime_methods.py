"""The methods whose steps are timed: what each exchanges, and its compiled steps.

`dense`, `dense16` (bfloat16) and `densehalf` (float16) are the baselines, `default` is
`gravac.transform()` as it comes, `fixed10` the static factor 10; any factor will do.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dense import dense16, dense32, dense_half
from tasks import Task
from training.methods import arguments

import gravac_jax as gravac

Select = Callable[[Any, Any, jax.Array], tuple[Any, Any]]


def select_nothing(grads: Any, state: Any, rung: jax.Array) -> tuple[Any, Any]:
    """The local half of a method that sends everything."""
    del rung
    return grads, state


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to average gradients.

    Attributes:
      name: as on the command line.
      exchange: it, over the axis "data".
      select: its local half, `(grads, state, rung) -> (updates, state)`: all that it
        does at that rung without other replicas. The state is that of `exchange`.
      ladder: the factors that it may use.
      value_bytes: of an entry, for a dense baseline.
    """

    name: str
    exchange: optax.GradientTransformation
    select: Select = select_nothing
    ladder: tuple[float, ...] = (1.0,)
    value_bytes: int | None = None

    @property
    def is_adaptive(self) -> bool:
        """Whether there is something to settle."""
        return len(self.ladder) > 1

    def rung(self, factor: float) -> int:
        """The rung of a factor as `StepInfo` has it: n / k, with k a whole number."""
        return int(np.argmin(np.abs(np.asarray(self.ladder) / factor - 1)))


DENSE = {
    "dense": Method("dense", dense32("data"), value_bytes=4),
    "dense16": Method("dense16", dense16("data"), value_bytes=2),
    "densehalf": Method("densehalf", dense_half("data"), value_bytes=2),
}
BASELINES = tuple(DENSE)


def method(name: str) -> Method:
    """The method of that name.

    Raises:
      SystemExit: if there is none.
    """
    if name in DENSE:
        return DENSE[name]
    chosen = arguments(name, beside=DENSE)
    alone = gravac.transform(axis_name=None, **chosen)

    def select(grads: Any, state: Any, rung: jax.Array) -> tuple[Any, Any]:
        return alone.update(grads, optax.tree.set(state, rung=rung))

    exchange = gravac.transform("data", **chosen)
    return Method(name, exchange, select, chosen["controller"].ladder)


class Trainer:
    """A compiled step and its state, with a state to go back to."""

    def __init__(self, step: Callable[..., Any], state: tuple[Any, ...]) -> None:
        self._step = step
        self.state = state
        self.mark()

    def mark(self) -> None:
        """Remember the present state."""
        self._marked = _copy(self.state)

    def rewind(self) -> None:
        """Go back to the marked state."""
        self.state = _copy(self._marked)

    def advance(self, *inputs: Any, **times: Any) -> float:
        """Take a step; returns the seconds until the last of its results is there."""
        start = time.perf_counter()
        results = jax.block_until_ready(self._step(*self.state, *inputs, **times))
        seconds = time.perf_counter() - start
        self.state = results[: len(self.state)]
        return seconds


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


class Runner:
    """A method's train step: whole, and alone, which is without the other replicas.

    Args:
      method: the method.
      task: what to train.
      params: to begin with.
      mesh: of all replicas, one in each process.
    """

    def __init__(
        self, method: Method, task: Task, params: Any, mesh: jax.sharding.Mesh
    ) -> None:
        self.method = method
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.sgd(task.learning_rate, momentum=0.9)
        )
        tx = optax.chain(method.exchange, optimizer)

        def whole(params: Any, opt_state: Any, batch: Any, **times: Any) -> Any:
            loss, grads = gravac.value_and_grad(task.loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params, **times)
            return optax.apply_updates(params, updates), opt_state, loss

        def alone(params: Any, opt_state: Any, batch: Any, rung: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(task.loss)(params, batch)
            exchange_state, state = opt_state
            updates, exchange_state = method.select(grads, exchange_state, rung)
            updates, state = optimizer.update(updates, state, params)
            return optax.apply_updates(params, updates), (exchange_state, state), loss

        state = gravac.place((params, tx.init(params)), mesh)
        self.whole = Trainer(gravac.data_parallel(whole, mesh), state)
        self._alone = jax.jit(alone, donate_argnums=(0, 1))

    def prepare(self, data: Sequence[Any]) -> None:
        """Compile, by training on `data`; every network finds what this leaves."""
        for batch in data:
            # Nobody is told of seconds that were spent on compiling.
            self._last_seconds = np.float32(np.nan)
            self.advance(batch)
        self.whole.mark()
        mine = lambda x: jnp.array(x.addressable_data(0), copy=True)
        self.alone = Trainer(self._alone, jax.tree.map(mine, self.whole.state))
        self.alone.advance(data[0], np.int32(0))

    def program(self, batch: Any) -> str:
        """What the step alone is compiled to."""
        state = self.alone.state
        return self._alone.lower(*state, batch, np.int32(0)).compile().as_text()

    def begin(self, data: Sequence[Any]) -> None:
        """Go back to that; a method that chooses finds its factor on `data` first."""
        self.whole.rewind()
        self.alone.rewind()
        self._last_seconds = np.float32(np.nan)
        if not self.method.is_adaptive:
            return
        for batch in data:
            self.advance(batch)
        # It looks at other rungs as often as the whole step now does.
        young = optax.tree.get(self.alone.state, "steps")
        settled = jnp.full_like(young, len(data))
        self.alone.state = optax.tree.set(self.alone.state, steps=settled)

    def advance(self, batch: Any) -> float:
        """Take a step, which is told how long the one before it took."""
        times = {"step_seconds": self._last_seconds} if self.method.is_adaptive else {}
        seconds = self.whole.advance(batch, **times)
        self._last_seconds = np.float32(seconds)
        return seconds
