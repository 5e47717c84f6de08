"""Replicas that drift apart are seen, and brought together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, assert_same, in_every_way, make_mesh

import gravac_jax as gravac

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
COPIES = jax.tree.map(lambda x: jnp.stack([x] * N), TREE)


def everywhere(f, how):
    """`f` on every replica of its own tree, stacked."""
    if how == "pmap":
        return jax.pmap(f, "data")
    if how == "vmap":
        return jax.vmap(f, axis_name="data")
    mesh = make_mesh()
    stacked = lambda tree: jax.tree.map(
        lambda y: y[None], f(jax.tree.map(lambda x: x[0], tree))
    )
    mapped = jax.jit(
        jax.shard_map(
            stacked,
            mesh=mesh,
            in_specs=jax.P("data"),
            out_specs=jax.P("data"),
            check_vma=how == "shard_map",
        )
    )
    return lambda tree: mapped(
        jax.device_put(tree, jax.NamedSharding(mesh, jax.P("data")))
    )


@in_every_way
def test_the_same_trees_have_the_same_checksums_everywhere(how):
    sums = np.asarray(everywhere(gravac.checksum, how)(COPIES))
    assert (sums.shape, sums.dtype) == ((N, N), np.uint32)
    assert len(set(sums.ravel().tolist())) == 1


@pytest.mark.parametrize("leaf", [x for x in TREE if x != "empty"])
@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_one_bit_of_one_replica_shows_on_all(leaf, how):
    changed = dict(COPIES)
    bits = np.array(changed[leaf])
    view = bits.view(np.uint8).reshape(N, -1)
    view[2, -1] ^= 1  # the last replica but one
    changed[leaf] = jnp.asarray(bits)
    sums = np.asarray(everywhere(gravac.checksum, how)(changed))
    assert (sums == sums[0]).all()
    assert [len(set(row[[0, i]].tolist())) for i, row in enumerate(sums)] == [
        1,
        1,
        2,
        1,
    ]


def test_entries_that_change_places_show():
    sums = jax.vmap(gravac.checksum, axis_name="data")(
        jnp.array([[1, 2, 4], [4, 2, 1]])
    )
    assert sums[0, 0] != sums[0, 1]


def test_signs_that_change_show_however_many():
    trees = jnp.array([[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, 1.0, 1.0]])
    sums = jax.vmap(gravac.checksum, axis_name="data")(trees)
    assert sums[0, 0] != sums[0, 1]


def test_random_keys_are_compared_and_shared():
    keys = jax.random.split(jax.random.key(0), N)
    assert len(set(jax.vmap(gravac.checksum, axis_name="data")(keys)[0].tolist())) == N
    shared = jax.vmap(gravac.resync, axis_name="data")(keys)
    assert (shared == keys[0]).all()


def test_complex_leaves_are_refused_by_name():
    with pytest.raises(TypeError, match=r"\['z'\] is complex"):
        gravac.checksum({"z": jnp.ones(2, complex)}, None)


@in_every_way
def test_a_resync_gives_everybody_the_bits_of_the_first(how):
    noise = lambda x: jnp.stack([x, *(jnp.roll(x, i) for i in range(1, N))])
    special = jnp.array([-0.0, np.nan, np.inf, 1e-40], jnp.float32)
    received = everywhere(gravac.resync, how)(
        jax.tree.map(noise, {**TREE, "special": special})
    )
    copies = jnp.stack([special] * N)
    assert_same(received, {**COPIES, "special": copies})


def test_a_resync_leaves_what_differs_per_replica():
    tx = gravac.transform(compress=True)
    state = gravac.init(tx, jnp.ones(8), N)
    residual = jnp.arange(N * 8.0).reshape(N, 8)
    memory = (state.local.memory[0]._replace(residual=residual),)
    state = state._replace(local=state.local._replace(memory=memory))
    axes = jax.tree.map(lambda spec: 0 if spec else None, gravac.state_specs(state))
    sync = jax.vmap(gravac.resync, in_axes=(axes,), out_axes=axes, axis_name="data")
    assert_same(optax.tree.get(sync(state), "residual"), residual)


CHECKING = gravac.transform(compress=True, controller=gravac.Fixed(1), check_every=3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicas_that_drift_apart_are_counted(check_vma):
    tx, mesh = CHECKING, make_mesh()

    def train_step(params, state, batch):
        # A fault of one device, which shard_map knows nothing of.
        fault = jnp.where(jax.lax.axis_index("data") == 1, batch[0, 0], 0.0)
        held = params + fault
        updates, state = tx.update(0 * params + batch[0], state, held)
        return optax.apply_updates(params, updates), state

    params, state = gravac.place((jnp.ones(8), tx.init(jnp.ones(8))), mesh)
    step = gravac.data_parallel(train_step, mesh, check_vma=check_vma)
    counts = []
    for i in range(12):
        batch = np.zeros((N, 8), np.float32)
        batch[:, 0] = i >= 6
        params, state = step(params, state, batch)
        counts.append(int(state.info.disagreements))
    # Checked at every third step; apart from the seventh on.
    assert counts == [0] * 8 + [1, 1, 1, 2]


def test_params_that_are_to_be_compared_must_be_given():
    tx = CHECKING
    with pytest.raises(ValueError, match=r"check_every.*tx.update\(grads"):
        jax.vmap(tx.update, in_axes=(0, None), axis_name="data")(
            jnp.ones((N, 8)), tx.init(jnp.ones(8))
        )
