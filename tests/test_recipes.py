"""Clips and weight decay before the exchange, and recipes that are whole optimizers."""

import functools

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, N, assert_same, at

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
    dense = {"compress": COMPRESS, "controller": gravac.Fixed(1)}
    received, _ = updates_of(gravac.transform(clip=clip, **dense))
    scale = np.minimum(1, bound * np.sqrt(N) / norms)
    assert 0 < (scale < 1).mean() < 1
    for name, x in GRADIENTS.items():
        shares = scale.reshape(*scale.shape, *[1] * (x.ndim - 2))
        np.testing.assert_allclose(received[name], (x * shares).mean(1), atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    _harness.choices(
        [gravac.ClipByGlobalNorm, gravac.ClipByValue],
        lambda x: x is gravac.ClipByGlobalNorm,
    ),
)
def test_a_bound_that_nothing_reaches_changes_no_bit(kind):
    recipe = {"compress": COMPRESS, "controller": gravac.Fixed(4)}
    recipe["exchange"] = gravac.Quantized(32)
    expected = updates_of(gravac.transform(**recipe))
    assert_same(updates_of(gravac.transform(clip=kind(1e6), **recipe)), expected)


def test_every_entry_is_clipped_by_value():
    clip = gravac.ClipByValue(0.25)
    recipe = {"compress": COMPRESS, "controller": gravac.Fixed(1)}
    received, _ = updates_of(gravac.transform(clip=clip, **recipe))
    for name, x in GRADIENTS.items():
        expected = np.clip(x, -0.5, 0.5).mean(1)
        np.testing.assert_allclose(received[name], expected, atol=1e-6)


