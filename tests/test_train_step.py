"""The train step in one call is its parts, and starts the program of the right rung."""

import dataclasses
import functools
import itertools
import warnings

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, ROWS, N, Scripted, assert_same, make_mesh

import gravac_jax as gravac
from gravac_jax._loop.train_step import Kind, _numbers

RNG = np.random.default_rng(0)
TARGET = RNG.standard_normal((16, 8)).astype(np.float32)
BATCHES = RNG.standard_normal((14, 4 * N, 16)).astype(np.float32)
PARAMS = {"b": np.zeros(8, np.float32), "w": np.zeros((16, 8), np.float32)}
ONE_BIT = {"send": gravac.Bits(1, row_entries=32), "compress": COMPRESS}
LADDER = (gravac.Dense(), ROWS)
MESH = make_mesh()
# Optax's Adam adds integers to floats.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None] - x @ TARGET) ** 2)


RUNGS = (1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0)
LATE = 2  # exchanges by which a decision takes effect later


@dataclasses.dataclass(frozen=True, repr=False)
class Listed(gravac.Controller):
    """Takes the rungs of a list; a decision takes effect three exchanges on."""

    ladder: tuple[gravac.Encoding, ...] = LADDER

    def init(self):
        return jnp.int32(RUNGS[0]), jnp.int32(0)

    def decide(self, evidence, state):
        del evidence
        return jnp.asarray(RUNGS, jnp.int32)[state + 1 + LATE], state + 1


def two_stages(send, *after, **options):
    """Return a transform of all but the bias, and what comes after it."""
    transform = gravac.transform(send=send, compress=COMPRESS, **options)
    return optax.chain(transform, *(after or [optax.sgd(0.05, momentum=0.5)]))


ADAM = optax.scale_by_adam(), optax.scale(-0.05)
RECIPES = {
    "fastest": two_stages(gravac.Fastest(LADDER), optax.sgd(0.1, momentum=0.9)),
    "adamw": gravac.adamw(0.05, **ONE_BIT),
    "delayed": gravac.sgd(0.05, delay=1, **ONE_BIT),
    "adam after": two_stages(ONE_BIT["send"], *ADAM),
    "plain": gravac.sgd(0.05, **ONE_BIT),
    "rungs": two_stages(Listed()),
    "rungs in rounds": two_stages(Listed(), optax.sgd(0.05), every=2),
    "rungs late": gravac.adamw(0.01, send=Listed(), delay=1, compress=COMPRESS),
    "entries": two_stages(Listed((gravac.Dense(), gravac.TopK(16)))),
}


def new_step(recipe, mesh=MESH, **options):
    return gravac.train_step(loss_fn, RECIPES.get(recipe, recipe), mesh, **options)


step_of = functools.cache(new_step)  # compiled once for all tests


def run(step, batches=BATCHES, state=None):
    """Return the state after all batches, and the rung and the loss of each."""
    rungs, losses, state = [], [], state or step.init(PARAMS)
    for batch in batches:
        *state, loss = step(*state, batch)
        rungs.append(int(optax.tree.get(state[1], "StepInfo").rung))
        losses.append(np.asarray(loss))
    return state, rungs, losses


def trained(step, state=None, batches=BATCHES):
    state, _, losses = run(step, batches, state)
    return jax.device_get(state), [float(np.mean(x)) for x in losses]


def traced(step):
    """Trace a step, which raises what it would raise at the first call."""
    return jax.eval_shape(step._program(Kind()), *step.init(PARAMS), BATCHES[0])


PARTS = [("delayed", None), ("delayed", "shared"), ("adam after", None)]
PARTS += [pytest.param("fastest", None, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "at"), PARTS)
def test_it_is_its_parts(name, at):
    tx = RECIPES[name]
    is_own = name != "adam after" and at != "shared"
    by_hand = _harness.plain_step(tx, loss_fn, is_own=is_own)
    state = gravac.place((PARAMS, tx.init(PARAMS)), MESH)
    (params, _), losses = trained(gravac.data_parallel(by_hand, MESH), state)
    (received, _), others = trained(step_of(name, at=at))
    # Times make no difference here: they decide among rungs by and by.
    assert losses[-1] < 0.7 * losses[0]
    if name != "fastest":
        assert_same(received, params)
        assert others == losses


