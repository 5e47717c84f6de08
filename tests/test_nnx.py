"""NNX objects train in few lines: batch statistics, random keys, metrics."""

import functools
import sys

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, agreed, assert_same, compilations, make_mesh, residual
from flax import nnx

import gravac_jax as gravac

ROWS = 8 * N
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 8)).astype(np.float32)
BATCH = {"x": X, "label": np.argmax(X[:, :4], axis=1).astype(np.int32)}
PARTS = [jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], BATCH) for i in range(N)]
MESHES = {"mesh": make_mesh(), "simulated": N}
everywhere = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
# It compiles the fastest.
CHEAP = {"compress": True, "send": gravac.Bits(4, row_entries=32)}

# Flax's metrics and Optax's AdamW add integers to floats.
pytestmark = pytest.mark.usefixtures("standard_promotion", "fast_keys")


class MLP(nnx.Module):
    """A perceptron with all that changes in a forward pass."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


class Odd(nnx.Module):
    """A layer with a variable that is no batch statistic."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(8))
        self.largest = nnx.Variable(jnp.zeros(()))
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x @ self.kernel[...]


def loss_fn(model, batch):
    logits = model(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.mean(loss), logits


def new_metrics():
    return nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )


def train_step(model, optimizer, metrics, batch, axes="data"):
    grad_fn = gravac.nnx_value_and_grad(loss_fn, axes, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
    return loss


# Compiled once for all tests that take it.
step_on = functools.cache(functools.partial(gravac.nnx_data_parallel, train_step))


def new_objects(axis_name="data", **options):
    model = MLP(nnx.Rngs(0))
    tx = optax.chain(gravac.transform(axis_name, **CHEAP, **options), optax.sgd(0.3))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), new_metrics()


def arrays(objects):
    """Return every array of objects as NumPy; keys as their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = lambda x: jax.random.key_data(x) if is_key(x) else x
    return [np.array(data(x)) for x in jax.tree.leaves(objects)]


# ------------------------------------------------- the laws of gradients


@everywhere
def test_gradients_and_batch_statistics_are_means_of_what_replicas_alone_compute(mesh):
    def step(model, batch):
        (loss, _), grads = grad_fn(model, batch)
        return loss, grads

    grad_fn = gravac.nnx_value_and_grad(loss_fn, has_aux=True)
    model = MLP(nnx.Rngs(0))
    model.dropout.rate = 0.0
    alone, of_one = [], nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))
    for part in PARTS:
        one = nnx.clone(model)
        (loss, _), grads = of_one(one, part)
        alone.append((loss, grads, nnx.state(one, nnx.BatchStat)))
    expected = jax.tree.map(lambda *x: np.mean(x, axis=0), *alone)
    model = gravac.place(model, mesh)
    results = gravac.nnx_data_parallel(step, mesh)(model, BATCH)
    received = (*results, nnx.state(model, nnx.BatchStat))
    received = jax.tree.map(agreed, received)
    _harness.assert_close(received, expected, rtol=1e-5, atol=1e-6)
    assert np.ptp(model.norm.mean[...]) > 0


def test_gradients_are_local_and_narrow_statistics_keep_their_dtype():
    class Layer(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.float32(1))
            self.seen = nnx.BatchStat(jnp.bfloat16(0))

    def loss_fn(layer, batch):
        mean = jnp.mean(batch)
        layer.seen[...] = mean.astype(jnp.bfloat16)
        return layer.kernel[...] * mean

    def step(layer, batch):
        _, grads = gravac.nnx_value_and_grad(loss_fn)(layer, batch)
        mine = jnp.arange(N) == jax.lax.axis_index("data")
        return jax.lax.psum(jnp.where(mine, grads["kernel"][...], 0), "data")

    layer = gravac.place(Layer(), make_mesh())
    grads = gravac.nnx_data_parallel(step, make_mesh())(layer, jnp.arange(4.0))
    assert grads.tolist() == [0, 1, 2, 3]
    assert layer.seen[...].dtype == jnp.bfloat16
    assert float(layer.seen[...]) == 1.5


def test_without_an_axis_it_is_the_value_and_grad_of_flax():
    def run(value_and_grad):
        model = MLP(nnx.Rngs(0))
        out = nnx.jit(value_and_grad(loss_fn, has_aux=True))(model, BATCH)
        return arrays((out, model))

    of_one = functools.partial(gravac.nnx_value_and_grad, axis_name=None)
    assert_same(run(of_one), run(nnx.value_and_grad))


class Masks(nnx.Module):
    """Two dropouts: one with random keys of its own, one that is handed its keys."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones(64))
        self.own = nnx.Dropout(0.5, rngs=rngs)
        self.given = nnx.Dropout(0.5)

    def __call__(self, rngs):
        ones = jnp.ones(64)
        return jnp.stack([self.own(ones), self.given(ones, rngs=rngs)])


