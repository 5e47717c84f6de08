"""TopK on gradients of a training run, and ladders of rising factors."""

import itertools
import math

import _examples
import _recorded
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _laws import share_and_waits

import gravac_jax as gravac
from gravac_jax import Bucket, Comm, Sent, TopK
from gravac_jax._encodings.top_k import SELECT

by_selection = pytest.mark.parametrize("select", SELECT)

# Ladders. --------------------------------------------------------------------------


def factors(ladder):
    """Return the factors of a ladder that begins with a dense step."""
    assert ladder[0] == gravac.Dense()
    return tuple(x.factor for x in ladder[1:])


def test_the_ladders_of_the_paper_are_reproduced():
    assert factors(TopK.exponential(10, 1000)) == (10, 20, 40, 160, 1000)
    paper = (10, 20, 40, 80, 160, 320, 640, 1280, 2000)
    assert factors(TopK.geometric(10, 2000)) == paper
    assert factors(TopK.geometric(1.5, 10)) == (1.5, 3, 6, 10)
    # A minimum of 1 is the dense step itself.
    assert factors(TopK.geometric(1, 8)) == (2, 4, 8)
    assert factors(TopK.exponential(1, 100)) == (2, 4, 16, 100)
    options = {"select": "exact", **_examples.WIDE}
    _, *rungs = TopK.geometric(10, 20, **options)
    assert rungs == [TopK(10, **options), TopK(20, **options)]


both_policies = pytest.mark.parametrize("policy", [TopK.exponential, TopK.geometric])


@both_policies
@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.floats(1, 1e6), min_size=2, max_size=2, unique=True))
def test_a_ladder_rises_from_the_minimum_to_the_maximum(policy, bounds):
    ladder = (1, *factors(policy(min(bounds), max(bounds))))
    assert all(low < high for low, high in itertools.pairwise(ladder))
    assert ladder[-1] == max(bounds)
    assert min(bounds) in ladder[:2]


TOO_SLOW = [(10, 100, x) for x in (1, 0.5, -2, math.nan)]


@pytest.mark.parametrize(
    "bounds", [(100, 10), (10, 10), (0.1, 10), (10, math.inf), *TOO_SLOW]
)
def test_what_does_not_rise_is_refused(bounds):
    for policy in (TopK.exponential, TopK.geometric)[len(bounds) - 2 :]:
        with pytest.raises(ValueError, match=r"below|at least 1|`multiplier`"):
            policy(*bounds)


# Estimates. ------------------------------------------------------------------------


def test_small_entries_of_a_selection_wait_longer_than_its_share_says():
    gradient = np.random.default_rng(0).standard_t(3, 2**14).astype(np.float32)
    for factor in (16.0, 512.0):
        share, waits = share_and_waits(TopK(factor), gradient)
        by_chance, longer = 1 / share - 1, (1 - share) * factor / 32
        assert waits == pytest.approx(by_chance + longer, rel=2e-3)
    assert longer > by_chance > 1


# On gradients of a training run. ---------------------------------------------------

# What each selection sends on gradients at least, as shares of k and of the energy of
# the k largest entries.
LEAST_SENT = {"threshold": (0.5, 0.6), "sampled": (0.5, 0.6), "exact": (1.0, 1.0)}


def step(encoding, x, state, key):
    """Return what is left of `x`, how many entries are sent, and the state."""
    given = {"bucket": Bucket(x.size), "key": key, "step": 0, "comm": Comm(None)}
    sent, state = encoding.exchange(x, state, **given)
    return sent.residual, jnp.sum(sent.residual != x), state


jitted_step = jax.jit(step, static_argnums=0)


@by_selection
def test_it_works_with_64_bit_types_enabled(select):
    x, encoding = _examples.ROUGH[0, :100], TopK(4, select=select)
    with jax.enable_x64(True):
        given = jnp.asarray(x), encoding.init(Bucket(100)), jax.random.key(0)
        assert 20 <= jitted_step(encoding, *given)[1] <= 25


def energy_of(x):
    return np.sum(np.square(x.astype(np.float64)))


def energy_of_the_largest(x, k):
    return energy_of(np.partition(np.abs(x), -k)[-k:])


def sent_of(factor, select):
    """Yield a bucket, what is left, and how much is sent, over a few steps."""
    encoding = TopK(factor, select=select, **_examples.WIDE)
    for x in _recorded.buckets():
        state = encoding.init(Bucket(x.size))
        for key in jax.random.split(jax.random.key(0), 3):
            residual, sent, state = jitted_step(encoding, x, state, key)
            yield x, np.asarray(residual), int(sent)


@pytest.mark.slow
@by_selection
def test_on_gradients_nearly_the_largest_entries_are_sent(select):
    least_entries, least_energy = LEAST_SENT[select]
    for factor in (10, 1000):
        for x, residual, sent in sent_of(factor, select):
            k = x.size // factor
            share = energy_of(x - residual) / energy_of_the_largest(x, k)
            assert least_entries * k <= sent <= k
            assert least_energy - 1e-9 <= share <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "rel"), [(10, 0.02), (100, 0.1)])
def test_samples_tell_on_average_what_the_largest_entries_have(factor, rel):
    for x in _recorded.buckets():
        exact = energy_of_the_largest(x, x.size // factor) / energy_of(x)
        keys = jax.random.split(jax.random.key(0), 8)
        found = [share_and_waits(TopK(factor), x, key)[0] for key in keys]
        assert np.mean(found) == pytest.approx(exact, rel)


ENTRIES, STEPS = 70_000, 40  # more than are sampled


def sent_by_tenth(encoding):
    """Return how often each tenth of the positions was sent in a run at factor 10.

    It takes whether all entries of gradients are alike, so that only the residual
    tells them apart; otherwise their tails are heavy.
    """

    @jax.jit
    def run(is_alike):
        def advance(carry, key):
            residual, state, times = carry
            heavy = jax.random.normal(key, (ENTRIES,)) ** 3
            x = residual + jnp.where(is_alike, 1.0, heavy)
            residual, _, state = step(encoding, x, state, key)
            return (residual, state, times + (residual == 0).astype(jnp.int32)), None

        zeros = jnp.zeros(ENTRIES)
        start = zeros, encoding.init(Bucket(ENTRIES)), zeros.astype(jnp.int32)
        keys = jax.random.split(jax.random.key(0), STEPS)
        return jax.lax.scan(advance, start, keys)[0][2]

    def tenths(is_alike):
        times = np.asarray(run(is_alike))
        assert times.sum() >= 0.5 * STEPS * ENTRIES / 10
        return times.reshape(10, -1).sum(1)

    return tenths


@pytest.mark.slow
@pytest.mark.usefixtures("fast_keys")
@by_selection
def test_over_a_run_no_position_is_preferred(select):
    run = sent_by_tenth(TopK(10, select=select, **_examples.WIDE))
    for is_alike in (True, False):
        tenths = run(is_alike)
        # Sums of many entries, each of which is sent about four times or oftener.
        np.testing.assert_allclose(tenths, tenths.mean(), rtol=0.05)


@pytest.mark.slow
def test_a_run_that_keeps_the_first_entries_is_seen_to_prefer_the_front():
    class First(TopK):
        def exchange(self, x, state, **others):
            k = self.slots(x.size)
            mean = x.at[k:].set(0)
            return Sent(mean, x.at[:k].set(0), jnp.sum(mean**2)), state

    tenths = sent_by_tenth(First(10))(True)
    assert tenths[0] > 1.05 * tenths.mean()
