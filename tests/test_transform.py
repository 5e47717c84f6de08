"""The whole transform keeps its promises in every way to run it."""

import dataclasses
import functools
import re

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, N, Scripted, assert_same, make_mesh, trajectory

import gravac_jax as gravac
from gravac_jax._step import bucketing

STEPS = 24
SIZE, DENSE_SIZE = PARAMS["w"].size, PARAMS["b"].size
LADDER = gravac.TopK.geometric(4, 16, 4, values="float32")
ENTRIES = (64, 16, 4)  # at each rung
FEW_BITS = (gravac.Dense(), gravac.Bits(8), gravac.Bits(2))


def draw(scale):
    """Return local gradients `[STEPS, N, ...]`; 4, 16 or all entries are large."""
    rng = np.random.default_rng(0)
    w = 0.01 * rng.normal(size=(STEPS, N, SIZE))
    for step, x in enumerate(w):
        x[:, : (4, 16, SIZE)[step % 3]] += rng.choice([-1, 1], (N, 1))
    w = rng.permuted(w, axis=2).reshape(STEPS, N, 8, 8)
    b = rng.normal(size=(STEPS, N, DENSE_SIZE))
    return {"b": scale(b).astype(np.float32), "w": scale(w).astype(np.float32)}


FLOATS = draw(lambda x: x)
INTEGERS = draw(lambda x: np.round(100 * x))

# `spoil` makes these gradients not finite: step, replica, leaf and value.
BAD = ((5, 2, "w", np.nan), (10, 0, "b", np.inf), (15, 3, "w", -np.inf))
BAD += ((16, 1, "b", np.nan),)
BAD_STEPS = [step for step, *_ in BAD]


def spoil(gradients):
    gradients = jax.tree.map(np.copy, gradients)
    for step, replica, leaf, value in BAD:
        gradients[leaf][step, replica].flat[3] = value
    return gradients


def left_out(gradients):
    """Return them with zeros in place of those that `spoil` makes bad."""
    gradients = jax.tree.map(np.copy, gradients)
    for step, replica, *_ in BAD:
        for x in gradients.values():
            x[step, replica] = 0
    return gradients


def times(seconds=np.nan, lag=1):
    """Return `update`'s arguments for step times `[STEPS, N]`, `lag` steps late."""
    spread = lambda x: np.broadcast_to(x, (STEPS, N))
    return {
        "step_seconds": spread(np.float32(seconds)),
        "steps_ago": spread(np.int32(lag)),
    }


def sending(send, axis_name="data"):
    return gravac.transform(axis_name, compress=COMPRESS, send=send)


GRAVAC = gravac.GraVAC(LADDER, epsilon=0.81, window=1000)
SENDS = {
    "scripted": Scripted(LADDER),
    "gravac": GRAVAC,
    "fastest": gravac.Fastest(LADDER),
}


@functools.cache
def compiled(recipe, how):
    return trajectory(sending(SENDS[recipe]), PARAMS, how)


@functools.cache
def story(recipe, how):
    """Return gradients, updates and states of a run through every branch."""
    gradients = spoil(FLOATS)
    updates, states = compiled(recipe, how)(gradients, **times())
    assert set(states.info.rung.tolist()) == {0, 1, 2}
    return gradients, updates, states


def test_a_gain_stays_until_its_rung_is_taken_again():
    info, kept = story("scripted", "vmap")[2].info, np.zeros(3)
    for rung, gain, gains in zip(info.rung, info.gain, info.gains, strict=True):
        kept[rung] = gain
        np.testing.assert_allclose(gains, kept, rtol=1e-6)


def residuals(states):
    """Return every replica's residual after and before each step."""
    kept = states.local.memory[0].residual
    return kept, np.concatenate([np.zeros_like(kept[:1]), kept[:-1]])


by_recipe = pytest.mark.parametrize(
    "recipe", _harness.choices(["scripted", "gravac"], lambda x: x == "scripted")
)


# The same on all replicas and in every way to run it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "how"), [("scripted", "pmap"), ("gravac", "shard_map unchecked")]
)
def test_pmap_and_both_shard_maps_give_the_same_bits(recipe, how):
    assert_same(story(recipe, how), story(recipe, "shard_map"))


