"""With rounds, local steps send nothing, and an exchange averages what has gathered."""

import functools
import warnings

import _examples
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, ROWS, N, assert_same, at, make_mesh

import gravac_jax as gravac
from gravac_jax._error_feedback import MEMORIES

H, ROUNDS = 3, 2
STEPS = H * ROUNDS
GRADIENTS = _harness.gaussian_gradients(STEPS)
# What a masking memory makes depends on what was sent.
MEMBERS = [
    x
    for x in _examples.one_of_each(MEMORIES)
    if not isinstance(x, gravac.NoMemory) and not x.masks
]
WIDE = gravac.AllGather(gravac.TopK(), **_examples.WIDE)


def two_then_three(step):
    return jnp.where(step < 2, 2, 3)


def transform(every=H, factor=8, **recipe):
    controller = gravac.Every(every, gravac.Fixed(factor))
    usual = {"compress": COMPRESS, "controller": controller, "exchange": ROWS}
    return gravac.transform(**{**usual, **recipe})


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


# The rounds look at no exchange: one rounds all entries, one also their mean, and one
# selects some.
EXCHANGED = ROWS, gravac.QuantizedAllReduce(32), WIDE


@pytest.mark.parametrize(
    "exchange", _harness.choices(EXCHANGED, lambda x: x is ROWS, repr)
)
def test_an_exchange_sends_what_a_step_of_the_whole_round_would(exchange):
    recipe = {} if exchange is ROWS else {"exchange": exchange}
    updates, states = run(**recipe)
    expected, once = run(sums(GRADIENTS), every=1, **recipe)
    assert_close(at(updates, slice(H - 1, None, H)), at(expected, slice(ROUNDS)))
    assert_close(
        at(states.local.memory, slice(H - 1, None, H)),
        at(once.local.memory, slice(ROUNDS)),
    )
    assert not any(x[i].any() for x in updates.values() for i in (0, 1, 3, 4))


QUICK = {(gravac.Residual, 0), (gravac.Steps, 1)}


def test_so_it_is_on_a_mesh():
    assert_close(run(how="shard_map")[0], run()[0])


@pytest.mark.parametrize(
    ("memory", "delay"),
    [
        pytest.param(
            memory,
            delay,
            marks=() if (type(memory), delay) in QUICK else pytest.mark.slow,
            id=f"{delay}-{memory!r}",
        )
        for memory in MEMBERS
        for delay in (0, 1)
    ],
)
def test_what_was_made_was_sent_or_is_held(memory, delay):
    updates, states = run(memory=memory, delay=delay)
    # All that the memory makes, whoever sends it: a run that sends everything.
    made, _ = run(memory=memory, every=1, factor=1)
    held = [np.asarray(memory.held(x, x.residual.shape[-1]))[-1].mean(0) for x in
            states.local.memory]  # fmt: skip
    for name, rest in zip(PARAMS, reversed(held), strict=True):
        sent = updates[name].astype(np.float64).sum(0).ravel()
        came = made[name].astype(np.float64).sum(0).ravel()
        np.testing.assert_allclose(sent + rest, came, rtol=0, atol=1e-5)


def test_rounds_of_one_step_are_no_rounds():
    plain = transform(controller=gravac.Fixed(8))
    expected = _harness.trajectory(plain, PARAMS, "vmap")(GRADIENTS)
    assert_same(run(every=1), expected)


def test_a_schedule_gives_each_round_its_length():
    _, states = run(every=two_then_three)
    assert states.info.local_steps.tolist() == [1, 0, 1, 2, 0, 1]
    assert np.isinf(states.info.factor).tolist() == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    assert (states.info.wire_bytes > 0).tolist() == [x == 0 for x in (1, 0, 1, 2, 0, 1)]


@pytest.mark.parametrize("factor", _harness.choices([1, 32], lambda x: x == 32))
def test_info_says_how_alike_the_rounds_of_replicas_were(factor):
    updates, states = run(factor=factor)
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


