"""LowRank: ranks, a warm start, and estimates of other ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gravac_jax as gravac
from gravac_jax import Bucket, Comm, LowRank
from gravac_jax._encodings.ladder import Ladder

ROWS, COLUMNS = 40, 30
BUCKET = Bucket(ROWS * COLUMNS, ((ROWS, COLUMNS),))
RANKS = (8, 4, 2, 1)
LADDER = Ladder(tuple(map(LowRank, RANKS)), BUCKET)


def spectrum(values, seed=0):
    """Return a matrix with these singular values, as a bucket."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.standard_normal((ROWS, ROWS)))[0][:, : len(values)]
    right = np.linalg.qr(rng.standard_normal((COLUMNS, COLUMNS)))[0][:, : len(values)]
    return (left * values @ right.T).astype(np.float32).ravel()


FALLING = spectrum(0.8 ** np.arange(20))


@functools.cache
def stepper(rank, bucket=BUCKET):
    """(x, state) -> (sent, state), alone."""
    given = {"bucket": bucket, "key": jax.random.key(0), "step": 0, "comm": Comm(None)}
    return jax.jit(functools.partial(LowRank(rank).exchange, **given))


def begun():
    """Return the state of the ladder, which all ranks share."""
    return LADDER.init()["LowRank"]


def test_a_warm_start_finds_the_largest_direction():
    # One matrix again and again: a step of the power method at a time.
    state, sent = begun(), []
    for _ in range(6):
        found, state = stepper(1)(spectrum([2.0, 1.0, 0.5, 0.25]), state)
        sent.append(float(found.energy))
    assert sent == sorted(sent)
    assert sent[-1] == pytest.approx(4, rel=1e-4)


def test_a_step_of_the_highest_rank_foresees_what_every_rank_sends():
    state = begun()
    for _ in range(8):
        _, state = stepper(8)(FALLING, state)
    key, x = jax.random.key(0), jnp.asarray(FALLING)
    shares_of = lambda state: LADDER.shares(x, {"LowRank": state}, key, 1, False)
    energies_of = jax.jit(lambda state: shares_of(state) * jnp.sum(jnp.square(x)))
    for rank, energy in zip(RANKS, energies_of(state), strict=True):
        sent, after = stepper(rank)(FALLING, state)
        assert float(energy) == pytest.approx(float(sent.energy), rel=0.02)
        # Ranks above the one in use are known from then, those below from now.
        np.testing.assert_allclose(energies_of(after), energies_of(state), rtol=0.02)


def test_entries_wait_as_if_the_largest_were_sent():
    x, bucket = jnp.arange(2.0**12), Bucket(2**12, ((64, 64),))
    looked = LowRank(2).look(x, LowRank(2).init(bucket), bucket, jax.random.key(0))
    top = gravac.TopK(2**12 / 256)  # as many entries as two ranks of 64 and 64 have
    theirs = top.share(top.look(x, (), bucket, jax.random.key(0)), bucket, 1)
    assert LowRank(2).waits(looked, bucket, 1) == pytest.approx(1 / float(theirs) - 1)


def test_unused_directions_survive_a_matrix_of_zeros():
    sent, after = stepper(4)(jnp.zeros(BUCKET.n), begun())
    np.testing.assert_array_equal(after[0].right, begun()[0].right)
    assert not any(x.any() for x in sent)


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60])
def test_directions_do_not_depend_on_the_scale(scale):
    _, one = stepper(8)(FALLING, begun())
    _, other = stepper(8)(FALLING * np.float32(scale), begun())
    np.testing.assert_allclose(other[0].right, one[0].right, rtol=1e-3, atol=1e-5)
