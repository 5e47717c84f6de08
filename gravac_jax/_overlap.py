"""A delayed step in three programs, so that CPUs exchange while they compute.

With a delay, the exchange of a step depends on nothing that the step computes. GPUs and
TPUs then run both at once in one program. XLA's CPU backend runs a program's
collectives and its computation one after the other, and so it runs the programs that
one thread starts. The programs of two threads run at once. So one thread starts the
exchange, another one the gradient, and a third program takes the step from both::

    receive   (params, opt_state)        what arrived, and the state of what is kept
    compute   (own, batch)               the loss and the gradient of each replica
    finish    (params, kept, own,        the new params and state, and the params at
               gradients, arrived)       which each replica takes its next gradient
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import optax

from gravac_jax import _chain, _checks, _parallel, _placement, _state, _step_checks
from gravac_jax._collectives import AxisName

Step = Callable[..., Any]


def is_wanted(
    mesh: Any, asked: bool | None, dense_axis_name: AxisName
) -> TypeGuard[jax.sharding.Mesh]:
    """Return whether a delayed step should be three programs.

    Args:
      mesh: the mesh, or a number of simulated replicas.
      asked: what the user asked for; by default it is so on CPUs of several processes.
      dense_axis_name: the fast axis, if there is one.

    Raises:
      TypeError: if `asked` is neither a bool nor None.
      ValueError: if it is asked for where it cannot be.
    """
    can = isinstance(mesh, jax.sharding.Mesh) and dense_axis_name is None
    if asked is None:
        is_cpu = can and {x.platform for x in mesh.devices.flat} == {"cpu"}
        return is_cpu and jax.process_count() > 1
    _checks.flag(asked, "overlap")
    if asked and not can:
        raise ValueError(
            f"`overlap` needs a mesh and no `dense_axis_name`, got {mesh!r} and"
            f" {dense_axis_name!r}. Leave `overlap` out: one program does the same."
        )
    return asked


def where_delayed(apart: Step, whole: Step, *, is_asked: bool) -> Step:
    """Return a step that is `apart` if the transform has a delay, and else `whole`.

    Without a delay it raises a ValueError if three programs were asked for.
    """

    def step(params: Any, opt_state: Any, batch: Any, **times: Any) -> Any:
        is_delayed = _chain.is_delayed(opt_state)
        if is_asked and not is_delayed:
            raise ValueError(
                "`overlap` needs gravac.transform(delay=1): without a delay an exchange"
                " waits for the gradient. Leave `overlap` out, or add the delay."
            )
        return (apart if is_delayed else whole)(params, opt_state, batch, **times)

    return step


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
      mesh: the mesh.
      axis_name: the axis, or axes, of the transform.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        own_params: Step,
        loss_and_grad: Step,
        finish: Step,
        mesh: jax.sharding.Mesh,
        axis_name: AxisName,
    ):
        self._tx = optax.with_extra_args_support(tx)
        self._own_params, self._loss_and_grad = own_params, loss_and_grad
        self._finish_one = finish
        self._mesh, self._axis_name = mesh, axis_name
        self._replicas = _placement.count_replicas(mesh, axis_name)
        self._first_own = jax.jit(self._own_of_all)
        self._receive = jax.jit(self._receive_all, donate_argnums=1)
        self._compute = jax.jit(self._compute_all)
        self._finish = _parallel.data_parallel(
            self._finish_own, mesh, axis_name, carried=1
        )
        self._compiled: dict[Any, Any] = {}
        self._last: tuple[Any, Any] = None, None  # params, and own params for them
        self._network = ThreadPoolExecutor(1, thread_name_prefix="gravac exchange")

    def __call__(self, params: Any, opt_state: Any, batch: Any, **times: Any) -> Any:
        """Take a step; `params` and `opt_state` are donated."""
        _placement.check_placed(opt_state, self._replicas)
        here = max(1, self._replicas // jax.process_count())
        _step_checks.divided((params, opt_state, batch), 0, here)
        times, batch = _parallel.spread(times, batch, self._mesh, self._axis_name)
        known, own = self._last
        if not _are_same(known, params):
            own = self._first_own(params, opt_state)
        receive = self._compiled_receive(params, opt_state, times)
        receiving = self._network.submit(receive, params, opt_state, times)
        made = self._compute(own, batch)
        kept, arrived = receiving.result()
        params, opt_state, own, *metrics = self._finish(
            params, kept, own, made, arrived=arrived, **times
        )
        self._last = params, own
        return params, opt_state, *metrics

    def _compiled_receive(self, *args: Any) -> Any:
        """Compile in this thread: settings of JAX may hold in this one alone."""
        key = jax.tree.structure(args), tuple(map(jnp.shape, jax.tree.leaves(args)))
        if key not in self._compiled:
            self._compiled[key] = self._receive.lower(*args).compile()
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
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        _, after = self._tx.update(zeros, opt_state, params, receives=True, **times)
        ours = _chain.the_transform(after, "gravac.train_step")
        # Whatever comes after the transform saw no update yet.
        return _replaced(opt_state, ours._replace(arrived=())), ours.arrived

    def _compute_all(self, own: Any, batch: Any) -> Any:
        one = lambda own, batch: _lead(self._loss_and_grad(_only(own), batch))
        return self._run(one, (self._each, self._each), self._each, own, batch)

    def _finish_own(
        self, params: Any, opt_state: Any, own: Any, made: Any, **extra: Any
    ) -> Any:
        del own  # its memory is reused
        params, opt_state, *value = self._finish_one(
            params, opt_state, _only(made), **extra
        )
        return params, opt_state, _lead(self._own_params(params, opt_state)), *value


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


def _replaced(opt_state: Any, ours: _state.TransformState) -> Any:
    """Return `opt_state` with `ours` in place of its transform's state."""
    is_ours = _state.is_transform_state
    return jax.tree.map(lambda x: ours if is_ours(x) else x, opt_state, is_leaf=is_ours)
