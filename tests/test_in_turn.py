"""InTurn: each fragment is exchanged as if alone, and in H steps all of them are."""

import functools

import _examples
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, N, assert_same, choices, in_every_way

import gravac_jax as gravac
from gravac_jax import Comm
from gravac_jax._exchanges import EXCHANGES

H = 3
LADDER = (1.0, 8.0)
INNER = [x for x in _examples.members(EXCHANGES) if not isinstance(x, gravac.LowRank)]
QUICK = gravac.Quantized(row_entries=32), gravac.AllGather()
by_inner = pytest.mark.parametrize("inner", choices(INNER, QUICK.__contains__))
# No multiple of H: the last fragment overlaps the one before.
BUCKETS = _examples.dyadic(N, 1000)
FRAGMENTS = [slice(start, start + 384) for start in (0, 384, 1000 - 384)]
GRADIENTS = _harness.gaussian_gradients(2 * H)


@functools.cache
def on_all_replicas(exchange):
    @jax.jit
    def run(buckets, states, rung, step):
        one = lambda bucket, state: exchange.at_step(step).exchange(
            bucket,
            state,
            rung,
            ladder=LADDER,
            key=jax.random.key(0),
            comm=Comm("data"),
        )
        return jax.vmap(one, axis_name="data")(buckets, states)

    return run


def first_states(exchange, n):
    one = exchange.init(n, LADDER)
    return jax.tree.map(lambda x: jnp.stack([x] * N), one)


@by_inner
def test_a_fragment_is_exchanged_as_if_alone(inner):
    exchange = gravac.InTurn(H, inner)
    states = first_states(exchange, 1000)
    for step in range(2 * H):
        own, of_turn = FRAGMENTS[step % H], lambda x, turn=step % H: x[:, turn]
        given = np.int32(step % 2), np.int32(step)
        mine = jax.tree.map(of_turn, states)
        expected, alone = on_all_replicas(inner)(BUCKETS[:, own], mine, *given)
        found, states = on_all_replicas(exchange)(BUCKETS, states, *given)
        assert_same(found.mean[:, own], expected.mean)
        assert_same(found.residual[:, own], expected.residual)
        assert_same(found.mean_energies, expected.mean_energies)
        assert_same(jax.tree.map(of_turn, states), alone)
        is_other = np.ones(1000, bool)
        is_other[own] = False
        assert not found.mean[:, is_other].any()
        assert_same(found.residual[:, is_other], BUCKETS[:, is_other])


def assert_adds_up(updates, states, gradients):
    """What was sent plus what is kept is what was made."""
    sent = updates["w"].astype(np.float64).sum(0)
    kept = _harness.residual(_harness.at(states, -1)).mean(0, dtype=np.float64)
    made = gradients.astype(np.float64).mean(1).sum(0)
    np.testing.assert_allclose(sent + kept.reshape(sent.shape), made, atol=1e-5)
    assert sent.any()


@in_every_way
@pytest.mark.parametrize("delay", [0, 1])
def test_what_was_made_is_what_was_sent_and_what_is_kept(how, delay):
    transform = gravac.transform(
        compress=COMPRESS,
        memory=gravac.Steps(optax.identity()),
        exchange=gravac.InTurn(H, gravac.Quantized(row_entries=32)),
        controller=gravac.Fixed(8),
        delay=delay,
    )
    updates, states = _harness.trajectory(transform, PARAMS, how)(GRADIENTS)
    assert_adds_up(updates, states, GRADIENTS["w"])


