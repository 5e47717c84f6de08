"""Memories with momentum in a whole optimizer, clips, and recipes."""

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
PMEAN = optax.stateless(lambda grads, params: jax.lax.pmean(grads, "data"))


def updates_of(exchange, *others, how="shard_map", gradients=GRADIENTS):
    return _harness.trajectory(optax.chain(exchange, *others), PARAMS, how)(gradients)


def assert_near(received, expected, scale=10):
    for x, y in zip(jax.tree.leaves(received), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=scale * _harness.SUM_ROUNDING)


@pytest.mark.parametrize(
    "how", _harness.choices(["shard_map", "vmap"], lambda x: x == "shard_map")
)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", ["aged", "literal", "none"])
def test_at_factor_1_it_is_dense_momentum(masking, nesterov, how):
    memory = gravac.Momentum(0.9, nesterov=nesterov, masking=masking)
    exchange = gravac.transform(
        compress=COMPRESS, memory=memory, controller=gravac.Fixed(1)
    )
    received, _ = updates_of(exchange, optax.scale(-0.1), how=how)
    trace = optax.trace(0.9, nesterov=nesterov)
    expected, _ = updates_of(PMEAN, trace, optax.scale(-0.1), how=how)
    assert_near(received, expected)


def test_a_dense_step_of_an_adaptive_run_is_one_of_dense_momentum():
    # The first two steps are dense: from an empty residual, both.
    controller = gravac.Scheduled(lambda step: jnp.where(step < 2, 1, 8), (1, 8))
    exchange = gravac.transform(compress=COMPRESS, momentum=0.9, controller=controller)
    received, states = updates_of(exchange)
    assert states[0].info.factor.tolist()[:3] == [1, 1, 8]
    expected, _ = updates_of(PMEAN, optax.trace(0.9))
    assert_near(at(received, slice(2)), at(expected, slice(2)))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [gravac.Momentum(), gravac.Adam()], ids=repr)
def test_all_ways_to_run_it_agree(memory):
    controller = _harness.Scripted((1, 4, 16))
    exchange = gravac.transform(compress=COMPRESS, memory=memory, controller=controller)
    expected, _ = updates_of(exchange)
    for how in ("shard_map unchecked", "pmap", "vmap"):
        received, _ = updates_of(exchange, how=how)
        assert_near(received, expected, scale=1000)  # sums are of N halves, or fused


@pytest.mark.parametrize("memory", [gravac.Momentum(), gravac.Adam()], ids=repr)
def test_a_skipped_step_leaves_every_memory_as_it_was(memory):
    bad = jax.tree.map(np.copy, GRADIENTS)
    bad["w"][5, 2, 3, 3] = np.nan
    bad["b"][9, 0, 1] = np.inf
    exchange = gravac.transform(
        compress=COMPRESS, memory=memory, controller=_harness.Scripted((1, 4))
    )
    updates, (states,) = updates_of(exchange, gradients=bad)
    for step in (5, 9):
        assert not any(np.any(x) for x in jax.tree.leaves(at(updates, step)))
        before, after = at(states, step - 1), at(states, step)
        assert_same((after.local, after.dense), (before.local, before.dense))


def test_adam_alone_and_dense_is_that_of_optax():
    exchange = gravac.transform(
        axis_name=None,
        compress=COMPRESS,
        memory=gravac.Adam(),
        controller=gravac.Fixed(1),
    )
    adam = optax.scale_by_adam()
    params = jax.tree.map(jnp.asarray, PARAMS)
    ours, theirs = exchange.init(params), adam.init(params)
    step = jax.jit(exchange.update)
    for i in range(STEPS):
        grads = at(GRADIENTS, (i, 0))
        received, ours = step(grads, ours)
        with jax.numpy_dtype_promotion("standard"):
            expected, theirs = adam.update(grads, theirs)
        assert_near(received, expected, scale=100)


@pytest.mark.parametrize(
    ("memory", "floats", "dense_floats"),
    [
        (gravac.NoMemory(), 0, 0),
        (gravac.Residual(), 1, 0),
        (gravac.Momentum(), 2, 1),
        (gravac.Adam(), 3, 2),
    ],
    ids=repr,
)
def test_a_memory_costs_what_it_says(memory, floats, dense_floats):
    n, m = 1000, 100
    weight = lambda tree: sum(x.size for x in jax.tree.leaves(tree) if x.size > 1)
    assert weight(jax.eval_shape(lambda: memory.init(n))) == floats * n
    assert weight(jax.eval_shape(lambda: memory.init_dense(m))) == dense_floats * m
    doc = type(memory).__doc__
    assert not floats or f"{4 * floats} bytes of state per compressed param" in doc
    assert not dense_floats or f"{4 * dense_floats} per other parameter" in doc
    for x in jax.tree.leaves((memory.init(n), memory.init_dense(m))):
        assert x.dtype in (np.float32, np.int32)


