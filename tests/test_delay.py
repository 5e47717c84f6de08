"""With a delay, a step exchanges what the step before left, and nothing is lost."""

import itertools

import _examples
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, N, assert_same, at

import gravac_jax as gravac
from gravac_jax._error_feedback import MEMORIES
from gravac_jax._exchanges import EXCHANGES

STEPS = 6
GRADIENTS = _harness.gaussian_gradients(STEPS)
MEMBERS = [x for x in _examples.members(MEMORIES) if not isinstance(x, gravac.NoMemory)]
EXCHANGED = _examples.one_of_each(EXCHANGES)
# Random choices are drawn anew in each step.
CHOOSE_ALIKE = (gravac.SharedRandomK, gravac.LeaderIndices, gravac.LowRank)


def run(delay, memory, exchange, how="vmap", gradients=GRADIENTS, factor=8):
    transform = gravac.transform(
        compress=COMPRESS,
        memory=memory,
        exchange=exchange,
        controller=gravac.Fixed(factor),
        delay=delay,
    )
    return _harness.trajectory(transform, PARAMS, how)(gradients)


def can_go_together(memory, exchange):
    return exchange.sends_whole_entries or not memory.masks


PAIRS = [x for x in itertools.product(MEMBERS, EXCHANGED) if can_go_together(*x)]


def assert_one_step_later(pair, how):
    memory, exchange = pair
    prompt, _ = run(0, memory, exchange, how)
    late, _ = run(1, memory, exchange, how)
    for x, y in zip(jax.tree.leaves(prompt), jax.tree.leaves(late), strict=True):
        assert not y[0].any()
        np.testing.assert_allclose(y[1:], x[:-1], rtol=0, atol=2.0**-18)


def is_quick(pair):
    return pair[0] is MEMBERS[-1]


# One memory with every exchange; then every memory. A delay hands on what a memory
# makes and what an exchange sends, whatever they are.
COMPARED = [x for x in PAIRS if not isinstance(x[1], CHOOSE_ALIKE)]
MORE = _harness.covering(
    [x for x in COMPARED if not is_quick(x)],
    lambda x: x[:1],
    1,
)


@pytest.mark.parametrize(
    "pair",
    _harness.choices(
        [*filter(is_quick, COMPARED), *MORE],
        is_quick,
        lambda x: f"{x[0]!r}-{x[1]!r}",
    ),
)
def test_a_delayed_run_is_the_run_without_delay_one_step_later(pair):
    assert_one_step_later(pair, "vmap")


@pytest.mark.parametrize(
    "how", _harness.choices(["shard_map", "pmap"], lambda x: x == "shard_map")
)
def test_so_it_is_on_a_mesh_and_under_pmap(how):
    pair = gravac.Steps(optax.scale_by_adam()), gravac.QuantizedAllReduce(32)
    assert_one_step_later(pair, how)


@pytest.mark.parametrize("exchange", EXCHANGED, ids=repr)
def test_what_was_made_was_sent_or_is_held(exchange):
    updates, states = run(1, gravac.Residual(), exchange, factor=4)
    for name, part in zip(PARAMS, reversed(states.local.memory), strict=True):
        sent = updates[name].astype(np.float64).sum(0).ravel()
        held = part.residual[-1].astype(np.float64).mean(0)
        came = GRADIENTS[name].astype(np.float64).sum(0).mean(0).ravel()
        rounded = 2.0**-6 if "bfloat16" in repr(exchange) else 1e-5
        np.testing.assert_allclose(sent + held, came, rtol=0, atol=rounded)


def test_the_update_does_not_depend_on_the_gradient():
    def both(delay):
        other = jax.tree.map(lambda x: -x, GRADIENTS)
        for gradients in (GRADIENTS, other):
            two = at(gradients, slice(0, 2))
            two = {k: np.stack([GRADIENTS[k][0], x[1]]) for k, x in two.items()}
            memory = gravac.Residual()
            yield run(delay, memory, gravac.Quantized(32), gradients=two)[0]

    same, other = both(1)
    assert_same(at(same, 1), at(other, 1))
    same, other = both(0)
    assert not np.array_equal(same["w"][1], other["w"][1])


@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_a_bad_gradient_is_nothing_to_its_replica_and_the_others_go_on(how):
    bad, nothing = (jax.tree.map(np.copy, GRADIENTS) for _ in range(2))
    bad["w"][2, 1, 3, 3] = np.nan
    bad["b"][2, 1, 0] = np.inf
    nothing["w"][2, 1] = nothing["b"][2, 1] = 0
    memory, exchange = gravac.Residual(), gravac.Quantized(32)
    updates, states = run(1, memory, exchange, how, bad)
    expected, others = run(1, memory, exchange, how, nothing)
    assert_same(updates, expected)
    assert_same(states.local.memory, others.local.memory)
    assert states.info.bad_steps.tolist() == [0, 0, 0, 1, 1, 1]
    assert states.info.is_finite.all()


def test_a_flush_delivers_what_is_on_its_way():
    tx = gravac.transform(
        compress=COMPRESS,
        exchange=gravac.Quantized(32),
        controller=gravac.Fixed(32),
        delay=1,
    )

    def train(state, gradients):
        for i in range(STEPS):
            updates, state = tx.update(at(gradients, i), state)
        params, state = gravac.flush(tx, PARAMS, state)
        own = gravac.local_params(tx, PARAMS, state)
        return params, own, updates

    _, own, _ = _harness.on_all_replicas(train, tx, 1)(GRADIENTS)
    assert_same(own, jax.tree.map(lambda x: np.stack([x] * N), PARAMS))


def test_delay_is_0_or_1_and_needs_a_memory():
    for delay in (2, -1, True, 0.5, None):
        with pytest.raises(ValueError, match="`delay` must be 0"):
            gravac.transform(delay=delay)
    with pytest.raises(ValueError, match="need a memory"):
        gravac.transform(delay=1, memory=gravac.NoMemory())


def test_training_at_own_params_converges_where_shared_ones_diverge():
    """Each replica is drawn to its own target, by momentum at a high rate."""
    targets = np.random.default_rng(0).standard_normal((N, 8)).astype(np.float32)
    memory = gravac.Steps(optax.sgd(1.0, momentum=0.5))
    tx = gravac.transform(compress=True, memory=memory, delay=1)

    def distance(own_params):
        loss = lambda params, target: jnp.sum((params - target[0]) ** 2) / 2
        step = gravac.train_step(loss, tx, N, own_params=own_params)
        params, state = step.init(jnp.zeros(8))
        for _ in range(60):
            params, state, _ = step(params, state, targets)
        return float(jnp.abs(params - targets.mean(0)).max())

    assert distance(True) < 1e-3
    assert distance(False) > 10
