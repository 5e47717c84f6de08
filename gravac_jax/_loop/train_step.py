"""A whole train step in one call: everything that a loop should not forget."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gravac_jax import _network, _refuse
from gravac_jax._loop import chain, delivery, gradients, parallel, placement
from gravac_jax._loop.step_clock import StepClock
from gravac_jax._network import AxisName, Comm
from gravac_jax._step.states import TransformState
from gravac_jax._step.update import Delivery


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | int,
    axis_name: AxisName = "data",
    fast_axis_name: AxisName = None,
    *,
    has_aux: bool = False,
    micro_batches: int = 1,
    at: str | None = None,
    branches: bool | None = None,
    check_vma: bool = True,
) -> "TrainStep":
    """Return the train step of a loss and an optimizer, compiled for all replicas.

    It puts together what is public: the gradient of each replica
    (`gravac.value_and_grad`), taken at the replica's own params where that is right
    (`gravac.own_params`), the exchange and the update, the times of the steps
    (`gravac.StepClock`), and the mesh (`gravac.data_parallel`). A loop that needs more,
    such as batch statistics, has these parts.

    Args:
      loss_fn: `(params, batch) -> loss`, a mean over the batch of one replica. A loss
        that is divided by a count of tokens must say which, and one that draws random
        numbers needs a step of its own: see `gravac.data_parallel`.
      tx: the optimizer, with exactly one `gravac.transform` in it, such as
        `gravac.adamw(1e-3)`.
      mesh: the mesh; or a number of replicas, to simulate them on one device without
        times.
      axis_name: the axis, or axes, of the transform.
      fast_axis_name: the transform's fast axis, if it has one. Params that are sharded
        over other axes of the mesh stay so, and the compiler shards the model; see
        `gravac.data_parallel`.
      has_aux: whether `loss_fn` returns (loss, aux). The aux is averaged over replicas,
        as the loss is; with `micro_batches` those of all parts lie along a first axis.
      micro_batches: parts of a batch that are computed one after the other.
      at: where a replica takes its gradient: at its "own" params, or at the "shared"
        ones. By default at its own, and at the shared ones if what comes after the
        transform is not linear in the updates and there is no delay and no round.
        Learning rates, momentum and decay are linear; Adam,
        `optax.MultiSteps` and clips are not: give a clip to the transform. What is not
        linear after few bits or entries makes the loss higher: the step warns, unless
        `at` is given.
      branches: whether the rungs of a controller are branches of one program, as by
        default on CPUs and for simulated replicas. On GPUs and TPUs each rung has a
        program of its own, which is compiled when it is first taken: XLA fuses more, a
        late exchange may run beside computation, and no host reads which branch to
        take. Both take the same rungs: a decision takes effect at the third step after
        it, when all replicas have agreed on it and the host has read it.
      check_vma: as for `gravac.data_parallel`.

    Returns:
      A `TrainStep`: `init(params)` returns the params and the optimizer state, placed;
      `(params, opt_state, batch)` returns `(params, opt_state, loss)`, and the aux;
      `flush(params, opt_state)` delivers what replicas hold back, and
      `lower(params, opt_state, batch)` shows a step that exchanges. What stands around
      the transform and asks for `value`, as `optax.contrib.reduce_on_plateau` does, is
      told the mean loss, which takes a message in local steps, too; give it to `flush`,
      `value=loss`. If `every` makes some steps local, loss and aux are each replica's
      own, `[replicas, ...]`, or `[devices, ...]` with a fast axis: to average them
      would take a message in every step. A process of several reads its own:
      `loss.addressable_data(0)`.

    Raises:
      TypeError: if `loss_fn` is no function, `tx` no optimizer of Optax, or `branches`
        no bool; if there is a `fast_axis_name` and no mesh. When called: in a function
        that JAX traces.
      ValueError: if `mesh` is neither a mesh nor a positive number, or does not have
        the axis, `micro_batches` is no positive number, or `at` neither of the two.
        From `init`: as `gravac.place`, and if `tx` holds no `gravac.transform`, or more
        than one. When called: as the parts; if the transform has other axes; if what
        comes after the transform is not linear, as Adam, and own params are asked for,
        or there is a delay or rounds and no `at="shared"`.

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
    tx = optax.with_extra_args_support(tx)
    _refuse.one_of(at, "at", (None, "own", "shared"))
    axes = _network.join(axis_name, fast_axis_name)
    loss_and_grad = gradients.value_and_grad(
        loss_fn, axes, has_aux=has_aux, micro_batches=micro_batches
    )

    def on_one_replica(
        kind: Kind, params: Any, opt_state: Any, batch: Any, **times: Any
    ) -> Any:
        where = at or chain.gradients_at(tx, params, opt_state)
        own = delivery.own_params(tx, params, opt_state) if where == "own" else params
        value, grads = loss_and_grad(own, batch)
        loss, *aux = value if has_aux else (value,)
        made = Delivery(None)
        known: Any = {"at": where, "own_loss": loss, "deliver": made, **times}
        # For what steps by the loss, such as optax.contrib.reduce_on_plateau.
        known |= {"value": Comm(axes).mean(loss), **kind._asdict()}
        updates, opt_state = tx.update(grads, opt_state, params, **known)
        params = optax.apply_updates(params, updates)
        now = _transform_of(opt_state)
        # The mean, in float32, has come with the exchange, if no wrapper left that out.
        has_come = made.after is not None and now.loss is made.after.loss
        if has_come and kind.is_due is None and jnp.result_type(loss) != jnp.float64:
            loss = now.loss
        metrics = loss, *aux
        if kind.tells_host:
            # The state is donated, so that the host cannot read in it.
            length = now.round.next_length if now.round else jnp.int32(1)
            # The rung and the round after the next ones; floats, as means are.
            metrics = *metrics, jnp.asarray([now.next_rungs[1], length], jnp.float32)
        return params, opt_state, *metrics

    how: Any = {"mesh": mesh, "fast_axis_name": fast_axis_name, "check_vma": check_vma}
    run = functools.partial(parallel.data_parallel, axis_name=axis_name, **how)

    @functools.cache
    def program(kind: Kind) -> jax.stages.Wrapped:
        body = functools.partial(on_one_replica, kind)
        return run(body, average_metrics=kind.is_due is None)

    def init(params: Any) -> Any:
        state = tx.init(params)
        chain.check_momentum(state)
        _transform_of(state)  # refuses none, or several
        return placement.place((params, state), mesh, axis_name)

    flush = run(lambda p, state, _, **extra: delivery.flush(tx, p, state, **extra))
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else ()
    if branches is None:
        branches = all(x.platform == "cpu" for x in devices)
    _refuse.instance(branches, bool, "branches", "False")
    return TrainStep(
        _init=init,
        _program=program,
        _flush=flush,
        _has_branches=branches,
        _new_clock=StepClock if len(devices) else None,
    )


