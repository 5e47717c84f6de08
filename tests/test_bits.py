"""Bits: levels and words, spared leaves, turns, and how long entries wait."""

import functools

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import N, assert_same, on_host
from _laws import share_and_waits

import gravac_jax as gravac
from gravac_jax import Bits, Bucket
from gravac_jax._encodings import levels
from gravac_jax._encodings.ladder import Ladder
from gravac_jax._encodings.levels import WIDTHS

RNG = np.random.default_rng(0)
SIZE, LARGE = 5000, 2**18  # of buckets; the large one fills rows of 4,096
every_width = pytest.mark.parametrize("bits", WIDTHS)


# Levels and words. -----------------------------------------------------------------


@every_width
def test_the_mean_of_many_is_that_of_what_they_sent(bits):
    x = RNG.standard_normal((levels.MAX_UNROLLED + 1, 5, 96)).astype(np.float32)
    round_rows = lambda x: levels.round_rows(x, jnp.full(5, 96.0), bits)
    rounded = on_host(jax.jit(jax.vmap(round_rows))(x))
    mean = jax.jit(functools.partial(levels.mean, rows=5, bits=bits))
    expected = np.mean(x - rounded.dropped, 0, np.float64)
    np.testing.assert_allclose(mean(rounded.message[:, 0]), expected, atol=1e-6)


def alone(encoding, x, step=0):
    """Return what one replica without others sends."""
    given = {"bucket": Bucket(x.size), "key": jax.random.key(0), "step": step}
    send = lambda x: encoding.exchange(x, (), **given, comm=gravac.Comm(None))[0]
    return on_host(jax.jit(send)(x))


