"""High factors: few bits of a part of the bucket, and every part has its turn."""

import functools
import itertools

import _harness
import _laws
import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, N, assert_same

import gravac_jax as gravac
from gravac_jax import Comm

TURNS = 3
EXCHANGES = {
    "gathered": gravac.Quantized(32),
    "one bit": gravac.Quantized(32, least_bits=1),
    "all-reduced": gravac.QuantizedAllReduce(32),
    "all-reduced, one bit": gravac.QuantizedAllReduce(32, least_bits=1),
    "all-reduced, another way back": gravac.QuantizedAllReduce(32, mean_bits=4),
}
QUICK = ("all-reduced, one bit",)
RARER = "gathered", "one bit", "all-reduced, another way back"
by_exchange = pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)
by_few_exchanges = pytest.mark.parametrize(
    "name", _harness.choices([*QUICK, *RARER], lambda x: x in QUICK)
)
RNG = np.random.default_rng(3)
BUCKETS = RNG.standard_normal((N, 1000)).astype(np.float32)
# No multiple of the turns: the last part overlaps the one before.
PARTS = [slice(start, start + 352) for start in (0, 352, 1000 - 352)]
# The small leaves are within the first row of 32 entries, which goes in every step.
WIDE = RNG.standard_normal((N, 3000)).astype(np.float32)
SMALL, SHAPES = 32, ((20,), (5, 2), (2970,))
STARTS_BESIDE_SMALL = 32, 32 + 992, 3000 - 992
AXIS = Comm("data")
SPARING = (
    gravac.Quantized(),
    gravac.Quantized(least_bits=8),
    gravac.QuantizedAllReduce(),
    gravac.QuantizedAllReduce(least_bits=1, mean_bits=4),
    gravac.QuantizedAllReduce(least_bits=1, mean_bits=1),
)
GRADIENTS = _harness.gaussian_gradients(2 * TURNS)


def ladder(exchange):
    """Return dense steps, the narrowest width of all entries, and that in turns."""
    narrowest = 32.0 / exchange.least_bits
    return (1.0, narrowest, narrowest * TURNS)


@functools.partial(jax.jit, static_argnums=0)
def shares_of(exchange, gradient):
    key, alone = jax.random.key(0), Comm(None)
    return exchange.shares(gradient, ladder(exchange), key, alone)


@functools.cache
def on_all_replicas(exchange):
    @jax.jit
    def run(buckets, rung, step):
        one = lambda bucket: exchange.exchange(
            bucket,
            (),
            rung,
            ladder=ladder(exchange),
            key=jax.random.key(0),
            comm=Comm("data"),
            step=step,
        )[0]
        return jax.vmap(one, axis_name="data")(buckets)

    return run


@by_few_exchanges
def test_a_part_is_exchanged_as_if_alone(name):
    run = on_all_replicas(EXCHANGES[name])
    for step in range(2 * TURNS):
        own, is_other = PARTS[step % TURNS], np.ones(1000, bool)
        expected = run(BUCKETS[:, own], np.int32(1), np.int32(step))
        found = run(BUCKETS, np.int32(2), np.int32(step))
        assert_same(found.mean[:, own], expected.mean)
        assert_same(found.residual[:, own], expected.residual)
        assert_same(found.mean_energies[:, 2], expected.mean_energies[:, 1])
        is_other[own] = False
        assert not found.mean[:, is_other].any()
        assert_same(found.residual[:, is_other], BUCKETS[:, is_other])


@by_few_exchanges
@pytest.mark.parametrize("turns", [1, TURNS])
def test_small_leaves_go_in_every_step_in_four_bits(name, turns):
    exchange, kind = EXCHANGES[name], type(EXCHANGES[name])
    run, bits = on_all_replicas(exchange.shaped(SHAPES)), exchange.least_bits
    oracle = _oracles.EXCHANGES[kind]
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    is_spared = bits < 2 * turns
    for step in range(turns + 1):
        rung, spared = 1 + (turns > 1), np.arange(SMALL if is_spared else 0)
        part = np.arange(3000)
        if turns > 1:
            part = STARTS_BESIDE_SMALL[step % turns] + np.arange(992)
        found = run(WIDE, np.int32(rung), np.int32(step))
        whole = oracle(exchange, WIDE[:, part], 32 / bits)
        energies, is_counted = whole.energies, ~np.isin(part, spared)
        near(found.mean[0, part[is_counted]], whole.mean[is_counted])
        near(found.residual[:, part[is_counted]], whole.residuals[:, is_counted])
        if spared.size:
            fine = oracle(kind(32), WIDE[:, spared], 8)
            near(found.mean[0, spared], fine.mean)
            near(found.residual[:, spared], fine.residuals)
            energies = energies + fine.energies
        if not is_counted.all():
            energies = energies - oracle(exchange, WIDE[:, spared], 32 / bits).energies
        near(found.energies[:, rung], energies)
        is_other = ~np.isin(np.arange(3000), np.concatenate([part, spared]))
        assert not found.mean[:, is_other].any()
        assert_same(found.residual[:, is_other], WIDE[:, is_other])


