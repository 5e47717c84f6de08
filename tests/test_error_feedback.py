"""Every memory keeps every law, and a whole optimizer with it does what it should."""

import contextlib

import _examples
import _harness
import _laws
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS, N

import gravac_jax as gravac
from gravac_jax._memory import MEMORIES

ADAM = gravac.OwnOptimizer(optax.scale_by_adam())


@pytest.mark.parametrize("law", _laws.MEMORY_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("memory", _examples.members(MEMORIES), ids=repr)
def test_every_memory_keeps_the_law(memory, law):
    law(memory, _examples.GRADIENTS, _examples.IS_SENT)


def test_one_huge_gradient_does_not_end_adam():
    state = ADAM.init(2)
    for size in (2.0**50, 1.0, 1.0):  # larger ones are left out
        added, state = ADAM.compensate(jnp.array([size, 0.0]), state)
        state = ADAM.hold(added * 0, added, state)
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
    leaves = jax.tree.leaves(jax.eval_shape(lambda: memory.init(1000)))
    assert sum(x.size for x in leaves if x.size > 1) == floats * 1000
    assert {x.dtype for x in leaves} <= {np.dtype("f4"), np.dtype("i4")}
    assert words in type(memory).__doc__


def test_masking_needs_entries_that_are_sent_as_they_are():
    masked = gravac.Momentum(masking=True)
    few_bits = gravac.Bits(2), gravac.Fastest()
    for send in (gravac.LowRank(4), gravac.Dense("bfloat16"), *few_bits):
        with pytest.raises(ValueError, match="masking=False"):
            gravac.transform(memory=masked, send=send)
        gravac.transform(memory=gravac.Momentum(), send=send)
    gravac.transform(memory=masked, send=gravac.TopK(100))


def test_no_name_stands_for_two_things_in_a_state():
    for memory in (gravac.Residual(), gravac.Momentum(), ADAM):
        state = gravac.transform(memory=memory, compress=True).init(PARAMS)
        for name in gravac.StepInfo._fields:
            optax.tree.get(state, name)


# In a whole optimizer. ------------------------------------------------------------


@pytest.mark.parametrize("memory", [gravac.Momentum(), ADAM], ids=repr)
def test_from_a_bad_gradient_no_memory_learns(memory):
    bad = _harness.gaussian_gradients(12)
    bad["w"][5, 2, 3, 3] = np.nan
    bad["b"][9, 0, 1] = np.inf
    in_turn = _harness.Scripted((gravac.Dense(), gravac.Bits(8)))
    tx = gravac.transform(compress=COMPRESS, memory=memory, send=in_turn)
    _, states = _harness.trajectory(tx, PARAMS, "shard_map")(bad)

    def has_learned(step, replica):
        # What is left of a residual after a step may be less; all else stays.
        memory = [x._replace(residual=0) for x in states.local.memory]
        leaves = [x[:, replica] for x in jax.tree.leaves(memory) if np.ndim(x)]
        return any(np.any(x[step] != x[step - 1]) for x in leaves)

    assert not has_learned(5, replica=2)
    assert not has_learned(9, replica=0)
    assert has_learned(5, replica=3)
    assert has_learned(9, replica=1)


@pytest.mark.parametrize("by_leaf", [False, True])
def test_an_optimizer_that_remembers_its_first_params_is_refused(by_leaf):
    keep = lambda updates, state, _: (updates, state)
    begun_with = lambda number: optax.GradientTransformation(lambda _: [number], keep)
    for begun in (optax.contrib.schedule_free_sgd(0.1), optax.contrib.prodigy()):
        with pytest.raises(ValueError, match="remembers the params that it began"):
            gravac.OwnOptimizer(begun, by_leaf=by_leaf)
    for fine in (
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        optax.noisy_sgd(0.1, key=1),
        begun_with(jnp.nan),
        begun_with(0),
    ):
        gravac.OwnOptimizer(fine, by_leaf=by_leaf)


def test_a_recipe_may_be_made_before_jax_begins():
    script = """
import jax, optax, gravac_jax as gravac
for make in gravac.adamw, gravac.sgd:
    make(1e-3)
gravac.diloco(optax.adamw(1e-3))
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices()) == 3
"""
    _harness.printed("-c", script)


@pytest.mark.parametrize("where", [_harness.make_mesh(), N], ids=["mesh", "simulated"])
def test_keys_of_an_optimizer_are_those_of_each_replica(where):
    noisy = gravac.OwnOptimizer(optax.noisy_sgd(0.1, key=jax.random.key(1)))
    tx = gravac.transform(memory=noisy, send=gravac.Bits(2))
    state = gravac.place(tx.init({"w": jnp.zeros(64)}), where)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    key, *_ = filter(is_key, jax.tree.leaves(state.local.memory))
    assert key.shape == (N,)


# Two momenta: one before the exchange and one after it. ---------------------------


MESH = _harness.make_mesh()
SGD = optax.sgd(0.1, momentum=0.9)
PAIRS = {  # of a memory and what comes after it, and whether these are two momenta
    "sgd": (True, gravac.Momentum(), SGD),
    "trace": (True, gravac.Momentum(), optax.trace(0.9)),
    "trace after adam": (True, ADAM, optax.trace(0.9)),
    "adamw": (True, ADAM, optax.adamw(0.1)),
    "deep": (True, gravac.Momentum(), optax.chain(optax.identity(), SGD)),
    "one before": (False, gravac.Momentum(), optax.sgd(0.1)),
    "one after": (False, gravac.Residual(), SGD),
    "adamw after": (False, gravac.Residual(), optax.adamw(0.1)),
    "no b1": (False, gravac.Momentum(), optax.adamw(0.1, b1=0.0)),
    "adam": (False, ADAM, optax.scale_by_learning_rate(0.1)),
}


def optimizer(memory, other):
    return optax.chain(gravac.transform(memory=memory, compress=True), other)


@pytest.mark.parametrize("name", PAIRS)
def test_a_second_momentum_is_refused_where_it_can_be_seen(name):
    is_twice, memory, other = PAIRS[name]
    tx = optimizer(memory, other)
    first = gravac.transform(memory=memory, compress=True)
    named = optax.named_chain(("a", first), ("b", other))
    for seen in (
        lambda: gravac.place((PARAMS, tx.init(PARAMS)), MESH),
        lambda: gravac.place(tx.init(PARAMS), MESH),
        lambda: gravac.guard(tx).init(PARAMS),
        lambda: gravac.place(named.init(PARAMS), MESH),
    ):
        raises = pytest.raises(ValueError, match=r"keeps a .* of its own")
        with raises if is_twice else contextlib.nullcontext():
            seen()


def test_what_wraps_the_whole_optimizer_has_no_momentum_of_its_own():
    make = optax.inject_hyperparams(lambda learning_rate: gravac.adamw(learning_rate))
    tx = make(learning_rate=0.1)
    gravac.train_step(lambda params, batch: 0.0, tx, MESH).init(PARAMS)
    gravac.place(tx.init(PARAMS), MESH)


def test_another_optimizer_in_the_tree_may_have_momentum():
    one = optimizer(gravac.Momentum(), optax.sgd(0.1))
    gravac.place((one.init(PARAMS), SGD.init(PARAMS)), MESH)
