"""What `Comm` exchanges, on every kind of axis, and what that costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gravac_jax import Comm, _arrays, _network
from gravac_jax._network import Carrier

N = 4
TREE = {
    "a": np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3),
    "b": np.arange(N, dtype=np.float32),
}  # 7 figures a replica, which N does not divide


def each(fun, tree):
    """Return `fun` of every replica under vmap: `[replicas, ...]`."""
    return jax.jit(jax.vmap(fun, axis_name="data"))(tree)


def under_shard_map(fun, tree, check_vma, out_specs):
    mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])
    local = lambda tree: fun(jax.tree.map(lambda x: x[0], tree))
    sharded = jax.device_put(tree, jax.NamedSharding(mesh, jax.P("data")))
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=jax.P("data"),
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )(sharded)


def test_the_mean_is_the_mean_of_every_leaf_on_every_replica():
    means = each(Comm("data").mean, TREE)
    for name, x in TREE.items():
        np.testing.assert_array_equal(means[name], np.stack([x.mean(0)] * N))


def test_a_whole_tree_is_one_collective():
    one = jax.tree.map(lambda x: x[0], TREE)
    jaxpr = jax.make_jaxpr(Comm("data").mean, axis_env=[("data", N)])(one)
    assert str(jaxpr).count("psum[") == 1


def test_low_precision_is_averaged_in_float32():
    # In bfloat16 the sum of these would round to 256.
    x = jnp.array([256, 1, 1, 2], jnp.bfloat16)
    mean = each(Comm("data").mean, x)
    assert mean.dtype == jnp.bfloat16
    assert (mean == jnp.bfloat16(260 / 4)).all()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_a_sum_of_integers_is_exact_and_wraps_around(dtype):
    info, rng = np.iinfo(dtype), np.random.default_rng(0)
    x = rng.integers(info.min, info.max, (N, 1000), dtype, endpoint=True)
    sums = under_shard_map(Comm("data").sum, x, True, jax.P())
    assert sums.dtype == dtype
    np.testing.assert_array_equal(sums, x.sum(0, dtype=dtype))
    np.testing.assert_array_equal(each(Comm("data").sum, x)[0], sums)


def test_sums_travel_as_float32_in_one_collective_and_keep_their_dtypes():
    tree = {"a": jnp.int32(3), "b": jnp.bfloat16(256), "c": jnp.float32(0.5)}
    total = Comm("data").sum
    jaxpr = str(jax.make_jaxpr(total, axis_env=[("data", N)])(tree))
    (line,) = (line for line in jaxpr.splitlines() if "psum[" in line)
    assert "f32[5] = psum[" in line  # three parts of an integer, and two floats
    sums = each(total, jax.tree.map(lambda x: jnp.stack([x] * N), tree))
    dtypes = jax.tree.map(lambda x: x.dtype, (sums, tree))
    assert dtypes[0] == dtypes[1]
    assert [float(sums[name][0]) for name in "abc"] == [12, 1024, 2]
    assert Comm(None).sum(tree) is tree


def test_everybody_receives_everything_in_order():
    gathered = each(Comm("data").gather, TREE["a"])
    np.testing.assert_array_equal(gathered, np.stack([TREE["a"]] * N))
    swapped = each(Comm("data").swap, TREE["a"][:, 0].repeat(2, 1)[:, :N, None])
    assert swapped[0].ravel().tolist() == [0, 6, 12, 18]


def test_a_mean_in_bfloat16_is_the_rounded_mean_of_what_was_rounded():
    sent = [x.astype(jnp.bfloat16).astype(np.float32) for x in TREE.values()]
    means = each(Comm("data").bfloat16_mean, sent)
    for mean, x in zip(means, sent, strict=True):
        expected = x.mean(0).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(mean, np.stack([expected] * N))


def test_alone_is_a_mean_of_one():
    comm, x = Comm(None), jnp.arange(3.0)
    assert comm.replicas == 1
    assert comm.replica() == 0
    assert comm.mean(x).tolist() == x.tolist()
    assert comm.gather(x).tolist() == [x.tolist()]
    assert comm.cast(x) is x
    comm.check_local(x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_two_axes_act_as_one_axis_of_their_product(check_vma):
    comm = Comm(("slow", "fast"))
    mesh = jax.make_mesh((2, 2), comm.axis_name, devices=jax.devices()[:N])

    def step(x):
        replica = comm.replica()[None]
        return comm.mean(x[0]), comm.gather(x[0]), replica, x * comm.replicas

    split, whole = jax.P(comm.axis_name), jax.P()
    x = jax.device_put(TREE["b"], jax.NamedSharding(mesh, split))
    mean, gathered, replicas, sums = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=split,
            out_specs=(whole, whole, split, split),
            check_vma=check_vma,
        )
    )(x)
    assert mean == 1.5
    assert gathered.tolist() == TREE["b"].tolist()
    assert replicas.tolist() == [0, 1, 2, 3]
    assert sums.tolist() == [0, 4, 8, 12]


def test_a_cast_marks_as_varying_what_was_not():
    varying = lambda x: jax.typeof(x).manual_axis_type.varying

    def body(x):
        constant = jnp.zeros(2)
        assert not varying(constant)
        assert varying(Comm("data").cast(constant)) == {"data"}
        assert varying(Comm("data").cast(x)) == {"data"}
        return x

    under_shard_map(lambda x: body(x)[None], TREE["b"], True, jax.P("data"))


def test_what_was_summed_already_is_refused_where_jax_keeps_track():
    def check(x):
        Comm("data").check_local({"local": x})
        Comm("data").check_local({"kernel": jax.lax.psum(x, "data")})
        return x[None]

    with pytest.raises(ValueError, match=r"kernel.*does not vary over"):
        under_shard_map(check, TREE["b"], True, jax.P("data"))
    under_shard_map(check, TREE["b"], False, jax.P("data"))


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_a_ring_passes_the_buffer_twice_and_a_gather_serves_each_of_the_others(
    replicas,
):
    others = replicas - 1
    reduced = _network.mean_traffic(250, replicas)
    wire_bytes, messages = 2 * others * 1000 / replicas, 2 * others
    assert reduced == (8000, 1000, wire_bytes, messages, "mean")
    gathered = _network.all_gather_traffic(1000, replicas)
    assert gathered == (8000, 1000, others * 1000, others, "gather")
    short = _network.bfloat16_mean_traffic(1001, replicas)
    assert short.wire_bytes == 2 * others * 2 * -(-1001 // replicas)


def two_stages(comm, words):
    """Swap rows of words, and gather what this replica has received."""
    return comm.gather(comm.swap(jnp.stack([words + i for i in range(N)])).reshape(-1))


def gathered(comm, words):
    """Gather words in one stage."""
    return comm.gather(words)


def averaged(comm, words):
    """Average numbers."""
    return comm.cast(comm.mean(words.astype(jnp.float32)))


def nothing_sent(comm, words):
    """Send nothing that figures could travel with."""
    return comm.cast(comm.zeros(words))


STAGES = {
    "two stages": two_stages,
    "one stage": gathered,
    "mean": averaged,
    "none": nothing_sent,
}


def carrying(send, words, figures):
    """Return what a message brings, and the means of an energy and of figures."""
    carrier = Carrier("data", figures)
    carrier.tell(figures["b"])
    received = send(carrier, words)
    return carrier.cast(received), carrier.mean_of_figures(figures["b"])


@pytest.mark.parametrize("how", ["vmap", True, False])
@pytest.mark.parametrize("word", [np.uint32, np.uint16])
@pytest.mark.parametrize("send", STAGES.values(), ids=STAGES)
def test_figures_travel_with_the_messages_of_an_exchange(send, word, how):
    words = np.arange(3 * N, dtype=word).reshape(N, 3)

    def apart(send, words, figures):
        comm = Comm("data")
        return comm.cast(send(comm, words)), comm.mean((figures["b"], figures))

    def exchanged(exchange):
        one = lambda given: exchange(send, *given)
        if how == "vmap":
            return each(one, (words, TREE))
        return under_shard_map(one, (words, TREE), how, (jax.P("data"), jax.P()))

    pairs = zip(*map(jax.tree.leaves, map(exchanged, (carrying, apart))), strict=True)
    for received, expected in pairs:
        np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize(
    ("name", "collectives"),
    [("two stages", (0, 1, 1)), ("one stage", (0, 0, 1)), ("mean", (1, 0, 0))],
)
def test_figures_that_travel_along_have_no_collective_of_their_own(name, collectives):
    given = jnp.arange(3, dtype=jnp.uint32), jax.tree.map(lambda x: x[0], TREE)
    carry = functools.partial(carrying, STAGES[name])
    program = str(jax.make_jaxpr(carry, axis_env=[("data", N)])(*given))
    words = "psum[", "all_to_all[", "all_gather["
    assert tuple(map(program.count, words)) == collectives


def test_only_the_first_messages_after_the_energy_is_told_take_figures_along():
    words = np.arange(3 * N, dtype=np.uint32).reshape(N, 3)

    def one(given):
        words, figures = given
        comm, carrier = Comm("data"), Carrier("data", figures)
        before = carrier.gather(words)
        carrier.tell(figures["b"])
        first, second = two_stages(carrier, words), two_stages(carrier, words)
        expected = comm.gather(words), *[two_stages(comm, words)] * 2
        mean = carrier.mean_of_figures(figures["b"])[1]
        return (before, first, second), expected, mean

    received, expected, figures = each(one, (words, TREE))
    for x, y in zip(received, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(figures["b"], np.stack([TREE["b"].mean(0)] * N))


@pytest.mark.parametrize("m", [0, 1, 4, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint16])
@pytest.mark.parametrize("word", [np.uint32, np.uint16])
def test_words_lead_back_to_what_they_were_made_of(word, dtype, m):
    x = jnp.asarray(np.arange(2 * m).reshape(2, m) - 3, dtype)
    words = _arrays.to_words(x, word)
    assert words.dtype == word
    assert words.shape == (2, -(-m * x.dtype.itemsize // np.dtype(word).itemsize))
    again = _arrays.from_words(words, dtype)
    np.testing.assert_array_equal(again[:, :m], x)


def test_what_is_gathered_is_a_row_between_barriers():
    # Else it may be an all-reduce on a TPU: see Comm.gather.
    gather = jax.make_jaxpr(Comm("data").gather, axis_env=[("data", N)])
    names = [x.primitive.name for x in gather(np.zeros(5, np.float32)).jaxpr.eqns]
    where = names.index("all_gather")
    assert names[where - 1 : where + 2 : 2] == ["optimization_barrier"] * 2
    (row,) = gather(np.zeros(5, np.float32)).jaxpr.eqns[where].invars
    assert row.aval.shape == (1, 5)
