"""The compression gain is the share of the energy that a step sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gravac_jax._evidence import compression_gain


@jax.jit
def averages_of(sent, total, weight):
    step = lambda averages, x: (compression_gain.smooth(averages, *x, weight), None)
    return jax.lax.scan(
        step, compression_gain.no_averages(sent.shape[1]), (sent, total)
    )[0]


def test_the_gain_is_the_share_of_the_energy():
    gains = compression_gain.gain(jnp.array([0.0, 1.0, 2.0, 8.0]), jnp.float32(8))
    assert gains.tolist() == [0.0, 0.125, 0.25, 1.0]


def test_the_norm_is_the_root_of_the_share():
    gains = compression_gain.gain(jnp.array([0.0, 2.0, 8.0]), jnp.float32(8), "norm")
    assert gains.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("kind", compression_gain.GAINS)
def test_everything_sent_is_a_gain_of_exactly_1(kind):
    # Dividing by way of the reciprocal would make 1 - 2**-24 of some of these.
    energies = jnp.arange(1, 200, dtype=jnp.float32) / 7
    gain = jax.jit(jax.vmap(lambda x: compression_gain.gain(x, x, kind)))
    assert (gain(energies) == 1).all()


def test_rounding_cannot_lift_a_gain_above_1():
    total = jnp.float32(3)
    assert compression_gain.gain(jnp.nextafter(total, jnp.float32(4)), total) == 1


@pytest.mark.parametrize("energy", [0.0, 2.0**-101, np.inf, np.nan])
def test_the_gain_of_an_energy_that_float32_cannot_hold_is_0(energy):
    gains = compression_gain.gain(jnp.full(3, energy), jnp.float32(energy))
    assert gains.tolist() == [0.0, 0.0, 0.0]


def test_averages_weigh_the_newest_step_and_halve_the_others():
    sent = jnp.array([[8.0, 4.0], [4.0, 0.0], [2.0, 2.0]])
    averages = averages_of(sent, jnp.array([16.0, 8.0, 4.0]), 0.5)
    assert averages.sent.tolist() == [3.0, 1.5]
    assert averages.total == 6.0


def test_energies_beyond_float32_are_left_out():
    for bad in (np.inf, np.nan):
        with_bad = averages_of(
            jnp.array([[1.0], [bad], [2.0]]), jnp.array([4.0, bad, 8.0]), 0.5
        )
        without = averages_of(jnp.array([[1.0], [2.0]]), jnp.array([4.0, 8.0]), 0.5)
        assert with_bad.sent == without.sent
        assert with_bad.total == without.total
