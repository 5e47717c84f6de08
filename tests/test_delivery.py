"""What is delivered out of turn: to all replicas, or to each its own."""

import copy

import _examples
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, assert_same, at

import gravac_jax as gravac

STEPS = 12
PARAMS = {"b": np.zeros(5, np.float32), "w": np.zeros((8, 8), np.float32)}
COMPRESS = {"b": False, "w": True}
RNG = np.random.default_rng(0)
GRADIENTS = {
    name: RNG.standard_normal((STEPS, N, *x.shape)).astype(np.float32)
    for name, x in PARAMS.items()
}
MESH = _harness.make_mesh()


# To all


def delivered(tx):
    """Params after a run, and after all is delivered, and the state then."""

    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.tree.map(lambda x: x[0], batch), opt_state)
        return optax.apply_updates(params, updates), opt_state

    last = lambda params, opt_state, _: gravac.flush(tx, params, opt_state)
    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)
    run, end = gravac.data_parallel(step, MESH), gravac.data_parallel(last, MESH)
    for i in range(STEPS):
        state = run(*state, at(GRADIENTS, i))
    before = jax.tree.map(np.asarray, state)
    return before, end(*state, np.zeros(N, np.float32))


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_flush_delivers_the_mean_of_what_is_held(is_guarded):
    exchange = gravac.transform(compress=COMPRESS, controller=gravac.Fixed(16))
    tx = optax.chain(exchange, optax.sgd(0.5))
    (params, opt_state), after = delivered(gravac.guard(tx) if is_guarded else tx)
    transform = opt_state[0]
    residual = transform.local.memory[0].residual
    assert np.abs(residual).sum() > 1
    expected = params["w"] - 0.5 * residual.mean(0).reshape(8, 8)
    np.testing.assert_allclose(after[0]["w"], expected, atol=1e-6)
    np.testing.assert_array_equal(after[0]["b"], params["b"])
    left = after[1][0]
    assert not np.asarray(left.local.memory[0].residual).any()
    for name in ("steps", "rung", "past_rungs"):
        assert_same(getattr(left, name), getattr(transform, name))


def test_all_gradients_arrive_by_the_last_delivery():
    exchange = gravac.transform(compress=True, controller=gravac.Fixed(16))
    _, (params, _) = delivered(optax.chain(exchange, optax.sgd(1.0)))
    for name, x in GRADIENTS.items():
        np.testing.assert_allclose(params[name], -x.sum(0).mean(0), atol=1e-4)


def test_momentum_outlives_a_delivery():
    memory = gravac.Momentum(0.9, masking="none")
    exchange = gravac.transform(
        compress=COMPRESS, memory=memory, controller=gravac.Fixed(16)
    )
    (_, before), (_, after) = delivered(optax.chain(exchange, optax.sgd(0.1)))
    had, has = (x[0].local.memory[0].velocity for x in (before, after))
    assert had.any()
    assert_same(np.asarray(has), had)


def test_a_delivery_hands_on_what_others_need():
    exchange = gravac.transform(axis_name=None, compress=COMPRESS)
    tx = optax.chain(exchange, optax.contrib.reduce_on_plateau())
    params = jax.tree.map(jnp.asarray, PARAMS)
    with jax.numpy_dtype_promotion("standard"):
        gravac.flush(tx, params, tx.init(params), value=1.0)


def test_a_flush_needs_a_transform():
    tx = optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"gravac.flush needs exactly one"):
        gravac.flush(tx, PARAMS, tx.init(PARAMS))


# To each its own

SPARSE = gravac.Fixed(16)
LINEAR = {
    "learning rate": optax.sgd(0.5),
    "momentum": optax.sgd(0.5, momentum=0.9),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5)),
}


def own_params(tx):
    """Params and state after a run, and every replica's own."""

    def step(params, opt_state, batch):
        grads = jax.tree.map(lambda x: x[0], batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def look(params, opt_state, _):
        own = gravac.local_params(tx, params, opt_state)
        return params, opt_state, jax.tree.map(every, own)

    every = lambda x: jax.lax.pmean(
        jnp.zeros((N, *x.shape)).at[jax.lax.axis_index("data")].set(N * x), "data"
    )
    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)
    run, end = gravac.data_parallel(step, MESH), gravac.data_parallel(look, MESH)
    for i in range(STEPS):
        state = run(*state, at(GRADIENTS, i))
    return jax.device_get(end(*state, np.zeros(N, np.float32)))


@pytest.mark.parametrize("after", LINEAR)
@pytest.mark.parametrize("is_guarded", _harness.choices([False, True], bool))
def test_own_params_are_those_with_ones_own_residual(after, is_guarded):
    exchange = gravac.transform(compress=COMPRESS, controller=SPARSE)
    tx = optax.chain(exchange, LINEAR[after])
    params, opt_state, own = own_params(gravac.guard(tx) if is_guarded else tx)
    residual = opt_state[0].local.memory[0].residual.reshape(N, 8, 8)
    assert all(np.abs(x).sum() > 1 for x in residual)
    np.testing.assert_allclose(own["w"], params["w"] - 0.5 * residual, atol=1e-5)
    np.testing.assert_array_equal(own["b"], np.stack([params["b"]] * N))


def test_their_mean_is_where_a_flush_takes_the_params():
    exchange = gravac.transform(compress=COMPRESS, controller=SPARSE)
    tx = optax.chain(exchange, optax.sgd(0.5))
    _, _, own = own_params(tx)
    _, (flushed, _) = delivered(tx)
    for name, x in own.items():
        np.testing.assert_allclose(x.mean(0), flushed[name], atol=1e-5)


