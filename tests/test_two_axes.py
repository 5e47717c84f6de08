"""Payloads travel over a slow axis, and whole gradients over a fast one."""

import itertools

import jax
import numpy as np
import pytest
from _harness import (
    AXIS_TYPES,
    COMPRESS,
    Scripted,
    agreed,
    assert_close,
    assert_same,
    at,
    make_mesh,
    own_gradients,
    residual,
)

import gravac_jax as gravac

SLOW, FAST = 2, 4
NAMES = ("dcn", "ici")
DENSE, FEW = gravac.Dense(), gravac.Bits(2, row_entries=32)
STEPS = 8
ROWS, COLUMNS = 32, 16  # of a matrix

RNG = np.random.default_rng(0)
# Multiples of 4: their means over 8 devices are exact.
GRADIENTS = {
    "w": 8.0 * RNG.integers(-50, 51, (STEPS, SLOW, FAST, ROWS, COLUMNS)),
    "b": 8.0 * RNG.integers(-50, 51, (STEPS, SLOW, FAST, COLUMNS)),
}
GRADIENTS = {name: x.astype(np.float32) for name, x in GRADIENTS.items()}
PARAMS = {"w": np.zeros((ROWS, COLUMNS), np.float32), "b": np.zeros(COLUMNS, "f")}

AUTO, EXPLICIT = AXIS_TYPES
SLOWLY = pytest.param(EXPLICIT, False, marks=pytest.mark.slow)
on_meshes = pytest.mark.parametrize(("axis_type", "check_vma"), [(AUTO, True), SLOWLY])
AXES = {"axis_name": "dcn", "fast_axis_name": "ici"}


def two_axes(axis_type=AUTO):
    return make_mesh((SLOW, FAST), NAMES, axis_type)


def transform(send=FEW, **kwargs):
    return gravac.transform(**AXES, send=send, **kwargs)


def begin(tx, axis_type=AUTO):
    """Return a mesh, and params and state on it."""
    mesh = two_axes(axis_type)
    return mesh, *gravac.place((PARAMS, tx.init(PARAMS)), mesh, "dcn")


def batch_of(gradients):
    """Return a batch with a row for each device."""
    return {k: x.reshape(SLOW * FAST, *x.shape[2:]) for k, x in gradients.items()}


def walk(step, params, state, batch_of=batch_of):
    """Return the updates and states of some steps."""
    deltas, states = [], []
    for i in range(STEPS):
        before = params
        params, state = step(params, state, batch_of(at(GRADIENTS, i)))
        deltas.append(jax.tree.map(lambda a, b: np.asarray(a - b), params, before))
        states.append(state)
    return deltas, states


def run(tx, axis_type=AUTO, check_vma=True):
    """Return the updates and states of some steps over two axes."""
    mesh, *state = begin(tx, axis_type)
    kwargs = {**AXES, "check_vma": check_vma, "donate": False}
    return walk(gravac.data_parallel(own_gradients(tx), mesh, **kwargs), *state)


def both(send, **given):
    """Return steps over two axes, and of two replicas with the means of four."""
    how = {key: given.pop(key) for key in ("axis_type", "check_vma") if key in given}
    given = {"send": send, "compress": COMPRESS, **given}
    tx = gravac.transform("dcn", **given)
    mesh = make_mesh((SLOW,), ("dcn",))
    step = gravac.data_parallel(own_gradients(tx), mesh, "dcn", donate=False)
    begun = gravac.place((PARAMS, tx.init(PARAMS)), mesh, "dcn")
    mean = lambda gradients: jax.tree.map(lambda x: x.mean(1), gradients)
    return run(transform(**given), **how), walk(step, *begun, mean)


@on_meshes
def test_over_the_fast_axis_gradients_are_averaged_whole(axis_type, check_vma):
    how = {"axis_type": axis_type, "check_vma": check_vma}
    (deltas, states), (expected, others) = both(Scripted((DENSE, FEW)), **how)
    assert_same(deltas, expected)
    of_replicas = lambda states: [jax.tree.map(agreed, x.local) for x in states]
    assert_same(of_replicas(states), of_replicas(others))