def test_simulated_replicas_train_alike():
    found = [trained(step_of("delayed", mesh))[1] for mesh in (MESH, N)]
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_a_bad_batch_leaves_the_state_whole():
    step = step_of("plain")
    state = gravac.place(tuple(trained(step, batches=BATCHES[:2])[0]), MESH)
    for batch, error, words in [
        (BATCHES[0][:-1], ValueError, "cannot be split over"),
        (BATCHES[0][:0], ValueError, "above 0"),
        (BATCHES[0][:, :-1], TypeError, "dot_general"),
    ]:
        with pytest.raises(error, match=words):
            step(*state, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    step(*state, BATCHES[0])
    with pytest.raises(ValueError, match="was given to an earlier step"):
        new_step("plain")(*state, BATCHES[1])


def test_a_mean_of_rungs_may_be_off_by_a_rounding():
    assert _numbers(np.float32([2.9999998, 1])) == (3, 1)


def test_its_times_reach_the_controller():
    step = new_step(two_stages(Scripted(LADDER)))
    state, heard = step.init(PARAMS), []
    for batch in [*BATCHES, *BATCHES]:
        *state, _ = step(*state, batch)
        heard.append(np.asarray(state[1][0].controller.measured_seconds))
    assert np.isfinite(heard).all()
    assert np.min(heard) == 0 < np.max(heard)


def test_one_step_serves_several_runs():
    tx = gravac.sgd(0.05, compress=COMPRESS, every=3, send=gravac.Dense())
    step = new_step(tx)
    _, first = trained(step, batches=BATCHES[:7])
    _, again = trained(step, batches=BATCHES[:7])
    assert again == first
    begun, _ = trained(step, batches=BATCHES[:2])
    trained(step, batches=BATCHES[:4])
    of = lambda step: trained(step, gravac.place(begun, MESH), BATCHES[2:7])
    here, there = of(step), of(new_step(tx))
    assert here[1] == there[1]
    assert_same(here[0][0], there[0][0])


def test_a_run_that_begins_anew_is_told_its_own_times():
    step = step_of("plain")
    for _ in range(2):
        trained(step, batches=BATCHES[:7])
        step._clock.wait()
        assert step._clock.times()["steps_ago"] == 1
        assert step._clock._number == 7


def test_init_copies_what_it_is_given():
    mesh = make_mesh((2, N // 2), ("dcn", "ici"))
    params = gravac.place(PARAMS, mesh, "dcn")
    tx = gravac.sgd(0.05, "dcn", fast_axis_name="ici", **ONE_BIT)
    step = gravac.train_step(loss_fn, tx, mesh, "dcn", "ici")
    step(*step.init(params), BATCHES[0])
    assert_same(params, PARAMS)


NOT_LINEAR = {
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
    "adadelta": optax.adadelta(0.1),
    "conditional": optax.conditionally_transform(optax.sgd(0.1), lambda step: step > 3),
    "muon": optax.contrib.muon(0.1),
}


AFTER = {"sgd": optax.sgd(0.1, momentum=0.9), **NOT_LINEAR}


@pytest.mark.parametrize("after", AFTER)
def test_gradients_are_at_own_params_unless_what_comes_after_is_not_linear(after):
    def heard(updates, state, params=None, *, at=None, **others):
        seen.append(at)
        return updates, state

    seen, nothing = [], lambda params: optax.EmptyState()
    spy = optax.GradientTransformationExtraArgs(nothing, heard)
    tx, is_linear = two_stages(ROWS, spy, AFTER[after]), after not in NOT_LINEAR
    tx = optax.chain(optax.clip(1.0), tx)  # before it nothing needs to be linear
    with jax.numpy_rank_promotion("allow"):
        for at, told in ((None, "own" if is_linear else "shared"), ("shared",) * 2):
            traced(new_step(tx, at=at))
            assert seen[-1] == told
        if not is_linear:
            with pytest.raises(ValueError, match="linear in the updates"):
                traced(new_step(tx, at="own"))


def test_what_steps_by_the_loss_is_told_its_mean_also_where_leaves_are_one():
    keep = lambda updates, state, params=None, *, value, **others: (updates, value)
    after = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0), keep)
    step = new_step(optax.flatten(optax.chain(gravac.transform(compress=True), after)))
    params, opt_state, loss = step(*step.init(PARAMS), BATCHES[0])
    assert opt_state[-1] == loss
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(step)(params, opt_state, BATCHES[0])
    assert step.flush(params, opt_state, value=jnp.float32(3))[1][-1] == 3


def test_a_flush_warns_of_an_optimizer_that_holds_it_back():
    step = new_step(two_stages(ROWS, NOT_LINEAR["MultiSteps"]))
    with pytest.warns(UserWarning, match="keeps what gravac.flush delivers"):
        step.flush(*step.init(PARAMS))


def test_debug_nans_complains_of_nothing_but_the_loss():
    tx, loss = gravac.transform(None), lambda p, x: jnp.log(-1 - loss_fn(p, x))
    step = gravac.train_step(loss, two_stages(ROWS), MESH)
    with jax.debug_nans(True):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)  # no time is known
        with pytest.raises(FloatingPointError):
            step(*step.init(PARAMS), BATCHES[0])


