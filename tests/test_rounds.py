"""With rounds, local steps send nothing, and an exchange averages what has gathered."""

import functools

import _examples
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, N, assert_same, at, make_mesh

import gravac_jax as gravac
from gravac_jax._error_feedback import MEMORIES
from gravac_jax._exchanges import EXCHANGES

H, ROUNDS = 3, 2
STEPS = H * ROUNDS
GRADIENTS = _harness.gaussian_gradients(STEPS)
MEMBERS = [x for x in _examples.members(MEMORIES) if not isinstance(x, gravac.NoMemory)]
# A threshold follows the bucket of the step before, and random places those of the
# steps: they choose otherwise in a run without rounds.
CHOOSE_ALIKE = (gravac.SharedRandomK, gravac.LeaderIndices, gravac.LowRank)
EXCHANGED = [
    x
    for x in _examples.members(EXCHANGES)
    if not isinstance(x, CHOOSE_ALIKE)
    and not isinstance(getattr(x, "compressor", None), gravac.Threshold)
]


def transform(every=H, factor=8, **recipe):
    controller = gravac.Every(every, gravac.Fixed(factor))
    usual = {"compress": COMPRESS, "controller": controller}
    return gravac.transform(**{**usual, **recipe})


def run(gradients=GRADIENTS, how="vmap", **recipe):
    return _harness.trajectory(transform(**recipe), PARAMS, how)(gradients)


def sums(gradients, every=H):
    """The sum of each round: `[rounds, replicas, ...]`."""
    one = lambda x: x.reshape(-1, every, *x.shape[1:]).sum(1)
    return jax.tree.map(one, gradients)


def assert_close(received, expected):
    pairs = zip(jax.tree.leaves(received), jax.tree.leaves(expected), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=0, atol=2.0**-18)


@pytest.mark.parametrize("exchange", EXCHANGED, ids=repr)
def test_an_exchange_sends_what_a_step_of_the_whole_round_would(exchange):
    updates, states = run(exchange=exchange)
    expected, once = run(sums(GRADIENTS), exchange=exchange, every=1)
    assert_close(at(updates, slice(H - 1, None, H)), expected)
    assert_close(
        at(states.local.memory, slice(H - 1, None, H)),
        once.local.memory,
    )
    assert not any(x[i].any() for x in updates.values() for i in (0, 1, 3, 4))


@pytest.mark.parametrize(
    "how", _harness.choices(_harness.HARNESSES, lambda x: x == "shard_map")
)
def test_so_it_is_in_every_way_to_run_it(how):
    recipe = {
        "exchange": gravac.QuantizedAllReduce(32),
        "memory": gravac.Steps(optax.scale_by_adam()),
    }
    assert_close(run(how=how, **recipe)[0], run(**recipe)[0])


@pytest.mark.parametrize("memory", MEMBERS, ids=repr)
@pytest.mark.parametrize("delay", [0, 1])
def test_what_was_made_was_sent_or_is_held(memory, delay):
    exchange = gravac.AllGather(gravac.TopK(), values="float32", indices="int32")
    recipe = {"memory": memory, "exchange": exchange, "delay": delay}
    updates, states = run(**recipe)
    # All that the memory makes, whoever sends it: a run that sends everything.
    made, _ = run(**recipe | {"every": 1, "factor": 1, "delay": 0})
    held = [np.asarray(memory.held(x, x.residual.shape[-1]))[-1].mean(0) for x in
            states.local.memory]  # fmt: skip
    if isinstance(memory, gravac.Momentum) and memory.masking:
        return  # what was sent changes what is made
    for name, rest in zip(PARAMS, reversed(held), strict=True):
        sent = updates[name].astype(np.float64).sum(0).ravel()
        came = made[name].astype(np.float64).sum(0).ravel()
        np.testing.assert_allclose(sent + rest, came, rtol=0, atol=1e-5)


def test_rounds_of_one_step_are_no_rounds():
    plain = gravac.transform(compress=COMPRESS, controller=gravac.Fixed(8))
    expected = _harness.trajectory(plain, PARAMS, "vmap")(GRADIENTS)
    assert_same(run(every=1), expected)


def test_a_schedule_gives_each_round_its_length():
    rounds = lambda step: jnp.where(step < 2, 2, 3)
    _, states = run(every=rounds)
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