def test_objects_that_share_a_variable_are_not_placed():
    with pytest.raises(ValueError, match=r"share variables, .* \[\(0,\), \(1,\)\]"):
        gravac.place([Odd()] * 2, N)


@everywhere
def test_dropout_masks_differ_per_replica_and_keys_stay_the_same(mesh):
    def loss_fn(model, rngs, batch):
        masks = model(rngs)
        return jnp.sum(masks @ model.kernel[...]) * jnp.sum(batch), masks

    def step(model, batch, rngs):  # the batch may stand between objects
        grad_fn = gravac.nnx_value_and_grad(loss_fn, has_aux=True)
        (_, masks), _ = grad_fn(model, rngs, batch)
        mine = jnp.arange(N)[:, None, None] == jax.lax.axis_index("data")
        return jax.lax.psum(jnp.where(mine, masks[None], 0), "data")

    # With these keys vmap draws what each replica draws alone.
    rngs_of = lambda seed: nnx.Rngs(jax.random.key(seed, impl="threefry2x32"))
    before = Masks(rngs_of(0)), rngs_of(1)
    model, rngs = gravac.place(before, mesh)
    step = gravac.nnx_data_parallel(step, mesh)
    masks = np.concatenate([step(model, jnp.ones(N), rngs) for _ in range(2)])
    assert len({mask.tobytes() for pair in masks for mask in pair}) == 2 * N * 2

    # The oracle: streams that begin at the key of a replica.
    for i in range(N):
        own, given = (
            nnx.RngStream(jax.random.fold_in(stream.key[...], i), tag="x")
            for stream in (before[0].own.rngs, before[1].default)
        )
        for taken in (masks[i], masks[N + i]):
            kept = [jax.random.bernoulli(x(), 0.5, (64,)) for x in (own, given)]
            np.testing.assert_array_equal(taken > 0, kept)
    for stream, old in [
        (model.own.rngs, before[0].own.rngs),
        (rngs.default, before[1].default),
    ]:
        assert int(agreed(stream.count[...])) == 2
        data = agreed(jax.random.key_data(stream.key[...]))
        np.testing.assert_array_equal(data, jax.random.key_data(old.key[...]))


FROZEN = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)


class Adapter(nnx.Param):
    """A kind of its own."""


class Adapted(nnx.Module):
    """A matrix that is not trained, beside one that is."""

    def __init__(self):
        self.frozen = nnx.Param(jnp.array(FROZEN))
        self.kernel = Adapter(jnp.zeros((64, 64)))
        self.seen = nnx.Variable(jnp.float32(3))

    def __call__(self, x):
        return x @ (self.frozen[...] + self.kernel[...])


BY_LEAF = gravac.OwnOptimizer(optax.adamw(0.05), by_leaf=True)
BY_PATH = {"compress": lambda path, x: path == "['kernel']", "send": CHEAP["send"]}
# What an optimizer makes and where it runs do not meet: each of both once.
OWN = [
    pytest.param(MESHES["mesh"], gravac.adamw(0.05, **CHEAP), id="adamw"),
    pytest.param(
        *(N, gravac.transform(memory=BY_LEAF, **BY_PATH)), id="by leaf and path"
    ),
]


