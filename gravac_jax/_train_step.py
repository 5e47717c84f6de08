"""A whole train step in one call: everything that a loop should not forget."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from gravac_jax import (
    _chain,
    _checks,
    _collectives,
    _consistency,
    _gradients,
    _overlap,
    _parallel,
    _placement,
    _residuals,
)
from gravac_jax._collectives import AxisName
from gravac_jax._state import Round, TransformState
from gravac_jax._step_clock import StepClock


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | int,
    axis_name: Any = "data",
    dense_axis_name: AxisName = None,
    *,
    has_aux: bool = False,
    micro_batches: int = 1,
    own_params: bool | None = None,
    overlap: bool = False,
) -> "TrainStep":
    """Return the train step of a loss and an optimizer, compiled for all replicas.

    It puts together what is public: the gradient of each replica
    (`gravac.value_and_grad`), taken at the replica's own params where that is right
    (`gravac.local_params`), the exchange and the update, which leaves everything as it
    is if a gradient is not finite (`gravac.guard`), the times of the steps
    (`gravac.StepClock`), and the mesh (`gravac.data_parallel`). A loop that needs more,
    such as batch statistics, has these parts.

    Args:
      loss_fn: `(params, batch) -> loss`, a mean over the batch of one replica.
      tx: the optimizer, with exactly one `gravac.transform` in it, such as
        `gravac.adamw(1e-3)`.
      mesh: the mesh; or a number of replicas, to simulate them on one device without
        times.
      axis_name: the axis, or axes, of the transform.
      dense_axis_name: the transform's fast axis, if it has one. Params that are sharded
        over it are placed by the caller. Without one, params that are sharded over
        other axes of the mesh stay so, and the compiler shards the model; see
        `gravac.data_parallel`.
      has_aux: whether `loss_fn` returns (loss, aux). The aux is averaged over replicas,
        as the loss is.
      micro_batches: parts of a batch that are computed one after the other.
      own_params: whether a replica takes its gradient at its own params. By default it
        does, unless an optimizer such as Adam comes after the transform. What comes
        after it must then be linear in the updates, as learning rates, momentum and
        decay are. A clip is not: give it to the transform, or pass False.
      overlap: for CPUs, where XLA does not hide a late exchange within one program as
        it does on GPUs and TPUs: take a step of a transform with a delay in three
        programs, of which a second thread starts the exchange. JAX needs two threads
        for it, `NPROC=2` or more. Wait for any other program with a collective, such as
        an evaluation, before the next step: two threads start theirs in no order. Own
        params stay in memory between steps. With rounds, local steps stay one program.

    Returns:
      A `TrainStep`: `init(params)` returns the params and the optimizer state, placed;
      `(params, opt_state, batch)` returns `(params, opt_state, loss)`, and the aux;
      `flush(params, opt_state)` delivers what replicas hold back. If `gravac.Every`
      makes some steps local, loss and aux are each replica's own, `[replicas, ...]`, or
      `[devices, ...]` with a fast axis: to average them would take a message in every
      step. A process of several reads its own: `loss.addressable_data(0)`.

    Raises:
      TypeError: if `mesh` is neither a mesh nor a number, or `overlap` is no bool.
      ValueError: if the mesh does not have the axis; for overlap=True with simulated
        replicas or a mesh that has other axes, and, when called, without a delay or
        with a loss that has a collective. From `init`: as `gravac.place` and
        `gravac.guard`. When called: as the parts; if own params are asked for and an
        optimizer such as Adam comes after the transform.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> step = gravac.train_step(loss_fn, gravac.adamw(1e-3), mesh)
      >>> params, opt_state = step.init({"w": jnp.ones((256, 256))})
      >>> for batch in [jnp.ones((4, 256))]:
      ...     params, opt_state, loss = step(params, opt_state, batch)
      >>> float(loss)
      65536.0
    """
    call = "gravac.train_step(loss_fn, tx, mesh)"
    _checks.function(loss_fn, "loss_fn", call)
    _checks.optimizer(tx, call)
    tx = _consistency.guarded(tx, "gravac.train_step")
    axes = _collectives.join(axis_name, dense_axis_name)
    loss_and_grad = _gradients.value_and_grad(
        loss_fn, axes, has_aux=has_aux, micro_batches=micro_batches
    )

    def where(params: Any, opt_state: Any) -> Any:
        # What waits needs own params, and says so where they cannot be.
        is_right = _chain.is_linear(opt_state) or _chain.waits(opt_state)
        is_own = is_right if own_params is None else own_params
        return _residuals.local_params(tx, params, opt_state) if is_own else params

    def finish(params: Any, opt_state: Any, made: Any, **extra: Any) -> Any:
        value, grads = made
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        params = optax.apply_updates(params, updates)
        metrics = value if has_aux else (value,)
        if extra.get("is_due"):
            # The state is donated, so that the host cannot read in it.
            rounds = _chain.the_transform(opt_state, call).round
            metrics = *metrics, rounds.next_length
        return params, opt_state, *metrics

    def on_one_replica(params: Any, opt_state: Any, batch: Any, **times: Any) -> Any:
        made = loss_and_grad(where(params, opt_state), batch)
        return finish(params, opt_state, made, **times)

    def deliver(params: Any, opt_state: Any, batch: Any) -> Any:
        del batch
        return _residuals.flush(tx, params, opt_state)

    _checks.flag(overlap, "overlap")
    run = _runner(mesh, axis_name, dense_axis_name)
    # With rounds there are two programs: steps that exchange, and local ones.
    in_rounds = lambda x: functools.partial(on_one_replica, is_due=x)
    programs: dict[bool | None, Callable[..., Any]] = {
        None: run(on_one_replica, True),
        True: run(in_rounds(True), False),
        False: run(in_rounds(False), False),
    }
    if overlap:
        place = _overlap.checked(mesh, axis_name, dense_axis_name)
        exchanging = lambda *args: _overlap.Overlapped(tx, where, loss_and_grad, *args)
        due = functools.partial(finish, is_due=True)
        programs[None] = exchanging(finish, place)
        programs[True] = exchanging(due, place._replace(in_rounds=True))
    is_timed = isinstance(mesh, jax.sharding.Mesh)
    replicas = _placement.count_replicas(mesh, axes)
    init = _initializer(tx, mesh, axis_name, dense_axis_name)
    return TrainStep(init, programs, run(deliver, True), replicas, is_timed)


def _runner(mesh: Any, axis_name: Any, dense_axis_name: AxisName) -> Callable[..., Any]:
    """Return what makes a program of all replicas from the step of one."""

    def run(body: Callable[..., Any], averages: bool) -> Callable[..., Any]:
        if not isinstance(mesh, jax.sharding.Mesh):
            return _parallel.simulate(body, mesh, axis_name, average_metrics=averages)
        return _parallel.data_parallel(
            body, mesh, axis_name, dense_axis_name, average_metrics=averages
        )

    return run


def _initializer(
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | int,
    axis_name: Any,
    dense_axis_name: AxisName,
) -> Callable[[Any], tuple[Any, Any]]:
    """Return what places params and the optimizer's first state."""

    def init(params: Any) -> tuple[Any, Any]:
        if dense_axis_name is None:
            return _placement.place((params, tx.init(params)), mesh, axis_name)
        return params, _placement.init(tx, params, mesh, axis_name, dense_axis_name)

    return init


