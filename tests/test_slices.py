"""The compiler shards the model, and payloads travel over the slow axis alone."""

import collections
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import AXIS_TYPES, at, choices, make_mesh
from jax import P
from programs import reading

import gravac_jax as gravac
from gravac_jax import checkpoint

NAMES = ("dcn", "fsdp", "tp")
RNG = np.random.default_rng(0)
VOCABULARY, WIDTH, CLASSES, ROWS, STEPS = 16, 8, 6, 8, 4

# How each leaf is sharded, its shape, and how the exchange cuts it on 2 x 2 x 2.
LEAVES = {
    "embed": (P(("tp", "fsdp")), (VOCABULARY, WIDTH), P(("tp", "fsdp"))),
    "up": (P("fsdp", "tp"), (WIDTH, 16), P("fsdp", "tp")),
    "down": (P("tp"), (16, CLASSES), P(("tp", "fsdp"))),  # 2 copies
    "scale": (P("fsdp"), (WIDTH,), P(("fsdp", "tp"))),
    "bias": (P(), (CLASSES,), P("fsdp")),  # half of it twice
    "odd": (P(), (3, 5), P()),  # 4 times
    "gain": (P(), (), P()),
}
# Of these each device owns a part. The others go dense, in few bits, too.
CUT = ("embed", "up", "down", "scale")
SPECS = {name: spec for name, (spec, _, _) in LEAVES.items()}
PARAMS = {
    name: RNG.normal(size=shape).astype(np.float32) / 4
    for name, (_, shape, _) in LEAVES.items()
}
TOKENS = RNG.integers(0, VOCABULARY, (STEPS, 2 * ROWS)).astype(np.int32)

by_mesh = pytest.mark.parametrize(
    "shape", choices([(2, 2, 2), (4, 1, 2)], lambda x: x == (2, 2, 2))
)


def loss_fn(params, tokens):
    hidden = params["embed"][tokens] * params["scale"][None]
    hidden = jnp.tanh(hidden @ params["up"]) * params["gain"]
    logits = hidden @ params["down"] + params["bias"][None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens % CLASSES)
    return losses.mean() + jnp.sum(params["odd"] ** 2)


def three_axes(shape=(2, 2, 2)):
    return make_mesh(shape, NAMES)


def put(tree, mesh, specs):
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    return jax.tree.map(place, tree, specs)


def rows(mesh, tokens):
    """Return a batch as it lies under jit, over both data axes."""
    return put(tokens, mesh, P(("dcn", "fsdp")))


def on_all_devices(tree):
    """Return the values on each device, and check that copies are bit-identical."""
    found = {}
    for path, x in jax.tree.leaves_with_path(tree):
        for shard in x.addressable_shards:
            key = jax.tree_util.keystr(path), str(shard.index)
            value = np.asarray(shard.data)
            assert found.setdefault(key, value).tobytes() == value.tobytes(), key
    return found


# Training


def train(tx, mesh, where=None):
    """Return the losses of a run by `gravac.train_step`, the params, and flushed."""
    is_plain = mesh.axis_names == ("dcn",)
    params = PARAMS if is_plain else put(PARAMS, mesh, SPECS)
    step = gravac.train_step(loss_fn, tx(params), mesh, "dcn", at=where)
    params, opt_state = step.init(params)
    losses = []
    for tokens in TOKENS:
        batch = tokens if is_plain else rows(mesh, tokens)
        params, opt_state, *loss = step(params, opt_state, batch)
        losses.append(float(np.mean(loss[0])))
    before = jax.tree.map(np.asarray, params)
    params, opt_state = step.flush(params, opt_state)
    on_all_devices(params)
    return losses, before, params


def assert_close(received, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        received,
        expected,
    )


