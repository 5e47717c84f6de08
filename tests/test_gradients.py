"""What holds for gradients of a training run, and over a run, of every compressor."""

import functools

import _recorded
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gravac_jax as gravac
from gravac_jax._comm import Comm
from gravac_jax._compressors import COMPRESSORS
from gravac_jax._compressors.base import chosen, thinned
from gravac_jax._marking import compaction, quantile

pytestmark = pytest.mark.slow

FACTORS = (10, 100, 1000)
LADDER = gravac.geometric(10, 1000)
MEMBERS = [kind() for kind in COMPRESSORS]
# Identity knows no k.
SELECTIVE = [x for x in MEMBERS if not isinstance(x, gravac.Identity)]


def step(compressor, bucket, state, k, key):
    """What a compressor leaves of `bucket`, how many entries it sends, its state."""
    bracket = quantile.bracket(bucket, k, key)
    choice, state = compressor.mark(bucket, state, k=k, bracket=bracket, key=key)
    marks = thinned(choice, k, key)
    return compaction.clear(bucket, marks), marks.total, state


jitted_step = jax.jit(step, static_argnums=0)


def energy_of(x):
    return np.sum(np.square(x.astype(np.float64)))


def energy_of_the_largest(bucket, k):
    return energy_of(np.partition(np.abs(bucket), -k)[-k:])


@pytest.mark.parametrize("compressor", MEMBERS, ids=repr)
def test_on_gradients_it_stays_within_its_declared_deviation(compressor):
    for bucket in _recorded.buckets():
        for factor in FACTORS:
            k, state = (
                compressor.count(bucket.size, factor),
                compressor.init(bucket.size),
            )
            for i in range(3):
                key = jax.random.key(i)
                residual, sent, state = jitted_step(
                    compressor, bucket, state, np.int32(k), key
                )
                energy = energy_of(bucket - np.asarray(residual))
                share = energy / energy_of_the_largest(bucket, k)
                if isinstance(compressor, gravac.Identity):
                    share = energy / energy_of(bucket)
                assert compressor.deviation.entries * k <= int(sent) <= k
                assert compressor.deviation.energy - 1e-9 <= share <= 1 + 1e-9


@pytest.mark.parametrize("compressor", SELECTIVE, ids=repr)
def test_where_a_sample_holds_hardly_any_of_the_largest_some_are_sent(compressor):
    for bucket in _recorded.buckets():
        k, state = compressor.count(bucket.size, 10_000), compressor.init(bucket.size)
        for i in range(3):
            arguments = compressor, bucket, state, np.int32(k), jax.random.key(i)
            _, sent, state = jitted_step(*arguments)
            assert k / 3 <= int(sent) <= k


@functools.cache
def _jitted_exchange(compressor):
    exchange = gravac.AllGather(compressor)
    return jax.jit(
        lambda bucket, state, rung, key: exchange.exchange(
            bucket, state, rung, ladder=LADDER, key=key, comm=Comm(None)
        )
    )


@pytest.mark.parametrize("compressor", [gravac.Threshold(), gravac.TopK()], ids=repr)
def test_the_energies_of_all_rungs_are_exact_or_within_2_percent(compressor):
    for bucket in _recorded.buckets():
        counts = [compressor.count(bucket.size, factor) for factor in LADDER]
        exact = np.array([energy_of_the_largest(bucket, k) for k in counts])
        state = compressor.init(bucket.size)
        for rung in range(len(LADDER)):
            for seed in range(2):  # a threshold needs a step to follow to another rung
                exchanged, state = _jitted_exchange(compressor)(
                    bucket, state, np.int32(rung), jax.random.key(seed)
                )
            sent = energy_of(bucket - np.asarray(exchanged.residual))
            found = np.asarray(exchanged.energies, np.float64)
            np.testing.assert_allclose(found[rung], sent, rtol=1e-5)
            np.testing.assert_allclose(found[0], exact[0], rtol=1e-5)
            others = np.arange(len(LADDER)) != rung
            np.testing.assert_allclose(found[others], exact[others], rtol=0.02)


def test_a_blind_choice_foresees_that_every_rung_sends_its_share():
    bucket = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    exact = energy_of(bucket) / np.asarray(LADDER)
    for rung in range(len(LADDER)):
        exchanged, _ = _jitted_exchange(gravac.RandomK())(
            bucket, (), np.int32(rung), jax.random.key(rung)
        )
        # A share of so few is a draw: 300 squares of normals.
        np.testing.assert_allclose(exchanged.energies, exact, rtol=0.35)


N, STEPS = 100_000, 60


@functools.cache
def _jitted_run(compressor):
    def run(gradient, factor):
        k = jnp.int32(N / factor)

        def advance(carry, key):
            residual, state, times = carry
            bucket = residual + gradient(key)
            residual, _, state = step(compressor, bucket, state, k, key)
            return (residual, state, times + (residual == 0).astype(jnp.int32)), None

        start = jnp.zeros(N), compressor.init(N), jnp.zeros(N, jnp.int32)
        keys = jax.random.split(jax.random.key(0), STEPS)
        return jax.lax.scan(advance, start, keys)[0][2]

    return jax.jit(run, static_argnums=(0, 1))


GRADIENTS = {
    # All alike, and nothing but the residual tells them apart.
    "constant": lambda key: jnp.ones(N),
    "heavy tails": lambda key: jax.random.normal(key, (N,)) ** 3,
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("compressor", SELECTIVE, ids=repr)
def test_over_a_run_no_position_is_preferred(compressor, gradient):
    times = np.asarray(_jitted_run(compressor)(GRADIENTS[gradient], 10))
    tenths = times.reshape(10, -1).sum(1)
    assert times.sum() >= 0.5 * STEPS * N / 10
    # Sums of many entries, each of which is sent about six times or oftener.
    np.testing.assert_allclose(tenths, tenths.mean(), rtol=0.05)


def test_a_run_that_keeps_the_first_prefers_the_front():
    # What the tests above would say of it.
    class First(gravac.TopK):
        def mark(self, bucket, state, *, k, bracket, key):
            del bracket, key
            return chosen(jnp.arange(N, dtype=jnp.int32) < k), state

    times = np.asarray(_jitted_run(First())(GRADIENTS["constant"], 10))
    tenths = times.reshape(10, -1).sum(1)
    assert tenths[0] > 1.05 * tenths.mean()


def test_random_places_send_their_share_of_the_energy_on_average():
    bucket = _recorded.buckets()[0]
    k, shares = bucket.size // 10, []
    whole = energy_of(bucket)
    for i in range(100):
        residual, sent, _ = jitted_step(
            gravac.RandomK(), bucket, (), np.int32(k), jax.random.key(i)
        )
        assert sent == k
        shares.append(energy_of(bucket - np.asarray(residual)) / whole)
    error = np.std(shares) / np.sqrt(len(shares))
    assert abs(np.mean(shares) - 0.1) < 4 * error