def test_in_200_adaptive_steps_of_one_program_replicas_stay_bit_identical():
    mesh = make_mesh()
    tx = sending(dataclasses.replace(GRAVAC, window=2))
    tx = optax.chain(tx, optax.sgd(0.02, momentum=0.9))
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["w"] + p["b"].sum()) - x) ** 2)
    rng = np.random.default_rng(0)
    params, opt_state = gravac.place((PARAMS, tx.init(PARAMS)), mesh)
    step = gravac.data_parallel(_harness.plain_step(tx, loss), mesh)
    rungs = set()
    with _harness.compilations() as names:
        for i in range(200):
            batch = rng.normal(size=(2 * N, 8)) * rng.choice([0.1, 1, 10], 8)
            told = {"step_seconds": np.float32(0.1 + i / 1000 if i % 2 else np.nan)}
            params, opt_state, _ = step(params, opt_state, np.float32(batch), **told)
            rungs.add(int(opt_state[0].info.rung))
    assert len(names) == 1
    assert len(rungs) > 1
    assert bool(opt_state[0].controller.is_measured)
    shared = jax.tree.map(lambda x: x.is_fully_replicated, (params, opt_state))
    assert sum(jax.tree.leaves(shared)) > len(PARAMS)
    jax.tree.map(_harness.agreed, (params, opt_state))  # raises where replicas differ


# Conservation


@_harness.in_both_ways
@by_recipe
def test_every_entry_is_sent_or_kept_and_the_mean_is_of_the_sent_ones(recipe, how):
    _, updates, states = story(recipe, how)
    gradients = left_out(FLOATS)
    kept, before = residuals(states)
    for step, rung in enumerate(states.info.rung):
        compensated = gradients["w"][step].reshape(N, SIZE) + before[step]
        is_sent = (kept[step] == 0) & (compensated != 0)
        if step not in BAD_STEPS:  # else what a replica holds may be less
            # In a bucket this small the threshold misses by one entry at most.
            sent = is_sent.sum(axis=1)
            assert (sent <= ENTRIES[rung]).all()
            assert (sent >= ENTRIES[rung] - (rung > 0)).all()
        assert (kept[step] == np.where(is_sent, 0, compensated)).all()
        sent = np.where(is_sent, compensated, 0)
        mean = functools.reduce(np.add, sent) / np.float32(N)  # in replica order
        # Only the mean of a dense step may add in another order.
        bound = _harness.SUM_ROUNDING * np.abs(sent).sum(axis=0) if rung == 0 else 0
        assert (np.abs(updates["w"][step].ravel() - mean) <= bound).all()
        own = gradients["b"][step]  # dense at every rung
        off = np.abs(updates["b"][step] - own.mean(0))
        assert (off <= _harness.SUM_ROUNDING * np.abs(own).sum(0)).all()


@pytest.mark.parametrize(
    "options", [{"compress": False}, {"send": gravac.Dense()}], ids=str
)
def test_what_is_not_compressed_is_averaged_bit_for_bit(options):
    tx = gravac.transform(**{"compress": COMPRESS, "send": _harness.ROWS, **options})
    updates, states = trajectory(tx, PARAMS, "shard_map")(INTEGERS)
    assert_same(updates, jax.tree.map(lambda x: x.mean(axis=1), INTEGERS))
    assert (states.info.factor == 1).all()


@pytest.mark.parametrize(
    ("send", "sizes"),
    [
        (gravac.Dense(), (67, 2)),
        (gravac.Bits(2), (96, 2)),
        (gravac.Fastest(), (96, 2)),
        (gravac.TopK(10), (64, 5)),
        (gravac.LowRank(1), (64, 5)),
        (gravac.Fastest((gravac.Bits(2), gravac.TopK(64))), (64, 5)),
    ],
    ids=repr,
)
def test_few_bits_take_small_leaves_and_other_encodings_leave_them_dense(send, sizes):
    kernel, bias, scale = jnp.zeros((8, 8)), jnp.zeros(3), jnp.zeros(2)
    params = {"kernel": kernel, "bias": bias, "scale": scale}
    state = gravac.transform(None, send=send).init(params)
    assert tuple(x.size for x in jax.tree.leaves(state.local.memory)) == sizes


