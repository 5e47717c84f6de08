"""Every memory keeps every law, and a whole optimizer with it does what it should."""

import subprocess
import sys

import _examples
import _harness
import _laws
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, N, assert_same, at

import gravac_jax as gravac
from gravac_jax._memory import MEMORIES

ADAM = gravac.OwnOptimizer(optax.scale_by_adam())

# What is sent of an arbitrary run is off by at most this share of all that was
# selected from: a rounding in the addition of each step, and one in the sum.
RUN_RTOL = 2**-23


@pytest.mark.parametrize("law", _laws.MEMORY_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("memory", _examples.members(MEMORIES), ids=repr)
def test_every_memory_keeps_the_law(memory, law):
    law(memory, _examples.GRADIENTS, _examples.IS_SENT)


def test_of_arbitrary_gradients_sent_plus_kept_is_what_came_to_rounding():
    shape = _examples.GRADIENTS.shape
    gradients = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    compensated, residuals, states = _laws.remembered(
        gravac.Residual(), gradients, _examples.IS_SENT
    )
    exact = lambda x: np.sum(np.asarray(x, np.float64), 0)
    sent = exact(compensated) - exact(residuals)
    off = np.abs(sent + exact(states[-1]) - exact(gradients))
    assert (off <= RUN_RTOL * exact(np.abs(compensated))).all()


def test_one_huge_gradient_does_not_end_adam():
    memory = ADAM
    state = memory.init(2)
    for size in (1e20, 1.0, 1.0):
        added, state = memory.compensate(jnp.array([size, 0.0]), state)
        state = memory.retain(added * 0, added, state)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((added, state)))


@pytest.mark.parametrize(
    ("memory", "floats", "words"),
    [
        (gravac.Residual(), 1, "4 bytes of state per parameter"),
        (gravac.Momentum(), 2, "8 bytes of state per parameter"),
        (ADAM, 3, "12 for Adam"),
        (gravac.OwnOptimizer(optax.trace(0.9)), 2, "8 bytes of state in"),
    ],
    ids=repr,
)
def test_a_memory_takes_the_space_that_its_docstring_says(memory, floats, words):
    n = 1000
    weight = lambda tree: sum(x.size for x in jax.tree.leaves(tree) if x.size > 1)
    assert weight(jax.eval_shape(lambda: memory.init(n))) == floats * n
    assert words in type(memory).__doc__
    for x in jax.tree.leaves(memory.init(n)):
        assert x.dtype in (np.float32, np.int32)


@pytest.mark.parametrize(
    "send",
    [gravac.LowRank(4), gravac.Dense("bfloat16"), gravac.Bits(2), gravac.Fastest()],
    ids=repr,
)
def test_masking_needs_entries_that_are_sent_as_they_are(send):
    with pytest.raises(ValueError, match="masking=False"):
        gravac.transform(memory=gravac.Momentum(masking=True), send=send)
    gravac.transform(memory=gravac.Momentum(), send=send)
    gravac.transform(memory=gravac.Momentum(masking=True), send=gravac.TopK(100))


def test_no_name_stands_for_two_things_in_a_state():
    for memory in (gravac.Residual(), gravac.Momentum(), ADAM):
        state = gravac.transform(memory=memory, compress=True).init(PARAMS)
        for name in gravac.StepInfo._fields:
            optax.tree.get(state, name)


# In a whole optimizer. ------------------------------------------------------------

STEPS = 12
GRADIENTS = _harness.gaussian_gradients(STEPS)
PMEAN = optax.stateless(lambda grads, params: jax.lax.pmean(grads, "data"))
IN_TURN = _harness.Scripted((gravac.Dense(), gravac.Bits(8)))


def updates_of(tx, *others, how="shard_map", gradients=GRADIENTS):
    return _harness.trajectory(optax.chain(tx, *others), PARAMS, how)(gradients)


def assert_near(received, expected, scale=10):
    for x, y in zip(jax.tree.leaves(received), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=scale * _harness.SUM_ROUNDING)


