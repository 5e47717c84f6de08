"""Every exchange keeps every law, on a mesh and simulated."""

import functools
import itertools
import random

import _examples
import _laws
import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import agreed, assert_same, choices, covering, make_mesh, name_of

import gravac_jax as gravac
from gravac_jax import Comm
from gravac_jax._exchanges import EXCHANGES
from gravac_jax._selection import COMPRESSORS
from gravac_jax._selection.wire_format import INDICES, VALUES

LADDER = _examples.LADDER
EXAMPLES = _examples.members(EXCHANGES)
# One of each kind that is a default, or that others are compared with; the rest in the
# slow run.
QUICK = gravac.AllGather, gravac.DenseMean, gravac.Quantized, gravac.QuantizedAllReduce
FIRST = {type(x): x for x in (*reversed(EXAMPLES), gravac.AllGather())}
by_exchange = pytest.mark.parametrize(
    "exchange",
    choices(EXAMPLES, lambda x: type(x) in QUICK and x == FIRST[type(x)]),
)

# What summing N float32 may be off by, as a share of the sum of magnitudes.
SUM_RTOL = _examples.REPLICAS * 2**-24


@pytest.mark.parametrize("law", _laws.EXCHANGE_LAWS, ids=lambda law: law.__name__)
@by_exchange
def test_every_exchange_keeps_the_law(exchange, law):
    law(exchange, _examples.EXCHANGED, LADDER)


@by_exchange
def test_a_bucket_of_one_entry_is_sent_whole_at_every_factor(exchange):
    bucket = _examples.EXCHANGED[:, :1]
    rtol = 2**-7 * _laws.rounds_the_mean(exchange)
    for rung in range(len(LADDER)):
        received = _laws.exchanged(exchange, bucket, LADDER, rung)
        assert received.mean[0] == pytest.approx(bucket.mean(), rtol)
        assert rtol or not received.residual.any()


@by_exchange
def test_arbitrary_values_are_selected_exactly_and_summed_to_rounding(exchange):
    rng = np.random.default_rng(3)
    buckets = rng.standard_normal(_examples.EXCHANGED.shape).astype(np.float32)
    oracle = _oracles.look_up(_oracles.EXCHANGES, exchange)
    for rung, factor in enumerate(LADDER):
        received = _laws.exchanged(exchange, buckets, LADDER, rung)
        expected = oracle(exchange, buckets, factor)
        sizes = np.abs(buckets)
        _laws.assert_near(exchange, received.residual, expected.residuals, sizes)
        bound = _laws.tolerance(exchange) * sizes.max() + SUM_RTOL * sizes.mean(0)
        assert (np.abs(received.mean - expected.mean) <= bound).all()
        assert (received.mean == received.mean[0]).all()


@by_exchange
def test_the_rung_is_data_and_one_executable_serves_the_ladder(exchange):
    step = _laws._jitted_step(exchange, LADDER)
    sizes = set()
    for rung in range(len(LADDER)):
        step(_examples.EXCHANGED, np.int32(rung), np.bool_(True))
        sizes.add(step._cache_size())
    assert len(sizes) == 1


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


def alone(exchange, bucket, state, rung, ladder=(1.0, 4.0)):
    """Return the outcome and the state of one step of one replica."""
    step = functools.partial(
        exchange.exchange, ladder=ladder, key=jax.random.key(0), comm=Comm(None)
    )
    return jax.jit(step)(bucket, state, np.int32(rung))


@pytest.mark.parametrize(
    "exchange",
    choices(
        [gravac.AllGather(), gravac.QuantizedTopK()],
        lambda x: isinstance(x, gravac.AllGather),
        repr,
    ),
)
def test_accelerators_exchange_what_cpus_do(exchange, monkeypatch):
    rng = np.random.default_rng(5)
    buckets = rng.standard_t(3, (3, 5000)).astype(np.float32)
    ladder = (1.0, 64.0)

    of_all = lambda rung: _laws.on_replicas(
        exchange, buckets, ladder, rung, looks=jnp.bool_(True)
    )[0]
    rungs = list(map(jnp.int32, range(len(ladder))))
    on_cpu = list(map(of_all, rungs))
    elsewhere = lambda *args, default, **_: default(*args)
    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)
    for rung, expected in zip(rungs, on_cpu, strict=True):
        received = of_all(rung)
        assert_same(received.residual, expected.residual)
        assert_same(received.mean, expected.mean)
        np.testing.assert_allclose(
            received.mean_energies, expected.mean_energies, rtol=1e-4
        )


