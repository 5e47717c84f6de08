"""value_and_grad returns local gradients wherever it runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import N, in_both_ways, make_mesh, on_each, on_every_mesh
from flax.training.dynamic_scale import DynamicScale

import gravac_jax as gravac

W = jnp.arange(3.0)
X = jnp.arange(3.0 * N).reshape(N, 3) + 1
LOSS = lambda w, x: jnp.sum(w * x) ** 2


def everywhere(f, how, x=X, mesh=None):
    """Return `f(W, x)` of every replica with its own x, stacked."""
    return on_each(lambda x: f(W, x), how, mesh)(x)


def is_local(received, expected):
    """Return whether replica r received `expected(X[r])`; all are small integers."""
    expected = jax.tree.map(lambda *row: np.stack(row), *map(expected, X))
    assert jax.tree.structure(received) == jax.tree.structure(expected)
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, received, expected)))


WITH_AUX = lambda w, x: (LOSS(w, x), {"x": x})
WEIGHTED = lambda w, x, b: jnp.sum(w["w"] * x + b)
SCALED = lambda w, *, x, scale: scale * LOSS(w, x)
# Calls of value_and_grad, JAX's own or the package's.
CALLS = {
    "loss": lambda grad: grad(LOSS),
    "aux": lambda grad: grad(WITH_AUX, has_aux=True),
    "keywords": lambda grad: lambda w, x: grad(SCALED)(w, x=x, scale=2.0),
    "arguments": lambda grad: lambda w, x: grad(WEIGHTED)({"w": w}, x, w),
}


@in_both_ways
@pytest.mark.parametrize("call", CALLS)
def test_values_and_gradients_belong_to_the_replica_alone(call, how):
    received = everywhere(CALLS[call](gravac.value_and_grad), how)
    assert is_local(received, lambda x: CALLS[call](jax.value_and_grad)(W, x))
    alone = functools.partial(gravac.value_and_grad, axis_name=None)
    assert is_local(received, lambda x: CALLS[call](alone)(W, x))


@on_every_mesh
def test_gradients_are_local_to_every_axis_of_a_tuple(axis_type):
    names = ("outer", "inner")
    mesh = make_mesh((2, 2), names, axis_type)
    received = everywhere(gravac.value_and_grad(LOSS, names), "shard_map", mesh=mesh)
    assert is_local(received, lambda x: jax.value_and_grad(LOSS)(W, x))


def test_jax_grad_sums_over_replicas_where_jax_checks_what_varies():
    # This is why value_and_grad exists. If it fails, JAX has changed.
    grads = everywhere(jax.grad(LOSS), "shard_map")
    total = sum(jax.grad(LOSS)(W, x) for x in X)
    assert all(np.array_equal(row, total) for row in grads)
    unchecked = everywhere(jax.grad(LOSS), "shard_map unchecked")
    assert is_local(unchecked, lambda x: jax.grad(LOSS)(W, x))


ROWS = jnp.arange(N * 6.0 * 3).reshape(N, 6, 3)
MEAN_LOSS = lambda w, x: jnp.mean(x @ w)  # integers: sums are exact, and so is / 6


@in_both_ways
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_micro_batches_are_the_large_batch(how, micro_batches):
    loss = lambda w, x: (MEAN_LOSS(w, x), x[:1])
    grad = gravac.value_and_grad(loss, has_aux=True, micro_batches=micro_batches)
    (value, aux), received = everywhere(grad, how, x=ROWS)
    expected = [jax.value_and_grad(MEAN_LOSS)(W, x) for x in ROWS]
    np.testing.assert_allclose(value, [x for x, _ in expected], rtol=1e-6)
    np.testing.assert_allclose(received, [x for _, x in expected], rtol=1e-6)
    if micro_batches > 1:
        np.testing.assert_array_equal(aux[:, :, 0], ROWS[:, :: 6 // micro_batches])


def test_micro_batches_are_given_by_name_too_and_keep_the_params_dtype():
    grad = gravac.value_and_grad(lambda w, *, x: jnp.mean(x @ w), None, micro_batches=3)
    value, received = grad(W.astype(jnp.bfloat16), x=ROWS[0].astype(jnp.bfloat16))
    assert value.dtype == received.dtype == jnp.bfloat16
    np.testing.assert_allclose(received.astype(jnp.float32), ROWS[0].mean(0), rtol=0.01)
    with pytest.raises(ValueError, match=r"split over 3 micro-batches.*\['x'\]"):
        grad(W, x=ROWS[0][:4])


def test_micro_batches_exchange_nothing():
    grad = gravac.value_and_grad(MEAN_LOSS, micro_batches=3)
    jaxpr = jax.make_jaxpr(grad, axis_env=[("data", N)])(W, ROWS[0])
    assert "psum" not in str(jaxpr)
    assert str(jaxpr).count("scan[") == 1


@in_both_ways
def test_a_loss_that_was_averaged_before_has_the_same_gradients(how):
    averaged = lambda w, x: jax.lax.pmean(LOSS(w, x), "data")
    value, received = everywhere(gravac.value_and_grad(averaged), how)
    local = [jax.value_and_grad(LOSS)(W, x) for x in X]
    np.testing.assert_allclose(value, np.mean([x for x, _ in local]), rtol=1e-6)
    np.testing.assert_allclose(received, [x for _, x in local], rtol=1e-6)


def test_a_loss_over_the_mean_of_counts_is_that_of_the_whole_batch():
    counts = jnp.arange(1.0, N + 1)

    def loss(w, x):
        own = counts[jax.lax.axis_index("data")]
        return jnp.sum(w * x) / jax.lax.pmean(own, "data")

    for how in ("shard_map", "pmap", "vmap"):
        f = lambda w, x: gravac.value_and_grad(loss)(w, x)[1]
        mean = np.mean(everywhere(f, how), axis=0)
        np.testing.assert_allclose(mean, X.sum(0) / counts.sum(), rtol=1e-6)


def test_under_pmap_a_dynamic_scale_of_flax_follows_the_gradients_of_all_replicas():
    tx = gravac.transform(send=gravac.Dense())

    def step(w, x):
        scale = DynamicScale(scale=jnp.float32(16))
        _, _, _, grads = scale.value_and_grad(LOSS)(w, x)  # without an axis name
        updates, state = tx.update(grads, tx.init(w))
        return updates, state.info.is_finite, state.info.bad_steps

    updates, is_finite, bad_steps = everywhere(step, "pmap", x=X.at[1, 2].set(jnp.inf))
    others = [jax.grad(LOSS)(W, x) for i, x in enumerate(X) if i != 1]
    np.testing.assert_array_equal(updates, [sum(others) / N] * N)
    assert (is_finite.tolist(), bad_steps.tolist()) == ([False] * N, [1] * N)