@by_mesh
def test_dense_steps_are_those_of_a_plain_jit(shape):
    mesh = three_axes(shape)

    def plain(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = sgd.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    sgd = optax.sgd(0.1, momentum=0.9)
    params, expected = put(PARAMS, mesh, SPECS), []
    opt_state, step = sgd.init(params), jax.jit(plain)
    for tokens in TOKENS:
        params, opt_state, loss = step(params, opt_state, rows(mesh, tokens))
        expected.append(float(loss))

    def tx(params):
        dense = gravac.transform("dcn", shardings=params, send=gravac.Dense())
        return optax.chain(dense, sgd)

    losses, received, flushed = train(tx, mesh, where="shared")
    assert_close(losses, expected)
    assert_close(received, jax.tree.map(np.asarray, params))
    assert len(set(losses)) == STEPS
    for name, x in flushed.items():
        assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim), name


# Dense over the slow axis, all of these equal a run without inner axes.
ALL_BEFORE = "before the exchange"
RECIPES = {
    ALL_BEFORE: lambda **others: optax.chain(
        gravac.transform(
            "dcn",
            clip=gravac.ClipByGlobalNorm(0.1),
            memory=gravac.Momentum(0.9),
            weight_decay=0.1,
            check_every=1,
            **others,
        ),
        optax.sgd(0.1),
    ),
    "adamw": lambda **others: gravac.adamw(1e-2, "dcn", weight_decay=0.1, **others),
    "delay": lambda **others: optax.chain(
        gravac.transform("dcn", delay=1, **others), optax.sgd(0.1)
    ),
    "rounds": lambda **others: gravac.diloco(optax.adam(1e-2), 2, "dcn", **others),
}
IS_COMPRESSED = {name: x.ndim > 1 for name, x in PARAMS.items()}


@pytest.mark.parametrize("recipe", choices(RECIPES, lambda x: x == ALL_BEFORE))
def test_inner_axes_change_nothing(recipe):
    common = {"compress": IS_COMPRESSED, "send": gravac.Dense()}
    make = lambda **shardings: RECIPES[recipe](**common, **shardings)
    received = train(lambda params: make(shardings=params), three_axes())
    expected = train(lambda params: make(), make_mesh((2,), ("dcn",)))
    assert_close(received, expected)


# What each device sends


GRADIENTS = {
    name: 8.0 * RNG.integers(-50, 51, (STEPS, 2, *shape)).astype(np.float32)
    for name, (_, shape, _) in LEAVES.items()
}
ZEROS = jax.tree.map(np.zeros_like, PARAMS)


@functools.cache
def follow(tx_of):
    """Take steps whose gradients are given; return params and states before each."""
    mesh = three_axes()
    specs = {name: P("dcn", *spec) for name, spec in SPECS.items()}
    params = put(ZEROS, mesh, SPECS)
    tx = tx_of(params)
    opt_state = gravac.place(tx.init(params), mesh, "dcn")

    def train_step(params, opt_state, own):
        grads = jax.tree.map(lambda x: x[0], own)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = gravac.data_parallel(train_step, mesh, "dcn", donate=False)
    seen = [(params, opt_state)]
    for i in range(STEPS):
        params, opt_state = step(params, opt_state, put(at(GRADIENTS, i), mesh, specs))
        on_all_devices(params)
        seen.append((params, opt_state))
    return mesh, seen


def slices(mesh, tree, lead=()):
    """Return what each device owns of `tree`, in one vector: `[2, 2, 2, n]`."""
    own = np.empty((2, 2, 2), object)
    for at_device in np.ndindex(2, 2, 2):
        index = dict(zip(NAMES, at_device, strict=True))
        parts = []
        for name, x in sorted(tree.items()):
            x = np.asarray(x)
            x = x[index["dcn"]] if lead else x
            cut, held = LEAVES[name][2], {"fsdp", "tp"}
            for axis, along in enumerate(cut):
                along = along if isinstance(along, tuple) else (along,)
                place = np.ravel_multi_index(
                    [index[n] for n in along], [2] * len(along)
                )
                x = np.array_split(x, 2 ** len(along), axis)[place]
                held -= set(along)
            # The first of the devices that hold it owns what could not be cut.
            parts.append(np.ravel(x) * all(index[n] == 0 for n in held))
        own[at_device] = _harness.in_bucket_order(parts)
    return np.array(own.tolist())


