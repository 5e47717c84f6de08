"""Rounds and delays: what is exchanged later is what was made, and nothing is lost.

With rounds, local steps send nothing, and an exchange averages what has gathered. With
a delay, a step exchanges what the step before left.
"""

import functools
import itertools

import _examples
import _harness
import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, ROWS, N, assert_same, at, make_mesh

import gravac_jax as gravac
from gravac_jax._memory import MEMORIES

H, ROUNDS = 3, 2
STEPS = H * ROUNDS
GRADIENTS = _harness.gaussian_gradients(STEPS)
LADDER = (gravac.Dense(), gravac.Bits(2))
DIMENSION, RATE = 64, 1e-2
LATE = {"every": 1, "delay": 1}
assert_close = functools.partial(_harness.assert_close, atol=2.0**-18)


def transform(send=ROWS, every=H, **recipe):
    usual = {"compress": COMPRESS, "send": send, "every": every}
    return gravac.transform(**usual | recipe)


@functools.cache
def program(how="vmap", **recipe):
    return _harness.trajectory(transform(**recipe), PARAMS, how)


def run(gradients=GRADIENTS, how="vmap", **recipe):
    return program(how, **recipe)(gradients)


def sums(gradients, every=H):
    """The sum of each round, `[rounds, replicas, ...]`, and zeros for other steps."""

    def one(x):
        whole = x.reshape(-1, every, *x.shape[1:]).sum(1)
        return np.concatenate([whole, np.zeros_like(x[len(whole) :])])

    return jax.tree.map(one, gradients)


# Of all entries, in turn, and of some.
SENDS = ROWS, gravac.Bits(1, turns=2), gravac.TopK(8, values="float32")


@pytest.mark.parametrize("send", _harness.choices(SENDS, lambda x: x is ROWS, repr))
def test_an_exchange_sends_what_a_step_of_the_whole_round_would(send):
    updates, states = run(send=send)
    expected, once = run(sums(GRADIENTS), send=send, every=1)
    ends = slice(H - 1, None, H)
    assert_close(at(updates, ends), at(expected, slice(ROUNDS)))
    kept, kept_once = states.local.memory, once.local.memory
    assert_close(at(kept, ends), at(kept_once, slice(ROUNDS)))
    assert not any(x[i].any() for x in updates.values() for i in (0, 1, 3, 4))


def test_so_it_is_on_a_mesh():
    assert_close(run(how="shard_map")[0], run()[0])


def test_a_function_gives_each_round_its_length_and_info_says_what_it_sent():
    info = run(every=lambda step: jnp.where(step < 2, 2, 3))[1].info
    steps = [1, 0, 1, 2, 0, 1]
    assert info.local_steps.tolist() == steps
    assert np.isinf(info.factor).tolist() == [x > 0 for x in steps]
    assert info.rung.tolist() == [int(x > 0) for x in steps]
    (sent,) = set(info.wire_bytes.tolist()) - {0}
    assert info.wire_bytes.tolist() == [sent * (x == 0) for x in steps]
    endless = run(every=lambda step: jnp.where(step < 2, 1, 10**9))[1].info
    assert endless.local_steps.tolist() == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_local_step_has_no_collective(delay):
    found = _harness.collectives(program("shard_map", delay=delay).text(GRADIENTS))
    assert found
    assert {x.branches[:1] for x in found} == {(1,)}


@functools.cache
def timed(kind, delay=0):
    """Return the states of steps at rungs in turn, whose times are told a step late."""
    take = _harness.trajectory(transform(kind(LADDER), delay=delay), PARAMS, "vmap")
    seconds = np.broadcast_to(np.arange(STEPS, dtype=np.float32)[:, None], (STEPS, N))
    return take(GRADIENTS, step_seconds=seconds + 1)[1]


@pytest.mark.parametrize("delay", _harness.choices([0, 1], lambda x: x == 0))
def test_the_exchange_tells_the_time_of_the_one_before(delay):
    told = timed(_harness.Scripted, delay).controller.measured_seconds[-1]
    np.testing.assert_array_equal(told, [H + 1, 0])


class Local(_harness.Scripted):
    """Keeps the time of local steps that it hears of."""

    def heard(self, evidence):
        return jnp.full(len(self.ladder), evidence.local_seconds)


def test_the_exchange_tells_the_time_of_a_step_that_sends_nothing():
    assert timed(Local).controller.measured_seconds[-1].tolist() == 2 * [2 * H]


