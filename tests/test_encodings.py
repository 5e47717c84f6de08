"""Every encoding keeps every law, alone and beside every other one on a ladder."""

import functools
import itertools

import _examples
import _harness
import _laws
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, assert_same, choices, covering, name_of

import gravac_jax as gravac
from gravac_jax import Bucket, Comm
from gravac_jax._encodings import ENCODINGS
from gravac_jax._encodings.ladder import Ladder

EXAMPLES = _examples.members(ENCODINGS)
QUICK = (gravac.Dense(), gravac.Dense("bfloat16"), *_examples.one_of_each(ENCODINGS))
by_encoding = pytest.mark.parametrize(
    "encoding", choices(EXAMPLES, lambda x: x in QUICK, repr)
)
is_quick_law = lambda law: law is not _laws.is_itself_however_it_runs
BUCKET = _laws.bucket_of(_examples.EXACT)


@by_encoding
@pytest.mark.parametrize(
    "law", choices(_laws.ENCODING_LAWS + _laws.LAWS_OF_ONE, is_quick_law)
)
def test_every_encoding_keeps_the_law(encoding, law):
    law(encoding, _examples.buckets_for(encoding))


@by_encoding
@pytest.mark.parametrize("situation", _examples.SITUATIONS)
@pytest.mark.parametrize("law", choices(_laws.LAWS_OF_ONE, is_quick_law))
def test_every_encoding_keeps_the_law_whatever_comes(encoding, situation, law):
    law(encoding, _examples.SITUATIONS[situation])


WAYS = list(itertools.product(EXAMPLES, ("shard_map", "vmap"), (1, 2, 3)))
is_quick_way = lambda row: row[0] in QUICK and row[1:] == ("shard_map", 3)


@pytest.mark.parametrize(
    "row", choices(WAYS, is_quick_way, lambda row: "-".join(map(str, row)))
)
def test_on_a_mesh_and_simulated_any_replicas_exchange_like_the_oracle(row):
    encoding, how, replicas = row
    step = None if how == "vmap" else on_mesh(encoding, replicas)
    buckets = _examples.buckets_for(encoding)[:replicas]
    _laws.assert_like_oracle(encoding, _laws.run(encoding, buckets, step))


