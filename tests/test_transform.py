"""The whole transform keeps its promises in every way to run it."""

import dataclasses
import functools
import re
import subprocess
import sys

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import (
    AXIS_TYPES,
    ROWS,
    SUM_ROUNDING,
    N,
    Scripted,
    agreed,
    assert_same,
    at,
    choices,
    collectives,
    compilations,
    in_both_ways,
    make_mesh,
    trajectory,
)

import gravac_jax as gravac
from gravac_jax import _buckets

STEPS = 24
SIZE, DENSE_SIZE = 64, 5
PARAMS = {"b": np.zeros(DENSE_SIZE, np.float32), "w": np.zeros((8, 8), np.float32)}
COMPRESS = {"b": False, "w": True}
LADDER = gravac.TopK.geometric(4, 16, 4, values="float32", indices="int32")
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
    step = np.arange(STEPS, dtype=np.int32)[:, None] - np.broadcast_to(lag, N)
    seconds = np.broadcast_to(np.float32(seconds), (STEPS, N))
    return {"step_seconds": seconds, "measured_step": step.astype(np.int32)}


def sending(send):
    return gravac.transform(compress=COMPRESS, send=send)


def sgd(tx):
    return optax.chain(tx, optax.sgd(0.5, momentum=0.5))


GRAVAC = gravac.GraVAC(LADDER, epsilon=0.9, window=1000, gain="norm", smoothing=1.0)
PMEAN = optax.stateless(lambda grads, params: jax.lax.pmean(grads, "data"))
RECIPES = {
    "scripted": sending(Scripted(LADDER)),
    "gravac": sending(GRAVAC),
    "fastest": sending(gravac.Fastest(LADDER)),
    "dense": sgd(sending(gravac.Dense())),
    "pmean": sgd(PMEAN),
}


@functools.cache
def compiled(recipe, how):
    return trajectory(RECIPES[recipe], PARAMS, how)


@functools.cache
def story(recipe, how):
    """Return gradients, updates and states of a run through every branch."""
    gradients = spoil(FLOATS)
    updates, states = compiled(recipe, how)(gradients, **times())
    assert set(states.info.rung.tolist()) == {0, 1, 2}
    return gradients, updates, states


def residuals(states):
    """Return every replica's residual after and before each step."""
    kept = states.local.memory[0].residual
    return kept, np.concatenate([np.zeros_like(kept[:1]), kept[:-1]])


by_recipe = pytest.mark.parametrize(
    "recipe", choices(["scripted", "gravac"], lambda x: x == "scripted")
)


# Dense


def test_dense_is_pmean_bit_for_bit_on_integers_and_near_it_on_floats():
    received, _ = compiled("dense", "shard_map")(INTEGERS)
    assert_same(received, compiled("pmean", "shard_map")(INTEGERS)[0])
    received, _ = compiled("dense", "shard_map")(FLOATS)
    expected, _ = compiled("pmean", "shard_map")(FLOATS)
    for leaf in PARAMS:
        # Momentum 0.5 adds up to twice the gradient, and the learning rate halves.
        bound = SUM_ROUNDING * np.abs(FLOATS[leaf]).sum(axis=1).max()
        np.testing.assert_allclose(received[leaf], expected[leaf], rtol=0, atol=bound)


# The same on all replicas and in every way to run it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "how"), [("scripted", "pmap"), ("gravac", "shard_map unchecked")]
)
def test_pmap_and_both_shard_maps_give_the_same_bits(recipe, how):
    assert_same(story(recipe, how), story(recipe, "shard_map"))


def test_vmap_selects_the_same_entries_and_rounds_means_differently():
    gradients, updates, states = story("scripted", "vmap")
    _, expected, expected_states = story("scripted", "shard_map")
    assert_same(states.local, expected_states.local)
    kept, before = residuals(states)
    sent = gradients["w"] + (before - kept).reshape(STEPS, N, 8, 8)
    for step in set(range(STEPS)) - set(BAD_STEPS):
        for leaf, x in {"b": gradients["b"], "w": sent}.items():
            bound = SUM_ROUNDING * np.abs(x[step]).sum(axis=0)
            error = np.abs(updates[leaf][step] - expected[leaf][step])
            assert (error <= bound).all()