def cut_leaves(tree):
    """Return the leaves of which each device owns a part."""
    return {name: tree[name] for name in CUT}


def topk(params):
    ladder = gravac.Dense(), gravac.TopK(4, select="exact")
    send = _harness.Scripted(ladder)
    return gravac.transform("dcn", shardings=params, compress=True, send=send)


def test_each_device_sends_the_largest_entries_of_what_it_owns():
    mesh, seen = follow(topk)
    kept = 0.0
    for i, ((before, _), (after, state)) in enumerate(itertools.pairwise(seen)):
        gradients = at(GRADIENTS, i)
        compensated = kept + slices(mesh, cut_leaves(gradients), lead=("dcn",))
        kept = np.asarray(_harness.residual(state)).reshape(compensated.shape)
        sent = compensated - kept
        assert (sent * kept == 0).all()
        if i >= 3 and i % 2:
            count = (sent != 0).sum(-1)
            assert (count <= compensated.shape[-1] // 4).all()
            assert count.min() > 0
            smallest = np.where(sent, abs(sent), np.inf).min(-1)
            assert (smallest >= abs(kept).max(-1)).all()
        else:
            assert not kept.any()
        delta = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after, before)
        assert (slices(mesh, cut_leaves(delta))[0] == sent.mean(0)).all()
        for name in PARAMS.keys() - CUT:
            assert (delta[name] == gradients[name].mean(0)).all()


def test_everything_is_remembered_once():
    *_, (_, state) = follow(topk)[1]
    ones = cut_leaves(jax.tree.map(np.ones_like, PARAMS))
    owned = slices(three_axes(), ones)
    assert owned[0].sum() == sum(x.size for x in ones.values())
    residual = _harness.residual(state)
    assert {x.data.shape for x in residual.addressable_shards} == {(1, owned.shape[-1])}
    assert owned.shape[-1] == owned[0].sum() / 4


ENCODINGS = choices(
    [
        gravac.Bits(2, turns=4, row_entries=32),
        gravac.Bits(8, mean_bits=4, row_entries=32),  # in two stages
        gravac.Dense("bfloat16"),
        gravac.LowRank(1),
        gravac.TopK(4),
    ],
    lambda x: getattr(x, "turns", 1) > 1,
)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_sent_and_kept_is_what_came(encoding):
    tx = lambda params: gravac.transform(
        "dcn", shardings=params, compress=IS_COMPRESSED, send=encoding
    )
    _, seen = follow(tx)
    params, state = seen[-1]
    mean = jax.tree.map(lambda x: x.sum(0).mean(0), GRADIENTS)
    chosen = [name for name in CUT if IS_COMPRESSED[name]]
    filled = sum(PARAMS[name].size for name in chosen) // 4
    residual = np.asarray(_harness.residual(state))
    assert not np.any(residual[:, filled:])
    kept = residual.sum()
    came = sum(mean[name].sum() for name in chosen)
    sent = sum(np.asarray(params[name]).sum() for name in chosen)
    most = sum(abs(x).sum() for x in GRADIENTS.values())
    is_dense = isinstance(encoding, gravac.Dense)  # which rounds the mean
    atol = 2.0**-8 * most if is_dense else 1e-2
    np.testing.assert_allclose(sent + kept / 2, came, rtol=0, atol=atol)
    assert abs(kept) > 1 or is_dense
    for name in PARAMS.keys() - chosen:
        np.testing.assert_allclose(params[name], mean[name], rtol=1e-6)


# What is compiled

numbers = lambda text: [int(x) for x in re.findall(r"\d+", text)]


