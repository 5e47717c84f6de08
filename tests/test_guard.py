"""guard freezes the whole optimizer on steps that the transform skips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, assert_same, choices, make_mesh

import gravac_jax as gravac
from gravac_jax import _state

PARAMS = {"b": jnp.ones(5), "w": jnp.ones((8, 8))}
MESH = make_mesh()
EXCHANGE = gravac.transform(compress=True, controller=gravac.Fixed(4))
# Powers of two, so that it does not matter whether XLA fuses a multiply and an add.
INNER = {
    "adamw": optax.adamw(0.125, b1=0.5, b2=0.5, weight_decay=0.125),
    "momentum": optax.sgd(0.125, momentum=0.5),
    "decay": optax.chain(optax.add_decayed_weights(0.125), optax.sgd(0.125)),
}


def injected(outer):
    """A guarded optimizer with its learning rate in the state."""
    build = lambda learning_rate: outer(
        optax.chain(EXCHANGE, optax.sgd(learning_rate, momentum=0.5))
    )
    return optax.inject_hyperparams(build)(learning_rate=0.125)


TX = {
    **{name: optax.chain(EXCHANGE, inner) for name, inner in INNER.items()},
    **{
        f"guarded {name}": gravac.guard(optax.chain(EXCHANGE, inner))
        for name, inner in INNER.items()
    },
    "guard in inject_hyperparams": injected(gravac.guard),
    "inject_hyperparams in guard": gravac.guard(injected(lambda tx: tx)),
    "inject_hyperparams": injected(lambda tx: tx),
}
GUARDED = [name for name in TX if "guard" in name]
in_every_guard = pytest.mark.parametrize(
    "name", choices(GUARDED, lambda x: x in {"guarded adamw", GUARDED[-1]})
)


def gradients(is_bad=False):
    rng = np.random.default_rng(0)
    x = jax.tree.map(
        lambda p: rng.normal(size=(N, *p.shape)).astype(np.float32), PARAMS
    )
    if is_bad:
        x["b"][2, 3] = np.nan
    return x


@functools.cache
def runner(name):
    def train_step(params, opt_state, batch):
        grads = jax.tree.map(lambda x: x[0], batch)
        updates, opt_state = TX[name].update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return gravac.data_parallel(train_step, MESH, donate=False)


@functools.cache
def run(name, *bad):
    """The training state after each step, of which some have a bad gradient."""
    # optax.adamw itself needs implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        state = gravac.place((PARAMS, TX[name].init(PARAMS)), MESH)
        states = []
        for is_bad in bad:
            state = runner(name)(*state, gradients(is_bad))
            states.append(state)
        return states


def without_counters(state, name):
    """All but the transform's own count of steps, its past rungs and its report."""
    (own,) = _state.find(state)
    blank = own._replace(steps=0, past_rungs=0, info=0)
    is_own = _state.is_transform_state
    state = jax.tree.map(lambda x: blank if is_own(x) else x, state, is_leaf=is_own)
    if name == "guard in inject_hyperparams":  # whose own count stands outside
        return state[0], state[1].inner_state
    return state


@in_every_guard
def test_a_bad_step_changes_nothing_but_counters(name):
    good, bad, again = run(name, False, True, False)
    assert_same(without_counters(bad, name), without_counters(good, name))
    counters = [
        [int(optax.tree.get(x, key)) for x in (good, bad, again)]
        for key in ("steps", "skipped_steps")
    ]
    assert counters == [[1, 2, 3], [0, 1, 1]]


@in_every_guard
def test_after_a_bad_step_training_goes_on_as_if_it_had_not_been(name):
    *_, received = run(name, False, True, False)
    *_, expected = run(name, False, False)
    assert_same(without_counters(received, name), without_counters(expected, name))


@pytest.mark.parametrize("name", INNER)
def test_without_guard_the_params_move_on_zeros(name):
    (params, _), (after, _) = run(name, False, True)
    assert any(
        jax.tree.leaves(jax.tree.map(lambda a, b: np.any(a != b), params, after))
    )


@in_every_guard
def test_guard_is_not_seen_on_finite_steps(name):
    bare = "inject_hyperparams" if "inject" in name else name.removeprefix("guarded ")
    assert_same(run(name, *[False] * 4), run(bare, *[False] * 4))


def test_extra_arguments_reach_the_transform():
    tx = gravac.guard(
        optax.chain(gravac.transform(None, compress=True), optax.sgd(0.125))
    )
    state, grads = tx.init(PARAMS), jax.tree.map(jnp.ones_like, PARAMS)
    update = jax.jit(
        lambda state, seconds: tx.update(
            grads, state, PARAMS, step_seconds=seconds, value=0.0
        )[1]
    )
    for seconds in (jnp.nan, 1.0):
        state = update(state, jnp.float32(seconds))
    assert optax.tree.get(state, "times") == 1