@by_few_exchanges
def test_a_part_has_its_share_of_the_energy(name):
    found = on_all_replicas(EXCHANGES[name])(BUCKETS, np.int32(1), np.int32(0))
    np.testing.assert_allclose(
        found.energies[:, 2] / found.energies[:, 1], 352 / 1000, rtol=1e-5
    )


@by_exchange
def test_its_share_is_one_that_lets_entries_wait_as_long(exchange):
    gradient = jnp.asarray(BUCKETS[0])
    found = shares_of(exchange, gradient)
    _, whole, in_turn = np.float64(found)
    # An entry is made in any step, waits for its turn, and goes with it by chance.
    rng = np.random.default_rng(0)
    tries = rng.geometric(whole, 200_000)
    waited = rng.integers(0, TURNS, tries.size) + TURNS * (tries - 1)
    assert 1 / in_turn - 1 == pytest.approx(waited.mean(), rel=0.02)


def assert_adds_up(updates, states, gradients):
    """What was sent plus what is kept is what was made."""
    sent = updates["w"].astype(np.float64).sum(0)
    kept = _harness.residual(_harness.at(states, -1)).mean(0, dtype=np.float64)
    made = gradients.astype(np.float64).mean(1).sum(0)
    np.testing.assert_allclose(sent + kept.reshape(sent.shape), made, atol=1e-5)
    assert sent.any()


@pytest.mark.parametrize(
    ("how", "delay"),
    [("vmap", 1), pytest.param("shard_map", 0, marks=pytest.mark.slow)],
)
def test_what_was_made_is_what_was_sent_and_what_is_kept(how, delay):
    transform = gravac.transform(
        compress=COMPRESS,
        memory=gravac.Steps(optax.identity()),
        exchange=gravac.QuantizedAllReduce(32),
        controller=gravac.Fixed(16 * TURNS),
        delay=delay,
    )
    updates, states = _harness.trajectory(transform, PARAMS, how)(GRADIENTS)
    assert_adds_up(updates, states, GRADIENTS["w"])