def test_info_says_what_a_round_sent_a_step():
    info = run(every=two_then_three)[1].info
    (sent,) = set(info.wire_bytes.tolist()) - {0}
    expected = np.float32([0, sent / 2, sent / 2, sent / 2, sent / 3, sent / 3])
    np.testing.assert_allclose(info.mean_wire_bytes, expected, rtol=1e-6)
    factor = info.dense_wire_bytes[-1] / expected[-1]
    np.testing.assert_allclose(info.mean_byte_factor[-1], factor, rtol=1e-6)


def test_a_local_step_has_no_collective():
    for delay in (0, 1):
        recipe = {"delay": delay} if delay else {}
        text = program("shard_map", **recipe).text(GRADIENTS)
        found, _ = _harness.collectives(text)
        assert found
        assert {x.branches[:1] for x in found} == {(1,)}


@pytest.mark.parametrize("is_due", [False, True])
def test_who_knows_which_step_exchanges_gets_a_program_without_a_branch(is_due):
    tx, mesh = transform(compress=True), make_mesh()

    def train_step(params, state, x):
        own = gravac.local_params(tx, params, state)
        updates, state = tx.update(own * x[0], state, params, is_due=is_due)
        return optax.apply_updates(params, updates), state

    step = gravac.data_parallel(train_step, mesh)
    params = jnp.ones((64, 8))
    state = gravac.place((params, tx.init(params)), mesh)
    text = jax.jit(step).lower(*state, np.ones(N, np.float32)).compile().as_text()
    found, conditionals = _harness.collectives(text)
    assert bool(found) == is_due
    assert not any(x.branches for x in found)
    assert is_due or not conditionals
    (*state,) = step(*state, np.ones(N, np.float32))
    assert optax.tree.get(state, "StepInfo").local_steps == (0 if is_due else 1)


def test_a_train_step_exchanges_where_the_controller_says():
    every = lambda step: jnp.where(step < 2, 1, 2)
    tx = optax.chain(transform(every, compress=True), optax.scale(-0.1))
    step = gravac.train_step(loss_of, tx, N)
    state, found = step.init({"w": jnp.full(DIMENSION, 0.125)}), []
    for i in range(5):
        *state, _ = step(*state, batch(i))
        found.append(int(optax.tree.get(state, "StepInfo").local_steps))
    assert found == [0, 0, 1, 0, 1]


def test_the_local_program_of_a_train_step_has_no_collective(monkeypatch):
    programs = []
    make = gravac._train_step._parallel.data_parallel

    def kept(*args, **kwargs):
        programs.append(make(*args, **kwargs))
        return programs[-1]

    monkeypatch.setattr(gravac._train_step._parallel, "data_parallel", kept)
    tx = gravac.sgd(RATE, controller=gravac.Every(H, gravac.Fixed(16)), exchange=ROWS)
    step = gravac.train_step(loss_of, tx, make_mesh())
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


@pytest.mark.parametrize("delay", _harness.choices([0, 1], lambda x: x == 0))
def test_the_exchange_tells_the_time_of_the_one_before(delay):
    controller = gravac.Every(H, _harness.Scripted((1.0, 8.0)))
    tx = transform(controller=controller, delay=delay)
    seconds = np.broadcast_to(np.arange(STEPS, dtype=np.float32)[:, None], (STEPS, N))
    # A clock tells in each step how long the one before took.
    _, states = _harness.trajectory(tx, PARAMS, "vmap")(
        GRADIENTS, step_seconds=seconds + 1, measured_step=np.int32(seconds) - 1
    )
    told = states.controller.measured_seconds[-1]
    np.testing.assert_array_equal(told, [H + 1, np.nan])


def evidence_at(step, energies, steps):
    """What a controller sees at an exchange; every rung would take as long."""
    energies = jnp.asarray(energies)
    return gravac.Evidence(
        step=jnp.int32(step),
        replicas=N,
        first_sparse=jnp.int32(1),
        energies=energies,
        energy=jnp.float32(1),
        gradient_energy=jnp.float32(1),
        gradient_energies=energies,
        predicted_parts=jnp.ones((energies.size, 4)),
        measured_seconds=jnp.full(energies.size, jnp.nan),
        steps=steps,
    )


