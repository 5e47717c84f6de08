"""Seconds of each part of a step are learned from step times, with their error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gravac_jax._evidence import step_time_filter

RUNGS = 6
# Compute, selection, messages and bytes of a guess, at each rung.
GUESS = np.float32(
    [[0.01, 0.001 * (r > 0), 0.0003, 0.08 / 4.0**r] for r in range(RUNGS)]
)
TRUE_SCALE = np.float32([7, 3, 0.5, 2])
TRUE_SECONDS = GUESS @ TRUE_SCALE


@functools.cache
def _jitted():
    def step(timing, x):
        timing, is_alarm = step_time_filter.observe(timing, jnp.asarray(GUESS), *x)
        return timing, (timing, is_alarm)

    return jax.jit(lambda timing, xs: jax.lax.scan(step, timing, xs)[1])


def observed(rungs, seconds, timing=None):
    """Return the states after each time, and whether there was an alarm."""
    start = step_time_filter.no_times() if timing is None else timing
    xs = np.int32(rungs), np.float32(seconds)
    return jax.tree.map(np.asarray, _jitted()(start, xs))


def last(states):
    return jax.tree.map(lambda x: x[-1], states)


def predicted(timing):
    return step_time_filter.predict(timing, jnp.asarray(GUESS))


def noisy(rungs, seed=0, deviation=0.2):
    noise = np.random.default_rng(seed).normal(0, deviation, len(rungs))
    return TRUE_SECONDS[rungs] * np.exp(noise)


def visits(*counts):
    """Return rungs: `counts[r]` steps at each rung r, one after the other."""
    return np.repeat(np.arange(len(counts)), counts)


def test_the_first_time_sets_the_unit_and_leaves_doubt_about_all_else():
    timing = last(observed([1], TRUE_SECONDS[1:2])[0])
    seconds, covariance = predicted(timing)
    np.testing.assert_allclose(seconds[1], TRUE_SECONDS[1], rtol=1e-5)
    deviation = np.sqrt(np.diag(covariance)) / seconds
    assert deviation[1] < 0.25  # the noise of one time
    assert deviation[0] > 1.5 * deviation[1]


def test_times_at_three_rungs_tell_those_of_all():
    rungs = visits(40, 0, 40, 0, 0, 40)
    timing = last(observed(rungs, noisy(rungs))[0])
    seconds, covariance = predicted(timing)
    deviation = np.sqrt(np.diag(covariance))
    assert (np.abs(seconds - TRUE_SECONDS) < 3 * deviation).all()
    assert (deviation[2:] < 0.15 * TRUE_SECONDS[2:]).all()  # the last two visited
    assert deviation[0] > 5 * deviation[2]  # more bytes than at any that was visited


def test_the_noise_is_found():
    rungs = visits(400)
    for deviation in (0.05, 0.3):
        timing = last(observed(rungs, noisy(rungs, deviation=deviation))[0])
        assert np.sqrt(timing.noise) == pytest.approx(deviation, rel=0.35)


def test_one_outlier_counts_for_little_and_four_are_a_surprise():
    rungs = visits(0, 100)
    timing = last(observed(rungs, noisy(rungs))[0])
    before = predicted(timing).seconds[1]
    slow = np.full(8, 10 * TRUE_SECONDS[1])
    states, alarms = observed(np.ones(8), slow, timing)
    first = jax.tree.map(lambda x: x[0], states)
    assert predicted(first).seconds[1] < 1.2 * before
    assert np.flatnonzero(alarms)[0] in (3, 4)
    assert predicted(last(states)).seconds[1] == pytest.approx(slow[0], rel=0.25)


def test_a_surprise_is_doubt_about_the_network_first():
    rungs = visits(50, 50, 50)
    timing = last(observed(rungs, noisy(rungs))[0])
    states, _ = observed(np.ones(8), np.full(8, 5 * TRUE_SECONDS[1]), timing)
    seconds, covariance = predicted(last(states))
    deviation = np.sqrt(np.diag(covariance)) / seconds
    assert seconds[0] > 2 * TRUE_SECONDS[0]  # more bytes there
    assert deviation[0] > deviation[1]


def test_nothing_is_learned_from_no_time():
    rungs = visits(3, 3)
    states, _ = observed(rungs, noisy(rungs))
    after, alarms = observed([0, 1, 2], [np.nan, np.nan, 0], last(states))
    assert not alarms.any()
    for old, new in zip(last(states), after, strict=True):
        np.testing.assert_array_equal(np.broadcast_to(old, new.shape), new)


def test_the_unit_of_time_does_not_matter():
    rungs = visits(5, 30, 5, 30, 0, 9)
    one, _ = observed(rungs, noisy(rungs))
    other, _ = observed(rungs, 2.0**12 * noisy(rungs))
    np.testing.assert_allclose(other.scale, 2.0**12 * one.scale, rtol=1e-4)
    np.testing.assert_allclose(other.noise, one.noise, rtol=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_no_variance_is_negative_after_thousands_of_wild_times(seed):
    rng = np.random.default_rng(seed)
    rungs = np.repeat(rng.integers(0, RUNGS, 100), 50)
    wild = TRUE_SECONDS[rungs] * 10 ** np.repeat(rng.normal(0, 1, 25), 200)
    timing = last(observed(rungs, wild * np.exp(rng.normal(0, 0.2, rungs.size)))[0])
    covariance = np.float64(predicted(timing).covariance)
    assert np.linalg.eigvalsh(covariance)[0] > -1e-6 * np.trace(covariance)
    assert np.isfinite(timing.scale).all()


def test_without_a_network_there_is_nothing_to_learn_of_it():
    guess = jnp.asarray(GUESS * np.float32([1, 1, 0, 0]))
    timing, _ = step_time_filter.observe(
        step_time_filter.no_times(), guess, jnp.int32(1), jnp.float32(3.0)
    )
    seconds, covariance = step_time_filter.predict(timing, guess)
    assert seconds[1] == pytest.approx(3.0, rel=1e-5)
    assert np.isfinite(covariance).all()


def test_a_time_where_less_than_nothing_was_predicted_is_shared_out():
    timing = step_time_filter.no_times()._replace(
        scale=jnp.float32([0.0, 0.1, 0.0, -0.2]),
        covariance=jnp.diag(jnp.float32([1e-6, 1e-4, 1e-4, 0.3])),
        times=jnp.int32(10),
    )
    after = last(observed([0], [2.0], timing)[0])
    assert after.scale[0] < 0.1
    assert after.scale[3] > 1


def test_no_part_is_thought_to_be_nothing_for_good():
    timing = step_time_filter.no_times()._replace(
        scale=jnp.float32([0.1, 0.0, 0.0, 0.0]), times=jnp.int32(10)
    )
    _, before = predicted(timing)
    assert not before.any()
    _, after = predicted(last(observed([0] * 200, [0.1] * 200, timing)[0]))
    top = RUNGS - 1
    difference = after[0, 0] + after[top, top] - 2 * after[0, top]
    assert np.sqrt(difference) > 0.03 * 0.1
