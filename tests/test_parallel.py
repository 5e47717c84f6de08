"""Training on a mesh and with replicas that one device simulates is the same."""

import functools

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import AXIS_TYPES, PARAMS, N, assert_same, make_mesh, on_every_mesh

import gravac_jax as gravac

STEPS = 10
TX = optax.chain(
    gravac.transform(compress=lambda path, leaf: leaf.ndim == 2, send=_harness.ROWS),
    optax.sgd(1.0),
)


def train_step(params, opt_state, batch):
    """Train on a loss whose gradients are the sums of the batch's rows."""
    loss = lambda p: sum(jnp.sum(p[k] * jnp.sum(batch[k], axis=0)) for k in p)
    value, grads = gravac.value_and_grad(loss)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    metrics = {"b": jnp.sum(batch["b"]), "rows": len(batch["b"])}
    return optax.apply_updates(params, updates), opt_state, value, metrics


def batches(integers=False):
    """Yield a batch a step, of two rows a replica."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = {k: rng.normal(size=(2 * N, *p.shape)) for k, p in PARAMS.items()}
        x = {k: np.round(9 * v) for k, v in x.items()} if integers else x
        yield {k: v.astype(np.float32) for k, v in x.items()}


SIMULATED = "simulated"


def parallel(step, where, **kwargs):
    """Return where to place the state, and the parallel step."""
    if where == SIMULATED:
        return N, gravac.data_parallel(step, N, **kwargs)
    axis_type, check_vma = where
    mesh = make_mesh(axis_type=axis_type)
    return mesh, gravac.data_parallel(step, mesh, check_vma=check_vma, **kwargs)


step_on = functools.cache(functools.partial(parallel, train_step))


@functools.cache
def train(where, integers=False):
    """Return params, optimizer state and metrics of each step."""
    place, step = step_on(where)
    state = gravac.place((PARAMS, TX.init(PARAMS)), place)
    trajectory = []
    for batch in batches(integers):
        *state, value, metrics = step(*state, batch)
        trajectory.append(jax.tree.map(_harness.agreed, (*state, value, metrics)))
    return trajectory


MESHES = [(axis_type, check) for axis_type in AXIS_TYPES for check in (True, False)]
WHERE = MESHES[1:3]  # each axis type, and each way to check


@pytest.mark.parametrize("where", WHERE)
def test_a_mesh_and_a_simulation_train_alike_bit_for_bit_on_integers(where):
    assert_same(train(where, integers=True), train(SIMULATED, integers=True))
    for batch, (_, _, value, metrics) in zip(
        batches(integers=True), train(where, integers=True), strict=True
    ):
        assert value.dtype == metrics["b"].dtype == np.float32
        assert metrics == {"b": batch["b"].sum() / N, "rows": 2}
        assert metrics["rows"].dtype == np.int32


@pytest.mark.parametrize("where", WHERE)
def test_on_floats_both_keep_the_same_bits_and_round_sums_differently(where):
    came_in = dict.fromkeys(PARAMS, 0.0)
    runs = zip(batches(), train(where), train(SIMULATED), strict=True)
    for step, (batch, received, expected) in enumerate(runs, start=1):
        assert_same(received[1][0].local, expected[1][0].local)
        for leaf in PARAMS:
            came_in[leaf] += np.abs(batch[leaf]).sum(axis=0)
            # Every step rounds its mean, and then the param.
            bound = (_harness.SUM_ROUNDING + step * 2.0**-24) * came_in[leaf]
            assert (np.abs(received[0][leaf] - expected[0][leaf]) <= bound).all()


# What has no mean must be the same on all replicas, and known to be.
ALIKE = [
    (16_777_217, lambda x: jnp.int32(16_777_217) + jax.lax.psum(0 * x[0], "data")),
    (True, lambda x: jax.lax.pmax((x[0] > 2).astype(jnp.int32), "data") > 0),
    (1, len),
    (N * (N - 1) // 2, lambda x: gravac.Comm("data").sum(x[0])),
]
DIFFERENT = {
    "a count": lambda x: jnp.sum((x > 1).astype(jnp.int32)),
    "a flag": lambda x: x[0] > 2,
    "a key": lambda x: jax.random.key(x[0]),
}
OWN = np.arange(N, dtype=np.int32)
on_each = pytest.mark.parametrize("where", [MESHES[0], SIMULATED], ids=str)


@on_each
def test_a_metric_that_is_no_float_is_returned_as_it_is(where):
    every = lambda x: [jax.random.key(7), *[make(x) for _, make in ALIKE]]
    place, step = parallel(lambda state, x: (state, every(x)), where)
    _, (key, *found) = step(gravac.place(jnp.zeros(()), place), OWN)
    assert key == jax.random.key(7)
    assert [x.item() for x in found] == [value for value, _ in ALIKE]
    assert not any(jnp.issubdtype(x.dtype, jnp.floating) for x in found)


@pytest.mark.parametrize("where", [*MESHES[:2], SIMULATED], ids=str)
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_metric_without_a_mean_is_refused(name, where):
    place, step = parallel(lambda state, x: (state, DIFFERENT[name](x)), where)
    says = r"metric at \[0\].*gravac.Comm\('data'\).sum\(x\)"
    with pytest.raises(TypeError, match=says):
        step(gravac.place(jnp.zeros(()), place), OWN)


@on_each
def test_state_that_comes_to_differ_is_refused_by_name(where):
    place, step = parallel(lambda p, x: ({**p, "b": p["b"] + x.sum()},), where)
    with pytest.raises(ValueError, match=r"the leaf at \[0\]\['b'\].*\('data',\)"):
        step.lower(gravac.place(PARAMS, place), BATCH)


def averaging_step(params, average, batch, **_):
    return params, jax.tree.map(lambda x, y: (x + y) / 2, params, average), batch.sum()


@on_each
def test_a_state_that_was_donated_or_holds_an_array_twice_is_refused(where):
    place, step = parallel(averaging_step, where)
    params, ones = gravac.place(PARAMS, place), np.ones(N, np.float32)
    with pytest.raises(ValueError, match=r"twice, at \[1\].* and at \[0\].*copy it"):
        step(params, params, ones)
    average = jax.tree.map(jnp.copy, params)
    with pytest.raises(ValueError, match=r"at \[0\].* and at \[3\]\['teacher'\]"):
        step(params, average, ones, teacher=params)
    after, *_ = step(params, average, ones)
    for used in ((params, average), (after, average)):
        with pytest.raises(ValueError, match="go on with what that step returned"):
            step(*used, ones)
    _, keeping = parallel(averaging_step, where, donate=False)
    keeping(after, after, ones)
    assert not after["w"].is_deleted()


def mean_step(params, batch):
    """Average plainly, without a transform."""
    return params + jax.lax.pmean(jnp.sum(batch), "data")


BATCH = np.arange(2.0 * N, dtype=np.float32)


@on_every_mesh
def test_a_batch_may_be_any_array_and_is_kept(axis_type):
    mesh = make_mesh(axis_type=axis_type)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    step = gravac.data_parallel(mean_step, mesh)
    for batch in (BATCH, jnp.asarray(BATCH), jax.device_put(BATCH, rows)):
        (params,) = step(gravac.place(np.float32(1), mesh), batch)
        assert float(params) == 1 + BATCH.sum() / N
        assert np.array_equal(batch, BATCH)


def running_step(total, own, batch, *, scale):
    """Add up each replica's own sums, and the total of all."""
    own = {"sums": own["sums"] + batch * scale["by"]}
    return total + jax.lax.psum(jnp.sum(batch), "data"), own, own["sums"].max()