@pytest.mark.parametrize(("mesh", "tx"), OWN)
def test_with_an_optimizer_it_trains_evaluates_and_flushes_as_plain_params_do(mesh, tx):
    def step(model, optimizer, x):
        grad_fn = gravac.nnx_value_and_grad(square, optimizer=optimizer)
        optimizer.update(model, grad_fn(model, x)[1])

    # remat writes back all that it is given.
    square = lambda model, x: jnp.mean(nnx.remat(Adapted.__call__)(model, x) ** 2)
    plain_square = lambda params, x: jnp.mean((x @ (FROZEN + params["kernel"])) ** 2)
    tx = gravac.guard(tx)
    plain = gravac.train_step(plain_square, tx, mesh)
    state = plain.init({"kernel": np.zeros((64, 64), np.float32)})
    model = Adapted()
    optimizer = nnx.Optimizer(model, tx, wrt=Adapter)
    model, optimizer = gravac.place((model, optimizer), mesh)
    step = gravac.nnx_data_parallel(step, mesh)
    xs = RNG.normal(size=(6, N, 64)).astype(np.float32)
    for x in xs:
        *state, _ = plain(*state, x)
        step(model, optimizer, x)
    params, _ = _harness.on_host(state)
    np.testing.assert_allclose(model.kernel[...], params["kernel"], rtol=0, atol=1e-5)
    assert np.abs(residual(state)).max() > 1e-3, "else own params are the shared ones"
    evaluated = gravac.nnx_data_parallel(square, mesh)(model, xs[0])
    np.testing.assert_allclose(evaluated, plain_square(params, xs[0]), rtol=1e-5)

    pure = lambda: nnx.as_pure((nnx.state(model, Adapter), optimizer.opt_state))
    flushed = plain.flush(*jax.tree.map(jnp.copy, pure()))
    gravac.nnx_flush(model, optimizer, mesh)
    assert_same(arrays(pure()), arrays(flushed))
    assert not np.any(residual(pure()))
    assert_same(model.frozen[...], FROZEN)
    assert float(model.seen[...]) == 3
    with compilations() as names:
        gravac.nnx_flush(model, optimizer, mesh)
    assert not names


def test_an_optimizer_may_ask_for_the_loss_in_steps_and_in_a_flush():
    def step(model, optimizer, x):
        loss_fn = lambda model, x: jnp.mean(model(x) ** 2)
        loss, grads = gravac.nnx_value_and_grad(loss_fn, optimizer=optimizer)(model, x)
        optimizer.update(model, grads, value=jax.lax.pmean(loss, "data"))
        return loss

    model = Adapted()
    tx = optax.chain(gravac.adamw(1.0), optax.contrib.reduce_on_plateau())
    optimizer = nnx.Optimizer(model, tx, wrt=Adapter)
    model, optimizer = gravac.place((model, optimizer), N)
    loss = gravac.nnx_data_parallel(step, N)(model, optimizer, np.ones((N, 64), "f"))
    assert float(optimizer.opt_state[1].best_value[...]) == float(loss)
    with pytest.raises(TypeError, match="value"):
        gravac.nnx_flush(model, optimizer, N)
    gravac.nnx_flush(model, optimizer, N, value=3.0)
    assert float(optimizer.opt_state[1].best_value[...]) == 3


def test_gradients_are_of_the_variables_that_are_chosen_and_need_no_check():
    def step(model, x):
        return gravac.nnx_value_and_grad(total, wrt=Adapter)(model, x)[1]

    def total(model, x):
        add = lambda total, row: (total + jnp.sum(model(row)), None)
        return jax.lax.scan(add, jnp.float32(0), x)[0]

    x = np.arange(64.0 * N, dtype=np.float32).reshape(N, 64)
    step = gravac.nnx_data_parallel(step, MESHES["mesh"], check_vma=False)
    grads = step(gravac.place(Adapted(), MESHES["mesh"]), x)
    assert set(grads) == {"kernel"}
    np.testing.assert_array_equal(grads["kernel"][...][:, 0], x.mean(axis=0))


