"""Many replicas in every way that JAX has, what they compile to, and how to compare."""

import contextlib
import dataclasses
import itertools
import re
from typing import NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import gravac_jax as gravac
from gravac_jax._controllers.base import Controller

N = 4  # replicas; a power of two, so that a mean of integers is exact
HARNESSES = ("shard_map", "shard_map unchecked", "pmap", "vmap")
AXIS_TYPES = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)

# A sum of N float32 numbers in any order, halved exactly twice: each of the N - 1
# additions rounds by at most 2**-24 of a partial sum, which sum |x| bounds.
SUM_ROUNDING = N * 2.0**-24


def choices(every, is_quick, name=str, is_slow=lambda x: True):
    """Parameters of a test, by the run that they are for.

    Those for which `is_quick` is true are for the default run, of the others those for
    which `is_slow` is for the slow one; the rest is for the exhaustive one.
    """
    slow_marks = lambda x: pytest.mark.slow if is_slow(x) else pytest.mark.exhaustive
    marks = lambda x: () if is_quick(x) else slow_marks(x)
    return [pytest.param(x, marks=marks(x), id=name(x)) for x in every]


def covering(rows, things, together):
    """A few rows in which there are any `together` things that are in one row.

    Args:
      rows: to choose from.
      things: lists what is in a row, hashable.
      together: how many things.
    """
    groups = lambda row: set(itertools.combinations(things(row), together))
    found = [(row, groups(row)) for row in rows]
    seen, taken = set(), []
    for least in range(max(len(mine) for _, mine in found), 0, -1):  # greedily
        for row, mine in found:
            if len(mine - seen) >= least:
                seen |= mine
                taken.append(row)
    return taken


# Without checks and under pmap what is traced is nearly the same.
in_every_way = pytest.mark.parametrize(
    "how", choices(HARNESSES, lambda x: x in {"shard_map", "vmap"})
)
in_every_mapped_way = pytest.mark.parametrize(
    "how", choices(HARNESSES[:3], lambda x: x == "shard_map")
)
on_every_mesh = pytest.mark.parametrize(
    "axis_type", choices(AXIS_TYPES, lambda x: x == AXIS_TYPES[0])
)


def make_mesh(shape=(N,), names=("data",), axis_type=AXIS_TYPES[0]):
    """A mesh of the first devices."""
    devices = jax.devices()[: int(np.prod(shape))]
    types = (axis_type,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=types, devices=devices)


class Heard(NamedTuple):
    """The state of `Scripted`."""

    measured_seconds: jax.Array


@dataclasses.dataclass(frozen=True)
class Scripted(Controller):
    """Takes the rungs in turn, and keeps the times that it was told."""

    ladder: tuple[float, ...]

    def init(self):
        return jnp.int32(0), Heard(jnp.full(len(self.ladder), jnp.nan))

    def decide(self, evidence, state):
        del state
        rung = (evidence.step + 1) % len(self.ladder)
        return rung, Heard(evidence.measured_seconds)