def test_each_replica_leads_in_its_turn():
    buckets = np.random.default_rng(7).standard_normal((3, 40)).astype(np.float32)
    exchange = gravac.LeaderIndices(gravac.TopK())

    @jax.jit
    def run(step):
        one = lambda bucket: exchange.exchange(
            bucket,
            exchange.init(40, (4.0,)),
            np.int32(0),
            ladder=(4.0,),
            key=jax.random.key(0),
            comm=Comm("data"),
            step=step,
        )[0]
        return jax.vmap(one, axis_name="data")(buckets)

    for step in range(4):
        largest = np.argsort(-np.abs(buckets[step % 3]))[:10]
        assert set(np.flatnonzero(run(np.int32(step)).mean[0])) == set(largest)


def test_a_leader_that_did_not_suit_is_forgotten_in_dense_steps():
    exchange = gravac.LeaderIndices(gravac.TopK())
    bucket = jnp.asarray(_examples.EXCHANGED[0])
    state = exchange.init(bucket.size, (1.0, 4.0))._replace(agreement=np.float32(0))
    for expected in (0.5, 0.75):
        exchanged, state = alone(exchange, bucket, state, rung=0)
        assert state.agreement == expected
        assert exchanged.energies[1] > 0


def test_a_replica_that_selects_nothing_has_finite_energies():
    exchange = gravac.LeaderIndices(gravac.TopK())
    bucket = jnp.zeros(40)
    state = exchange.init(bucket.size, (1.0, 4.0))
    exchanged, state = alone(exchange, bucket, state, rung=1)
    assert np.isfinite(exchanged.energies).all()
    assert state.agreement == 1


# Any exchange with any compressor and encoding, on a mesh and simulated: any two
# choices together, and of every choice alone those on a mesh in the default run. -----

WAYS = {"how": ["shard_map", "vmap"], "replicas": [1, 2, 3]}
SELECTING = {"compressor": _examples.members(COMPRESSORS)}
# What each exchange can be made of: each part goes with every other.
PARTS = {
    gravac.AllGather: SELECTING | {"values": VALUES, "indices": INDICES},
    gravac.LeaderIndices: SELECTING,
    gravac.LowRank: {"values": ["float32", "bfloat16"]},
    gravac.Mixed: {
        "few_bits": [gravac.QuantizedAllReduce(32), gravac.Quantized(32)],
        "sparse": [gravac.AllGather(**_examples.WIDE), gravac.QuantizedTopK(2, 32)],
        "sparse_factors": [(16.0,), (1.0, 16.0)],
    },
    gravac.Quantized: {"row_entries": [32, 64]},
    gravac.QuantizedAllReduce: {"row_entries": [32], "mean_bits": [None, 4]},
    gravac.QuantizedTopK: {"bits": [2, 1], "row_entries": [32, 4096]},
    gravac.SharedRandomK: {},
    gravac.DenseMean: {"values": ["float32", "bfloat16"]},
}
STEEP = (1.0, 16.0)  # no rung is dearer than dense, with up to 8 replicas
BUCKETS = _examples.dyadic(8, 256, parts=32, seed=2)


def every_combination():
    """Return the parts of all exchanges in all ways, in a random order."""
    rows = []
    for kind, parts in PARTS.items():
        product = itertools.product(*parts.values(), *WAYS.values())
        names = (*parts, *WAYS)
        rows += [{"kind": kind, **dict(zip(names, x, strict=True))} for x in product]
    random.Random(0).shuffle(rows)
    return rows


def together(count):
    return covering(EVERY, lambda row: map(repr, row.items()), count)