def collectives(text, inner_devices=4):
    """Yield (crosses the slow axis, kind, dtypes and shapes) of each collective."""
    kinds = re.compile(rf"= (.*?) ({_harness.KINDS})(?:-start)?\(")
    for line in text.splitlines():
        if op := kinds.search(line):
            replicas = [{x // inner_devices for x in xs} for xs in reading.groups(line)]
            crosses = max(map(len, replicas)) > 1
            yield crosses, op[2], re.findall(r"(\w+)\[([\d,]*)\]", op[1])


def lowered(tx_of, leaves, shape=(2, 2, 2)):
    """Return the collectives of a step; without `tx_of` they are a plain jit's."""
    mesh, is_plain = three_axes(shape), tx_of is None
    params = put({x: PARAMS[x] for x in leaves}, mesh, {x: SPECS[x] for x in leaves})
    others = {x: jnp.asarray(PARAMS[x]) for x in PARAMS if x not in leaves}
    tx = optax.sgd(0.1) if is_plain else optax.chain(tx_of(params), optax.sgd(0.1))
    opt_state = (
        tx.init(params) if is_plain else gravac.place(tx.init(params), mesh, "dcn")
    )
    value_and_grad = functools.partial(gravac.value_and_grad, axis_name="dcn")
    rows_alone = jax.NamedSharding(mesh, P("tp"))

    def train_step(params, opt_state, tokens):
        def loss(own, tokens):
            # A look-up in a table that is sharded over an axis of the batch, too, may
            # send activations over all axes.
            params = {**others, **own}
            table = jax.lax.with_sharding_constraint(params["embed"], rows_alone)
            return loss_fn({**params, "embed": table}, tokens)

        grad = (jax.value_and_grad if is_plain else value_and_grad)(loss)
        value, grads = grad(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    step = train_step if is_plain else gravac.data_parallel(train_step, mesh, "dcn")
    tokens = rows(mesh, np.resize(TOKENS[0], ROWS * shape[0]))
    text = jax.jit(step).lower(params, opt_state, tokens).compile().as_text()
    return list(collectives(text, mesh.size // shape[0]))


def size(shapes):
    return sum(np.prod(numbers(x), initial=1) for _, x in shapes)


def two_bits(params):
    return gravac.transform("dcn", shardings=params, send=gravac.Bits(2))


def test_payloads_cross_the_slow_axis_and_the_others_stay_the_models():
    leaves = ("embed", "up")
    # Figures that devices agree on, and the mean of a loss, are a few float32, of which
    # XLA may join two; a gradient here has more.
    # XLA gathers the tokens, int32, once more where only some axes are mapped.
    dtypes = lambda shapes: {dtype for dtype, _ in shapes}
    is_small = lambda x: (
        dtypes(x) == {"s32"} or (dtypes(x) == {"f32"} and size(x) <= 16)
    )
    large = lambda found: [x for x in found if not is_small(x[2])]
    found = large(lowered(two_bits, leaves))
    one_replica = large(lowered(None, leaves, (1, 2, 2)))
    kinds = lambda found: collections.Counter(kind for _, kind, _ in found)
    inner = [x for x in found if not x[0]]
    assert kinds(inner) == kinds(one_replica)
    assert max(map(size, [x[2] for x in inner])) == max(size(x[2]) for x in one_replica)
    sent = [x for x in found if x[0]]
    assert kinds(sent) == {"all-gather": 1}  # the only stage between two replicas
    assert set.union(*(dtypes(x[2]) for x in sent)) == {"u32"}


# Compiled for many devices, and not run.
MANY = """
import jax
jax.config.update("jax_num_cpu_devices", 256)
import numpy as np
import test_slices as here
shapes = {"embed": (16, 128), "scale": (128,), "up": (128, 512), "down": (512, 6)}
here.PARAMS |= {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
for crosses, kind, shapes in here.lowered(here.two_bits, ["up"], (4, 8, 8)):
    if crosses:
        print(kind, *sorted({dtype for dtype, _ in shapes}))
"""


@pytest.mark.slow
def test_on_four_by_eight_by_eight_devices_payloads_alone_cross_the_slow_axis():
    tests = pathlib.Path(__file__).parent
    run = [sys.executable, "-c", MANY]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        run, cwd=tests, env=env, check=True, capture_output=True, text=True
    )
    assert sorted(set(out.stdout.splitlines())) == [
        "all-gather u32",
        "all-reduce f32",  # figures that all agree on
        "all-to-all u32",
    ]


# Around a step


def small(tx_of, shape=(2, 2, 2), leaves=("up", "odd")):
    """Return a mesh, an optimizer, and its params and state."""
    mesh = three_axes(shape)
    params = put({x: PARAMS[x] for x in leaves}, mesh, {x: SPECS[x] for x in leaves})
    tx = tx_of(params)
    return mesh, tx, params, gravac.place(tx.init(params), mesh, "dcn")


def step_of(tx, mesh, value_and_grad=lambda f: gravac.value_and_grad(f, "dcn")):
    """Return a step whose gradients are the params, times the replica's number."""

    def train_step(params, opt_state, batch):
        energies = lambda p: [jnp.sum(x**2) for x in jax.tree.leaves(p)]
        loss = lambda p, x: x[0] * jnp.sum(jnp.stack(energies(p)))
        _, grads = value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        sums = gravac.checksum(params, "dcn")
        return (
            gravac.resync(optax.apply_updates(params, updates), "dcn"),
            opt_state,
            sums,
        )

    return gravac.data_parallel(train_step, mesh, "dcn", donate=False)


def test_gradients_by_jax_are_those_of_one_replica():
    mesh, tx, params, state = small(two_bits)
    take = lambda step: step(params, state, np.array([1.0, 2.0], np.float32))
    ours = on_all_devices(take(step_of(tx, mesh)))
    by_jax = on_all_devices(take(step_of(tx, mesh, jax.value_and_grad)))
    jax.tree.map(np.testing.assert_array_equal, by_jax, ours)


def test_a_bad_gradient_of_one_device_leaves_everything_as_it_is():
    sgd = optax.sgd(0.1, momentum=0.9)
    tx_of = lambda params: gravac.guard(optax.chain(two_bits(params), sgd))
    mesh, tx, params, state = small(tx_of)
    step = step_of(tx, mesh)
    params, state, sums = step(params, state, np.array([1.0, 2.0], np.float32))
    assert sums[0] == sums[1]
    after, bad, _ = step(params, state, np.array([1.0, np.inf], np.float32))
    on_all_devices((after, bad))
    info = optax.tree.get(bad, "StepInfo")
    assert (int(info.bad_steps), bool(info.is_finite)) == (1, False)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    np.testing.assert_array_equal(_harness.residual(bad), _harness.residual(state))


@pytest.mark.slow
def test_a_run_goes_on_with_other_slices(tmp_path):
    mesh, tx, params, state = small(two_bits)
    step = step_of(tx, mesh)
    params, state, _ = step(params, state, np.array([1.0, 2.0], np.float32))
    held = np.asarray(_harness.residual(state)).sum()
    assert abs(held) > 0.1
    with checkpoint.Checkpointer(tmp_path, save_every=1) as checkpointer:
        checkpointer.save(1, (params, state), params)
        same = checkpointer.restore((params, state), params).tree
        np.testing.assert_array_equal(_harness.residual(same), _harness.residual(state))
        mesh, tx, other, begun = small(two_bits, (4, 1, 2))
        other, found = checkpointer.restore((other, begun), other).tree
    jax.tree.map(np.testing.assert_array_equal, other, params)
    residual = np.asarray(_harness.residual(found))
    assert residual.shape[0] == 8
    np.testing.assert_allclose(residual.sum() / 4, held / 2, rtol=1e-5)
    other, found, _ = step_of(tx, mesh)(other, found, np.ones(4, np.float32))
    on_all_devices(other)


def test_a_run_in_few_bits_goes_on_bit_for_bit(tmp_path):
    leaves = ("up", "odd", "bias")
    tx_of = lambda params: gravac.sgd(0.1, "dcn", shardings=params)
    mesh, tx, params, state = small(tx_of, leaves=leaves)
    step, batch = step_of(tx, mesh), np.array([1.0, 2.0], np.float32)
    for _ in range(2):
        params, state, _ = step(params, state, batch)
    with checkpoint.Checkpointer(tmp_path, save_every=1) as checkpointer:
        checkpointer.save(1, (params, state), params)
        found = checkpointer.restore((params, state), params).tree
    assert np.any(np.asarray(_harness.residual(state)))
    _harness.assert_same(_harness.on_host(found), _harness.on_host((params, state)))
    expected, received = step(params, state, batch), step(*found, batch)
    _harness.assert_same(_harness.on_host(received), _harness.on_host(expected))


def refused(transform, mesh=None, **kwargs):
    """Take a step of `up` alone."""
    mesh = mesh or three_axes()
    params = put({"up": PARAMS["up"]}, mesh, {"up": SPECS["up"]})
    tx = transform(params)
    state = gravac.place(tx.init(params), mesh, "dcn")
    return step_of(tx, mesh)(params, state, np.ones(2, np.float32))


MISTAKES = {
    "nothing said": (
        lambda params: gravac.transform("dcn", compress=True),
        r"has 2 parts for 8 devices.*shardings=params",
    ),
    "other params": (
        lambda params: gravac.transform("dcn", shardings=[params, params]),
        r"told of 2 leaves",
    ),
    "a mean of gradients": (
        lambda params: optax.chain(
            optax.stateless(lambda grads, _: jax.lax.pmean(grads, "dcn")),
            gravac.transform("dcn", shardings=params),
        ),
        r"remove any jax.lax.pmean",
    ),
    "over the slow axis": (
        lambda params: gravac.transform(
            "dcn", shardings=put(params, three_axes(), {"up": P("dcn")})
        ),
        r"sharded over \['dcn'\]",
    ),
    "the default axis": (
        lambda params: gravac.transform(shardings=params),
        r"has \('dcn', 'fsdp', 'tp'\), got \['data'\]",
    ),
    "another layout": (
        lambda params: gravac.transform(
            "dcn", shardings=put(params, three_axes(), {"up": P("tp")})
        ),
        r"told of P\S*\('tp',?\).*by P\S*\('fsdp', 'tp'\)",
    ),
    "another mesh": (
        lambda params: gravac.transform(
            "dcn", shardings=put(params, three_axes((2, 4, 1)), {"up": P("fsdp", "tp")})
        ),
        r"told of .*'fsdp': 4",
    ),
    "not on a mesh": (
        lambda params: gravac.transform("dcn", shardings=PARAMS),
        r"as they lie on one mesh.*got 0 meshes",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_what_to_do(mistake):
    make, says = MISTAKES[mistake]
    with pytest.raises(ValueError, match=says):
        refused(make)


def test_a_fast_axis_beside_the_compilers_is_refused():
    params = put({"up": PARAMS["up"]}, three_axes(), {"up": SPECS["up"]})
    with pytest.raises(TypeError, match=r"not both"):
        gravac.transform("dcn", fast_axis_name="fsdp", shardings=params)


def test_a_constraint_over_the_slow_axis_is_explained():
    mesh, _, params, state = small(two_bits)

    def train_step(params, opt_state, batch):
        batch = jax.lax.with_sharding_constraint(batch, rows_of_all)
        return params, opt_state, batch.sum()

    rows_of_all = jax.NamedSharding(mesh, P(("dcn", "fsdp")))
    step = gravac.data_parallel(train_step, mesh, "dcn")
    with pytest.raises(ValueError, match="must not name the axis of the\nreplicas"):
        step(params, state, np.ones(4, np.float32))


def test_explicit_axes_are_refused():
    mesh = make_mesh((2, 2, 2), NAMES, AXIS_TYPES[1])
    with pytest.raises(ValueError, match=r"must be Auto.*Mesh\(mesh\.devices, mesh\."):
        refused(lambda params: gravac.transform("dcn", shardings=params), mesh)
