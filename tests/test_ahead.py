"""A program for each rung: the host knows the next rung, and starts the right one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import ROWS, N, assert_same, make_mesh

import gravac_jax as gravac

RNG = np.random.default_rng(0)
TARGET = RNG.standard_normal((64, 8)).astype(np.float32)
BATCHES = RNG.standard_normal((14, 2 * N, 64)).astype(np.float32)
PARAMS = {"b": np.zeros(8, np.float32), "w": np.zeros((64, 8), np.float32)}
COMPRESS = {"b": False, "w": True}
RUNGS = (1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0)
LATE = 2  # exchanges by which a decision takes effect later


@dataclasses.dataclass(frozen=True, repr=False)
class Listed(gravac.Controller):
    """Takes the rungs of a list; a decision takes effect three exchanges on."""

    ladder: tuple[gravac.Encoding, ...] = (gravac.Dense(), ROWS)

    def init(self):
        return jnp.int32(RUNGS[0]), jnp.int32(0)

    def decide(self, evidence, state):
        del evidence
        return jnp.asarray(RUNGS, jnp.int32)[state + 1 + LATE], state + 1


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None] - x @ TARGET) ** 2)


def two_stages(controller=Listed()):
    first = gravac.transform(send=controller, compress=COMPRESS)
    return optax.chain(first, optax.sgd(0.02, momentum=0.5))


def in_rounds():
    first = gravac.transform(send=Listed(), every=2, compress=COMPRESS)
    return optax.chain(first, optax.sgd(0.02))


def steps_late():
    return gravac.adamw(0.01, send=Listed(), delay=1, compress=COMPRESS)


def of_entries():
    return two_stages(Listed((gravac.Dense(), gravac.TopK(16))))


def trained(step, state, batches):
    rungs, losses = [], []
    for batch in batches:
        *state, loss = step(*state, batch)
        rungs.append(int(optax.tree.get(state[1], "StepInfo").rung))
        losses.append(np.asarray(loss))
    return state, rungs, losses


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (two_stages, "mesh"),
        pytest.param(in_rounds, "simulated", marks=slow),
        pytest.param(steps_late, "mesh", marks=slow),
        pytest.param(of_entries, "mesh", marks=slow),
    ],
)
def test_a_program_for_each_rung_takes_the_same_steps(make, where):
    mesh, found = make_mesh() if where == "mesh" else N, []
    for branches in (True, False):
        step = gravac.train_step(loss_fn, make(), mesh, branches=branches)
        state, rungs, losses = trained(step, step.init(PARAMS), BATCHES)
        params, _ = jax.device_get(step.flush(*state))
        found.append((params, rungs, losses))
    (params, rungs, losses), (others, other_rungs, other_losses) = found
    assert rungs == other_rungs
    # Each decision took effect three exchanges on.
    exchanged = rungs[1::2] if make is in_rounds else rungs
    assert exchanged == list(RUNGS[: len(exchanged)])
    for x, y in zip(losses, other_losses, strict=True):  # XLA fuses each by itself
        np.testing.assert_allclose(y, x, rtol=1e-4)
    np.testing.assert_allclose(others["w"], params["w"], rtol=1e-4, atol=1e-6)


def test_bad_gradients_of_all_replicas_change_nothing_at_any_rung():
    step = gravac.train_step(loss_fn, two_stages(), make_mesh(), branches=False)
    state = step.init(PARAMS)
    for batch in BATCHES[:8].copy():
        batch[:] = np.nan
        *state, _ = step(*state, batch)
    params, opt_state = jax.device_get(state)
    assert_same(params, PARAMS)
    assert optax.tree.get(opt_state, "StepInfo").bad_steps == 8
    assert not any(x.any() for x in jax.tree.leaves(opt_state[0].local.memory))


def test_a_new_step_goes_on_where_another_one_ended():
    tx, mesh = two_stages(), make_mesh()
    step = gravac.train_step(loss_fn, tx, mesh, branches=False)
    whole, rungs, losses = trained(step, step.init(PARAMS), BATCHES)
    step = gravac.train_step(loss_fn, tx, mesh, branches=False)
    state, first, before = trained(step, step.init(PARAMS), BATCHES[:9])
    step = gravac.train_step(loss_fn, tx, mesh, branches=False)
    state, last, after = trained(step, state, BATCHES[9:])
    assert first + last == rungs
    assert_same(before + after, losses)
    assert_same(state[0], whole[0])


@pytest.mark.parametrize(("rung", "exchanges"), [(None, 2), (0, 0), (1, 1), (2, 1)])
def test_a_program_has_the_network_of_its_rungs(rung, exchanges):
    ladder = gravac.Dense(), gravac.Bits(8), gravac.Bits(1)
    tx, mesh = two_stages(Listed(ladder)), make_mesh()

    def step(params, opt_state, x):
        _, grads = gravac.value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params, rung=rung)
        return optax.apply_updates(params, updates), opt_state

    given = *gravac.place((PARAMS, tx.init(PARAMS)), mesh), BATCHES[0]
    text = str(jax.make_jaxpr(gravac.data_parallel(step, mesh))(*given))
    assert text.count("all_to_all[") == exchanges


@pytest.mark.parametrize("rung", [-1, 4, 1.0, True])
def test_a_rung_that_is_not_on_the_ladder_is_refused(rung):
    tx = gravac.transform(None, send=Listed(), compress=True)
    with pytest.raises(ValueError, match=r"`rung` must be a whole number .* got"):
        tx.update(PARAMS, tx.init(PARAMS), rung=rung)


def test_what_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="`branches` must be a bool"):
        gravac.train_step(loss_fn, two_stages(), N, branches=1)
