"""Training survives gradients of zero and loss scales that are too high."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import choices

import gravac_jax as gravac

N = 4
RNG = np.random.default_rng(0)
PARAMS = {
    "b": np.zeros(8, np.float32),
    "w": RNG.normal(size=(12, 8)).astype(np.float32),
}
CONTROLLERS = {
    "Fastest": gravac.Fastest(ladder=(1, 4, 16)),
    "GraVAC": gravac.GraVAC(ladder=(1, 4, 16), window=2),
    "Accordion": gravac.Accordion(4, 16, interval=3),
    "Fixed": gravac.Fixed(8),
}


def begin(tx):
    return gravac.place((PARAMS, tx.init(PARAMS)), N)


def runner(tx):
    """Return a step that takes the gradients of all replicas as its batch."""

    def train_step(params, opt_state, grads):
        grads = jax.tree.map(lambda x: x[0], grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return gravac.simulate(train_step, N)


def gradients(seed):
    rng = np.random.default_rng(seed)
    draw = lambda x: rng.normal(size=(N, *x.shape)).astype(np.float32)
    return jax.tree.map(draw, PARAMS)


def transform(**recipe):
    return gravac.transform(compress=lambda path, x: x.ndim == 2, **recipe)


@pytest.mark.parametrize("controller", choices(CONTROLLERS, lambda x: x == "Fastest"))
def test_gradients_of_zero_deliver_the_residual_and_disturb_nothing(controller):
    tx = optax.chain(transform(controller=CONTROLLERS[controller]), optax.sgd(1.0))
    step = runner(tx)
    state = step(*begin(tx), gradients(0))
    zeros = jax.tree.map(np.zeros_like, gradients(0))
    for _ in range(150):  # an entry is sent three times until its last bit is
        state = step(*state, zeros)
    info = optax.tree.get(state, "StepInfo")
    assert info.skipped_steps == 0
    assert 0 <= info.gain <= 1
    assert not np.asarray(optax.tree.get(state, "residual")).any(), "all is delivered"
    expected = jax.tree.map(lambda p, g: p - g.mean(0), PARAMS, gradients(0))
    jax.tree.map(
        lambda p, x: np.testing.assert_allclose(p, x, atol=1e-5), state[0], expected
    )
    state = step(*state, gradients(1))
    for leaf in jax.tree.leaves(state):
        is_number = not jnp.issubdtype(leaf.dtype, jnp.floating)
        assert is_number or np.isfinite(leaf).all()


def test_a_loss_scale_that_is_too_high_skips_the_step_on_all_replicas():
    tx = optax.chain(transform(controller=gravac.Fixed(4)), optax.sgd(0.1))

    def train_step(params, opt_state, x, *, scale):
        def loss(params, x):
            half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
            y = x.astype(jnp.float16) @ half["w"] + half["b"][None]
            return scale.astype(jnp.float16) * jnp.mean(y * y)

        value, grads = gravac.value_and_grad(loss)(params, x)
        grads = jax.tree.map(lambda g: g / scale, grads)  # before the exchange
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    step = gravac.simulate(train_step, N)
    x = RNG.normal(size=(N, 12)).astype(np.float32)
    x[2] *= 6  # one replica's overflow
    state, scale, scales = begin(tx), 2.0**12, []
    for _ in range(12):
        *state, _ = step(*state, x, scale=np.float32(scale))
        is_finite = bool(optax.tree.get(tuple(state), "StepInfo").is_finite)
        scales.append((scale, is_finite))
        scale = scale if is_finite else scale / 2
    taken = [is_finite for _, is_finite in scales]
    assert taken[0] is False
    assert taken[-1] is True
    assert optax.tree.get(tuple(state), "skipped_steps") == taken.count(False)
    for leaf in jax.tree.leaves(state[0]):
        assert np.isfinite(leaf).all()
