"""A flush delivers all residuals, and own params hold the replica's own residual."""

import functools
import sys
import warnings

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
MESH, TWO_BITS = _harness.make_mesh(), gravac.Bits(2)


def exchange(send=TWO_BITS, **others):
    return gravac.transform(compress=COMPRESS, send=send, **others)


def after_training(tx, last):
    """Return params and state after a run, and what `last` makes of them."""
    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)
    steps = _harness.own_gradients(tx), last
    run, end = (gravac.data_parallel(step, MESH) for step in steps)
    for i in range(STEPS):
        state = run(*state, at(GRADIENTS, i))
    before = jax.tree.map(np.asarray, state)
    return before, jax.device_get(end(*state, np.zeros(N, np.float32)))


# A flush


def flushed(tx):
    """Return params and state after a run, and after a flush."""
    flush = lambda params, opt_state, _: gravac.flush(tx, params, opt_state)
    return after_training(tx, flush)


def looks_first(tx):
    """Return `tx`, whose update is traced once before it runs."""
    look = lambda *x, **how: jax.eval_shape(functools.partial(tx.update, **how), *x)
    update = lambda *x, **how: (look(*x, **how), tx.update(*x, **how))[1]
    return optax.GradientTransformationExtraArgs(tx.init, update)


@pytest.mark.parametrize("around", [lambda tx: tx, gravac.guard, looks_first])
def test_a_flush_delivers_the_mean_of_the_residuals(around):
    tx = around(optax.chain(exchange(gravac.Bits(2, turns=2)), optax.sgd(0.5)))
    (params, (had, _)), (flat, (has, _)) = flushed(tx)
    residual = had.local.memory[0].residual
    assert np.abs(residual).sum() > 1
    expected = params["w"] - 0.5 * residual.mean(0).reshape(8, 8)
    np.testing.assert_allclose(flat["w"], expected, atol=1e-6)
    np.testing.assert_array_equal(flat["b"], params["b"])
    for name, x in GRADIENTS.items():  # all of which have arrived
        np.testing.assert_allclose(flat[name], -0.5 * x.sum(0).mean(0), atol=1e-4)
    assert not np.asarray(has.local.memory[0].residual).any()
    for name in ("steps", "decided", "past_rungs"):
        assert_same(getattr(has, name), getattr(had, name))


def test_a_flush_delivers_what_a_run_in_rounds_has_left_of_dense_leaves():
    x, alone = jnp.ones(8), functools.partial(gravac.transform, None, compress=False)
    (_, left), after = alone(every=2).update(x, alone(every=2).init(x)), alone().init(x)
    after = after._replace(local=after.local._replace(memory=left.local.memory))
    assert_same(gravac.flush(alone(), 0 * x, after)[0], x)


def test_a_flush_leaves_momentum_alone():
    tx = exchange(memory=gravac.Momentum(0.9, masking=False))
    (_, before), (_, after) = flushed(optax.chain(tx, optax.sgd(0.1)))
    had, has = (x[0].local.memory[0].velocity for x in (before, after))
    assert had.any()
    assert_same(np.asarray(has), had)


# Own params

DECAY = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5))
# What comes before the optimizer, and the optimizer.
LINEAR = {
    "learning rate": (exchange(), optax.sgd(0.5)),
    "momentum": (exchange(), optax.sgd(0.5, momentum=0.9)),
    "decay": (exchange(), DECAY),
    "no residual": (exchange(gravac.Dense()), DECAY),
}


@pytest.mark.parametrize("after", _harness.choices(LINEAR, lambda x: x != "decay"))
def test_own_params_are_the_params_after_the_own_residual(after):
    tx = gravac.guard(optax.chain(*LINEAR[after]))
    every = gravac.Comm("data").gather

    def look(params, opt_state, _):
        own = gravac.own_params(tx, params, opt_state)
        return params, opt_state, jax.tree.map(every, own)

    params, opt_state, own = after_training(tx, look)[1]
    residual = opt_state[0].local.memory[0].residual.reshape(N, 8, 8)
    is_held = after != "no residual"
    assert [np.abs(x).sum() > 1 for x in residual] == [is_held] * N
    atol = 1e-5 * is_held
    np.testing.assert_allclose(own["w"], params["w"] - 0.5 * residual, 0, atol)
    np.testing.assert_array_equal(own["b"], np.stack([params["b"]] * N))


