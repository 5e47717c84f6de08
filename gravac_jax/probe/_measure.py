"""Times steps and the network, and compares compressed steps with dense ones.

Steps run as users run them, through `gravac.data_parallel` and `gravac.transform`, one
kind for each encoding. They compress over the first axis of the mesh and average dense
over the others.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree

import gravac_jax as gravac
from gravac_jax import _collectives
from gravac_jax._encodings.ladder import Ladder
from gravac_jax.probe._results import Range, verdict

MIN_ROUNDS = 5  # the fewest samples that give a 90% confidence interval
WARM_UP_CALLS = 2  # the first call compiles, and sometimes the second

# What is timed beside steps that send an encoding.
DENSE, LAUNCH, NO_EXCHANGE = "dense", "launch", "no exchange"
SMALL_ALL_REDUCE, LARGE_ALL_REDUCE = "small all-reduce", "large all-reduce"

# So small that no loss diverges, however many steps are timed.
_LEARNING_RATE = 1e-8

# The loss of one replica, `loss_fn(params, batch)`, its params, and its batch, of
# arrays with examples along their first axis.
Model = tuple[Callable[[Any, Any], jax.Array], Any, Any]
Run = Callable[[], Any]
Seconds = Mapping[str, np.ndarray]


def measure(
    mesh: jax.sharding.Mesh,
    model: Model,
    encodings: Iterable[gravac.Encoding],
    budget_seconds: float,
    has_compute: bool,
) -> dict[str, Any]:
    """Compile all steps, time them, and compare them with dense ones.

    Args:
      mesh: The mesh to train on. Steps compress over its first axis.
      model: The model to train.
      encodings: What to send, each once. Without any, only dense steps and steps
        without an exchange are timed.
      budget_seconds: How long to time. Compiling comes on top.
      has_compute: Whether the time that the gradient takes to compute means anything.

    Returns:
      The results, as `--json` writes them, the same on all processes. `wire` has
      arguments of `gravac.WireCost`, as far as they were measured. `headroom` is the
      speed-up of a step that sends nothing, the most that compression can win; None if
      computation was not timed. The first of `rows` is dense.
    """
    trainer = Trainer(mesh, model)
    steps = [trainer.dense(), *map(trainer.compressed, encodings)]
    axis, *_ = mesh.axis_names
    mean = lambda x: jax.lax.pmean(x, axis)
    runs = {
        LAUNCH: _program(mesh, lambda x: x + 1, entries=1),
        SMALL_ALL_REDUCE: _program(mesh, mean, entries=1),
        LARGE_ALL_REDUCE: _program(mesh, mean, trainer.entries),
        NO_EXCHANGE: trainer.without_exchange(),
        **{x.name: x.run for x in steps},
    }
    meet = _program(mesh, lambda x: jax.lax.pmean(x, mesh.axis_names), entries=1)
    seconds = in_rounds(runs, meet, budget_seconds)
    wire, headroom = network(seconds, steps), None
    if has_compute:
        wire["compute_seconds"] = float(np.median(seconds[NO_EXCHANGE]))
        headroom = median_range(seconds[DENSE] / seconds[NO_EXCHANGE])
    results = {
        "devices": f"{mesh.size} {mesh.devices.flat[0].platform}",
        "processes": jax.process_count(),
        "params": trainer.entries,
        "axis": axis,
        "replicas": trainer.replicas,
        "rounds": len(seconds[LAUNCH]),
        "wire": wire,
        "headroom": headroom,
        "rows": compare(seconds, steps),
    }
    return results | {"verdict": verdict(results)}


class Step(NamedTuple):
    """A compiled training step.

    Attributes:
      name: The encoding as one writes it, or `DENSE`.
      wire_bytes: The bytes that one replica sends over the compressed axis.
      messages: The messages over this axis that a step waits for, one after the other.
      run: Runs one step and returns arrays that are ready when the step is done.
    """

    name: str
    wire_bytes: float
    messages: float
    run: Run


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
    return loss_fn, matrices, np.zeros(1)


class Trainer:
    """Compiles training steps of one model. All of them train the same params.

    Args:
      mesh: The mesh to train on.
      model: The model to train.

    Attributes:
      entries: The number of params.
      replicas: N, the number of replicas along the compressed axis.
    """

    def __init__(self, mesh: jax.sharding.Mesh, model: Model) -> None:
        self._mesh, (self._loss_fn, params, batch) = mesh, model
        self._axis, *fast = mesh.axis_names
        self._fast_axes = tuple(fast) or None
        self._params = gravac.place(params, mesh, self._axis)
        self.entries = sum(x.size for x in jax.tree.leaves(params))
        self.replicas = mesh.shape[self._axis]
        repeat = lambda x: np.concatenate([np.asarray(x)] * jax.local_device_count())
        self._batch = jax.tree.map(repeat, batch)

    def dense(self) -> Step:
        """Return a step that averages float32 gradients in one all-reduce."""
        sent = gravac.Dense().traffic(gravac.Bucket(self.entries), self.replicas)
        run = self.compile(dense_mean(self._mesh.axis_names))
        return Step(DENSE, sent.wire_bytes, sent.messages, run)

    def without_exchange(self) -> Run:
        """Return a step that sends nothing over the compressed axis."""
        return self.compile(dense_mean(self._fast_axes))

    def compressed(self, encoding: gravac.Encoding) -> Step:
        """Return a step that sends an encoding.

        Raises:
          ValueError: If the gradient is not finite: the transform leaves it out.
        """
        fast_axes = self._fast_axes
        tx = gravac.transform(self._axis, send=encoding, dense_axis_name=fast_axes)
        run = self.compile(tx)
        info = optax.tree.get(run(), "StepInfo")
        if not info.is_finite:
            raise ValueError(
                "the gradient of --loss has entries that are not finite, or above"
                " 2**50. Return params and a batch that training works with."
            )
        shapes = sorted((x.shape for x in jax.tree.leaves(self._params)), key=math.prod)
        ladder = Ladder((encoding,), gravac.Bucket(self.entries, tuple(shapes)))
        sent = ladder.traffic(0, 1, self.replicas)
        if fast_axes:  # the figures have an all-reduce of their own
            sent = ladder.traffic(0, 0, self.replicas)
            sent = sent.plus(_collectives.mean_traffic(1, self.replicas))
        return Step(repr(encoding), float(info.wire_bytes), sent.messages, run)

    def compile(self, tx: optax.GradientTransformation) -> Run:
        """Return a function that trains a step whose gradients `tx` averages."""

        def train_step(params: Any, state: Any, batch: Any) -> Any:
            gradient = gravac.value_and_grad(self._loss_fn, self._mesh.axis_names)
            _, grads = gradient(params, batch)
            mean, state = tx.update(grads, state)
            descend = lambda p, g: p - (_LEARNING_RATE * g).astype(p.dtype)
            return jax.tree.map(descend, params, mean), state

        # All replicas have the same batch, so their params stay equal even without an
        # exchange. JAX cannot know that.
        step = gravac.data_parallel(
            train_step, self._mesh, self._axis, self._fast_axes, check_vma=False
        )
        state = gravac.place(tx.init(self._params), self._mesh, self._axis)

        def run() -> Any:
            nonlocal state
            self._params, state = step(self._params, state, self._batch)
            return self._params, state

        return run


def dense_mean(axes: tuple[str, ...] | None) -> optax.GradientTransformation:
    """Return what averages float32 gradients in one all-reduce, if there are axes."""

    def mean(grads: Any, _: Any) -> Any:
        as_float32 = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        flat, unravel = ravel_pytree(as_float32)
        return unravel(jax.lax.pmean(flat, axes))

    return optax.stateless(mean) if axes else optax.identity()


def in_rounds(runs: Mapping[str, Run], meet: Run, budget_seconds: float) -> Seconds:
    """Time every program once a round until the budget is spent.

    Whatever else the machine does slows all programs alike. Each round starts with
    another one. A time is that of the slowest process.

    Args:
      runs: The programs, by name. Each returns arrays that are ready when it is done.
      meet: A short collective, after which all processes start a program together.
      budget_seconds: The time for all rounds together. At least five rounds run.

    Returns:
      `[rounds]` float32 seconds of each program, the same on all processes.
    """
    for run in runs.values():
        for _ in range(WARM_UP_CALLS):
            jax.block_until_ready(run())
    names, rounds, spent_seconds = list(runs), [], 0.0
    # All processes see the same times, and so stop after the same round.
    while len(rounds) < MIN_ROUNDS or spent_seconds < budget_seconds:
        first = len(rounds) % len(names)
        start = time.perf_counter()
        taken = {x: _seconds(runs[x], meet) for x in names[first:] + names[:first]}
        own = [*(taken[x] for x in names), time.perf_counter() - start]
        # A process alone gets back its own row.
        everyone = multihost_utils.process_allgather(np.array(own, np.float32))
        slowest = np.atleast_2d(everyone).max(0)
        rounds.append(slowest[:-1])
        spent_seconds += slowest[-1]
    return dict(zip(names, np.array(rounds).T, strict=True))


def _seconds(run: Run, meet: Run) -> float:
    jax.block_until_ready(run())  # in training a step follows one like it
    jax.block_until_ready(meet())
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _program(
    mesh: jax.sharding.Mesh, function: Callable[[jax.Array], jax.Array], entries: int
) -> Run:
    """Return a program that every device runs on its own `[entries]` float32."""
    x = jnp.ones(entries, jnp.float32, device=jax.NamedSharding(mesh, jax.P()))
    specs: dict[str, Any] = {"in_specs": jax.P(), "out_specs": jax.P()}
    mapped = jax.shard_map(function, mesh=mesh, check_vma=False, **specs)
    return functools.partial(jax.jit(mapped), x)


def compare(seconds: Seconds, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Compare the `[rounds]` seconds of each step with those of dense steps."""

    def row(x: Step) -> dict[str, Any]:
        speed_up = median_range(seconds[DENSE] / seconds[x.name])
        return {
            "encoding": x.name,
            "wire_bytes": x.wire_bytes,
            "step_seconds": median_range(seconds[x.name]),
            "speed_up": speed_up,
            "pays": speed_up.pays,
        }

    return list(map(row, steps))