class Looking(_harness.Scripted):
    """Keeps what exchanges tell of gradients, at which one step in eight looks."""

    look_every, looks_at = 8, "gradient"

    def heard(self, evidence):
        return evidence.gradient_energies


@pytest.mark.parametrize("delay", [0, 1])
def test_every_exchange_of_a_long_round_has_looked(delay):
    rounds = lambda step: jnp.where(step < 1, 1, 8)
    gradients, when = _harness.gaussian_gradients(42), {"every": rounds, "delay": delay}
    assert (run(gradients, send=Looking(LADDER), **when)[1].controller[0][-1] > 0).all()


def test_a_late_round_sends_what_was_made_before_its_last_step():
    earlier = jax.tree.map(
        lambda x: np.concatenate([np.zeros_like(x[:1]), x[:-1]]), GRADIENTS
    )
    assert_close(run(delay=1)[0], run(earlier)[0])


@pytest.mark.parametrize(
    "case",
    _harness.choices(
        itertools.product(("vmap", "shard_map"), ({}, LATE)),
        lambda x: x != ("shard_map", {}),
    ),
)
def test_a_bad_gradient_is_nothing_to_its_replica_and_others_hear_later(case):
    how, when = case
    bad, nothing = (jax.tree.map(np.copy, GRADIENTS) for _ in range(2))
    bad["w"][1, 2, 3, 3] = np.nan
    bad["b"][1, 2, 0] = np.inf
    nothing["w"][1, 2] = nothing["b"][1, 2] = 0
    updates, states = run(bad, how, **when)
    expected, others = run(nothing, how, **when)
    assert_same(updates, expected)
    assert_same(states.local.memory, others.local.memory)
    assert states.info.bad_steps.tolist() == [0, 0, 1, 1, 1, 1]
    assert states.info.is_finite.all()


def test_params_are_compared_at_the_exchanges():
    params = jax.tree.map(np.zeros_like, GRADIENTS)
    params["w"][:, 1] = 1
    for how, seen in ({}, [0, 0, 1, 1, 1, 2]), ({"delay": 1}, [0, 0, 1, 1, 1, 2]):
        _, states = program(**how)(GRADIENTS, params=params)
        assert states.info.disagreements.tolist() == seen


@pytest.mark.parametrize("when", [{}, LATE])
def test_a_flush_delivers_what_has_gathered_or_is_on_its_way(when):
    tx = transform(**when)

    def train(state, gradients):
        update = lambda state, x: (tx.update(x, state)[1], None)
        state, _ = jax.lax.scan(update, state, at(gradients, slice(H + 1)))
        own = gravac.own_params(tx, PARAMS, state)
        params, state = gravac.flush(tx, PARAMS, state)
        return params, own, gravac.own_params(tx, PARAMS, state)

    params, own, empty = _harness.on_all_replicas(train, tx, 1)(GRADIENTS)
    assert_close(at(params, 0), jax.tree.map(lambda x: x.mean(0), own))
    assert_same(empty, jax.tree.map(lambda x: np.stack([x] * N), PARAMS))


class Wild(_harness.Scripted):
    """Takes rungs that are not on the ladder."""

    def decide(self, evidence, state):
        rung, state = super().decide(evidence, state)
        return jnp.where(rung == 0, -5, 7), state


def test_a_rung_outside_of_the_ladder_is_the_nearest_one():
    wild, usual = (timed(x).info for x in (Wild, _harness.Scripted))
    assert wild.rung.tolist() == usual.rung.tolist()
    assert wild.local_steps.tolist() == usual.local_steps.tolist()


# A delay. --------------------------------------------------------------------------


# A delay hands on what a memory makes and what an exchange sends, whatever they are.
QUICK = type(None), gravac.OwnOptimizer
MASKS = {
    "memory": gravac.Momentum(0.5, masking=True),
    "send": gravac.TopK(8, values="float32"),
}
USUAL = gravac.Residual()
OTHERS = [{"memory": x} for x in _examples.one_of_each(MEMORIES) if x != USUAL]


@pytest.mark.parametrize(
    "others",
    _harness.choices(
        [{}, *OTHERS, MASKS, {"how": "shard_map"}],
        lambda x: x != MASKS and type(x.get("memory")) in QUICK,
        repr,
    ),
)
def test_a_delayed_run_is_the_run_without_delay_one_step_later(others):
    (prompt, _), (late, _) = run(every=1, **others), run(**LATE, **others)
    assert not any(x[0].any() for x in late.values())
    assert_close(at(late, slice(1, None)), at(prompt, slice(-1)))


