"""The methods whose steps are timed: what each exchanges, and its compiled steps.

`dense` (float32) and `densehalf` (float16) are plain all-reduces, the baselines that a
compressed step must beat. All others are methods of `training.methods`: `dense16` is
`gravac.DenseMean("bfloat16")`, `fixed10` the static factor 10.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.training import train_step
from jax.flatten_util import ravel_pytree
from tasks import Task
from training.methods import OPTIMIZERS, after, arguments, is_local

import gravac_jax as gravac

BASELINES = ("dense", "dense16", "densehalf")


def all_reduce(dtype: Any, axis_name: str = "data") -> optax.GradientTransformation:
    """Return a mean over replicas by one all-reduce of all gradients, in `dtype`.

    Each replica divides by N and rounds before the sum, as PyTorch's float16 hook
    does. In float16, entries beyond 65,504 N become infinite, and entries below 3e-8 N
    are lost. XLA's CPU backend sends float16 as it is, but bfloat16 as float32.
    """

    def update(updates: Any, params: Any) -> Any:
        del params
        flat, unravel = ravel_pytree(updates)
        mine = (flat / jax.lax.axis_size(axis_name)).astype(dtype)
        return unravel(jax.lax.psum(mine, axis_name).astype(flat.dtype))

    return optax.stateless(update)


def all_reduce_bytes(entries: int, replicas: int, value_bytes: int) -> float:
    """Return what one replica sends in a ring all-reduce, in bytes."""
    return 2 * (replicas - 1) / replicas * value_bytes * entries


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to average gradients.

    Attributes:
      name: The name on the command line.
      exchange: The transformation that averages over the axis "data".
      alone: The same without other replicas: all local work, with the same state.
      ladder: The factors that it may use.
      value_bytes: The bytes of an entry, for a plain all-reduce; None for others.
      chosen: The arguments of `gravac.transform`.
    """

    name: str
    exchange: optax.GradientTransformation
    alone: Any = optax.identity()  # noqa: RUF009  a tuple of functions
    ladder: tuple[float, ...] = (1.0,)
    value_bytes: int | None = None
    chosen: dict[str, Any] = dataclasses.field(default_factory=dict)

    def optimizer(
        self, kind: str, learning_rate: float
    ) -> optax.GradientTransformation:
        """Return this optimizer and a clip, without what the memory does before."""
        return optax.chain(
            *after(self.chosen, OPTIMIZERS[kind], 1.0),
            optax.scale_by_learning_rate(learning_rate),
        )

    @property
    def is_adaptive(self) -> bool:
        """Whether a controller chooses among several factors."""
        return len(self.ladder) > 1

    @property
    def is_delayed(self) -> bool:
        """Whether an exchange is one step late."""
        return bool(self.chosen.get("delay"))

    def rung(self, factor: float) -> int:
        """Return the rung of a factor of `StepInfo`: n / k, with k a whole number."""
        return int(np.argmin(np.abs(np.asarray(self.ladder) / factor - 1)))

    def select(self, grads: Any, state: Any, rung: jax.Array) -> tuple[Any, Any]:
        """Do at `rung` what the method does without other replicas."""
        if self.value_bytes is not None:
            return grads, state
        return self.alone.update(grads, state._replace(ahead=jnp.stack([rung, rung])))


PLAIN = {
    "dense": Method("dense", all_reduce(jnp.float32), value_bytes=4),
    "densehalf": Method("densehalf", all_reduce(jnp.float16), value_bytes=2),
}


def method(name: str) -> Method:
    """Return the method of that name.

    Raises:
      SystemExit: If there is none.
    """
    if name in PLAIN:
        return PLAIN[name]
    chosen = arguments(name, beside=PLAIN)
    exchange = gravac.transform("data", **chosen)
    alone = gravac.transform(axis_name=None, **chosen)
    ladder = chosen["controller"].ladder
    return Method(name, exchange, alone, ladder, chosen=chosen)


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
        """Take a step and return the seconds until the last of its results is there."""
        start = time.perf_counter()
        results = jax.block_until_ready(self._step(*self.state, *inputs, **times))
        seconds = time.perf_counter() - start
        self.state = results[: len(self.state)]
        return seconds


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


class Runner:
    """A method's train step: whole, and alone, which is without other replicas.

    Args:
      method: The method.
      task: What to train.
      params: The initial params.
      mesh: All replicas, one in each process.
      kind: The optimizer, "sgd" or "adam".
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        params: Any,
        mesh: jax.sharding.Mesh,
        kind: str = "sgd",
    ) -> None:
        self.method = method
        optimizer = method.optimizer(kind, task.learning_rate)
        tx = optax.chain(method.exchange, optimizer)
        whole = train_step(tx, task.loss, is_local(method.name))

        def alone(params: Any, opt_state: Any, batch: Any, rung: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(task.loss)(params, batch)
            exchange_state, state = opt_state
            updates, exchange_state = method.select(grads, exchange_state, rung)
            updates, state = optimizer.update(updates, state, params)
            return optax.apply_updates(params, updates), (exchange_state, state), loss

        state = gravac.place((params, tx.init(params)), mesh)
        step = gravac.data_parallel(whole, mesh)
        if method.is_delayed and not method.is_adaptive:
            step = gravac.train_step(task.loss, tx, mesh, overlap=True)
        self.whole = Trainer(step, state)
        self._alone = jax.jit(alone, donate_argnums=(0, 1))

    def prepare(self, data: Sequence[Any]) -> None:
        """Compile by training on `data`; each network starts from that state."""
        for batch in data:
            # No controller is told of seconds that were spent on compiling.
            self._last_seconds = np.float32(np.nan)
            self.advance(batch)
        self.whole.mark()
        mine = lambda x: jnp.array(x.addressable_data(0), copy=True)
        self.alone = Trainer(self._alone, jax.tree.map(mine, self.whole.state))
        self.alone.advance(data[0], np.int32(0))

    def begin(self, data: Sequence[Any]) -> None:
        """Start again; a method that chooses finds its factor on `data` first."""
        self.whole.rewind()
        self.alone.rewind()
        self._last_seconds = np.float32(np.nan)
        if not self.method.is_adaptive:
            return
        for batch in data:
            self.advance(batch)
        # The step alone looks at other rungs as often as the whole step now does.
        young = optax.tree.get(self.alone.state, "steps")
        settled = jnp.full_like(young, len(data))
        self.alone.state = optax.tree.set(self.alone.state, steps=settled)

    def advance(self, batch: Any) -> float:
        """Take a step, which is told how long the one before it took."""
        times = {"step_seconds": self._last_seconds} if self.method.is_adaptive else {}
        seconds = self.whole.advance(batch, **times)
        self._last_seconds = np.float32(seconds)
        return seconds
