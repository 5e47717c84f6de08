"""The training steps that the probe times, one for each exchange and factor.

Steps run as users run them, through `gravac.data_parallel` and `gravac.transform`.
They compress over the first axis of the mesh and average dense over the others.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import gravac_jax as gravac

EXCHANGES = {
    "few-bits": gravac.QuantizedAllReduce(),
    "all-gather": gravac.AllGather(),
    "rows": gravac.QuantizedTopK(),
    "leader": gravac.LeaderIndices(),
    "low-rank": gravac.LowRank(),
    "dense-16": gravac.DenseMean("bfloat16"),
}
FEW_BITS_FACTORS = gravac.Fastest().ladder[1:]
OTHER_FACTORS = (10.0, 100.0, 1000.0)
ON_REQUEST = ("rows",)  # on CPUs its selection at low factors takes long
DENSE = "dense"
DENSE_RUNG = "dense rung"  # factor 1 of the transform

MIN_PARAMS = 16_384  # smaller models gain nothing

# So small that no loss diverges, however many steps are timed.
_LEARNING_RATE = 1e-8
# A controller looks at all rungs in its first steps and then at regular intervals. The
# probe times the steps between. A prime is a multiple of no interval.
_SETTLED_STEP = 1_000_003


class Model(NamedTuple):
    """A model to train.

    Attributes:
      loss_fn: The loss of one replica, `loss_fn(params, batch)`.
      params: A pytree of floating-point arrays.
      batch: The batch of one replica, a pytree of arrays with examples along their
        first axis.
      has_compute: Whether the time that the gradient takes to compute means anything.
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    has_compute: bool = True


class Step(NamedTuple):
    """A compiled training step.

    Attributes:
      exchange: The name of the exchange.
      factor: The compression factor n / k.
      wire_bytes: The bytes that one replica sends over the compressed axis.
      messages: The messages over this axis that a step waits for, one after the other.
      run: Runs one step and returns arrays that are ready when the step is done.
    """

    exchange: str
    factor: float
    wire_bytes: float
    messages: int
    run: Callable[[], Any]