_transform_of = functools.partial(chain.the_transform, caller="gravac.train_step")


@dataclasses.dataclass(eq=False, repr=False)
class TrainStep:
    """A compiled train step; see `gravac.train_step`, which makes it.

    It counts and measures its own steps. Of a state that its last step did not return,
    such as one from `init`, from `flush` or from a checkpoint, it reads where the run
    stands, and waits for the devices to do so. Runs that take turns step by step would
    wait in every step, and are not timed: give each a step of its own.
    """

    _init: Callable[[Any], tuple[Any, Any]]
    _flush: Callable[..., tuple[Any, Any]]
    _program: "Callable[[Kind], jax.stages.Wrapped]"
    _has_branches: bool
    _new_clock: type[StepClock] | None
    _steps: Any = None  # the count in the state that the last step returned

    def init(self, params: Any) -> tuple[Any, Any]:
        """Return `(params, opt_state)`, placed, from params such as a checkpoint's."""
        return self._init(params)

    def flush(self, params: Any, opt_state: Any, **extra: Any) -> tuple[Any, Any]:
        """Send what replicas hold back, by `gravac.flush`; both are donated."""
        return self._flush(params, opt_state, (), **extra)

    def __call__(self, params: Any, opt_state: Any, batch: Any) -> Any:
        """Take a step; `params` and `opt_state` are donated."""
        state = _transform_of(opt_state)
        if state.steps is not self._steps:  # no two states share this array
            _refuse.traced((params, opt_state, batch))
            _refuse.members([state])
            _refuse.reused([jax.tree.leaves(x) for x in (params, opt_state)])
            self._view = HostView(state, self._has_branches)
            self._clock = self._new_clock and self._new_clock()
        kind = self._view.next()
        times = self._clock.times() if self._clock else {}
        take = self._program(kind)
        params, opt_state, *metrics = take(params, opt_state, batch, **times)
        metrics = self._view.count(kind, metrics)
        if self._clock:
            self._clock.record(metrics)
        self._steps = _transform_of(opt_state).steps
        return params, opt_state, *metrics

    def lower(self, params: Any, opt_state: Any, batch: Any) -> jax.stages.Lowered:
        """Lower a step that exchanges, with a branch for each rung, to show it.

        Arguments may be `jax.ShapeDtypeStruct`s, as `gravac.place` returns them.
        """
        kind = Kind(is_due=True if _transform_of(opt_state).round else None)
        times = self._new_clock().times() if self._new_clock else {}
        return self._program(kind).lower(params, opt_state, batch, **times)


