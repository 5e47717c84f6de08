"""The mean of steps that an optimizer gave a size is as long as each of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import assert_same, in_both_ways, make_mesh, on_each

import gravac_jax as gravac
from gravac_jax._step import norms

N, ENTRIES, STEPS = 8, 2500, 200  # three rows, the last one of 452 entries
SIGNAL = np.repeat([1.0, 0.1, 0.0], norms.ROW)[:ENTRIES]  # beside noise of size 1


def steps_of(i, share=1.0):
    """Return the steps of all replicas, `[N, ENTRIES]`, with a share of the signal."""
    noise = np.random.default_rng(i).standard_normal((N, ENTRIES))
    return np.float32(share * SIGNAL + noise)


def rows_of(x):
    """Return the squared norm of each row."""
    begins = range(0, ENTRIES, norms.ROW)
    return np.add.reduceat(np.square(x, dtype=np.float64), begins, axis=-1)


def test_the_ratio_is_that_of_the_norms_of_steps_and_of_their_mean():
    @jax.jit
    def learn(known, steps, i):
        told = jax.vmap(norms.told, in_axes=(0, None))(steps, i)
        return norms.learnt(known, told.mean(0))

    known, expected = norms.none(ENTRIES), []
    for i in range(STEPS):
        steps = steps_of(i)
        known = learn(known, steps, np.int32(i))
        expected.append([rows_of(steps).mean(0), rows_of(steps.mean(0))])
    own, mean = np.mean(expected[-100:], axis=0)
    # The square of one number a step: sqrt(2 / 199) of it is chance.
    np.testing.assert_allclose(known[0], mean / own, rtol=4 * 0.1)
    assert known[1].tolist() == [STEPS] * 3
    found = norms.ratios(known, N)
    np.testing.assert_allclose(found, np.sqrt(own / mean).clip(1, N**0.5), rtol=0.25)
    assert found[0] < 1.6 < 2.2 < found[1]


def test_signs_are_as_good_as_random():
    signs = np.stack([norms._signs((10_000,), np.int32(i)) for i in range(20)])
    assert set(np.unique(signs)) == {-1, 1}
    chance = 5 / np.sqrt(10_000)  # five standard deviations
    assert abs(signs.mean(1)).max() < chance
    assert abs(np.corrcoef(signs) - np.eye(20)).max() < chance
    assert abs((signs[:, 1:] * signs[:, :-1]).mean(1)).max() < chance


def test_nothing_is_scaled_before_a_step_and_where_there_are_none():
    assert norms.ratios(norms.none(ENTRIES), N).tolist() == [1, 1, 1]
    with jax.debug_nans(True):
        told = norms.told(jnp.zeros(ENTRIES), jnp.int32(0))
        known = norms.learnt(norms.none(ENTRIES), told)
    assert norms.ratios(known, N).tolist() == [1, 1, 1]


def test_a_row_is_learnt_of_where_the_signs_of_replicas_cancel():
    known = norms.none(1)
    for i in range(4):
        told = [norms.told(jnp.array([x]), jnp.int32(i)) for x in (1.0, -1.0)]
        known = norms.learnt(known, (told[0] + told[1]) / 2)
    assert norms.ratios(known, 2) == pytest.approx(2**0.5)


PARAMS = {"b": np.zeros(5, np.float32), "w": np.zeros(ENTRIES - 5, np.float32)}


def run(tx, how):
    """Return the norm of each update, and the last state."""
    mesh = make_mesh((N,)) if how == "shard_map" else N

    def one(state, grads):
        update, state = tx.update(jax.tree.map(lambda x: x[0], grads), state, PARAMS)
        return state, update

    step = gravac.data_parallel(one, mesh)
    (state,), found = gravac.place((tx.init(PARAMS),), mesh), []
    for i in range(STEPS):
        x = steps_of(i, 0.1)
        grads = {"b": x[:, :5], "w": x[:, 5:]}
        with jax.numpy_dtype_promotion("standard"):  # Optax's Adam mixes dtypes
            state, update = step(state, grads)
        found.append(np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(update))))
    return np.array(found), state


def of_steps(keeps_norm, **options):
    steps = gravac.OwnOptimizer(optax.adam(1.0), keeps_norm=keeps_norm)
    return gravac.transform(memory=steps, **options)


def test_with_other_replicas_signal_and_noise_stay_the_same():
    signal = np.float32([0, 0.2, 1])
    share = lambda n: jnp.stack([signal + (1 - signal) / n, jnp.full(3, 9.0)])[None]
    for before, after in ((4, 16), (16, 4), (2, 3)):
        found = norms.of_others(share(before), before, after)
        np.testing.assert_allclose(found, share(after), rtol=1e-6)
    unknown = norms.none(ENTRIES)[None]  # as one replica knows
    assert_same(norms.of_others(unknown, 1, 4), unknown)


def known(state):
    """Return what is known of both parts, by row and exchanges; the same on all."""
    of_all = [np.asarray(x) for x in state.local.norms]
    assert all((x == x[0]).all() for x in of_all)
    return [x[0] for x in of_all]


@functools.cache
def own_lengths():
    """Return the root mean square norm of the steps of all replicas, at each step."""
    adam = optax.adam(1.0)
    each = jax.jit(jax.vmap(adam.update))
    state, found = jax.vmap(adam.init)(steps_of(0)), []
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam mixes dtypes
        for i in range(STEPS):
            steps, state = each(steps_of(i, 0.1), state)
            found.append(np.sqrt(np.square(steps).sum(1).mean()))
    return np.array(found)


LATE = slice(-100, None)
CASES = [
    ("vmap", {"send": gravac.Dense()}),
    ("vmap", {"send": gravac.Bits(8), "delay": 1}),
    ("shard_map", {"send": gravac.Bits(8)}),
]


@pytest.mark.parametrize(("how", "options"), CASES)
def test_the_mean_of_adams_steps_is_as_long_as_they_are(how, options):
    kept, state = run(of_steps(True, **options), how)
    assert kept[LATE].mean() == pytest.approx(own_lengths()[LATE].mean(), rel=0.1)
    assert all((x < 0.5).all() for x, _ in known(state))


def test_where_it_is_not_asked_for_the_mean_is_shorter():
    short, _ = run(of_steps(False, send=gravac.Dense()), "vmap")
    assert short[LATE].mean() < 0.8 * own_lengths()[LATE].mean()


def test_in_rounds_it_is_learnt_from_as_few_exchanges():
    _, state = run(of_steps(True, send=gravac.Dense(), every=10), "vmap")
    for share, seen in known(state):
        assert {*np.ravel(seen)} == {STEPS / 10}
        assert (share < 0.5).all()


@in_both_ways
def test_the_norm_of_a_mean_is_estimated_to_nine_percent_of_its_square(how):
    shapes = [(600, 512), (7, 13, 11), (), (0,), (0, 512)]
    estimate = on_each(gravac.norm_of_mean, how)
    chance = (2 / norms.COLUMNS) ** 0.5
    # All entries are noise, or nearly alike, or most of the energy is in one column.
    for shift, columns in ((0, 512), (5, 512), (0, 1)):
        draw, wrong = np.random.default_rng(0).standard_normal, []
        for _ in range(30):
            tree = [shift + draw((4, *x), np.float32) for x in shapes]
            tree[0] *= 10 * (np.arange(512) < columns)
            found = np.asarray(estimate(tree))
            assert (found == found[0]).all()
            mean = np.concatenate([x.mean(0).ravel() for x in tree])
            wrong.append((found[0] / np.linalg.norm(mean)) ** 2 - 1)
        assert np.abs(wrong).max() < 4 * chance
        if not shift:
            assert abs(np.mean(wrong)) < 3 * chance / 30**0.5
            assert chance / 2 < np.std(wrong) < 2 * chance
