"""Replicas that drift apart are noticed and mended; a guard skips bad steps."""

import functools
import warnings

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import ROWS, N, assert_same, choices, in_both_ways, make_mesh

import gravac_jax as gravac
from gravac_jax import _arrays
from gravac_jax._step.states import is_transform_state, transform_states

MESH = make_mesh()

# Checksums and resync

RNG = np.random.default_rng(0)
TREE = {
    "f32": RNG.standard_normal((5, 3)).astype(np.float32),
    "bf16": jnp.asarray(RNG.standard_normal(7), jnp.bfloat16),
    "i8": RNG.integers(-9, 9, 4).astype(np.int8),
    "bool": np.array([True, False]),
    "scalar": np.float16(2.5),
    "empty": np.zeros(0, np.float32),
}
TREE = jax.tree.map(jnp.asarray, TREE)
COPIES = jax.tree.map(lambda x: np.stack([x] * N), TREE)


everywhere = functools.cache(_harness.on_each)


def checksums(trees):
    """Return every replica's checksum as the first replica sees them."""
    return everywhere(gravac.checksum, "vmap")(trees)[0].tolist()


@in_both_ways
def test_the_same_trees_have_one_checksum_and_one_bit_shows_on_all_replicas(how):
    for leaf in [x for x in TREE if x != "empty"]:
        bits = np.array(COPIES[leaf])
        bits.view(np.uint8).reshape(N, -1)[2, -1] ^= 1
        changed = {**COPIES, leaf: jnp.asarray(bits)}
        sums = np.asarray(everywhere(gravac.checksum, how)(changed))
        assert (sums.shape, sums.dtype) == ((N, N), np.uint32)
        assert (sums == sums[0]).all()
        assert (sums[0] == sums[0, 0]).tolist() == [True, True, False, True], leaf


def test_changes_that_could_cancel_show():
    entries_change_places, even_signs = [4.0, 2.0, 1.0, 1.0], [-1.0, -2.0, 4.0, 1.0]
    rows = jnp.array([[1.0, 2.0, 4.0, 1.0], entries_change_places, even_signs])
    assert len(set(checksums(rows))) == 3


def test_random_keys_are_compared_and_shared():
    keys = jax.random.split(jax.random.key(0), N)
    assert len(set(checksums(keys))) == N
    assert (everywhere(gravac.resync, "vmap")(keys) == keys[0]).all()


@in_both_ways
def test_a_resync_gives_every_replica_the_bits_of_the_first(how):
    special = jnp.array([-0.0, np.nan, np.inf, 1e-40], jnp.float32)
    tree = {**TREE, "special": special}
    apart = jax.tree.map(lambda x: np.stack([np.roll(x, i) for i in range(N)]), tree)
    expected = {**COPIES, "special": jnp.stack([special] * N)}
    assert_same(everywhere(gravac.resync, how)(apart), expected)


def test_a_resync_leaves_what_differs_per_replica():
    tx = gravac.transform(compress=True)
    residual = jnp.arange(N * 8.0).reshape(N, 8)
    state = gravac.place(tx.init(jnp.ones(8)), N)
    state = optax.tree.set(state, residual=residual)
    axes = jax.tree.map(lambda spec: 0 if spec else None, gravac.state_specs(state))
    sync = jax.vmap(gravac.resync, in_axes=(axes,), out_axes=axes, axis_name="data")
    assert_same(_harness.residual(jax.jit(sync)(state)), residual)


# Replicas differ from the seventh step on, in an entry that each exchange compares, or
# in one that it does not.
@pytest.mark.parametrize(("entry", "seen"), [(0, [1, 2, 3, 4, 5, 6]), (1, [0] * 6)])
def test_replicas_that_drift_apart_are_counted_and_warned_about(entry, seen):
    tx = gravac.transform(send=gravac.Dense())

    def train_step(params, state, batch):
        # A fault of one device that shard_map knows nothing of.
        fault = jnp.where(jax.lax.axis_index("data") == 1, batch[0], 0.0)
        apart = params.at[entry].add(fault)
        updates, state = tx.update(0 * params + batch, state, apart)
        return optax.apply_updates(params, updates), state

    state = gravac.place((jnp.ones(999), tx.init(jnp.ones(999))), MESH)
    step = gravac.data_parallel(train_step, MESH, check_vma=entry == 0)
    counts = []
    with warnings.catch_warnings(record=True, action="always") as said:
        for i in range(12):
            batch = np.full(N, i >= 6, np.float32)
            state = jax.block_until_ready(step(*state, batch))
            counts.append(int(state[1].info.disagreements))
    assert counts == [0] * 6 + seen
    words = ["hold different params" in str(x.message) for x in said]
    assert words == [True] * any(seen)


# The guard around an optimizer

PARAMS = {"b": jnp.ones(5), "w": jnp.ones((8, 8))}
# Powers of two, so that it does not matter whether XLA fuses a multiply and an add.
ADAMW = optax.adamw(0.125, b1=0.5, b2=0.5, weight_decay=0.125)
LADDER = gravac.Dense(), gravac.Bits(8), gravac.Bits(2)
CONTROLLERS = {
    "Fastest": gravac.Fastest(LADDER),
    "GraVAC": gravac.GraVAC(LADDER[::2], window=2),
}


def injected(outer=lambda tx: tx):
    """Return an optimizer, guarded by `outer`, whose state has its learning rate."""
    build = lambda learning_rate: outer(
        optax.chain(gravac.transform(send=ROWS), optax.sgd(learning_rate, momentum=0.5))
    )
    return optax.inject_hyperparams(build)(learning_rate=0.125)