# One program


@functools.cache
def program(how, recipe="scripted"):
    return compiled(recipe, how).text(FLOATS, **times())


def test_all_replicas_take_the_rung_of_the_first():
    tx = sending(gravac.Scheduled(FEW_BITS, starts=(0, 10**6)))
    apart = np.arange(N, dtype=np.int32)[::-1] % len(FEW_BITS)
    states = jax.tree.map(lambda x: jnp.stack([x] * N), tx.init(PARAMS))
    states = states._replace(decided=jnp.asarray(apart))
    gradients = jax.tree.map(lambda x: jnp.asarray(x[0]), FLOATS)
    update = jax.vmap(lambda grads, state: tx.update(grads, state), axis_name="data")
    assert len(set(apart.tolist())) > 1
    # Branches stay branches, though each replica has a state of its own.
    jaxpr = jax.make_jaxpr(update)(gradients, states).jaxpr
    assert _harness.branches_of(jaxpr) == len(FEW_BITS)
    for _ in range(3):
        updates, states = jax.jit(update)(gradients, states)
        for x in jax.tree.leaves(updates):
            assert_same(x, jnp.stack([x[0]] * N))
    assert states.info.rung.tolist() == [apart[0]] * N


@pytest.mark.parametrize(
    ("recipe", "of_bucket", "of_gradient"),
    [
        ("scripted", 0, 0),
        pytest.param("gravac", 3, 0, marks=pytest.mark.slow),
        pytest.param("fastest", 0, 3, marks=pytest.mark.slow),
    ],
)
def test_each_rung_runs_its_own_network(recipe, of_bucket, of_gradient):
    # The energies of what is sent and of everything, and of each rung if the controller
    # looks at the bucket.
    energies = 4 * (2 + of_bucket)
    # Dense leaves; a count, two energies, a contrast, the rung, a loss; for each rung a
    # time with its count, and an energy if the controller looks at the gradient.
    figures = 4 * (DENSE_SIZE + 6 + 2 * len(LADDER) + of_gradient)
    assert sorted(_harness.collectives(program("shard_map", recipe))) == sorted(
        [
            ("all-reduce", "f32", 4 * SIZE + energies + figures, (0,)),
            # A gather would send so many figures N - 1 times.
            ("all-gather", "u16", 6 * ENTRIES[1] + 4 + energies, (1,)),
            ("all-reduce", "f32", figures, (1,)),
            ("all-gather", "u16", 6 * ENTRIES[2] + 4 + energies, (2,)),
            ("all-reduce", "f32", figures, (2,)),
        ]
    )


@_harness.in_both_ways
def test_a_step_never_calls_the_host(how):
    assert not re.search(r"callback|infeed|outfeed|\b(send|recv)\(", program(how))


# Time


def credited(rungs, seconds, lags):
    """Return the times that rungs should hear, `[STEPS, rungs]`; NaN if none.

    A time says how long the step took that ended 1 to 8 steps ago.
    """
    told = list(zip(np.broadcast_to(seconds, N), np.broadcast_to(lags, N), strict=True))
    expected = np.zeros((STEPS, len(LADDER)), np.float32)
    for step, heard in enumerate(expected):
        known = [
            (x, step - lag) for x, lag in told if x > 0 and 0 < lag <= min(step, 8)
        ]
        for rung in range(len(LADDER)):
            own = [x for x, measured in known if rungs[measured] == rung]
            heard[rung] = np.mean(own) if own else 0
    return expected


@pytest.mark.parametrize(
    ("how", "seconds", "lags"),
    [
        *[("shard_map", 2.0, lag) for lag in (1, 3, 8)],
        *[("shard_map", 2.0, lag) for lag in (9, 0, -1)],  # stale, and not yet over
        *[("shard_map", seconds, 1) for seconds in (np.nan, 0.0, -1.0)],
        *[(how, (1.0, 2.0, 4.0, 9.0), (1, 4, 2, 7)) for how in ("shard_map", "vmap")],
    ],
)
def test_a_time_is_credited_to_the_rung_that_caused_it(how, seconds, lags):
    _, states = compiled("scripted", how)(spoil(FLOATS), **times(seconds, lags))
    received, rungs = states.controller.measured_seconds, states.info.rung
    np.testing.assert_array_equal(received, credited(rungs, seconds, lags))


