"""Payloads travel over a slow axis, and whole gradients over a fast one."""

import functools
import re

import _harness
import _laws
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import (
    AXIS_TYPES,
    Scripted,
    agreed,
    assert_same,
    at,
    choices,
    make_mesh,
)

import gravac_jax as gravac
from gravac_jax import _buckets

SLOW, FAST = 2, 4
NAMES = ("dcn", "ici")
DENSE, FEW = gravac.Dense(), gravac.Bits(2, row_entries=32)
LADDER = DENSE, gravac.TopK(16, select="exact")
STEPS = 8
ROWS, COLUMNS = 32, 16  # of a matrix; each fast device owns 8 rows
N = ROWS * COLUMNS

RNG = np.random.default_rng(0)
# Multiples of 4: their means over 8 devices are exact.
GRADIENTS = {
    "w": 8.0 * RNG.integers(-50, 51, (STEPS, SLOW, FAST, ROWS, COLUMNS)),
    "b": 8.0 * RNG.integers(-50, 51, (STEPS, SLOW, FAST, COLUMNS)),
}
GRADIENTS = {name: x.astype(np.float32) for name, x in GRADIENTS.items()}
PARAMS = {"w": np.zeros((ROWS, COLUMNS), np.float32), "b": np.zeros(COLUMNS, "f")}
IS_MATRIX = {"w": True, "b": False}
SPECS = {"w": jax.P("ici"), "b": jax.P()}
WHOLE = {"w": jax.P(), "b": jax.P()}

AUTO, EXPLICIT = AXIS_TYPES
by_check = pytest.mark.parametrize("check_vma", choices([True, False], bool))
on_meshes = pytest.mark.parametrize(
    ("axis_type", "check_vma"),
    [
        (AUTO, True),
        pytest.param(EXPLICIT, False, marks=pytest.mark.slow),
    ],
)


AXES = {"axis_name": "dcn", "dense_axis_name": "ici"}


def two_axes(axis_type=AUTO):
    return make_mesh((SLOW, FAST), NAMES, axis_type)


def transform(send=Scripted(LADDER), **kwargs):  # noqa: B008 (frozen)
    return gravac.transform(**AXES, send=send, **kwargs)


def put(tree, mesh, specs):
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    return jax.tree.map(place, tree, specs)


def begin(tx, specs, axis_type=AUTO):
    """Return a mesh, and params and state on it."""
    mesh = two_axes(axis_type)
    params = put(PARAMS, mesh, specs)
    return mesh, params, gravac.init(tx, params, mesh, "dcn", "ici")


def batch_of(gradients):
    """Return a batch with a row for each device."""
    return {k: x.reshape(SLOW * FAST, *x.shape[2:]) for k, x in gradients.items()}


