"""A whole train step in one call: everything that a loop should not forget."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import core

from gravac_jax import _network, _refuse
from gravac_jax._loop import ahead, chain, delivery, gradients, parallel, placement
from gravac_jax._loop.ahead import Ahead, Kind
from gravac_jax._loop.step_clock import StepClock
from gravac_jax._network import AxisName


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | int,
    axis_name: Any = "data",
    fast_axis_name: AxisName = None,
    *,
    has_aux: bool = False,
    micro_batches: int = 1,
    at: str | None = None,
    branches: bool | None = None,
) -> "TrainStep":
    """Return the train step of a loss and an optimizer, compiled for all replicas.

    It puts together what is public: the gradient of each replica
    (`gravac.value_and_grad`), taken at the replica's own params where that is right
    (`gravac.own_params`), the exchange and the update, the times of the steps
    (`gravac.StepClock`), and the mesh (`gravac.data_parallel`). A loop that needs more,
    such as batch statistics, has these parts.

    Args:
      loss_fn: `(params, batch) -> loss`, a mean over the batch of one replica.
      tx: the optimizer, with exactly one `gravac.transform` in it, such as
        `gravac.adamw(1e-3)`.
      mesh: the mesh; or a number of replicas, to simulate them on one device without
        times.
      axis_name: the axis, or axes, of the transform.
      fast_axis_name: the transform's fast axis, if it has one. Params that are sharded
        over other axes of the mesh stay so, and the compiler shards the model; see
        `gravac.data_parallel`.
      has_aux: whether `loss_fn` returns (loss, aux). The aux is averaged over replicas,
        as the loss is.
      micro_batches: parts of a batch that are computed one after the other.
      at: where a replica takes its gradient: at its "own" params, or at the "shared"
        ones. By default at its own, unless what comes after the transform is not linear
        in the updates. Learning rates, momentum and decay are linear; Adam,
        `optax.MultiSteps` and clips are not: give a clip to the transform.
      branches: whether the rungs of a controller are branches of one program, as by
        default on CPUs and for simulated replicas. On GPUs and TPUs each rung has a
        program of its own, which is compiled when it is first taken: XLA fuses more, a
        late exchange may run beside computation, and no host reads which branch to
        take. Both take the same rungs: a decision takes effect at the third step after
        it, when all replicas have agreed on it and the host has read it.

    Returns:
      A `TrainStep`: `init(params)` returns the params and the optimizer state, placed;
      `(params, opt_state, batch)` returns `(params, opt_state, loss)`, and the aux;
      `flush(params, opt_state)` delivers what replicas hold back. If `every`
      makes some steps local, loss and aux are each replica's own, `[replicas, ...]`, or
      `[devices, ...]` with a fast axis: to average them would take a message in every
      step. A process of several reads its own: `loss.addressable_data(0)`.

    Raises:
      TypeError: if there is a `fast_axis_name` and no mesh, or `branches` is no
        bool.
      ValueError: if `mesh` is neither a mesh nor a positive number, or does not have
        the axis, or `at` is neither of the two. From `init`: as `gravac.place`, and if
        `tx` holds no `gravac.transform`, or more than one. When called: as the parts;
        if own params are asked for and an optimizer such as Adam comes after the
        transform.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import gravac_jax as gravac
      >>> mesh = gravac.make_mesh(devices=jax.devices()[:2])
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> step = gravac.train_step(loss_fn, gravac.adamw(1e-3), mesh)
      >>> params, opt_state = step.init({"w": jnp.ones((256, 256))})
      >>> for batch in [jnp.ones((4, 256))]:
      ...     params, opt_state, loss = step(params, opt_state, batch)
      >>> float(loss)
      65536.0
    """
    call = "gravac.train_step(loss_fn, tx, mesh)"
    _refuse.function(loss_fn, "loss_fn", call)
    _refuse.optimizer(tx, call)
    tx = chain.checked(tx, "gravac.train_step")
    if at is not None:
        _refuse.one_of(at, "at", ("own", "shared"))
    axes = _network.join(axis_name, fast_axis_name)
    _refuse.mesh(mesh, axis_name, fast_axis_name)
    loss_and_grad = gradients.value_and_grad(
        loss_fn, axes, has_aux=has_aux, micro_batches=micro_batches
    )

    def on_one_replica(
        kind: Kind, params: Any, opt_state: Any, batch: Any, **times: Any
    ) -> Any:
        where, own = _own(at, tx, params, opt_state)
        value, grads = loss_and_grad(own, batch)
        known = {name: x for name, x in kind._asdict().items() if x is not None}
        updates, opt_state = tx.update(
            grads, opt_state, params, at=where, **known, **times
        )
        params = optax.apply_updates(params, updates)
        metrics = value if has_aux else (value,)
        if kind.looks_ahead:
            # The state is donated, so that the host cannot read in it.
            ours = chain.the_transform(opt_state, call)
            metrics = *metrics, ahead.what_follows(ours)
        return params, opt_state, *metrics

    def deliver(params: Any, opt_state: Any, batch: Any) -> Any:
        del batch
        return delivery.flush(tx, params, opt_state)

    has_branches = _has_branches(branches, mesh)
    run = functools.partial(
        parallel.data_parallel,
        mesh=mesh,
        axis_name=axis_name,
        fast_axis_name=fast_axis_name,
    )

    @functools.cache
    def program(kind: Kind) -> Callable[..., Any]:
        body = functools.partial(on_one_replica, kind)
        return run(body, average_metrics=kind.is_due is None)

    is_timed = isinstance(mesh, jax.sharding.Mesh)
    replicas = placement.count_replicas(mesh, axes)
    init = lambda params: placement.place((params, tx.init(params)), mesh, axis_name)
    deliver_all = run(deliver)
    return TrainStep(init, program, has_branches, deliver_all, replicas, is_timed)


def _own(at: str | None, tx: Any, params: Any, opt_state: Any) -> tuple[str, Any]:
    """Return where gradients are taken, by default where they are best, and at what."""
    # What waits needs own params, and says so where they cannot be.
    if at is None and not chain.waits(opt_state):
        if chain.is_linear(tx, params, opt_state):
            return "own", delivery.of_linear(tx, params, opt_state)
        at = "shared"
    if at == "shared":
        return at, params
    return "own", delivery.own_params(tx, params, opt_state)


def _has_branches(branches: bool | None, mesh: Any) -> bool:
    """Return whether a program has a branch for each rung."""
    if branches is None:
        devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else []
        return all(x.platform == "cpu" for x in devices)
    _refuse.instance(branches, bool, "branches", "False")
    return branches


class TrainStep:
    """A compiled train step; see `gravac.train_step`, which makes it.

    It counts and measures its own steps. Of a state that its last step did not return,
    such as one from `init` or from a checkpoint, it reads where the run stands, and
    waits for the devices to do so. Runs that take turns step by step would wait in
    every step, and are not timed: give each a step of its own.
    """

    def __init__(
        self,
        init: Callable[[Any], tuple[Any, Any]],
        program: Callable[[Kind], Callable[..., Any]],
        has_branches: bool,
        deliver: Callable[..., Any],
        replicas: int,
        is_timed: bool,
    ):
        self.init = init
        self._program, self._deliver = program, deliver
        self._has_branches = has_branches
        self._replicas, self._is_timed = replicas, is_timed
        self._steps: Any = None  # the count in the state that the last step returned

    def __call__(
        self, params: Any, opt_state: Any, batch: Any, *others: Any, **named: Any
    ) -> Any:
        """Take a step; `params` and `opt_state` are donated. Others are refused."""
        if others or named:
            raise TypeError(
                f"a step of gravac.train_step takes params, opt_state and one batch,"
                f" got {len(others) + 3} arguments and the names {list(named)}: make"
                f" the batch a tuple such as (x, y). What has no rows, such as a key,"
                f" needs gravac.data_parallel, which passes on what comes by name."
            )
        if _steps(opt_state) is not self._steps:
            self._begin(params, opt_state)
        kind = self._ahead.next()
        times = self._clock.times() if self._clock else {}
        take = self._program(kind)
        params, opt_state, *metrics = take(params, opt_state, batch, **times)
        metrics = self._ahead.count(kind, metrics)
        if self._clock:
            self._clock.record(metrics)
        self._steps = _steps(opt_state)
        return params, opt_state, *metrics

    def _begin(self, params: Any, opt_state: Any) -> None:
        """Read from the state where the run stands."""
        _refuse.reused([jax.tree.leaves(x) for x in (params, opt_state)])
        state = chain.the_transform(opt_state, "gravac.train_step")
        if isinstance(state.steps, core.Tracer):
            raise TypeError(
                "a step of gravac.train_step is compiled already, got a traced state:"
                " call it outside of jax.jit and jax.lax.scan, or write the step for"
                " gravac.data_parallel."
            )
        chain.warn_of_late_momentum(opt_state)
        self._ahead = Ahead(state, self._has_branches)
        self._clock = StepClock(int(state.steps)) if self._is_timed else None

    def flush(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Deliver what all replicas hold back; see `gravac.flush`."""
        nothing = np.zeros(self._replicas, np.float32)
        goes_on = _steps(opt_state) is self._steps
        params, opt_state = self._deliver(params, opt_state, nothing)
        if goes_on:
            self._steps = _steps(opt_state)
        return params, opt_state


def _steps(opt_state: Any) -> jax.Array:
    """Return a state's count of steps; no two states share this array."""
    return chain.the_transform(opt_state, "gravac.train_step").steps