def median_range(samples: np.ndarray) -> Range:
    """Return the median of `[n]` samples and its 90% confidence interval.

    Each sample lies below the true median with probability 1/2, so the number of
    samples below it is binomial, whatever their distribution. The interval lies between
    two of the sorted samples; for five samples these are the smallest and the largest.

    Example:
      >>> print(median_range(np.array([3.0, 1.0, 2.0, 5.0, 4.0])))
      3.00 (1.00 to 5.00)
    """
    n = len(samples)
    tails = np.cumsum([math.comb(n, i) for i in range(n)]) / 2**n
    cut = max(0, int(np.sum(tails <= 0.05)) - 1)
    ordered = np.sort(samples)
    low, middle, high = ordered[cut], np.median(samples), ordered[n - 1 - cut]
    return Range(float(low), float(middle), float(high))


def network(seconds: Seconds, steps: Sequence[Step]) -> dict[str, float]:
    """Return latency, bandwidth and selection as arguments of `gravac.WireCost`.

    Args:
      seconds: `[rounds]` seconds of the steps, and of what is timed beside them.
      steps: The steps. The first is dense, and sends as much as the large all-reduce.
        Without another one, selection is left out.
    """
    median = lambda what: float(np.median(seconds[what]))
    dense, *others = steps
    small, base = median(SMALL_ALL_REDUCE), median(NO_EXCHANGE)
    latency = max(0.0, small - median(LAUNCH)) / dense.messages
    transfer = median(LARGE_ALL_REDUCE) - small
    byte_seconds = max(transfer / dense.wire_bytes, 1e-15)
    exchange = lambda x: x.messages * latency + x.wire_bytes * byte_seconds
    selection = [median(x.name) - base - exchange(x) for x in others]
    wire = {"bytes_per_second": 1 / byte_seconds, "latency_seconds": latency}
    if selection:
        wire["selection_seconds"] = max(0.0, float(np.median(selection)))
    return wire
