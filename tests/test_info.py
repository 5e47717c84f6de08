"""StepInfo reports what a step sent, down to the byte."""

import functools
import warnings

import _laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import ROWS, covering

import gravac_jax as gravac
from gravac_jax import _info, _network
from gravac_jax._encodings.ladder import Ladder

N, LADDER = 4, (gravac.Dense(), gravac.TopK(4), gravac.TopK(1000))
LOCAL = len(LADDER)
WEIGHTS = {"w": np.ones((8, 8), np.float32), "b": np.ones(5, np.float32)}
LARGE = {"w": np.zeros((128, 128), np.float32), "b": np.zeros(5, np.float32)}
IS_MATRIX = {"w": True, "b": False}


def traced(send, params=WEIGHTS, compress=True, replicas=N):
    """Return the program of a step, and the tables from which it reports."""
    tx, found, tables = gravac.transform(send=send, compress=compress), [], _info.tables
    state, axis_env = tx.init(params), [("data", replicas)]
    with pytest.MonkeyPatch.context() as patch:
        keep = lambda *args: found.append(tables(*args)) or found[-1]
        patch.setattr(_info, "tables", keep)
        update = functools.partial(tx.update, at="own")  # where all rungs are taken
        jaxpr = jax.make_jaxpr(update, axis_env=axis_env)(params, state).jaxpr
    return jaxpr, found[-1]


@functools.cache
def usual(replicas=N):
    """Return the tables of `LADDER`."""
    return traced(gravac.GraVAC(LADDER), replicas=replicas)[1]


@jax.jit
def report(before, rung, gains, is_bad=False, apart=0.0):
    info = _info.after(before, usual(), rung, gains, jnp.float32(1))
    is_bad, apart = jnp.asarray(is_bad), jnp.asarray(apart)
    return _info.count_faults(
        info, is_bad=is_bad, is_told_late=False, is_alike=is_bad, apart=apart
    )


def reports(*rungs, gains=(1.0, 0.5, 0.25)):
    """Return the report after steps at these rungs."""
    info = _info.before_the_first_step(len(LADDER))
    for rung in rungs:
        info = report(info, jnp.int32(rung), jnp.array(gains))
    return info


LADDERS = [
    LADDER,
    (gravac.Dense(), gravac.Dense("bfloat16"), gravac.TopK(16)),
    (gravac.Dense(), gravac.Bits(8), gravac.Bits(1)),
    (gravac.Dense(), gravac.Bits(2), gravac.TopK(64)),
    (gravac.Dense(), gravac.LowRank(1), gravac.TopK(64)),
]
CASES = [
    (kind, ladder, compress, replicas)
    for kind in (gravac.GraVAC, gravac.Fastest)
    for ladder in LADDERS
    for compress, replicas in [(True, N), (IS_MATRIX, N), (False, N), (IS_MATRIX, 2)]
]
# Each choice in the default run, any two together in it or in the slow one.
by_place = lambda row: enumerate(map(repr, row))
SINGLE = covering(CASES, by_place, together=1)
PAIRED = covering(CASES, by_place, together=2)


@pytest.mark.filterwarnings("ignore:gravac.transform compresses none")
@pytest.mark.parametrize(
    ("kind", "ladder", "compress", "replicas"),
    [
        pytest.param(*x, marks=() if x in SINGLE else pytest.mark.slow)
        for x in [*SINGLE, *(x for x in PAIRED if x not in SINGLE)]
    ],
    ids=repr,
)
def test_every_byte_of_a_whole_step_is_reported(kind, ladder, compress, replicas):
    jaxpr, table = traced(kind(ladder), WEIGHTS, compress, replicas)
    for rung in range(len(ladder)):
        sent = _laws.put_in(jaxpr, rung, len(ladder), replicas)
        assert (table.payload_bytes[rung], table.messages[rung]) == sent


KNOWN = [
    (send, *others)
    for send in [
        gravac.Dense(),
        gravac.Dense("bfloat16"),
        gravac.Bits(2),
        gravac.Bits(2, turns=4),
        gravac.LowRank(2),
        gravac.TopK(64),
    ]
    for others in [(0, N), (2**20, N), (2**20, 2)]
]