@pytest.mark.parametrize("every", [10, lambda step: jnp.where(step < 4, 4, 10)])
def test_windows_of_gravac_end_whatever_the_rounds(every):
    inner = gravac.GraVAC(
        ladder=(1, 4, 8, 16, 32, 64), window=20, epsilon=0.0, omega=1.0
    )
    rounds = gravac.Every(every, inner)
    energies = jnp.array([1.0, 0.99, 0.98, 0.97, 0.96, 0.95])
    _, state = rounds.init()
    decide = jax.jit(
        lambda step, steps, state: rounds.decide(
            evidence_at(step, energies, steps), state
        )
    )
    moves, steps = [], 4 if callable(every) else 10
    step = steps - 1
    for _ in range(12):
        _, state = decide(step, steps, state)
        moves.append((int(state.minimum), int(state.candidate)))
        step, steps = step + 10, 10
    assert len(set(moves)) > 2


def test_fastest_in_rounds_of_every_predicts_as_with_rounds_of_its_own():
    shares, steps = jnp.array([1.0, 0.9, 0.5]), 8
    found = []
    for rounds in ((1,), (1, steps)):
        controller = gravac.Fastest((1, 4, 16), rounds=rounds, most_bytes=1.5)
        evidence = evidence_at(100, shares, jnp.int32(steps))._replace(
            local_seconds=jnp.float32(jnp.nan), wire_bytes=jnp.array([16.0, 8.0, 4.0])
        )
        _, state = jax.jit(controller.decide)(evidence, controller.init()[1])
        last = jax.tree.map(
            lambda x: x[-3:], (state.seconds, state.progress, state.fits)
        )
        found.append(last)
    assert_same(found[0], found[1])
    assert found[0][2].tolist() == [False, True, True]


def test_if_no_choice_is_worth_enough_the_one_that_is_worth_most_is_taken():
    shares, steps = jnp.array([1.0, 0.9, 0.3]), 8
    controller = gravac.Every(steps, gravac.Fastest((1, 4, 16), least_progress=0.95))
    cheap = jnp.array([[3.0] * 4, [2.0] * 4, [1.0] * 4])

    def decide(carry, i):
        evidence = evidence_at(steps * i, shares, jnp.int32(steps))
        evidence = evidence._replace(
            predicted_parts=cheap, local_seconds=jnp.float32(jnp.nan)
        )
        return controller.decide(evidence, carry[1]), None

    (rung, state), _ = jax.lax.scan(decide, controller.init(), jnp.arange(60))
    found = controller.predictions(state)
    assert found.is_allowed.tolist() == [True, False, False]
    assert (int(rung), found.steps) == (0, (steps,) * 3)


class Wild(_harness.Scripted):
    """Takes rungs that are not on the ladder."""

    def decide(self, evidence, state):
        rung, state = super().decide(evidence, state)
        return jnp.where(rung == 0, -5, 7), state


def test_a_rung_outside_of_the_ladder_is_the_nearest_one():
    def factors(controller):
        tx = transform(controller=controller)
        info = _harness.trajectory(tx, PARAMS, "vmap")(GRADIENTS)[1].info
        return info.factor.tolist(), info.local_steps.tolist()

    ladder = (1.0, 16.0)
    assert factors(Wild(ladder)) == factors(_harness.Scripted(ladder))


@pytest.mark.parametrize(("last", "rung"), [(38, 1), (39, 0)])
def test_a_schedule_inside_decides_for_the_third_exchange_on(last, rung):
    schedule = lambda step: jnp.where(step <= last, 4.0, 16.0)
    rounds = gravac.Every(10, gravac.Scheduled(schedule, (4, 16)))
    evidence = evidence_at(9, jnp.ones(2), 10)
    decided, _ = rounds.decide(evidence, rounds.init()[1])
    assert int(decided) == rung  # of step 39


