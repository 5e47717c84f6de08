"""Clips and weight decay before the exchange, and recipes that are whole optimizers."""

import functools

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, ROWS, N, assert_same, at

import gravac_jax as gravac

STEPS = 12
GRADIENTS = _harness.gaussian_gradients(STEPS)


def updates_of(tx):
    return _harness.trajectory(tx, PARAMS, "vmap")(GRADIENTS)


# Clips. ---------------------------------------------------------------------------


def own_norms(gradients):
    flat = np.concatenate([x.reshape(*x.shape[:2], -1) for x in gradients.values()], 2)
    return np.sqrt(np.square(flat.astype(np.float64)).sum(2))


def test_each_replica_is_clipped_at_sqrt_n_of_the_bound():
    norms = own_norms(GRADIENTS)
    bound = float(np.median(norms)) / np.sqrt(N)
    clip = gravac.ClipByGlobalNorm(bound)
    tx = gravac.transform(compress=COMPRESS, send=gravac.Dense(), clip=clip)
    received, _ = updates_of(tx)
    scale = np.minimum(1, bound * np.sqrt(N) / norms)
    assert 0 < (scale < 1).mean() < 1
    for name, x in GRADIENTS.items():
        shares = scale.reshape(*scale.shape, *[1] * (x.ndim - 2))
        np.testing.assert_allclose(received[name], (x * shares).mean(1), atol=1e-6)


def test_a_bound_that_nothing_reaches_changes_no_bit():
    tx = lambda **others: gravac.transform(compress=COMPRESS, send=ROWS, **others)
    clip = gravac.ClipByGlobalNorm(1e6)
    assert_same(updates_of(tx(clip=clip)), updates_of(tx()))


