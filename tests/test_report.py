import warnings

import _examples
import _laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gravac_jax as gravac
from gravac_jax import _buckets, _report

N, LADDER = 4, (1.0, 4.0, 1000.0)
WEIGHTS = {"w": np.ones((8, 8), np.float32), "b": np.ones(5, np.float32)}
TREES = {
    "all compressed": (WEIGHTS, True),
    "some dense": (WEIGHTS, {"w": True, "b": False}),
    "all dense": (WEIGHTS, False),
}
BY_BYTES = gravac.WireCost(latency_seconds=0)
EXCHANGES = [
    gravac.AllGather(),
    gravac.AllGather(gravac.Identity()),
    gravac.LeaderIndices(),
    gravac.DenseMean(),
]


def tables(tree=WEIGHTS, compress=True, exchange=None, replicas=N):
    plan = _buckets.plan(tree, compress)
    exchanges = [exchange or gravac.AllGather()] * len(plan.sizes)
    return _report.tables(plan, exchanges, gravac.Scheduled(len, LADDER), replicas)


after = jax.jit(
    lambda before, rung, gains, is_finite, is_apart=False: _report.after(
        before, tables(), rung, gains, is_finite, jnp.asarray(is_apart), True
    )
)


@pytest.mark.filterwarnings("ignore:gravac.transform compresses none")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("exchange", EXCHANGES, ids=repr)
def test_every_byte_of_a_whole_step_is_reported(exchange, tree):
    params, compress = TREES[tree]
    controller = gravac.GraVAC(ladder=LADDER)
    tx = gravac.transform(exchange=exchange, controller=controller, compress=compress)
    state = tx.init(params)
    jaxpr = jax.make_jaxpr(tx.update, axis_env=[("data", N)])(params, state).jaxpr
    table = tables(params, compress, exchange)
    rungs = len(LADDER)
    for rung in range(rungs + 1):  # and a step that is skipped
        sent = _laws.put_in(jaxpr, rung, rungs, N)
        assert (table.payload_bytes[rung], table.messages[rung]) == sent


def test_a_step_that_looks_reports_the_sample_that_it_sends():
    tx = gravac.transform(compress=True, controller=gravac.Fastest(LADDER))
    looking = 5 * gravac.Fastest().look_every
    grads = {name: jnp.ones((N, *x.shape)) for name, x in WEIGHTS.items()}
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, None), axis_name="data"))
    sent = []
    for steps in (looking, looking + 1):
        state = tx.init(WEIGHTS)._replace(steps=jnp.int32(steps))
        info = step(grads, state)[1].info
        sent.append((float(info.payload_bytes[0]), float(info.wire_bytes[0])))
    sample = 4 * len(LADDER)
    more = [x - y for x, y in zip(*sent, strict=True)]
    assert more == [sample, 2 * (N - 1) / N * sample]


def test_the_factor_is_entries_over_entries_sent():
    assert tables().factors.tolist() == [1, np.float32(69 / 17), 69, np.inf]


def test_the_factor_speaks_of_the_compressed_leaves_alone():
    factors = tables(compress={"w": True, "b": False}).factors
    assert factors.tolist() == [1, 4, 64, np.inf]


def test_without_compressed_leaves_every_step_is_dense():
    table = tables(compress=False)
    assert table.factors.tolist() == [1, 1, 1, np.inf]
    assert len(set(table.payload_bytes[:-1].tolist())) == 1


def test_the_dense_figures_are_those_of_a_plain_mean():
    dense = tables(compress={"w": True, "b": False}).dense
    assert dense == (69, 4 * 69, 2 * 3 / 4 * 4 * 69, 6)


def test_alone_nothing_goes_over_the_wire():
    table = tables(replicas=1)
    assert not table.wire_bytes.any()
    assert table.dense.wire_bytes == 0
    assert (table.payload_bytes > 0).all()