@pytest.mark.parametrize(
    "name",
    _harness.choices(["masked first", "partitioned"], lambda x: x == "partitioned"),
)
def test_a_train_step_takes_optimizers_that_look_at_the_tree(name):
    exchange = transform(controller=gravac.Fixed(8), compress=True)
    decayed = optax.add_decayed_weights(1e-4, mask={"w": True, "b": False})
    chain = optax.chain(decayed, exchange, optax.sgd(RATE))
    if name == "partitioned":
        kinds = {"w": "all", "b": "all"}
        chain = optax.partition({"all": optax.chain(exchange, optax.sgd(RATE))}, kinds)
    step = gravac.train_step(loss_of, chain, N)
    state = step.init({"w": jnp.ones(DIMENSION), "b": jnp.ones(3)})
    *_, value = step(*state, batch(0))
    assert np.isfinite(value)


def test_a_late_round_sends_what_was_made_before_its_last_step():
    earlier = jax.tree.map(
        lambda x: np.concatenate([np.zeros_like(x[:1]), x[:-1]]), GRADIENTS
    )
    assert_close(run(delay=1)[0], run(earlier)[0])


@pytest.mark.parametrize("has_outer", _harness.choices([False, True], lambda x: not x))
def test_the_exchange_of_a_round_may_run_beside_its_last_step(has_outer):
    controller, found = gravac.Every(H, gravac.Fixed(16)), []
    recipe = {"controller": controller, "delay": 1, "exchange": ROWS}
    tx = gravac.sgd(RATE, compress=True, **recipe)
    if has_outer:
        tx = gravac.diloco(optax.sgd(RATE), **recipe)
    for overlap in (False, True):
        step = gravac.train_step(loss_of, tx, make_mesh(), overlap=overlap)
        state, losses = step.init({"w": jnp.full(DIMENSION, 0.125)}), []
        for i in range(2 * H + 1):
            *state, loss = step(*state, batch(i))
            losses.append(np.asarray(loss))
        params, opt_state = jax.device_get(step.flush(*state))
        found.append((params, losses, optax.tree.get(opt_state, "memory")))
    one, three = found
    assert one[1][0].shape == (N,)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(three), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