@pytest.mark.parametrize("where", [*WHERE, SIMULATED])
def test_a_carry_stays_each_replica_s_own_and_keyword_arguments_come_whole(where):
    place, step = parallel(running_step, where, carried=1)
    assert step.__name__ == "running_step"
    total = gravac.place(np.float32(0), place)
    own = {"sums": np.zeros(2 * N, np.float32)}
    for i in range(1, 4):
        before = own
        total, own, largest = step(total, own, BATCH, scale={"by": np.float32(3)})
        assert own["sums"].tolist() == (3 * i * BATCH).tolist()
        assert float(total) == i * BATCH.sum()
        # Each replica holds two rows; the result is the mean of the larger ones.
        assert float(largest) == 3 * i * BATCH[1::2].mean()
    assert before["sums"].is_deleted()  # donated, as the rest of the state


def test_a_carry_is_split_over_both_axes():
    mesh = make_mesh((2, 2), ("data", "fast"))
    add = lambda x, own, batch: (x, own + batch)
    step = gravac.data_parallel(add, mesh, "data", "fast", carried=1)
    total, own = gravac.place(np.float32(0), mesh), np.zeros(8, np.float32)
    for _ in range(2):
        total, own = step(total, own, BATCH[:8])
    assert own.sharding.spec == jax.P(("data", "fast"))
    assert own.tolist() == (2 * BATCH[:8]).tolist()