# ------------------------------------------------- whole steps


@everywhere
def test_training_falls_and_compiles_once(mesh):
    model, optimizer, metrics = objects = gravac.place(new_objects(), mesh)
    step = step_on(mesh)
    losses = [float(step(*objects, BATCH))]
    with compilations() as names:
        losses += [step(*objects, BATCH) for _ in range(30)]
    assert names == []
    assert losses[-1] < losses[0] / 2
    assert int(optimizer.step[...]) == 31
    assert int(model.dropout.rngs.count[...]) == 31
    assert int(metrics.accuracy.count[...]) == 31 * ROWS


@pytest.mark.parametrize(
    ("mesh", "resets"), [(MESHES["mesh"], False), (N, True)], ids=["mesh", "resets"]
)
def test_metrics_are_those_of_one_device_with_the_whole_batch(mesh, resets):
    def step(model, metrics, batch):
        if resets:
            metrics.reset()
        loss, logits = loss_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])

    def measured(step, model, metrics):
        for i in range(3):
            step(model, metrics, {**BATCH, "x": X * (i + 1)})
        return metrics.accuracy, metrics.loss

    model = MLP(nnx.Rngs(0))
    model.eval()
    hits, loss = measured(nnx.jit(step), model, new_metrics())
    before = arrays(model)
    model, metrics = gravac.place((model, new_metrics()), mesh)
    step = gravac.nnx_data_parallel(step, mesh)
    got_hits, got_loss = measured(step, model, metrics)
    assert_same(arrays(model), before)
    steps = 1 if resets else 3
    assert int(hits.count[...]) == int(agreed(got_hits.count[...])) == steps * ROWS
    assert float(hits.total[...]) == float(agreed(got_hits.total[...])) > 0
    # The loss is a mean: one number from one device, one from each of N replicas.
    assert int(loss.count[...]) * N == int(got_loss.count[...])
    np.testing.assert_allclose(
        got_loss.total[...], N * loss.total[...], rtol=8 * _harness.SUM_ROUNDING
    )


def test_large_counts_stay_exact():
    metrics = nnx.metrics.Average()
    metrics.count.set_value(jnp.int32(2**24 + 1))  # no float32 is this number
    metrics = gravac.place(metrics, make_mesh())
    update = lambda metrics, batch: metrics.update(values=batch)
    gravac.nnx_data_parallel(update, make_mesh())(metrics, jnp.ones(ROWS))
    assert int(metrics.count[...]) == 2**24 + 1 + ROWS


def test_two_axes_average_statistics_and_metrics_over_both():
    axes = ("dcn", "ici")
    mesh = make_mesh((2, 2), axes)
    step = functools.partial(train_step, axes=axes)
    objects = new_objects("dcn", fast_axis_name="ici")
    hidden = X @ np.asarray(objects[0].inner.kernel[...])
    model, _, metrics = objects = gravac.place(objects, mesh, "dcn")
    gravac.nnx_data_parallel(step, mesh, "dcn", "ici")(*objects, BATCH)
    assert int(metrics.accuracy.count[...]) == ROWS
    np.testing.assert_allclose(
        model.norm.mean[...], 0.1 * hidden.mean(axis=0), rtol=1e-4, atol=1e-6
    )


# ------------------------------------------------- errors change nothing


def test_a_step_that_fails_while_it_is_traced_leaves_its_objects():
    mesh = MESHES["mesh"]
    objects, step = gravac.place(new_objects(), mesh), step_on(mesh)
    step(*objects, BATCH)
    before = arrays(objects)
    with pytest.raises(TypeError, match="dot_general"):
        step(*objects, {**BATCH, "x": X[:, :5]})
    with pytest.raises(ValueError, match="cannot be split over 4 replicas"):
        step(*objects, {**BATCH, "x": X[:-1]})
    assert_same(arrays(objects), before)
    step(*objects, BATCH)


