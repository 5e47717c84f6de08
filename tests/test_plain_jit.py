"""A plain jit on Explicit axes: unreduced gradients reach the exchange unsummed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import AXIS_TYPES, N, assert_close, collectives, make_mesh, plain_step

import gravac_jax as gravac

# JAX before 0.12 has no form of a bias that is reduced.
HAS_BIAS = jax.__version_info__ >= (0, 12)
DRAW = np.random.default_rng(0).normal
PARAMS = {
    "up": DRAW(size=(32, 64)).astype(np.float32) / 6,
    "bias": np.zeros((1, 64), np.float32),
    "down": DRAW(size=(64, 8)).astype(np.float32) / 8,
}
ROWS = DRAW(size=(8 * N, 32)).astype(np.float32)
MESHES = {
    "one axis": ((N,), ("dcn",), None),
    "a fast axis": ((2, N // 2), ("dcn", "ici"), "ici"),
}


def loss_fn(params, rows):
    """Return a mean over rows; JAX adds nothing reduced to what is sharded."""
    hidden = rows @ params["up"]
    bias = params["bias"]
    if HAS_BIAS:
        lies = jax.typeof(hidden).sharding
        bias = jnp.broadcast_to(bias, hidden.shape, out_sharding=lies)
    hidden += bias
    return jnp.mean((jnp.tanh(hidden) @ params["down"] - 1) ** 2)


def run(mesh, tx, axes=(), steps=3):
    """Return losses, params, and the compiled step; params are reduced over `axes`."""
    with jax.set_mesh(mesh):
        state = gravac.place((PARAMS, tx.init(PARAMS)), mesh, "dcn")
        rows = jax.device_put(ROWS, jax.P(mesh.axis_names))

        @jax.jit
        def step(params, opt_state, rows):
            # Without a cast JAX sums the gradient, here that of the bias.
            reduced = lambda x: jax.reshard(x, jax.P(reduced=frozenset(axes)))
            is_cast = lambda name: HAS_BIAS or name != "bias"
            own = {k: reduced(x) if is_cast(k) else x for k, x in params.items()}
            loss, grads = jax.value_and_grad(loss_fn)(own, rows)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        compiled, losses = step.lower(*state, rows).compile(), []
        for _ in range(steps):
            state, loss = compiled(*state, rows)
            losses.append(float(loss))
    return losses, state, compiled.as_text()


@pytest.mark.parametrize("place", MESHES)
def test_dense_steps_are_those_of_jit(place):
    shape, names, fast = MESHES[place]
    mesh = make_mesh(shape, names, AXIS_TYPES[1])
    dense = gravac.transform("dcn", fast_axis_name=fast, send=gravac.Dense())
    sgd = optax.sgd(0.5)
    losses, (params, _), _ = run(mesh, optax.chain(dense, sgd), names)
    expected, (expected_params, _), _ = run(mesh, sgd)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert_close(params, expected_params, rtol=1e-5, atol=1e-7)
    assert expected[-1] < 0.98 * expected[0]


def test_few_bits_are_those_of_data_parallel_and_nothing_else_crosses():
    mesh = make_mesh((N,), ("dcn",), AXIS_TYPES[1])
    encoded = {"up": True, "bias": False, "down": True}  # its parts may be alike
    few = gravac.transform("dcn", send=gravac.Bits(2), compress=encoded)
    tx = optax.chain(few, optax.sgd(0.5))
    losses, (params, _), text = run(mesh, tx, ("dcn",))
    mesh = make_mesh((N,), ("dcn",))
    step = gravac.data_parallel(plain_step(tx, loss_fn, "dcn"), mesh, "dcn")
    state = gravac.place((PARAMS, tx.init(PARAMS)), mesh, "dcn")
    for loss in losses:
        *state, expected = step(*state, ROWS)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(params, state[0], rtol=1e-5, atol=1e-7)

    crossing = sum(x.payload_bytes for x in collectives(text))
    dense_bytes = 4 * sum(x.size for x in PARAMS.values())
    assert 1 / 16 < crossing / dense_bytes < 1 / 6
    text = run(mesh, optax.sgd(0.5))[2]
    assert sum(x.payload_bytes for x in collectives(text)) >= dense_bytes


MISTAKES = {
    "own params": (
        gravac.adamw(0.1, "dcn", fast_axis_name="ici"),
        "needs gradients at each replica's own params",
    ),
    "an axis too many": (gravac.transform("dcn"), "over 'dcn', got .*'dcn', 'ici'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_plain_jit_cannot_hold_is_refused(mistake):
    tx, message = MISTAKES[mistake]
    mesh = make_mesh((2, N // 2), ("dcn", "ici"), AXIS_TYPES[1])
    with pytest.raises(ValueError, match=message):
        run(mesh, tx, mesh.axis_names)