@on_each
def test_a_wrong_carry_is_refused(where):
    with pytest.raises(ValueError, match=r"`carried`.* got -1"):
        parallel(running_step, where, carried=-1)
    place, step = parallel(running_step, where, carried=1)
    total = gravac.place(np.float32(0), place)
    with pytest.raises(TypeError, match=r"got 2 .*, carry_1, batch"):
        step(total, BATCH)
    with pytest.raises(ValueError, match=r"carried .*\['sums'\]"):
        step(total, {"sums": np.zeros(N + 1, np.float32)}, BATCH)
    _, shorter = parallel(lambda x, own, batch: (x, own[:1]), where, carried=1)
    with pytest.raises(ValueError, match=r"float32\[2\].* got float32\[1\]"):
        shorter(total, BATCH, BATCH)


@pytest.mark.parametrize("where", [1, make_mesh((1,))], ids=["simulated", "mesh"])
def test_one_replica_is_enough(where):
    step = gravac.data_parallel(mean_step, where)
    (params,) = step(gravac.place(np.float32(1), where), BATCH)
    assert float(params) == 1 + BATCH.sum()


@on_every_mesh
def test_the_mesh_may_have_other_axes(axis_type):
    axis_name = ("data", "other")[: 2 - AXIS_TYPES.index(axis_type)]
    mesh = make_mesh((2, 2), ("data", "other"), axis_type)
    tx = gravac.transform(axis_name, compress=True, send=gravac.TopK(4, select="exact"))
    step = gravac.data_parallel(
        lambda state, x: tx.update(x[0], state)[::-1], mesh, axis_name
    )
    replicas = 4 if "other" in axis_name else 2
    grads = np.arange(16.0 * replicas, dtype=np.float32).reshape(replicas, 4, 4)
    state = gravac.place(tx.init(grads[0]), mesh, axis_name)
    state, updates = step(state, grads)
    residual = np.asarray(_harness.residual(state))
    assert residual.shape == (replicas, 16)
    sent = grads.reshape(replicas, 16) - residual
    assert np.array_equal(np.ravel(updates), sent.mean(axis=0))
    assert np.count_nonzero(sent, axis=1).tolist() == [4] * replicas


@pytest.mark.parametrize("how", [2, make_mesh((2,))], ids=["vmap", "mesh"])
def test_a_metric_in_float64_is_averaged_in_float64(how):
    with jax.enable_x64(True):
        step = gravac.data_parallel(lambda p, s, x: (p, s, x[0]), how)
        state = gravac.place((jnp.zeros(2), jnp.zeros(())), how)
        mean = step(*state, jnp.array([1.0, 1 + 2**-40], jnp.float64))[2]
        assert (mean.dtype, float(mean)) == (jnp.float64, 1 + 2**-41)
