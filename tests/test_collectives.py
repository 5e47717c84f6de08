"""What `Comm` exchanges, on every kind of axis, and what that costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import N, make_mesh, on_each

from gravac_jax import Bucket, Comm, Dense, _arrays, _network
from gravac_jax._network import Carrier

COMM, SPLIT = Comm("data"), jax.P("data")
TREE = {
    "a": np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3),
    "b": np.arange(N, dtype=np.float32),
}  # 7 figures a replica, which N does not divide
ONE = jax.tree.map(lambda x: x[0], TREE)


def each(fun, tree):
    """Return `fun` of every replica under vmap: `[replicas, ...]`."""
    return on_each(fun, "vmap")(tree)


def traced(fun, *args):
    """Return the program of one replica."""
    return jax.make_jaxpr(fun, axis_env=[("data", N)])(*args)


def test_the_mean_is_that_of_every_leaf_on_every_replica_in_one_collective():
    means = each(COMM.mean, TREE)
    for name, x in TREE.items():
        np.testing.assert_array_equal(means[name], np.stack([x.mean(0)] * N))
    assert str(traced(COMM.mean, ONE)).count("psum[") == 1


def test_low_precision_is_averaged_in_float32():
    # In bfloat16 the sum of these would round to 256.
    mean = each(COMM.mean, jnp.array([256, 1, 1, 2], jnp.bfloat16))
    assert mean.dtype == jnp.bfloat16
    assert (mean == jnp.bfloat16(260 / 4)).all()


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_a_sum_of_integers_is_exact_and_wraps_around(dtype):
    info, rng = np.iinfo(dtype), np.random.default_rng(0)
    x = rng.integers(info.min, info.max, (N, 1000), dtype, endpoint=True)
    sums = on_each(COMM.sum, "shard_map", out=jax.P())(x)
    assert sums.dtype == dtype
    np.testing.assert_array_equal(sums, x.sum(0, dtype=dtype))
    np.testing.assert_array_equal(each(COMM.sum, x)[0], sums)


def test_sums_travel_as_float32_in_one_collective_and_keep_their_dtypes():
    tree = {"a": jnp.int32(3), "b": jnp.bfloat16(256), "c": jnp.float32(0.5)}
    (line,) = (x for x in str(traced(COMM.sum, tree)).splitlines() if "psum[" in x)
    assert "f32[5] = psum[" in line  # three parts of an integer, and two floats
    sums = each(COMM.sum, jax.tree.map(lambda x: jnp.stack([x] * N), tree))
    assert jax.tree.map(jnp.result_type, sums) == jax.tree.map(jnp.result_type, tree)
    assert [float(sums[name][0]) for name in "abc"] == [12, 1024, 2]
    assert Comm(None).sum(tree) == tree
    truths = jnp.array([True, False, True, True])
    assert each(COMM.sum, truths).tolist() == [3] * N
    assert Comm(None).sum(truths).dtype == each(COMM.sum, truths).dtype == jnp.int32


def test_alone_is_a_mean_of_one():
    comm, x = Comm(None), jnp.arange(3.0)
    assert (comm.replicas, comm.replica()) == (1, 0)
    assert comm.mean(x).tolist() == x.tolist()
    assert comm.gather(x).tolist() == [x.tolist()]
    assert comm.cast(x) is x
    comm.check_local(x)


@pytest.mark.parametrize("how", ["shard_map", "shard_map unchecked"])
def test_two_axes_act_as_one_axis_of_their_product(how):
    comm = Comm(("slow", "fast"))

    def step(x):
        here = jnp.stack([comm.replica(), jnp.int32(comm.replicas)])
        return comm.mean(x), comm.gather(x), here[None]

    out = jax.P(), jax.P(), jax.P(comm.axis_name)
    found = on_each(step, how, make_mesh((2, 2), comm.axis_name), out)(TREE["b"])
    expected = 1.5, TREE["b"], [[0, 4], [1, 4], [2, 4], [3, 4]]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_cast_marks_as_varying_what_was_not():
    varying = lambda x: jax.typeof(x).manual_axis_type.varying

    def body(x):
        constant = jnp.zeros(2)
        assert not varying(constant)
        assert varying(COMM.cast(constant)) == varying(COMM.cast(x)) == {"data"}
        return x

    on_each(body, "shard_map")(TREE["b"])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_ring_passes_the_buffer_twice_and_a_gather_serves_each_of_the_others(n):
    others = n - 1
    wire_bytes, messages = 2 * others * 1000 / n, 2 * others
    assert _network.mean_traffic(250, n) == (8000, 1000, wire_bytes, messages, "mean")
    gathered = _network.all_gather_traffic(1000, n)
    assert gathered == (8000, 1000, others * 1000, others, "gather")
    short = Dense("bfloat16").traffic(Bucket(1001), n)
    assert short.wire_bytes == 2 * others * 2 * -(-1001 // n)


def two_stages(comm, words):
    """Swap rows of words, and gather what this replica has received."""
    return comm.gather(comm.swap(jnp.stack([words + i for i in range(N)])).reshape(-1))


# An exchange, and its means, swaps and gathers, with which figures travel along.
STAGES = {
    "two stages": (two_stages, (0, 1, 1)),
    "one stage": (lambda comm, words: comm.gather(words), (0, 0, 1)),
    "mean": (lambda comm, x: comm.cast(comm.mean([jnp.float32(x), 2.5])[0]), (1, 0, 0)),
    "none": (lambda comm, words: comm.cast(comm.zeros(words)), (1, 0, 0)),
}


def flat(figures):
    """Return the energy, and then the figures."""
    return jnp.concatenate([figures["b"][None], figures["a"].reshape(-1)])


def carrying(send, words, figures):
    """Return what a message brings, and the means of an energy and of figures."""
    carrier = Carrier("data", figures["a"].reshape(-1))
    carrier.tell(figures["b"])
    return carrier.cast(send(carrier, words)), carrier.mean_of_figures(figures["b"])


def apart(send, words, figures):
    """Return the same from messages of their own."""
    return COMM.cast(send(COMM, words)), COMM.mean(flat(figures))


@pytest.mark.parametrize("how", ["vmap", "shard_map", "shard_map unchecked"])
@pytest.mark.parametrize("word", [np.uint32, np.uint16])
def test_figures_travel_with_the_messages_of_an_exchange(word, how):
    words = np.arange(3 * N, dtype=word).reshape(N, 3)

    def both(given):
        return [
            [f(send, *given) for f in (carrying, apart)] for send, _ in STAGES.values()
        ]

    out = SPLIT, jax.P()
    found = on_each(both, how, out=[[out, out]] * len(STAGES))((words, TREE))
    for received, expected in found:
        jax.tree.map(np.testing.assert_array_equal, received, expected)


@pytest.mark.parametrize("name", STAGES)
def test_figures_that_travel_along_have_no_collective_of_their_own(name):
    send, collectives = STAGES[name]
    given = jnp.arange(3, dtype=jnp.uint32), ONE
    program = str(traced(functools.partial(carrying, send), *given))
    words = "psum[", "all_to_all[", "all_gather["
    assert tuple(map(program.count, words)) == collectives


def test_only_the_first_messages_after_the_energy_is_told_take_figures_along():
    words = np.arange(3 * N, dtype=np.uint32).reshape(N, 3)

    def one(given):
        words, figures = given
        carrier = Carrier("data", figures["a"].reshape(-1))
        before = carrier.gather(words)
        carrier.tell(figures["b"])
        first, second = two_stages(carrier, words), two_stages(carrier, words)
        expected = COMM.gather(words), *[two_stages(COMM, words)] * 2
        mean = carrier.mean_of_figures(figures["b"])
        return (before, first, second, mean), (*expected, COMM.mean(flat(figures)))

    jax.tree.map(np.testing.assert_array_equal, *each(one, (words, TREE)))


@pytest.mark.parametrize("m", [0, 1, 4, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint16])
@pytest.mark.parametrize("word", [np.uint32, np.uint16])
def test_words_lead_back_to_what_they_were_made_of(word, dtype, m):
    x = jnp.asarray(np.arange(2 * m).reshape(2, m) - 3, dtype)
    words = _arrays.to_words(x, word)
    assert words.dtype == word
    assert words.shape == (2, -(-m * x.dtype.itemsize // np.dtype(word).itemsize))
    np.testing.assert_array_equal(words.view(dtype)[:, :m], x)


def test_what_is_gathered_is_a_row_between_barriers():
    # Else it may be an all-reduce on a TPU: see Comm.gather.
    steps = traced(COMM.gather, np.zeros(5, np.float32)).jaxpr.eqns
    names = [x.primitive.name for x in steps]
    where = names.index("all_gather")
    assert names[where - 1 : where + 2 : 2] == ["optimization_barrier"] * 2
    (row,) = steps[where].invars
    assert row.aval.shape == (1, 5)