class Kind(NamedTuple):
    """The kind of a step. Each kind has its own program; both fields are static.

    Attributes:
      is_due: whether it exchanges; None if all steps do.
      rung: the rung that it takes; None if the program has a branch for each.
    """

    is_due: bool | None = None
    rung: int | None = None

    @property
    def tells_host(self) -> bool:
        """Whether it tells the host what follows: some exchanges do, no local step."""
        return bool(self.is_due) or self.rung is not None


class HostView:
    """What the host knows of coming steps, so that it starts the right program.

    The rung and the round of a step are agreed on one exchange before the host asks.
    When it starts a step, it waits for the one before the last: the devices then still
    have the last one to do.

    Args:
      state: the transform's state before the first step.
      has_branches: whether each program has a branch for each rung.
    """

    def __init__(self, state: TransformState, has_branches: bool):
        self._has_rounds = bool(state.round)
        self._has_branches = has_branches or state.ladder.size == 1
        self._steps_since_told = int(state.info.local_steps)
        lengths = state.round[:2] if self._has_rounds else (1, 1)
        # The rung and the length of the next exchange, and of the one after.
        pairs = zip(_numbers(state.next_rungs), map(int, lengths), strict=True)
        self._coming: list[Any] = list(pairs)

    def next(self) -> Kind:
        """Return the kind of the next step."""
        rung, length = self._coming[0] = _numbers(self._coming[0])
        is_due = self._steps_since_told + 1 >= length if self._has_rounds else None
        is_known = not self._has_branches and is_due is not False
        return Kind(is_due, rung if is_known else None)

    def count(self, kind: Kind, metrics: list[Any]) -> list[Any]:
        """Count a step that was taken, and return its metrics without what follows."""
        if not kind.tells_host:
            self._steps_since_told += 1
            return metrics
        *metrics, following = metrics
        self._steps_since_told = 0
        self._coming = [self._coming[1], following]
        return metrics


def _numbers(x: Any) -> tuple[int, int]:
    """Return two numbers that all replicas have; a process reads its own copy."""
    own = x.addressable_data(0) if isinstance(x, jax.Array) else x
    # A mean may be off by a rounding. Simulated replicas each have both numbers.
    first, second, *_ = (int(x + 0.5) for x in np.ravel(own))
    return first, second
