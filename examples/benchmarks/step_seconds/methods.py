"""The methods whose steps are timed: what each exchanges, and its compiled steps.

"dense" (float32) and "dense float16" are plain all-reduces, the baselines that a
compressed step must beat. All others are methods of `training.methods`.
"""

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
from training.methods import DENSE, MAX_NORM, OPTIMIZERS, method

import gravac_jax as gravac

HALF = "dense float16"
PLAIN: dict[str, Any] = {DENSE: jnp.float32, HALF: jnp.float16}
BASELINES = (DENSE, 'Dense("bfloat16")', HALF)


def all_reduce(dtype: Any, axis_name: str | None) -> optax.GradientTransformation:
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

    return optax.identity() if axis_name is None else optax.stateless(update)


def all_reduce_bytes(entries: int, replicas: int, name: str) -> float:
    """Return what one replica sends in a baseline's ring all-reduce, in bytes."""
    value_bytes = jnp.dtype(PLAIN[name]).itemsize
    return 2 * (replicas - 1) / replicas * value_bytes * entries


def optimizer_of(
    name: str, after: Any, rate: Any, axis_name: str | None = "data"
) -> optax.GradientTransformationExtraArgs:
    """Return a method's whole optimizer; without other replicas, if there is no axis.

    Raises:
      SystemExit: If there is no method of that name.
    """
    if name not in PLAIN:
        return method(name).optimizer(after, rate, axis_name)
    mean = all_reduce(PLAIN[name], axis_name)
    clip = optax.clip_by_global_norm(MAX_NORM)
    scale = optax.scale_by_learning_rate(rate)
    return optax.with_extra_args_support(optax.chain(mean, clip, after, scale))


def ladder_of(name: str) -> list[str]:
    """Return the names of the encodings that a method may take."""
    return [name] if name in PLAIN else [repr(x) for x in method(name).ladder]


def is_own(name: str) -> bool:
    """Return whether a method takes gradients at each replica's own params."""
    return name not in PLAIN and method(name).is_own


def brings_loss(name: str) -> bool:
    """Return whether a method's exchange brings the mean loss.

    A plain all-reduce of gradients has one of the loss beside it, as people write it.
    """
    return name not in PLAIN and method(name).brings_loss


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
      name: The method's name.
      task: What to train.
      params: The initial params.
      mesh: All replicas, one in each process.
      kind: The optimizer that may follow the exchange.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        params: Any,
        mesh: jax.sharding.Mesh,
        kind: str = "sgd",
    ) -> None:
        self.name, self.is_adaptive = name, len(ladder_of(name)) > 1
        given = name, OPTIMIZERS[kind], task.learning_rate
        tx, local = optimizer_of(*given), optimizer_of(*given, None)
        by_itself = train_step(local, task.loss, is_own(name), None)

        def alone(params: Any, opt_state: Any, batch: Any, rung: jax.Array) -> Any:
            if name not in PLAIN:
                opt_state = optax.tree.set(
                    opt_state, next_rungs=jnp.stack([rung, rung])
                )
            return by_itself(params, opt_state, batch)

        state = gravac.place((params, tx.init(params)), mesh)
        whole = train_step(tx, task.loss, is_own(name), brings_loss=brings_loss(name))
        self.whole = Trainer(gravac.data_parallel(whole, mesh), state)
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
        """Start again; a method that chooses finds its encoding on `data` first."""
        self.whole.rewind()
        self.alone.rewind()
        self._last_seconds = np.float32(np.nan)
        if not self.is_adaptive:
            return
        for batch in data:
            self.advance(batch)
        # The step alone looks at other rungs as often as the whole step now does.
        young = optax.tree.get(self.alone.state, "steps")
        settled = jnp.full_like(young, len(data))
        self.alone.state = optax.tree.set(self.alone.state, steps=settled)

    def advance(self, batch: Any) -> float:
        """Take a step, which is told how long the one before it took."""
        times = {"step_seconds": self._last_seconds} if self.is_adaptive else {}
        seconds = self.whole.advance(batch, **times)
        self._last_seconds = np.float32(seconds)
        return seconds
