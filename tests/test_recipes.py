"""Clips and weight decay before the exchange, and recipes that are whole optimizers."""

import functools

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, ROWS, SUM_ROUNDING, assert_same, at

import gravac_jax as gravac
from gravac_jax import _transform

STEPS = 12
GRADIENTS = _harness.gaussian_gradients(STEPS)


def updates_of(tx, **extra):
    return _harness.trajectory(tx, PARAMS, "vmap")(GRADIENTS, **extra)


# Clips. ---------------------------------------------------------------------------


def test_a_bound_that_nothing_reaches_changes_no_bit():
    tx = lambda **others: gravac.transform(compress=COMPRESS, send=ROWS, **others)
    assert_same(updates_of(tx(clip=gravac.ClipByGlobalNorm(1e6))), updates_of(tx()))


def test_a_gradient_that_is_not_finite_is_not_clipped_away():
    grads = jax.tree.map(np.copy, at(GRADIENTS, (0, 0)))
    grads["w"][0, 0] = np.inf
    clip = gravac.ClipByGlobalNorm(1.0)
    tx = gravac.transform(None, compress=COMPRESS, clip=clip, send=gravac.Dense())
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    assert not bool(state.info.is_finite)
    assert not any(x.any() for x in jax.tree.leaves(updates))


# Recipes. -------------------------------------------------------------------------


def test_the_recipe_is_the_papers_parts():
    stages = tuple(gravac.TopK(x, select="sampled") for x in (4, 16))
    both = {"weight_decay": 0.01, "compress": COMPRESS}
    recipe = gravac.dgc(send=stages[1], max_norm=1.0, warm_up_steps=6, **both)
    parts = gravac.transform(
        send=gravac.Scheduled(stages, starts=(6,)),
        memory=gravac.Momentum(0.9, masking=True),
        clip=gravac.ClipByGlobalNorm(1.0),
        **both,
    )
    params = jax.tree.map(np.cos, GRADIENTS)
    found, expected = (updates_of(tx, params=params) for tx in (recipe, parts))
    assert_same(found, expected)
    assert found[1].info.rung.tolist() == [0] * 6 + [1] * 6


def test_dgc_warms_up_in_the_papers_stages_of_equal_length():
    stages = [gravac.TopK(x, select="sampled") for x in (4, 16, 64, 250, 1000)]
    expected = gravac.Scheduled(tuple(stages), (100, 200, 300, 400))
    assert _transform._warmed_up(stages[-1], 400) == expected


def test_what_dgc_is_given_takes_precedence():
    given = {"send": gravac.GraVAC(), "memory": gravac.Residual()}
    found, expected = (
        make(None, **given).init(PARAMS) for make in (gravac.dgc, gravac.transform)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("recipe", [gravac.sgd, gravac.adamw])
@pytest.mark.parametrize(
    ("given", "send"),
    [({}, gravac.Bits(2)), ({"send": gravac.LowRank(1)}, gravac.LowRank(1))],
    ids=repr,
)
def test_recipes_send_two_bits_unless_they_are_told_otherwise(recipe, given, send):
    named = [
        optax.tree.get(tx.init({"w": jnp.zeros((64, 64))}), "ladder")
        for tx in (recipe(1e-3, None, **given), gravac.transform(None, send=send))
    ]
    assert_same(*named)


def trained(tx, state, gradients, params=PARAMS):
    """Return (the params and the state after all steps, the params of each step)."""

    def step(carry, x):
        params, state = carry
        updates, state = tx.update(x, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.lax.scan(step, (params, state), gradients)


def test_adamw_alone_and_dense_is_that_of_optax():
    rate = optax.linear_schedule(0.1, 0.01, STEPS)
    settings = {"b1": 0.8, "b2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
    settings["mask"] = {"b": False, "w": True}
    dense = {"compress": COMPRESS, "send": gravac.Dense()}
    params = jax.tree.map(jnp.ones_like, PARAMS)
    own = jax.tree.map(lambda x: x[:, 0], GRADIENTS)
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam mixes dtypes
        found, expected = (
            trained(tx, tx.init(params), own, params)[1]
            for tx in (
                gravac.adamw(rate, None, **dense, **settings),
                optax.adamw(rate, **settings),
            )
        )
    _harness.assert_close(found, expected, atol=100 * SUM_ROUNDING)


FALLING = optax.linear_schedule(0.125, 0.0, STEPS)
of_adam = lambda rate: gravac.OwnOptimizer(optax.adam(rate))
ADAM = lambda rate, **how: gravac.transform(memory=of_adam(rate), **how), optax.adam
NESTEROV = {"momentum": 0.8, "nesterov": True}
MOMENTUM = [functools.partial(x, **NESTEROV) for x in (gravac.sgd, optax.sgd)]


@pytest.mark.parametrize(
    ("ours", "theirs", "delay", "every"),
    [
        pytest.param(*ADAM, 1, 1, id="delay-adamw"),
        pytest.param(*MOMENTUM, 1, 1, id="delay-sgd", marks=pytest.mark.slow),
        pytest.param(*ADAM, 0, 4, id="rounds-adamw", marks=pytest.mark.slow),
        pytest.param(*MOMENTUM, 0, 4, id="rounds-sgd"),
    ],
)
def test_a_step_has_the_learning_rate_at_which_it_was_made(ours, theirs, delay, every):
    tx, alone = theirs(FALLING), lambda x: trained(tx, tx.init(PARAMS), x)[0][0]
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam mixes dtypes
        each = jax.vmap(alone, in_axes=1)(GRADIENTS)
    when = {"delay": delay, "every": every}
    late = ours(FALLING, compress=COMPRESS, send=gravac.Dense(), **when)

    def train(state, gradients):
        # The flush comes where the schedule has ended at 0.
        return gravac.flush(late, *trained(late, state, gradients)[0])[0]

    found = _harness.on_all_replicas(train, late, 1)(GRADIENTS)
    expected = jax.tree.map(lambda x: x.mean(0), each)
    _harness.assert_close(at(found, 0), expected, atol=1e-6)