@pytest.mark.parametrize("size", [1e20, 1e38])
def test_a_norm_beyond_float32_is_clipped_and_not_lost(size):
    grads = {"b": np.zeros(5, np.float32), "w": np.full((8, 8), size, np.float32)}
    clip = gravac.ClipByGlobalNorm(1.0)
    tx = gravac.transform(None, compress=COMPRESS, clip=clip, send=gravac.Dense())
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    assert float(optax.tree.norm(updates)) == pytest.approx(1, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_not_clipped_away():
    grads = jax.tree.map(np.copy, at(GRADIENTS, (0, 0)))
    grads["w"][0, 0] = np.inf
    clip = gravac.ClipByGlobalNorm(1.0)
    tx = gravac.transform(None, compress=COMPRESS, clip=clip, send=gravac.Dense())
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    assert not bool(state.info.is_finite)
    assert not any(x.any() for x in jax.tree.leaves(updates))


def test_decay_needs_the_params():
    tx = gravac.transform(axis_name=None, compress=COMPRESS, weight_decay=0.1)
    grads = at(GRADIENTS, (0, 0))
    with pytest.raises(ValueError, match="uses the params, and `update` was given"):
        tx.update(grads, tx.init(grads))


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
    stories = []
    for tx in (recipe, parts):

        def step(params, opt_state, batch, tx=tx):
            mine = jax.tree.map(lambda x: x[0], batch)
            updates, opt_state = tx.update(mine, opt_state, params)
            params = optax.apply_updates(params, updates)
            return params, opt_state, optax.tree.get(opt_state, "StepInfo")

        run = gravac.simulate(step, N)
        state = gravac.place((PARAMS, tx.init(PARAMS)), N)
        story = []
        for i in range(STEPS):
            *state, info = run(*state, at(GRADIENTS, i))
            story.append(jax.tree.map(np.asarray, (state[0], info)))
        stories.append(story)
    assert_same(*stories)
    assert [int(info.rung) for _, info in stories[0]] == [0] * 6 + [1] * 6


def test_what_the_recipe_is_given_takes_precedence():
    send, memory = gravac.GraVAC(), gravac.Residual()
    found, expected = (
        make(None, send=send, memory=memory).init({"w": jnp.zeros((256, 256))})
        for make in (gravac.dgc, gravac.transform)
    )
    assert_same(found, expected)


def test_adamw_alone_and_dense_is_that_of_optax():
    rate = optax.linear_schedule(0.1, 0.01, STEPS)
    settings = {"b1": 0.8, "b2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
    theirs = optax.adamw(rate, **settings)
    ours = gravac.adamw(
        rate,
        axis_name=None,
        compress=COMPRESS,
        send=gravac.Dense(),
        **settings,
    )
    with jax.numpy_dtype_promotion("standard"):
        mine, expected = descent(ours), descent(theirs)
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=100 * _harness.SUM_ROUNDING)


def descent(tx):
    """Return the params of every step, from ones, with gradients of one replica."""
    params = jax.tree.map(lambda x: jnp.ones_like(x), PARAMS)
    state, step, story = tx.init(params), jax.jit(tx.update), []
    for i in range(STEPS):
        updates, state = step(at(GRADIENTS, (i, 0)), state, params)
        params = optax.apply_updates(params, updates)
        story.append(params)
    return story


def test_sgd_that_sends_everything_is_that_of_optax_of_the_mean():
    tx = gravac.sgd(0.1, momentum=0.8, nesterov=True, send=gravac.Dense())
    received, _ = _harness.trajectory(tx, PARAMS, "vmap")(GRADIENTS)
    theirs = optax.sgd(0.1, momentum=0.8, nesterov=True)
    update = lambda state, x: theirs.update(x, state)[::-1]
    mean = jax.tree.map(lambda x: x.mean(1), GRADIENTS)
    _, expected = jax.lax.scan(update, theirs.init(PARAMS), mean)
    for x, y in zip(jax.tree.leaves(received), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=10 * _harness.SUM_ROUNDING)


FALLING = optax.linear_schedule(0.125, 0.0, STEPS)


def trained(tx, state, gradients):
    """Return the params and the state after all steps."""

    def step(carry, x):
        params, state = carry
        updates, state = tx.update(x, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (PARAMS, state), gradients)[0]


ADAM = functools.partial(gravac.adamw, weight_decay=0.0), optax.adam
MOMENTUM = gravac.sgd, functools.partial(optax.sgd, momentum=0.9)


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
    tx, alone = theirs(FALLING), lambda x: trained(tx, tx.init(PARAMS), x)[0]
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam mixes dtypes
        each = jax.vmap(alone, in_axes=1)(GRADIENTS)
    late = ours(
        FALLING, compress=COMPRESS, delay=delay, every=every, send=gravac.Dense()
    )

    def train(state, gradients):
        # The flush comes where the schedule has ended at 0.
        return gravac.flush(late, *trained(late, state, gradients))[0]

    found = _harness.on_all_replicas(train, late, 1)(GRADIENTS)
    expected = jax.tree.map(lambda x: x.mean(0), each)
    for name in PARAMS:
        received = np.asarray(found[name])
        np.testing.assert_allclose(received[0], expected[name], rtol=0, atol=1e-6)


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


# What is refused. ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: gravac.Momentum(1.0),
            "`decay` must be a number of at least 0 and below",
        ),
        (lambda: gravac.Momentum(nesterov="no"), "`nesterov` must be a bool"),
        (lambda: gravac.Momentum(masking="some"), "`masking` must be a bool"),
        (lambda: gravac.adamw(1.0, eps=0), "`eps` must be a number above 0"),
        (
            lambda: gravac.adamw(1.0, b2=2),
            "`b2` must be a number of at least 0 and below",
        ),
        (lambda: gravac.ClipByGlobalNorm(0), "leave `clip` out"),
        (lambda: gravac.transform(clip=1.0), "`clip` must be a Clip"),
        (lambda: gravac.transform(weight_decay=-1), "`weight_decay` must"),
        (lambda: gravac.adamw(1.0, memory=gravac.Momentum()), "adamw has a memory"),
        (lambda: gravac.sgd(1.0, momentum=1.5), "`momentum` must be a number of at"),
        (lambda: gravac.sgd(1.0, memory=gravac.Residual()), "sgd has a memory"),
        (
            lambda: gravac.diloco(optax.sgd(1.0), memory=gravac.Residual()),
            "diloco has a memory",
        ),
        (lambda: gravac.dgc(warm_up_steps=-1), "`warm_up_steps` must be a whole"),
        (
            lambda: gravac.dgc(send=gravac.Bits(2), warm_up_steps=9),
            "`warm_up_steps` lead to a gravac.TopK",
        ),
    ],
)
def test_a_wrong_argument_is_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