@pytest.mark.parametrize(
    ("axis_type", "check_vma"),
    [
        (AXIS_TYPES[0], True),
        pytest.param(AXIS_TYPES[1], False, marks=pytest.mark.slow),
    ],
)
def test_replicas_end_bit_identical_after_200_adaptive_steps(axis_type, check_vma):
    mesh = make_mesh(axis_type=axis_type)
    tx = sending(dataclasses.replace(GRAVAC, ladder=LADDER[::2]))
    tx = optax.chain(tx, optax.sgd(0.02, momentum=0.9))

    def train_step(params, opt_state, batch):
        loss = lambda p: jnp.mean(
            (jnp.tanh(batch @ p["w"] + p["b"][None]) - batch) ** 2
        )
        value, grads = gravac.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    rng = np.random.default_rng(0)
    params = {"b": np.zeros(8, np.float32), "w": PARAMS["w"]}
    params, opt_state = gravac.place((params, tx.init(params)), mesh)
    step = gravac.data_parallel(train_step, mesh, check_vma=check_vma)
    rungs = set()
    for _ in range(200):
        batch = rng.normal(size=(2 * N, 8)) * rng.choice([0.1, 1, 10], 8)
        params, opt_state, _ = step(params, opt_state, batch.astype(np.float32))
        rungs.add(int(optax.tree.get(opt_state, "StepInfo").rung))
    assert len(rungs) > 1
    shared = jax.tree.map(lambda x: x.is_fully_replicated, (params, opt_state))
    assert sum(jax.tree.leaves(shared)) > len(PARAMS)
    jax.tree.map(agreed, (params, opt_state))  # raises where replicas differ


# Conservation


@in_both_ways
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
        bound = SUM_ROUNDING * np.abs(sent).sum(axis=0) if rung == 0 else 0
        assert (np.abs(updates["w"][step].ravel() - mean) <= bound).all()


@in_both_ways
@by_recipe
def test_over_a_run_the_sent_and_the_kept_add_up_to_the_gradients(recipe, how):
    updates, states = compiled(recipe, how)(spoil(INTEGERS), **times())
    came_in = left_out(INTEGERS)["w"].sum(axis=1)
    left = residuals(states)[0].sum(axis=1).reshape(STEPS, 8, 8)
    assert np.any(left)
    total = N * np.cumsum(updates["w"], axis=0) + left
    assert (total == np.cumsum(came_in, axis=0)).all()


@pytest.mark.parametrize(
    ("send", "sizes"),
    [
        (gravac.Dense(), (67, 1)),
        (gravac.Bits(2), (96, 1)),
        (gravac.Fastest(), (96, 1)),
        (gravac.TopK(10), (64, 3)),
        (gravac.LowRank(1), (64, 3)),
        (gravac.Fastest((gravac.Bits(2), gravac.TopK(64))), (64, 3)),
    ],
    ids=repr,
)
def test_few_bits_take_small_leaves_and_other_encodings_leave_them_dense(send, sizes):
    params = {"kernel": jnp.zeros((8, 8)), "bias": jnp.zeros(3)}
    state = gravac.transform(None, send=send).init(params)
    assert tuple(x.size for x in jax.tree.leaves(state.local.memory)) == sizes


@in_both_ways
def test_leaves_that_go_dense_are_averaged_at_every_rung(how):
    updates, _ = compiled("scripted", how)(INTEGERS, **times())
    assert (updates["b"] == INTEGERS["b"].mean(axis=1)).all()


# One program


