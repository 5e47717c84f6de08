"""Mixed: few bits at some rungs, few entries at others, chosen by the gradients."""

import functools

import _laws
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import assert_same, choices

import gravac_jax as gravac
from gravac_jax import Comm

LADDER = (1.0, 16.0, 100.0, 1000.0)
MIXED = gravac.Mixed(few_bits=gravac.QuantizedAllReduce(32))
RNG = np.random.default_rng(0)
N = 4
BUCKETS = RNG.standard_t(3, (N, 4096)).astype(np.float32)


def exchanged(exchange, rung, ladder=LADDER, looks=True):
    """Return what comes of a rung, on all replicas."""
    # One program serves steps that look and steps that do not.
    return _laws.on_replicas(exchange, BUCKETS, ladder, rung, np.bool_(looks))


@pytest.mark.parametrize("rung", choices(range(len(LADDER)), lambda x: x == 1))
def test_a_rung_does_what_its_exchange_does_alone(rung):
    factor = LADDER[rung]
    alone = MIXED.sparse if factor >= 100 else MIXED.few_bits
    expected, _ = exchanged(alone, jnp.int32(0), (factor,))
    known = [np.int32(rung)] if factor in (16, 100) else []  # one of each kind
    for taken in (jnp.int32(rung), *known):
        received, _ = exchanged(MIXED, taken)
        assert_same(received.mean, expected.mean)
        assert_same(received.residual, expected.residual)
        assert_same(received.energies[:, rung], expected.energies[:, 0])


def test_a_look_tells_what_every_rung_would_send():
    looked = exchanged(MIXED, jnp.int32(1))[0].energies
    taken = [
        exchanged(MIXED, jnp.int32(i))[0].energies[:, i] for i in range(len(LADDER))
    ]
    np.testing.assert_allclose(looked, np.stack(taken, 1), rtol=0.1)
    unseen = exchanged(MIXED, jnp.int32(1), looks=False)[0].energies
    assert (np.delete(np.asarray(unseen), 1, axis=1) == 0).all()


def test_few_bits_leave_the_state_of_the_selection_alone():
    begun = MIXED.init(BUCKETS.shape[1], LADDER)[1]
    for rung, changes in ((0, False), (1, False), (2, True)):
        _, (_, after) = exchanged(MIXED, jnp.int32(rung))
        pairs = zip(jax.tree.leaves(begun), jax.tree.leaves(after), strict=True)
        is_changed = any((np.asarray(y) != np.asarray(x)).any() for x, y in pairs)
        assert is_changed == changes


def program(rung):
    """Return the program of a rung that is known when it is compiled."""
    step = lambda bucket: MIXED.exchange(
        bucket,
        MIXED.init(bucket.size, LADDER),
        np.int32(rung),
        ladder=LADDER,
        key=jax.random.key(0),
        comm=Comm("data"),
        looks=False,
    )
    return str(jax.make_jaxpr(step, axis_env=[("data", N)])(BUCKETS[0]))


def test_a_program_of_few_bits_selects_nothing():
    known = program(1)
    is_selecting = ["population_count" in program(rung) for rung in (1, 2)]
    assert is_selecting == [False, True]
    assert (known.count("all_to_all["), known.count("all_gather[")) == (1, 1)
    assert program(2).count("all_to_all[") == 0


def test_figures_of_all_rungs_have_no_collective_of_their_own():
    for rung in (1, 2, 3):
        assert program(rung).count("psum") == 0


@functools.cache
def train_step():
    # Slow enough that bytes count for more than the messages of a selection.
    wire = gravac.WireCost(bytes_per_second=1e7, compute_seconds=1e-3)
    controller = gravac.Fastest((1, 16, 100))
    tx = gravac.transform(
        wire=wire, controller=controller, exchange=gravac.Mixed((100.0,))
    )
    loss_fn = lambda params, batch: jnp.sum(params["w"][batch["row"]] * batch["x"])
    return gravac.train_step(loss_fn, optax.chain(tx, optax.sgd(0.1)), N)


def taken(rows):
    """Return the factor that `Fastest` ends at, where batches are `rows` of a table.

    Each row is the gradient of the row of the table that it names; the rest of a batch
    is zeros, so that all batches have one shape.
    """
    step = train_step()
    params, opt_state = step.init({"w": jnp.zeros((512, 64))})
    for i in range(40):
        draw = np.random.default_rng(i)
        x = draw.standard_normal((N, 512, 64)).astype(np.float32)
        x[:, rows:] = 0
        batch = {
            "row": np.concatenate([draw.permutation(512) for _ in range(N)]),
            "x": x.reshape(N * 512, 64),
        }
        params, opt_state, _ = step(params, opt_state, batch)
    return float(optax.tree.get(opt_state, "StepInfo").factor)


FEW_ROWS, ALL_ROWS = 4, 512


@pytest.mark.slow
def test_the_controller_takes_entries_where_few_are_large_and_bits_elsewhere():
    assert taken(FEW_ROWS) > 50
    assert taken(ALL_ROWS) < 40


def test_without_a_controller_it_has_rungs_of_both():
    tx = gravac.transform(None, exchange=gravac.Mixed((64.0, 512.0)))
    state = tx.init({"w": jnp.zeros((256, 256))})
    assert state.ladder.tolist() == [1, 4, 8, 16, 32, 64, 512]


@pytest.mark.parametrize("ladder", [(1.0, 10.0, 100.0), (50.0,)])
def test_a_sparse_factor_that_the_controller_lacks_is_warned_of(ladder):
    exchange = gravac.Mixed((100.0, 1000.0))
    with pytest.warns(UserWarning, match=r"never sends few entries at .*1000\.0\]"):
        exchange.init(4096, ladder)


@pytest.mark.parametrize("kind", [gravac.LowRank, gravac.DenseMean, gravac.AllGather])
def test_only_few_bits_are_few_bits(kind):
    with pytest.raises(TypeError, match=r"few_bits.*gravac\.QuantizedAllReduce"):
        gravac.Mixed(few_bits=kind())


def test_a_memory_that_masks_is_refused():
    with pytest.raises(ValueError, match="mask"):
        gravac.transform(
            exchange=gravac.Mixed(), memory=gravac.Momentum(0.9, masking=True)
        )
