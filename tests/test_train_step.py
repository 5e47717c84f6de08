"""The train step in one call is the parts that it is made of."""

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import ROWS, N, Scripted, assert_same, make_mesh

import gravac_jax as gravac

RNG = np.random.default_rng(0)
TARGET = RNG.standard_normal((16, 8)).astype(np.float32)
BATCHES = RNG.standard_normal((12, 4 * N, 16)).astype(np.float32)
PARAMS = {"b": np.zeros(8, np.float32), "w": np.zeros((16, 8), np.float32)}
COMPRESS = {"b": False, "w": True}
ONE_BIT = {"send": gravac.Bits(1, row_entries=32), "compress": COMPRESS}
LADDER = (gravac.Dense(), ROWS)
PLAIN = gravac.sgd(0.05, **ONE_BIT)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None] - x @ TARGET) ** 2)


RECIPES = {
    "fastest": optax.chain(
        gravac.transform(compress=COMPRESS, send=gravac.Fastest(LADDER)),
        optax.sgd(0.1, momentum=0.9),
    ),
    "adamw": gravac.adamw(0.05, **ONE_BIT),
    "delayed": gravac.adamw(0.05, delay=1, **ONE_BIT),
}
RECIPES["adam after"] = optax.chain(
    gravac.transform(**ONE_BIT), optax.scale_by_adam(), optax.scale(-0.05)
)
LOOKS_AHEAD = {"fastest": True, "adamw": True, "delayed": True, "adam after": False}


def trained(step, state, batches=BATCHES):
    losses = []
    for batch in batches:
        *state, loss = step(*state, batch)
        losses.append(float(np.mean(loss)))  # of each replica, in rounds
    return jax.device_get(state), losses


@pytest.mark.parametrize(
    "name", _harness.choices(RECIPES, lambda x: x in ("delayed", "adam after"))
)
def test_it_is_its_parts(name):
    tx = RECIPES[name]

    def by_hand(params, opt_state, batch):
        where = params
        if LOOKS_AHEAD[name]:
            where = gravac.own_params(tx, params, opt_state)
        loss, grads = gravac.value_and_grad(loss_fn)(where, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    mesh = make_mesh()
    state = gravac.place((PARAMS, tx.init(PARAMS)), mesh)
    with jax.numpy_dtype_promotion("standard"):  # which Optax's Adam needs
        (params, _), losses = trained(gravac.data_parallel(by_hand, mesh), state)
        step = gravac.train_step(loss_fn, tx, mesh)
        (received, _), others = trained(step, step.init(PARAMS))
    # Times make no difference here: they decide among rungs by and by.
    assert losses[-1] < 0.7 * losses[0]
    if name != "fastest":
        assert_same(received, params)
        assert others == losses


def test_a_bad_batch_leaves_the_state_whole():
    step = gravac.train_step(loss_fn, PLAIN, make_mesh())
    state, _ = trained(step, step.init(PARAMS), BATCHES[:2])
    state = gravac.place(tuple(state), make_mesh())
    with pytest.raises(ValueError, match="cannot be split over"):
        step(*state, BATCHES[0][:-1])
    with pytest.raises(TypeError, match="dot_general"):
        step(*state, BATCHES[0][:, :-1])
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    step(*state, BATCHES[0])


def test_a_delayed_step_of_micro_batches_is_that_of_the_whole_batch():
    tx, found = gravac.sgd(0.05, delay=1, send=gravac.Dense()), []
    for parts in (1, 2):
        step = gravac.train_step(loss_fn, tx, make_mesh(), micro_batches=parts)
        found.append(trained(step, step.init(PARAMS)))
    ((params, _), losses), ((others, _), other_losses) = found
    np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    for name, x in params.items():
        np.testing.assert_allclose(others[name], x, rtol=0, atol=1e-5)


def test_simulated_replicas_train_alike():
    tx = RECIPES["delayed"]
    found = []
    for mesh in (make_mesh(), N):
        step = gravac.train_step(loss_fn, tx, mesh)
        found.append(trained(step, step.init(PARAMS))[1])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_its_times_reach_the_controller():
    tx = gravac.transform(compress=True, send=Scripted(LADDER))
    step = gravac.train_step(loss_fn, optax.chain(tx, optax.sgd(0.1)), make_mesh())
    state, heard = step.init(PARAMS), []
    for batch in [*BATCHES, *BATCHES]:
        *state, _ = step(*state, batch)
        heard.append(np.asarray(state[1][0].controller.measured_seconds))
    assert np.isfinite(heard).any()
    assert np.nanmin(heard) > 0


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("parts", "branches"),
    [
        pytest.param({"every": 3, "send": gravac.Dense()}, True, id="rounds"),
        pytest.param({"send": Scripted(LADDER)}, False, id="programs", marks=slow),
    ],
)
def test_one_step_serves_several_runs(parts, branches):
    tx = gravac.sgd(0.05, compress=COMPRESS, **parts)
    make = lambda: gravac.train_step(loss_fn, tx, make_mesh(), branches=branches)
    step = make()
    _, first = trained(step, step.init(PARAMS), BATCHES[:7])
    _, again = trained(step, step.init(PARAMS), BATCHES[:7])
    assert again == first
    begun, _ = trained(step, step.init(PARAMS), BATCHES[:2])
    trained(step, step.init(PARAMS), BATCHES[:4])
    of = lambda step: trained(step, gravac.place(begun, make_mesh()), BATCHES[2:7])
    here, there = of(step), of(make())
    assert here[1] == there[1]
    assert_same(here[0][0], there[0][0])