def test_masking_needs_entries_that_are_sent_as_they_are():
    with pytest.raises(ValueError, match="use masking='none'"):
        gravac.transform(
            memory=gravac.Momentum(masking="aged"), exchange=gravac.LowRank()
        )
    gravac.transform(momentum=0.9, exchange=gravac.LowRank())


# Two momenta


MESH = _harness.make_mesh()
TWICE = {
    "sgd": (gravac.Momentum(), optax.sgd(0.1, momentum=0.9)),
    "trace": (gravac.Momentum(), optax.trace(0.9)),
    "trace after adam": (gravac.Adam(), optax.trace(0.9)),
    "adamw": (gravac.Adam(), optax.adamw(0.1)),
    "deep": (gravac.Momentum(), optax.chain(optax.identity(), optax.sgd(0.1, 0.9))),
}


def test_a_second_momentum_is_seen_in_chains_of_chains_and_with_names():
    exchange, sgd = gravac.transform(momentum=0.9, compress=True), optax.sgd(0.1, 0.9)
    first = optax.chain(exchange, optax.identity())
    for seen in (
        lambda: gravac.init(optax.chain(first, sgd), PARAMS, MESH),
        lambda: gravac.guard(optax.chain(first, sgd)).init(PARAMS),
        lambda: gravac.init(
            optax.named_chain(("a", exchange), ("b", sgd)), PARAMS, MESH
        ),
    ):
        with pytest.raises(ValueError, match=r"keeps a .* of its own"):
            seen()


def optimizer(memory, other):
    return optax.chain(gravac.transform(memory=memory, compress=True), other)


@pytest.mark.parametrize("name", TWICE)
def test_a_second_momentum_is_refused_where_it_can_be_seen(name):
    tx = optimizer(*TWICE[name])
    state = tx.init(PARAMS)
    for seen in (
        lambda: gravac.place((PARAMS, state), MESH),
        lambda: gravac.init(tx, PARAMS, MESH),
        lambda: gravac.guard(tx).init(PARAMS),
    ):
        with pytest.raises(ValueError, match=r"keeps a .* of its own"):
            seen()


@pytest.mark.parametrize(
    ("memory", "other"),
    [
        (gravac.Momentum(), optax.sgd(0.1)),
        (gravac.Residual(), optax.sgd(0.1, momentum=0.9)),
        (gravac.Residual(), optax.adamw(0.1)),
        (gravac.Momentum(masking="none"), optax.adamw(0.1, b1=0.0)),
        (gravac.Adam(), optax.scale_by_learning_rate(0.1)),
    ],
    ids=["momentum", "sgd", "adamw", "no b1", "adam"],
)
def test_one_momentum_is_allowed(memory, other):
    gravac.init(optimizer(memory, other), PARAMS, MESH)


def test_the_momentum_of_another_optimizer_is_none_of_ours():
    one, other = optimizer(gravac.Momentum(), optax.sgd(0.1)), optax.sgd(0.1, 0.9)
    gravac.place((one.init(PARAMS), other.init(PARAMS)), MESH)


# Clips


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


def test_a_bound_that_nothing_reaches_changes_no_bit():
    recipe = {"compress": COMPRESS, "controller": gravac.Fixed(4)}
    expected = updates_of(gravac.transform(**recipe))
    for clip in (gravac.ClipByGlobalNorm(1e6), gravac.ClipByValue(1e6)):
        assert_same(updates_of(gravac.transform(clip=clip, **recipe)), expected)


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
    for clip in (gravac.ClipByGlobalNorm(1.0), gravac.ClipByValue(1.0)):
        tx = gravac.transform(
            axis_name=None, compress=COMPRESS, clip=clip, controller=gravac.Fixed(4)
        )
        updates, state = jax.jit(tx.update)(grads, tx.init(grads))
        assert not bool(state.info.is_finite)
        assert not any(x.any() for x in jax.tree.leaves(updates))


# The recipe


