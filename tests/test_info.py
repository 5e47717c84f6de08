"""StepInfo reports what a step sent, down to the byte."""

import functools
import operator
import warnings
from itertools import product
from types import SimpleNamespace

import _laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import COMPRESS, ROWS, choices, covering

import gravac_jax as gravac
from gravac_jax import _network
from gravac_jax._encodings import rung_costs
from gravac_jax._encodings.ladder import Ladder
from gravac_jax._step import phases, step_info
from gravac_jax._step.phases import Step

N, LADDER = 4, (gravac.Dense(), gravac.TopK(4), gravac.TopK(1000))
LOCAL = len(LADDER)


def traced(send, size=8, compress=True, replicas=N):
    """Return the program of a step, and the costs from which it reports."""
    tx = gravac.transform(send=send, compress=compress)
    found, work_out = [], rung_costs.rung_costs
    params = {"w": np.zeros((size, size), np.float32), "b": np.zeros(5, np.float32)}
    state, axis_env = tx.init(params), [("data", replicas)]
    with pytest.MonkeyPatch.context() as patch:
        keep = lambda *args: found.append(work_out(*args)) or found[-1]
        patch.setattr(phases, "rung_costs", keep)
        update = functools.partial(tx.update, at="own")  # where all rungs are taken
        jaxpr = jax.make_jaxpr(update, axis_env=axis_env)(params, state).jaxpr
    return jaxpr, found[-1]


@functools.cache
def usual(replicas=N):
    """Return the costs of `LADDER`."""
    return traced(gravac.GraVAC(LADDER), replicas=replicas)[1]


@jax.jit
def report(before, rung, gains, is_bad=False, apart=False, is_told_late=False):
    """Return the report of a step; bad gradients have a norm in common."""
    bad, energy = jnp.float32(is_bad), jnp.float32(1)
    told = SimpleNamespace(bad=bad, sample=(energy, energy - bad))
    figures = SimpleNamespace(told=told, apart=jnp.float32([apart]))
    step = SimpleNamespace(
        rung=rung,
        looks=True,
        state=SimpleNamespace(info=before),
        axes=SimpleNamespace(slow=SimpleNamespace(replicas=N)),
        components=SimpleNamespace(
            is_told_late=is_told_late, controller=SimpleNamespace(looks_at="bucket")
        ),
    )
    evidence = SimpleNamespace(energies=gains, energy=energy)
    return Step.info(step, figures, evidence, usual())


def reports(*rungs, gains=(1.0, 0.5, 0.25)):
    """Return the report after steps at these rungs."""
    info = step_info.before_the_first_step(len(LADDER))
    for rung in rungs:
        if rung == LOCAL:
            info = step_info.of_a_local_step(info, usual().dense.wire_bytes)
        else:
            info = report(info, jnp.int32(rung), jnp.array(gains))
    return info


LADDERS = [
    LADDER,
    (gravac.Dense(), gravac.Dense("bfloat16"), gravac.TopK(16)),
    (gravac.Dense(), gravac.Bits(8), gravac.Bits(1)),
    (gravac.Dense(), gravac.Bits(2), gravac.TopK(64)),
    (gravac.Dense(), gravac.LowRank(1), gravac.TopK(64)),
]
alone = operator.itemgetter(0)
BITS = {  # that the large leaf takes alone
    gravac.Dense(): 32 * 16_384,
    gravac.Dense("bfloat16"): 16 * 16_384,
    gravac.Bits(2): 2 * 16_384 + 16 * 64,  # sixteen rows, with two scales each
    gravac.Bits(1, turns=4): 4_096 + 16 * 64,
    gravac.TopK(100): (16 + 16) * 163 + 32,  # and where the only block ends
    gravac.TopK(100, values="float32"): (32 + 16) * 163 + 32,
    gravac.LowRank(2): 32 * 2 * 256,
}
KINDS = gravac.GraVAC, gravac.Fastest
PLACES = (True, N), (COMPRESS, N), (False, N), (COMPRESS, 2)
COPIED = (N, 0), (N, 2**20), (2, 2**20)
CASES = [(x, y, 8, *where, 2**20) for x, y, where in product(KINDS, LADDERS, PLACES)]
CASES += [(alone, (x,), 128, COMPRESS, *how) for x, how in product(BITS, COPIED)]
# Each choice in the default run, any two together in it or in the slow one.
by_place = lambda row: enumerate(map(repr, row))
SINGLE = covering(CASES, by_place, together=1)
PAIRED = [x for x in covering(CASES, by_place, together=2) if x not in SINGLE]


@pytest.mark.filterwarnings("ignore:gravac.transform compresses none")
@pytest.mark.parametrize("case", choices(SINGLE + PAIRED, SINGLE.__contains__, repr))
def test_every_byte_of_a_step_is_reported(case, monkeypatch):
    kind, ladder, size, compress, replicas, copied_entries = case
    monkeypatch.setattr(_network, "COPIED_ENTRIES", copied_entries)
    jaxpr, table = traced(kind(ladder), size, compress, replicas)
    for rung in range(len(ladder)):
        sent = _laws.put_in(jaxpr, rung, len(ladder), replicas)
        assert (table.payload_bytes[rung], table.messages[rung]) == sent


def test_the_factor_is_dense_bits_over_bits_sent_of_encoded_leaves():
    for send, bits in BITS.items():
        factors = traced(send, 128, COMPRESS)[1].factors
        assert factors.tolist() == [np.float32(32 * 16_384 / bits)]


def test_dense_figures_are_those_of_a_plain_mean_and_one_replica_sends_nothing():
    table = traced(ROWS, 8, COMPRESS)[1]
    assert table.dense[:4] == (32 * 69, 4 * 69, 2 * 3 / 4 * 4 * 69, 6)
    table = usual(replicas=1)
    assert not table.wire_bytes.any()
    assert table.dense.wire_bytes == 0
    assert (table.payload_bytes > 0).all()