class Rounds:
    """Counts steps on the host, which so knows which of them exchange.

    The length of a round is known one exchange before it begins, so the host waits for
    no step that the devices may still be busy with.

    Args:
      state: the transform's state before the first step.
    """

    def __init__(self, state: TransformState):
        self._has_rounds = isinstance(state.round, Round)
        self._local_steps = int(state.info.local_steps)
        if self._has_rounds:
            self._length, number = map(int, state.round)
            self._next_length: jax.Array | int = number

    def is_due(self) -> bool | None:
        """Return whether the next step exchanges; None if there are no rounds."""
        if not self._has_rounds:
            return None
        return self._local_steps + 1 >= self._length

    def count(self, is_due: bool | None, metrics: list[Any]) -> list[Any]:
        """Count a step that was taken, and return its metrics without the round."""
        if not is_due:
            self._local_steps += 1
            return metrics
        *metrics, following = metrics
        self._local_steps, self._length = 0, _number(self._next_length)
        self._next_length = following
        return metrics


def _number(x: jax.Array | int) -> int:
    """Return a number that all replicas have; a process reads its own copy."""
    if isinstance(x, int):
        return x
    return int(np.asarray(x.addressable_data(0)).ravel()[0])


class TrainStep:
    """A compiled train step; see `gravac.train_step`, which makes it.

    It counts and measures its own steps. After going back to an earlier state, make a
    new one: it would credit times to other steps, and with rounds end them elsewhere.
    """

    def __init__(
        self,
        init: Callable[[Any], tuple[Any, Any]],
        programs: dict[bool | None, Callable[..., Any]],
        deliver: Callable[..., Any],
        replicas: int,
        is_timed: bool,
    ):
        self.init = init
        self._programs, self._deliver = programs, deliver
        self._replicas, self._is_timed = replicas, is_timed
        self._rounds: Rounds | None = None
        self._clock: StepClock | None = None

    def __call__(self, params: Any, opt_state: Any, batch: Any) -> Any:
        """Take a step; `params` and `opt_state` are donated."""
        if self._rounds is None:
            state = _chain.the_transform(opt_state, "gravac.train_step")
            _chain.warn_of_late_momentum(opt_state)
            self._rounds = Rounds(state)
            self._clock = StepClock(int(state.steps)) if self._is_timed else None
        is_due = self._rounds.is_due()
        times = self._clock.times() if self._clock else {}
        params, opt_state, *metrics = self._programs[is_due](
            params, opt_state, batch, **times
        )
        metrics = self._rounds.count(is_due, metrics)
        if self._clock:
            self._clock.record(metrics)
        return params, opt_state, *metrics

    def flush(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Deliver what all replicas hold back; see `gravac.flush`."""
        nothing = np.zeros(self._replicas, np.float32)
        params, opt_state = self._deliver(params, opt_state, nothing)
        return params, opt_state
