"""Every compressor keeps every law, and does well on gradients of a training run."""

import functools

import _examples
import _laws
import _recorded
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import SUM_ROUNDING, N, choices, trajectory

import gravac_jax as gravac
from gravac_jax._selection import COMPRESSORS, entries, quantile
from gravac_jax._selection.compressor import at_most

# Slow to trace, and no bucket is special to them.
ONE_BUCKET_DOES = (_laws.is_itself_under_jit, _laws.is_itself_under_vmap)
EVERY = _examples.members(COMPRESSORS)
CASES = [
    (compressor, law, bucket)
    for compressor in EVERY
    for law in _laws.COMPRESSOR_LAWS
    for bucket in (["ties"] if law in ONE_BUCKET_DOES else _examples.BUCKETS)
]


def is_quick(case):
    """Tell whether a case is of the exact compressor, or quick and of the default."""
    compressor, law, _ = case
    is_default = isinstance(compressor, gravac.Threshold)
    return isinstance(compressor, gravac.TopK) or (
        is_default and law not in ONE_BUCKET_DOES
    )


def name_of(case):
    compressor, law, bucket = case
    return f"{compressor!r}-{law.__name__}-{bucket}"


@pytest.mark.parametrize("case", choices(CASES, is_quick, name_of))
def test_every_compressor_keeps_the_law(case):
    compressor, law, bucket = case
    law(compressor, *_examples.BUCKETS[bucket])


class DenseWithoutLooks(gravac.Fixed):
    """Dense steps, none of which looks at the other rung."""

    ladder = (1.0, 64.0)

    def looks(self, step, local_steps=0):
        return step < 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shard_map", "vmap"])
def test_a_dense_step_that_does_not_look_leaves_the_compressor_as_it_was(how):
    compressor, controller = gravac.Threshold(), DenseWithoutLooks(1)
    tx = gravac.transform(compressor=compressor, controller=controller, compress=True)
    grads = np.random.default_rng(0).standard_normal((3, N, 256)).astype(np.float32)
    updates, states = trajectory(tx, grads[0, 0], how)(grads)
    np.testing.assert_allclose(updates, grads.mean(1), rtol=0, atol=SUM_ROUNDING * 4)
    assert not states.local.memory[0].residual.any()
    before = jax.tree.leaves(compressor.init(256))
    after = jax.tree.leaves(states.local.exchange)
    for x, first in zip(after, before, strict=True):
        assert np.array_equal(x, np.broadcast_to(first, x.shape))


# On gradients of a training run. -------------------------------------------------

FACTORS = (10, 100, 1000)
LADDER = (1.0, *FACTORS)
# Identity knows no k.
SELECTIVE = [x for x in EVERY if not isinstance(x, gravac.Identity)]

# What each compressor sends on gradients at least, as shares of k and of the energy of
# the k largest entries.
LEAST_SENT = {
    gravac.Identity: (1.0, 1.0),
    gravac.RandomK: (1.0, 0.0),
    gravac.RedSync: (0.8, 0.8),
    gravac.SampledTopK: (0.5, 0.6),
    gravac.Threshold: (0.5, 0.6),
    gravac.TopK: (1.0, 1.0),
}


def step(compressor, bucket, state, k, key):
    """Return what is left of `bucket`, how many entries are sent, and the state."""
    wanted = gravac.Wanted(k, quantile.bracket(bucket, k, key), key)
    choice, state = compressor.mark(bucket, state, wanted)
    marks = at_most(k, choice, bucket, key)
    return entries.clear(bucket, marks), marks.total, state


jitted_step = jax.jit(step, static_argnums=0)


def energy_of(x):
    return np.sum(np.square(x.astype(np.float64)))


def energy_of_the_largest(bucket, k):
    return energy_of(np.partition(np.abs(bucket), -k)[-k:])


@pytest.mark.slow
@pytest.mark.parametrize("compressor", EVERY, ids=repr)
def test_on_gradients_nearly_the_largest_entries_are_sent(compressor):
    least_entries, least_energy = LEAST_SENT[type(compressor)]
    for bucket in _recorded.buckets():
        for factor in FACTORS:
            k = compressor.count(bucket.size, factor)
            state = compressor.init(bucket.size)
            for i in range(3):
                key = jax.random.key(i)
                arguments = compressor, bucket, state, np.int32(k), key
                residual, sent, state = jitted_step(*arguments)
                energy = energy_of(bucket - np.asarray(residual))
                share = energy / energy_of_the_largest(bucket, k)
                assert least_entries * k <= int(sent) <= k
                assert least_energy - 1e-9 <= share <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("compressor", SELECTIVE, ids=repr)