@pytest.mark.parametrize(("n", "row", "last"), [(LARGE, 4096, 4096), (SIZE, 320, 200)])
def test_a_row_of_zeros_sends_zeros_and_a_small_bucket_has_sixteen_rows(n, row, last):
    bucket = np.zeros(n, np.float32)
    bucket[-1] = 3
    mean = alone(Bits(1), bucket).mean
    assert not mean[: -(-n // row) * row - row].any()
    assert float(mean[-1]) == pytest.approx(3 / last)


# What it would send, and how long entries wait. ------------------------------------


@every_width
def test_a_look_at_some_rows_tells_what_all_of_them_would_send(bits):
    encoding, rng = Bits(bits, row_entries=32), np.random.default_rng(6)
    of_layers = 4.0 ** rng.integers(-2, 3, (16, 1)).repeat(128, axis=0)
    rows = (rng.standard_t(4, (2048, 32)) * of_layers).astype(np.float32)
    whole = lambda rows: np.square(rows.astype(np.float64)).sum()
    share = lambda rows: alone(encoding, rows.ravel()).energy / whole(rows)
    keys = jax.random.split(jax.random.key(0), 8)
    found = [share_and_waits(encoding, rows.ravel(), key=x)[0] for x in keys]
    assert len(set(found)) > 1  # other rows each time
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - share(rows)) <= 3 * error + 1e-6
    assert error < 0.02 * share(rows)
    few = rows[:511]
    assert share_and_waits(encoding, few.ravel())[0] == pytest.approx(share(few), 1e-5)


def test_a_look_is_shared_by_rows_of_one_length_alone():
    x, key = RNG.standard_t(3, 2**13).astype(np.float32), jax.random.key(0)
    two = Bits(1), Bits(1, row_entries=32)
    shares = Ladder(two, Bucket(x.size)).shares
    found = jax.jit(lambda x: shares(x, {}, key, 1, False))(x)
    expected = [share_and_waits(encoding, x)[0] for encoding in two]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found[0] < 0.99 * found[1]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("bits", [1, 4])
def test_entries_wait_for_their_turns_and_a_tenth_as_long_for_rounding(bits, turns):
    x = RNG.standard_normal(2**13).astype(np.float32)
    kept, _ = share_and_waits(Bits(bits, row_entries=32), x)
    _, waits = share_and_waits(Bits(bits, turns, row_entries=32), x)
    # An entry is made in any step, waits for its turn, and goes with it by chance.
    tries = 1 + 0.1 * (1 - kept) / kept
    waited = (RNG.integers(0, turns, 200_000) + turns * (tries - 1)).mean()
    assert waits == pytest.approx(waited, rel=0.02)


def test_spared_leaves_are_taken_as_sent():
    encoding, shapes = Bits(2, 4, row_entries=32), ((64,), (2**13 - 64,))
    first = np.eye(1, 2**13, dtype=np.float32)[0]  # which goes in every step
    assert share_and_waits(encoding, first, shapes=shapes) == (1, 0)


# Bytes. ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2**20, 10**6 + 17, 5000])
@pytest.mark.parametrize("bits", [1, 2])
def test_turns_cost_their_part_of_the_bytes_and_as_many_messages(bits, n):
    cost = lambda turns: Bits(bits, turns, row_entries=32).traffic(Bucket(n), N)
    whole = cost(1)
    for turns in (2, 4, 8, 31):
        part = cost(turns)
        assert part.messages == whole.messages
        share = part.payload_bytes / whole.payload_bytes
        assert 1 / turns <= share < 1 / turns + N * 33 / n
    # A part has a row for each replica at least.
    assert Bits(bits, 16).traffic(Bucket(32), N) == Bits(bits).traffic(Bucket(32), N)


def leaves(n, *sizes):
    """Return a bucket of `n` entries of a few small leaves and a large one."""
    return Bucket(n, tuple((size,) for size in (*sizes, n - sum(sizes))))


@pytest.mark.parametrize(
    ("sizes", "turns", "kilo"),
    [
        ((), 4, 0),
        ((100,), 4, 4),
        ((100, 4000), 4, 8),  # in rows of 4,096 entries
        ((100, 16_384), 4, 4),  # the second is not small
        ((8000, 8000, 16_000), 4, 32),
        ((8000, 8000, 16_000), 10, 16),  # all of them would add more than a third
        ((100,), 1, 0),  # takes no turns
    ],
)
def test_small_leaves_are_a_small_part_of_a_message(sizes, turns, kilo):
    n = 2**20
    spared = Bits(4).traffic(Bucket(1024 * kilo), 2).wire_bytes
    rows = -(-(n - 1024 * kilo) // 4096)
    part = -(-rows // turns) * (2 * 4096 // 8 + 8)
    assert Bits(2, turns).traffic(leaves(n, *sizes), 2).wire_bytes == spared + part


@pytest.mark.parametrize("replicas", [1, 2, 3, 12, 64])
@pytest.mark.parametrize("n", [1, 33, 5000, 101_376, 779_264])
def test_small_leaves_add_a_third_at_most(n, replicas):
    sizes = [x for x in (1, 30, 64, 1000, 10_000) if x < n // 2]
    for bits in WIDTHS:
        for turns in (1, 2, 3, 4, 16, 64):
            encoding = Bits(bits, turns)
            alike = encoding.traffic(Bucket(n), replicas)
            spared = encoding.traffic(leaves(n, *sizes), replicas)
            assert spared.payload_bytes <= 4 / 3 * alike.payload_bytes
            assert spared.messages == alike.messages


# In a transform. -------------------------------------------------------------------


def test_a_leaf_is_not_spared_where_nothing_would_be_left():
    params = {"a": np.ones(1, np.float32), "b": np.ones(31, np.float32)}
    for turns in (1, 2):
        tx = gravac.transform(None, compress=True, send=Bits(1, turns))
        assert_same(jax.jit(tx.update)(params, tx.init(params))[0], params)


def halves_of_ones(steps, **recipe):
    """Return what arrives in a run of ones: a bias, and the first entry of halves."""
    params = {"b": np.zeros(32, np.float32), "w": np.zeros((31, 64), np.float32)}
    tx = gravac.transform(compress=True, send=Bits(2, 2, row_entries=32), **recipe)
    ones = jax.tree.map(lambda x: np.ones((steps, N, *x.shape), np.float32), params)
    updates, _ = _harness.trajectory(tx, params, "vmap")(ones)
    halves = updates["w"].reshape(steps, 2, -1)
    assert_same(halves, halves[:, :, :1].repeat(31 * 32, axis=2))
    assert_same(updates["b"], updates["b"][:, :1].repeat(32, axis=1))
    return updates["b"][:, 0].tolist(), halves[:, :, 0].tolist()


def test_each_entry_goes_once_in_two_turns_and_small_leaves_in_each():
    bias, halves = halves_of_ones(4)
    assert bias == [1] * 4
    assert halves == [[1, 0], [0, 2], [2, 0], [0, 2]]


@pytest.mark.parametrize("delay", _harness.choices([0, 1], lambda x: x == 0))
def test_in_rounds_parts_take_turns_as_well(delay):
    """Every second step exchanges, and else the same half would go each time."""
    _, halves = halves_of_ones(8, every=2, delay=delay)
    expected = [[0, 0], [2, 0], [0, 0], [0, 4], [0, 0], [4, 0], [0, 0], [0, 4]]
    if delay:  # what a step makes goes at the end of the next round
        expected[1], expected[3], expected[5] = [1, 0], [0, 3], [4, 0]
    assert halves == expected
