"""Whatever finite numbers come in: replicas agree, nothing is lost, no NaN comes.

A bounded set of compiled programs, tried on data that hypothesis makes up: some of them
in the default run, with `pytest -m slow` all, on ten thousand.
"""

import dataclasses
import functools
from typing import Any

import _examples
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _harness import Scripted, agreed, assert_same, make_mesh

import gravac_jax as gravac
from gravac_jax._checkpoint import portable

QUICK, MANY = 50, 560
EVIDENCE_BYTES = 1000
BFLOAT16 = ml_dtypes.bfloat16
LEAVES = {
    "float32": {"w": ((4, 3), np.float32), "b": ((3,), np.float32)},
    "mixed": {
        "empty": ((0, 3), np.float32),
        "half": ((2, 3), np.float16),
        "scalar": ((), np.float32),
        "short": ((2, 2), BFLOAT16),
        "w": ((2, 3), np.float32),
    },
    "all small": {"a": ((2,), np.float32), "b": ((1, 1), np.float32)},
    "one": {"w": ((11,), np.float32)},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled program.

    Attributes:
      leaves: one of `LEAVES`.
      replicas: how many.
      ladder: the factors, all of which are taken.
      is_exact: whether sent + kept is what came in, to float32 rounding of sums.
      recipe: for `gravac.transform`.
      is_mapped: on a mesh of devices, not simulated on one.
    """

    leaves: str
    replicas: int
    ladder: tuple[float, ...]
    recipe: tuple[tuple[str, Any], ...] = ()
    is_exact: bool = True
    is_mapped: bool = False


def of(**recipe):
    return tuple(recipe.items())


WIDE = gravac.AllGather(**_examples.WIDE)
BYTES = gravac.AllGather(gravac.TopK(), values=gravac.Int8())
CASES = {
    "default": Case("float32", 4, (1, 3, 10)),
    "mixed dtypes": Case("mixed", 3, (1, 4)),
    "wide entries": Case("float32", 4, (1, 2, 8), of(exchange=WIDE)),
    "bytes": Case("one", 2, (1, 4), of(exchange=BYTES)),
    "top k": Case("one", 7, (1, 2.5), of(exchange=gravac.AllGather(gravac.TopK()))),
    "momentum": Case("float32", 2, (1, 5), of(momentum=0.5), is_exact=False),
    "aged momentum": Case(
        "float32", 2, (1, 5), of(memory=gravac.Momentum(0.5, masking="aged")), False
    ),
    "adam": Case("float32", 4, (1, 4), of(memory=gravac.Adam()), is_exact=False),
    "leader": Case("float32", 4, (1, 4), of(exchange=gravac.LeaderIndices())),
    "random": Case("mixed", 2, (1, 4), of(exchange=gravac.SharedRandomK())),
    "low rank": Case("float32", 4, (1, 3), of(exchange=gravac.LowRank()), False),
    "clipped": Case(
        "float32", 4, (1, 4), of(clip=gravac.ClipByGlobalNorm(1.0)), is_exact=False
    ),
    "buckets": Case("mixed", 4, (1, 4), of(bucket_bytes=16)),
    "nothing compressed": Case("all small", 4, (1, 4), of(compress=False)),
    "alone": Case("float32", 1, (1, 4)),
    "mesh": Case("mixed", 4, (1, 4), is_mapped=True),
    "wide on a mesh": Case("float32", 3, (1, 4), of(exchange=WIDE), is_mapped=True),
}


SOME = ("mixed dtypes", "adam", "mesh")


@functools.cache
def program(name):
    """A step on all replicas, from gradients of all, and the state before it."""
    case = CASES[name]
    recipe = {"compress": lambda path, leaf: leaf.size > 3, **dict(case.recipe)}
    tx = gravac.transform(controller=Scripted(case.ladder), **recipe)
    params = {k: jnp.zeros(*x) for k, x in LEAVES[case.leaves].items()}

    def train_step(updates, state, batch):
        grads = jax.tree.map(lambda x: x[0], batch)
        return tx.update(grads, state, jax.tree.map(jnp.zeros_like, updates))

    where = make_mesh((case.replicas,)) if case.is_mapped else case.replicas
    if case.is_mapped:
        step = gravac.data_parallel(train_step, where, donate=False)
    else:
        step = gravac.simulate(train_step, where)
    return step, gravac.place((params, tx.init(params)), where)


SIZES = {"moderate": 1000.0, "large": 2.0**50, "any": np.inf}


def numbers(dtype, size):
    """Small wholes, so that there are ties, and others of all magnitudes up to one."""
    top = min(float(ml_dtypes.finfo(dtype).max), size)
    width = 16 if dtype == np.float16 else 32
    return st.one_of(
        st.integers(-4, 4).map(float),
        st.floats(
            -top, top, width=width, allow_subnormal=True, exclude_max=size == top
        ),
    )


def batch(case, size):
    """Gradients of all replicas, by leaf: `[replicas, *shape]`."""
    leaves = {}
    for name, (shape, dtype) in LEAVES[case.leaves].items():
        elements = numbers(dtype, size)
        flat = hnp.arrays(np.float64, (case.replicas, *shape), elements=elements)
        leaves[name] = flat.map(lambda x, dtype=dtype: x.astype(dtype))
    return st.fixed_dictionaries(leaves)


def runs(case):
    """Some batches, all of them up to one size, which comes first."""
    batches = lambda size: st.lists(batch(case, SIZES[size]), min_size=1, max_size=2)
    each = [st.tuples(st.just(size), batches(size)) for size in SIZES]
    return st.one_of(each)


def rung_of(state, rung):
    return state._replace(rung=jnp.full_like(state.rung, rung))


def run(name, rung, batches):
    """Steps from the beginning; the updates, and states that all replicas agree on."""
    step, (updates, state) = program(name)
    state = rung_of(state, rung)
    for x in batches:
        before = jax.tree.map(jnp.copy, (updates, state))
        updates, state = step(*before, x)
        yield jax.tree.map(agreed, updates), jax.tree.map(agreed, state)


def by_kind(state, part):
    """What the memory holds of each replica, added up: `[entries]` float64."""
    held = [np.asarray(getattr(x, part), np.float64).sum(0) for x in state.local.memory]
    return np.concatenate(held)


def compressed(case, tree, replicas=True):
    """The entries of the compressed leaves, float64, in the order of buckets."""
    size = lambda x: x[0].size if replicas else x.size
    lead = (case.replicas,) if replicas else ()
    is_sent = dict(case.recipe).get("compress", True)
    parts = [
        np.asarray(x, np.float64).reshape(*lead, -1)
        for _, x in sorted(tree.items())
        if is_sent and size(x) > 3
    ]
    return np.concatenate(parts, axis=-1) if parts else np.zeros((*lead, 0))


def is_sane(batch):
    """Whether a step is to be taken at all."""
    return all((np.abs(x.astype(np.float64)) < 2.0**50).all() for x in batch.values())


def holds(name, rung, size, batches):
    """All that must hold of a few steps."""
    case = CASES[name]
    is_clipped = "clip" in dict(case.recipe)
    came = np.zeros(compressed(case, batches[0]).shape[1])
    sent, total = came.copy(), came.copy()
    for x, (updates, state) in zip(batches, run(name, rung, batches), strict=True):
        for leaf in jax.tree.leaves((updates, state.local, state.info.gain)):
            assert np.isfinite(np.asarray(leaf, np.float64)).all()
        info = state.info
        assert info.is_finite == (is_sane(x) or is_clipped)
        assert 0 <= info.gain <= 1
        assert info.payload_bytes >= 0
        assert info.wire_bytes <= info.dense_wire_bytes + EVIDENCE_BYTES
        update = compressed(case, updates, replicas=False)
        if info.is_finite:
            gradient = compressed(case, x)
            came += gradient.sum(0)
            total += np.abs(gradient).sum(0)
            sent += case.replicas * update
        else:
            assert not update.any()
    if case.is_exact and size == "moderate":
        kept = by_kind(state, "residual")
        # Sums of a few numbers, and means that are rounded to the leaf's dtype.
        eps, smallest = narrow(case)
        sums = len(batches) * case.replicas
        assert (np.abs(came - sent - kept) <= sums * (eps * total + smallest)).all()


def narrow(case):
    """Of each compressed entry's dtype: its rounding, and what is zero in it."""
    parts = [
        np.full((int(np.prod(shape)), 2), (float(info.eps), float(info.tiny)))
        for _, (shape, dtype) in sorted(LEAVES[case.leaves].items())
        for info in [ml_dtypes.finfo(dtype)]
        if np.prod(shape) > 3 and dict(case.recipe).get("compress", True)
    ]
    return np.concatenate(parts).T if parts else np.zeros((2, 0))


def few_or_many(names, some, few, many):
    """Some with few examples, and in the slow run all of them with many."""
    slow = [pytest.param(name, many, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize(
        ("name", "examples"), [*((name, few) for name in some), *slow]
    )


def tries(examples):
    """Settings of so many examples: in the default run always the same ones."""
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples == QUICK,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@few_or_many(CASES, SOME, QUICK, MANY)
def test_whatever_comes_nothing_is_lost_and_all_stays_finite(name, examples):
    case = CASES[name]

    @tries(examples)
    @hypothesis.given(rung=st.integers(0, len(case.ladder) - 1), sized=runs(case))
    def check(rung, sized):
        holds(name, rung, *sized)

    check()


SLICED = {"b": ((3,), np.float32), "w": ((4, 3), np.float32)}
SLOW, FAST = 2, 2


@functools.cache
def sliced():
    """A step on slices of a matrix along a fast axis, and the state before it."""
    mesh = make_mesh((SLOW, FAST), ("dcn", "ici"))
    specs = {"b": jax.P(), "w": jax.P("ici")}
    put = lambda name, x: jax.device_put(
        jnp.zeros(*x), jax.NamedSharding(mesh, specs[name])
    )
    params = {name: put(name, x) for name, x in SLICED.items()}
    tx = gravac.transform(
        "dcn",
        dense_axis_name="ici",
        sharded={"b": False, "w": True},
        controller=Scripted((1, 4)),
    )

    def train_step(params, state, batch):
        def loss(params):
            whole = jax.lax.all_gather(params["w"], "ici", axis=0, tiled=True)
            return jnp.sum(whole * batch["w"][0]) + jnp.sum(params["b"] * batch["b"][0])

        _, grads = gravac.value_and_grad(loss, ("dcn", "ici"))(params)
        return tx.update(grads, state, params)

    step = gravac.data_parallel(train_step, mesh, "dcn", "ici", donate=False)
    return step, params, gravac.init(tx, params, mesh, "dcn", "ici")


@pytest.mark.parametrize(
    "examples", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)]
)
def test_of_slices_nothing_is_lost(examples):
    step, params, before = sliced()
    draw = lambda shape: hnp.arrays(
        np.float32, (SLOW * FAST, *shape), elements=numbers(np.float32, 1000.0)
    )
    batches = st.fixed_dictionaries({k: draw(x[0]) for k, x in SLICED.items()})

    @tries(examples)
    @hypothesis.given(
        rung=st.integers(0, 1), batches=st.lists(batches, min_size=2, max_size=2)
    )
    def check(rung, batches):
        updates, state = params, rung_of(before, rung)
        came = sent = total = np.zeros((4, 3))
        for x in batches:
            updates, state = step(updates, state, x)
            w = x["w"].astype(np.float64)
            came = came + w.sum(0) / FAST
            total = total + np.abs(w).sum(0)
            sent = sent + SLOW * np.asarray(updates["w"], np.float64)
            mean = x["b"].astype(np.float64).mean(0)
            np.testing.assert_allclose(updates["b"], mean, rtol=1e-5, atol=1e-3)
        form = portable.form(state, params)
        (kept,) = form.split([bucket.residual for bucket in state.local.memory])
        lost = came - sent - np.asarray(kept, np.float64).sum(0)
        assert (np.abs(lost) <= 8 * 2.0**-24 * total + 1e-37).all()

    check()


ALONE = {
    "default": {},
    "top k": {"exchange": gravac.AllGather(gravac.TopK())},
    "wide entries": {"exchange": WIDE},
    "momentum": {"momentum": 0.5},
}


@functools.cache
def alone(name):
    """A transform on one replica, its compiled update, and the state before it."""
    recipe = {"controller": gravac.Fixed(3), **ALONE[name]}
    tx = gravac.transform(axis_name=None, compress=True, **recipe)
    return tx.update, jax.jit(tx.update), tx.init(jnp.zeros((4, 6)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_compiled_or_not_it_is_the_same(name):
    """On numbers whose sums and halves are exact."""
    eighths = st.integers(-64, 64).map(lambda x: x / 8)
    update, compiled, before = alone(name)

    @hypothesis.settings(
        max_examples=10, deadline=None, derandomize=True, database=None
    )
    @hypothesis.given(hnp.arrays(np.float32, (2, 4, 6), elements=eighths))
    def check(gradients):
        one = two = before
        for x in gradients:
            (a, one), (b, two) = update(x, one), compiled(x, two)
            held = [jax.tree.leaves(s.local.memory) for s in (one, two)]
            assert_same([a, *held[0]], [b, *held[1]])

    check()


# What was found and mended.


def test_numbers_whose_sums_are_infinite_skip_the_step():
    """Finite, but three of them were not, and a residual that is not never mends."""
    huge = {k: np.full((4, *x[0]), 3e38, x[1]) for k, x in LEAVES["float32"].items()}
    small = {k: np.ones_like(x) for k, x in huge.items()}
    holds("default", 1, "any", [small, huge, huge, small])


@pytest.mark.parametrize("name", ["leader", "low rank", "bytes"])
def test_squares_that_are_infinite_skip_the_step(name):
    leaves = LEAVES[CASES[name].leaves].items()
    replicas = CASES[name].replicas
    large = {k: np.full((replicas, *x[0]), 2.0**50, x[1]) for k, x in leaves}
    holds(name, 1, "any", [{k: x * np.float32(0.9) for k, x in large.items()}, large])


@pytest.mark.parametrize("size", [1e20, 8e37, 1.7e38, 3.4e38])
def test_the_longest_gradients_are_clipped(size):
    """From 2**126 on they passed: what they were divided by had no reciprocal."""
    leaves = LEAVES["float32"].items()
    batch = {k: np.full((4, *shape), size, dtype) for k, (shape, dtype) in leaves}
    holds("clipped", 0, "any", [batch])
    ((update, _),) = run("clipped", 0, [batch])
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in update.values()))
    np.testing.assert_allclose(norm, np.sqrt(4) * 1.0, rtol=1e-6)


def test_a_batch_may_have_a_leaf_without_entries():
    batch = {
        k: np.ones((3, *shape), dtype) for k, (shape, dtype) in LEAVES["mixed"].items()
    }
    assert batch["empty"].size == 0
    holds("mixed dtypes", 1, "moderate", [batch])
