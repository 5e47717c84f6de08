"""What a step is worth follows from energies, and its seconds from parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gravac_jax as gravac
from gravac_jax._evidence import compression_gain, cost_model
from gravac_jax._evidence.compression_gain import WAITING_COST, progress

NO_ENERGY = (0.0, 2.0**-101, np.inf, np.nan)  # that float32 could hold the squares of


@pytest.mark.parametrize(
    ("sent", "total", "gains"),
    [
        ([0, 1, 2, 8], 8, [0, 0.125, 0.25, 1]),
        ([np.nextafter(np.float32(3), np.float32(4))], 3, [1]),
        *(([x] * 3, x, [0] * 3) for x in NO_ENERGY),
    ],
)
def test_the_gain_is_the_share_of_an_energy_that_float32_holds(sent, total, gains):
    found = compression_gain.gain(jnp.float32(sent), jnp.float32(total))
    assert found.tolist() == gains


def test_everything_sent_is_a_gain_of_exactly_1():
    # Dividing by way of the reciprocal would make 1 - 2**-24 of some of these.
    energies = jnp.arange(1, 200, dtype=jnp.float32) / 7
    gain = jax.jit(jax.vmap(lambda x: compression_gain.gain(x, x)))
    assert (gain(energies) == 1).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_averages_weigh_the_newest_step_and_leave_out_what_float32_cannot_hold(bad):
    step = lambda averages, x: (compression_gain.smooth(averages, *x, 0.5), None)
    sent = jnp.array([[8.0, 4.0], [bad, 1.0], [4.0, 0.0], [2.0, 2.0]])
    xs = sent, jnp.array([16.0, bad, 8.0, 4.0])
    averages, _ = jax.lax.scan(step, compression_gain.no_averages(2), xs)
    assert averages.sent.tolist() == [3.0, 1.5]
    assert averages.total == 6.0


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_an_entry_waits_as_long_as_one_that_is_followed(steps):
    share, rng = 0.4, np.random.default_rng(0)
    # An entry that is made in any step of a round goes with each exchange by chance.
    ends = rng.integers(0, steps, 100_000) + steps * (rng.geometric(share, 100_000) - 1)
    worth = float(progress(jnp.float32(share), steps))
    assert ((1 / worth - 1) / WAITING_COST) ** 2 == pytest.approx(ends.mean(), rel=0.02)


def test_a_step_is_compute_selection_latency_and_bytes_over_bandwidth():
    wire = gravac.WireCost(100, 0.5, compute_seconds=2, selection_seconds=0.25)
    assert wire.parts(300, 4, is_dense=True) == (2, 0, 2, 3)
    assert wire.parts(300, 4, is_dense=False) == (2, 0.25, 2, 3)


# Seconds, learned from step times. --------------------------------------------------

RUNGS = 6
NO_EXTRAS = [0] * RUNGS
# Compute, selection, messages and bytes of a guess, at each rung.
guess_of = lambda r: [0.01, 0.001 * (r > 0), 0.0003, 0.08 / 4.0**r]
GUESS = np.float32([*map(guess_of, range(RUNGS))])
TRUE_SECONDS = GUESS @ np.float32([7, 3, 0.5, 2])
LENGTHS = (400, 5000)  # of runs: others are filled up with no times


@functools.cache
def _jitted():
    def run(timing, guess, xs):
        def step(timing, x):
            timing, is_alarm = cost_model.observe(timing, guess, *x)
            return timing, (timing, is_alarm)

        return jax.lax.scan(step, timing, xs)[1]

    return jax.jit(run), jax.jit(cost_model.predict)


def observed(rungs, seconds, timing=None, guess=GUESS):
    """Return the states after each time, the last one again, and the alarms."""
    no_times = [(0, next(x for x in LENGTHS if x >= len(rungs)) - len(rungs))]
    xs = (
        np.pad(np.int32(rungs), no_times),
        np.pad(np.float32(seconds), no_times, constant_values=np.nan),
    )
    start = cost_model.no_times(RUNGS) if timing is None else timing
    states, alarms = jax.tree.map(np.asarray, _jitted()[0](start, guess, xs))
    return states, jax.tree.map(lambda x: x[-1], states), alarms


def predicted(timing, guess=GUESS):
    """Return the seconds of each rung, their deviations, and their covariance."""
    mean, covariance = jax.tree.map(np.float64, _jitted()[1](timing, guess))
    return mean, np.sqrt(np.diag(covariance)), covariance


def after(*counts, deviation=0.2, unit=1.0):
    """Return the state after so many noisy times at each rung, one by one."""
    rungs = np.repeat(np.arange(len(counts)), counts)
    noise = np.random.default_rng(0).normal(0, deviation, rungs.size)
    return observed(rungs, unit * TRUE_SECONDS[rungs] * np.exp(noise))[1]


def test_the_first_time_sets_the_unit_and_leaves_doubt_about_all_else():
    seconds, deviation, _ = predicted(observed([1], TRUE_SECONDS[1:2])[1])
    np.testing.assert_allclose(seconds[1], TRUE_SECONDS[1], rtol=1e-5)
    deviation /= seconds
    assert deviation[1] < 0.25  # the noise of one time
    assert deviation[0] > 1.5 * deviation[1]


def test_times_at_three_rungs_tell_those_of_all():
    seconds, deviation, _ = predicted(after(40, 0, 40, 0, 0, 40))
    assert (np.abs(seconds - TRUE_SECONDS) < 3 * deviation).all()
    assert (deviation[2:] < 0.15 * TRUE_SECONDS[2:]).all()  # the last two visited
    assert deviation[0] > 5 * deviation[2]  # more bytes than at any that was visited


@pytest.mark.parametrize("deviation", [0.05, 0.3])
def test_the_noise_is_found(deviation):
    noise = after(400, deviation=deviation).noise
    assert np.sqrt(noise) == pytest.approx(deviation, rel=0.35)


def test_one_outlier_counts_for_little_and_four_are_a_surprise():
    timing, slow = after(0, 100), np.full(8, 10 * TRUE_SECONDS[1])
    states, last, alarms = observed(np.ones(8), slow, timing)
    first = jax.tree.map(lambda x: x[0], states)
    assert predicted(first)[0][1] < 1.2 * predicted(timing)[0][1]
    assert np.flatnonzero(alarms)[0] in (3, 4)
    assert predicted(last)[0][1] == pytest.approx(slow[0], rel=0.25)
    for seconds in (10 * slow, slow / 10):  # a pause, and then as before
        last = observed(np.ones(8), seconds, last)[1]
    np.testing.assert_allclose(predicted(last)[0], TRUE_SECONDS, rtol=0.5)


def test_a_surprise_is_doubt_about_the_network_first():
    slow = np.full(8, 5 * TRUE_SECONDS[1])
    _, last, _ = observed(np.ones(8), slow, after(50, 50, 50))
    seconds, deviation, _ = predicted(last)
    assert seconds[0] > 2 * TRUE_SECONDS[0]  # more bytes there
    assert deviation[0] / seconds[0] > deviation[1] / seconds[1]
    extras = np.sqrt(np.diag(last.covariance))[4:]  # unknown again, of longer steps
    assert extras[3:] == pytest.approx(cost_model.EXTRA * seconds[3:], rel=0.5)


def test_nothing_is_learned_from_no_time():
    timing = after(3, 3)
    states, _, alarms = observed([0, 1, 2], [np.nan, np.nan, 0], timing)
    assert not alarms.any()
    for old, new in zip(timing, states, strict=True):
        np.testing.assert_array_equal(np.broadcast_to(old, new.shape), new)


def test_the_unit_of_time_does_not_matter():
    one, other = (after(5, 30, 5, 30, 0, 9, unit=x) for x in (1.0, 2.0**12))
    np.testing.assert_allclose(other.scale, 2.0**12 * one.scale, rtol=1e-4)
    np.testing.assert_allclose(other.noise, one.noise, rtol=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_no_variance_is_negative_after_thousands_of_wild_times(seed):
    rng = np.random.default_rng(seed)
    rungs = np.repeat(rng.integers(0, RUNGS, 100), 50)
    wild = TRUE_SECONDS[rungs] * 10 ** np.repeat(rng.normal(0, 1, 25), 200)
    _, last, _ = observed(rungs, wild * np.exp(rng.normal(0, 0.2, rungs.size)))
    *_, covariance = predicted(last)
    assert np.linalg.eigvalsh(covariance)[0] > -1e-6 * np.trace(covariance)
    assert np.isfinite(last.scale).all()


@pytest.mark.parametrize("parts", [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
def test_parts_of_which_nothing_is_predicted_hurt_nothing(parts):
    guess = GUESS * np.float32(parts)
    seconds, deviation, _ = predicted(observed([1], [3.0], guess=guess)[1], guess)
    assert seconds[1] == pytest.approx(3.0, rel=1e-3)
    assert np.isfinite(deviation).all()


def test_a_time_where_less_than_nothing_was_predicted_is_shared_out():
    timing = cost_model.no_times(RUNGS)._replace(
        scale=jnp.float32([0.0, 0.1, 0.0, -0.2, *NO_EXTRAS]),
        covariance=jnp.diag(jnp.float32([1e-6, 1e-4, 1e-4, 0.3, *NO_EXTRAS])),
        times=jnp.int32(10),
    )
    _, last, _ = observed([0], [2.0], timing)
    assert last.scale[0] < 0.1
    assert last.scale[3] > 1


def test_no_part_is_thought_to_be_nothing_for_good():
    timing = cost_model.no_times(RUNGS)._replace(
        scale=jnp.float32([0.1, 0.0, 0.0, 0.0, *NO_EXTRAS]), times=jnp.int32(10)
    )
    *_, before = predicted(timing)
    assert not before.any()
    *_, covariance = predicted(observed([0] * 200, [0.1] * 200, timing)[1])
    top = RUNGS - 1
    difference = covariance[0, 0] + covariance[top, top] - 2 * covariance[0, top]
    assert np.sqrt(difference) > 0.03 * 0.1
