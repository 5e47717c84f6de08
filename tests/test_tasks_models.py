"""Every task loads, and every model learns on simulated and on real replicas."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import choices
from _task_files import write_all
from tasks import TASKS, load
from tasks.lstm import LSTMLanguageModel, recur
from tasks.pipeline import batches
from tasks.transformer import TransformerLanguageModel

REPLICAS = 2
# Keys of this kind compile in a fraction of the time of the default ones.
KEY = jax.random.key(0, impl="unsafe_rbg")
CLASSES = {"bytes": 256, "ptb": 12, "cifar10": 10, "cifar100": 100}
QUICK = ("lstm-bytes", "resnet-cifar10")

in_every_task = pytest.mark.parametrize("name", choices(TASKS, QUICK.__contains__))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def fresh(data_dir):
    """A tiny task and its first params, by name; each is made once."""

    @functools.cache
    def make(name):
        task = load(name, data_dir, length=None if "cifar" in name else 16)
        return task, jax.jit(task.init)(KEY)

    return make


def stream(task):
    return batches(task.train, rows=4, replicas=REPLICAS, seed=0)


@in_every_task
def test_a_fresh_model_guesses(name, fresh):
    task, params = fresh(name)
    assert task.name == name
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    batch = next(stream(task))
    metrics = jax.jit(task.metrics)(params, batch)
    assert metrics.keys() - {"accuracy"} == {"loss"}
    assert ("accuracy" in metrics) == ("image" in batch)
    assert all(x.shape == () and x.dtype == jnp.float32 for x in metrics.values())
    assert metrics["loss"] == pytest.approx(math.log(CLASSES[name.split("-")[1]]), 0.4)


def test_a_language_model_is_asked_for_the_next_token(fresh):
    task, params = fresh("lstm-bytes")
    batch = next(stream(task))
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    model = LSTMLanguageModel(256, width=128, layers=2)
    log_probabilities = jax.nn.log_softmax(model.apply({"params": params}, inputs))
    chosen = np.take_along_axis(np.asarray(log_probabilities), targets[..., None], -1)
    assert task.loss(params, batch) == pytest.approx(-chosen.mean(), 1e-5)


def test_accuracy_is_the_share_of_images_that_are_recognized(fresh):
    task, params = fresh("resnet-cifar10")
    batch = next(stream(task))
    # With nothing but a bias in its head, the model always says the same.
    bias = jax.nn.one_hot(batch["label"][0], 10)
    head = {"kernel": jnp.zeros((64, 10)), "bias": bias}
    metrics = jax.jit(task.metrics)(params | {"head": head}, batch)
    expected = (batch["label"] == batch["label"][0]).mean()
    assert 0 < expected < 1
    assert metrics["accuracy"] == pytest.approx(expected)


def plain_recurrence(inputs, recurrent, state):
    """One layer of an LSTM, as in the books."""
    hidden, cell = state
    outputs = []
    for x in inputs:
        i, f, g, o = jnp.split(x + hidden @ recurrent, 4, axis=1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        outputs.append(hidden)
    return jnp.stack(outputs), (hidden, cell)


def test_the_recurrence_and_its_gradient_are_those_of_an_lstm():
    length, rng = 5, np.random.default_rng(0)
    draw = lambda *shapes: [rng.normal(size=x).astype("f") for x in shapes]
    inputs, recurrent, *state = draw((length, 3, 16), (4, 16), (3, 4), (3, 4))
    weights = draw((length, 3, 4), (3, 4), (3, 4))

    def outcome(f):
        def total(*arguments):
            outputs, last = f(*arguments)
            results = zip((outputs, *last), weights, strict=True)
            return sum(jnp.sum(x * y) for x, y in results)

        gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
        return gradients(inputs, recurrent, tuple(state))

    outcomes = outcome(recur), outcome(plain_recurrence)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-5), *outcomes)


@pytest.mark.parametrize(
    "model",
    [
        LSTMLanguageModel(11, width=8, layers=2),
        TransformerLanguageModel(11, width=8, layers=2, heads=2),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_language_model_sees_the_past_and_not_the_future(model):
    tokens = jnp.arange(10)[None]
    params = jax.jit(model.init)(KEY, tokens)
    apply = jax.jit(model.apply)
    logits = apply(params, tokens)
    changed = apply(params, tokens.at[0, 5].set(10))
    differs = jnp.any(logits != changed, axis=(0, 2))
    assert differs.tolist() == [False] * 5 + [True] * 5