@pytest.mark.parametrize(
    ("is_timed", "axis_type"),
    [
        (True, AXIS_TYPES[0]),
        pytest.param(False, AXIS_TYPES[1], marks=pytest.mark.slow),
    ],
)
def test_one_program_serves_all_rungs(is_timed, axis_type):
    mesh = make_mesh(axis_type=axis_type)
    ladder = gravac.TopK.geometric(4, 32)
    tx = sending(gravac.GraVAC(ladder, epsilon=0.9, window=2, smoothing=1.0))

    def train_step(params, state, batch):
        grads, seconds, measured = jax.tree.map(lambda x: x[0], batch)
        extra = {"step_seconds": seconds, "measured_step": measured} if is_timed else {}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, state = gravac.place((PARAMS, tx.init(PARAMS)), mesh)
    step = gravac.data_parallel(train_step, mesh)
    seconds, measured = times(np.linspace(0.1, 0.2, STEPS)[:, None]).values()
    seconds = np.where(np.arange(STEPS)[:, None] % 2, seconds, np.float32(np.nan))
    rungs = set()
    with compilations() as names:
        for i in range(STEPS):
            params, state = step(params, state, at((FLOATS, seconds, measured), i))
            rungs.add(int(state.info.rung))
    assert len(names) == 1
    assert len(rungs) >= 3
    assert bool(state.controller.is_measured) == is_timed


@functools.cache
def program(how, recipe="scripted"):
    return compiled(recipe, how).text(FLOATS, **times())


@in_both_ways
@by_recipe
def test_the_rungs_stay_branches(recipe, how):
    # Under vmap a batched predicate would turn them into selects over all branches.
    found = re.findall(r"branch_computations=\{(.*?)\}", program(how, recipe))
    assert [x.count(",") + 1 for x in found].count(len(LADDER)) == 1


def test_all_replicas_take_the_rung_of_the_first():
    tx = sending(gravac.Scheduled(FEW_BITS, starts=(0, 10**6)))
    apart = np.arange(N, dtype=np.int32)[::-1] % len(FEW_BITS)
    states = jax.tree.map(lambda x: jnp.stack([x] * N), tx.init(PARAMS))
    states = states._replace(decided=jnp.asarray(apart))
    gradients = jax.tree.map(lambda x: jnp.asarray(x[0]), FLOATS)
    update = jax.vmap(lambda grads, state: tx.update(grads, state), axis_name="data")
    assert len(set(apart.tolist())) > 1
    # Branches stay branches, though each replica has a state of its own.
    assert "cond[" in str(jax.make_jaxpr(update)(gradients, states))
    for _ in range(3):
        updates, states = jax.jit(update)(gradients, states)
        for x in jax.tree.leaves(updates):
            assert_same(x, jnp.stack([x[0]] * N))
    assert states.info.rung.tolist() == [apart[0]] * N


@pytest.mark.parametrize(
    ("recipe", "of_bucket", "of_gradient", "how"),
    [
        ("scripted", 0, 0, "shard_map"),
        pytest.param("scripted", 0, 0, "pmap", marks=pytest.mark.slow),
        pytest.param("gravac", 3, 0, "shard_map", marks=pytest.mark.slow),
        pytest.param("fastest", 0, 3, "shard_map", marks=pytest.mark.slow),
    ],
)
def test_each_rung_runs_its_own_network(recipe, of_bucket, of_gradient, how):
    found, _ = collectives(program(how, recipe))
    # The energies of what is sent and of everything, and of each rung if the controller
    # looks at the bucket.
    energies = 4 * (2 + of_bucket)
    # Dense leaves; a count, an energy, its contrast and the rung; a time with its count
    # for each rung, and an energy if the controller looks at the gradient.
    figures = 4 * (DENSE_SIZE + 4 + 2 * len(LADDER) + of_gradient)
    assert sorted(found) == sorted(
        [
            ("all-reduce", "f32", 4 * SIZE + energies + figures, (0,)),
            # A gather would send so many figures N - 1 times.
            ("all-gather", "s32", 8 * ENTRIES[1] + energies, (1,)),
            ("all-reduce", "f32", figures, (1,)),
            ("all-gather", "s32", 8 * ENTRIES[2] + energies, (2,)),
            ("all-reduce", "f32", figures, (2,)),
        ]
    )