def test_a_time_without_its_step_measures_the_step_before():
    run = trajectory(sending(Scripted(FEW_BITS[::2])), PARAMS, "vmap")
    _, states = run(FLOATS, step_seconds=times(2.0)["step_seconds"])
    received, rungs = states.controller.measured_seconds, states.info.rung
    np.testing.assert_array_equal(received, credited(rungs, 2.0, 1)[:, :2])


# Bad steps, and empty ones


@_harness.in_both_ways
@by_recipe
def test_a_bad_gradient_is_left_out_and_the_others_go_on(recipe, how):
    _, updates, states = story(recipe, how)
    expected, expected_states = compiled(recipe, how)(left_out(FLOATS), **times())
    is_bad = np.isin(np.arange(STEPS), BAD_STEPS)
    assert (states.info.is_finite == ~is_bad).all()
    assert (states.info.bad_steps == np.cumsum(is_bad)).all()
    assert (states.steps == np.arange(STEPS) + 1).all()
    uncounted = lambda x: x._replace(info=x.info._replace(is_finite=0, bad_steps=0))
    assert_same(updates, expected)
    assert_same(uncounted(states), uncounted(expected_states))


FEW = (gravac.Dense(), gravac.TopK(8))
# What sends gradients of zeros, and what rounding may leave of the residual.
EMPTIED = {
    "Fastest": (gravac.Fastest(FEW), 0),
    "GraVAC": (gravac.GraVAC(FEW, window=2), 0),
    "Bits": (gravac.Bits(2), 1e-6),
}


@pytest.mark.parametrize("name", _harness.choices(EMPTIED, lambda x: x != "Fastest"))
def test_gradients_of_zero_deliver_the_residual_and_disturb_nothing(name):
    send, left = EMPTIED[name]
    # An entry is sent in three steps, until its last bit has arrived.
    zeros = lambda x: np.zeros((150, *x.shape[1:]), np.float32)
    around = lambda x: np.concatenate([x[:1], zeros(x), x[1:2]])
    gradients = jax.tree.map(around, FLOATS)
    updates, states = trajectory(sending(send), PARAMS, "vmap")(gradients)
    assert np.abs(residuals(states)[0][-2]).max() <= left
    for leaf, x in updates.items():
        np.testing.assert_allclose(x[:-1].sum(0), FLOATS[leaf][0].mean(0), atol=1e-5)
    assert ((states.info.gain >= 0) & (states.info.gain <= 1)).all()
    assert states.info.bad_steps[-1] == 0
    for x in jax.tree.leaves(_harness.at(states, -1)):
        assert not np.issubdtype(x.dtype, np.floating) or np.isfinite(x).all()


# Any pytree, any axis


def test_several_buckets_lose_nothing(monkeypatch):
    monkeypatch.setattr(bucketing, "MAX_ENTRIES", SIZE // 2)
    tx = gravac.transform(compress=True, send=LADDER[1])
    updates, states = trajectory(tx, PARAMS, "vmap")(INTEGERS)
    *buckets, _ = states.local.memory
    left = np.concatenate([x.residual for x in buckets], axis=-1)[-1]
    assert len(buckets) == 3
    assert np.any(left)
    total = lambda tree, axes: np.concatenate(
        [x.sum(axis=axes).ravel() for x in jax.tree.leaves(tree)]
    )
    assert (N * total(updates, 0) + left.sum(axis=0) == total(INTEGERS, (0, 1))).all()


@pytest.mark.parametrize("tree", [{}, {"empty": jnp.zeros((0, 3)), "none": None}])
def test_a_tree_without_entries_comes_back(tree):
    tx = gravac.transform(None, compress=True, send=_harness.ROWS)
    updates, state = jax.jit(tx.update)(tree, tx.init(tree))
    assert_same(updates, tree)
    assert int(state.steps) == 1


def test_alone_is_one_replica_on_a_mesh():
    alone, on_mesh = (sending(Scripted(FEW_BITS[::2]), x) for x in (None, "data"))
    run = trajectory(on_mesh, PARAMS, "shard_map", mesh=make_mesh((1,)))
    expected, expected_states = run(jax.tree.map(lambda x: x[:, :1], INTEGERS))

    def step(state, grads):
        updates, state = alone.update(grads, state)
        return state, (updates, state)

    gradients = jax.tree.map(lambda x: x[:, 0], INTEGERS)
    updates, states = jax.lax.scan(step, alone.init(PARAMS), gradients)[1]
    assert_same(updates, expected)
    local = jax.tree.map(lambda x: x[:, 0], expected_states.local)
    assert_same(states, expected_states._replace(local=local))


# As an Optax transformation


ALONE = sending(_harness.ROWS, None)
GRADIENTS = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), FLOATS)