def test_a_step_that_fails_is_not_counted():
    controller = gravac.Every(2, gravac.Fixed(16))
    tx = gravac.sgd(RATE, controller=controller, exchange=ROWS)
    step = gravac.train_step(loss_of, tx, N)
    state, found = step.init({"w": jnp.ones(DIMENSION)}), []
    with pytest.raises(ValueError, match="cannot be split"):
        step(*state, np.ones((N + 1, DIMENSION), np.float32))
    for i in range(4):
        *state, _ = step(*state, batch(i))
        found.append(int(optax.tree.get(state, "StepInfo").local_steps))
    assert found == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "recipe",
    _harness.choices([gravac.diloco, gravac.sparse_loco], lambda x: x is gravac.diloco),
)
def test_a_controller_of_ones_own_brings_its_rounds(recipe):
    tx = recipe(optax.sgd(RATE), steps=30, controller=gravac.Every(2, gravac.Fixed(1)))

    def train_step(params, state, x):
        own = gravac.local_params(tx, params, state)
        loss, grads = gravac.value_and_grad(loss_of)(own, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = {"w": jnp.full(DIMENSION, 0.125)}
    state, found = gravac.place((params, tx.init(params)), N), []
    step = gravac.simulate(train_step, N)
    for i in range(4):
        *state, _ = step(*state, batch(i))
        found.append(np.asarray(state[0]["w"]))
    assert (found[0] == 0.125).all()
    assert (found[1] != 0.125).all()
    assert (found[2] == found[1]).all()
    assert (found[3] != found[1]).all()


@pytest.mark.parametrize(
    ("warns", "tx"),
    [
        (
            True,
            lambda rounds: (
                transform(controller=rounds, compress=None),
                optax.sgd(RATE, momentum=0.9),
            ),
        ),
        (
            False,
            lambda rounds: (
                transform(controller=rounds, compress=None),
                optax.sgd(RATE),
            ),
        ),
        (False, lambda rounds: (gravac.sgd(RATE, controller=rounds, exchange=ROWS),)),
        (
            False,
            lambda _: (
                transform(controller=gravac.Fixed(16), compress=None),
                optax.sgd(RATE, momentum=0.9),
            ),
        ),
    ],
)
def test_momentum_after_rounds_is_warned_of_once(warns, tx):
    chain = optax.chain(*tx(gravac.Every(H, gravac.Fixed(4))))
    step = gravac.train_step(loss_of, chain, N)
    state = step.init({"w": jnp.ones((DIMENSION, 8))})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for i in range(2):
            *state, _ = step(*state, batch(i))
    told = [str(x.message) for x in found if "momentum comes after" in str(x.message)]
    assert len(told) == warns
    assert all("gravac.sgd" in x and "gravac.Steps" in x for x in told)


def test_a_train_step_returns_each_replicas_own_loss():
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    tx = transform(axis_name="data", compress=True)
    chain = optax.chain(tx, optax.scale(-0.1))
    batch = np.random.default_rng(0).standard_normal((4 * N, 64)).astype(np.float32)
    params = {"w": jnp.ones((64, 8))}
    losses = []
    for where in (make_mesh(), N):
        step = gravac.train_step(loss, chain, where)
        _, _, value = step(*step.init(params), batch)
        assert value.shape == (N,)
        losses.append(np.asarray(value))
    parts = batch.reshape(N, 4, 64)
    expected = [float(loss(params, part)) for part in parts]
    for found in losses:
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("how", ["vmap", "shard_map"])
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
        own = gravac.local_params(tx, PARAMS, state)
        params, state = gravac.flush(tx, PARAMS, state)
        return params, own, gravac.local_params(tx, PARAMS, state)

    params, own, empty = _harness.on_all_replicas(train, tx, 1)(GRADIENTS)
    assert_close(at(params, 0), jax.tree.map(lambda x: x.mean(0), own))
    assert_same(empty, jax.tree.map(lambda x: np.stack([x] * N), PARAMS))


# Published methods, against the papers in NumPy.

DIMENSION, RATE = 64, 1e-2


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2)


@functools.cache
def batch(step):
    draw = np.random.default_rng(step)
    return draw.standard_normal((N * 4, DIMENSION)).astype(np.float32)


class Adam:
    """AdamW of one replica, as Loshchilov and Hutter write it."""

    def __init__(self, weight_decay):
        self.m = self.v = np.zeros(DIMENSION)
        self.weight_decay, self.steps = weight_decay, 0

    def step(self, params, rows):
        error = rows @ params - 1
        gradient = 2 * (error[:, None] * rows).mean(0)
        self.steps += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m, v = (x / (1 - b**self.steps) for x, b in ((self.m, 0.9), (self.v, 0.999)))
        return params - RATE * (m / (np.sqrt(v) + 1e-8) + self.weight_decay * params)


def rounds_of(weight_decay, rounds):
    """Yield the shared params to begin at; be sent those of the next round."""
    replicas = [Adam(weight_decay) for _ in range(N)]
    shared = np.full(DIMENSION, 0.125)
    for i in range(rounds):
        own = [shared] * N
        for step in range(i * H, (i + 1) * H):
            rows = batch(step).astype(np.float64).reshape(N, 4, DIMENSION)
            own = [r.step(p, x) for r, p, x in zip(replicas, own, rows, strict=True)]
        shared = yield shared, np.stack(own)


def diloco(rounds, weight_decay):
    """Douillard et al., Algorithm 1."""
    trace, run = np.zeros(DIMENSION), rounds_of(weight_decay, rounds)
    begin, own = next(run)
    for _ in range(rounds):
        gradient = begin - own.mean(0)
        trace = 0.9 * trace + gradient
        shared = begin - 0.7 * (gradient + 0.9 * trace)
        try:
            begin, own = run.send(shared)
        except StopIteration:
            return shared