def test_a_run_that_begins_anew_is_told_its_own_times():
    step = gravac.train_step(loss_fn, PLAIN, make_mesh())
    for _ in range(2):
        *state, _ = step(*step.init(PARAMS), BATCHES[0])
        for batch in BATCHES[1:7]:
            *state, _ = step(*state, batch)
        step._clock.wait()
        assert 0 < step._clock.times()["measured_step"] < 7


def test_a_state_that_a_step_has_used_up_is_refused():
    step = gravac.train_step(loss_fn, PLAIN, make_mesh())
    state = step.init(PARAMS)
    step(*state, BATCHES[0])
    for fresh in (step, gravac.train_step(loss_fn, PLAIN, make_mesh())):
        with pytest.raises(ValueError, match="was given to an earlier step"):
            fresh(*state, BATCHES[1])


def test_a_step_inside_of_another_program_is_refused():
    step = gravac.train_step(loss_fn, PLAIN, make_mesh())
    state = step.init(PARAMS)
    with pytest.raises(TypeError, match=r"call it outside of jax\.jit"):
        jax.jit(step)(*state, BATCHES[0])
    with pytest.raises(TypeError, match=r"write the step for gravac\.data_parallel"):
        jax.eval_shape(step, *state, BATCHES[0])


def test_more_than_one_batch_is_refused():
    step = gravac.train_step(loss_fn, PLAIN, make_mesh())
    state = step.init(PARAMS)
    with pytest.raises(TypeError, match=r"got 4 arguments .* such as \(x, y\)"):
        step(*state, BATCHES[0], BATCHES[0])
    with pytest.raises(TypeError, match=r"names \['key'\].* passes on"):
        step(*state, BATCHES[0], key=1)


def test_a_batch_without_rows_is_refused():
    step = gravac.train_step(loss_fn, PLAIN, make_mesh())
    with pytest.raises(ValueError, match="above 0"):
        step(*step.init(PARAMS), BATCHES[0][:0])


