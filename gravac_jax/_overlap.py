"""A delayed step in three programs, so that CPUs exchange while they compute.

With a delay, the exchange of a step depends on nothing that the step computes. GPUs and
TPUs then run both at once in one program. XLA's CPU backend runs a program's
collectives and its computation one after the other. It also serialises programs that
one thread starts, but not those of two threads. So one thread starts the exchange,
another one the gradient, and a third program takes the step from both::

    compute   (own, batch)               the loss and the gradient of each replica
    receive   (params, opt_state)        what arrived, and the state of what is kept
    finish    (params, kept, own,        the new params and state, and the params at
               gradients, arrived)       which each replica takes its next gradient

All processes must start their collectives in one order, and two threads keep none. So
`compute` may have no collective.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _chain, _collectives, _parallel, _placement, _state
from gravac_jax._collectives import AxisName
from gravac_jax._parallel import Step

COLLECTIVE = r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)"


class Place(NamedTuple):
    """Where and when a step is taken.

    Attributes:
      mesh: the mesh.
      axis_name: the axis, or axes, of the transform.
      in_rounds: whether the controller has rounds. A local step makes own params
        itself, and metrics are each replica's own.
    """

    mesh: jax.sharding.Mesh
    axis_name: AxisName
    in_rounds: bool = False


def checked(mesh: Any, axis_name: AxisName, dense_axis_name: AxisName) -> Place:
    """Return where a step is taken; refuse simulated replicas and other axes."""
    if not isinstance(mesh, jax.sharding.Mesh) or dense_axis_name is not None:
        raise ValueError(
            f"overlap=True needs a mesh and no `dense_axis_name`, got {mesh!r} and"
            f" {dense_axis_name!r}. Leave `overlap` out: one program does the same."
        )
    if inner := _collectives.inner_axes(mesh, axis_name):
        raise ValueError(
            f"overlap=True cannot be on a mesh with other axes than those of replicas,"
            f" {axis_name!r}, got {inner} besides. Leave `overlap` out: one program"
            f" does the same."
        )
    return Place(mesh, axis_name)


class Overlapped:
    """A train step whose exchange runs while its gradient is computed.

    Call it with `(params, opt_state, batch, **times)`, as a step of
    `gravac.data_parallel`.

    Args:
      tx: the optimizer, with a delayed transform in it.
      own_params: `(params, opt_state) -> params`, where a replica takes its gradient.
      loss_and_grad: `(params, batch) -> (value, grads)` of one replica.
      finish: `(params, opt_state, (value, grads), **extra)` of one replica, as for
        `gravac.data_parallel`; `extra` is for `tx.update`.
      place: where and when it is taken.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        own_params: Step,
        loss_and_grad: Step,
        finish: Step,
        place: Place,
    ):
        self._tx, self._own_params, self._loss_and_grad = tx, own_params, loss_and_grad
        self._finish_one = finish
        self._mesh, self._axis_name, self._in_rounds = place
        self._first_own = jax.jit(self._own_of_all)
        self._receive = jax.jit(self._receive_all, donate_argnums=1)
        self._compute = jax.jit(self._compute_all)
        self._finish = _parallel.data_parallel(
            self._finish_own,
            self._mesh,
            self._axis_name,
            carried=1,
            average_metrics=not self._in_rounds,
        )
        self._compiled: dict[Any, Any] = {}
        self._last: Any = None  # params and state, and the own params that go with them
        self._network = ThreadPoolExecutor(1, thread_name_prefix="gravac exchange")

    def __call__(self, params: Any, opt_state: Any, batch: Any, **times: Any) -> Any:
        """Take a step; `params` and `opt_state` are donated."""
        given = params, opt_state
        batch, times = _parallel.split_arguments(
            given, batch, times, self._mesh, self._axis_name
        )
        if self._last is not None and _are_same(self._last[0], given):
            own = self._last[1]
        else:
            own = self._first_own(params, opt_state)
        compute, receive = self._programs(own, batch, params, opt_state, times)
        # Whatever is wrong with a batch shows here, while the state is whole.
        made = compute(own, batch)
        kept, arrived = self._network.submit(receive, params, opt_state, times).result()
        self._last = None
        params, opt_state, own, *metrics = self._finish(
            params, kept, own, made, arrived=arrived, **times
        )
        if not self._in_rounds:
            self._last = (params, opt_state), own
        return params, opt_state, *metrics

    def _programs(
        self, own: Any, batch: Any, params: Any, opt_state: Any, times: Any
    ) -> tuple[Any, Any]:
        """Compile in this thread: settings of JAX may hold in this one alone."""
        args = own, batch, params, opt_state, times
        leaves, structure = jax.tree.flatten(args)
        key = (
            structure,
            tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves),
        )
        if key not in self._compiled:
            compute = self._compute.lower(own, batch)
            if found := re.search(COLLECTIVE, compute.as_text()):
                raise ValueError(
                    f"overlap=True cannot be: the loss talks to other replicas"
                    f" ({found[1]}), as the exchange does at the same time, and the"
                    f" order may differ between processes. Leave `overlap` out."
                )
            receive = self._receive.lower(params, opt_state, times)
            self._compiled[key] = compute.compile(), receive.compile()
        return self._compiled[key]

    def _run(self, one: Step, in_specs: Any, out_specs: Any, *args: Any) -> Any:
        run = jax.shard_map(
            one, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs
        )
        return run(*args)

    @property
    def _each(self) -> jax.P:
        return jax.P(self._axis_name)

    def _own_of_all(self, params: Any, opt_state: Any) -> Any:
        one = lambda params, opt_state: _lead(self._own_params(params, opt_state))
        specs = _placement.state_specs(opt_state, self._axis_name)
        return self._run(one, (jax.P(), specs), self._each, params, opt_state)

    def _receive_all(self, params: Any, opt_state: Any, times: Any) -> Any:
        specs = _placement.state_specs(opt_state, self._axis_name)
        given, received = (jax.P(), specs, jax.P()), (specs, jax.P())
        return self._run(self._receive_one, given, received, params, opt_state, times)

    def _receive_one(self, params: Any, opt_state: Any, times: Any) -> tuple[Any, Any]:
        _, after = self._tx.update(params, opt_state, params, receives=True, **times)
        ours = _chain.the_transform(after, "gravac.train_step")
        # Whatever comes after the transform saw no update yet.
        return _state.replaced(opt_state, ours._replace(arrived=())), ours.arrived

    def _compute_all(self, own: Any, batch: Any) -> Any:
        one = lambda own, batch: _lead(self._loss_and_grad(_only(own), batch))
        return self._run(one, (self._each, self._each), self._each, own, batch)

    def _finish_own(
        self, params: Any, opt_state: Any, own: Any, made: Any, **extra: Any
    ) -> Any:
        params, opt_state, *value = self._finish_one(
            params, opt_state, _only(made), own_params=_only(own), **extra
        )
        if not self._in_rounds:  # a local step makes its own
            own = _lead(self._own_params(params, opt_state))
        return params, opt_state, own, *value


def _lead(tree: Any) -> Any:
    """Return one replica's arrays with a leading axis of replicas."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def _only(tree: Any) -> Any:
    """Undo `_lead`."""
    return jax.tree.map(lambda x: x[0], tree)


def _are_same(tree: Any, other: Any) -> bool:
    """Return whether two trees hold the same arrays, not copies of them."""
    leaves, others = jax.tree.leaves(tree), jax.tree.leaves(other)
    same = len(leaves) == len(others) and bool(leaves)
    return same and all(x is y for x, y in zip(leaves, others, strict=True))