def test_clip_decay_and_momentum_see_the_mean_over_the_fast_axis():
    before = {"clip": gravac.ClipByGlobalNorm(400.0), "memory": gravac.Momentum(0.5)}
    (deltas, _), (expected, _) = both(DENSE, weight_decay=0.125, **before)
    assert_close(deltas, expected, rtol=1e-5, atol=1e-3)
    assert np.abs(deltas[-1]["w"] - GRADIENTS["w"][-1].mean((0, 1))).max() > 1


def test_over_two_axes_a_delayed_run_is_the_other_one_step_later():
    prompt, late = (run(transform(FEW, delay=delay))[0] for delay in (0, 1))
    assert not any(x.any() for x in late[0].values())
    assert all(x["w"].any() for x in prompt[:-1])
    assert_close(late[1:], prompt[:-1], atol=1e-3)


def test_all_devices_take_one_rung_and_hold_the_residual_of_their_replica():
    ladder = DENSE, gravac.Bits(8, row_entries=32), FEW
    controller = gravac.GraVAC(ladder, epsilon=0.5, window=2)
    _, states = run(transform(controller, compress=COMPRESS))
    for state in states:
        agreed(state.decided)
        agreed(state.info.gains)
        # The bytes of a device, over the slow axis.
        assert float(state.info.dense_wire_bytes) == 4 * (ROWS + 1) * COLUMNS
    assert len({int(x.info.rung) for x in states}) > 1
    assert {x.data.size for x in residual(state).addressable_shards} == {ROWS * COLUMNS}


def test_a_step_over_other_axes_than_those_of_the_transform_is_refused():
    loss_fn, mesh = lambda params, batch: (batch @ params).mean(), two_axes()
    unlike = (("dcn", None), NAMES), ((NAMES, None), NAMES), (NAMES, ("dcn", None))
    for ((slow, fast), names), check_vma in itertools.product(unlike, (False, True)):
        tx = gravac.transform(slow, send=gravac.Bits(4), fast_axis_name=fast)
        mean = lambda params, state, x, tx=tx: tx.update(x.mean(0), state, params)
        step = gravac.train_step(loss_fn, tx, mesh, *names, check_vma=check_vma)
        by_hand = gravac.data_parallel(mean, mesh, *names, check_vma=check_vma)
        state = step.init(np.ones(256))
        for take in (step, by_hand):
            with pytest.raises(ValueError, match=r"has the axes .*same `axis_name`"):
                take(*state, np.ones((8, 256)))


def test_what_the_user_averages_over_the_fast_axis_is_no_mistake():
    tx, mesh = gravac.transform("dcn", send=gravac.Bits(4)), two_axes()
    mean = lambda params, state, x: tx.update(jax.lax.pmean(x[0], "ici"), state, params)
    state = gravac.place((np.ones(256), tx.init(np.ones(256))), mesh, "dcn")
    gravac.data_parallel(mean, mesh, *NAMES)(*state, np.ones((8, 256)))


def test_slices_of_params_are_refused_over_a_fast_axis():
    tx, mesh = transform(compress=COMPRESS), two_axes()
    cut = lambda params: jax.tree.map(lambda x: x[: x.shape[0] // FAST], params)
    _, state = gravac.place(
        (PARAMS, tx.init({**PARAMS, "w": cut(PARAMS["w"])})), mesh, "dcn"
    )

    def step(params, state):
        return tx.update(gravac.Comm(NAMES).cast(params), state, params)

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=({"w": jax.P("ici"), "b": jax.P()}, gravac.state_specs(state, "dcn")),
        out_specs=(jax.P(), gravac.state_specs(state, "dcn")),
    )
    with pytest.raises(ValueError, match=r"\['w'\] is a slice.*shardings=params"):
        jax.eval_shape(mapped, PARAMS, state)