@pytest.mark.parametrize(
    ("masking", "nesterov", "how"),
    [(True, False, "vmap"), (False, True, "shard_map")],
)
def test_if_everything_is_sent_it_is_dense_momentum(masking, nesterov, how):
    memory = gravac.Momentum(0.9, nesterov=nesterov, masking=masking)
    tx = gravac.transform(compress=COMPRESS, memory=memory, send=gravac.Dense())
    received, _ = updates_of(tx, optax.scale(-0.1), how=how)
    trace = optax.trace(0.9, nesterov=nesterov)
    expected, _ = updates_of(PMEAN, trace, optax.scale(-0.1), how=how)
    assert_near(received, expected)


def test_a_dense_step_of_an_adaptive_run_is_one_of_dense_momentum():
    # The first three steps are dense: from an empty residual, all of them.
    controller = gravac.Scheduled((gravac.Dense(), gravac.Bits(4)), starts=(3,))
    memory = gravac.Momentum(0.9)
    tx = gravac.transform(compress=COMPRESS, memory=memory, send=controller)
    received, states = updates_of(tx)
    assert states[0].info.rung.tolist()[:4] == [0, 0, 0, 1]
    expected, _ = updates_of(PMEAN, optax.trace(0.9))
    assert_near(at(received, slice(3)), at(expected, slice(3)))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [gravac.Momentum(), ADAM], ids=repr)
def test_all_ways_to_run_it_agree(memory):
    tx = gravac.transform(compress=COMPRESS, memory=memory, send=IN_TURN)
    expected, _ = updates_of(tx)
    for how in ("pmap", "vmap"):
        received, _ = updates_of(tx, how=how)
        assert_near(received, expected, scale=1000)  # sums are of N halves, or fused


@pytest.mark.parametrize("memory", [gravac.Momentum(), ADAM], ids=repr)
def test_from_a_bad_gradient_no_memory_learns(memory):
    bad = jax.tree.map(np.copy, GRADIENTS)
    bad["w"][5, 2, 3, 3] = np.nan
    bad["b"][9, 0, 1] = np.inf
    tx = gravac.transform(compress=COMPRESS, memory=memory, send=IN_TURN)
    _, (states,) = updates_of(tx, gradients=bad)

    # What is left of a residual after a step may be less; all else stays.
    def learned(step, replica):
        memory = at(at(states, step).local.memory, replica)
        return [x._replace(residual=0) for x in memory]

    for step, replica in ((5, 2), (9, 0)):
        assert_same(learned(step, replica), learned(step - 1, replica))
        other = (replica + 1) % N
        with pytest.raises(AssertionError):
            assert_same(learned(step, other), learned(step - 1, other))


def test_adam_alone_and_dense_is_that_of_optax():
    tx = gravac.transform(None, compress=COMPRESS, memory=ADAM, send=gravac.Dense())
    adam = optax.scale_by_adam()
    params = jax.tree.map(jnp.asarray, PARAMS)
    ours, theirs = tx.init(params), adam.init(params)
    step = jax.jit(tx.update)
    for i in range(STEPS):
        grads = at(GRADIENTS, (i, 0))
        received, ours = step(grads, ours)
        with jax.numpy_dtype_promotion("standard"):
            expected, theirs = adam.update(grads, theirs)
        assert_near(received, expected, scale=100)


@pytest.mark.parametrize("by_leaf", [False, True])
def test_an_optimizer_that_remembers_its_first_params_is_refused(by_leaf):
    for begun in (optax.contrib.schedule_free_sgd(0.1), optax.contrib.prodigy()):
        with pytest.raises(ValueError, match="remembers the params that it began"):
            gravac.OwnOptimizer(begun, by_leaf=by_leaf)
    injected = optax.inject_hyperparams(optax.adam)
    gravac.OwnOptimizer(injected(learning_rate=0.1), by_leaf=by_leaf)
    gravac.OwnOptimizer(optax.noisy_sgd(0.1, key=1), by_leaf=by_leaf)
    gravac.OwnOptimizer(begun_with(jnp.nan), by_leaf=by_leaf)
    gravac.OwnOptimizer(begun_with(0), by_leaf=by_leaf)


