"""With rounds, local steps send nothing, and an exchange averages what has gathered."""

import functools
import warnings

import _harness
import _oracles
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, ROWS, N, assert_same, at, make_mesh

import gravac_jax as gravac

H, ROUNDS = 3, 2
STEPS = H * ROUNDS
GRADIENTS = _harness.gaussian_gradients(STEPS)
LADDER = (gravac.Dense(), gravac.Bits(2))
DIMENSION, RATE = 64, 1e-2


def two_then_three(step):
    return jnp.where(step < 2, 2, 3)


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


def assert_close(received, expected):
    pairs = zip(jax.tree.leaves(received), jax.tree.leaves(expected), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=0, atol=2.0**-18)


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


@pytest.mark.parametrize(
    ("memory", "delay"),
    [
        (gravac.Residual(), 0),
        (gravac.OwnOptimizer(_oracles.SLOW_ADAM), 1),
        pytest.param(gravac.Momentum(0.5), 1, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_what_was_made_was_sent_or_is_held(memory, delay):
    updates, states = run(memory=memory, delay=delay)
    # All that the memory makes, whoever sends it: a run that sends everything.
    made, _ = run(memory=memory, every=1, send=gravac.Dense())
    for name, part in zip(PARAMS, reversed(states.local.memory), strict=True):
        held = part.residual[-1].mean(0, dtype=np.float64)
        sent = updates[name].astype(np.float64).sum(0).ravel()
        came = made[name].astype(np.float64).sum(0).ravel()
        np.testing.assert_allclose(sent + held, came, rtol=0, atol=1e-5)


def test_rounds_of_one_step_are_no_rounds():
    plain = gravac.transform(compress=COMPRESS, send=ROWS)
    expected = _harness.trajectory(plain, PARAMS, "vmap")(GRADIENTS)
    assert_same(run(every=1), expected)


def test_a_function_gives_each_round_its_length_and_info_says_what_it_sent():
    info = run(every=two_then_three)[1].info
    steps = [1, 0, 1, 2, 0, 1]
    assert info.local_steps.tolist() == steps
    assert np.isinf(info.factor).tolist() == [x > 0 for x in steps]
    assert info.rung.tolist() == [int(x > 0) for x in steps]
    (sent,) = set(info.wire_bytes.tolist()) - {0}
    assert info.wire_bytes.tolist() == [sent * (x == 0) for x in steps]
    expected = np.float32([0, sent / 2, sent / 2, sent / 2, sent / 3, sent / 3])
    np.testing.assert_allclose(info.mean_wire_bytes, expected, rtol=1e-6)
    factor = info.dense_wire_bytes[-1] / expected[-1]
    np.testing.assert_allclose(info.mean_byte_factor[-1], factor, rtol=1e-6)


@pytest.mark.parametrize(
    "send", _harness.choices([gravac.Dense(), SENDS[-1]], SENDS.__contains__, repr)
)
def test_info_says_how_alike_the_rounds_of_replicas_were(send):
    updates, states = run(send=send)
    rounds, alignment = sums(GRADIENTS), []
    residual = np.zeros_like(states.local.memory[0].residual[0])
    for i in range(ROUNDS):
        last = H * (i + 1) - 1
        fed = rounds["w"][i].reshape(N, -1).astype(np.float64) + residual
        residual = states.local.memory[0].residual[last]
        mean = updates["w"][last].ravel()
        sent = np.square(fed - residual).sum(1).mean()
        alignment.append(np.square(mean.astype(np.float64)).sum() / sent)
    expected = [1] * (H - 1) + [alignment[0]] * H + [alignment[1]]
    np.testing.assert_allclose(states.info.alignment, expected, rtol=1e-4)
    assert alignment[0] < 0.5


@pytest.mark.parametrize("delay", [0, 1])
def test_a_local_step_has_no_collective(delay):
    text = program("shard_map", delay=delay).text(GRADIENTS)
    found, _ = _harness.collectives(text)
    assert found
    assert {x.branches[:1] for x in found} == {(1,)}


@pytest.mark.parametrize("is_due", [False, True])
def test_who_knows_which_step_exchanges_gets_a_program_without_a_branch(is_due):
    tx, mesh = transform(compress=True), make_mesh()

    def train_step(params, state, x):
        own = gravac.own_params(tx, params, state)
        updates, state = tx.update(own * x[0], state, params, is_due=is_due)
        return optax.apply_updates(params, updates), state

    step = gravac.data_parallel(train_step, mesh)
    params = jnp.ones((64, 8))
    state = gravac.place((params, tx.init(params)), mesh)
    text = jax.jit(step).lower(*state, np.ones(N, np.float32)).compile().as_text()
    found, _ = _harness.collectives(text)
    assert bool(found) == is_due
    assert not any(x.branches for x in found)
    (*state,) = step(*state, np.ones(N, np.float32))
    assert optax.tree.get(state, "StepInfo").local_steps == (0 if is_due else 1)


@pytest.mark.parametrize("delay", _harness.choices([0, 1], lambda x: x == 0))
def test_the_exchange_tells_the_time_of_the_one_before(delay):
    tx = transform(_harness.Scripted(LADDER), delay=delay)
    seconds = np.broadcast_to(np.arange(STEPS, dtype=np.float32)[:, None], (STEPS, N))
    # A clock tells in each step how long the one before took.
    _, states = _harness.trajectory(tx, PARAMS, "vmap")(
        GRADIENTS, step_seconds=seconds + 1, measured_step=np.int32(seconds) - 1
    )
    told = states.controller.measured_seconds[-1]
    np.testing.assert_array_equal(told, [H + 1, np.nan])


def test_a_late_round_sends_what_was_made_before_its_last_step():
    earlier = jax.tree.map(
        lambda x: np.concatenate([np.zeros_like(x[:1]), x[:-1]]), GRADIENTS
    )
    assert_close(run(delay=1)[0], run(earlier)[0])


@pytest.mark.parametrize(
    "how", _harness.choices(["vmap", "shard_map"], lambda x: x == "vmap")
)
def test_a_bad_gradient_is_nothing_to_its_replica_and_the_others_hear_later(how):
    bad, nothing = (jax.tree.map(np.copy, GRADIENTS) for _ in range(2))
    bad["w"][1, 2, 3, 3] = np.nan
    nothing["w"][1, 2] = nothing["b"][1, 2] = 0
    updates, states = run(bad, how)
    expected, others = run(nothing, how)
    assert_same(updates, expected)
    assert_same(states.local.memory, others.local.memory)
    assert states.info.bad_steps.tolist() == [0, 0, 1, 1, 1, 1]
    assert states.info.is_finite.all()


def test_params_are_compared_at_the_exchanges():
    params = jax.tree.map(np.zeros_like, GRADIENTS)
    params["w"][:, 1] = 1
    _, states = program(check_every=4)(GRADIENTS, params=params)
    assert states.info.disagreements.tolist() == [0, 0, 0, 0, 0, 1]


def test_a_flush_in_the_middle_of_a_round_delivers_what_has_gathered():
    tx = transform()

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
    def rungs(controller):
        tx = transform(controller)
        info = _harness.trajectory(tx, PARAMS, "vmap")(GRADIENTS)[1].info
        return info.rung.tolist(), info.local_steps.tolist()

    assert rungs(Wild(LADDER)) == rungs(_harness.Scripted(LADDER))


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


def test_the_local_program_of_a_train_step_has_no_collective(monkeypatch):
    programs = []
    make = gravac._loop.train_step.parallel.data_parallel

    def kept(*args, **kwargs):
        programs.append(make(*args, **kwargs))
        return programs[-1]

    monkeypatch.setattr(gravac._loop.train_step.parallel, "data_parallel", kept)
    step = gravac.train_step(loss_of, gravac.sgd(RATE, every=H), make_mesh())
    state = step.init({"w": jnp.ones((DIMENSION, 8))})
    for i in range(H):
        *state, _ = step(*state, batch(i))
    found = []
    for program in programs:
        text = jax.jit(program).lower(*state, batch(0)).compile().as_text()
        found.append(len(_harness.collectives(text)[0]))
    flush, local, exchange = found
    assert local == 0
    assert exchange > 0
    assert flush > 0


WHOLE = {"send": gravac.Dense(), "compress": None}
MOMENTUM = optax.sgd(RATE, momentum=0.9)


@pytest.mark.parametrize(
    ("warns", "tx"),
    [
        (True, optax.chain(transform(**WHOLE), MOMENTUM)),
        (False, optax.chain(transform(compress=None), MOMENTUM)),
        (False, optax.chain(transform(**WHOLE), optax.sgd(RATE))),
        (False, optax.chain(transform(**WHOLE, every=1), MOMENTUM)),
        (False, gravac.sgd(RATE, send=gravac.Dense(), every=H)),
    ],
    ids=["whole", "few bits", "no momentum", "no rounds", "momentum before"],
)
def test_momentum_after_rounds_of_whole_gradients_is_warned_of_once(warns, tx):
    step = gravac.train_step(loss_of, tx, N)
    state = step.init({"w": jnp.ones((DIMENSION, 8))})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for i in range(2):
            *state, _ = step(*state, batch(i))
    told = [str(x.message) for x in found if "momentum comes after" in str(x.message)]
    assert len(told) == warns
    assert all("gravac.sgd" in x and "gravac.OwnOptimizer" in x for x in told)


@pytest.mark.parametrize("where", [make_mesh(), N], ids=["mesh", "simulated"])
def test_a_train_step_returns_each_replicas_own_loss(where):
    params = {"w": jnp.ones(DIMENSION)}
    step = gravac.train_step(loss_of, gravac.sgd(RATE, every=H), where)
    *_, losses = step(*step.init(params), batch(0))
    expected = [loss_of(params, part) for part in batch(0).reshape(N, 4, DIMENSION)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


# DiLoCo, against the paper in NumPy. -----------------------------------------------


def diloco(rounds, weight_decay):
    """Douillard et al., Algorithm 1, with AdamW on each replica."""
    replicas = [_oracles.OwnAdam(0.9, 0.999) for _ in range(N)]
    shared, trace = np.full(DIMENSION, 0.125), np.zeros(DIMENSION)
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


def trained(tx, where, steps):
    step = gravac.train_step(loss_of, tx, where)
    state = step.init({"w": jnp.full(DIMENSION, 0.125)})
    for i in range(steps):
        *state, _ = step(*state, batch(i))
    return np.asarray(state[0]["w"])


@pytest.mark.parametrize(
    ("where", "weight_decay"),
    [
        pytest.param(make_mesh(), 0.0, id="mesh", marks=pytest.mark.slow),
        pytest.param(N, 0.1, id="simulated"),
    ],
)
def test_diloco_is_the_papers(where, weight_decay):
    tx = gravac.diloco(optax.adamw(RATE, weight_decay=weight_decay), H)
    found = trained(tx, where, 4 * H)
    np.testing.assert_allclose(found, diloco(4, weight_decay), atol=2e-6)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (6, [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47]),
        (
            lambda step: jnp.where(step < 3, 3, 6),
            [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41],
        ),
    ],
    ids=["the second", "the first"],
)
def test_diloco_moves_a_fragment_as_torchft_does(lengths, expected):
    # torchft's regression test has two fragments, constant gradients of 2, an inner
    # rate of 1 and an outer one of 2, and exchanges a fragment every six steps, the
    # first after three. What a replica has before each step is written down there.
    tx = gravac.diloco(optax.sgd(1.0), lengths, outer=optax.sgd(2.0))

    def train_step(params, opt_state, grads):
        own = gravac.own_params(tx, params, opt_state)
        updates, opt_state = tx.update({"w": grads[0]}, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, own["w"]

    step = gravac.simulate(train_step, 2)
    params = {"w": jnp.ones(1)}
    state = gravac.place((params, tx.init(params)), 2)
    found = []
    for _ in expected:
        *state, own = step(*state, jnp.full((2, 1), 2.0))
        found.append(np.asarray(own).ravel()[0])
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


def test_an_outer_optimizer_of_gradients_is_refused():
    with pytest.raises(ValueError, match="what optimizers made"):
        gravac.outer(transform(), optax.sgd(0.1)).init(PARAMS)
