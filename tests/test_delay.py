"""With a delay, a step exchanges what the step before left, and nothing is lost."""

import functools

import _examples
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, ROWS, N, assert_same

import gravac_jax as gravac
from gravac_jax._memory import MEMORIES

STEPS = 6
GRADIENTS = _harness.gaussian_gradients(STEPS)
RESIDUAL = gravac.Residual()
ENCODINGS = [ROWS, gravac.LowRank(1), gravac.TopK(8), gravac.Bits(1, turns=2)]


@functools.cache
def program(delay, memory, send, how):
    tx = gravac.transform(compress=COMPRESS, memory=memory, send=send, delay=delay)
    return _harness.trajectory(tx, PARAMS, how)


def run(delay, memory=RESIDUAL, send=ROWS, how="vmap", gradients=GRADIENTS):
    return program(delay, memory, send, how)(gradients)


# A delay hands on what a memory makes and what an exchange sends, whatever they are.
QUICK = gravac.Residual, gravac.OwnOptimizer
MASKS = {
    "memory": gravac.Momentum(0.5, masking=True),
    "send": gravac.TopK(8, values="float32"),
}
OTHERS = [{"memory": x} for x in _examples.one_of_each(MEMORIES)]


@pytest.mark.parametrize(
    "others",
    _harness.choices(
        [*OTHERS, MASKS, {"how": "shard_map"}],
        lambda x: x != MASKS and type(x.get("memory", RESIDUAL)) in QUICK,
        repr,
    ),
)
def test_a_delayed_run_is_the_run_without_delay_one_step_later(others):
    (prompt, _), (late, _) = run(0, **others), run(1, **others)
    for x, y in zip(jax.tree.leaves(prompt), jax.tree.leaves(late), strict=True):
        assert not y[0].any()
        np.testing.assert_allclose(y[1:], x[:-1], rtol=0, atol=2.0**-18)


@pytest.mark.parametrize(
    "send",
    _harness.choices(ENCODINGS, lambda x: x == ROWS or "LowRank" in repr(x), repr),
)
def test_what_was_made_was_sent_or_is_held(send):
    updates, states = run(1, send=send)
    for name, part in zip(PARAMS, reversed(states.local.memory), strict=True):
        sent = updates[name].astype(np.float64).sum(0).ravel()
        held = part.residual[-1].astype(np.float64).mean(0)[: sent.size]
        came = GRADIENTS[name].astype(np.float64).sum(0).mean(0).ravel()
        np.testing.assert_allclose(sent + held, came, rtol=0, atol=1e-5)


@pytest.mark.parametrize("delay", [0, 1])
def test_the_update_does_not_depend_on_the_gradient(delay):
    other = {k: np.concatenate([x[:1], -x[1:]]) for k, x in GRADIENTS.items()}
    same, other = (run(delay, gradients=x)[0] for x in (GRADIENTS, other))
    assert np.array_equal(same["w"][1], other["w"][1]) == bool(delay)


@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_a_bad_gradient_is_nothing_to_its_replica_and_the_others_go_on(how):
    bad, nothing = (jax.tree.map(np.copy, GRADIENTS) for _ in range(2))
    bad["w"][2, 1, 3, 3] = np.nan
    bad["b"][2, 1, 0] = np.inf
    nothing["w"][2, 1] = nothing["b"][2, 1] = 0
    updates, states = run(1, how=how, gradients=bad)
    expected, others = run(1, how=how, gradients=nothing)
    assert_same(updates, expected)
    assert_same(states.local.memory, others.local.memory)
    assert states.info.bad_steps.tolist() == [0, 0, 0, 1, 1, 1]
    assert states.info.is_finite.all()


def test_a_flush_delivers_what_is_on_its_way():
    tx = gravac.transform(compress=COMPRESS, send=ROWS, delay=1)

    def train(state, gradients):
        update = lambda state, x: (tx.update(x, state)[1], None)
        state, _ = jax.lax.scan(update, state, gradients)
        params, state = gravac.flush(tx, PARAMS, state)
        return params, gravac.own_params(tx, PARAMS, state)

    _, own = _harness.on_all_replicas(train, tx, 1)(GRADIENTS)
    assert_same(own, jax.tree.map(lambda x: np.stack([x] * N), PARAMS))


def test_training_at_own_params_converges_where_shared_ones_diverge():
    """Each replica is drawn to its own target, by momentum at a high rate."""
    targets = np.random.default_rng(0).standard_normal((N, 8)).astype(np.float32)
    memory = gravac.OwnOptimizer(optax.sgd(1.0, momentum=0.5))
    tx = gravac.transform(memory=memory, delay=1, send=gravac.Dense())

    def distance(at):
        loss = lambda params, target: jnp.sum((params - target[0]) ** 2) / 2
        step = gravac.train_step(loss, tx, N, at=at)
        params, state = step.init(jnp.zeros(8))
        for _ in range(60):
            params, state, _ = step(params, state, targets)
        return float(jnp.abs(params - targets.mean(0)).max())

    assert distance("own") < 1e-3
    assert distance("shared") > 10


def own_params_of(tx, steps):
    """Train one replica on a bowl, and return its own params at the end."""
    loss_fn = lambda params, batch: jnp.mean((params["w"] - 1.0) ** 2 * batch[0])
    step = gravac.train_step(loss_fn, tx, 1)
    state = step.init({"w": jnp.linspace(2, 3, 64)})
    for _ in range(steps):
        *state, _ = step(*state, jnp.ones((1, 64)))
    look = lambda params, opt_state, _: (
        *(params, opt_state),
        gravac.own_params(tx, params, opt_state)["w"],
    )
    return gravac.data_parallel(look, 1)(*jax.device_get(state), np.ones((1, 1)))[-1]


@pytest.mark.parametrize(
    ("delay", "every"),
    [(1, 1), (1, 3), pytest.param(0, 3, marks=pytest.mark.slow)],
)
def test_what_decays_are_own_params_however_late_an_exchange_is(delay, every):
    adamw = optax.adamw(0.05, weight_decay=0.3)
    late = {"memory": gravac.OwnOptimizer(adamw), "delay": delay, "every": every}
    tx = gravac.transform(send=gravac.Dense(), **late)
    expected = jnp.linspace(2, 3, 64)
    state = adamw.init(expected)
    with jax.numpy_dtype_promotion("standard"):
        found = own_params_of(tx, 12)
        for _ in range(12):
            grads = jax.grad(lambda w: jnp.mean((w - 1.0) ** 2))(expected)
            updates, state = adamw.update(grads, state, expected)
            expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-18)