@pytest.mark.parametrize(
    "memory", [gravac.Momentum(), gravac.OwnOptimizer(optax.sgd(0.1)), None], ids=repr
)
def test_fastest_chooses_unless_something_is_given(memory):
    given = gravac.transform(memory=memory, send=gravac.Fastest())
    assert_same(gravac.transform(memory=memory).init(PARAMS), given.init(PARAMS))


def test_init_needs_shapes_only():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert_same(ALONE.init(shapes), ALONE.init(PARAMS))


def test_a_state_may_be_donated_and_extra_arguments_are_ignored():
    extra = {"value": 1.0, "value_fn": lambda params: 0.0, "step": None}
    update = lambda grads, state: ALONE.update(grads, state, PARAMS, **extra)
    state = ALONE.init(PARAMS)
    expected = jax.jit(ALONE.update)(GRADIENTS, state)
    assert_same(jax.jit(update, donate_argnums=1)(GRADIENTS, state), expected)
    assert _harness.residual(state).is_deleted()


@pytest.mark.parametrize("compress", [True, COMPRESS])
def test_the_state_goes_through_map_params(compress):
    tx = gravac.transform(None, compress=compress)
    tx = optax.chain(tx, optax.sgd(0.1, momentum=0.9))
    for state in (tx.init(PARAMS), gravac.place(tx.init(PARAMS), N)):
        mapped = optax.tree.map_params(tx, lambda x: x + 1, state)
        assert_same(mapped[0], state[0])  # none of it has the params' shapes
        assert_same(mapped[1][0].trace, jax.tree.map(lambda x: x + 1, PARAMS))


def test_float16_saturates_where_the_exchange_outgrows_it():
    tx = gravac.transform(None, compress=True, send=gravac.TopK(4))
    grads = jnp.full(8, 60_000, jnp.float16)
    update = jax.jit(tx.update)
    state = tx.init(grads)
    for _ in range(10):
        updates, state = update(grads, state)
        assert bool(jnp.isfinite(updates).all())
    assert bool(jnp.isfinite(_harness.residual(state)).all())
    assert float(updates.max()) == float(jnp.finfo(jnp.float16).max)


@pytest.mark.parametrize(
    ("send", "dtype"),
    [
        (gravac.Fastest(FEW_BITS[:2]), np.float64),
        (gravac.Scheduled(FEW_BITS[:2], starts=(4,)), np.float32),
    ],
)
def test_it_works_with_64_bit_types_enabled(send, dtype, recwarn):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        rate = np.float64(0.1)  # as np.linspace makes it
        both = gravac.Momentum(rate), gravac.OwnOptimizer(optax.sgd(rate, 0.9))
        how = {"memory": both[dtype == np.float64], "weight_decay": rate}
        tx = gravac.transform(send=send, clip=gravac.ClipByGlobalNorm(rate), **how)
        step = lambda state, x, **told: tx.update(x[0], state, x[0], **told)[::-1]
        before, told = tx.init(jnp.ones(8, dtype)), {"step_seconds": jnp.float32(1)}
        warned = ["1 of 1 leaves of the params are float64" in str(x) for x in recwarn]
        before = gravac.place(before, 2)
        batch = jnp.ones((2, 8), dtype)
        after, _ = gravac.data_parallel(step, 2)(before, batch, **told)
        kinds = [[x.dtype for x in jax.tree.leaves(x)] for x in (before, after)]
    assert kinds[0] == kinds[1]
    assert sum(warned) == (dtype == np.float64)
    assert {x.name for x in kinds[0]} == {"bool", "float32", "int32", "uint32"}