@pytest.mark.parametrize(
    ("send", "copied_entries", "replicas"),
    covering(KNOWN, by_place, together=2),
    ids=repr,
)
def test_every_byte_of_a_step_of_one_encoding_is_reported(
    send, copied_entries, replicas, monkeypatch
):
    monkeypatch.setattr(_network, "COPIED_ENTRIES", copied_entries)
    jaxpr, table = traced(send, LARGE, IS_MATRIX, replicas)
    sent = _laws.put_in(jaxpr, 0, 1, replicas)
    assert (table.payload_bytes[0], table.messages[0]) == sent


@pytest.mark.parametrize(
    ("send", "bits"),
    [
        (gravac.Dense(), 32 * 16_384),
        (gravac.Dense("bfloat16"), 16 * 16_384),
        # Sixteen rows, with two scales each.
        (gravac.Bits(2), 2 * 16_384 + 16 * 64),
        (gravac.Bits(1, turns=4), 4_096 + 16 * 64),
        # Values and places, and where the only block ends.
        (gravac.TopK(100), (16 + 16) * 163 + 32),
        (gravac.TopK(100, values="float32", indices="int32"), (32 + 32) * 163),
        (gravac.LowRank(2), 32 * 2 * 256),
    ],
    ids=repr,
)
def test_the_factor_is_dense_bits_over_bits_sent_of_encoded_leaves(send, bits):
    factors = traced(send, LARGE, IS_MATRIX)[1].factors
    assert factors.tolist() == [np.float32(32 * 16_384 / bits), np.inf]


def test_the_dense_figures_are_those_of_a_plain_mean():
    table = traced(ROWS, WEIGHTS, IS_MATRIX)[1]
    assert table.dense[:4] == (32 * 69, 4 * 69, 2 * 3 / 4 * 4 * 69, 6)


def test_one_replica_alone_sends_nothing_over_the_wire():
    table = usual(replicas=1)
    assert not table.wire_bytes.any()
    assert table.dense.wire_bytes == 0
    assert (table.payload_bytes[:LOCAL] > 0).all()


def test_the_seconds_of_every_rung_are_predicted_from_its_bytes():
    wire = gravac.WireCost(1024, latency_seconds=1, compute_seconds=2)
    table = usual()
    predicted = _info.predicted_parts(table, wire)
    assert predicted.dtype == np.float32
    expected = [
        np.full(len(LADDER), 2),
        np.float32([0, 1e-3, 1e-3]),
        table.messages[:-1],
        table.wire_bytes[:-1] / 1024,
    ]
    np.testing.assert_array_equal(predicted.T, expected)


def test_a_step_is_reported_from_its_rung():
    info, table = reports(1), usual()
    assert (info.rung, info.factor, info.gain) == (1, table.factors[1], 0.5)
    assert info.gains.tolist() == [1.0, 0.5, 0.25]
    assert info.payload_bytes == table.payload_bytes[1]
    assert info.wire_bytes == table.wire_bytes[1]
    assert (info.dense_bytes, info.dense_wire_bytes) == table.dense[1:3]
    assert info.is_finite
    before = _info.before_the_first_step(len(LADDER))
    assert _laws.form(info) == _laws.form(before)


def test_the_byte_factor_is_dense_bytes_over_bytes_sent():
    info, table = reports(2), usual()
    assert info.byte_factor == table.dense.wire_bytes / info.wire_bytes > 1
    assert _info.before_the_first_step(len(LADDER)).byte_factor == 1


def test_a_local_step_sends_nothing_at_all_and_is_counted():
    info = reports(1, LOCAL, LOCAL)
    assert (info.rung, info.factor, info.gain) == (LOCAL, np.inf, 0)
    assert info.byte_factor == np.inf
    assert (info.payload_bytes, info.wire_bytes, info.local_steps) == (0, 0, 2)
    assert reports(1, LOCAL, 1).local_steps == 0