MADE_BY = [ROWS, gravac.LowRank(1), gravac.TopK(8), gravac.Bits(1, turns=2)]


@pytest.mark.parametrize(
    "send", _harness.choices(MADE_BY, lambda x: x == ROWS or "LowRank" in repr(x), repr)
)
def test_what_was_made_was_sent_or_is_held(send):
    updates, states = run(**LATE, send=send)
    for name, part in zip(PARAMS, reversed(states.local.memory), strict=True):
        sent = updates[name].astype(np.float64).sum(0).ravel()
        held = part.residual[-1].astype(np.float64).mean(0)[: sent.size]
        came = GRADIENTS[name].astype(np.float64).sum(0).mean(0).ravel()
        np.testing.assert_allclose(sent + held, came, rtol=0, atol=1e-5)


@pytest.mark.parametrize("delay", [0, 1])
def test_the_update_does_not_depend_on_the_gradient(delay):
    other = {k: np.concatenate([x[:1], -x[1:]]) for k, x in GRADIENTS.items()}
    same, other = (run(x, every=1, delay=delay)[0] for x in (GRADIENTS, other))
    assert np.array_equal(same["w"][1], other["w"][1]) == bool(delay)


# Train steps. ---------------------------------------------------------------------


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2)


@functools.cache
def batch(step):
    draw = np.random.default_rng(step)
    return draw.standard_normal((N * 4, DIMENSION)).astype(np.float32)


def test_a_train_step_counts_the_steps_of_a_round_but_not_one_that_fails():
    every = lambda step: jnp.where(step < 2, 1, 2)
    step = gravac.train_step(loss_of, gravac.sgd(RATE, every=every), N)
    state, found = step.init({"w": jnp.ones(DIMENSION)}), []
    for i in range(7):
        if i == 3:
            with pytest.raises(ValueError, match="cannot be split"):
                step(*state, np.ones((N + 1, DIMENSION), np.float32))
        *state, _ = step(*state, batch(i))
        found.append(int(optax.tree.get(state, "StepInfo").local_steps))
    assert found == [0, 0, 1, 0, 1, 0, 1]


def test_the_local_program_of_a_train_step_has_no_collective():
    step, kinds = gravac.train_step(loss_of, gravac.sgd(RATE, every=H), make_mesh()), []
    program_of = step._program
    step._program = lambda kind: kinds.append(kind) or program_of(kind)
    state = step.init({"w": jnp.ones((DIMENSION, 8))})
    for i in range(H):
        *state, _ = step(*state, batch(i))
    assert [kind.is_due for kind in kinds] == [False, False, True]
    for kind in kinds[1:]:
        program = jax.jit(program_of(kind)).lower(*state, batch(0))
        found = _harness.collectives(program.compile().as_text())
        assert not any(x.branches for x in found)  # it knows which step it is
        assert bool(found) == kind.is_due


@pytest.mark.parametrize("where", [make_mesh(), N], ids=["mesh", "simulated"])
def test_a_train_step_returns_each_replicas_own_loss(where):
    params = {"w": jnp.ones(DIMENSION)}
    step = gravac.train_step(loss_of, gravac.sgd(RATE, every=H), where)
    *_, losses = step(*step.init(params), batch(0))
    expected = [loss_of(params, part) for part in batch(0).reshape(N, 4, DIMENSION)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def own_params_of(tx, steps):
    """Train one replica on a bowl, and return its own params at the end."""
    loss_fn = lambda params, batch: jnp.mean((params["w"] - 1.0) ** 2 * batch[0])
    step = gravac.train_step(loss_fn, tx, 1)
    state = step.init({"w": jnp.linspace(2, 3, 64)})
    for _ in range(steps):
        *state, _ = step(*state, jnp.ones((1, 64)))
    return step.flush(*state)[0]["w"]  # where a replica alone is


DECAYING = optax.adamw(0.05, weight_decay=0.3)
OWN_STEPS = {"send": gravac.Dense(), "memory": gravac.OwnOptimizer(DECAYING)}
LATER = {
    "delay": gravac.transform(delay=1, **OWN_STEPS),
    "both": gravac.transform(delay=1, every=3, **OWN_STEPS),
    "rounds": gravac.transform(every=3, **OWN_STEPS),
    "diloco": gravac.diloco(DECAYING, 1, outer=optax.sgd(1.0), send=gravac.Dense()),
}


@pytest.mark.parametrize("tx", _harness.choices(LATER, lambda x: x != "rounds"))
def test_what_decays_are_own_params_however_late_an_exchange_is(tx):
    tx, expected = LATER[tx], jnp.linspace(2, 3, 64)
    state = DECAYING.init(expected)
    with jax.numpy_dtype_promotion("standard"):
        found = own_params_of(tx, 12)
        for _ in range(12):
            grads = jax.grad(lambda w: jnp.mean((w - 1.0) ** 2))(expected)
            updates, state = DECAYING.update(grads, state, expected)
            expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-18)