def step_of(tx, gradients_of):
    """Return a train step; `gradients_of` params and a device's own batch."""

    def train_step(params, state, batch):
        local = jax.tree.map(lambda x: x[0], batch)
        updates, state = tx.update(gradients_of(params, local), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    return train_step


def walk(step, params, state, batch_of=batch_of):
    """Return the updates and states of some steps."""
    deltas, states = [], []
    for i in range(STEPS):
        before = params
        params, state = step(params, state, batch_of(at(GRADIENTS, i)))
        deltas.append(jax.tree.map(lambda a, b: np.asarray(a - b), params, before))
        states.append(state)
    return deltas, states


def run(tx, specs, gradients_of, axis_type=AUTO, check_vma=True):
    """Return the updates and states of some steps over two axes."""
    mesh, *state = begin(tx, specs, axis_type)
    kwargs = {**AXES, "check_vma": check_vma, "donate": False}
    return walk(gravac.data_parallel(step_of(tx, gradients_of), mesh, **kwargs), *state)


def local(params, batch):
    """Return a batch as the gradient of whole params."""
    return batch


# Every device holds the whole params.


@on_meshes
def test_over_the_fast_axis_gradients_are_averaged_whole(axis_type, check_vma):
    send = Scripted((DENSE, FEW))
    tx = transform(send, compress=IS_MATRIX)
    deltas, states = run(tx, WHOLE, local, axis_type, check_vma)
    # Two replicas whose gradients are already means of four.
    tx = gravac.transform("dcn", send=send, compress=IS_MATRIX)
    mesh = make_mesh((SLOW,), ("dcn",))
    step = gravac.data_parallel(step_of(tx, local), mesh, "dcn", donate=False)
    begun = gravac.place((PARAMS, tx.init(PARAMS)), mesh, "dcn")
    mean = lambda gradients: jax.tree.map(lambda x: x.mean(1), gradients)
    expected, expected_states = walk(step, *begun, mean)
    assert_same(deltas, expected)
    of_replicas = lambda states: [jax.tree.map(agreed, x.local) for x in states]
    assert_same(of_replicas(states), of_replicas(expected_states))


# Each device of the fast axis owns a slice of the params.


def sharded_loss(params, batch):
    """Return loss and gradients: the batch, as the gradient of gathered params."""

    def loss(params):
        whole = jax.lax.all_gather(params["w"], "ici", axis=0, tiled=True)
        return jnp.sum(whole * batch["w"]) + jnp.sum(params["b"] * batch["b"])

    return gravac.value_and_grad(loss, NAMES)(params)


def sharded(params, batch):
    return sharded_loss(params, batch)[1]


def run_sharded(send, axis_type=AUTO, check_vma=True, **kwargs):
    tx = transform(send, sharded=IS_MATRIX, **kwargs)
    return run(tx, SPECS, sharded, axis_type, check_vma)


def compensated_and_kept(states):
    """Yield each device's compensated gradient and its residual, step by step."""
    kept = np.zeros((SLOW, FAST, N // FAST), np.float32)
    for i, state in enumerate(states):
        compensated = kept + GRADIENTS["w"][i].mean(1).reshape(kept.shape)
        kept = np.asarray(_harness.residual(state)).reshape(kept.shape)
        yield compensated, kept


@on_meshes
def test_dense_updates_of_slices_are_the_mean_gradients(axis_type, check_vma):
    deltas, states = run_sharded(DENSE, axis_type, check_vma)
    for i, delta in enumerate(deltas):
        for name, x in GRADIENTS.items():
            np.testing.assert_array_equal(delta[name], x[i].mean((0, 1)))
    assert not np.any(_harness.residual(states[-1]))


@on_meshes
def test_each_device_compresses_the_slice_that_it_owns(axis_type, check_vma):
    deltas, states = run_sharded(Scripted(LADDER), axis_type, check_vma)
    for i, (compensated, kept) in enumerate(compensated_and_kept(states)):
        rung = i % 2 if i >= 3 else 0
        assert states[i].info.rung == rung
        is_sent = (kept == 0) & (compensated != 0)
        slots = N // FAST // (16 if rung else 1)
        assert (is_sent.sum(-1) == np.minimum(slots, (compensated != 0).sum(-1))).all()
        assert (kept == np.where(is_sent, 0, compensated)).all()
        # On each device no kept entry is larger than a sent one.
        smallest = np.where(is_sent, abs(compensated), np.inf).min(-1)
        assert (smallest >= abs(kept).max(-1)).all()
        mean = np.where(is_sent, compensated, 0).mean(0).reshape(ROWS, COLUMNS)
        np.testing.assert_array_equal(deltas[i]["w"], mean)
        np.testing.assert_array_equal(deltas[i]["b"], GRADIENTS["b"][i].mean((0, 1)))


# Of slices these know more than the entries.
ENCODINGS = choices(
    [
        gravac.Bits(2, turns=4, row_entries=32),
        gravac.Bits(8, mean_bits=4, row_entries=32),  # in two stages
        gravac.LowRank(1),
    ],
    lambda x: getattr(x, "turns", 1) > 1,
)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings_keep_and_send_slices(encoding):
    deltas, states = run_sharded(Scripted((DENSE, encoding)))
    pairs = compensated_and_kept(states)
    for delta, (compensated, kept) in zip(deltas, pairs, strict=True):
        sent = (compensated - kept).mean(0).reshape(ROWS, COLUMNS)
        atol = _laws.tolerance(encoding) * np.abs(compensated).max()
        np.testing.assert_allclose(delta["w"], sent, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "is_sharded",
    choices([False, True], bool, lambda x: "slices" if x else "whole"),
)
def test_over_two_axes_a_delayed_run_is_the_other_one_step_later(is_sharded):
    chosen = {"sharded": IS_MATRIX} if is_sharded else {"compress": IS_MATRIX}
    specs, gradients_of = (SPECS, sharded) if is_sharded else (WHOLE, local)

    def deltas(delay):
        tx = transform(FEW, delay=delay, **chosen)
        return run(tx, specs, gradients_of)[0]

    prompt, late = deltas(0), deltas(1)
    assert not any(x.any() for x in late[0].values())
    for x, y in zip(prompt[:-1], late[1:], strict=True):
        assert x["w"].any()
        for name in PARAMS:
            np.testing.assert_allclose(y[name], x[name], rtol=0, atol=1e-3)


def test_rounds_of_slices_are_as_alike_as_those_of_whole_params():
    found = [
        run(transform(DENSE, every=2, **chosen), *how)[1]
        for chosen, *how in [
            ({"compress": IS_MATRIX}, WHOLE, local),
            ({"sharded": IS_MATRIX}, SPECS, sharded),
        ]
    ]
    whole, slices = ([float(x.info.alignment) for x in states] for states in found)
    np.testing.assert_allclose(slices, whole, rtol=1e-5)
    assert whole[0] == 1
    assert 0 < whole[1] < 1


ALL_BEFORE = {
    "clip": gravac.ClipByGlobalNorm(400.0),
    "weight_decay": 0.125,
    "memory": gravac.Momentum(0.5),
}


@functools.cache
def dense_updates():
    return run_sharded(DENSE)[0]


@pytest.mark.parametrize(
    ("part", "check_vma"),
    [
        ("clip", True),
        ("memory", True),
        pytest.param("weight_decay", True, marks=pytest.mark.slow),
        pytest.param("clip", False, marks=pytest.mark.slow),
    ],
)
def test_clip_decay_and_momentum_see_the_whole_model(part, check_vma):
    given = {part: ALL_BEFORE[part]}
    received, _ = run_sharded(DENSE, check_vma=check_vma, **given)
    tx = transform(DENSE, compress=IS_MATRIX, **given)
    expected, _ = run(tx, WHOLE, local, check_vma=check_vma)
    without = dense_updates()
    for mine, others in zip(received, expected, strict=True):
        for name, x in mine.items():
            np.testing.assert_allclose(x, others[name], rtol=1e-5, atol=1e-3)
    assert np.abs(received[-1]["w"] - without[-1]["w"]).max() > 1


def test_a_clip_over_slices_survives_entries_whose_squares_overflow():
    tx = transform(DENSE, sharded=IS_MATRIX, clip=gravac.ClipByGlobalNorm(1.0))
    huge = lambda *x: jax.tree.map(lambda grads: 1e30 * grads, sharded(*x))
    received, states = run(tx, SPECS, huge)
    assert bool(states[0].info.is_finite)
    norm = np.sqrt(sum(np.square(x).sum() for x in received[0].values()))
    # Each of the two replicas is clipped at sqrt(2), which bounds their mean.
    assert 0.5 < norm <= 1.4143


def test_a_flush_takes_slices_to_the_mean_of_own_params():
    tx = optax.chain(transform(FEW, sharded=IS_MATRIX), optax.scale(-0.5))
    mesh, *state = begin(tx, SPECS)
    batch = batch_of(at(GRADIENTS, 0))

    def run(function, state):
        step = gravac.data_parallel(function, mesh, **AXES, donate=False)
        return step(*state, batch)

    def look(params, state, batch):
        del batch
        own = gravac.own_params(tx, params, state)
        return {**params, "w": jax.lax.pmean(own["w"], "dcn")}, state

    state = run(step_of(tx, sharded), state)
    own_mean, _ = run(look, state)
    flushed, after = run(lambda *x: gravac.flush(tx, *x[:2]), state)
    assert np.abs(np.asarray(own_mean["w"]) - state[0]["w"]).max() > 1
    np.testing.assert_allclose(own_mean["w"], flushed["w"], rtol=1e-6, atol=1e-4)
    mean = -0.5 * GRADIENTS["w"][0].mean((0, 1))
    np.testing.assert_allclose(flushed["w"], mean, rtol=1e-6, atol=1e-4)
    assert not np.any(_harness.residual(after))


def test_all_devices_take_one_rung():
    ladder = DENSE, gravac.Bits(8, row_entries=32), FEW
    _, states = run_sharded(gravac.GraVAC(ladder, epsilon=0.5, window=2, smoothing=1.0))
    for state in states:
        agreed(state.decided)
        agreed(state.info.gains)
    assert len({int(x.info.rung) for x in states}) > 1


@pytest.mark.slow
def test_fastest_learns_the_same_from_slices_and_from_whole_params():
    controller = gravac.Fastest(LADDER)
    _, sliced = run_sharded(controller)
    _, whole = run(transform(controller, compress=IS_MATRIX), WHOLE, local)
    for a, b in zip(sliced, whole, strict=True):
        a, b = (jax.tree.map(agreed, x.controller.averages) for x in (a, b))
        assert a.sent[0] == a.total
        # A device holds a quarter of its replica's energy.
        assert a.total * FAST == pytest.approx(b.total, rel=1e-4)
        np.testing.assert_allclose(a.sent / a.total, b.sent / b.total, rtol=0.25)
        assert (np.diff(a.sent) < 0).all()


@pytest.mark.parametrize(
    ("specs", "compress", "size"),
    [(SPECS, {"sharded": IS_MATRIX}, N // FAST), (WHOLE, {"compress": IS_MATRIX}, N)],
    ids=["sharded", "whole"],
)
def test_a_device_holds_the_residual_of_what_it_compresses(specs, compress, size):
    *_, state = begin(transform(**compress), specs)
    residual = _harness.residual(state)
    assert {x.data.size for x in residual.addressable_shards} == {size}


def test_the_optimizer_is_sharded_as_the_params_are():
    tx = optax.chain(transform(sharded=IS_MATRIX), optax.sgd(0.1, momentum=0.9))
    *_, state = begin(tx, SPECS)
    trace = optax.tree.get(state, "trace")
    assert {k: x.sharding.spec for k, x in trace.items()} == SPECS


def test_nothing_but_payloads_crosses_the_slow_axis():
    tx = transform(sharded=IS_MATRIX)
    mesh, params, state = begin(tx, SPECS)
    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state))
    batch = batch_of(at(GRADIENTS, 0))
    batch = put(batch, mesh, dict.fromkeys(batch, jax.P(NAMES)))

    def body(params, state, batch):
        local = jax.tree.map(lambda x: x[0], batch)
        value, grads = sharded_loss(params, local)
        return *tx.update(grads, state, params), value[None]

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(*specs, jax.P(NAMES)),
        out_specs=(*specs, jax.P(NAMES)),
    )
    text = jax.jit(mapped).lower(params, state, batch).compile().as_text()
    ops = re.findall(r"= (.*?) ([\w-]+)\(.*replica_groups=\{(\{[\d,{}]*\})\}", text)
    shapes = re.compile(r"\w+\[[\d,]*\]")  # several, where XLA made one op of two
    found = [(" ".join(shapes.findall(x)), *rest) for x, *rest in ops]
    evidence = COLUMNS + 4 + 2 * len(LADDER)  # with the leaf that goes dense
    words = N // FAST // 16 + 1  # for each entry, and their number
    figures = 2  # with the entries: the energy of what is sent, and of all
    energies = len(LADDER) + 1  # over the slices
    assert sorted(found) == sorted(
        [
            (f"f32[{N // FAST + figures}]", "all-reduce", "{0,4},{1,5},{2,6},{3,7}"),
            (
                f"u16[2,{2 * (words + figures)}]",
                "all-gather",
                "{0,4},{1,5},{2,6},{3,7}",
            ),
            # The model is gathered slice by slice, and its gradient goes back.
            (f"f32[{ROWS},{COLUMNS}]", "all-gather", "{0,1,2,3},{4,5,6,7}"),
            (f"f32[{ROWS // FAST},{COLUMNS}]", "reduce-scatter", "{0,1,2,3},{4,5,6,7}"),
            (f"f32[{evidence}]", "all-reduce", "{0,1,2,3,4,5,6,7}"),
            # Whether a device of the replica has a gradient that is not finite.
            ("f32[1]", "all-reduce", "{0,1,2,3},{4,5,6,7}"),
            # With energies, how alike rounds were.
            (f"f32[{energies + 1}]", "all-reduce", "{0,1,2,3},{4,5,6,7}"),
            # Each replica's own mean of the leaf that goes dense.
            (f"f32[{COLUMNS}]", "all-reduce", "{0,1,2,3},{4,5,6,7}"),
        ]
    )


@pytest.mark.parametrize(
    ("specs", "compress", "gradients_of", "error"),
    [
        (SPECS, {"compress": IS_MATRIX}, sharded, r"\['w'\] is a slice"),
        (WHOLE, {"sharded": IS_MATRIX}, local, r"\['w'\] is whole"),
    ],
    ids=["slices taken for whole", "whole taken for slices"],
)
def test_slices_and_whole_leaves_are_told_apart(specs, compress, gradients_of, error):
    with pytest.raises(ValueError, match=error):
        run(transform(**compress), specs, gradients_of)


@by_check
def test_a_state_that_is_not_placed_is_refused(check_vma):
    tx = transform(compress=IS_MATRIX)
    step = gravac.data_parallel(
        lambda state, batch: state, two_axes(), **AXES, check_vma=check_vma
    )
    with pytest.raises(ValueError, match=r"not placed.*gravac\.place"):
        step(tx.init(PARAMS), np.zeros((8, 1)))


def test_slices_of_several_buckets_have_a_state_for_each(monkeypatch):
    monkeypatch.setattr(_buckets, "MAX_ENTRIES", N // FAST // 2)
    *_, state = begin(transform(sharded=IS_MATRIX), SPECS)
    *shapes, dense = [x.residual.shape for x in state.local.memory]
    assert dense == (SLOW * FAST, COLUMNS)
    assert shapes == [(SLOW * FAST, N // FAST // 2)] * 2


def test_slices_that_drift_apart_are_counted():
    tx = transform(DENSE, sharded=IS_MATRIX, check_every=1)

    def train_step(params, state, batch):
        # A fault of one device that shard_map knows nothing of.
        fault = jnp.where(jax.lax.axis_index(NAMES) == 6, batch["w"][0, 0, 0], 0.0)
        held = {**params, "w": params["w"] + fault}
        grads = sharded(params, jax.tree.map(lambda x: 0 * x[0], batch))
        return params, tx.update(grads, state, held)[1]

    mesh, params, state = begin(tx, SPECS)
    step = gravac.data_parallel(train_step, mesh, **AXES)
    counts = []
    for fault in (0, 1, 0, 1):
        batch = jax.tree.map(lambda x, fault=fault: fault + 0 * x, GRADIENTS)
        params, state = step(params, state, batch_of(at(batch, 0)))
        counts.append(int(state.info.disagreements))
    assert counts == [0, 1, 1, 2]


def test_params_that_are_sharded_over_the_slow_axis_are_refused():
    specs = {"w": jax.P("dcn"), "b": jax.P()}
    with pytest.raises(ValueError, match=r"sharded over \['dcn'\].*dense_axis_name"):
        begin(transform(sharded=IS_MATRIX), specs)


def test_params_that_are_sharded_over_a_third_axis_are_refused():
    mesh = make_mesh((SLOW, FAST, 1), (*NAMES, "tensor"))
    params = put(PARAMS, mesh, {"w": jax.P("ici", "tensor"), "b": jax.P()})
    with pytest.raises(ValueError, match=r"\['tensor'\] out of the params' specs"):
        gravac.init(transform(sharded=IS_MATRIX), params, mesh, *NAMES)


# Each device of the fast axis computes with its own slice of the params.

IN, HIDDEN, OUT, BATCH = 8, 16, 4, 2
TENSORS = {
    "up": np.float32(RNG.integers(-2, 3, (IN, HIDDEN))),
    "down": np.float32(RNG.integers(-2, 3, (HIDDEN, OUT))),
    "b": np.zeros(OUT, np.float32),
}
TENSOR_SPECS = {"up": jax.P(None, "ici"), "down": jax.P("ici"), "b": jax.P()}
X = np.float32(RNG.integers(-2, 3, (STEPS, SLOW, BATCH, IN)))


def tensor_loss(params, x, sum_of_slices):
    hidden = jnp.maximum(x @ params["up"], 0)
    return jnp.mean((sum_of_slices(hidden @ params["down"]) + params["b"][None]) ** 2)


@on_meshes
def test_slices_that_compute_for_each_other_train_as_whole_params(axis_type, check_vma):
    def train_step(params, state, x):
        own = lambda params: tensor_loss(
            params, x[0], lambda part: jax.lax.psum(part, "ici")
        )
        _, grads = gravac.value_and_grad(own, NAMES)(params)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda p, u: p - u / 1024, params, updates), state

    mesh = two_axes(axis_type)
    tx = transform(DENSE, sharded={"up": True, "down": True, "b": False})
    params = put(TENSORS, mesh, TENSOR_SPECS)
    state = gravac.init(tx, params, mesh, "dcn", "ici")
    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state))
    step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=mesh,
            in_specs=(*specs, jax.P("dcn")),
            out_specs=specs,
            check_vma=check_vma,
        )
    )
    expected = TENSORS
    for x in X:
        params, state = step(params, state, put(x, mesh, jax.P("dcn")))
        loss = lambda p, x=x: tensor_loss(p, x.reshape(-1, IN), lambda part: part)
        grads = jax.grad(loss)(expected)
        expected = jax.tree.map(lambda p, g: p - g / 1024, expected, grads)
        for name, leaf in params.items():
            np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-5)
