"""Every encoding keeps every law, alone and beside every other one on a ladder."""

import functools
import itertools

import _examples
import _harness
import _laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import N, assert_same, choices, name_of

import gravac_jax as gravac
from gravac_jax import Comm
from gravac_jax._encodings import ENCODINGS
from gravac_jax._encodings.ladder import Ladder

EXAMPLES = _examples.members(ENCODINGS)
QUICK = (gravac.Dense("bfloat16"), *_examples.one_of_each(ENCODINGS))
by_encoding = pytest.mark.parametrize(
    "encoding", choices(EXAMPLES, lambda x: x in QUICK, repr)
)
LAWS_OF_ONE = [x for x in _laws.LAWS_OF_ONE if x != _laws.is_itself_however_it_runs]
BUCKET = _laws.bucket_of(_examples.EXACT)


@by_encoding
@pytest.mark.parametrize("law", [*_laws.ENCODING_LAWS, *LAWS_OF_ONE], ids=name_of)
def test_every_encoding_keeps_the_law(encoding, law):
    law(encoding, _examples.buckets_for(encoding))


@by_encoding
@pytest.mark.parametrize("situation", _examples.SITUATIONS)
@pytest.mark.parametrize("law", LAWS_OF_ONE, ids=name_of)
def test_every_encoding_keeps_the_law_whatever_comes(encoding, situation, law):
    law(encoding, _examples.SITUATIONS[situation])


@pytest.mark.slow
@pytest.mark.parametrize("encoding", EXAMPLES, ids=repr)
def test_every_encoding_is_itself_however_it_runs(encoding):
    """Each way to run it is a program of its own for each size of a bucket."""
    _laws.is_itself_however_it_runs(encoding, _examples.SITUATIONS["gaussian"])


is_quick_way = lambda way: way[0] in QUICK and way[1] == 3
WAYS = [(x, 3) for x in EXAMPLES] + list(itertools.product(QUICK, (1, 2)))
ON_MESH = choices(WAYS, is_quick_way)


@pytest.mark.parametrize("way", ON_MESH)
def test_on_a_mesh_any_replicas_exchange_like_the_oracle(way):
    encoding, replicas = way
    buckets = _examples.buckets_for(encoding)[:replicas]
    steps = _laws.run(encoding, buckets, on_mesh(encoding, replicas))
    _laws.assert_like_oracle(encoding, steps)


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


@pytest.mark.parametrize("encoding", [*EXAMPLES, gravac.Bits(np.int64(2))], ids=repr)
def test_the_name_of_an_encoding_makes_it(encoding):
    assert eval(repr(encoding), vars(gravac)) == encoding


# Ladders. --------------------------------------------------------------------------


def by_bytes(encodings):
    """Return encodings by falling bytes."""
    sent = lambda x: x.traffic(BUCKET, N).wire_bytes
    return tuple(sorted(encodings, key=sent, reverse=True))


# In the default run some encodings; in the slow run each class beside each, too.
QUICK_PAIRS = list(map(by_bytes, zip(QUICK[::2], QUICK[1::2] + QUICK[:1], strict=True)))
CLASSES = itertools.combinations(_examples.one_of_each(ENCODINGS), 2)
PAIRS = dict.fromkeys([*QUICK_PAIRS, *map(by_bytes, CLASSES)])


@pytest.mark.parametrize("law", _laws.LADDER_LAWS, ids=name_of)
@pytest.mark.parametrize("pair", choices(PAIRS, lambda x: x in QUICK_PAIRS, repr))
def test_any_two_encodings_keep_the_law_on_one_ladder(pair, law):
    law(Ladder(pair, BUCKET, is_looked_at=True), _examples.EXACT)


def test_encodings_of_one_class_share_the_largest_state():
    ladder = gravac.LowRank(2), gravac.TopK(9), gravac.LowRank(1)
    states = Ladder(ladder, BUCKET).init()
    assert sorted(states) == ["LowRank", "TopK"]
    assert_same(states["LowRank"], ladder[0].init(BUCKET))


def traced(send, replicas=N):
    """Trace a step of 1,000 entries."""
    tx = gravac.transform(send=send, compress=True, network=gravac.WireCost())
    grads = jax.ShapeDtypeStruct((replicas, 1000), np.float32)
    step = lambda x: tx.update(x, tx.init(x))
    jax.eval_shape(jax.vmap(step, axis_name="data"), grads)


def test_a_ladder_whose_bytes_rise_is_refused_with_its_table():
    ladder = gravac.Dense(), gravac.TopK(100), gravac.Bits(8, row_entries=32)
    message = (
        r"must fall, got for 4 replicas and a step of 1,024 entries:"
        r"\n  Dense\(\) +6,144\n  TopK\(100\) +132\n"
        r"  Bits\(8, row_entries=32\) +1,920\n"
        r"Put the encodings in the order of their bytes"
    )
    with pytest.raises(ValueError, match=message):
        traced(gravac.Fastest(ladder))


def test_encodings_of_equal_bytes_are_no_rise_and_one_replica_sends_none():
    traced(gravac.Scheduled((gravac.Bits(2), gravac.Bits(2, row_entries=2048)), (1,)))
    traced(gravac.Scheduled((gravac.Bits(2), gravac.Dense()), (1,)), replicas=1)
    # Both TopK would send more than what comes before them.
    few = gravac.Dense(), gravac.Dense("bfloat16"), gravac.TopK(10), gravac.TopK(12)
    traced(gravac.Scheduled(few, (1, 2, 3)), replicas=24)


def test_an_empty_bucket_is_no_trouble():
    ladder = gravac.Dense(), gravac.Bits(2), gravac.TopK(100), gravac.LowRank(1)
    controller = gravac.Fastest((*ladder, gravac.Bits(1, turns=8)))
    tx = gravac.sgd(0.5, None, send=controller, compress=gravac.matrices())
    params = {"small": jnp.ones(4)}
    with pytest.warns(UserWarning, match=r"none of the 1 leaves .*compress=True"):
        state = tx.init(params)
    with pytest.warns(UserWarning, match="no step time"):
        updates, state = jax.jit(tx.update)(params, state)
    assert updates["small"].tolist() == [-0.5] * 4
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.controller.averages))