# DiLoCo, against the paper in NumPy. -----------------------------------------------


def diloco(rounds, weight_decay, begun):
    """Douillard et al., Algorithm 1, with AdamW on each replica."""
    replicas = [_oracles.OwnAdam(0.9, 0.999) for _ in range(N)]
    shared, trace = np.full(DIMENSION, begun), np.zeros(DIMENSION)
    for i in range(rounds):
        own = np.stack([shared] * N)
        for step in range(i * H, (i + 1) * H):
            rows = batch(step).astype(np.float64).reshape(N, 4, DIMENSION)
            for adam, params, x in zip(replicas, own, rows, strict=True):
                made = adam.step(2 * (x.T @ (x @ params - 1)) / 4)
                params -= RATE * (made + weight_decay * params)
        gradient = shared - own.mean(0)
        trace = 0.9 * trace + gradient
        shared = shared - 0.7 * (gradient + 0.9 * trace)
    return shared


def test_diloco_is_the_papers():
    tx = gravac.diloco(optax.adamw(RATE, weight_decay=0.1), H)
    step = gravac.train_step(loss_of, tx, N)
    state = step.init({"w": jnp.full(DIMENSION, 0.125)})
    for i in range(4 * H):
        *state, _ = step(*state, batch(i))
    np.testing.assert_allclose(state[0]["w"], diloco(4, 0.1, 0.125), atol=2e-6)


FIRST = lambda step: jnp.where(step < 3, 3, 6)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (6, [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47]),
        (FIRST, [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41]),
    ],
    ids=["the second", "the first"],
)
def test_diloco_moves_a_fragment_as_torchft_does(lengths, expected):
    # torchft's regression test has two fragments, constant gradients of 2, an inner
    # rate of 1 and an outer one of 2, and exchanges a fragment every six steps, the
    # first after three. What a replica has before each step is written down there.
    tx = gravac.diloco(optax.sgd(1.0), lengths, outer=optax.sgd(2.0))
    step = gravac.train_step(lambda params, _: 2 * jnp.sum(params["w"]), tx, 2)
    state, found = step.init({"w": jnp.ones(1)}), []
    for _ in expected:
        *state, losses = step(*state, np.zeros(2))
        found.append(losses[0] / 2)
    np.testing.assert_array_equal(found, expected)


def test_an_outer_optimizer_of_narrow_params_may_be_wide():
    outer = optax.sgd(0.7, 0.9, nesterov=True, accumulator_dtype=jnp.float32)
    tx = gravac.diloco(optax.sgd(RATE), 1, outer=outer)
    step = gravac.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, 2)
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):
        *state, _ = step(*step.init(params), jnp.ones((2, 4), jnp.bfloat16))
    assert state[0]["w"].dtype == jnp.bfloat16
    assert (state[0]["w"] != 1).all()


@pytest.mark.parametrize("inner", [transform(), gravac.adamw(0.1, every=H)])
def test_an_outer_optimizer_of_anything_but_own_steps_is_refused(inner):
    with pytest.raises(ValueError, match="what optimizers made"):
        gravac.outer(inner, optax.sgd(0.1)).init(PARAMS)


def test_an_outer_optimizer_without_rounds_steps_in_each_step():
    own = gravac.OwnOptimizer(optax.sgd(1.0))
    tx = gravac.outer(gravac.transform(None, send=ROWS, memory=own), optax.sgd(0.5))
    updates, _ = tx.update(jnp.ones(8), tx.init(jnp.ones(8)), is_due=False)
    assert updates.tolist() == [-0.5] * 8