@pytest.mark.parametrize("size", [1e20, 1e38])
def test_a_norm_beyond_float32_is_clipped_and_not_lost(size):
    grads = {"b": np.zeros(5, np.float32), "w": np.full((8, 8), size, np.float32)}
    tx = gravac.transform(
        axis_name=None,
        compress=COMPRESS,
        clip=gravac.ClipByGlobalNorm(1.0),
        controller=gravac.Fixed(1),
    )
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    assert float(optax.tree.norm(updates)) == pytest.approx(1, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_not_clipped_away():
    grads = jax.tree.map(np.copy, at(GRADIENTS, (0, 0)))
    grads["w"][0, 0] = np.inf
    parts = {"exchange": gravac.Quantized(32), "controller": gravac.Fixed(1)}
    for clip in (gravac.ClipByGlobalNorm(1.0), gravac.ClipByValue(1.0)):
        tx = gravac.transform(axis_name=None, compress=COMPRESS, clip=clip, **parts)
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
    recipe = gravac.dgc(
        factor=16, max_norm=1.0, warm_up_steps=6, weight_decay=0.01, compress=COMPRESS
    )
    parts = gravac.transform(
        compress=COMPRESS,
        compressor=gravac.SampledTopK(),
        clip=gravac.ClipByGlobalNorm(1.0),
        weight_decay=0.01,
        memory=gravac.Momentum(0.9, masking=True),
        controller=gravac.warm_up(6, factors=(4, 16)),
    )
    stories = []
    for exchange in (recipe, parts):

        def step(params, opt_state, batch, exchange=exchange):
            mine = jax.tree.map(lambda x: x[0], batch)
            updates, opt_state = exchange.update(mine, opt_state, params)
            params = optax.apply_updates(params, updates)
            return params, opt_state, optax.tree.get(opt_state, "StepInfo")

        run = gravac.simulate(step, N)
        state = gravac.place((PARAMS, exchange.init(PARAMS)), N)
        story = []
        for i in range(STEPS):
            *state, info = run(*state, at(GRADIENTS, i))
            story.append(jax.tree.map(np.asarray, (state[0], info)))
        stories.append(story)
    assert_same(*stories)
    factors = [float(info.factor) for _, info in stories[0]]
    assert factors == [4] * 6 + [16] * 6


def test_what_the_recipe_is_given_takes_precedence():
    exchange = gravac.LeaderIndices()
    tx = gravac.dgc(axis_name=None, exchange=exchange, controller=gravac.GraVAC())
    state = tx.init({"w": jnp.zeros((256, 256))})
    assert optax.tree.get(state, "agreement") == 1
    assert state.info.gains.shape == (len(gravac.GraVAC().ladder),)


def test_adamw_alone_and_dense_is_that_of_optax():
    rate = optax.linear_schedule(0.1, 0.01, STEPS)
    settings = {"b1": 0.8, "b2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
    theirs = optax.adamw(rate, **settings)
    ours = gravac.adamw(
        rate,
        axis_name=None,
        compress=COMPRESS,
        exchange=gravac.AllGather(),
        controller=gravac.Fixed(1),
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
    whole = {"exchange": gravac.DenseMean(), "controller": gravac.Fixed(1)}
    tx = gravac.sgd(0.1, momentum=0.8, nesterov=True, compress=COMPRESS, **whole)
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
        FALLING,
        compress=COMPRESS,
        delay=delay,
        exchange=gravac.DenseMean(),
        controller=gravac.Every(every, gravac.Fixed(1)),
    )

    def train(state, gradients):
        # The flush comes where the schedule has ended at 0.
        return gravac.flush(late, *trained(late, state, gradients))[0]

    found = _harness.on_all_replicas(train, late, 1)(GRADIENTS)
    expected = jax.tree.map(lambda x: x.mean(0), each)
    for name in PARAMS:
        received = np.asarray(found[name])
        np.testing.assert_allclose(received[0], expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "given", "exchange"),
    [
        pytest.param(gravac.sgd, {}, gravac.QuantizedAllReduce(), id="sgd"),
        pytest.param(gravac.adamw, {}, gravac.QuantizedAllReduce(), id="adamw"),
        pytest.param(
            gravac.sgd,
            {"compressor": gravac.TopK()},
            gravac.AllGather(gravac.TopK()),
            id="sgd-compressor",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            gravac.adamw,
            {"exchange": gravac.LowRank()},
            gravac.LowRank(),
            id="adamw-exchange",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_bits_go_both_ways_unless_another_exchange_is_given(
    recipe, given, exchange
):
    matrix = {"w": jnp.zeros((64, 64))}

    def payload_bytes(tx):
        _, state = jax.jit(tx.update)(matrix, tx.init(matrix), matrix)
        return float(optax.tree.get(state, "payload_bytes"))

    controller = gravac.Fixed(16)
    plain = gravac.transform(None, exchange=exchange, controller=controller)
    tx = recipe(1e-3, None, controller=controller, **given)
    assert payload_bytes(tx) == payload_bytes(plain)


# What is refused. ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gravac.Momentum(1.0), "`decay` must be at least 0"),
        (lambda: gravac.Momentum(nesterov="no"), "`nesterov` must be True"),
        (lambda: gravac.Momentum(masking="some"), "`masking` must be True"),
        (lambda: gravac.adamw(1.0, eps=0), "`eps` must be a finite number above"),
        (lambda: gravac.adamw(1.0, b2=2), "`b2` must be at least 0"),
        (lambda: gravac.ClipByGlobalNorm(0), "leave `clip` out"),
        (lambda: gravac.ClipByValue(np.inf), "leave `clip` out"),
        (lambda: gravac.transform(clip=1.0), "`clip` must be a Clip"),
        (lambda: gravac.transform(weight_decay=-1), "`weight_decay` must"),
        (lambda: gravac.adamw(1.0, momentum=0.9), "Adam for its memory"),
        (lambda: gravac.sgd(1.0, momentum=1.5), "`momentum` must be at least 0"),
        (lambda: gravac.sgd(1.0, memory=gravac.NoMemory()), "momentum for its memory"),
        (lambda: gravac.warm_up(-1), "`steps` must be a whole number"),
        (lambda: gravac.warm_up(10, 100), "`factors` must be several"),
        (lambda: gravac.dgc(factor="x"), "`factor` must be a number"),
        (lambda: gravac.by_rank(PARAMS, 4), "`ranks` must be several"),
        (lambda: gravac.Scheduled(100), "`schedule` must be a function"),
        (
            lambda: gravac.transform(momentum=0.9, memory=gravac.Residual()),
            "give `momentum` or `memory`",
        ),
    ],
)
def test_a_wrong_argument_is_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