def trajectory(tx, params, how, *, mesh=None, axis_name="data"):
    """Compile many steps of `tx.update` on all replicas, from the initial state.

    Args:
      tx: a transformation over `axis_name`.
      params: the params.
      how: one of `HARNESSES`.
      mesh: for `shard_map`; by default N devices and Auto.
      axis_name: the axis, or axes.

    Returns:
      A function of (gradients, **extra), with leading axes `[steps, replicas]`. It
      returns the updates `[steps, ...]` and the states `[steps, ...]`, of which what
      differs per replica is `[steps, replicas, ...]`, as NumPy arrays. It raises if
      the replicas do not agree on the rest. Its `text(...)` is the compiled program.
    """
    mesh = mesh or make_mesh()
    state = gravac.init(tx, params, mesh if "shard_map" in how else N, axis_name)
    specs = gravac.state_specs(state, axis_name)
    choose = lambda local, shared: jax.tree.map(
        lambda spec: shared if spec == jax.P() else local, specs
    )

    def body(state, inputs):
        def step(state, x):
            gradients, extra = x
            updates, state = tx.update(gradients, state, **extra)
            return state, (updates, state)

        return jax.lax.scan(step, state, inputs)[1]

    if "shard_map" in how:
        by_step = jax.P(None, axis_name)
        jitted = jax.jit(
            jax.shard_map(
                lambda state, x: body(state, jax.tree.map(lambda x: x[:, 0], x)),
                mesh=mesh,
                in_specs=(specs, by_step),
                out_specs=(jax.P(), choose(by_step, jax.P())),
                check_vma=how == "shard_map",
            )
        )
    else:
        in_axes, out_axes = (choose(0, None), 1), (None, choose(1, None))
        if how == "pmap":
            jitted = jax.pmap(body, axis_name, in_axes=in_axes, out_axes=out_axes)
        else:
            mapped = jax.vmap(body, in_axes, out_axes, axis_name=axis_name)
            jitted = jax.jit(mapped)

    def prepare(inputs):
        if "shard_map" in how:
            return jax.device_put(inputs, jax.NamedSharding(mesh, by_step))
        return inputs

    def run(gradients, **extra):
        return jax.tree.map(agreed, jitted(state, prepare((gradients, extra))))

    run.text = lambda gradients, **extra: (
        jitted.lower(state, prepare((gradients, extra))).compile().as_text()
    )
    return run


def agreed(x):
    """`x` as a NumPy array, from any device if it claims to be the same on all."""
    copies = [np.asarray(shard.data) for shard in x.addressable_shards]
    if x.is_fully_replicated:
        for copy in copies[1:]:
            assert copy.tobytes() == copies[0].tobytes(), "the replicas differ"
        return copies[0]
    return np.asarray(x)


def assert_same(received, expected, what=""):
    """Two trees have the same structure, shapes, dtypes and bits."""
    assert jax.tree.structure(received) == jax.tree.structure(expected), what
    pairs = zip(
        jax.tree.leaves_with_path(received), jax.tree.leaves(expected), strict=True
    )
    for (path, a), b in pairs:
        name = f"{what} {jax.tree_util.keystr(path)}"
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if a.tobytes() != b.tobytes():
            where = np.argwhere((a != b) & ~((a != a) & (b != b)))
            raise AssertionError(
                f"{name}: {len(where)} of {a.size} entries differ, first"
                f" {where[:1].tolist()}: {a[tuple(where[0])] if len(where) else a}"
                f" where {b[tuple(where[0])] if len(where) else b} was expected"
            )


def at(tree, step):
    """One step of a trajectory."""
    return jax.tree.map(lambda x: x[step], tree)


@contextlib.contextmanager
def compilations():
    """A list that grows by the name of each program that is compiled meanwhile."""
    names = []

    def listen(event, seconds, **details):
        del seconds
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


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


KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
KINDS += "|collective-broadcast|ragged-all-to-all"
BYTES = {"pred": 1, "u8": 1, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "f32": 4}


def collectives(text):
    """Every `Collective` of a compiled program, and how many conditionals it has."""
    bodies = dict(
        re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)
    )
    entry = re.search(r"^ENTRY %(\S+)", text, re.M)[1]
    found, conditionals, ops = [], 0, 0  # one op may be several that XLA combined

    def visit(name, branches):
        nonlocal conditionals, ops
        for line in bodies[name].splitlines():
            if called := re.search(r"branch_computations=\{(.*?)\}", line):
                conditionals += 1
                for i, branch in enumerate(called[1].split(", ")):
                    visit(branch.removeprefix("%"), (*branches, i))
            if op := re.search(rf"= (\S+|\(.*?\)) ({KINDS})(?:-start)?\(", line):
                found.extend(_payloads(op[1], op[2], branches))
                ops += 1
            for callee in re.findall(r"(?:body|calls|to_apply)=%([\w.\-]+)", line):
                visit(callee, branches)

    visit(entry, ())
    assert ops == len(re.findall(rf" (?:{KINDS})(?:-start)?\(", text))
    return found, conditionals


def _payloads(shapes, kind, branches):
    for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        size = BYTES[dtype] * int(np.prod([int(n) for n in shape.split(",") if n]))
        yield Collective(
            kind, dtype, size // N if kind == "all-gather" else size, branches
        )
