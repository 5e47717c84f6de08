"""Every exchange keeps every law, and returns what its oracle returns."""

import functools

import _examples
import _laws
import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import choices

import gravac_jax as gravac
from gravac_jax._comm import Comm
from gravac_jax._exchanges import EXCHANGES

EXAMPLES = _examples.members(EXCHANGES)
ids = repr

# What summing N float32 may be off by, as a share of the sum of magnitudes.
SUM_RTOL = _examples.REPLICAS * 2**-24


# One of each kind, of all-gathers the default; the others in the slow run.
QUICK = {type(x): x for x in (*reversed(EXAMPLES), gravac.AllGather())}
is_quick = lambda x: x in QUICK.values()


@pytest.mark.parametrize("law", _laws.EXCHANGE_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("exchange", choices(EXAMPLES, is_quick))
def test_every_exchange_keeps_the_law(exchange, law):
    law(exchange, _examples.EXCHANGED, _examples.LADDER)


@pytest.mark.parametrize("exchange", EXAMPLES, ids=ids)
def test_a_bucket_of_one_entry_is_sent_whole_at_every_factor(exchange):
    for rung in range(len(_examples.LADDER)):
        mean, residual, *_ = _laws.exchanged(
            exchange, _examples.EXCHANGED[:, :1], _examples.LADDER, rung
        )
        if exchange.is_rounded:
            assert mean[0] == pytest.approx(_examples.EXCHANGED[:, 0].mean(), 2**-7)
        else:
            assert mean[0] == _examples.EXCHANGED[:, 0].mean()
            assert not residual.any()


@pytest.mark.parametrize("exchange", EXAMPLES, ids=ids)
def test_arbitrary_values_are_selected_exactly_and_summed_to_rounding(exchange):
    rng = np.random.default_rng(3)
    buckets = rng.standard_normal(_examples.EXCHANGED.shape).astype(np.float32)
    oracle = _oracles.look_up(_oracles.EXCHANGES, exchange)
    for rung, factor in enumerate(_examples.LADDER):
        mean, residual, *_ = _laws.exchanged(exchange, buckets, _examples.LADDER, rung)
        expected = oracle(exchange, buckets, factor)
        _laws.assert_near(exchange, residual, expected.residuals, np.abs(buckets))
        off = np.abs(mean - expected.mean) - exchange.tolerance * np.abs(buckets).max()
        assert (off <= SUM_RTOL * np.abs(buckets).mean(0)).all()
        _laws.assert_same(mean, np.stack([mean[0]] * len(mean)))


@pytest.mark.parametrize("exchange", EXAMPLES, ids=ids)
def test_the_rung_is_data_and_one_executable_serves_the_ladder(exchange):
    step = _laws._jitted_step.__wrapped__(exchange, _examples.LADDER, is_alone=False)
    for rung in range(len(_examples.LADDER)):
        step(_examples.EXCHANGED, np.int32(rung))
    assert step._cache_size() == 1


def test_a_gathered_entry_costs_a_value_with_its_index_times_the_others():
    traffic = gravac.AllGather().traffic(1000, factor=10, replicas=5)
    end_of_block = 4
    payload_bytes = 100 * (2 + 2) + end_of_block
    assert traffic == (100, payload_bytes, 4 * payload_bytes, 4)


def test_factor_1_costs_as_much_as_a_dense_mean():
    for replicas in (1, 2, 5):
        gathered = gravac.AllGather().traffic(1000, factor=1, replicas=replicas)
        dense = gravac.DenseMean().traffic(1000, factor=1, replicas=replicas)
        assert gathered == dense
        turns = replicas - 1
        assert dense == (1000, 4000, 2 * turns / replicas * 4000, 2 * turns)


def test_one_collective_carries_values_and_indices_together():
    exchange, ladder = gravac.AllGather(), (8.0,)
    jaxpr = jax.make_jaxpr(
        lambda x: _laws._step(exchange, ladder, Comm("data"), x, np.int32(0)),
        axis_env=[("data", 4)],
    )(_examples.EXCHANGED[0])
    assert str(jaxpr).count("all_gather[") == 1
    assert "psum[" not in str(jaxpr)


def exchanged_alone(exchange, bucket, state, rung, ladder=(1.0, 4.0)):
    key, alone = jax.random.key(0), Comm(None)
    step = functools.partial(exchange.exchange, ladder=ladder, key=key, comm=alone)
    return jax.jit(step)(bucket, state, np.int32(rung))


def test_a_leader_that_did_not_suit_is_forgotten_in_dense_steps():
    exchange = gravac.LeaderIndices(gravac.TopK())
    bucket = jnp.asarray(_examples.EXCHANGED[0])
    state = exchange.init(bucket.size, (1.0, 4.0))._replace(agreement=np.float32(0))
    for expected in (0.5, 0.75):
        exchanged, state = exchanged_alone(exchange, bucket, state, rung=0)
        assert state.agreement == expected
        assert exchanged.energies[1] > 0


def test_a_replica_that_selects_nothing_has_finite_energies():
    exchange = gravac.LeaderIndices(gravac.TopK())
    bucket = jnp.zeros(40)
    state = exchange.init(bucket.size, (1.0, 4.0))
    exchanged, state = exchanged_alone(exchange, bucket, state, rung=1)
    assert np.isfinite(exchanged.energies).all()
    assert state.agreement == 1


def test_what_is_cheapest_changes_with_the_network_and_with_the_replicas():
    wide = gravac.AllGather(**_examples.WIDE)
    gathered, led = both = wide, gravac.LeaderIndices()
    by_bytes = gravac.Cheapest(both, gravac.WireCost(latency_seconds=0))
    by_messages = gravac.Cheapest(both, gravac.WireCost(1e12, latency_seconds=1))
    # 8 (N - 1) bytes an entry against 16 (N - 1) / N: as many at N = 2.
    taken = [by_bytes.choices(10_000, (100,), n)[0] for n in (1, 2, 3, 8)]
    assert taken == [gathered, gathered, led, led]
    assert by_messages.choices(10_000, (10, 100), 3) == [gathered, gathered]
    assert by_messages.traffic(10_000, 100, 3) == gathered.traffic(10_000, 100, 3)


def test_a_choice_of_one_exchange_is_that_exchange():
    only = gravac.AllGather(gravac.TopK())
    chosen = gravac.Cheapest((only,))
    for rung in range(len(_examples.LADDER) + 1):
        arguments = _examples.EXCHANGED, _examples.LADDER, rung
        expected = _laws.exchanged(only, *arguments)
        for x, y in zip(_laws.exchanged(chosen, *arguments), expected, strict=True):
            _laws.assert_same(x, y)


def test_what_is_not_chosen_stays_as_it_was_while_the_rung_wanders():
    # 50 entries by an all-gather, 12 messages of a leader's being too many; 500 led.
    wire = gravac.WireCost(bytes_per_second=1000, latency_seconds=0.1)
    wide = gravac.AllGather(gravac.TopK(), **_examples.WIDE)
    both = wide, gravac.LeaderIndices(gravac.TopK())
    exchange, ladder, n = gravac.Cheapest(both, wire), (1.0, 4.0, 40.0), 2000
    assert exchange.choices(n, ladder, 4) == [both[0], both[1], both[0]]

    @functools.partial(jax.vmap, in_axes=(0, 0, None), axis_name="data")
    def step(bucket, state, rung):
        return exchange.exchange(
            bucket,
            state,
            rung,
            ladder=ladder,
            key=jax.random.key(0),
            comm=Comm("data"),
        )

    step = jax.jit(step)
    rng = np.random.default_rng(0)
    stack = lambda x: jnp.stack([x] * 4)
    state = jax.tree.map(stack, exchange.init(n, ladder))
    turns = []
    for rung in (1, 2, 1, 3, 0, 1, 2):
        bucket = rng.integers(-64, 65, (4, n)).astype(np.float32)
        exchanged, state = step(bucket, state, np.int32(rung))
        sent = bucket - np.asarray(exchanged.residual)
        np.testing.assert_array_equal(exchanged.mean, stack(sent.mean(0)))
        turns.append(int(state[1].turn[0]))
    assert turns == [1, 1, 2, 2, 2, 3, 3]
    assert step._cache_size() == 1
