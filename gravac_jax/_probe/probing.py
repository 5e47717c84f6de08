"""Times what a step is made of: collectives, what replicas do for themselves, compute.

An exchange's own work is that of the whole transform on one replica alone, by the
default controller's ladder: clipping, memory, selection, evidence and decision. What
others' payloads bring along, adding them up, is timed apart.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gravac_jax import _parallel, _payload, _placement, _tree
from gravac_jax._comm import Comm
from gravac_jax._controllers.base import LOOK_FIRST
from gravac_jax._probe.turns import Bench, Run
from gravac_jax._probe.verdict import (
    COMPUTE,
    DENSE,
    DENSE_RUNG,
    GATHER,
    LAUNCH,
    MANY_ROWS,
    ONE_ROW,
    REDUCE,
    STEP,
    Call,
    Measured,
)
from gravac_jax._probe.ways import EXCHANGES, Plan, call, local_name
from gravac_jax._transform import transform

SMALLEST_BYTES, GROWTH = 256, 4  # payloads of timed collectives
LONGEST_SECONDS = 0.5  # of a collective: larger ones are not timed
ROWS = 9  # payloads that are added up
LEARNING_RATE = 1e-3  # of the plain SGD that ends a computation

Runs = dict[str | Call, Run]


class Loss(NamedTuple):
    """What computes.

    Attributes:
      function: `function(params, batch)` is the loss.
      params: a pytree of arrays.
      batch: of one replica, a pytree of arrays of which the first axis is that of
        examples.
    """

    function: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any


def measure(
    plan: Plan, budget_seconds: float, loss: Loss | None = None, is_whole: bool = False
) -> Measured:
    """Compile, warm up, and time in turns until the budget is spent.

    Args:
      plan: what to time.
      budget_seconds: for all rounds together, of which there are five at the least.
      loss: to time compute; None for exchanges alone.
      is_whole: whether a dense step is timed, too, as one program.
    """
    bench = Bench(plan.mesh)
    gradient = bench.make(functools.partial(_draw, plan.params))
    runs: Runs = {LAUNCH: bench.launch(), DENSE: bench.program(_packed, gradient)}
    for axis in plan.axes:
        for kind in (REDUCE, GATHER):
            runs |= _collectives(bench, plan, axis, kind)
    entries = max(1, plan.entries // 100)
    runs |= _adding(bench, plan.entries, entries)
    for name in reversed(plan.exchanges):
        runs |= _local(bench, plan, name, gradient)  # the dense rung is the first one's
    if loss is not None:
        runs |= _computation(bench, loss, is_whole)
    seconds = bench.take_turns(runs, budget_seconds)
    return Measured(seconds, plan.ways(), (ROWS - 1) * entries)


def _draw(params: Any) -> Any:
    """Something like a gradient: with heavy tails."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    draw = lambda key, x: (1e-3 * jax.random.normal(key, x.shape) ** 3).astype(x.dtype)
    return jax.tree.unflatten(structure, list(map(draw, keys, leaves)))


def _packed(grads: Any) -> Any:
    """What a dense step does beside its all-reduce."""
    leaves, structure = jax.tree.flatten(grads)
    flat = jax.lax.optimization_barrier(_tree.ravel(leaves))
    return jax.tree.unflatten(structure, _tree.unravel(flat, leaves))


def _collectives(bench: Bench, plan: Plan, axis: str, kind: str) -> Runs:
    """Payloads up to a step's, or as large as time allows."""
    whole = 4 * plan.entries if kind == REDUCE else 8 * plan.entries / plan.rungs[0]
    largest = max(SMALLEST_BYTES * GROWTH, whole)
    runs: Runs = {}
    payload_bytes = float(SMALLEST_BYTES)
    while True:
        run = _collective(bench, Comm(plan.axes[axis]), kind, payload_bytes)
        runs[call(kind, axis, payload_bytes, plan.replicas(axis))] = run
        jax.block_until_ready(run())
        is_slow = bench.seconds(run) > LONGEST_SECONDS and len(runs) > 1
        if is_slow or payload_bytes >= largest:
            return runs
        payload_bytes = min(GROWTH * payload_bytes, largest)


def _collective(bench: Bench, comm: Comm, kind: str, payload_bytes: float) -> Run:
    entries = round(payload_bytes / 4)

    def exchange(x: jax.Array) -> jax.Array:
        result = comm.mean(x) if kind == REDUCE else comm.gather(x)
        # All of it, and not the one number that is returned.
        return jax.lax.optimization_barrier(result).ravel()[:1]

    return bench.program(exchange, bench.make(lambda: jnp.ones(entries, jnp.float32)))


def _adding(bench: Bench, n: int, k: int) -> Runs:
    """The mean of payloads of `k` among `n` entries: of one, and of several."""
    indices = np.arange(k, dtype=np.int32) * (n // k)
    decode = lambda values: _payload.Payload(values, jnp.asarray(indices))
    add = lambda values, zeros: _payload.add_up(values, decode, zeros)
    zeros = bench.make(lambda: jnp.zeros(n, jnp.float32))
    rows = lambda count: bench.make(lambda: jnp.ones((count, k), jnp.float32))
    counts = {ONE_ROW: 1, MANY_ROWS: ROWS}
    return {name: bench.program(add, rows(x), zeros) for name, x in counts.items()}


def _local(bench: Bench, plan: Plan, name: str, gradient: Any) -> Runs:
    """The transform on every device by itself, at each rung; one state for all."""
    controller = plan.controller(name)
    tx = transform(None, exchange=EXCHANGES[name][0], controller=controller)

    def step(state: Any, rung: jax.Array, grads: Any) -> Any:
        # One that does not look at other rungs, as most steps of a run do not.
        fixed = optax.tree.set(state, rung=rung, steps=jnp.int32(LOOK_FIRST + 1))
        updates, state = tx.update(grads, fixed)
        return state, updates

    run = bench.mapped(step, donate=(0,))
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    held = [bench.make(lambda: tx.init(jax.tree.map(zeros, plan.params)))]

    def at(rung: int) -> Any:
        held[0], updates = run(held[0], np.int32(rung), gradient)
        return updates

    rungs = {local_name(name, x): i for i, x in enumerate(controller.ladder)}
    if len(rungs) > 1:
        rungs = {DENSE_RUNG: 0, **dict(list(rungs.items())[1:])}
    return {name: functools.partial(at, rung) for name, rung in rungs.items()}


def _computation(bench: Bench, loss: Loss, is_whole: bool) -> Runs:
    """Steps with a plain SGD update, as they are run, without an exchange and dense."""
    mesh, axes = bench.mesh, bench.mesh.axis_names
    here = jax.local_device_count()
    rows = lambda x: np.concatenate([np.asarray(x)] * here)
    batch = jax.tree.map(rows, loss.batch)

    def program(average: Callable[[Any], Any]) -> Run:
        def step(params: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss.function)(params, batch)
            descend = lambda p, g: p - (LEARNING_RATE * g).astype(p.dtype)
            return jax.tree.map(descend, params, average(grads)), value

        # All replicas see the same batch, and stay the same without an exchange.
        run = _parallel.data_parallel(step, mesh, axes, check_vma=False)
        held = [_placement.place(loss.params, mesh, axes)]

        def advance() -> Any:
            held[0], value = run(held[0], batch)
            return held[0], value

        return advance

    runs: Runs = {COMPUTE: program(lambda grads: grads)}
    return runs | {STEP: program(Comm(axes).mean)} if is_whole else runs