def test_a_local_step_has_no_collective():
    for delay in (0, 1):
        program = _harness.trajectory(
            transform(delay=delay, exchange=gravac.QuantizedAllReduce(32)),
            PARAMS,
            "shard_map",
        )
        found, _ = _harness.collectives(program.text(GRADIENTS))
        assert found
        assert {x.branches[:1] for x in found} == {(1,)}


@pytest.mark.parametrize("is_due", [False, True])
def test_who_knows_which_step_exchanges_gets_a_program_without_a_branch(is_due):
    tx = transform(compress=True, exchange=gravac.QuantizedAllReduce(32))
    mesh = make_mesh()

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
    assert not conditionals or is_due
    (*state,) = step(*state, np.ones(N, np.float32))
    assert optax.tree.get(state, "StepInfo").local_steps == (0 if is_due else 1)


@pytest.mark.parametrize("every", [2, lambda step: jnp.where(step < 2, 1, 2)])
def test_a_train_step_exchanges_where_the_controller_says(every):
    tx = optax.chain(transform(every, compress=True), optax.scale(-0.1))
    step = gravac.train_step(loss_of, tx, N)
    state, found = step.init({"w": jnp.full(DIMENSION, 0.125)}), []
    for i in range(5):
        *state, _ = step(*state, batch(i))
        found.append(int(optax.tree.get(state, "StepInfo").local_steps))
    assert found == ([1, 0, 1, 0, 1] if every == 2 else [0, 0, 1, 0, 1])


def test_a_train_step_returns_each_replicas_own_loss_and_no_collective_beside():
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
    recipe = {"exchange": gravac.Quantized(32), "how": how}
    updates, states = run(bad, **recipe)
    expected, others = run(nothing, **recipe)
    assert_same(updates, expected)
    assert_same(states.local.memory, others.local.memory)
    assert states.info.skipped_steps.tolist() == [0, 0, 1, 1, 1, 1]
    assert states.info.is_finite.all()


def test_params_are_compared_at_the_exchanges():
    tx = transform(check_every=4)

    def train(state, shift, gradients):
        apart = []
        params = jax.tree.map(lambda x: x + shift, PARAMS)
        for i in range(STEPS):
            _, state = tx.update(at(gradients, i), state, params)
            apart.append(state.info.disagreements)
        return jnp.stack(apart)

    state = gravac.place(tx.init(PARAMS), N)
    axes = jax.tree.map(
        lambda x: 0 if x == jax.P("data") else None, gravac.state_specs(state)
    )
    train = jax.vmap(train, in_axes=(axes, 0, 1), axis_name="data")
    shift = jnp.zeros(N).at[1].set(1)
    found = jax.jit(train)(state, shift, GRADIENTS)
    assert found[0].tolist() == [0, 0, 0, 0, 0, 1]


def test_a_flush_in_the_middle_of_a_round_delivers_what_has_gathered():
    tx = transform(exchange=gravac.Quantized(32))

    def train(state, gradients):
        for i in range(H + 1):
            _, state = tx.update(at(gradients, i), state)
        own = gravac.local_params(tx, PARAMS, state)
        params, state = gravac.flush(tx, PARAMS, state)
        return params, own, gravac.local_params(tx, PARAMS, state)

    state = gravac.place(tx.init(PARAMS), N)
    axes = jax.tree.map(
        lambda x: 0 if x == jax.P("data") else None, gravac.state_specs(state)
    )
    train = jax.vmap(train, in_axes=(axes, 1), axis_name="data")
    params, own, empty = jax.jit(train)(state, GRADIENTS)
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


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("where", [make_mesh(), N], ids=["mesh", "simulated"])
def test_diloco_is_the_papers(where, weight_decay):
    tx = gravac.diloco(optax.adamw(RATE, weight_decay=weight_decay), H)
    found = trained(tx, where, 4 * H)
    np.testing.assert_allclose(found, diloco(4, weight_decay), atol=2e-6)


@pytest.mark.parametrize("where", [make_mesh(), N], ids=["mesh", "simulated"])
def test_sparse_loco_is_the_papers(where):
    wide = gravac.AllGather(gravac.TopK(), values="float32", indices="int32")
    tx = gravac.sparse_loco(
        optax.adamw(RATE, weight_decay=0.1),
        H,
        factor=4,
        learning_rate=0.5,
        exchange=wide,
    )
    found = trained(tx, where, 4 * H)
    np.testing.assert_allclose(found, sparse_loco(4, 0.1, DIMENSION // 4), atol=2e-6)


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
        ("steps of a round", lambda: gravac.outer(optax.sgd(0.1), 2.5)),
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