def on_mesh(encoding, replicas):
    """Return a step of all replicas, each of them on its device."""
    step = functools.partial(_laws.exchange, encoding, Comm("data"))
    split, whole = jax.P("data"), jax.P()
    mapped = jax.shard_map(
        _laws.on_one(step),
        mesh=_harness.make_mesh((replicas,)),
        in_specs=(split, split, whole),
        out_specs=(gravac.Sent(whole, split, split), split),
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("platform", choices(["cuda", "tpu"], lambda x: x == "tpu"))
@by_encoding
def test_accelerators_exchange_what_cpus_do(encoding, platform, monkeypatch):
    buckets = _examples.buckets_for(encoding)
    on_cpu = list(_laws.run(encoding, buckets))
    there = lambda *args, default, **others: others.get(platform, default)(*args)
    monkeypatch.setattr(jax.lax, "platform_dependent", there)
    step = _laws.jitted.__wrapped__(encoding)
    for x, expected in zip(_laws.run(encoding, buckets, step), on_cpu, strict=True):
        for a, b in zip(x.sent[:2], expected.sent[:2], strict=True):
            _laws.assert_near(a, b, _laws.tolerance(encoding), x.x)
        np.testing.assert_allclose(x.sent.energy, expected.sent.energy, rtol=1e-4)


@pytest.mark.parametrize("encoding", EXAMPLES, ids=repr)
def test_the_name_of_an_encoding_makes_it(encoding):
    assert eval(repr(encoding), vars(gravac)) == encoding


# Ladders. --------------------------------------------------------------------------


def by_bytes(encodings):
    """Return encodings by falling bytes."""
    sent = lambda x: x.traffic(BUCKET, N).wire_bytes
    return tuple(sorted(encodings, key=sent, reverse=True))


PAIRS = [by_bytes(pair) for pair in itertools.combinations(EXAMPLES, 2)]
# Each encoding at least once, in the default run.
QUICK_PAIRS = covering(PAIRS, lambda pair: map(repr, pair), 1)


@pytest.mark.parametrize("law", _laws.LADDER_LAWS, ids=name_of)
@pytest.mark.parametrize("pair", choices(PAIRS, lambda x: x in QUICK_PAIRS, repr))
def test_any_two_encodings_keep_the_law_on_one_ladder(pair, law):
    law(Ladder(pair, BUCKET, is_looked_at=True), _examples.EXACT)


SEVERAL = (gravac.Bits(2, row_entries=32), gravac.LowRank(1), gravac.TopK(20))


def program(rung):
    """Return the program of a rung that is known when it is compiled."""
    ladder = Ladder(SEVERAL, BUCKET)
    step = functools.partial(_laws.climb, ladder, looks=False, step=0)
    trace = jax.make_jaxpr(
        lambda x: step(x, ladder.init(), np.int32(rung)), axis_env=[("data", N)]
    )
    return str(trace(_examples.EXACT[0]))


def test_a_program_for_one_rung_has_nothing_of_the_others():
    has = lambda word: [word in program(rung) for rung in range(len(SEVERAL))]
    assert has("all_to_all[") == [True, False, False]
    assert has("qr[") == [False, True, False]
    assert has("population_count") == [False, False, True]


@pytest.mark.parametrize("rung", choices([0, 1], lambda x: x == 0))
def test_a_rung_that_is_known_sends_what_its_branch_sends(rung):
    buckets, ladder = _examples.EXACT, Ladder(SEVERAL[:2], BUCKET)
    states = _laws.stacked(ladder.init(), N)
    expected = _laws.climbed(ladder, buckets, states, rung, False, 0)
    step = lambda x, states: _laws.climb(ladder, x, states, np.int32(rung), False, 0)
    found = jax.jit(jax.vmap(step, axis_name="data"))(buckets, states)
    assert_same(jax.tree.map(np.asarray, found), expected)


def test_encodings_of_one_class_share_the_largest_state():
    short = gravac.LowRank(2, values="bfloat16")  # sends less than rank 1
    states = Ladder((gravac.LowRank(1), gravac.TopK(9), short), BUCKET).init()
    assert sorted(states) == ["LowRank", "TopK"]
    assert_same(states["LowRank"], short.init(BUCKET))


def test_the_bytes_of_a_ladder_are_those_of_its_encodings_and_of_what_rides():
    ladder = Ladder(
        (gravac.Dense(), gravac.Bits(2), gravac.TopK(100)), Bucket(409_600), True
    )
    # The energy that is sent, that of the bucket, three estimates, and ten figures.
    dense, bits, top = (ladder.traffic(rung, 10, N) for rung in range(3))
    assert dense.wire_bytes == 1.5 * 4 * (409_600 + 15)
    assert dense.bits == 32 * 409_600
    # Both ways 100 rows of 4,096 entries, and a fourth of 16 figures.
    assert bits.wire_bytes == 2 * 3 * (25 * (4096 // 4 + 8) + 4 * 4)
    # To each of three others 4,096 values and places, and the ends of seven blocks;
    # five energies go along, and ten figures around a ring of their own.
    assert top.wire_bytes == 3 * (4 * 4096 + 4 * 7 + 4 * 5) + 1.5 * 4 * 10
    assert [x.messages for x in (dense, bits, top)] == [6, 6, 3 + 6]


def trained(send, replicas=N, **recipe):
    """Return the state after one step of 1,000 ones."""
    tx = gravac.transform(send=send, compress=True, network=gravac.WireCost(), **recipe)
    grads = np.ones((replicas, 1000), np.float32)
    state = tx.init(grads[0])
    update = jax.vmap(lambda x: tx.update(x, state)[1], axis_name="data")
    return jax.jit(update)(grads)


def test_a_ladder_whose_bytes_rise_is_refused_with_its_table():
    ladder = gravac.Dense(), gravac.TopK(100), gravac.Bits(8, row_entries=32)
    message = (
        r"must fall, got for 4 replicas and a step of 1,024 entries:"
        r"\n  Dense\(\) +6,144\n  TopK\(100\) +132\n"
        r"  Bits\(8, row_entries=32\) +1,920\n"
    )
    with pytest.raises(ValueError, match=message):
        trained(gravac.Fastest(ladder))


def test_encodings_of_equal_bytes_are_no_rise():
    trained(gravac.Scheduled((gravac.Bits(2), gravac.Bits(2, mean_bits=2)), (1,)))


def test_what_would_weigh_more_than_a_dense_step_is_one():
    ladder = gravac.TopK(2), gravac.TopK(100)
    assert Ladder(ladder, Bucket(1000)).taken(2) == ladder
    assert Ladder(ladder, Bucket(1000)).taken(N) == (gravac.Dense(), ladder[1])
    with pytest.warns(UserWarning, match=r"with 4 replicas TopK\(2\) would send more"):
        state = trained(ladder[0])
    assert (state.info.factor == 1).all()
    assert (state.info.dense_steps == 1).all()
    assert not any(x.any() for x in jax.tree.leaves(state.local.memory))


def test_an_empty_bucket_is_no_trouble():
    ladder = gravac.Dense(), gravac.Bits(2), gravac.TopK(100), gravac.LowRank(1)
    controller = gravac.Fastest((*ladder, gravac.Bits(1, turns=8)))
    tx = gravac.sgd(0.5, None, send=controller, compress=gravac.matrices())
    params = {"small": jnp.ones(4)}
    with pytest.warns(UserWarning, match="compresses none"):
        state = tx.init(params)
    with pytest.warns(UserWarning, match="no step time"):
        updates, state = jax.jit(tx.update)(params, state)
    assert updates["small"].tolist() == [-0.5] * 4
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.controller.averages))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "rung"), [(4, 2), (512, 1)])
def test_entries_are_sent_where_few_are_large_and_bits_elsewhere(rows, rung):
    """Each row of a batch is the gradient of a row of a table; others are zeros."""
    # Slow enough that bytes count for more than the messages of a selection.
    network = gravac.WireCost(bytes_per_second=1e7, compute_seconds=1e-3)
    controller = gravac.Fastest((gravac.Dense(), gravac.Bits(2), gravac.TopK(100)))
    tx = gravac.transform(network=network, send=controller)
    loss_fn = lambda params, batch: jnp.sum(params["w"][batch["row"]] * batch["x"])
    step = gravac.train_step(loss_fn, optax.chain(tx, optax.sgd(0.1)), N)
    params, opt_state = step.init({"w": jnp.zeros((512, 64))})
    for i in range(40):
        draw = np.random.default_rng(i)
        x = draw.standard_normal((N, 512, 64)).astype(np.float32)
        x[:, rows:] = 0
        places = np.concatenate([draw.permutation(512) for _ in range(N)])
        batch = {"row": places, "x": x.reshape(N * 512, 64)}
        params, opt_state, _ = step(params, opt_state, batch)
    assert optax.tree.get(opt_state, "StepInfo").rung == rung
