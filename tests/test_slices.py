"""The compiler shards the model, and payloads travel over the slow axis alone."""

import collections
import functools
import itertools
import re

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import AXIS_TYPES, at, choices, make_mesh, plain_step
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


assert_close = functools.partial(_harness.assert_close, rtol=2e-5, atol=2e-6)


@by_mesh
def test_dense_steps_are_those_of_a_plain_jit(shape):
    mesh = three_axes(shape)
    sgd = optax.sgd(0.1, momentum=0.9)
    params, expected = put(PARAMS, mesh, SPECS), []
    opt_state, step = sgd.init(params), jax.jit(plain_step(sgd, loss_fn, None))
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
BEFORE = {
    "clip": gravac.ClipByGlobalNorm(0.1),
    "memory": gravac.Momentum(0.9),
    "weight_decay": 0.1,
}
in_sgd = lambda **how: optax.chain(gravac.transform("dcn", **how), optax.sgd(0.1))
RECIPES = {
    ALL_BEFORE: functools.partial(in_sgd, **BEFORE),
    # Without `keeps_norm`, whose rows are of slices.
    "adamw": functools.partial(
        gravac.transform, "dcn", memory=gravac.OwnOptimizer(optax.adamw(1e-2))
    ),
    "delay": functools.partial(in_sgd, delay=1),
    "rounds": functools.partial(gravac.diloco, optax.adam(1e-2), 2, "dcn"),
}
IS_COMPRESSED = {name: x.ndim > 1 for name, x in PARAMS.items()}


@pytest.mark.parametrize("recipe", choices(RECIPES, lambda x: x == ALL_BEFORE))
def test_inner_axes_change_nothing(recipe):
    common = {"compress": IS_COMPRESSED, "send": gravac.Dense()}
    make = lambda shardings=None: RECIPES[recipe](**common, shardings=shardings)
    received = train(make, three_axes())
    assert_close(received, train(lambda params: make(), make_mesh((2,), ("dcn",))))


# What each device sends


GRADIENTS = {
    name: 8.0 * RNG.integers(-50, 51, (STEPS, 2, *shape)).astype(np.float32)
    for name, (_, shape, _) in LEAVES.items()
}


def follow(tx_of):
    """Take steps whose gradients are given; return params and states before each."""
    mesh = three_axes()
    specs = {name: P("dcn", *spec) for name, spec in SPECS.items()}
    params = put(jax.tree.map(np.zeros_like, PARAMS), mesh, SPECS)
    tx = tx_of(params)
    opt_state = gravac.place(tx.init(params), mesh, "dcn")
    step = _harness.own_gradients(tx)
    step = gravac.data_parallel(step, mesh, "dcn", donate=False)
    seen = [(params, opt_state)]
    for i in range(STEPS):
        params, opt_state = step(params, opt_state, put(at(GRADIENTS, i), mesh, specs))
        on_all_devices(params)
        seen.append((params, opt_state))
    return mesh, seen


def slices(mesh, tree, lead=()):
    """Return what each device owns of `tree`, in one vector: `[2, 2, 2, n]`."""
    own = np.empty((2, 2, 2), object)
    for at_device, device in np.ndenumerate(mesh.devices):
        cuts = {x: jax.NamedSharding(mesh, P(*lead, *LEAVES[x][2])) for x in tree}
        where = {x: cuts[x].devices_indices_map(tree[x].shape)[device] for x in tree}
        parts = [np.asarray(tree[x])[where[x]] for x in sorted(tree)]
        # As in a bucket: small leaves first.
        own[at_device] = np.concatenate(sorted(map(np.ravel, parts), key=np.size))
    return np.array(own.tolist())


def cut_leaves(tree):
    """Return the leaves of which each device owns a part."""
    return {name: tree[name] for name in CUT}


def topk(params):
    send = _harness.Scripted((gravac.Dense(), gravac.TopK(4, select="exact")))
    return gravac.transform("dcn", shardings=params, compress=True, send=send)


def test_each_device_remembers_what_it_owns_and_sends_its_largest_entries():
    mesh, seen = follow(topk)
    owned = slices(mesh, cut_leaves(jax.tree.map(np.ones_like, PARAMS)))
    assert owned[0].sum() == 4 * owned.shape[-1] == sum(PARAMS[x].size for x in CUT)
    residual = _harness.residual(seen[-1][1])
    assert {x.data.shape for x in residual.addressable_shards} == {(1, owned.shape[-1])}
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