def test_some_entries_are_sent_though_a_sample_holds_hardly_any_of_them(compressor):
    for bucket in _recorded.buckets():
        k, state = compressor.count(bucket.size, 10_000), compressor.init(bucket.size)
        for i in range(3):
            arguments = compressor, bucket, state, np.int32(k), jax.random.key(i)
            _, sent, state = jitted_step(*arguments)
            assert k / 3 <= int(sent) <= k


@functools.cache
def _jitted_exchange(compressor):
    exchange, alone = gravac.AllGather(compressor), gravac.Comm(None)
    return jax.jit(functools.partial(exchange.exchange, ladder=LADDER, comm=alone))


@pytest.mark.slow
def test_the_energies_of_all_rungs_are_exact_or_within_2_percent():
    compressor = gravac.Threshold()
    run = _jitted_exchange(compressor)
    for bucket in _recorded.buckets():
        counts = [compressor.count(bucket.size, factor) for factor in LADDER]
        exact = np.array([energy_of_the_largest(bucket, k) for k in counts])
        state = compressor.init(bucket.size)
        for rung in range(len(LADDER)):
            for seed in range(2):  # a threshold needs a step to follow to another rung
                key = jax.random.key(seed)
                exchanged, state = run(bucket, state, np.int32(rung), key=key)
            sent = energy_of(bucket - np.asarray(exchanged.residual))
            found = np.asarray(exchanged.energies, np.float64)
            np.testing.assert_allclose(found[rung], sent, rtol=1e-5)
            np.testing.assert_allclose(found[0], exact[0], rtol=1e-5)
            others = np.arange(len(LADDER)) != rung
            np.testing.assert_allclose(found[others], exact[others], rtol=0.02)


@pytest.mark.slow
def test_a_blind_choice_sends_its_share_of_the_energy_and_foresees_it():
    bucket = _recorded.buckets()[0]
    k, shares = bucket.size // 10, []
    for i in range(100):
        arguments = gravac.RandomK(), bucket, (), np.int32(k), jax.random.key(i)
        residual, sent, _ = jitted_step(*arguments)
        assert sent == k
        shares.append(energy_of(bucket - np.asarray(residual)) / energy_of(bucket))
    error = np.std(shares) / np.sqrt(len(shares))
    assert abs(np.mean(shares) - 0.1) < 4 * error

    normal = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    exact = energy_of(normal) / np.asarray(LADDER)
    run = _jitted_exchange(gravac.RandomK())
    for rung in range(len(LADDER)):
        exchanged, _ = run(normal, (), np.int32(rung), key=jax.random.key(rung))
        # A share of so few is a draw: 300 squares of normals.
        np.testing.assert_allclose(exchanged.energies, exact, rtol=0.35)


ENTRIES, STEPS = 100_000, 60


def sent_by_tenth(compressor):
    """Return how often each tenth of the positions was sent in a run at factor 10.

    It takes whether all entries of gradients are alike, so that only the residual
    tells them apart; otherwise their tails are heavy.
    """
    k = ENTRIES // 10

    @jax.jit
    def run(is_alike):
        def advance(carry, key):
            residual, state, times = carry
            heavy = jax.random.normal(key, (ENTRIES,)) ** 3
            bucket = residual + jnp.where(is_alike, 1.0, heavy)
            residual, _, state = step(compressor, bucket, state, jnp.int32(k), key)
            return (residual, state, times + (residual == 0).astype(jnp.int32)), None

        zeros = jnp.zeros(ENTRIES)
        start = zeros, compressor.init(ENTRIES), zeros.astype(jnp.int32)
        keys = jax.random.split(jax.random.key(0), STEPS)
        return jax.lax.scan(advance, start, keys)[0][2]

    def tenths(is_alike):
        times = np.asarray(run(is_alike))
        assert times.sum() >= 0.5 * STEPS * k
        return times.reshape(10, -1).sum(1)

    return tenths


@pytest.mark.slow
@pytest.mark.parametrize("compressor", SELECTIVE, ids=repr)
def test_over_a_run_no_position_is_preferred(compressor):
    run = sent_by_tenth(compressor)
    for is_alike in (True, False):
        tenths = run(is_alike)
        # Sums of many entries, each of which is sent about six times or oftener.
        np.testing.assert_allclose(tenths, tenths.mean(), rtol=0.05)


@pytest.mark.slow
def test_a_run_that_keeps_the_first_entries_is_seen_to_prefer_the_front():
    class First(gravac.TopK):
        def mark(self, bucket, state, wanted):
            mask = jnp.arange(bucket.size, dtype=jnp.int32) < wanted.k
            return gravac.Choice.from_mask(mask), state

    tenths = sent_by_tenth(First())(True)
    assert tenths[0] > 1.05 * tenths.mean()