def stand_in(params: int) -> Model:
    """Return a model of about `params` params whose gradient costs no computation.

    The gradient equals the params, which are drawn with the heavy tails of gradients,
    as square matrices of at most 1024 rows.
    """
    count = math.ceil(params / 1024**2)
    side = math.isqrt(params // count)
    draw = lambda key: 1e-3 * jax.random.normal(key, (side, side)) ** 3
    matrices = [draw(key) for key in jax.random.split(jax.random.key(0), count)]
    loss_fn = lambda params, batch: optax.tree.norm(params, squared=True) / 2
    return Model(loss_fn, matrices, np.zeros(1), has_compute=False)


class Trainer:
    """Compiles training steps of one model. All of them train the same params.

    Args:
      mesh: The mesh to train on.
      model: The model to train.

    Attributes:
      entries: The number of params.
    """

    def __init__(self, mesh: jax.sharding.Mesh, model: Model) -> None:
        self._mesh, self._loss_fn = mesh, model.loss_fn
        self._axis, *fast = mesh.axis_names
        self._replicas = mesh.shape[self._axis]
        self._fast_axes = tuple(fast) or None
        self._params = gravac.place(model.params, mesh, self._axis)
        self.entries = sum(x.size for x in jax.tree.leaves(model.params))
        repeat = lambda x: np.concatenate([np.asarray(x)] * jax.local_device_count())
        self._batch = jax.tree.map(repeat, model.batch)

    def without_exchange(self) -> Callable[[], Any]:
        """Return a step that sends nothing over the compressed axis."""
        return self._compile(functools.partial(_dense_mean, axes=self._fast_axes), ())

    def dense(self) -> Step:
        """Return a step that averages float32 gradients in one all-reduce."""
        average = functools.partial(_dense_mean, axes=self._mesh.axis_names)
        sent = gravac.DenseMean().traffic(self.entries, 1, self._replicas)
        run = self._compile(average, ())
        return Step(DENSE, 1.0, sent.wire_bytes, sent.messages, run)

    def compressed(self, name: str, factors: tuple[float, ...]) -> list[Step]:
        """Return the steps of one exchange, beginning with the dense rung.

        `dense-16` has the dense rung alone.

        Args:
          name: The name of the exchange.
          factors: The compression factors, each above 1, rising; () for the usual ones.

        Raises:
          ValueError: If the gradient is not finite: the transform leaves it out.
        """
        if not factors:
            factors = FEW_BITS_FACTORS if name == "few-bits" else OTHER_FACTORS
        ladder = (1.0,) if name == "dense-16" else (1.0, *factors)
        is_dense = len(ladder) == 1
        tx = gravac.transform(
            self._axis,
            dense_axis_name=self._fast_axes,
            exchange=EXCHANGES[name],
            controller=gravac.Fixed(1) if is_dense else gravac.Fastest(ladder),
            wire=gravac.WireCost(),  # nothing is chosen, so no times are missing
        )

        def average(grads: Any, state: Any, rung: jax.Array) -> tuple[Any, Any]:
            ahead = jnp.stack([rung, rung])
            state = optax.tree.set(state, ahead=ahead, steps=jnp.int32(_SETTLED_STEP))
            return tx.update(grads, state)

        train = self._compile(average, tx.init(self._params))
        steps: list[Step] = []
        for rung, factor in enumerate(ladder):
            run = functools.partial(train, rung=np.int32(rung))
            info = optax.tree.get(run(), "StepInfo")
            if not info.is_finite:
                raise ValueError(
                    "the gradient of --loss has entries that are not finite, or above"
                    " 2**50. Return params and a batch that training works with."
                )
            title = DENSE_RUNG if factor == 1 and not is_dense else name
            messages = self._messages(EXCHANGES[name], factor, len(ladder))
            steps.append(Step(title, factor, float(info.wire_bytes), messages, run))
        return steps

    def _messages(self, exchange: gravac.Exchange, factor: float, rungs: int) -> int:
        """Return the messages of the entries, their energies, and the figures."""
        shapes = [x.shape for x in jax.tree.leaves(self._params) if x.ndim > 1]
        n, replicas = sum(map(math.prod, shapes)), self._replicas
        exchange = exchange.shaped(tuple(sorted(shapes, key=math.prod)))
        # Over a fast axis, the figures have an all-reduce of their own.
        carrier = gravac.DenseMean() if self._fast_axes else exchange
        parts = (
            exchange.traffic(n, factor, replicas),
            exchange.energies_traffic(n, factor, rungs, replicas),
            carrier.figures_traffic(n, factor, rungs, replicas),
        )
        return sum(x.messages for x in parts)

    def _compile(self, average: Callable[..., Any], state: Any) -> Callable[..., Any]:
        """Return a function that trains one step and returns the new params and state.

        Args:
          average: Averages gradients, `(grads, state, **arguments) -> (mean, state)`.
          state: The first state of `average`.
        """

        def train_step(params: Any, state: Any, batch: Any, **arguments: Any) -> Any:
            gradient = gravac.value_and_grad(self._loss_fn, self._mesh.axis_names)
            _, grads = gradient(params, batch)
            mean, state = average(grads, state, **arguments)
            descend = lambda p, g: p - (_LEARNING_RATE * g).astype(p.dtype)
            return jax.tree.map(descend, params, mean), state

        # All replicas have the same batch, so their params stay equal even without an
        # exchange. JAX cannot know that.
        step = gravac.data_parallel(
            train_step, self._mesh, self._axis, self._fast_axes, check_vma=False
        )
        state = gravac.place(state, self._mesh, self._axis)

        def run(**arguments: Any) -> Any:
            nonlocal state
            self._params, state = step(self._params, state, self._batch, **arguments)
            return self._params, state

        return run


def _dense_mean(
    grads: Any, state: Any, axes: tuple[str, ...] | None
) -> tuple[Any, Any]:
    """Return the float32 mean of `grads`, as one all-reduce, and the same `state`."""
    if axes is None:
        return grads, state
    flat, unravel = ravel_pytree(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
    return unravel(jax.lax.pmean(flat, axes)), state