ENCODINGS = choices(
    [
        gravac.Bits(2, turns=4, row_entries=32),
        gravac.Bits(8, row_entries=32),
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
    computations = reading.Program(text).computations.values()
    for x in itertools.chain(*(c.values() for c in computations)):
        if x.collective:
            groups = [{y // inner_devices for y in ys} for ys in reading.groups(x.rest)]
            crosses = max(map(len, groups)) > 1
            yield crosses, x.collective, reading.ARRAY.findall(x.shape)


def lowered(tx_of, leaves, shape=(2, 2, 2)):
    """Return the collectives of a step; without `tx_of` they are a plain jit's."""
    mesh, is_plain = three_axes(shape), tx_of is None
    params = put({x: PARAMS[x] for x in leaves}, mesh, {x: SPECS[x] for x in leaves})
    others = {x: jnp.asarray(PARAMS[x]) for x in PARAMS if x not in leaves}
    tx = optax.sgd(0.1) if is_plain else optax.chain(tx_of(params), optax.sgd(0.1))
    opt_state = (
        tx.init(params) if is_plain else gravac.place(tx.init(params), mesh, "dcn")
    )
    rows_alone = jax.NamedSharding(mesh, P("tp"))

    def loss(own, tokens):
        # A look-up in a table that is sharded over an axis of the batch, too, may send
        # activations over all axes.
        params = {**others, **own}
        table = jax.lax.with_sharding_constraint(params["embed"], rows_alone)
        return loss_fn({**params, "embed": table}, tokens)

    step = plain_step(tx, loss, None if is_plain else "dcn")
    step = step if is_plain else gravac.data_parallel(step, mesh, "dcn")
    tokens = rows(mesh, np.resize(TOKENS[0], ROWS * shape[0]))
    text = jax.jit(step).lower(params, opt_state, tokens).compile().as_text()
    return list(collectives(text, mesh.size // shape[0]))


def size(shapes):
    return sum(np.prod(numbers(x), initial=1) for _, x in shapes)


def two_bits(params):
    return gravac.transform("dcn", shardings=params, send=gravac.Bits(2))


# Two replicas gather alone; more exchange in two stages.
STAGES = {(2, 2, 2): {"all-gather"}, (4, 2, 1): {"all-gather", "all-to-all"}}


@pytest.mark.parametrize("shape", choices(STAGES, lambda x: x == (2, 2, 2)))
def test_payloads_cross_the_slow_axis_and_the_others_stay_the_models(shape):
    leaves = ("embed", "up")
    # Figures that devices agree on, and the mean of a loss, are a few float32, of which
    # XLA may join two; a gradient here has more.
    # XLA gathers the tokens, int32, once more where only some axes are mapped.
    dtypes = lambda shapes: {dtype for dtype, _ in shapes}
    small = lambda x: size(x) if dtypes(x) == {"s32"} else 16 * (dtypes(x) == {"f32"})
    large = lambda found: [x for x in found if size(x[2]) > small(x[2])]
    found = large(lowered(two_bits, leaves, shape))
    one_replica = large(lowered(None, leaves, (1, *shape[1:])))
    kinds = lambda found: collections.Counter(kind for _, kind, _ in found)
    inner, sent = ([x for x in found if x[0] == crosses] for crosses in (False, True))
    assert kinds(inner) == kinds(one_replica)
    largest = lambda found: max(size([x]) for *_, shapes in found for x in shapes)
    assert largest(inner) == largest(one_replica)
    assert kinds(sent) == dict.fromkeys(STAGES[shape], 1)
    assert set.union(*(dtypes(x[2]) for x in sent)) == {"u32"}


# Around a step


def small(tx_of, leaves=("up", "odd")):
    """Return a mesh, an optimizer, and its params and state."""
    mesh = three_axes()
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
        params = optax.apply_updates(params, updates)
        return gravac.resync(params, "dcn"), opt_state, sums

    return gravac.data_parallel(train_step, mesh, "dcn", donate=False)


GOOD, BAD = (np.array([1.0, x], np.float32) for x in (2.0, np.inf))


def test_gradients_by_jax_are_those_of_one_replica_and_a_bad_one_changes_nothing():
    sgd = optax.sgd(0.1, momentum=0.9)
    tx_of = lambda params: gravac.guard(optax.chain(two_bits(params), sgd))
    mesh, tx, *state = small(tx_of)
    step = step_of(tx, mesh)
    ours = step(*state, GOOD)
    by_jax = step_of(tx, mesh, jax.value_and_grad)(*state, GOOD)
    _harness.assert_same(*map(on_all_devices, (by_jax, ours)))
    params, opt_state, sums = ours
    assert sums[0] == sums[1]
    after, bad, _ = step(params, opt_state, BAD)
    on_all_devices((after, bad))
    info = optax.tree.get(bad, "StepInfo")
    assert (int(info.bad_steps), bool(info.is_finite)) == (1, False)
    kept = [(x, _harness.residual(y)) for x, y in ((after, bad), (params, opt_state))]
    _harness.assert_same(*kept)


def test_a_run_in_few_bits_goes_on_bit_for_bit(tmp_path):
    leaves = ("up", "odd", "bias")
    tx_of = lambda params: gravac.sgd(0.1, "dcn", shardings=params)
    mesh, tx, params, state = small(tx_of, leaves)
    step = step_of(tx, mesh)
    for _ in range(2):
        params, state, _ = step(params, state, GOOD)
    with checkpoint.Checkpointer(tmp_path, save_every=1) as checkpointer:
        checkpointer.save(1, (params, state), params)
        found = checkpointer.restore((params, state), params).tree
    assert np.any(np.asarray(_harness.residual(state)))
    _harness.assert_same(_harness.on_host(found), _harness.on_host((params, state)))
    expected, received = step(params, state, GOOD), step(*found, GOOD)
    _harness.assert_same(_harness.on_host(received), _harness.on_host(expected))


def test_an_update_may_be_skipped_by_a_cond():
    """As MaxText's optimizer skips spikes; JAX maps a branch after it is traced."""

    def skipping(params):
        def update(grads, state, params, **more):
            take = lambda: tx.update(grads, state, params, **more)
            skip = lambda: (jax.tree.map(jnp.zeros_like, grads), state)
            return jax.lax.cond(params["odd"][0, 0] < 9, take, skip)

        tx = two_bits(params)
        return optax.GradientTransformationExtraArgs(tx.init, update)

    mesh, tx, *state = small(skipping)
    step, alone = step_of(tx, mesh), step_of(two_bits(state[0]), mesh)
    taken, expected = step(*state, GOOD), alone(*state, GOOD)
    _harness.assert_same(*map(on_all_devices, (taken, expected)))
    _, skipped, _ = step({**state[0], "odd": state[0]["odd"] + 9}, state[1], GOOD)
    _harness.assert_same(*map(_harness.on_host, (skipped, state[1])))


def told(spec=None, shape=(2, 2, 2), **others):
    """Return what makes a transform that is told of other shardings of `up`."""

    def make(params):
        lies = put(params, three_axes(shape), {"up": spec}) if spec else params
        return gravac.transform(**{"axis_name": "dcn", "shardings": lies, **others})

    return make


def mean_first(params):
    mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, "dcn"))
    return optax.chain(mean, told()(params))


def constrained(params):
    rows_of_all = jax.NamedSharding(three_axes(), P(("dcn", "fsdp")))
    constrain = lambda grads, _: jax.lax.with_sharding_constraint(grads, rows_of_all)
    return optax.chain(optax.stateless(constrain), told()(params))


def by_hand(params):
    tx, lies = two_bits(params), {"mesh": three_axes(), "out_specs": P()}
    state = tx.init(params)
    update = lambda x: tx.update(params, state, params)[0]
    jax.shard_map(update, in_specs=P("dcn"), **lies)(np.ones(2))


# What is told, and the words of the error.
MISTAKES = {
    "nothing": (told(shardings=None), "on 2 replicas, not on 8.*shardings=params"),
    "other params": (lambda x: told(shardings=[x, x])(x), "told of 2 leaves"),
    "a mean of gradients": (mean_first, "remove any jax.lax.pmean"),
    "over the slow axis": (told(P("dcn")), r"sharded over P\('dcn',?\).*other axes"),
    "a constraint over the slow axis": (constrained, "not name the axis of the\nrepl"),
    "by hand": (by_hand, "maps over 'dcn'.*by gravac.data_parallel"),
    "the default axis": (told(axis_name="data"), r"among \('dcn', 'fsdp', 'tp'\)"),
    "another layout": (told(P("tp")), r"P\S*\('tp',?\).*P\S*\('fsdp', 'tp'"),
    "another mesh": (told(SPECS["up"], (2, 4, 1)), "told of .*'fsdp': 4.*'fsdp': 2"),
    "not on a mesh": (told(shardings=PARAMS), "as they lie on one mesh.*got 0 meshes"),
    "a fast axis, too": (told(fast_axis_name="fsdp"), "not both"),
    "explicit axes": (told(), r"must be Auto.*Mesh\(mesh\.devices, mesh\."),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_what_to_do(mistake):
    make, says = MISTAKES[mistake]
    mesh = make_mesh((2, 2, 2), NAMES, AXIS_TYPES["explicit" in mistake])
    params = put({"up": PARAMS["up"]}, mesh, {"up": SPECS["up"]})

    def train():
        tx = make(params)
        state = gravac.place(tx.init(params), mesh, "dcn")
        return step_of(tx, mesh)(params, state, np.ones(2, np.float32))

    with pytest.raises((TypeError, ValueError), match=says):
        train()
