"""NNX objects train in few lines: batch statistics, random keys, metrics."""

import difflib
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import (
    AXIS_TYPES,
    SUM_ROUNDING,
    N,
    agreed,
    compilations,
    make_mesh,
    residual,
)
from flax import nnx

import gravac_jax as gravac

ROWS = 8 * N
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 8)).astype(np.float32)
LABEL = np.argmax(X[:, :4], axis=1).astype(np.int32)
BATCH = {"x": X, "label": LABEL}
PARTS = [jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], BATCH) for i in range(N)]
MESHES = {
    "mesh": make_mesh,
    "explicit": functools.partial(make_mesh, axis_type=AXIS_TYPES[1]),
    "simulated": lambda: N,
}
everywhere = pytest.mark.parametrize(
    "mesh", [MESHES["mesh"], MESHES["simulated"]], ids=["mesh", "simulated"]
)
# It compiles the fastest.
CHEAP = {"compress": True, "send": gravac.Bits(4, row_entries=32)}


@pytest.fixture(autouse=True)
def settings():
    # Flax's metrics and Optax's AdamW add integers to floats. The keys compile fast.
    promotion = jax.numpy_dtype_promotion("standard")
    with promotion, jax.default_prng_impl("unsafe_rbg"):
        yield


@pytest.fixture
def usual_keys():
    with jax.default_prng_impl("threefry2x32"):
        yield


class MLP(nnx.Module):
    """A perceptron with all that changes in a forward pass."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.inner(x)))
        return self.outer(self.dropout(x))


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


def sgd(learning_rate=0.3):
    exchange = gravac.transform(**CHEAP)
    return optax.chain(exchange, optax.sgd(learning_rate))


def new_metrics():
    return nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )


def train_step(model, optimizer, metrics, batch):
    grad_fn = gravac.nnx_value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
    return loss


def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def new_objects(mesh):
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, sgd(), wrt=nnx.Param)
    return gravac.place((model, optimizer, new_metrics()), mesh)


def arrays(objects):
    """Return every array of objects as NumPy; keys as their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    data = lambda x: jax.random.key_data(x) if is_key(x) else x
    return [np.array(data(x)) for x in jax.tree.leaves(objects)]


