import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gravac_jax import _gain


@jax.jit
def averages_of(sent, total, weight):
    step = lambda averages, x: (_gain.smooth(averages, *x, weight), None)
    return jax.lax.scan(step, _gain.no_averages(sent.shape[1]), (sent, total))[0]


def test_the_gain_is_the_share_of_the_energy():
    gains = _gain.gain(jnp.array([0.0, 1.0, 2.0, 8.0]), jnp.float32(8))
    assert gains.tolist() == [0.0, 0.125, 0.25, 1.0]


def test_the_norm_is_the_root_of_the_share():
    gains = _gain.gain(jnp.array([0.0, 2.0, 8.0]), jnp.float32(8), "norm")
    assert gains.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("kind", _gain.GAINS)
def test_everything_sent_is_a_gain_of_exactly_1(kind):
    # Dividing by way of the reciprocal would make 1 - 2**-24 of some of these.
    energies = jnp.arange(1, 200, dtype=jnp.float32) / 7
    gain = jax.jit(jax.vmap(lambda x: _gain.gain(x, x, kind)))
    assert (gain(energies) == 1).all()


def test_rounding_cannot_lift_a_gain_above_1():
    total = jnp.float32(3)
    assert _gain.gain(jnp.nextafter(total, jnp.float32(4)), total) == 1


def test_nothing_to_send_is_all_sent():
    assert _gain.gain(jnp.zeros(3), jnp.zeros(())).tolist() == [1.0, 1.0, 1.0]


def test_an_overflowing_total_makes_the_gain_of_a_finite_part_vanish():
    assert _gain.gain(jnp.float32(1), jnp.float32(jnp.inf)) == 0


def test_averages_weigh_the_newest_step_and_halve_the_others():
    sent = jnp.array([[8.0, 4.0], [4.0, 0.0], [2.0, 2.0]])
    averages = averages_of(sent, jnp.array([16.0, 8.0, 4.0]), 0.5)
    assert averages.sent.tolist() == [3.0, 1.5]
    assert averages.total == 6.0


def test_a_weight_of_1_keeps_the_newest_step_alone():
    averages = averages_of(jnp.array([[8.0], [3.0]]), jnp.array([9.0, 5.0]), 1.0)
    assert (averages.sent.tolist(), float(averages.total)) == ([3.0], 5.0)


def test_the_start_at_zero_cancels_in_the_gain():
    averages = averages_of(jnp.array([[1.0]]), jnp.array([4.0]), 2.0**-10)
    assert _gain.gain(averages.sent, averages.total).tolist() == [0.25]


def test_energies_beyond_float32_are_left_out():
    for bad in (np.inf, np.nan):
        with_bad = averages_of(
            jnp.array([[1.0], [bad], [2.0]]), jnp.array([4.0, bad, 8.0]), 0.5
        )
        without = averages_of(jnp.array([[1.0], [2.0]]), jnp.array([4.0, 8.0]), 0.5)
        assert with_bad.sent == without.sent
        assert with_bad.total == without.total