EVERY = every_combination()
SINGLE = together(1)
PAIRED = [x for x in together(2) if x not in SINGLE]
is_quick = lambda row: row in SINGLE and row["how"] == "shard_map"
all_names = lambda row: "-".join(map(name_of, row.values()))


def compiled(exchange, how, replicas):
    """Return one step of all replicas, and what brings their buckets to devices."""
    step = functools.partial(_laws._step, exchange, STEEP, Comm("data"))
    if how == "vmap":
        out_axes = gravac.Exchanged(None, 0, 0, 0, None)
        mapped = jax.vmap(step, (0, None), out_axes, axis_name="data")
        return jax.jit(mapped), lambda x: x

    def body(bucket, rung):
        mean, *local, mean_energies = step(bucket[0], rung)
        return gravac.Exchanged(mean, *(x[None] for x in local), mean_energies)

    mesh, split, whole = make_mesh((replicas,)), jax.P("data"), jax.P()
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(split, whole),
        out_specs=gravac.Exchanged(whole, split, split, split, whole),
    )
    sharding = jax.NamedSharding(mesh, split)
    return jax.jit(mapped), lambda x: jax.device_put(x, sharding)


@pytest.mark.parametrize("row", choices(SINGLE + PAIRED, is_quick, all_names))
def test_every_combination_is_exchanged_like_the_oracle(row):
    exchange = row["kind"](**{x: row[x] for x in PARTS[row["kind"]]})
    replicas = row["replicas"]
    step, prepare = compiled(exchange, row["how"], replicas)
    oracle = _oracles.look_up(_oracles.EXCHANGES, exchange)
    buckets = BUCKETS[:replicas]
    whole = np.square(buckets).sum(1)
    for rung, factor in enumerate(STEEP):
        out = step(prepare(buckets), np.int32(rung))
        received = jax.tree.map(agreed, out)
        expected = oracle(exchange, buckets, factor)
        sizes = np.abs(buckets)
        _laws.assert_near(exchange, received.residual, expected.residuals, sizes)
        energies = received.energies[:, rung]
        _laws.assert_near(exchange, energies, expected.energies, whole)
        # Each value is divided by N, and their sum rounded N times.
        bound = (replicas + 1) * 2.0**-24 * np.abs(buckets - received.residual).mean(0)
        bound += _laws.tolerance(exchange) * sizes.max()
        bound += 2.0**-7 * sizes.max() * _laws.rounds_the_mean(exchange)
        assert (np.abs(received.mean - expected.mean) <= bound).all()
        if exchange.sends_whole_entries:
            entries = exchange.traffic(BUCKETS.shape[1], factor, replicas).entries
            sent = np.count_nonzero(buckets - received.residual, axis=1)
            assert sent.max() <= entries


SELECTIONS = gravac.AllGather(), gravac.QuantizedTopK(), gravac.LeaderIndices()


@pytest.mark.parametrize(
    "exchange", choices(SELECTIONS, lambda x: isinstance(x, gravac.AllGather), repr)
)
def test_small_entries_of_a_selection_wait_longer_than_its_share_says(exchange):
    gradient = np.random.default_rng(0).standard_t(3, 2**14).astype(np.float32)
    factors, given = (1.0, 16.0, 512.0), (jax.random.key(0), Comm(None))
    sent = np.asarray(exchange.bucket_shares(jnp.asarray(gradient), factors, *given))
    found = exchange.shares(jnp.asarray(gradient), factors, *given)
    by_chance = [1 / x - 1 for x in sent.tolist()]
    longer = [(1 - x) * f / 32 for x, f in zip(sent.tolist(), factors, strict=True)]
    waiting = np.add(by_chance, longer)
    np.testing.assert_allclose(1 / np.asarray(found) - 1, waiting, rtol=2e-3)
    assert longer[-1] > by_chance[-1] > 1


def test_other_exchanges_wait_as_their_shares_say():
    gradient, given = jnp.arange(2.0**12), (jax.random.key(0), Comm(None))
    for exchange in (gravac.SharedRandomK(), gravac.LowRank(((64, 64),))):
        sent = exchange.bucket_shares(gradient, (1.0, 16.0), *given)
        assert_same(exchange.shares(gradient, (1.0, 16.0), *given), sent)