def assert_same_arrays(received, expected):
    for a, b in zip(received, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------- Flax's MNIST tutorial, smaller

TUTORIAL = """
class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(4, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025)
        self.conv2 = nnx.Conv(4, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(8, rngs=rngs)
        self.avg_pool = functools.partial(
            nnx.avg_pool, window_shape=(2, 2), strides=(2, 2)
        )
        self.linear1 = nnx.Linear(32, 64, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.025)
        self.linear2 = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x, rngs: nnx.Rngs | None = None):
        x = self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))
        x = self.avg_pool(nnx.relu(x))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.dropout2(self.linear1(x), rngs=rngs))
        return self.linear2(x)


model = CNN(rngs=nnx.Rngs(0))
tx = optax.adamw(0.005, b1=0.9)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
)
rngs = nnx.Rngs(1)


def loss_fn(model, rngs, batch):
    logits = model(batch["image"], rngs)
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits=logits, labels=batch["label"]
    ).mean()
    return loss, logits


@nnx.jit
def train_step(model, optimizer, metrics, batch, rngs):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, rngs, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, metrics, rngs, batch):
    loss, logits = loss_fn(model, rngs, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


for step in range(steps):
    model.train()
    train_step(model, optimizer, metrics, batch, rngs)
    losses.append(float(metrics.compute()["loss"]))
    metrics.reset()
model.eval()
eval_step(model, metrics, rngs, batch)
test_metrics = metrics.compute()
metrics.reset()
"""
PLACE = "model, optimizer, metrics, rngs"
CHANGES = {  # with the import these are six lines
    "model = CNN(rngs=nnx.Rngs(0))\n": """\
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
model = CNN(rngs=nnx.Rngs(0))
""",
    "optax.adamw(": "gravac.adamw(",
    "rngs = nnx.Rngs(1)\n": f"""\
rngs = nnx.Rngs(1)
{PLACE} = gravac.place(({PLACE}), mesh)
""",
    "@nnx.jit\ndef train_step": """\
@functools.partial(gravac.nnx_data_parallel, mesh=mesh)
def train_step""",
    "nnx.value_and_grad(loss_fn, has": (
        "gravac.nnx_value_and_grad(loss_fn, optimizer=optimizer, has"
    ),
}


def run_tutorial(text):
    images = RNG.normal(size=(ROWS, 8, 8, 1)).astype(np.float32)
    for image, label in zip(images, LABEL, strict=True):
        image[2 * label : 2 * label + 2] += 2
    batch = {"image": images, "label": LABEL}
    names = {"losses": [], "steps": 20, "batch": batch, **globals()}
    with jax.numpy_rank_promotion("allow"):  # as Flax's Conv needs
        exec(compile(text, "tutorial", "exec"), names)
    return names


def converted():
    after = "import gravac_jax as gravac\n" + TUTORIAL
    for old, new in CHANGES.items():
        assert after.count(old) == 1
        after = after.replace(old, new)
    return after


def test_the_mnist_tutorial_of_flax_converts_with_six_changed_lines():
    lines = difflib.ndiff(TUTORIAL.splitlines(), converted().splitlines())
    assert sum(line.startswith("+ ") for line in lines) <= 6


@pytest.mark.slow
def test_the_converted_tutorial_trains():
    names = run_tutorial(converted())
    assert names["losses"][-1] < names["losses"][0] / 4
    assert names["test_metrics"]["accuracy"] > 0.5
    assert int(names["rngs"].default.count[...]) == 2 * 20  # two dropouts


# ------------------------------------------------- the laws of gradients


@everywhere
def test_gradients_and_batch_statistics_are_means_of_what_replicas_alone_compute(mesh):
    def step(model, batch):
        (loss, logits), grads = grad_fn(model, batch)
        assert logits.shape == (8, 4)
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
    model = gravac.place(model, mesh())
    results = gravac.nnx_data_parallel(step, mesh())(model, BATCH)
    received = (*results, nnx.state(model, nnx.BatchStat))
    assert jax.tree.structure(received) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(received), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(agreed(a), b, rtol=1e-5, atol=1e-6)
    assert np.ptp(model.norm.mean[...]) > 0


@everywhere
def test_gradients_are_local_and_narrow_statistics_keep_their_dtype(mesh):
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

    layer = gravac.place(Layer(), mesh())
    grads = gravac.nnx_data_parallel(step, mesh())(layer, jnp.arange(4.0))
    assert grads.tolist() == [0, 1, 2, 3]
    assert layer.seen[...].dtype == jnp.bfloat16
    assert float(layer.seen[...]) == 1.5


def test_without_an_axis_it_is_the_value_and_grad_of_flax():
    def run(value_and_grad):
        model = MLP(nnx.Rngs(0))
        out = nnx.jit(value_and_grad(loss_fn, has_aux=True))(model, BATCH)
        return arrays((out, model))

    of_one = functools.partial(gravac.nnx_value_and_grad, axis_name=None)
    assert_same_arrays(run(of_one), run(nnx.value_and_grad))


class Masks(nnx.Module):
    """Two dropouts: one with random keys of its own, one that is handed its keys."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones(64))
        self.own = nnx.Dropout(0.5, rngs=rngs)
        self.given = nnx.Dropout(0.5)

    def __call__(self, rngs):
        ones = jnp.ones(64)
        return jnp.stack([self.own(ones), self.given(ones, rngs=rngs)])


@everywhere
@pytest.mark.usefixtures("usual_keys")
def test_dropout_masks_differ_per_replica_and_keys_stay_the_same(mesh):
    def loss_fn(model, rngs, batch):
        masks = model(rngs)
        return jnp.sum(masks @ model.kernel[...]) * jnp.sum(batch), masks

    def step(model, rngs, batch):
        grad_fn = gravac.nnx_value_and_grad(loss_fn, has_aux=True)
        (_, masks), _ = grad_fn(model, rngs, batch)
        mine = jnp.arange(N)[:, None, None] == jax.lax.axis_index("data")
        return jax.lax.psum(jnp.where(mine, masks[None], 0), "data")

    before = Masks(nnx.Rngs(0)), nnx.Rngs(1)
    model, rngs = gravac.place(before, mesh())
    step = gravac.nnx_data_parallel(step, mesh())
    masks = np.concatenate([step(model, rngs, jnp.ones(N)) for _ in range(2)])
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


def test_with_an_optimizer_gradients_are_taken_at_own_params():
    class Linear(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.array(kernel))

    def step(model, optimizer, batch):
        grad_fn = gravac.nnx_value_and_grad(loss_of, optimizer=optimizer)
        loss, grads = grad_fn(model, batch)
        optimizer.update(model, grads)
        return loss

    loss_of = lambda model, x: jnp.mean((x @ model.kernel[...]) ** 2)
    tx = gravac.adamw(0.05, **CHEAP)
    kernel = RNG.normal(size=(64, 64)).astype(np.float32)
    xs = RNG.normal(size=(6, N, 64)).astype(np.float32)
    expected = gravac.train_step(lambda p, x: jnp.mean((x @ p["kernel"]) ** 2), tx, N)
    state = expected.init({"kernel": kernel})
    model = Linear()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model, optimizer = gravac.place((model, optimizer), N)
    step = gravac.nnx_data_parallel(step, N)
    for x in xs:
        *state, _ = expected(*state, x)
        step(model, optimizer, x)
    np.testing.assert_allclose(model.kernel[...], state[0]["kernel"], rtol=0, atol=1e-5)
    assert np.abs(residual(state)).max() > 1e-3, "else own params are the shared ones"


def test_with_an_optimizer_of_some_variables_the_others_stay():
    class Adapter(nnx.Param):
        pass

    class Adapted(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((64, 64)))
            self.adapter = Adapter(jnp.zeros((64, 64)))

    def step(model, optimizer, batch):
        grad = gravac.nnx_value_and_grad(loss_of, optimizer=optimizer)
        loss, grads = grad(model, batch)
        optimizer.update(model, grads)
        return loss

    loss_of = lambda model, x: jnp.mean(
        (x @ (model.kernel[...] + model.adapter[...])) ** 2
    )
    model = Adapted()
    optimizer = nnx.Optimizer(model, gravac.adamw(0.05, **CHEAP), wrt=Adapter)
    model, optimizer = gravac.place((model, optimizer), N)
    step = gravac.nnx_data_parallel(step, N)
    for x in RNG.normal(size=(3, N, 64)).astype(np.float32):
        step(model, optimizer, x)
    assert (model.kernel[...] == 1).all()
    assert (model.adapter[...] != 0).any()


@everywhere
def test_a_flush_is_that_of_plain_params(mesh):
    class Linear(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((64, 64)))
            self.seen = nnx.Variable(jnp.float32(3))

    def step(model, optimizer, batch):
        loss_of = lambda model, x: jnp.mean((x @ model.kernel[...]) ** 2)
        grad = gravac.nnx_value_and_grad(loss_of, optimizer=optimizer)
        optimizer.update(model, grad(model, batch)[1])

    where, tx = mesh(), gravac.guard(gravac.adamw(0.05, **CHEAP))
    model = Linear()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    model, optimizer = gravac.place((model, optimizer), where)
    xs = RNG.normal(size=(N, 64)).astype(np.float32)
    gravac.nnx_data_parallel(step, where)(model, optimizer, xs)
    plain = nnx.state(model, nnx.Param), optimizer.opt_state
    plain = jax.tree.map(jnp.copy, nnx.as_pure(plain))
    deliver = lambda params, state, _: gravac.flush(tx, params, state)
    run = gravac.data_parallel(deliver, where)
    params, opt_state = run(*plain, np.zeros(N))
    gravac.nnx_flush(model, optimizer, where)
    np.testing.assert_array_equal(model.kernel[...], params["kernel"])
    found = jax.tree.leaves(nnx.as_pure(optimizer.opt_state))
    for x, y in zip(found, jax.tree.leaves(opt_state), strict=True):
        np.testing.assert_array_equal(x, y)
    held = optax.tree.get_all_with_path(nnx.as_pure(optimizer.opt_state), "residual")
    assert not any(np.asarray(x).any() for _, x in held)
    assert float(model.seen[...]) == 3
    with compilations() as names:
        gravac.nnx_flush(model, optimizer, where)
    assert not names


# ------------------------------------------------- whole steps


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] * (name == "explicit"))
        for name, make in MESHES.items()
    ],
)
def test_training_falls_and_compiles_once(mesh):
    objects = new_objects(mesh())
    step = gravac.nnx_data_parallel(train_step, mesh())
    losses = [float(step(*objects, BATCH))]
    with compilations() as names:
        losses += [step(*objects, BATCH) for _ in range(30)]
    assert names == []
    assert losses[-1] < losses[0] / 2
    model, optimizer, metrics = objects
    assert int(optimizer.step[...]) == 31
    assert int(model.dropout.rngs.count[...]) == 31
    assert int(metrics.accuracy.count[...]) == 31 * ROWS


def run_metrics(step, model, metrics, steps=3):
    for i in range(steps):
        step(model, metrics, {**BATCH, "x": X * (i + 1)})
    return metrics.accuracy, metrics.loss


@everywhere
@pytest.mark.parametrize("resets", [False, True])
def test_metrics_are_those_of_one_device_with_the_whole_batch(mesh, resets):
    def step(model, metrics, batch):
        if resets:
            metrics.reset()
        loss, logits = loss_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])

    model = MLP(nnx.Rngs(0))
    model.eval()
    hits, loss = run_metrics(nnx.jit(step), model, new_metrics())
    model, metrics = gravac.place((model, new_metrics()), mesh())
    got_hits, got_loss = run_metrics(
        gravac.nnx_data_parallel(step, mesh()), model, metrics
    )
    steps = 1 if resets else 3
    assert int(hits.count[...]) == int(agreed(got_hits.count[...])) == steps * ROWS
    assert float(hits.total[...]) == float(agreed(got_hits.total[...])) > 0
    # The loss is a mean: one number from one device, one from each of N replicas.
    assert int(loss.count[...]) * N == int(got_loss.count[...])
    np.testing.assert_allclose(
        got_loss.total[...], N * loss.total[...], rtol=8 * SUM_ROUNDING
    )


@everywhere
def test_large_counts_stay_exact(mesh):
    metrics = nnx.metrics.Average()
    metrics.count.set_value(jnp.int32(2**24 + 1))  # no float32 is this number
    metrics.total.set_value(jnp.float32(7))
    metrics = gravac.place(metrics, mesh())
    update = lambda metrics, batch: metrics.update(values=batch)
    gravac.nnx_data_parallel(update, mesh())(metrics, jnp.ones(ROWS))
    assert int(metrics.count[...]) == 2**24 + 1 + ROWS
    assert float(metrics.total[...]) == 7 + ROWS
    untouched = gravac.nnx_data_parallel(lambda metrics, batch: None, mesh())
    assert untouched(metrics, jnp.ones(ROWS)) is None
    assert int(metrics.count[...]) == 2**24 + 1 + ROWS


def test_an_evaluation_changes_metrics_alone():
    mesh = make_mesh()
    model, _, metrics = new_objects(mesh)
    expected = new_metrics()
    model.eval()
    before = arrays(model)
    alone = MLP(nnx.Rngs(0))
    alone.eval()
    eval_step(alone, expected, BATCH)
    gravac.nnx_data_parallel(eval_step, mesh)(model, metrics, BATCH)
    assert_same_arrays(arrays(model), before)
    assert float(metrics.accuracy.compute()) == float(expected.accuracy.compute())
    np.testing.assert_allclose(
        metrics.loss.compute(), expected.loss.compute(), rtol=1e-6
    )


def test_two_axes_average_statistics_and_metrics_over_both():
    axes = ("dcn", "ici")
    mesh = make_mesh((2, 2), axes)

    def step(model, optimizer, metrics, batch):
        grad_fn = gravac.nnx_value_and_grad(loss_fn, axes, has_aux=True)
        (loss, logits), grads = grad_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    exchange = gravac.transform("dcn", fast_axis_name="ici", **CHEAP)
    model = MLP(nnx.Rngs(0))
    tx = optax.chain(exchange, optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    objects = gravac.place((model, optimizer, new_metrics()), mesh, "dcn")
    gravac.nnx_data_parallel(step, mesh, "dcn", "ici")(*objects, BATCH)
    assert int(objects[2].accuracy.count[...]) == ROWS
    hidden = X @ np.asarray(model.inner.kernel[...])
    np.testing.assert_allclose(
        objects[0].norm.mean[...], 0.1 * hidden.mean(axis=0), rtol=1e-4, atol=1e-6
    )


# ------------------------------------------------- errors change nothing


@everywhere
def test_a_step_that_fails_while_it_is_traced_leaves_its_objects(mesh):
    objects = new_objects(mesh())
    step = gravac.nnx_data_parallel(train_step, mesh())
    step(*objects, BATCH)
    before = arrays(objects)
    with pytest.raises(TypeError, match="dot_general"):
        step(*objects, {**BATCH, "x": X[:, :5]})
    with pytest.raises(ValueError, match="cannot be split over 4 replicas"):
        step(*objects, {**BATCH, "x": X[:-1]})
    assert_same_arrays(arrays(objects), before)
    step(*objects, BATCH)


def test_without_donation_clones_stay():
    def step(model, batch):
        model.kernel[...] += jnp.float32(1)

    for mesh in (make_mesh(), N):
        model = gravac.place(Odd(), mesh)
        clone = nnx.clone(model)
        before = arrays(clone)
        gravac.nnx_data_parallel(step, mesh, donate=False)(model, BATCH)
        assert_same_arrays(arrays(clone), before)
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


def writes_outside(model, batch):
    model.largest.set_value(jnp.max(batch["x"]))


REFUSED = {
    "a variable that differs": (
        gradient_of(changes("largest", jnp.max)),
        r"the loss changes Odd\.largest, of type Variable, .*may differ",
    ),
    "a param that differs": (
        gradient_of(changes("kernel", lambda x: x[0])),
        r"the loss changes Odd\.kernel, of type Param, .*may differ",
    ),
    "one that differs outside": (
        writes_outside,
        r"the step changes Odd\.largest, of type Variable, .*may differ",
    ),
    "a new variable": (
        gradient_of(adds),
        r"the loss may change values of variables only, got .* Odd .*nnx\.Intermediate",
    ),
    "an attribute": (
        lambda model, batch: setattr(model, "name", "x"),
        r"the step may change values of variables only, got .* Odd",
    ),
}


@everywhere
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_may_differ_or_would_be_lost_is_refused(mesh, case):
    step, message = case
    model = gravac.place(Odd(), mesh())
    before = arrays(model)
    with pytest.raises(ValueError, match=message):
        gravac.nnx_data_parallel(step, mesh())(model, BATCH)
    assert_same_arrays(arrays(model), before)


@everywhere
def test_a_variable_that_stays_the_same_everywhere_is_written_back(mesh):
    largest = lambda x: jax.lax.pmax(jnp.max(x), "data")
    model = gravac.place(Odd(), mesh())
    step = gravac.nnx_data_parallel(gradient_of(changes("largest", largest)), mesh())
    step(model, BATCH)
    assert float(model.largest[...]) == X.max()
    assert int(model.calls[...]) == 1


class Tied(nnx.Module):
    """Two layers that share their params."""

    def __init__(self):
        self.one = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.other = self.one


def nothing(*args):
    del args


def with_metric(metric):
    return (metric,), lambda metric, batch: metric.update(values=batch["x"])


MISUSED = {
    "Welford": (
        *with_metric(nnx.MultiMetric(spread=nnx.metrics.Welford())),
        ValueError,
        r"the Welford at \[0\]\.spread .*cannot be added up",
    ),
    "a metric that is computed": (
        (new_metrics(),),
        lambda metrics, batch: metrics.compute(),
        ValueError,
        "calls `compute` of a metric",
    ),
    "the metric of a MultiMetric": (
        (new_metrics(),),
        lambda metrics, batch: metrics.loss.compute(),
        ValueError,
        "calls `compute` of a metric",
    ),
    "arrays": (
        (Odd(), {"w": jnp.ones(2)}),
        nothing,
        TypeError,
        r"no nnx objects are: argument 1 \(dict\), argument 2 \(dict\)",
    ),
    "a batch in two arguments": (
        (Odd(), BATCH["x"]),
        nothing,
        TypeError,
        "Make the batch one tuple or dict",
    ),
    "a shared variable": (
        (Tied(),),
        nothing,
        ValueError,
        r"share the Param at \[0\]\.one\.bias and at \[0\]\.other\.bias",
    ),
    "objects returned": (
        (Odd(),),
        lambda model, batch: (model, jnp.float32(0)),
        TypeError,
        r"got nnx objects, \['Odd'\]: change its arguments",
    ),
    "no params": (
        (nnx.Rngs(0),),
        gradient_of(lambda rngs, batch: jnp.mean(batch["x"])),
        TypeError,
        "the first argument must be a model with variables .*, got Rngs",
    ),
    "no objects": ((), nothing, TypeError, r"got 1 arguments.* argument 0 \(dict\)"),
}


@pytest.mark.parametrize("case", MISUSED.values(), ids=MISUSED)
def test_a_misused_step_says_what_is_wrong(case):
    objects, step, error, message = case
    with pytest.raises(error, match=message):
        gravac.nnx_data_parallel(step, N)(*objects, BATCH)


def test_a_batch_by_keyword_is_missed():
    step = gravac.nnx_data_parallel(nothing, N)
    with pytest.raises(TypeError, match="those that are no nnx objects are: none"):
        step(Odd(), new_metrics(), batch=BATCH)


@everywhere
def test_objects_that_are_not_placed_are_refused(mesh):
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, sgd(), wrt=nnx.Param)
    step = gravac.nnx_data_parallel(train_step, mesh())
    with pytest.raises(ValueError, match="the state is not placed"):
        step(model, optimizer, new_metrics(), BATCH)


def test_a_flush_needs_the_optimizer_of_the_model():
    with pytest.raises(TypeError, match=r"must be the nnx\.Optimizer of the model"):
        gravac.nnx_flush(MLP(nnx.Rngs(0)), sgd(), N)


def test_a_call_outside_the_axis_says_so():
    with pytest.raises(ValueError, match="`nnx_value_and_grad` was called outside"):
        gravac.nnx_value_and_grad(loss_fn, has_aux=True)(MLP(nnx.Rngs(0)), BATCH)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(ValueError, match="`mesh` must be a whole number"):
        gravac.nnx_data_parallel(nothing, "data")


def test_without_flax_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    for call in (
        lambda: gravac.nnx_value_and_grad(loss_fn),
        lambda: gravac.nnx_data_parallel(train_step, N),
    ):
        with pytest.raises(ImportError, match="pip install flax"):
            call()