def adamw(learning_rate, send=TWO_BITS):
    return gravac.adamw(learning_rate, send=send, compress=COMPRESS)


@pytest.mark.parametrize(
    ("tx", "warns"),
    [
        (adamw(0.1), True),
        (optax.inject_hyperparams(adamw, ("send",))(0.1), True),
        (exchange(gravac.Bits(1)), True),
        (exchange(gravac.Bits(2, turns=2)), True),
        (exchange(gravac.Dense(), every=2), True),
        (exchange(gravac.Dense(), delay=1), True),
        (adamw(0.1, gravac.Dense()), False),
        (exchange(), False),
        (exchange(gravac.Fastest(), network=gravac.WireCost()), False),
    ],
)
def test_a_step_that_never_asked_for_own_params_warns(tx, warns, monkeypatch):
    # The module has the name of a function.
    monkeypatch.setattr(sys.modules["gravac_jax._step.update"], "ASKED", set())
    params = {"w": jnp.ones((N, 8, 8)), "b": jnp.ones((N, 8))}
    state = tx.init(at(params, 0))
    each = functools.partial(jax.vmap, axis_name="data")
    step = lambda **how: each(lambda x: tx.update(x, state, x, **how)[0])(params)
    said = pytest.warns(UserWarning, match=r"not taken at gravac\.own_params")
    with said if warns else warnings.catch_warnings(action="error") as lines:
        step()
    assert not warns or lines[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        step(at="shared")
        each(lambda x: gravac.own_params(tx, x, state))(params)
        step()


FEW = {"compress": True, "send": gravac.TopK(16, select="exact", values="float32")}
SLOW = gravac.OwnOptimizer(_oracles.SLOW_ADAM)
# The memory for the oracle, and the optimizer.
TRAININGS = {
    "sgd": (gravac.Residual(), optax.chain(gravac.transform(**FEW), optax.sgd(0.1))),
    "adam": (
        SLOW,
        optax.chain(gravac.transform(memory=SLOW, **FEW), optax.scale(-0.1)),
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
    run = _harness.trajectory(looking, {"w": PARAMS["w"]}, "shard_map")
    with jax.numpy_dtype_promotion("standard"):  # Optax's decay needs it
        received, _ = run({"w": np.broadcast_to(targets, (STEPS, *targets.shape))})

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


def test_own_params_keep_dtypes_are_rounded_once_and_know_which_leaves_wait():
    narrow = lambda path, x: x.dtype == jnp.bfloat16
    alone = gravac.transform(None, compress=narrow, send=gravac.Bits(2))
    tx = optax.chain(alone, optax.sgd(1.0, momentum=0.9))
    params = {"w": jnp.ones(256, jnp.bfloat16), "n": jnp.ones(64)}
    grads = jax.tree.map(lambda x: jnp.linspace(0, 1, x.size, dtype=x.dtype), params)
    with jax.numpy_dtype_promotion("standard"):  # what is held back is float32
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    own = jax.jit(gravac.own_params, static_argnums=0)(tx, params, state)
    residual = _harness.residual(state)[:256]
    assert residual.any()
    assert_same(own, {"w": (1 - residual).astype(jnp.bfloat16), "n": params["n"]})


def test_own_params_exchange_nothing():
    tx = optax.chain(exchange(), optax.sgd(0.5))
    look = functools.partial(gravac.own_params, tx)
    program = str(jax.make_jaxpr(look, axis_env=[("data", N)])(PARAMS, tx.init(PARAMS)))
    assert "data" not in program.replace("axis_index[axis_name=data]", "")