def of_update(send):
    """Return the collectives of a step of one encoding."""
    return collectives(trajectory(sending(send), PARAMS, "shard_map").text(FLOATS))[0]


@pytest.mark.parametrize(
    ("send", "kinds"),
    [(gravac.Bits(2), ["all-gather", "all-to-all"]), (gravac.Dense(), ["all-reduce"])],
    ids=repr,
)
def test_what_is_agreed_on_travels_with_the_exchange(send, kinds):
    assert sorted({x.kind for x in of_update(send)}) == kinds


def test_selected_entries_travel_in_16_bits_by_default():
    # XLA's CPU backend would widen a collective of bfloat16 to float32.
    gathered = [x for x in of_update(gravac.TopK(4)) if x.kind == "all-gather"]
    # Entries, the end of their block in 32 bits, and two energies.
    assert gathered == [("all-gather", "u16", 4 * 16 + 4 + 2 * 4, ())]


@in_both_ways
def test_a_step_never_calls_the_host(how):
    assert not re.search(r"callback|infeed|outfeed|\b(send|recv)\(", program(how))


# Time


def heard(how, gradients=FLOATS, **kwargs):
    _, states = compiled("scripted", how)(gradients, **times(**kwargs))
    return states.controller.measured_seconds  # [STEPS, rungs], NaN where none


def scripted_rungs(bad=()):
    """Return the rung of every step of a scripted run, `len(LADDER)` if it is bad."""
    taken = [0, 0, 0, *(step % len(LADDER) for step in range(3, STEPS))]
    return [len(LADDER) if step in bad else rung for step, rung in enumerate(taken)]


def credited(seconds, lags, bad=()):
    """Return the times that rungs should hear if replica r reports `seconds[r]`."""
    expected = np.full((STEPS, len(LADDER)), np.nan, np.float32)
    rungs = scripted_rungs(bad)
    for step in range(STEPS):
        for rung in range(len(LADDER)):
            measured = [step - lag for lag in lags]
            own = [
                second
                for second, s in zip(seconds, measured, strict=True)
                if s >= 0 and rungs[s] == rung
            ]
            if own:
                expected[step, rung] = np.mean(own)
    return expected


@pytest.mark.parametrize("lag", [1, 3, 8])
def test_a_time_is_credited_to_the_rung_that_caused_it(lag):
    received = heard("shard_map", seconds=2.0, lag=lag)
    np.testing.assert_array_equal(received, credited([2.0] * N, [lag] * N))


STALE, OF_NOW, OF_THE_FUTURE = {"lag": 9}, {"lag": 0}, {"lag": -1}
NO_TIMES = [{"seconds": x, "lag": 1} for x in (np.nan, 0.0, -1.0)]


@pytest.mark.parametrize("time", [STALE, OF_NOW, OF_THE_FUTURE, *NO_TIMES], ids=str)
def test_a_time_that_cannot_be_credited_is_ignored(time):
    assert np.isnan(heard("shard_map", **{"seconds": 2.0, **time})).all()


@in_both_ways
def test_replicas_that_disagree_on_times_hear_the_same_mean(how):
    seconds, lags = [1.0, 2.0, 4.0, 9.0], [1, 4, 2, 7]
    received = heard(how, seconds=seconds, lag=lags)
    np.testing.assert_array_equal(received, credited(seconds, lags))


def test_a_bad_gradient_takes_no_time_from_its_rung():
    received = heard("shard_map", spoil(FLOATS), seconds=2.0, lag=1)
    np.testing.assert_array_equal(received, credited([2.0] * N, [1] * N))


