"""Any exchange with any compressor and encoding, in every way to run it.

Every choice occurs in the default run, and any two of them together in it or in the
slow one; `pytest -m exhaustive` runs the rest of the product.
"""

import functools
import itertools
import random

import _examples
import _laws
import _oracles
import jax
import numpy as np
import pytest
from _harness import HARNESSES, agreed, covering, make_mesh

import gravac_jax as gravac
from gravac_jax._comm import Comm
from gravac_jax._compressors import COMPRESSORS
from gravac_jax._encoding import INDEX_ENCODINGS, VALUE_ENCODINGS

n = 256  # entries; BlockTopK has a short block
LADDER = (1.0, 16.0)  # no rung is dearer than dense, with up to 8 replicas
PROGRAMS = 100  # that a process keeps
BUCKETS = _examples.dyadic(8, n, parts=32, seed=2)

ENCODED = {
    "compressor": _examples.members(COMPRESSORS),
    "values": _examples.members(VALUE_ENCODINGS),
    "indices": _examples.members(INDEX_ENCODINGS),
}
LED = {"compressor": ENCODED["compressor"], "leader": ["turn", "energy"]}
# What each exchange can be made of: all of it goes with all of it.
PARTS = {
    gravac.AllGather: ENCODED,
    gravac.LeaderIndices: LED,
    gravac.Cheapest: {
        "exchanges": [(gravac.AllGather(gravac.TopK()), gravac.SharedRandomK())],
        "wire": [gravac.WireCost(latency_seconds=0)],  # so that both are chosen
    },
    gravac.LowRank: {},
    gravac.SharedRandomK: {},
    gravac.DenseMean: {},
    gravac.DenseMean16: {},
}
WAYS = {"how": HARNESSES, "replicas": [1, 2, 3, 7, 8]}


def every_combination():
    """The parts of all exchanges in all ways to run them, in a random order."""
    rows = []
    for kind, parts in PARTS.items():
        row = {"exchange": [kind], **parts, **WAYS}
        product = itertools.product(*row.values())
        rows += [dict(zip(row, x, strict=True)) for x in product]
    random.Random(0).shuffle(rows)
    return rows


def made_of(row):
    """The exchange, the way to run it, the replicas."""
    exchange = row["exchange"](**{x: row[x] for x in PARTS[row["exchange"]]})
    return exchange, row["how"], row["replicas"]


EVERY = every_combination()
chosen = lambda row: map(repr, row.items())
QUICK = list(map(made_of, covering(EVERY, chosen, together=1)))
PAIRED = map(made_of, covering(EVERY, chosen, together=2))
SLOW = [x for x in PAIRED if x not in QUICK]
REST = [x for x in map(made_of, EVERY) if x not in QUICK + SLOW]


def marked(combinations, *marks):
    name = lambda x: "-".join(map(str, x))
    return [pytest.param(x, marks=marks, id=name(x)) for x in combinations]


def exchanged(exchange, how, replicas, rung):
    step, prepare = compiled(exchange, how, replicas)
    mean, residual, energies, _ = step(prepare(BUCKETS[:replicas]), np.int32(rung))
    return agreed(mean), *map(np.asarray, (residual, energies))


@pytest.fixture(autouse=True)
def few_programs_at_a_time():
    """A process may map so many pieces of memory, and each program takes some."""
    yield
    if compiled.cache_info().currsize == PROGRAMS:
        compiled.cache_clear()
        jax.clear_caches()


@functools.lru_cache(PROGRAMS)
def compiled(exchange, how, replicas):
    step = functools.partial(_laws._step, exchange, LADDER, Comm("data"))
    if "shard_map" not in how:
        axes, out_axes = (0, None), (None, 0, 0, 0)
        if how == "pmap":
            step = jax.pmap(
                step,
                "data",
                in_axes=axes,
                out_axes=out_axes,
                devices=jax.devices()[:replicas],
            )
            return step, lambda x: x
        return jax.jit(jax.vmap(step, axes, out_axes, axis_name="data")), lambda x: x
    mesh = make_mesh((replicas,))

    def body(bucket, rung):
        mean, *local = step(bucket[0], rung)
        return mean, *(x[None] for x in local)

    by_replica = jax.P("data")
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(by_replica, jax.P()),
        out_specs=(jax.P(), by_replica, by_replica, by_replica),
        check_vma=how == "shard_map",
    )
    sharding = jax.NamedSharding(mesh, by_replica)
    return jax.jit(mapped), lambda x: jax.device_put(x, sharding)


@pytest.mark.parametrize(
    "case",
    marked(QUICK)
    + marked(SLOW, pytest.mark.slow)
    + marked(REST, pytest.mark.exhaustive),
)
def test_every_combination_is_exchanged_like_the_oracle(case):
    exchange, how, replicas = case
    oracle = _oracles.look_up(_oracles.EXCHANGES, exchange)
    buckets = BUCKETS[:replicas]
    for rung, factor in enumerate(LADDER):
        mean, residual, energies = exchanged(exchange, how, replicas, rung)
        expected = oracle(exchange, buckets, factor)
        _laws.assert_near(exchange, residual, expected.residuals, np.abs(buckets))
        whole = np.square(buckets).sum(1)
        _laws.assert_near(exchange, energies[:, rung], expected.energies, whole)
        # Each value is divided by N, and their sum rounded N times.
        off = np.abs(mean - expected.mean)
        bound = (replicas + 1) * 2.0**-24 * np.abs(buckets - residual).mean(0)
        assert (off <= bound + exchange.tolerance * np.abs(buckets).max()).all()
        if not exchange.tolerance:
            entries = exchange.traffic(n, factor, replicas).entries
            assert np.count_nonzero(buckets - residual, axis=1).max() <= entries
