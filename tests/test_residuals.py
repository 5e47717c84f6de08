"""A flush delivers all residuals, and own params hold the replica's own residual."""

import _harness
import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, N, assert_same, at

import gravac_jax as gravac

STEPS = 12
GRADIENTS = _harness.gaussian_gradients(STEPS)
MESH = _harness.make_mesh()


EXCHANGE = gravac.transform(compress=COMPRESS, send=gravac.Bits(2))


def after_training(tx, last):
    """Return params and state after a run, and what `last` makes of them."""

    def step(params, opt_state, batch):
        grads = jax.tree.map(lambda x: x[0], batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)
    run, end = gravac.data_parallel(step, MESH), gravac.data_parallel(last, MESH)
    for i in range(STEPS):
        state = run(*state, at(GRADIENTS, i))
    before = jax.tree.map(np.asarray, state)
    return before, jax.device_get(end(*state, np.zeros(N, np.float32)))


# A flush


def flushed(tx):
    """Return params and state after a run, and after a flush."""
    flush = lambda params, opt_state, _: gravac.flush(tx, params, opt_state)
    return after_training(tx, flush)


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_flush_delivers_the_mean_of_the_residuals(is_guarded):
    tx = optax.chain(EXCHANGE, optax.sgd(0.5))
    (params, opt_state), after = flushed(gravac.guard(tx) if is_guarded else tx)
    transform = opt_state[0]
    residual = transform.local.memory[0].residual
    assert np.abs(residual).sum() > 1
    expected = params["w"] - 0.5 * residual.mean(0).reshape(8, 8)
    np.testing.assert_allclose(after[0]["w"], expected, atol=1e-6)
    np.testing.assert_array_equal(after[0]["b"], params["b"])
    left = after[1][0]
    assert not np.asarray(left.local.memory[0].residual).any()
    for name in ("steps", "decided", "past_rungs"):
        assert_same(getattr(left, name), getattr(transform, name))


def test_all_gradients_have_arrived_after_a_flush():
    tx = gravac.transform(compress=True, send=gravac.Bits(2))
    _, (params, _) = flushed(optax.chain(tx, optax.sgd(1.0)))
    for name, x in GRADIENTS.items():
        np.testing.assert_allclose(params[name], -x.sum(0).mean(0), atol=1e-4)


def test_a_flush_leaves_momentum_alone():
    memory = gravac.Momentum(0.9, masking=False)
    tx = gravac.transform(compress=COMPRESS, memory=memory, send=gravac.Bits(2))
    (_, before), (_, after) = flushed(optax.chain(tx, optax.sgd(0.1)))
    had, has = (x[0].local.memory[0].velocity for x in (before, after))
    assert had.any()
    assert_same(np.asarray(has), had)


def test_a_flush_hands_extra_arguments_to_the_optimizer():
    exchange = gravac.transform(axis_name=None, compress=COMPRESS)
    tx = optax.chain(exchange, optax.contrib.reduce_on_plateau())
    params = jax.tree.map(jnp.asarray, PARAMS)
    with jax.numpy_dtype_promotion("standard"):
        gravac.flush(tx, params, tx.init(params), value=1.0)


# Own params

LINEAR = {
    "learning rate": optax.sgd(0.5),
    "momentum": optax.sgd(0.5, momentum=0.9),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5)),
}


def own_params_after(tx):
    """Return params and state after a run, and the own params of every replica."""
    every = lambda x: jax.lax.pmean(
        jnp.zeros((N, *x.shape)).at[jax.lax.axis_index("data")].set(N * x), "data"
    )

    def look(params, opt_state, _):
        own = gravac.own_params(tx, params, opt_state)
        return params, opt_state, jax.tree.map(every, own)

    return after_training(tx, look)[1]


@pytest.mark.parametrize("after", _harness.choices(LINEAR, lambda x: x != "decay"))
def test_own_params_are_the_params_after_the_own_residual(after):
    tx = gravac.guard(optax.chain(EXCHANGE, LINEAR[after]))
    params, opt_state, own = own_params_after(tx)
    residual = opt_state[0].local.memory[0].residual.reshape(N, 8, 8)
    assert all(np.abs(x).sum() > 1 for x in residual)
    np.testing.assert_allclose(own["w"], params["w"] - 0.5 * residual, atol=1e-5)
    np.testing.assert_array_equal(own["b"], np.stack([params["b"]] * N))


def test_the_mean_of_own_params_is_where_a_flush_takes_the_params():
    tx = optax.chain(EXCHANGE, optax.sgd(0.5))
    _, _, own = own_params_after(tx)
    _, (params, _) = flushed(tx)
    for name, x in own.items():
        np.testing.assert_allclose(x.mean(0), params[name], atol=1e-5)