def test_a_time_without_its_step_measures_the_step_before():
    run = trajectory(sending(Scripted(FEW_BITS)), PARAMS, "vmap")
    _, states = run(FLOATS, step_seconds=times(2.0)["step_seconds"])
    expected = credited([2.0] * N, [1] * N)
    np.testing.assert_array_equal(states.controller.measured_seconds, expected)


# Bad steps


@in_both_ways
@by_recipe
def test_a_bad_gradient_is_left_out_and_the_others_go_on(recipe, how):
    updates, states = compiled(recipe, how)(spoil(FLOATS), **times())
    expected, expected_states = compiled(recipe, how)(left_out(FLOATS), **times())
    is_bad = np.isin(np.arange(STEPS), BAD_STEPS)
    assert (states.info.is_finite == ~is_bad).all()
    assert (states.info.bad_steps == np.cumsum(is_bad)).all()
    assert (states.steps == np.arange(STEPS) + 1).all()
    uncounted = lambda x: x._replace(info=x.info._replace(is_finite=0, bad_steps=0))
    assert_same(updates, expected)
    assert_same(uncounted(states), uncounted(expected_states))


CONTROLLERS = {
    "Fastest": gravac.Fastest((gravac.Dense(), gravac.TopK(8))),
    "GraVAC": gravac.GraVAC((gravac.Dense(), gravac.TopK(8)), window=2),
    "Accordion": gravac.Accordion((gravac.TopK(4), gravac.TopK(16)), interval=3),
}


@pytest.mark.parametrize("controller", choices(CONTROLLERS, lambda x: x == "GraVAC"))
def test_gradients_of_zero_deliver_the_residual_and_disturb_nothing(controller):
    tx = sending(CONTROLLERS[controller])
    # An entry is sent in three steps, until its last bit has arrived.
    zeros = lambda x: np.zeros((150, *x.shape[1:]), np.float32)
    gradients = jax.tree.map(
        lambda x: np.concatenate([x[:1], zeros(x), x[1:2]]), FLOATS
    )
    updates, states = trajectory(tx, PARAMS, "vmap")(gradients)
    assert not residuals(states)[0][-2].any()
    for leaf, x in updates.items():
        np.testing.assert_allclose(x[:-1].sum(0), FLOATS[leaf][0].mean(0), atol=1e-5)
    assert ((states.info.gain >= 0) & (states.info.gain <= 1)).all()
    assert states.info.bad_steps[-1] == 0
    for x in jax.tree.leaves(at(states, -1)):
        assert not np.issubdtype(x.dtype, np.floating) or np.isfinite(x).all()


def test_gradients_of_zero_deliver_the_residual_in_few_bits_but_for_a_rounding():
    tx = sending(gravac.Bits(2))
    zeros = lambda x: np.zeros((60, *x.shape[1:]), np.float32)
    gradients = jax.tree.map(lambda x: np.concatenate([x[:1], zeros(x)]), FLOATS)
    updates, states = trajectory(tx, PARAMS, "vmap")(gradients)
    assert np.abs(residuals(states)[0][-1]).max() < 1e-6
    for leaf, x in updates.items():
        np.testing.assert_allclose(x.sum(0), FLOATS[leaf][0].mean(0), atol=1e-5)


# Any pytree, any axis