def test_seconds_are_predicted_for_every_rung_from_its_own_bytes():
    wire = gravac.WireCost(1024, latency_seconds=1, compute_seconds=2)
    predicted = _report.predicted_parts(tables(), wire)
    assert (predicted.shape, predicted.dtype) == ((len(LADDER), 4), np.float32)
    table = tables()
    expected = [
        np.full(len(LADDER), 2),
        np.float32(1e-3) * (table.factors > 1)[:-1],
        table.messages[:-1],
        table.wire_bytes[:-1] / 1024,
    ]
    np.testing.assert_array_equal(predicted.T, expected)


def test_a_step_is_reported_from_its_rung():
    gains = jnp.array([1.0, 0.5, 0.25])
    before = _report.before_the_first_step(len(LADDER))
    info = after(before, jnp.int32(1), gains, jnp.array(True))
    table = tables()
    assert info.factor == table.factors[1]
    assert info.gain == 0.5
    assert info.gains.tolist() == gains.tolist()
    assert info.payload_bytes == table.payload_bytes[1]
    assert info.wire_bytes == table.wire_bytes[1]
    assert (info.dense_bytes, info.dense_wire_bytes) == table.dense[1:3]
    assert (info.dense_steps, info.skipped_steps) == (0, 0)


def test_a_skipped_step_sent_nothing_and_gained_nothing():
    before = _report.before_the_first_step(len(LADDER))
    skipped = jnp.int32(len(LADDER))
    info = after(before, skipped, jnp.ones(3), jnp.array(False))
    assert (info.factor, info.gain) == (np.inf, 0)
    assert info.payload_bytes == tables().payload_bytes[-1]
    assert not info.is_finite
    assert (info.dense_steps, info.skipped_steps) == (0, 1)


def test_dense_and_skipped_steps_are_counted():
    info = _report.before_the_first_step(len(LADDER))
    for rung in (0, 3, 1, 0, 3, 3):
        info = after(info, jnp.int32(rung), jnp.ones(3), jnp.array(rung < 3))
    assert (info.dense_steps, info.skipped_steps) == (2, 3)


def test_a_report_keeps_its_form():
    before = _report.before_the_first_step(len(LADDER))
    info = after(before, jnp.int32(2), jnp.ones(3), jnp.array(True))
    assert _laws.form(info) == _laws.form(before)


def test_no_two_figures_share_a_buffer():
    # A buffer that stands twice in a state cannot be donated.
    before = _report.before_the_first_step(len(LADDER))
    pointers = [x.unsafe_buffer_pointer() for x in before]
    assert len(set(pointers)) == len(pointers)


def test_rungs_that_would_send_more_than_dense_are_dense_and_warned_about():
    buckets = _buckets.plan(np.zeros(10_000, np.float32), True)
    ladder = (1.0, 10.0, 20.0, 100.0)
    exchanges = [gravac.AllGather(**_examples.WIDE)]
    table = _report.tables(buckets, exchanges, gravac.Scheduled(len, ladder), 32)
    assert table.factors.tolist() == [1, 1, 1, 100, np.inf]
    assert (np.diff(table.wire_bytes) <= 0).all()
    with pytest.warns(UserWarning, match=r"32 replicas the factors \[10.0, 20.0\] "):
        _report.warn_if_dense(buckets, exchanges, ladder, 32)


@pytest.mark.parametrize(
    ("exchange", "replicas"),
    [
        (gravac.AllGather(), 16),
        (gravac.AllGather(**_examples.WIDE), 8),
        (gravac.AllGather(gravac.Identity()), 32),
        (gravac.DenseMean(), 32),
        (gravac.Cheapest((gravac.AllGather(), gravac.LeaderIndices()), BY_BYTES), 32),
        (gravac.Cheapest((gravac.AllGather(), gravac.DenseMean16()), BY_BYTES), 32),
    ],
    ids=repr,
)
def test_rungs_that_are_what_they_say_are_not_warned_about(exchange, replicas):
    buckets = _buckets.plan(np.zeros(10_000, np.float32), True)
    ladder = gravac.GraVAC().ladder
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _report.warn_if_dense(buckets, [exchange], ladder, replicas)