def test_the_seconds_of_every_rung_are_predicted_from_its_bytes():
    table, wire = usual(), gravac.WireCost(1024, latency_seconds=1, compute_seconds=2)
    compute, selection, latency, sent = phases._predicted_parts(table, wire).T
    assert sent.dtype == np.float32
    assert (compute == 2).all()
    np.testing.assert_array_equal(selection, np.float32([0, 1e-3, 1e-3]))
    np.testing.assert_array_equal(latency, table.messages)
    np.testing.assert_array_equal(sent, table.wire_bytes / 1024)


def test_a_step_is_reported_from_its_rung():
    before, info = step_info.before_the_first_step(len(LADDER)), reports(1)
    table = usual()
    assert (info.rung, info.factor, info.gain) == (1, table.factors[1], 0.5)
    assert info.gains.tolist() == [1.0, 0.5, 0.25]
    assert info[4:6] == (table.wire_bytes[1], table.dense.wire_bytes)
    assert info.is_finite
    assert info.byte_factor == table.dense.wire_bytes / info.wire_bytes > 1
    assert before.byte_factor == 1
    assert _laws.form(info) == _laws.form(before)
    # A buffer that occurs twice in a state cannot be donated.
    assert len({x.unsafe_buffer_pointer() for x in before}) == len(before)
    info = reports(1, LOCAL, LOCAL)
    assert (info.rung, info.factor, info.gain) == (LOCAL, np.inf, 0)
    assert info.byte_factor == np.inf
    assert (info.wire_bytes, info.local_steps) == (0, 2)
    assert reports(1, LOCAL, 1).local_steps == 0


def test_dense_and_bad_steps_and_disagreements_are_counted():
    info = reports(0, LOCAL, 1, 0)
    assert (info.dense_steps, info.bad_steps) == (2, 0)
    for is_bad in (True, False, True, True):
        info = report(info, jnp.int32(1), jnp.ones(3), is_bad)
        assert info.is_finite == (not is_bad)
    for apart in (False, True, False, True):
        info = report(info, jnp.int32(1), jnp.ones(3), apart=apart)
    assert (info.dense_steps, info.bad_steps, info.disagreements) == (2, 3, 2)
    # What is told late does not make this step a bad one.
    info = report(info, jnp.int32(1), jnp.ones(3), is_bad=True, is_told_late=True)
    assert (info.bad_steps, info.is_finite) == (4, True)


def test_rungs_that_would_send_more_than_dense_are_dense_and_warned_about():
    stages = (gravac.TopK(10), gravac.TopK(20), gravac.TopK(100))
    send = gravac.Scheduled(stages, starts=(5, 9))
    with pytest.warns(UserWarning, match=r"64 replicas TopK\(10\), TopK\(20\) would"):
        table = traced(send, 128, COMPRESS, replicas=64)[1]
    assert table.is_dense.tolist() == [1, 1, 0]
    assert table.factors.tolist()[:2] == [1, 1]
    halves = gravac.Fastest((gravac.Dense(), gravac.Dense("bfloat16")))
    assert traced(halves, 8, COMPRESS)[1].is_dense.tolist() == [1, 0]
    usual = gravac.Fastest().ladder, LADDERS[1][:2], gravac.TopK.geometric(10, 1000)
    for ladder, replicas in zip(usual, (32, 32, 16), strict=True):
        with warnings.catch_warnings(action="error"):
            rung_costs.warn_if_dense([Ladder(ladder, gravac.Bucket(10_000))], replicas)


def test_a_search_begins_at_the_top_where_so_many_replicas_make_every_rung_dense():
    send = gravac.GraVAC((gravac.Dense(), *map(gravac.TopK, (10, 20, 30))))
    tx = gravac.transform(send=send, compress=True)
    step = jax.vmap(tx.update, in_axes=(0, None), axis_name="data")
    _, state = step(jnp.ones((64, 32, 32)), tx.init(jnp.ones((32, 32))))
    assert (state.controller.minimum == len(send.ladder) - 1).all()


# Gradients that are alike on all replicas


@pytest.mark.parametrize(
    ("mapped", "replicas", "how"),
    [
        *(("vmap", 1, {}), ("vmap", 3, {}), ("pmap", N, {})),
        pytest.param("vmap", 3, {"delay": 1}, marks=pytest.mark.slow),
    ],
)
def test_steps_with_averaged_gradients_are_counted(mapped, replicas, how):
    tx = gravac.transform(send=ROWS, weight_decay=0.1, **how)
    own = np.random.default_rng(0).normal(size=(replicas, 8, 8)).astype("f")

    def steps(own, is_averaged):
        gradient = jnp.where(is_averaged, jax.lax.pmean(own, "data"), own)
        step = lambda state, _: (tx.update(gradient, state, jnp.ones((8, 8)))[1], None)
        return jax.lax.scan(step, tx.init(own), length=5)[0].info.alike_steps

    run = {"vmap": lambda f, **how: jax.jit(jax.vmap(f, **how)), "pmap": jax.pmap}
    counts = run[mapped](steps, axis_name="data", in_axes=(0, None))
    expected = 5 - len(how) if replicas > 1 else 0
    assert counts(own, True).tolist() == [expected] * replicas
    clipped = own / np.linalg.norm(own, axis=(1, 2), keepdims=True)
    sparse = np.where(np.arange(64).reshape(8, 8) % 3 > 0, own, 0)  # where few look
    for plain in (own, np.zeros_like(own), clipped, sparse):
        assert counts(plain, False).tolist() == [0] * replicas