# Replicas hear of a bad gradient after its step.
LATE = {
    "late": gravac.transform(send=ROWS, delay=1),
    "in rounds": gravac.transform(send=ROWS, every=2),
}
BARE = {
    name: optax.chain(gravac.transform(send=controller), ADAMW)
    for name, controller in CONTROLLERS.items()
}
BARE |= LATE | {"inject_hyperparams": injected()}
TX = {**BARE, **{f"guarded {name}": gravac.guard(tx) for name, tx in BARE.items()}}
INSIDE, INJECTED = "guarded inside", "guarded inject_hyperparams"
TX[INSIDE] = injected(gravac.guard)
GUARDED = [x for x in TX if "guarded" in x and not any(y in x for y in LATE)]
QUICK = {"guarded GraVAC", INJECTED}
in_every_guard = pytest.mark.parametrize("name", choices(GUARDED, QUICK.__contains__))

GOOD = None
# The replicas that are hit, and the value of one entry of their gradients.
BAD = (([2], np.nan), ([0, 1, 2, 3], np.inf), ([0], -np.inf))


@pytest.mark.parametrize("n", [7, 2**17])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -(2.0**50), 2.0**49])
def test_what_is_not_finite_is_seen_beside_large_entries(value, n):
    x = np.full(n, 2.0**48, np.float32)
    x[n // 2] = value
    found = jax.jit(lambda x: _arrays.is_bad((x,), 2.0**50))(x)
    assert bool(found) == (not abs(value) < 2.0**50)


@functools.cache
def runner(name):
    return gravac.data_parallel(_harness.own_gradients(TX[name]), MESH, donate=False)


def run(name, *kinds):
    """Return the training state after each step, good or bad."""
    draw = lambda p: np.random.default_rng(0).normal(size=(N, *p.shape)).astype("f")
    # optax.adamw itself needs implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        state = gravac.place((PARAMS, TX[name].init(PARAMS)), MESH)
        states = []
        for kind in kinds:
            grads = jax.tree.map(draw, PARAMS)
            if kind is not GOOD:
                grads["b"][kind[0], 3] = kind[1]
            states.append(state := runner(name)(*state, grads))
        return states


def without_counters(state, name):
    """Blank the transform's count of steps, its rungs in time and its report."""
    (own,) = transform_states(state)
    blank = own._replace(steps=0, past_rungs=0, next_rungs=0, info=0)
    is_own = is_transform_state
    state = jax.tree.map(lambda x: blank if is_own(x) else x, state, is_leaf=is_own)
    # Its own count is outside the guard.
    return (state[0], state[1].inner_state) if name == INSIDE else state


@in_every_guard
def test_bad_steps_change_nothing_but_counters(name):
    # By then the decision of the first step has taken effect.
    begin = [GOOD] * 3
    *_, good = run(name, *begin)
    *_, after = states = run(name, *begin, *BAD * 3, GOOD)
    bad = states[len(begin) : -1]
    for x in bad:
        assert_same(without_counters(x, name), without_counters(good, name))
    count = lambda x: [int(optax.tree.get(x, key)) for key in ("steps", "bad_steps")]
    skipped = len(bad)
    assert [*map(count, (good, *bad))] == [[3 + i, i] for i in range(skipped + 1)]
    assert count(after) == [3 + skipped + 1, skipped]
    *_, expected = run(name, *begin, GOOD)
    assert_same(without_counters(after, name), without_counters(expected, name))


# Two programs round apart what a controller has seen.
@pytest.mark.parametrize("name", choices([INSIDE, INJECTED], INJECTED.__eq__))
def test_a_guard_changes_no_good_step_and_without_one_a_bad_step_moves_params(name):
    bare = "inject_hyperparams" if name == INSIDE else name.removeprefix("guarded ")
    unguarded = run(bare, *[GOOD] * 4, BAD[0])
    assert_same(run(name, *[GOOD] * 4), unguarded[:-1])
    (params, _), (after, _) = unguarded[-2:]
    assert any(np.any(params[leaf] != after[leaf]) for leaf in params)


@pytest.mark.parametrize("name", choices(LATE, lambda x: x == "late"))
def test_a_guard_does_nothing_where_replicas_hear_late(name):
    kinds = [GOOD, *BAD, GOOD]
    with pytest.warns(UserWarning, match="guard does nothing"):
        guarded = run(f"guarded {name}", *kinds)
    assert_same(guarded, run(name, *kinds))


def test_a_guard_around_the_transform_alone_warns_unless_all_is_inside_of_it(recwarn):
    gravac.guard(gravac.adamw(0.1, None)).init(PARAMS)
    assert not recwarn.list
    gravac.guard(gravac.transform(None)).init(PARAMS)
    assert "guard the whole chain" in str(recwarn.pop(UserWarning).message)


def test_a_guard_hands_extra_arguments_to_the_transform():
    transform = gravac.transform(None, send=gravac.Fastest((gravac.Dense(), ROWS)))
    tx = gravac.guard(optax.chain(transform, optax.sgd(0.125)))
    state, grads = tx.init(PARAMS), jax.tree.map(jnp.ones_like, PARAMS)
    for seconds in (jnp.nan, 1.0):
        told = {"step_seconds": jnp.float32(seconds), "value": 0.0}
        _, state = jax.jit(tx.update)(grads, state, PARAMS, **told)
    assert optax.tree.get(state, "times") == 1