def test_adam_after_a_late_exchange_is_refused_unless_gradients_are_at_shared_params():
    tx = two_stages(ONE_BIT["send"], *ADAM, delay=1)
    with pytest.raises(ValueError, match=r"linear in the updates.*gravac\.adamw"):
        traced(new_step(tx))
    traced(new_step(tx, at="shared"))


def test_adam_after_few_bits_is_warned_about_and_lion_after_fewer():
    few = gravac.Bits(2), gravac.TopK(64), gravac.LowRank(1)
    many = gravac.Bits(4), gravac.TopK(2)
    for send, after in itertools.product((*few, *many), (ADAM, [optax.lion(0.1)])):
        with warnings.catch_warnings(record=True) as said:
            traced(new_step(two_stages(send, *after)))
        is_said = any("the loss ends higher" in str(x.message) for x in said)
        assert is_said == (send in (few if after is ADAM else few[1:]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A pytree that can be called, as a module of Equinox is."""

    b: jax.Array
    w: jax.Array

    def __call__(self, x):
        return x @ self.w + self.b[None]


def test_a_pytree_that_can_be_called_is_no_function():
    module = jax.tree.map(jnp.asarray, Module(**PARAMS))
    tx = gravac.sgd(0.05, compress=jax.tree.map(lambda x: x.ndim > 1, module))
    step = gravac.train_step(lambda module, x: jnp.mean(module(x)), tx, MESH)
    state = jax.eval_shape(step.init, module)
    assert _harness.residual(state).shape == (N, PARAMS["w"].size)
    with pytest.raises(ValueError, match=r"pytree of bools .*got Module\(.* \.\.\.\."):
        gravac.sgd(0.05, compress=module).init(module)


def in_a_loop(params, x):
    """Return the loss by a loop that begins with zeros, as those of libraries do."""
    add = lambda total, row: (total + loss_fn(params, row[None]) / len(x), None)
    return jax.lax.scan(add, jnp.float32(0), x)[0]


def test_a_loop_of_a_library_runs_without_the_check():
    dense = gravac.sgd(0.05, send=gravac.Scheduled(LADDER, starts=(1000,)))
    make = functools.partial(gravac.train_step, in_a_loop, dense, branches=False)
    with pytest.raises(TypeError) as caught:
        trained(make(MESH))
    assert any("check_vma=False" in note for note in caught.value.__notes__)
    (params, _), losses = trained(make(MESH, check_vma=False))
    (expected, _), others = trained(new_step(dense))
    np.testing.assert_allclose(losses, others, rtol=1e-5)
    np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-4, atol=1e-6)


def test_it_is_lowered_from_arrays_or_shapes():
    step, batch = step_of("rungs"), BATCHES[0]
    state = step.init(PARAMS)
    shapes = gravac.place(jax.eval_shape(lambda: state), MESH)
    lowered = step.lower(*shapes, jax.eval_shape(lambda: batch)).as_text()
    assert lowered == step.lower(*state, batch).as_text()


def test_what_the_loss_returns_beside_is_averaged():
    def with_aux(params, x):
        own = jax.lax.axis_index("data").astype(jnp.bfloat16)
        return loss_fn(params, x), {"rows": jnp.float32(len(x)), "own": own}

    tx = RECIPES["adamw"]
    step = gravac.train_step(with_aux, tx, MESH, has_aux=True, micro_batches=2)
    *_, loss, aux = step(*step.init(PARAMS), BATCHES[0])
    assert aux["rows"].tolist() == [2, 2]
    assert aux["own"].tolist() == [(N - 1) / 2] * 2
    assert aux["own"].dtype == loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, loss_fn(PARAMS, BATCHES[0]), rtol=1e-6)


def test_a_bad_gradient_is_left_out_and_a_guard_skips_the_step():
    bad, nothing = BATCHES[0].copy(), BATCHES[0].copy()
    bad[5], nothing[4:8] = np.nan, 0  # of the second replica

    def after(step, batch):
        (params, opt_state), _ = trained(step, batches=[batch])
        return params, int(optax.tree.get(opt_state, "bad_steps"))

    step = step_of("adamw")
    (params, skipped), (expected, _) = after(step, bad), after(step, nothing)
    assert_same(params, expected)
    assert not np.array_equal(params["w"], PARAMS["w"])
    assert skipped == 1
    assert_same(after(new_step(gravac.guard(RECIPES["adamw"])), bad), (PARAMS, 1))


def test_the_loss_is_of_its_batch_also_where_a_wrapper_leaves_out_the_exchange():
    tx = RECIPES["adamw"]

    def update(grads, state, params, **told):
        take = lambda: tx.update(grads, state, params, **told)
        return jax.lax.cond(False, take, lambda: (params, state))

    step = new_step(optax.GradientTransformationExtraArgs(tx.init, update), at="shared")
    *_, loss = step(*step.init(PARAMS), BATCHES[0])
    np.testing.assert_allclose(loss, loss_fn(PARAMS, BATCHES[0]), rtol=1e-6)


def test_the_loss_takes_no_message_of_its_own():
    step = new_step(gravac.guard(two_stages(gravac.Bits(2))))
    text = step.lower(*step.init(PARAMS), BATCHES[0]).compile().as_text()
    assert {x.kind for x in _harness.collectives(text)} == {"all-to-all", "all-gather"}


# ------------------------------------------------- a program for each rung


OF_RUNGS = [x for x in RECIPES if "rungs" in x or x == "entries"]


@pytest.mark.parametrize("name", _harness.choices(OF_RUNGS, lambda x: x == "rungs"))
def test_a_program_for_each_rung_takes_the_same_steps(name):
    found, mesh = [], N if name == "rungs in rounds" else MESH
    for branches in (True, False):
        step = step_of(name, mesh, branches=branches)
        state, rungs, losses = run(step)
        params, _ = jax.device_get(step.flush(*state))
        found.append((params, rungs, losses))
    (params, rungs, losses), (others, other_rungs, other_losses) = found
    assert rungs == other_rungs
    # Each decision took effect three exchanges on.
    exchanged = rungs[1::2] if name == "rungs in rounds" else rungs
    assert exchanged == list(RUNGS[: len(exchanged)])
    # XLA fuses each by itself.
    np.testing.assert_allclose(other_losses, losses, rtol=1e-4)
    np.testing.assert_allclose(others["w"], params["w"], rtol=1e-4, atol=1e-6)


def test_no_program_takes_a_rung_that_is_for_own_params_only_at_shared_ones():
    send = gravac.Fastest((gravac.Dense(), ONE_BIT["send"]))
    memory = gravac.OwnOptimizer(optax.chain(*ADAM))
    own = two_stages(send, optax.identity(), memory=memory)
    for tx, branches in ((two_stages(send, *ADAM), True), (own, True), (own, False)):
        _, rungs, _ = run(new_step(tx, branches=branches, at="shared"), BATCHES[:4])
        assert rungs == [0] * 4


def test_bad_gradients_of_all_replicas_change_nothing_at_any_rung():
    step = step_of("rungs", MESH, branches=False)
    (params, opt_state), _ = trained(step, batches=np.full_like(BATCHES[:8], np.nan))
    assert_same(params, PARAMS)
    assert optax.tree.get(opt_state, "StepInfo").bad_steps == 8
    assert not any(x.any() for x in jax.tree.leaves(opt_state[0].local.memory))


def test_a_new_step_goes_on_where_another_one_ended():
    step, later = (f("rungs", MESH, branches=False) for f in (step_of, new_step))
    whole, rungs, losses = run(step)
    state, first, before = run(step, BATCHES[:9])
    state, last, after = run(later, BATCHES[9:], state)
    assert first + last == rungs
    assert_same(before + after, losses)
    assert_same(state[0], whole[0])


@pytest.mark.parametrize(("rung", "exchanges"), [(None, 2), (0, 0), (1, 1), (2, 1)])
def test_a_program_has_the_network_of_its_rungs(rung, exchanges):
    tx = two_stages(Listed((gravac.Dense(), gravac.Bits(8), gravac.Bits(1))))
    step = new_step(tx)
    take = step._program(Kind(rung=rung))
    text = str(jax.make_jaxpr(take)(*step.init(PARAMS), BATCHES[0]))
    assert text.count("all_to_all[") == exchanges
