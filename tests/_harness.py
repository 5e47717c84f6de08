"""Many replicas in every way that JAX has, what they compile to, and how to compare."""

import contextlib
import dataclasses
import functools
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from programs import reading
from programs.reading import Program

import gravac_jax as gravac
from gravac_jax._step.states import transform_states

N = 4  # replicas; a power of two, so that a mean of integers is exact
AXIS_TYPES = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)

# How XLA compiles for users, where tests read a compiled program (see conftest.py).
AS_USERS = {"xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 11):  # later ones have no emitters beside these
    AS_USERS["xla_cpu_use_fusion_emitters"] = True

# A sum of N float32 numbers in any order, halved exactly twice: each of the N - 1
# additions rounds by at most 2**-24 of a partial sum, which sum |x| bounds.
SUM_ROUNDING = N * 2.0**-24

# A small model: a leaf that goes dense, and one that is compressed.
PARAMS = {"b": np.zeros(5, np.float32), "w": np.zeros((8, 8), np.float32)}
COMPRESS = {"b": False, "w": True}
# The encoding that compiles fastest, for tests in which it does not matter which.
ROWS = gravac.Bits(2, row_entries=32)


def gaussian_gradients(steps):
    """Return gradients of `PARAMS`, `[steps, N, ...]`; the same at every call."""
    rng = np.random.default_rng(0)
    draw = lambda x: rng.standard_normal((steps, N, *x.shape)).astype(np.float32)
    return {name: draw(x) for name, x in PARAMS.items()}


def residual(tree):
    """Return what the one transform in `tree` holds back of its first bucket."""
    (state,) = transform_states(tree)
    return state.local.memory[0].residual


def on_host(tree):
    """Return a tree whose arrays are NumPy's."""
    return jax.tree.map(np.asarray, tree)


def copied(tree):
    """Return a tree whose arrays are NumPy's, in memory of their own."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def name_of(x):
    """Return the name of a class or function, and what else is as a string."""
    return getattr(x, "__name__", str(x))


def choices(every, is_quick, name=name_of):
    """Return parameters of a test; those that are not quick are for the slow run."""
    marks = lambda x: () if is_quick(x) else pytest.mark.slow
    return [pytest.param(x, marks=marks(x), id=name(x)) for x in every]


def covering(rows, things, together):
    """Return a few rows that together hold every combination of things.

    Args:
      rows: the rows to choose from.
      things: a function that lists what is in a row; hashable things.
      together: how many things make a combination.
    """
    groups = lambda row: set(itertools.combinations(things(row), together))
    found = [(row, groups(row)) for row in rows]
    seen, taken = set(), []
    while new := [(row, mine - seen) for row, mine in found if mine - seen]:
        row, more = max(new, key=lambda x: len(x[1]))  # greedily
        seen |= more
        taken.append(row)
    return taken


# Without checks and under pmap what is traced is nearly the same: that all ways agree
# is for test_transform.py to show.
in_both_ways = pytest.mark.parametrize("how", ["shard_map", "vmap"])
on_every_mesh = pytest.mark.parametrize(
    "axis_type", choices(AXIS_TYPES, lambda x: x == AXIS_TYPES[0])
)


def make_mesh(shape=(N,), names=("data",), axis_type=AXIS_TYPES[0]):
    """Return a mesh of the first devices."""
    devices = jax.devices()[: int(np.prod(shape))]
    types = (axis_type,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=types, devices=devices)


class Heard(NamedTuple):
    """The state of `Scripted`: of others than times, what they heard."""

    measured_seconds: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class Scripted(gravac.Controller):
    """Takes the rungs in turn, after three steps at the first, and keeps times."""

    ladder: tuple[gravac.Encoding, ...]

    def init(self):
        return jnp.int32(0), Heard(jnp.full(len(self.ladder), jnp.nan))

    def heard(self, evidence):
        """Return what to keep of what an exchange tells."""
        return evidence.measured_seconds

    def decide(self, evidence, state):
        del state
        return evidence.effective_step % len(self.ladder), Heard(self.heard(evidence))


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """Many compiled steps of `tx.update` on all replicas, from the initial state.

    Attributes:
      jitted: takes the state and (gradients, extra arguments).
      state: the state before the first step.
      sharding: where inputs go; None if JAX sees to it.
    """

    jitted: Any
    state: Any
    sharding: jax.sharding.Sharding | None = None

    def __call__(self, gradients, **extra):
        """Run the steps.

        Args:
          gradients: a tree of `[steps, replicas, ...]`.
          extra: further arguments of `tx.update`, `[steps, replicas, ...]`.

        Returns:
          The updates `[steps, ...]` and the states `[steps, ...]`, in NumPy. Parts of
          the state that differ per replica are `[steps, replicas, ...]`.

        Raises:
          AssertionError: if replicas differ in what they should agree on.
        """
        inputs = self._inputs(gradients, extra)
        return jax.tree.map(agreed, self.jitted(self.state, inputs))

    def text(self, gradients, **extra):
        """Return the compiled program."""
        lowered = self.jitted.lower(self.state, self._inputs(gradients, extra))
        return lowered.compile().as_text()

    def _inputs(self, *inputs):
        return jax.device_put(inputs, self.sharding) if self.sharding else inputs


def trajectory(tx, params, how, *, mesh=None):
    """Return the `Trajectory` of a transformation.

    Args:
      tx: a transformation over "data".
      params: the params.
      how: "shard_map", "shard_map unchecked", "pmap" or "vmap".
      mesh: for `shard_map`; by default N devices and Auto.
    """
    mesh = mesh or make_mesh()
    is_mesh = how.startswith("shard_map")
    state = gravac.place(tx.init(params), mesh if is_mesh else N)
    specs = gravac.state_specs(state)
    choose = lambda local, shared: jax.tree.map(
        lambda spec: shared if spec == jax.P() else local, specs
    )

    def body(state, inputs):
        def step(state, x):
            gradients, extra = x
            updates, state = tx.update(gradients, state, **extra)
            return state, (updates, state)

        return jax.lax.scan(step, state, inputs)[1]

    if is_mesh:
        by_step = jax.P(None, "data")
        mapped = jax.shard_map(
            lambda state, x: body(state, jax.tree.map(lambda x: x[:, 0], x)),
            mesh=mesh,
            in_specs=(specs, by_step),
            out_specs=(jax.P(), choose(by_step, jax.P())),
            check_vma=how == "shard_map",
        )
        return Trajectory(jax.jit(mapped), state, jax.NamedSharding(mesh, by_step))
    axes = {"in_axes": (choose(0, None), 1), "out_axes": (None, choose(1, None))}
    if how == "pmap":
        return Trajectory(jax.pmap(body, "data", **axes), state)
    return Trajectory(jax.jit(jax.vmap(body, **axes, axis_name="data")), state)


def agreed(x):
    """Return `x` as a NumPy array; check that replicated copies are the same."""
    if x.is_fully_replicated:
        copies = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
        assert len(copies) == 1, "the replicas differ"
    return np.asarray(x)


def assert_same(received, expected, what=""):
    """Check that two trees have the same structure, shapes, dtypes and bits."""
    assert jax.tree.structure(received) == jax.tree.structure(expected), what
    leaves = jax.tree.leaves_with_path(received), jax.tree.leaves(expected)
    for (path, a), b in zip(*leaves, strict=True):
        name = f"{what} {jax.tree_util.keystr(path)}"
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if a.tobytes() != b.tobytes():
            np.testing.assert_array_equal(a, b, name)
            raise AssertionError(f"{name}: zeros or NaNs of other bits")


def assert_close(received, expected, rtol=0.0, atol=0.0):
    """Check that two trees have the same structure and nearly the same numbers."""
    assert jax.tree.structure(received) == jax.tree.structure(expected)
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, received, expected)


def at(tree, step):
    """Return one step of a trajectory."""
    return jax.tree.map(lambda x: x[step], tree)


@contextlib.contextmanager
def compilations():
    """Yield a list that grows by the name of each program compiled meanwhile."""
    names = []

    def listen(event, duration_secs, **kwargs):
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(kwargs.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def is_alive(pid):
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition, seconds=300):
    """Wait for what takes a few seconds, or hangs: it bounds, and measures nothing."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def printed(*arguments, **options):
    """Return what a run of Python prints; it must succeed."""
    run = functools.partial(subprocess.run, capture_output=True, text=True)
    done = run([sys.executable, *arguments], check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
      kind: such as "all-reduce".
      dtype: what travels, as XLA names it.
      payload_bytes: what one replica puts in.
      branches: the branch taken at each conditional that encloses it.
    """

    kind: str
    dtype: str
    payload_bytes: int
    branches: tuple[int, ...]


def on_each(f, how, mesh=None, out=None):
    """Return a function that runs `f` on what each replica has of `[replicas, ...]`.

    What `f` returns is stacked, unless `out` has its specs on the mesh.
    """
    if how == "vmap":
        return jax.jit(jax.vmap(f, axis_name="data"))
    if how == "pmap":
        return jax.pmap(f, "data")
    mesh = mesh or make_mesh()
    split = jax.P(mesh.axis_names)  # as many devices as replicas
    own = lambda tree: f(jax.tree.map(lambda x: x[0], tree))
    stacked = lambda tree: jax.tree.map(lambda x: x[None], own(tree))
    body, out = (stacked, split) if out is None else (own, out)
    specs = {"in_specs": split, "out_specs": out, "check_vma": how == "shard_map"}
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
    return lambda tree: mapped(jax.device_put(tree, jax.NamedSharding(mesh, split)))


def plain_step(tx, loss, axis_name="data", is_own=False):
    """Return a train step of `loss(params, batch)`, as one writes it oneself."""

    def train_step(params, opt_state, batch, **told):
        at = gravac.own_params(tx, params, opt_state) if is_own else params
        value, grads = gravac.value_and_grad(loss, axis_name)(at, batch)
        updates, opt_state = tx.update(grads, opt_state, params, **told)
        return optax.apply_updates(params, updates), opt_state, value

    return train_step


def own_gradients(tx):
    """Return a train step of a replica whose batch is its own gradient: `[1, ...]`."""

    def train_step(params, opt_state, batch):
        grads = jax.tree.map(lambda x: x[0], batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return train_step


def on_all_replicas(train, tx, *in_axes):
    """Run `train(state, *args)` on simulated replicas, from the first state of `tx`."""
    state = gravac.place(tx.init(PARAMS), N)
    specs = gravac.state_specs(state)
    axes = jax.tree.map(lambda x: 0 if x == jax.P("data") else None, specs)
    mapped = jax.vmap(train, in_axes=(axes, *in_axes), axis_name="data")
    return lambda *args: jax.jit(mapped)(state, *args)


def collectives(text):
    """Return every `Collective` of a compiled program."""
    program, found, ops = Program(text), [], 0

    def visit(name, branches):
        nonlocal ops
        for x in program.computations[name].values():
            is_choice = x.kind == "conditional"
            for i, inner in enumerate(program.inner(x)):
                visit(inner, (*branches, i) if is_choice else branches)
            if x.collective:
                found.extend(_payloads(x, branches))
                ops += 1  # which may be several that XLA combined

    visit(program.entry, ())
    every = itertools.chain(*(x.values() for x in program.computations.values()))
    assert ops == sum(x.collective is not None for x in every)
    return found


def branches_of(jaxpr):
    """Return the most branches of a conditional of a program."""
    inner = [x for e in jaxpr.eqns for x in jaxprs_in_params(e.params)]
    conds = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    own = [len(e.params["branches"]) for e in conds]
    return max([*own, *map(branches_of, inner)], default=0)


def _payloads(x, branches):
    for dtype, sizes in reading.ARRAY.findall(x.shape):
        whole = reading.bytes_of(f"{dtype}[{sizes}]")
        own = whole // N if x.collective == "all-gather" else whole
        yield Collective(x.collective, dtype, own, branches)