def test_where_nothing_is_held_back_all_params_are_ones_own():
    exchange = gravac.transform(compress=COMPRESS, controller=gravac.Fixed(1))
    params, _, own = own_params(optax.chain(exchange, LINEAR["decay"]))
    for name, x in own.items():
        np.testing.assert_array_equal(x, np.stack([params[name]] * N))


class Steps:
    """Adam's steps of every replica, in NumPy, with eps of 1."""

    def __init__(self, b1, b2):
        self.b1, self.b2, self.t = b1, b2, 0
        self.mean, self.square = np.zeros((2, N, 64))

    def __call__(self, gradients):
        self.t += 1
        self.mean = self.b1 * self.mean + (1 - self.b1) * gradients
        self.square = self.b2 * self.square + (1 - self.b2) * gradients**2
        root = np.sqrt(self.square / (1 - self.b2**self.t))
        return self.mean / (1 - self.b1**self.t) / (root + 1)


SPARSE_TOP = {
    "compress": True,
    "exchange": gravac.AllGather(gravac.TopK(), **_examples.WIDE),
    "controller": SPARSE,
}
TRAININGS = {
    "sgd": (optax.chain(gravac.transform(**SPARSE_TOP), optax.sgd(0.1)), lambda x: x),
    "adamw": (
        # eps of 1, or all first steps would be of one size.
        gravac.adamw(0.1, b1=0.8, b2=0.9, eps=1.0, weight_decay=0.0, **SPARSE_TOP),
        Steps(0.8, 0.9),
    ),
}


@pytest.mark.parametrize(
    "how", _harness.choices(_harness.HARNESSES, lambda x: x == "shard_map")
)
@pytest.mark.parametrize("training", TRAININGS)
def test_training_at_own_params_is_that_of_its_oracle(training, how):
    """Each replica minimizes |x - its own target|^2 / 2, sending the top 4 of 64."""
    targets = GRADIENTS["w"][0]
    tx, steps_of = TRAININGS[training]
    steps_of = copy.deepcopy(steps_of)

    def update(targets, state):
        params, opt_state = state
        own = gravac.local_params(tx, params, opt_state)
        grads = jax.tree.map(jnp.subtract, own, targets)
        updates, opt_state = tx.update(grads, opt_state, params)
        return updates, (optax.apply_updates(params, updates), opt_state)

    init = lambda params: (params, tx.init(params))
    looking = optax.GradientTransformation(init, update)
    repeated = {"w": np.broadcast_to(targets, (STEPS, *targets.shape))}
    # Optax's decay needs implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        received, _ = _harness.trajectory(looking, {"w": PARAMS["w"]}, how)(repeated)

    params, held = np.zeros(64, np.float32), np.zeros((N, 64), np.float32)
    for i in range(STEPS):
        own = params - np.float32(0.1) * held
        held += np.float32(steps_of(own - targets.reshape(N, 64)))
        sent = np.zeros_like(held)
        for row, kept in zip(sent, held, strict=True):
            largest = np.argsort(-np.abs(kept), kind="stable")[:4]
            row[largest], kept[largest] = kept[largest], 0
        step = np.float32(-0.1) * sent.mean(0)
        np.testing.assert_allclose(received["w"][i].ravel(), step, atol=1e-5)
        params = params + step


@pytest.mark.slow
def test_own_params_of_narrow_ones_are_narrow_and_not_rounded_before():
    exchange = gravac.transform(axis_name=None, compress=True, controller=SPARSE)
    tx = optax.chain(exchange, optax.sgd(1.0, momentum=0.9))
    params = {"w": jnp.ones((8, 8), jnp.bfloat16)}
    grads = {"w": jnp.asarray(GRADIENTS["w"][0, 0], jnp.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):
        _, state = tx.update(grads, tx.init(params), params)
        own = gravac.local_params(tx, params, state)["w"]
    residual = state[0].local.memory[0].residual.reshape(8, 8)
    assert own.dtype == jnp.bfloat16
    np.testing.assert_array_equal(own, (1 - residual).astype(jnp.bfloat16))


def test_to_look_at_own_params_exchanges_nothing():
    exchange = gravac.transform(compress=COMPRESS, controller=SPARSE)
    tx = optax.chain(exchange, optax.sgd(0.5))
    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)

    def look(params, opt_state):
        return gravac.local_params(tx, params, opt_state)["w"][None]

    specs = gravac.state_specs(state)
    mapped = jax.shard_map(look, mesh=MESH, in_specs=specs, out_specs=jax.P("data"))
    text = jax.jit(mapped).lower(*state).compile().as_text()
    assert _harness.collectives(text) == ([], 0)


@pytest.mark.parametrize(
    "after",
    [
        optax.adam(1e-3),
        optax.rmsprop(1e-3),
        optax.rmsprop(1e-3, centered=True),
        optax.lion(1e-3),
        optax.adagrad(1e-3),
        optax.lamb(1e-3),
    ],
)
def test_own_params_need_a_linear_optimizer(after):
    exchange = gravac.transform(axis_name=None, compress=COMPRESS)
    tx = optax.chain(exchange, after)
    with pytest.raises(ValueError, match=r"linear in the updates.*gravac.Adam"):
        gravac.local_params(tx, PARAMS, tx.init(PARAMS))


def test_own_params_need_a_transform():
    tx = optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"gravac.local_params needs exactly one"):
        gravac.local_params(tx, PARAMS, tx.init(PARAMS))