def test_the_recipe_is_the_papers_parts():
    recipe = gravac.dgc(
        factor=64, max_norm=1.0, warm_up_steps=6, weight_decay=0.01, compress=COMPRESS
    )
    parts = gravac.transform(
        compress=COMPRESS,
        compressor=gravac.SampledTopK(),
        clip=gravac.ClipByGlobalNorm(1.0),
        weight_decay=0.01,
        memory=gravac.Momentum(0.9, masking="literal"),
        controller=gravac.warm_up(6, factors=(4, 16, 64)),
        bucket_bytes=1,
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
    assert factors == [4] * 3 + [16] * 3 + [64] * 6


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
        runs = [descent(tx) for tx in (ours, theirs)]
    assert_near(*runs, scale=100)


def descent(tx):
    """Params step by step, from ones, with the gradients of one replica."""
    params = jax.tree.map(lambda x: jnp.ones_like(x), PARAMS)
    state, step, story = tx.init(params), jax.jit(tx.update), []
    for i in range(STEPS):
        updates, state = step(at(GRADIENTS, (i, 0)), state, params)
        params = optax.apply_updates(params, updates)
        story.append(params)
    return story


def test_adamw_takes_a_compressor_in_place_of_low_rank():
    matrix = {"w": jnp.zeros((256, 256))}

    def payload_bytes(tx):
        _, state = jax.jit(tx.update)(matrix, tx.init(matrix), matrix)
        return float(optax.tree.get(state, "payload_bytes"))

    fixed = {"axis_name": None, "controller": gravac.Fixed(12.5)}
    for given, exchange in (
        ({"compressor": gravac.TopK()}, gravac.AllGather(gravac.TopK())),
        ({}, gravac.LowRank(values=gravac.BFloat16())),
    ):
        plain = gravac.transform(exchange=exchange, **fixed)
        tx = gravac.adamw(1e-3, axis_name=None, **given)
        assert payload_bytes(tx) == payload_bytes(plain)


# What is wrong


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: gravac.Momentum(1.0), ValueError, "`decay` must be at least 0"),
        (lambda: gravac.Momentum(nesterov="no"), TypeError, "`nesterov` must be True"),
        (lambda: gravac.Momentum(masking="some"), ValueError, "`masking` must be"),
        (lambda: gravac.Adam(eps=0), ValueError, "`eps` must be a finite number above"),
        (lambda: gravac.Adam(b2=2), ValueError, "`b2` must be at least 0"),
        (lambda: gravac.ClipByGlobalNorm(0), ValueError, "leave `clip` out"),
        (lambda: gravac.ClipByValue(np.inf), ValueError, "leave `clip` out"),
        (lambda: gravac.transform(clip=1.0), TypeError, "`clip` must be a Clip"),
        (lambda: gravac.transform(weight_decay=-1), ValueError, "`weight_decay` must"),
        (lambda: gravac.adamw(1.0, momentum=0.9), TypeError, "Adam for its memory"),
        (lambda: gravac.warm_up(-1), ValueError, "`steps` must be a whole number"),
        (lambda: gravac.warm_up(10, 100), TypeError, "`factors` must be several"),
        (lambda: gravac.dgc(factor="x"), TypeError, "`factor` must be a number"),
        (lambda: gravac.by_rank(PARAMS, 4), TypeError, "`ranks` must be several"),
        (lambda: gravac.Scheduled(100), TypeError, "`schedule` must be a function"),
        (
            lambda: gravac.transform(momentum=0.9, memory=gravac.Residual()),
            TypeError,
            "give `momentum` or `memory`",
        ),
    ],
)
def test_a_bad_argument_is_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_decay_needs_the_params():
    tx = gravac.transform(axis_name=None, compress=COMPRESS, weight_decay=0.1)
    grads = at(GRADIENTS, (0, 0))
    with pytest.raises(ValueError, match="uses the params, and `update` was given"):
        tx.update(grads, tx.init(grads))


def test_one_huge_gradient_does_not_end_adam():
    memory = gravac.Adam()
    state = memory.init(2)
    for size in (1e20, 1.0, 1.0):
        added, state = memory.compensate(jnp.array([size, 0.0]), state)
        state = memory.retain(added * 0, added, state)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((added, state)))


def test_no_name_stands_for_two_things_in_a_state():
    for memory in (gravac.Residual(), gravac.Momentum(), gravac.Adam()):
        state = gravac.transform(memory=memory, compress=COMPRESS).init(PARAMS)
        for name in gravac.StepInfo._fields:
            optax.tree.get(state, name)