def test_each_entry_goes_once_in_as_many_steps_as_there_are_fragments():
    fragments = 2
    transform = gravac.transform(
        compress=True,
        memory=gravac.Residual(),
        exchange=gravac.InTurn(fragments, gravac.DenseMean()),
        controller=gravac.Fixed(1),
    )
    n, params = 256, np.zeros(256, np.float32)
    gradients = np.ones((2 * fragments, N, n), np.float32)
    updates, _ = _harness.trajectory(transform, params, "vmap")(gradients)
    halves = updates.reshape(2 * fragments, 2, n // 2)[:, :, 0]
    assert halves.tolist() == [[1, 0], [0, 2], [2, 0], [0, 2]]


def test_a_bad_step_sends_nothing_and_loses_nothing():
    gradients = jax.tree.map(np.copy, GRADIENTS)
    gradients["w"][1, 2, 0, 0] = np.nan
    transform = gravac.transform(
        compress=COMPRESS,
        exchange=gravac.InTurn(H, gravac.Quantized(row_entries=32)),
        controller=gravac.Fixed(8),
    )
    updates, states = _harness.trajectory(transform, PARAMS, "vmap")(gradients)
    assert np.isfinite(updates["w"]).all()
    assert not updates["w"][1].any()
    assert states.info.skipped_steps[-1] == 1
    assert_adds_up(updates, states, np.delete(GRADIENTS["w"], 1, 0))


def test_it_costs_what_the_fragment_costs():
    exchange = gravac.InTurn(8, gravac.QuantizedAllReduce())
    whole = gravac.QuantizedAllReduce().traffic(2**20, 16, replicas=4)
    assert exchange.traffic(2**23, 16, replicas=4) == whole


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"`fragments` must be .* got 0"):
        gravac.InTurn(0, gravac.Quantized())
    with pytest.raises(TypeError, match="`inner` must be"):
        gravac.InTurn(2, "Quantized")  # type: ignore[arg-type]
    for inner in (gravac.LowRank(), gravac.InTurn(2, gravac.Quantized())):
        with pytest.raises(ValueError, match="cuts buckets into fragments, which"):
            gravac.InTurn(2, inner)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"controller": gravac.Every(2, gravac.Fixed(16))}, "no rounds"),
        ({"controller": gravac.GraVAC()}, "a fixed width or factor"),
        ({}, "a fixed width or factor"),
        ({"memory": gravac.NoMemory()}, "gravac.InTurn need a memory"),
        (
            {"memory": gravac.Steps(optax.sgd(0.1), residual_decay=0.9)},
            "keeps what waits for its turn",
        ),
        (
            {"memory": gravac.Steps(optax.sgd(0.1), begin_at_shared=True)},
            "keeps what waits for its turn",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(others, words):
    usual = {"controller": gravac.Fixed(16)} if others else {}
    exchange = gravac.InTurn(2, gravac.Quantized())
    with pytest.raises(ValueError, match=words):
        gravac.transform(**{"exchange": exchange, **usual, **others})


def test_small_buckets_have_fewer_fragments():
    exchange = gravac.InTurn(8, gravac.DenseMean())
    buckets, states = _examples.dyadic(N, 300), first_states(exchange, 300)
    for step in range(6):
        found, states = on_all_replicas(exchange)(
            buckets, states, np.int32(0), np.int32(step)
        )
        (sent,) = np.nonzero(np.asarray(found.mean[0]))
        start = min(128 * (step % 3), 300 - 128)
        assert sent.min() >= start
        assert sent.max() < start + 128


def test_an_empty_bucket_is_no_trouble():
    exchange = gravac.InTurn(2, gravac.Quantized())
    tx = gravac.sgd(0.5, None, exchange=exchange, controller=gravac.Fixed(16))
    params = {"small": jnp.ones(4)}
    with pytest.warns(UserWarning, match="compresses none"):
        state = tx.init(params)
    updates, _ = tx.update(params, state)
    assert updates["small"].tolist() == [-0.5] * 4


def test_own_params_are_where_all_that_waits_leads():
    tx = gravac.sgd(
        0.125,
        exchange=gravac.InTurn(2, gravac.DenseMean()),
        controller=gravac.Fixed(1),
        compress=True,
    )
    step = gravac.train_step(lambda params, batch: jnp.vdot(params, batch), tx, N)
    params, state = step.init(jnp.zeros(256))
    batches = np.ones((N, 256), np.float32)
    for _ in range(3):
        params, state, _ = step(params, state, batches.reshape(-1))
    params, state = step.flush(params, state)
    expected = optax.sgd(0.125, momentum=0.9)
    theirs, kept = jnp.zeros(256), expected.init(jnp.zeros(256))
    for _ in range(3):
        updates, kept = expected.update(jnp.ones(256), kept)
        theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(params, theirs, rtol=1e-6)