def begun_with(number):
    """An optimizer whose first state is this number."""
    init = lambda params: {"number": number}
    return optax.GradientTransformation(
        init, lambda updates, state, _: (updates, state)
    )


def test_a_recipe_may_be_made_before_jax_begins():
    script = """
import jax, optax, gravac_jax as gravac
for make in gravac.adamw, gravac.sgd:
    make(1e-3)
gravac.diloco(optax.adamw(1e-3))
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices()) == 3
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", [_harness.make_mesh(), N], ids=["mesh", "simulated"])
def test_keys_of_an_optimizer_are_those_of_each_replica(where):
    noisy = gravac.OwnOptimizer(optax.noisy_sgd(0.1, key=jax.random.key(1)))
    tx = gravac.transform(memory=noisy, send=gravac.Bits(2))
    state = gravac.place(tx.init({"w": jnp.zeros(64)}), where)
    (key, *_) = [
        x
        for x in jax.tree.leaves(state.local.memory)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    assert key.shape == (N,)


# Two momenta: one before the exchange and one after it. ---------------------------


MESH = _harness.make_mesh()
TWICE = {
    "sgd": (gravac.Momentum(), optax.sgd(0.1, momentum=0.9)),
    "trace": (gravac.Momentum(), optax.trace(0.9)),
    "trace after adam": (ADAM, optax.trace(0.9)),
    "adamw": (ADAM, optax.adamw(0.1)),
    "deep": (gravac.Momentum(), optax.chain(optax.identity(), optax.sgd(0.1, 0.9))),
}


def optimizer(memory, other):
    return optax.chain(gravac.transform(memory=memory, compress=True), other)


@pytest.mark.parametrize("name", TWICE)
def test_a_second_momentum_is_refused_where_it_can_be_seen(name):
    memory, other = TWICE[name]
    tx = optimizer(memory, other)
    first = gravac.transform(memory=memory, compress=True)
    named = optax.named_chain(("a", first), ("b", other))
    state = tx.init(PARAMS)
    for seen in (
        lambda: gravac.place((PARAMS, state), MESH),
        lambda: gravac.place(tx.init(PARAMS), MESH),
        lambda: gravac.guard(tx).init(PARAMS),
        lambda: gravac.place(named.init(PARAMS), MESH),
    ):
        with pytest.raises(ValueError, match=r"keeps a .* of its own"):
            seen()


@pytest.mark.parametrize(
    ("memory", "other"),
    [
        (gravac.Momentum(), optax.sgd(0.1)),
        (gravac.Residual(), optax.sgd(0.1, momentum=0.9)),
        (gravac.Residual(), optax.adamw(0.1)),
        (gravac.Momentum(), optax.adamw(0.1, b1=0.0)),
        (ADAM, optax.scale_by_learning_rate(0.1)),
    ],
    ids=["momentum", "sgd", "adamw", "no b1", "adam"],
)
def test_one_momentum_is_allowed(memory, other):
    gravac.place(optimizer(memory, other).init(PARAMS), MESH)


def test_what_wraps_the_whole_optimizer_has_no_momentum_of_its_own():
    make = optax.inject_hyperparams(lambda learning_rate: gravac.adamw(learning_rate))
    tx = make(learning_rate=0.1)
    gravac.train_step(lambda params, batch: 0.0, tx, MESH).init(PARAMS)
    gravac.place(tx.init(PARAMS), MESH)


def test_another_optimizer_in_the_tree_may_have_momentum():
    one, other = optimizer(gravac.Momentum(), optax.sgd(0.1)), optax.sgd(0.1, 0.9)
    gravac.place((one.init(PARAMS), other.init(PARAMS)), MESH)