TREE = {
    "scalar": np.zeros((), np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "half": [np.zeros(4, np.float16), None],
    "brain": (jnp.zeros((2, 3), jnp.bfloat16),),
    "nested": {"x": {"y": np.zeros((3, 3), np.float32)}},
}


def flat(tree):
    """Return the entries of all leaves, as a bucket has them."""
    leaves = [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]
    return _harness.in_bucket_order(leaves)


def test_any_pytree_of_floats_is_averaged():
    tx = gravac.transform(compress=True, send=gravac.TopK(4, select="exact"))
    rng = np.random.default_rng(0)
    # Multiples of 4 below 128: their means over 4 replicas are exact in bfloat16.
    gradients = jax.tree.map(
        lambda x: (4 * rng.integers(-31, 32, (1, N, *x.shape))).astype(x.dtype), TREE
    )
    updates, states = trajectory(tx, TREE, "shard_map")(gradients)
    kind = lambda x: (x.shape, x.dtype)
    assert jax.tree.map(kind, at(updates, 0)) == jax.tree.map(kind, TREE)
    residual = states.local.memory[0].residual
    assert residual.dtype == np.float32
    assert np.any(residual)
    came_in = sum(
        flat(jax.tree.map(lambda x, r=r: x[0, r], gradients)) for r in range(N)
    )
    assert (N * flat(at(updates, 0)) + residual[0].sum(axis=0) == came_in).all()


def test_several_buckets_lose_nothing(monkeypatch):
    monkeypatch.setattr(_buckets, "MAX_ENTRIES", SIZE // 2)
    tx = gravac.transform(compress=True, send=LADDER[1])
    updates, states = trajectory(tx, PARAMS, "vmap")(INTEGERS)
    *buckets, _ = states.local.memory
    left = np.concatenate([x.residual for x in buckets], axis=-1)
    assert len(buckets) == 3
    assert np.any(left)
    total = lambda tree: np.concatenate(
        [x.sum(axis=0).ravel() for x in jax.tree.leaves(tree)]
    )
    came_in = jax.tree.map(lambda x: x.sum(axis=1), INTEGERS)
    assert (N * total(updates) + left[-1].sum(axis=0) == total(came_in)).all()


@pytest.mark.parametrize("tree", [{}, {"empty": jnp.zeros((0, 3)), "none": None}])
def test_a_tree_without_entries_comes_back(tree):
    tx = gravac.transform(None, compress=True, send=ROWS)
    updates, state = jax.jit(tx.update)(tree, tx.init(tree))
    assert_same(updates, tree)
    assert int(state.steps) == 1


def test_alone_is_one_replica_on_a_mesh():
    alone, on_mesh = (
        gravac.transform(axis_name, compress=COMPRESS, send=Scripted(FEW_BITS[::2]))
        for axis_name in (None, "data")
    )
    one = jax.tree.map(lambda x: x[:, :1], INTEGERS)
    expected, expected_states = trajectory(
        on_mesh, PARAMS, "shard_map", mesh=make_mesh((1,))
    )(one)

    def step(state, grads):
        updates, state = alone.update(grads, state)
        return state, (updates, state)

    gradients = jax.tree.map(lambda x: x[:, 0], INTEGERS)
    run = jax.jit(lambda state: jax.lax.scan(step, state, gradients)[1])
    updates, states = run(alone.init(PARAMS))
    assert_same(updates, expected)
    local = jax.tree.map(lambda x: x[:, 0], expected_states.local)
    assert_same(states, expected_states._replace(local=local))


@pytest.mark.parametrize(
    ("how", "axis_type"),
    [
        ("shard_map", AXIS_TYPES[0]),
        pytest.param("shard_map unchecked", AXIS_TYPES[1], marks=pytest.mark.slow),
    ],
)
def test_a_tuple_of_axes_is_one_axis_of_their_product(how, axis_type):
    names = ("outer", "inner")

    def received(axis_name, **where):
        send = Scripted(FEW_BITS[::2])
        tx = gravac.transform(axis_name, compress=COMPRESS, send=send)
        run = trajectory(tx, PARAMS, axis_name=axis_name, **where)
        return run(INTEGERS, **times())

    mesh = make_mesh((2, 2), names, axis_type)
    expected = received("data", how="shard_map")
    assert_same(received(names, how=how, mesh=mesh), expected)


def test_a_model_of_which_nothing_is_compressed_is_averaged():
    tx = gravac.transform(compress=False, send=ROWS)
    updates, states = trajectory(tx, PARAMS, "shard_map")(INTEGERS)
    assert_same(updates, jax.tree.map(lambda x: x.mean(axis=1), INTEGERS))
    assert (states.info.factor == 1).all()


# As an Optax transformation


ALONE = gravac.transform(None, compress=COMPRESS, send=ROWS)
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


def test_other_extra_arguments_are_ignored():
    state = ALONE.init(PARAMS)
    extra = {"value": 1.0, "value_fn": lambda params: 0.0, "step": None}
    received = jax.jit(lambda x: ALONE.update(x, state, PARAMS, **extra))(GRADIENTS)
    assert_same(received, jax.jit(ALONE.update)(GRADIENTS, state))


def test_the_info_is_found_in_any_chain():
    clip = optax.clip_by_global_norm(1.0)
    tx = optax.chain(ALONE, clip, optax.inject_hyperparams(optax.sgd)(0.1))
    _, opt_state = jax.jit(tx.update)(GRADIENTS, tx.init(PARAMS), PARAMS)
    info = optax.tree.get(opt_state, "StepInfo")
    assert isinstance(info, gravac.StepInfo)
    for name in info._fields:
        assert_same(optax.tree.get(opt_state, name), getattr(info, name))


@pytest.mark.parametrize("compress", [True, COMPRESS])
def test_the_state_goes_through_map_params(compress):
    tx = gravac.transform(None, compress=compress)
    tx = optax.chain(tx, optax.sgd(0.1, momentum=0.9))
    for state in (tx.init(PARAMS), gravac.place(tx.init(PARAMS), N)):
        mapped = optax.tree.map_params(tx, lambda x: x + 1, state)
        assert_same(mapped[0], state[0])  # none of it has the params' shapes
        assert_same(mapped[1][0].trace, jax.tree.map(lambda x: x + 1, PARAMS))


def test_a_state_may_be_donated():
    update = jax.jit(ALONE.update, donate_argnums=1)
    state = ALONE.init(PARAMS)
    expected = jax.jit(ALONE.update)(GRADIENTS, state)
    received = update(GRADIENTS, state)
    assert_same(received, expected)
    assert _harness.residual(state).is_deleted()


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


@pytest.mark.slow
def test_no_leaf_of_the_state_is_nan():
    tx = gravac.transform(None, compress=True)
    state, update = tx.init(jnp.ones(8)), jax.jit(tx.update)
    for _ in range(3):
        assert not any(bool(jnp.isnan(x).any()) for x in jax.tree.leaves(state))
        _, state = update(jnp.ones(8), state)


def test_it_works_with_64_bit_types_enabled():
    script = """
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
import warnings
import gravac_jax as gravac
few_bits = (gravac.Dense(), gravac.Bits(8))
tx = gravac.transform(send=gravac.Fastest(few_bits))
def step(state, batch):
    updates, state = tx.update(batch.sum(0), state, step_seconds=jnp.float32(1))
    return state, updates
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    wide = tx.init(jnp.ones(8, jnp.float64))
(warning,) = heard
assert "1 of 1 leaves of the params are float64" in str(warning.message)
state = gravac.place(wide, 2)
kinds = {x.dtype.name for x in jax.tree.leaves(state)}
state, updates = gravac.simulate(step, 2)(state, jnp.ones((2, 8)))
assert kinds == {x.dtype.name for x in jax.tree.leaves(state)}, kinds
scheduled = gravac.transform(send=gravac.Scheduled(few_bits, starts=(4,)))
state = gravac.place(scheduled.init(jnp.ones(8, jnp.float32)), 2)
kinds_of = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
before = kinds_of(state)
narrow = lambda state, batch: (scheduled.update(batch.sum(0), state)[1],)
(state,) = gravac.simulate(narrow, 2)(state, jnp.ones((2, 8), jnp.float32))
assert kinds_of(state) == before
print(sorted(kinds))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    kinds = "['bool', 'float32', 'int32', 'uint32']\n"
    assert done.stdout == kinds, done.stderr