def test_init_copies_what_it_is_given():
    mesh = make_mesh((2, N // 2), ("dcn", "ici"))
    params = gravac.place(PARAMS, mesh, "dcn")
    tx = gravac.sgd(0.05, "dcn", fast_axis_name="ici", **ONE_BIT)
    step = gravac.train_step(loss_fn, tx, mesh, "dcn", "ici")
    step(*step.init(params), BATCHES[0])
    assert_same(params, PARAMS)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(optax.MultiSteps(optax.sgd(0.1), 2), id="MultiSteps"),
        pytest.param(
            optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
            id="apply_if_finite",
            marks=slow,
        ),
        pytest.param(optax.adadelta(0.1), id="adadelta"),
        pytest.param(
            optax.conditionally_transform(optax.sgd(0.1), lambda step: step > 3),
            id="conditionally_transform",
            marks=slow,
        ),
        pytest.param(optax.contrib.muon(0.1), id="muon", marks=slow),
    ],
)
def test_what_is_not_linear_gets_gradients_at_the_shared_params(after):
    tx = optax.chain(gravac.transform(send=ROWS), after)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = []
        for at in (None, "shared"):
            step = gravac.train_step(loss_fn, tx, make_mesh(), at=at)
            found.append(trained(step, step.init(PARAMS))[1])
        assert found[0] == found[1]
        step = gravac.train_step(loss_fn, tx, make_mesh(), at="own")
        with pytest.raises(ValueError, match="linear in the updates"):
            step(*step.init(PARAMS), BATCHES[0])


def test_a_flush_leaves_nothing_behind():
    step = gravac.train_step(loss_fn, RECIPES["delayed"], make_mesh())
    (params, opt_state), _ = trained(step, step.init(PARAMS))
    assert _harness.residual(opt_state).any()
    again = gravac.place((params, opt_state), make_mesh())
    flushed, opt_state = step.flush(*again)
    assert not np.any(_harness.residual(opt_state))
    assert not np.array_equal(flushed["w"], params["w"])


def test_what_the_loss_returns_beside_is_averaged():
    def with_aux(params, x):
        return loss_fn(params, x), {"rows": jnp.float32(len(x))}

    tx = RECIPES["adamw"]
    step = gravac.train_step(with_aux, tx, make_mesh(), has_aux=True)
    *_, loss, aux = step(*step.init(PARAMS), BATCHES[0])
    assert float(aux["rows"]) == 4
    assert float(loss) > 0


def test_a_bad_gradient_is_left_out_and_a_guard_skips_the_step():
    tx, bad, nothing = RECIPES["adamw"], BATCHES[0].copy(), BATCHES[0].copy()
    bad[5], nothing[4:8] = np.nan, 0  # of the second replica

    def after(tx, batch):
        step = gravac.train_step(loss_fn, tx, make_mesh())
        (params, opt_state), _ = trained(step, step.init(PARAMS), [batch])
        return params, int(optax.tree.get(opt_state, "bad_steps"))

    (params, skipped), (expected, _) = after(tx, bad), after(tx, nothing)
    assert_same(params, expected)
    assert not np.array_equal(params["w"], PARAMS["w"])
    assert skipped == 1
    assert_same(after(gravac.guard(tx), bad), (PARAMS, 1))


def test_adam_after_the_exchange_is_refused_if_own_params_are_asked_for():
    exchange = gravac.transform(delay=1, **ONE_BIT)
    tx = optax.chain(exchange, optax.adam(0.1))
    step = gravac.train_step(loss_fn, tx, make_mesh())
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"linear in the updates.*gravac\.adamw"):
        step(*state, BATCHES[0])
    step = gravac.train_step(loss_fn, tx, make_mesh(), at="shared")
    with jax.numpy_dtype_promotion("standard"):  # which optax.adam needs
        step(*step.init(PARAMS), BATCHES[0])


def test_a_mesh_without_the_axis_and_what_is_no_mesh_are_refused():
    make = lambda *where: gravac.train_step(loss_fn, gravac.sgd(0.1), *where)
    with pytest.raises(ValueError, match="axis_name='data' is not an axis"):
        make(make_mesh(names=("x",)))
    with pytest.raises(ValueError, match="'ici'"):
        make(make_mesh(), "data", "ici")
    with pytest.raises(ValueError, match="`mesh` must be a whole number"):
        make(None)


def test_a_chain_without_a_transform_is_refused():
    step = gravac.train_step(loss_fn, optax.sgd(0.1), make_mesh())
    with pytest.raises(ValueError, match=r"exactly one gravac\.transform"):
        step.init(PARAMS)