def test_dense_and_bad_steps_and_disagreements_are_counted():
    info = reports(0, LOCAL, 1, 0)
    assert (info.dense_steps, info.bad_steps) == (2, 0)
    for is_bad in (True, False, True, True):
        info = report(info, jnp.int32(1), jnp.ones(3), is_bad)
        assert info.is_finite == (not is_bad)
    for apart in (0.0, 0.5, 0.0, 1.0):
        info = report(info, jnp.int32(1), jnp.ones(3), apart=apart)
    assert (info.dense_steps, info.bad_steps, info.disagreements) == (2, 3, 2)


def test_what_is_told_late_is_counted_and_is_no_bad_step():
    info = _info.count_faults(
        reports(1),
        is_bad=jnp.bool(True),
        is_told_late=True,
        is_alike=jnp.bool(False),
        apart=jnp.zeros(1),
    )
    assert (info.bad_steps, info.is_finite) == (1, True)


def test_no_two_figures_share_a_buffer():
    # A buffer that occurs twice in a state cannot be donated.
    before = _info.before_the_first_step(len(LADDER))
    pointers = [x.unsafe_buffer_pointer() for x in before]
    assert len(set(pointers)) == len(pointers)


def test_rungs_that_would_send_more_than_dense_are_dense_and_warned_about():
    stages = (gravac.TopK(10), gravac.TopK(20), gravac.TopK(100))
    send = gravac.Scheduled(stages, starts=(5, 9))
    with pytest.warns(UserWarning, match=r"64 replicas TopK\(10\), TopK\(20\) would"):
        table = traced(send, LARGE, IS_MATRIX, replicas=64)[1]
    assert table.is_dense.tolist() == [1, 1, 0, 0]
    assert table.factors.tolist()[:2] == [1, 1]


@pytest.mark.parametrize(
    ("ladder", "replicas"),
    [
        (gravac.TopK.geometric(10, 1000), 16),
        (gravac.TopK.geometric(10, 1000, values="float32", indices="int32"), 8),
        (gravac.Fastest().ladder, 32),
        ((gravac.Dense(), gravac.Dense("bfloat16")), 32),
    ],
    ids=repr,
)
def test_rungs_that_send_what_they_say_are_not_warned_about(ladder, replicas):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _info.warn_if_dense([Ladder(ladder, gravac.Bucket(10_000))], replicas)


# Gradients that are alike on all replicas


@pytest.mark.parametrize(
    ("replicas", "delay"), [(1, 0), (3, 0), pytest.param(3, 1, marks=pytest.mark.slow)]
)
def test_steps_whose_gradients_were_averaged_before_are_counted(replicas, delay):
    tx = gravac.transform(send=ROWS, delay=delay)
    own = np.random.default_rng(0).normal(size=(replicas, 8, 8)).astype("f")

    def counting(gradient_of):
        def steps(own):
            step = lambda state, _: (tx.update(gradient_of(own), state)[1], None)
            return jax.lax.scan(step, tx.init(own), length=5)[0].info.alike_steps

        return jax.jit(jax.vmap(steps, axis_name="data"))

    averaged = counting(lambda x: jax.lax.pmean(x, "data"))
    plain = counting(lambda x: x)
    expected = 5 - delay if replicas > 1 else 0
    assert averaged(own).tolist() == [expected] * replicas
    assert plain(own).tolist() == [0] * replicas
    assert plain(np.zeros_like(own)).tolist() == [0] * replicas


def test_gradients_that_a_clip_gives_the_same_norm_are_not_alike():
    clip = gravac.ClipByGlobalNorm(0.1)
    tx = gravac.transform(send=ROWS, clip=clip)
    own = np.random.default_rng(0).normal(size=(3, 8, 8)).astype("f")
    update = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x)), axis_name="data"))
    assert update(own)[1].info.alike_steps.tolist() == [0] * 3


def test_pmap_does_not_hide_a_mean_that_was_left_in():
    tx = gravac.transform(send=ROWS)
    grads = np.random.default_rng(0).normal(size=(N, 8, 8)).astype("f")
    state = jax.pmap(tx.init)(grads)
    local = jax.pmap(tx.update, "data")
    averaged = jax.pmap(
        lambda x, state: tx.update(jax.lax.pmean(x, "data"), state), "data"
    )
    assert local(grads, state)[1].info.alike_steps.tolist() == [0] * N
    assert averaged(grads, state)[1].info.alike_steps.tolist() == [1] * N