def test_without_a_residual_own_params_are_the_params():
    exchange = gravac.transform(compress=COMPRESS, send=gravac.Dense())
    params, _, own = own_params_after(optax.chain(exchange, LINEAR["decay"]))
    for name, x in own.items():
        np.testing.assert_array_equal(x, np.stack([params[name]] * N))


SPARSE_TOP = {
    "compress": True,
    "send": gravac.TopK(16, select="exact", values="float32"),
}
# The memory for the oracle, and the optimizer.
TRAININGS = {
    "sgd": (
        gravac.Residual(),
        optax.chain(gravac.transform(**SPARSE_TOP), optax.sgd(0.1)),
    ),
    # With a small eps all first steps would have one size.
    "adamw": (
        gravac.OwnOptimizer(_oracles.SLOW_ADAM),
        gravac.adamw(0.1, b1=0.8, b2=0.9, eps=1.0, weight_decay=0.0, **SPARSE_TOP),
    ),
}


@pytest.mark.parametrize("training", _harness.choices(TRAININGS, lambda x: x == "sgd"))
def test_training_at_own_params_is_training_of_its_oracle(training):
    # Each replica minimizes |x - its own target|**2 / 2 and sends the top 4 of 64.
    targets = GRADIENTS["w"][0]
    memory, tx = TRAININGS[training]

    def update(targets, state):
        params, opt_state = state
        own = gravac.own_params(tx, params, opt_state)
        grads = jax.tree.map(jnp.subtract, own, targets)
        updates, opt_state = tx.update(grads, opt_state, params)
        return updates, (optax.apply_updates(params, updates), opt_state)

    init = lambda params: (params, tx.init(params))
    looking = optax.GradientTransformation(init, update)
    repeated = {"w": np.broadcast_to(targets, (STEPS, *targets.shape))}
    # Optax's decay needs implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        received, _ = _harness.trajectory(looking, {"w": PARAMS["w"]}, "shard_map")(
            repeated
        )

    params = np.zeros(64, np.float32)
    kind = _oracles.look_up(_oracles.MEMORIES, memory)
    oracles = [kind(memory, 64) for _ in range(N)]
    for i in range(STEPS):
        sent = np.zeros((N, 64))
        for mine, target, oracle in zip(sent, targets, oracles, strict=True):
            own = params - np.float32(0.1) * oracle.residual
            compensated = oracle.feed(own - target.ravel())
            largest = np.argsort(-np.abs(compensated), kind="stable")[:4]
            mine[largest] = compensated[largest]
            oracle.keep(np.float32(compensated - mine))
        step = np.float32(-0.1 * sent.mean(0))
        np.testing.assert_allclose(received["w"][i].ravel(), step, atol=1e-5)
        params = params + step


@pytest.mark.slow
def test_own_params_keep_the_dtype_of_the_params_and_are_rounded_once():
    exchange = gravac.transform(None, compress=True, send=gravac.Bits(2))
    tx = optax.chain(exchange, optax.sgd(1.0, momentum=0.9))
    params = {"w": jnp.ones((8, 8), jnp.bfloat16)}
    grads = {"w": jnp.asarray(GRADIENTS["w"][0, 0], jnp.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
        own = jax.jit(gravac.own_params, static_argnums=0)(tx, params, state)["w"]
    residual = state[0].local.memory[0].residual.reshape(8, 8)
    assert own.dtype == jnp.bfloat16
    np.testing.assert_array_equal(own, (1 - residual).astype(jnp.bfloat16))


def test_own_params_know_which_leaves_are_compressed_by_their_dtype():
    tx = optax.chain(
        gravac.transform(
            None,
            compress=lambda path, x: x.dtype == jnp.bfloat16,
            send=gravac.Bits(2),
        ),
        optax.sgd(0.5),
    )
    params = {"w": jnp.ones(256, jnp.bfloat16), "n": jnp.ones(64)}
    grads = jax.tree.map(lambda x: jnp.linspace(0, 1, x.size, dtype=x.dtype), params)
    with jax.numpy_dtype_promotion("standard"):  # what is held back is float32
        opt_state = jax.jit(tx.update)(grads, tx.init(params), params)[1]
        own = gravac.own_params(tx, params, opt_state)
    assert (own["w"] != params["w"]).any()
    assert_same(own["n"], params["n"])


def test_own_params_exchange_nothing():
    tx = optax.chain(EXCHANGE, optax.sgd(0.5))
    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)

    def look(params, opt_state):
        return gravac.own_params(tx, params, opt_state)["w"][None]

    specs = gravac.state_specs(state)
    mapped = jax.shard_map(look, mesh=MESH, in_specs=specs, out_specs=jax.P("data"))
    text = jax.jit(mapped).lower(*state).compile().as_text()
    assert _harness.collectives(text) == ([], 0)