def test_without_donation_clones_stay():
    def step(model, batch):
        model.kernel[...] += jnp.float32(1)

    for mesh in MESHES.values():
        model = gravac.place(Odd(), mesh)
        clone = nnx.clone(model)
        before = arrays(clone)
        gravac.nnx_data_parallel(step, mesh, donate=False)(model, BATCH)
        assert_same(arrays(clone), before)
        assert (model.kernel[...] == 2).all()


def changes(variable, value):
    """Return a loss that writes `value` of the batch into a variable."""

    def loss_fn(model, batch):
        getattr(model, variable).set_value(value(batch["x"]))
        return jnp.mean(model(batch["x"]))

    return loss_fn


def adds(model, batch):
    model.hidden = nnx.Intermediate(batch["x"])
    return jnp.mean(model(batch["x"]))


def gradient_of(loss_fn):
    return lambda model, batch: gravac.nnx_value_and_grad(loss_fn)(model, batch)[0]


def test_a_variable_that_stays_the_same_everywhere_is_written_back():
    largest = lambda x: jax.lax.pmax(jnp.max(x), "data")
    model = gravac.place(Odd(), MESHES["mesh"])
    step = gradient_of(changes("largest", largest))
    gravac.nnx_data_parallel(step, MESHES["mesh"])(model, BATCH)
    assert float(model.largest[...]) == X.max()
    assert int(model.calls[...]) == 1


DIFFERS = r"\.largest of the returned state differs .*micro-batches.*jax\.lax\.pmean"
STRUCTURE = "may change values of variables only, got other"
HIDDEN = rf"{STRUCTURE} .*hidden.* nnx\.Intermediate"
ARRAYS = r"no nnx objects are: argument 1 \(dict\), argument 2 .*Make the batch one"
ADDED = r"the Welford at \(0, 'spread'\) cannot be added up"
SPREAD = nnx.MultiMetric(spread=nnx.metrics.Welford())
COMPUTED = "calls `compute` of a metric"
RETURNED = "got nnx objects: change its arguments"
NO_PARAMS = "the first argument must be a model with variables .*, got Rngs"
V, T, nothing = ValueError, TypeError, lambda *objects_and_batch: None
# A step, the objects that it is given, and what it is told.
MISUSED = [
    (gradient_of(changes("largest", jnp.max)), [Odd()], V, DIFFERS),
    (gradient_of(adds), [Odd()], V, f"the loss {HIDDEN}"),
    (lambda x, batch: setattr(x, "name", "x"), [Odd()], V, f"the step {STRUCTURE}"),
    (lambda x, batch: x.update(values=batch["x"]), [SPREAD], V, ADDED),
    (lambda x, batch: x.compute(), [new_metrics()], V, COMPUTED),
    (lambda x, batch: x.loss.compute(), [new_metrics()], V, COMPUTED),
    (nothing, [Odd(), {"w": jnp.ones(2)}], T, ARRAYS),
    (nothing, [Odd()] * 2, V, r"share variables, .* \[\(0,\), \(1,\)\]"),
    (lambda x, batch: (x, jnp.float32(0)), [Odd()], T, RETURNED),
    (gradient_of(lambda _, batch: jnp.mean(batch["x"])), [nnx.Rngs(0)], T, NO_PARAMS),
    (train_step, new_objects(), V, "the state is not placed"),
]


@pytest.mark.parametrize(("step", "objects", "error", "message"), MISUSED)
def test_a_misused_step_says_why_and_leaves_its_objects(step, objects, error, message):
    before = arrays(objects)
    with pytest.raises(error, match=message):
        gravac.nnx_data_parallel(step, MESHES["mesh"])(*objects, BATCH)
    assert_same(arrays(objects), before)


def test_without_flax_it_is_missed_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    for make in (gravac.nnx_value_and_grad, gravac.nnx_data_parallel):
        with pytest.raises(ImportError, match="flax"):
            make(train_step, N)
