"""LowRank: ladders of ranks, a warm start, and estimates of other ranks."""

import functools

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import assert_same

import gravac_jax as gravac
from gravac_jax import Comm

ROWS, COLUMNS, N = 40, 30, 4
PARAMS = {"a": jnp.ones((ROWS, COLUMNS)), "b": jnp.ones(50), "c": jnp.ones((3, 10, 20))}
RANKS = (8, 4, 2, 1)
ALL = {"compress": True}


def spectrum(values, seed=0):
    """Return a matrix with these singular values."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.standard_normal((ROWS, ROWS)))[0][:, : len(values)]
    right = np.linalg.qr(rng.standard_normal((COLUMNS, COLUMNS)))[0][:, : len(values)]
    return (left * values @ right.T).astype(np.float32)


def stepper(exchange, ladder):
    """(bucket, state, rung) -> (exchanged, state), alone."""
    step = functools.partial(
        exchange.exchange, ladder=ladder, key=jax.random.key(0), comm=Comm(None)
    )
    return jax.jit(step)


MATRIX = gravac.LowRank(((ROWS, COLUMNS),))
LADDER = gravac.by_rank(jnp.ones((ROWS, COLUMNS)), RANKS, compress=True)


def test_every_rung_of_a_ladder_of_ranks_is_its_rank():
    ladder = gravac.by_rank(PARAMS, RANKS, **ALL)
    exchange = gravac.LowRank(tuple(x.shape for x in PARAMS.values()))
    n = sum(x.size for x in PARAMS.values())
    assert [exchange.rank(n, factor) for factor in ladder] == [n, *RANKS]
    for factor in ladder[1:]:
        entries = exchange.traffic(n, factor, N).entries
        assert n / entries == factor


def test_vectors_and_what_factors_would_not_shrink_are_sent_whole():
    exchange = gravac.LowRank(((ROWS, COLUMNS), (50,), (2, 2)))
    n = ROWS * COLUMNS + 54
    assert exchange.traffic(n, 10, N).entries == ROWS + COLUMNS + 54
    bucket = jnp.asarray(np.random.default_rng(0).standard_normal(n), jnp.float32)
    step = stepper(exchange, (10.0,))
    exchanged, _ = step(bucket, exchange.init(n, (10.0,)), np.int32(0))
    assert not exchanged.residual[ROWS * COLUMNS :].any()
    assert exchanged.residual[: ROWS * COLUMNS].any()


def test_a_matrix_of_the_rank_is_sent_whole_at_once():
    bucket = jnp.asarray(spectrum([3.0, 1.0])).ravel()
    state, rung = MATRIX.init(bucket.size, LADDER), LADDER.index(max(LADDER)) - 1
    exchanged, _ = stepper(MATRIX, LADDER)(bucket, state, np.int32(rung))
    assert np.abs(exchanged.residual).max() < 1e-5
    assert exchanged.energies[rung] == pytest.approx(10, rel=1e-5)


def test_a_warm_start_finds_the_largest_direction():
    # One matrix again and again: a step of the power method at a time.
    bucket = jnp.asarray(spectrum([2.0, 1.0, 0.5, 0.25])).ravel()
    step, state = stepper(MATRIX, LADDER), MATRIX.init(bucket.size, LADDER)
    top, sent = len(LADDER) - 1, []
    for _ in range(6):
        exchanged, state = step(bucket, state, np.int32(top))
        sent.append(float(exchanged.energies[top]))
    assert sent == sorted(sent)
    assert sent[-1] == pytest.approx(4, rel=1e-4)


def test_a_dense_step_foresees_what_every_rank_sends():
    bucket = jnp.asarray(spectrum(0.8 ** np.arange(20))).ravel()
    step, state = stepper(MATRIX, LADDER), MATRIX.init(bucket.size, LADDER)
    for _ in range(8):
        seen, state = step(bucket, state, np.int32(0))
    assert not seen.residual.any()
    for rung in range(1, len(LADDER)):
        sent, _ = step(bucket, state, np.int32(rung))
        foreseen, found = seen.energies[rung], sent.energies[rung]
        assert float(foreseen) == pytest.approx(float(found), rel=0.02)
        # Ranks above the one in use are known from then, those below from now.
        np.testing.assert_allclose(sent.energies, seen.energies, rtol=0.02)


def test_unused_directions_survive_a_matrix_of_zeros():
    zeros = jnp.zeros(ROWS * COLUMNS)
    state = MATRIX.init(zeros.size, LADDER)
    exchanged, after = stepper(MATRIX, LADDER)(zeros, state, np.int32(2))
    np.testing.assert_array_equal(after[0].right, state[0].right)
    for x in jax.tree.leaves(exchanged):
        assert not x.any()


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60])
def test_directions_do_not_depend_on_the_scale(scale):
    bucket = jnp.asarray(spectrum(0.8 ** np.arange(20))).ravel()
    step, state = stepper(MATRIX, LADDER), MATRIX.init(bucket.size, LADDER)
    _, one = step(bucket, state, np.int32(1))
    _, other = step(bucket * scale, state, np.int32(1))
    np.testing.assert_allclose(other[0].right, one[0].right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [pytest.param("float32", "f32", marks=pytest.mark.slow), ("bfloat16", "u16")],
)
def test_every_rung_sends_what_it_declares_and_no_float32_in_bfloat16(values, dtype):
    exchange, ladder = (
        gravac.LowRank(values=values),
        gravac.by_rank(PARAMS, RANKS, True),
    )
    tx = gravac.transform(
        exchange=exchange, controller=_harness.Scripted(ladder), compress=True
    )
    run = _harness.trajectory(tx, PARAMS, "shard_map")
    gradients = jax.tree.map(lambda x: jnp.ones((1, N, *x.shape)), PARAMS)
    found, _ = _harness.collectives(run.text(gradients))
    shaped = exchange.shaped(tuple(x.shape for x in PARAMS.values()))
    n = sum(x.size for x in PARAMS.values())
    for rung, factor in enumerate(ladder):
        mine = [x for x in found if x.branches == (rung,)]
        assert {x.dtype for x in mine} == {dtype if rung else "f32"}
        payload_bytes = shaped.traffic(n, factor, N).payload_bytes
        assert sum(x.payload_bytes for x in mine) == payload_bytes
        if values == "float32":
            assert [x.kind for x in mine] == ["all-reduce"] * (2 if rung else 1)


def test_what_16_bits_drop_of_ones_own_stays_in_the_residual():
    exchange = gravac.LowRank(((ROWS, COLUMNS), (50,)), values="bfloat16")
    n, ladder = ROWS * COLUMNS + 50, (100.0,)
    rng = np.random.default_rng(4)
    bucket = jnp.asarray(rng.standard_normal(n), jnp.float32)
    step = stepper(exchange, ladder)
    exchanged, _ = step(bucket, exchange.init(n, ladder), np.int32(0))
    vector, sent = bucket[-50:], (bucket - exchanged.residual)[-50:]
    assert exchanged.residual[-50:].any()
    assert_same(sent, vector.astype(jnp.bfloat16).astype(jnp.float32))


def test_over_a_run_sent_plus_kept_is_what_came():
    ladder, steps = gravac.by_rank(PARAMS, (4, 1), **ALL), 6
    tx = gravac.transform(
        exchange=gravac.LowRank(), controller=_harness.Scripted(ladder), **ALL
    )
    rng = np.random.default_rng(1)
    draw = lambda x: rng.standard_normal((steps, N, *x.shape)).astype(np.float32)
    gradients = jax.tree.map(draw, PARAMS)
    updates, states = _harness.trajectory(tx, PARAMS, "shard_map")(gradients)
    kept = states.local.memory[0].residual[-1].mean(0)
    flat = lambda tree: _harness.in_bucket_order(jax.tree.leaves(tree))
    sent = flat(jax.tree.map(lambda x: x.astype(np.float64).sum(0), updates))
    came = flat(jax.tree.map(lambda x: x.astype(np.float64).sum(0).mean(0), gradients))
    np.testing.assert_allclose(sent + kept, came, atol=1e-4)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="`values` must be 'float32' or 'bfloat16'"):
        gravac.LowRank(values="int8")
    with pytest.raises(ValueError, match="leave `shapes` out"):
        MATRIX.traffic(ROWS * COLUMNS + 1, 10, N)
    with pytest.raises(ValueError, match="`ranks` must be a whole number"):
        gravac.by_rank(PARAMS, (4, 0))
    with pytest.raises(ValueError, match="none of `params` is compressed"):
        gravac.by_rank({"b": jnp.ones(5)})