def sparse_loco(rounds, weight_decay, k):
    """Sarfi et al., Algorithm 1, with one chunk and values that are not rounded."""
    residual, run = np.zeros((N, DIMENSION)), rounds_of(weight_decay, rounds)
    begin, own = next(run)
    for _ in range(rounds):
        residual = 0.95 * residual + (begin - own)
        sent = np.zeros_like(residual)
        for replica in range(N):
            places = np.argsort(-np.abs(residual[replica]))[:k]
            sent[replica, places] = residual[replica, places]
        residual = residual - sent
        shared = begin - 0.5 * sent.mean(0)
        try:
            begin, own = run.send(shared)
        except StopIteration:
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
        own = gravac.local_params(tx, params, opt_state)
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


@pytest.mark.slow
def test_sparse_loco_is_the_papers():
    tx = gravac.sparse_loco(
        optax.adamw(RATE, weight_decay=0.1),
        H,
        factor=4,
        learning_rate=0.5,
        exchange=WIDE,
    )
    found = trained(tx, N, 4 * H)
    np.testing.assert_allclose(found, sparse_loco(4, 0.1, DIMENSION // 4), atol=2e-6)


def test_an_outer_optimizer_of_narrow_params_may_be_wide():
    outer = optax.sgd(0.7, 0.9, nesterov=True, accumulator_dtype=jnp.float32)
    tx = gravac.diloco(optax.sgd(RATE), 1, outer=outer)
    step = gravac.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, 2)
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):
        *state, _ = step(*step.init(params), jnp.ones((2, 4), jnp.bfloat16))
    assert state[0]["w"].dtype == jnp.bfloat16
    assert (state[0]["w"] != 1).all()


@pytest.mark.parametrize("recipe", [gravac.diloco, gravac.sparse_loco])
def test_what_is_given_to_a_recipe_takes_the_place_of_what_does_not_fit_it(recipe):
    inner = optax.sgd(RATE)
    tx = recipe(inner, H, compressor=gravac.TopK())
    expected = recipe(inner, H, exchange=gravac.AllGather(gravac.TopK()))
    one, other = (x.init(PARAMS) for x in (tx, expected))
    assert_same(one, other)
    for sharded in (True, jax.tree.map(lambda _: False, PARAMS)):
        recipe(inner, H, dense_axis_name="ici", sharded=sharded).init(PARAMS)


@pytest.mark.slow
def test_an_outer_step_of_1_is_local_sgd():
    outer = gravac.diloco(optax.sgd(RATE), H, outer=optax.sgd(1.0))
    plain = gravac.sgd(
        RATE,
        momentum=0.0,
        exchange=gravac.DenseMean(),
        controller=gravac.Every(H, gravac.Fixed(1)),
    )
    np.testing.assert_allclose(
        trained(outer, N, 2 * H), trained(plain, N, 2 * H), atol=1e-6
    )


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("steps of a round", lambda: gravac.Every(0, gravac.Fixed(16))),
        ("steps of a round", lambda: gravac.Every(2.5, gravac.Fixed(16))),
        (
            "has rounds itself",
            lambda: gravac.Capped(gravac.Every(2, gravac.Fixed(16)), 4),
        ),
        (
            "what optimizers made",
            lambda: gravac.outer(transform(), optax.sgd(0.1)).init(PARAMS),
        ),
        (
            "with a mask",
            lambda: gravac.Steps(
                optax.adamw(1e-3, mask=lambda x: jax.tree.map(lambda y: y.ndim > 1, x))
            ),
        ),
        ("with a mask", lambda: gravac.Steps(optax.adamw(1e-3, mask={"w": True}))),
        (
            "rounds itself",
            lambda: gravac.Every(2, gravac.Every(2, gravac.Fixed(16))),
        ),
        ("forgets it", lambda: transform(memory=gravac.NoMemory())),
        (
            "share of what",
            lambda: gravac.Steps(optax.sgd(0.1), residual_decay=1.5),
        ),
    ],
)
def test_wrong_rounds_are_refused(words, call):
    with pytest.raises(ValueError, match=words):
        call()