def test_each_entry_goes_once_in_as_many_steps_as_there_are_turns():
    transform = gravac.transform(
        compress=True, exchange=gravac.Quantized(), controller=gravac.Fixed(32)
    )
    n, params = 1024, np.zeros(1024, np.float32)
    gradients = np.ones((4, N, n), np.float32)
    updates, _ = _harness.trajectory(transform, params, "vmap")(gradients)
    halves = updates.reshape(4, 2, n // 2)
    assert_same(halves, halves[:, :, :1].repeat(n // 2, axis=2))
    assert halves[:, :, 0].tolist() == [[1, 0], [0, 2], [2, 0], [0, 2]]


def test_small_leaves_take_no_turns():
    transform = gravac.transform(
        compress=True, exchange=gravac.Quantized(32), controller=gravac.Fixed(32)
    )
    params = {
        "kernel": np.zeros((31, 64), np.float32),
        "bias": np.zeros(32, np.float32),
    }
    gradients = jax.tree.map(lambda x: np.ones((4, N, *x.shape), np.float32), params)
    updates, _ = _harness.trajectory(transform, params, "shard_map")(gradients)
    assert (updates["bias"] == 1).all()
    halves = updates["kernel"].reshape(4, 2, -1)
    assert_same(halves, halves[:, :, :1].repeat(31 * 32, axis=2))
    assert halves[:, :, 0].tolist() == [[1, 0], [0, 2], [2, 0], [0, 2]]


@pytest.mark.parametrize(
    ("sizes", "factor", "kilo"),
    [
        ((), 64, 0),
        ((100,), 64, 1),
        ((100, 4000), 64, 5),  # in quarters of rows of 4,096 entries
        ((100, 16_384), 64, 1),  # the second is not small
        ((8000, 8000, 16_000), 64, 32),
        ((8000, 8000, 16_000), 160, 16),  # all of them would add more than a third
        ((100,), 16, 0),  # takes no turns
    ],
)
def test_small_leaves_are_a_small_part_of_a_message(sizes, factor, kilo):
    exchange, n = gravac.Quantized(), 2**20
    shaped = exchange.shaped(tuple((size,) for size in (*sizes, n - sum(sizes))))
    bytes_of = lambda exchange: exchange.traffic(n, factor, 2).wire_bytes
    spared = exchange.traffic(1024 * kilo, 8, 2).wire_bytes
    rows = -(-(n - 1024 * kilo) // 4096)
    part = -(-rows // exchange.turns(factor)) * (2 * 4096 // 8 + 8)
    assert bytes_of(shaped) == spared + part


@pytest.mark.parametrize("replicas", [2, 16, 64])
@pytest.mark.parametrize("n", [2**16, 2**18])
def test_with_small_leaves_more_turns_never_send_more(n, replicas):
    exchange = gravac.QuantizedAllReduce(shapes=((1000,), (n - 1000,)))
    factors = [16, *(16 * turns for turns in (2, 3, 4, 8, 16, 32))]
    sent = [exchange.traffic(n, factor, replicas).wire_bytes for factor in factors]
    assert sent == sorted(sent, reverse=True)
    assert (sent[-1] < sent[0]) == (n // 4096 > replicas)


@pytest.mark.parametrize("replicas", [1, 2, 3, 12, 64])
@pytest.mark.parametrize("n", [1, 33, 5000, 101_376, 779_264])
@pytest.mark.parametrize("exchange", SPARING, ids=str)
def test_small_leaves_add_a_third_at_most(exchange, n, replicas):
    leaves = [x for x in (1, 30, 64, 1000, 10_000) if x < n // 2]
    shaped = exchange.shaped(tuple((x,) for x in (*leaves, n - sum(leaves))))
    for factor in (16, 32, 33, 64, 256, 1024):
        alike, spared = (x.traffic(n, factor, replicas) for x in (exchange, shaped))
        assert spared.payload_bytes <= 4 / 3 * alike.payload_bytes
        assert spared.messages == alike.messages


@by_few_exchanges
@pytest.mark.parametrize("rung", [1, 2])
def test_the_bytes_of_small_leaves_are_counted(name, rung):
    exchange, factor = EXCHANGES[name].shaped(SHAPES), ladder(EXCHANGES[name])[rung]
    step = lambda bucket: exchange.exchange(
        bucket, (), np.int32(0), ladder=[factor], key=jax.random.key(0), comm=AXIS
    )[0]
    jaxpr = jax.make_jaxpr(step, axis_env=[("data", N)])(WIDE[0]).jaxpr
    traffic = exchange.traffic(3000, factor, N)
    energies = exchange.energies_traffic(3000, factor, 1, N)
    size, messages = _laws.put_in(jaxpr, 0, 1, N)
    assert size == traffic.payload_bytes + energies.payload_bytes
    assert messages == traffic.messages + energies.messages
    alike = EXCHANGES[name].traffic(3000, factor, N)
    are_spared = exchange.least_bits < rung * 2
    assert (traffic.payload_bytes != alike.payload_bytes) == are_spared
    assert traffic.entries == alike.entries or rung == 2


@pytest.mark.parametrize("replicas", [2, 16])
def test_more_turns_than_owners_allow_send_what_one_bit_does(replicas):
    """Sixteen replicas own a row each of these sixteen, in every step."""
    exchange = gravac.QuantizedAllReduce(least_bits=1, shapes=((20,), (16_364,)))
    sent = [exchange.traffic(16_384, factor, replicas) for factor in (32, 64, 1024)]
    assert (sent[0] == sent[1] == sent[2]) == (replicas == 16)


@by_few_exchanges
def test_what_is_spared_counts_as_sent_at_once(name):
    """Small leaves with half of the energy let a step in turn send half and more."""
    exchange = EXCHANGES[name].shaped(SHAPES)
    bucket = WIDE.copy()
    bucket[:, :SMALL] *= np.sqrt((3000 - SMALL) / SMALL)
    rung, step = np.int32(2), np.int32(0)
    found = on_all_replicas(exchange)(bucket, rung, step)
    given = ladder(exchange), jax.random.key(0), Comm(None)
    for x, sent, energy in zip(bucket, found.energies, found.energy, strict=True):
        looked = exchange.bucket_shares(jnp.asarray(x), *given)[2]
        assert looked == pytest.approx(sent[2] / energy, rel=0.1)
        assert looked > 0.5
        all_alike = EXCHANGES[name].shares(jnp.asarray(x), *given)[2]
        assert exchange.shares(jnp.asarray(x), *given)[2] > all_alike


def test_a_leaf_is_not_spared_where_nothing_would_be_left():
    params = {"a": np.ones(1, np.float32), "b": np.ones(31, np.float32)}
    exchange = gravac.Quantized(least_bits=1)
    for factor in (32, 64):
        tx = gravac.transform(
            None, compress=True, exchange=exchange, controller=gravac.Fixed(factor)
        )
        updates, _ = jax.jit(tx.update)(params, tx.init(params))
        assert_same(updates, params)


def test_a_mix_spares_small_leaves_of_few_bits():
    few_bits, shapes = gravac.Quantized(), ((100,), (2**20 - 100,))
    mixed = gravac.Mixed(few_bits=few_bits).shaped(shapes)
    of = lambda exchange: exchange.traffic(2**20, 64, N)
    assert of(mixed) == of(few_bits.shaped(shapes)) != of(few_bits)


def test_a_bad_gradient_is_left_out_and_nothing_is_lost():
    gradients = jax.tree.map(np.copy, GRADIENTS)
    gradients["w"][1, 2, 0, 0] = np.nan
    transform = gravac.transform(
        compress=COMPRESS,
        exchange=gravac.Quantized(32),
        controller=gravac.Fixed(16 * TURNS),
    )
    updates, states = _harness.trajectory(transform, PARAMS, "vmap")(gradients)
    assert np.isfinite(updates["w"]).all()
    assert updates["w"][1].any()
    assert states.info.bad_steps[-1] == 1
    came_in = GRADIENTS["w"].copy()
    came_in[1, 2] = 0
    assert_adds_up(updates, states, came_in)


@by_exchange
@pytest.mark.parametrize("n", [2**20, 10**6 + 17, 5000])
def test_it_costs_the_fewest_bits_of_a_part(exchange, n):
    narrowest = 32 // exchange.least_bits
    whole = exchange.traffic(n, narrowest, N)
    for turns in (2, 4, 8, 31):
        part = exchange.traffic(n, narrowest * turns, N)
        assert part.messages == whole.messages
        share = part.payload_bytes / whole.payload_bytes
        assert 1 / turns <= share < 1 / turns + N * 33 / n
        assert exchange.traffic(n, narrowest * turns - 1, N) == part


def test_as_many_turns_as_a_factor_asks_for():
    factors = (1, 16, 17, 32, 33, 64, 65, 128, 1000)
    two_bits, one_bit = gravac.Quantized(), gravac.Quantized(least_bits=1)
    assert [two_bits.turns(x) for x in factors] == [1, 1, 2, 2, 3, 4, 5, 8, 63]
    assert [two_bits.bits(x) for x in factors] == [8, 2, 2, 2, 2, 2, 2, 2, 2]
    assert [one_bit.turns(x) for x in factors] == [1, 1, 1, 1, 2, 2, 3, 4, 32]
    with pytest.raises(ValueError, match="`least_bits` must be 8 or 4 or 2 or 1"):
        gravac.Quantized(least_bits=3)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *itertools.product(EXCHANGES, (1, 3)),
        ("gathered", 70),
        pytest.param("all-reduced, one bit", 33, marks=pytest.mark.slow),
        pytest.param("all-reduced, another way back", 70, marks=pytest.mark.slow),
    ],
)
def test_small_buckets_are_no_trouble(name, n):
    exchange, gradient = EXCHANGES[name], jnp.arange(1.0, n + 1)
    shares = shares_of(exchange, gradient)
    assert ((shares > 0) & (shares <= 1)).all()
    assert shares[0] == 1
    found = on_all_replicas(exchange)(BUCKETS[:, :n], np.int32(2), np.int32(1))
    taken, others = found.energies[:, 2], found.energies
    assert_same(others[:, 0], found.energy)
    assert (taken <= found.energy * (1 + 1e-6)).all()


def test_an_empty_bucket_is_no_trouble():
    controller = gravac.Fastest((1, 32))
    tx = gravac.sgd(0.5, None, controller=controller, compress=gravac.matrices())
    params = {"small": jnp.ones(4)}
    with pytest.warns(UserWarning, match="compresses none"):
        state = tx.init(params)
    with pytest.warns(UserWarning, match="no step time"):
        updates, state = jax.jit(tx.update)(params, state)
    assert updates["small"].tolist() == [-0.5] * 4
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.controller.averages))


def test_a_bucket_of_one_row_goes_whole():
    exchange = gravac.QuantizedAllReduce()
    assert exchange.traffic(32, 256, N) == exchange.traffic(32, 16, N)


@pytest.mark.parametrize("delay", _harness.choices([0, 1], lambda x: x == 0))
def test_in_rounds_parts_take_turns_as_well(delay):
    """Every second step exchanges, and else the same half would go each time."""
    controller = gravac.Every(2, gravac.Fixed(32))
    recipe = {"controller": controller, "exchange": gravac.Quantized(), "delay": delay}
    tx = gravac.sgd(1.0, momentum=0.0, compress=True, **recipe)
    n, params = 1024, np.zeros(1024, np.float32)
    gradients = -np.ones((8, N, n), np.float32)
    updates, _ = _harness.trajectory(tx, params, "vmap")(gradients)
    halves = updates.reshape(8, 2, n // 2)[:, :, 0]
    expected = [[0, 0], [2, 0], [0, 0], [0, 4], [0, 0], [4, 0], [0, 0], [0, 4]]
    if delay:  # what a step makes goes at the end of the next round
        expected[1], expected[3], expected[5] = [1, 0], [0, 3], [4, 0]
    assert halves.tolist() == expected


@pytest.mark.parametrize("replicas", [2, 16, 64, 256])
def test_a_part_is_no_smaller_than_what_saves_bytes(replicas):
    exchange, n = gravac.QuantizedAllReduce(), 10**6
    bytes_of = lambda f: exchange.traffic(n, f, replicas).wire_bytes
    for turns in (2, 4, 8, 16):
        due = exchange.traffic(n, 16 * turns, replicas).entries * 16
        fewer = bytes_of(16) / bytes_of(16 * turns)
        assert fewer == pytest.approx(min(turns, n / due), rel=0.15)


def test_a_share_is_that_of_the_bits_though_all_of_them_would_be_dense():
    exchange, replicas = gravac.Quantized(), 32
    gradient = jnp.asarray(RNG.standard_normal(2**16), jnp.float32)
    factors = (1.0, 16.0, 32.0, 64.0)
    entries = exchange.entries(gradient.size, factors, replicas)
    assert [x == gradient.size for x in entries] == [True, True, False, False]
    shares = lambda axis: exchange.shares(
        gradient, factors, jax.random.key(0), Comm(axis)
    )
    of_all = jax.vmap(
        lambda: shares("data"), axis_name="data", axis_size=replicas, out_axes=None
    )
    found, alone = jax.jit(lambda: (of_all(), shares(None)))()
    assert found[:2].tolist() == [1, 1]
    assert_same(found[2:], alone[2:])


def test_own_params_are_where_all_that_waits_leads():
    recipe = {"controller": gravac.Fixed(32), "exchange": gravac.Quantized()}
    tx = gravac.sgd(0.125, compress=True, **recipe)
    step = gravac.train_step(lambda params, batch: jnp.vdot(params, batch), tx, N)
    params, state = step.init(jnp.zeros(1024))
    batches = np.ones((N, 1024), np.float32)
    for _ in range(3):
        params, state, _ = step(params, state, batches.reshape(-1))
    params, state = step.flush(params, state)
    expected = optax.sgd(0.125, momentum=0.9)
    theirs, kept = jnp.zeros(1024), expected.init(jnp.zeros(1024))
    for _ in range(3):
        updates, kept = expected.update(jnp.ones(1024), kept)
        theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(params, theirs, rtol=1e-6)
