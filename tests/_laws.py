"""What must hold for every encoding, ladder, memory and controller.

A law is a function that raises AssertionError if a component breaks it. Its docstring
states the law in one line. The tests try every law on every component of its family,
and on saboteurs (`_saboteurs.py`), which must break it.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import _oracles
import jax
import jax.numpy as jnp
import numpy as np
from _harness import agreed, assert_same
from jax.extend.core import jaxprs_in_params

import gravac_jax as gravac
from gravac_jax import Comm, Evidence

KEY_SEED = _oracles.KEY_SEED


def form(tree: Any) -> Any:
    """Return the structure, shapes and dtypes of `tree`, and which types are weak."""
    describe = lambda x: (x.shape, str(x.dtype), bool(getattr(x, "weak_type", False)))
    return jax.tree.map(lambda x: describe(jnp.asarray(x)), tree)


# Encodings: each law takes an encoding and buckets `[replicas, n]`. Where whole entries
# are sent these are dyadic numbers, so that sums are exact in any order. -------------

RUN = 4  # steps, in which each of up to three turns comes, and the first again


class Step(NamedTuple):
    """One step of a run, on all replicas, in NumPy."""

    x: np.ndarray
    before: Any
    sent: gravac.Sent
    after: Any


def bucket_of(x: Any) -> gravac.Bucket:
    """Return what a bucket with the last axis of `x` holds."""
    return gravac.Bucket(x.shape[-1], _oracles.shapes(x.shape[-1]))


def exchange(encoding: Any, comm: Comm, x: Any, state: Any, step: Any = 0) -> Any:
    """Return what comes of one step of one replica, and its state."""
    key, bucket = jax.random.key(KEY_SEED), bucket_of(x)
    return encoding.exchange(x, state, bucket=bucket, key=key, step=step, comm=comm)


@functools.cache
def jitted(encoding: Any) -> Any:
    """Return a compiled step of all replicas."""
    step = functools.partial(exchange, encoding, Comm("data"))
    return jax.jit(jax.vmap(step, in_axes=(0, 0, None), axis_name="data"))


@functools.cache
def jitted_alone(encoding: Any) -> Any:
    """Return a compiled step of one replica: `[1, ...]`."""
    return jax.jit(on_one(functools.partial(exchange, encoding, Comm(None))))


def on_one(step: Any) -> Any:
    """Return a step that takes and returns `[1, ...]`."""

    def body(x: Any, state: Any, i: Any) -> Any:
        x, state = jax.tree.map(lambda x: x[0], (x, state))
        return jax.tree.map(lambda x: x[None], step(x, state, i))

    return body


def stacked(tree: Any, replicas: int) -> Any:
    """Return a tree of NumPy arrays that has a copy for each replica."""
    return jax.tree.map(lambda x: np.stack([x] * replicas), tree)


def run(
    encoding: Any, buckets: np.ndarray, step: Any = None, feedback: float = 1
) -> Iterator[Step]:
    """Return steps in which the same buckets come, and what was held back."""
    step = step or jitted(encoding)
    x, state = buckets, stacked(encoding.init(bucket_of(buckets)), len(buckets))
    for i in range(RUN):
        sent, after = jax.tree.map(agreed, step(x, state, np.int32(i)))
        yield Step(x, state, sent, after)
        x, state = feedback * sent.residual + buckets, after


def each_alone(encoding: Any, buckets: np.ndarray) -> Iterator[Step]:
    """Return the steps of each replica, without the others."""
    for own in buckets:
        yield from run(encoding, own[None], jitted_alone(encoding))


def tolerance(encoding: Any) -> float:
    """Return how far a mean may be off, as a share of the largest entry.

    Whole entries add up exactly; products round, of bfloat16 to fewer bits.
    """
    if encoding.sends_whole_entries or isinstance(encoding, gravac.Dense):
        return 0.0
    return 2.0**-7 if getattr(encoding, "values", "") == "bfloat16" else 2.0**-16


def of_each(encoding: Any) -> float:
    """Return how far the mean of an entry may be off: a dense mean may be rounded."""
    return 2.0**-8 if encoding == gravac.Dense("bfloat16") else 0.0


def assert_near(
    received: Any, expected: Any, atol: float, x: Any, rtol: float = 0
) -> None:
    """Two arrays differ by no more than a share of the largest entry of `x`."""
    atol *= float(np.abs(x).max(initial=0))
    np.testing.assert_allclose(received, expected, rtol=rtol, atol=atol)


def energies_of(x: np.ndarray) -> np.ndarray:
    """Return the energy of each row, in float64."""
    return np.square(x.astype(np.float64)).sum(1)


def has_squares(x: np.ndarray) -> bool:
    """Return whether sums of squares stay in float32."""
    sizes = np.abs(x[x != 0].astype(np.float64))
    return bool(((sizes >= 2.0**-63) & (sizes < 2.0**61)).all())


def averages_what_was_sent(encoding: Any, buckets: np.ndarray) -> None:
    """The mean is the mean over replicas of bucket minus residual, alone as well."""
    steps = itertools.chain(run(encoding, buckets), each_alone(encoding, buckets))
    for x, _, sent, _ in steps:
        expected = (x.astype(np.float64) - sent.residual).mean(0)
        atol, rtol = tolerance(encoding), of_each(encoding)
        assert_near(sent.mean[0], expected, atol, x, rtol)


def agrees_on_all_replicas(encoding: Any, buckets: np.ndarray) -> None:
    """Every replica receives the same mean, bit for bit."""
    for _, _, sent, _ in run(encoding, buckets):
        assert_same(sent.mean, stacked(sent.mean[0], len(buckets)))


def sends_everything(encoding: Any, buckets: np.ndarray) -> None:
    """An encoding that pays for all bits of whole entries leaves no residual."""
    bucket, replicas = bucket_of(buckets), len(buckets)
    if not encoding.sends_whole_entries:
        return
    if encoding.traffic(bucket, replicas).bits < 32 * bucket.n:
        return
    for x, _, sent, _ in run(encoding, buckets):
        assert not sent.residual.any()
        np.testing.assert_array_equal(sent.mean[0], x.mean(0))


def knows_what_it_sent(encoding: Any, buckets: np.ndarray) -> None:
    """The energy is that of bucket minus residual, if nothing is held for others."""
    # From three replicas on residuals may have what the rounding of a mean drops.
    groups = [buckets] if encoding.sends_whole_entries else [buckets[:1], buckets[-2:]]
    for group in groups:
        for x, _, sent, _ in run(encoding, group):
            np.testing.assert_allclose(
                sent.energy, energies_of(x - sent.residual), rtol=1e-5
            )


def keeps_the_form_of_its_state(encoding: Any, buckets: np.ndarray) -> None:
    """The state keeps its form, so one executable serves all steps."""
    before = jax.tree.map(lambda x: x[None], encoding.init(bucket_of(buckets)))
    sent, after = jitted_alone(encoding)(buckets[:1], before, np.int32(0))
    assert form(after) == form(before)
    vector: Any = buckets[:1]
    assert form(sent) == form(gravac.Sent(vector, vector, vector[:, 0]))


def put_in(jaxpr: Any, rung: int, rungs: int, replicas: int) -> tuple[int, int]:
    """Return (bytes, messages) of the collectives of `jaxpr` if `rung` is taken."""
    taken = list(collectives(jaxpr, rung, rungs))
    size = sum(x.aval.size * x.aval.dtype.itemsize for e in taken for x in e.invars)
    rounds = {"psum": 2, "psum_invariant": 2}  # a ring goes round once to add up
    return size, sum(rounds.get(e.primitive.name, 1) for e in taken) * (replicas - 1)


def collectives(jaxpr: Any, rung: int, rungs: int) -> Iterator[Any]:
    """Return the collectives of `jaxpr` that run if `rung` is taken."""
    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        if eqn.primitive.name == "cond":
            # There is a branch for each rung, or one for all.
            branches = params["branches"]
            params["branches"] = (branches[rung if len(branches) == rungs else 0],)
        axes = params.get("axes", params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        if eqn.invars and any(isinstance(axis, str) for axis in axes):
            yield eqn
        for inner in jaxprs_in_params(params):
            yield from collectives(inner, rung, rungs)


def declares_its_bytes(encoding: Any, buckets: np.ndarray) -> None:
    """`traffic` counts the bytes and the messages that the program sends."""
    bucket, replicas = bucket_of(buckets), len(buckets)
    step = functools.partial(exchange, encoding, Comm("data"))
    trace = jax.make_jaxpr(step, axis_env=[("data", replicas)])
    jaxpr = trace(buckets[0], encoding.init(bucket)).jaxpr
    traffic = encoding.traffic(bucket, replicas)
    assert (traffic.payload_bytes, traffic.messages) == put_in(jaxpr, 0, 1, replicas)
    assert 0 < traffic.bits <= 8 * traffic.payload_bytes
    assert encoding.traffic(bucket, 1).wire_bytes == 0


def ignores_the_order_of_replicas(encoding: Any, buckets: np.ndarray) -> None:
    """If replicas change places, the mean and all that is held back stay."""
    x, _, sent, _ = next(run(encoding, buckets))
    other = next(run(encoding, buckets[::-1])).sent
    total = lambda x: x.sum(0, dtype=np.float64)
    atol = len(buckets) * tolerance(encoding)
    assert_near(other.mean[0], sent.mean[0], atol, x)
    assert_near(total(other.residual), total(sent.residual), atol, x)
    np.testing.assert_allclose(other.energy[::-1], sent.energy, rtol=1e-5)
    if encoding.sends_whole_entries:
        assert_same(other.residual[::-1], sent.residual)


def moves_little_what_is_small(encoding: Any, buckets: np.ndarray) -> None:
    """What has no gradient, or a small one, is never farther off than the others."""
    place = np.arange(buckets.shape[1]) % 10
    share = np.select([place == 3, place == 7], [0, 1], 2)
    small = share < 2
    buckets = buckets * np.where(small, share * 2.0**-10, 1).astype(np.float32)
    off = np.zeros(small.sum())
    for x, _, sent, _ in run(encoding, buckets):
        off += (sent.mean[0] - buckets.mean(0, dtype=np.float64))[small]
        of_others = np.sqrt(energies_of(x[:, ~small]).max() / (~small).sum())
        assert np.abs(off).max() < of_others


def estimates(
    encoding: Any, bucket: Any, replicas: int, key: Any, x: Any, state: Any = ()
) -> Any:
    """Return what a replica thinks that it would send, and how long others wait."""
    given = encoding.look(x, state, bucket, key), bucket, replicas
    return encoding.share(*given), encoding.waits(*given)


_jitted_estimates = jax.jit(estimates, static_argnums=(0, 1, 2))


def share_and_waits(
    encoding: Any, x: Any, key: Any = None, shapes: Any = ()
) -> tuple[float, ...]:
    """Return both estimates for a replica without others."""
    key = jax.random.key(0) if key is None else key
    bucket = gravac.Bucket(x.size, shapes)
    return tuple(map(float, _jitted_estimates(encoding, bucket, 1, key, x)))


def estimates_what_it_sends(encoding: Any, buckets: np.ndarray) -> None:
    """`share` is near the share of the energy that a step sends of a known bucket."""
    bucket, key = bucket_of(buckets), jax.random.key(KEY_SEED)
    given = encoding, bucket, len(buckets), key
    guess = jax.jit(jax.vmap(functools.partial(estimates, *given)))
    steps = run(encoding, buckets, feedback=0)
    for x, before, sent, _ in itertools.islice(steps, 1, None):
        share, waits = map(np.asarray, guess(x, before))
        found = np.mean(share * energies_of(x))
        np.testing.assert_allclose(found, sent.energy.mean(), rtol=0.1)
        assert (share <= 1 + 1e-6).all()
        assert (waits >= 0).all()
        assert ((waits > 0) == (share < 1)).all()


def contracts(encoding: Any, situation: np.ndarray) -> None:
    """What is sent is orthogonal to what is held, and has its share of the energy."""
    is_short = getattr(encoding, "values", "") == "bfloat16"
    for x, _, sent, _ in each_alone(encoding, situation):
        x, held = (y[0].astype(np.float64) for y in (x, sent.residual))
        whole = x @ x
        assert abs((x - held) @ held) <= (2.0**-8 if is_short else 2.0**-16) * whole
        assert held @ held <= whole
        if encoding.sends_whole_entries:
            entries = np.count_nonzero(sent.mean)
            assert held @ held <= (1 + 2.0**-16 - entries / x.size) * whole


def sends_something(encoding: Any, situation: np.ndarray) -> None:
    """A bucket whose entries are no denormals is not held back for all its turns."""
    # Scales are made of squares, unless entries go as they are.
    power = 1 if encoding.sends_whole_entries else 2
    for own in situation:
        is_sent = any(step.sent.mean.any() for step in each_alone(encoding, own[None]))
        assert is_sent or not (np.abs(own) ** power >= 2.0**-126).any()


def leaves_zeros_alone(encoding: Any, situation: np.ndarray) -> None:
    """A bucket of zeros stays a bucket of zeros, and nothing becomes NaN."""
    for step in each_alone(encoding, situation):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(step))
    for step in each_alone(encoding, np.zeros_like(situation[:1])):
        assert not any(x.any() for x in step.sent)
    bucket, key = bucket_of(situation), jax.random.key(KEY_SEED)
    of_zeros = key, jnp.zeros(bucket.n), encoding.init(bucket)
    assert not any(map(np.isnan, _jitted_estimates(encoding, bucket, 1, *of_zeros)))


def commutes_with_scaling(encoding: Any, situation: np.ndarray) -> None:
    """What is sent of a bucket times a power of two is scaled as well."""
    for scale in map(np.float32, (2.0**-10, 2.0**20)):
        scaled = situation * scale
        if not has_squares(np.stack([situation, scaled])):
            continue
        pairs = each_alone(encoding, situation), each_alone(encoding, scaled)
        for (x, _, sent, _), (_, _, other, _) in zip(*pairs, strict=True):
            for a, b in zip(sent[:2], other[:2], strict=True):
                assert_near(b / scale, a, tolerance(encoding), x)


def is_itself_however_it_runs(encoding: Any, situation: np.ndarray) -> None:
    """A bucket is sent alike compiled or not, and in a batch of others."""
    first = encoding.init(bucket_of(situation))
    alone = functools.partial(exchange, encoding, Comm(None))
    eager, _ = alone(jnp.asarray(situation[0]), first)
    batch, _ = jax.jit(jax.vmap(alone))(situation, stacked(first, len(situation)))
    compiled = [next(each_alone(encoding, own[None])).sent for own in situation]
    joined = jax.tree.map(lambda *x: np.concatenate(x), *compiled)
    for a, b, c in zip(joined[:2], batch[:2], eager[:2], strict=True):
        assert_near(b, a, tolerance(encoding), situation)
        assert_near(c, a[0], tolerance(encoding), situation)


def is_like_its_oracle(encoding: Any, buckets: np.ndarray) -> None:
    """Mean, residual and energies are those of the oracle, at every step."""
    assert_like_oracle(encoding, run(encoding, buckets))


def is_the_same_alone(encoding: Any, situation: np.ndarray) -> None:
    """Without an axis it does what its oracle does with one replica."""
    for own in filter(has_squares, situation):
        assert_like_oracle(encoding, each_alone(encoding, own[None]))


def assert_like_oracle(encoding: Any, steps: Iterable[Step]) -> None:
    """Steps are those of the oracle, but for what float32 may round."""
    oracle = _oracles.look_up(_oracles.ENCODINGS, encoding)
    for i, (x, before, sent, _) in enumerate(steps):
        expected = oracle(encoding, bucket_of(x), x, before, i)
        # Each value is divided by N, and their sum rounded N times.
        replicas = len(x)
        is_exact = encoding.sends_whole_entries and replicas & (replicas - 1) == 0
        summing = 0 if is_exact else (replicas + 1) * 2.0**-24
        assert_near(sent.residual, expected.residuals, expected.atol, x)
        assert_near(sent.mean[0], expected.mean, expected.atol + summing, x)
        atol = expected.atol * energies_of(x).max(initial=0)
        np.testing.assert_allclose(sent.energy, expected.energies, rtol=1e-5, atol=atol)


# Ladders: each law takes a ladder of two encodings, and buckets `[replicas, n]`. -----


class Taken(NamedTuple):
    """One step of a ladder, on all replicas, in NumPy."""

    rung: int
    x: np.ndarray
    before: Any
    exchanged: Any
    after: Any


def climb(ladder: Any, x: Any, states: Any, rung: Any, looks: Any, step: Any) -> Any:
    """Return what comes of one step of one replica, and the states."""
    return ladder.exchange(
        x,
        states,
        {"some": x[:FIGURES], "none": x[:0]},
        rung=rung,
        reach=range(len(ladder.encodings)),
        looks=looks,
        key=jax.random.key(KEY_SEED),
        step=step,
        comm=Comm("data"),
    )


FIGURES = 5  # that travel along


@functools.lru_cache(maxsize=8)  # there are many, and each maps memory
def _jitted_climb(ladder: Any) -> Any:
    step = functools.partial(climb, ladder)
    return jax.jit(jax.vmap(step, in_axes=(0, 0, None, None, None), axis_name="data"))


def climbed(ladder: Any, x: Any, states: Any, rung: int, looks: bool, step: int) -> Any:
    """Return what came of one step on all replicas, in NumPy."""
    given = x, states, np.int32(rung), np.bool_(looks), np.int32(step)
    return jax.tree.map(np.asarray, _jitted_climb(ladder)(*given))


def walk(ladder: Any, buckets: np.ndarray) -> Iterator[Taken]:
    """Return steps at all rungs in turn, with what each one held back."""
    x, states = buckets, stacked(ladder.init(), len(buckets))
    for i, rung in enumerate((0, 1, 1, 0)):
        found, after = climbed(ladder, x, states, rung, i % 2 == 0, i)
        yield Taken(rung, x, states, found, after)
        x, states = found.sent.residual + buckets, after


def takes_each_encoding_as_if_alone(ladder: Any, buckets: np.ndarray) -> None:
    """Each rung does what its encoding does alone, bit for bit."""
    taken = ladder.sent_at(len(buckets))
    for i, (rung, x, before, found, after) in enumerate(walk(ladder, buckets)):
        kind = type(taken[rung]).__name__
        sent, state = jitted(taken[rung])(x, before.get(kind, ()), np.int32(i))
        assert_same(found.sent, jax.tree.map(np.asarray, sent))
        assert_same(after.get(kind, ()), jax.tree.map(np.asarray, state))


def leaves_other_states_alone(ladder: Any, buckets: np.ndarray) -> None:
    """The states of classes whose encoding was not taken stay as they were."""
    taken = ladder.sent_at(len(buckets))
    for rung, _, before, _, after in walk(ladder, buckets):
        assert before.keys() == after.keys()
        for kind in before.keys() - {type(taken[rung]).__name__}:
            assert_same(after[kind], before[kind])


def knows_the_energies(ladder: Any, buckets: np.ndarray) -> None:
    """Energies and figures are means over replicas, and right for the rung taken."""
    for i, (rung, x, _, found, _) in enumerate(walk(ladder, buckets)):
        near = functools.partial(np.testing.assert_allclose, rtol=1e-5)
        near(found.energies[:, rung], found.sent.energy.mean())
        near(found.energy, energies_of(x).mean())
        near(found.figures["some"][0], x[:, :FIGURES].mean(0), atol=1e-6)
        others = np.delete(found.energies[0], rung)
        assert (others > 0).all() if i % 2 == 0 else not others.any()
        for received in (found.energies, found.energy, found.figures["some"]):
            assert_same(received, stacked(received[0], len(x)))


def sends_alike_looking_or_not(ladder: Any, buckets: np.ndarray) -> None:
    """One executable serves all rungs, and to look at others changes none of them."""
    for i, (rung, x, before, found, after) in enumerate(walk(ladder, buckets)):
        other, states = climbed(ladder, x, before, rung, i % 2 == 1, i)
        assert_same((other.sent, states), (found.sent, after))
        assert_same(other.energies[:, rung], found.energies[:, rung])
    assert _jitted_climb(ladder)._cache_size() == 1


def declares_the_bytes_of_each_rung(ladder: Any, buckets: np.ndarray) -> None:
    """`traffic` counts what each rung sends, with the energies and figures beside."""
    replicas, rungs = len(buckets), len(ladder.encodings)
    step = functools.partial(climb, ladder, looks=True, step=0)
    trace = jax.make_jaxpr(step, axis_env=[("data", replicas)])
    jaxpr = trace(buckets[0], ladder.init(), np.int32(0)).jaxpr
    for rung, encoding in enumerate(ladder.sent_at(replicas)):
        traffic = ladder.traffic(rung, FIGURES, replicas)
        sent = put_in(jaxpr, rung, rungs, replicas)
        assert (traffic.payload_bytes, traffic.messages) == sent
        own = encoding.traffic(ladder.bucket, replicas)
        assert traffic.bits == own.bits
        assert traffic.wire_bytes >= own.wire_bytes


# Memories: each law takes a memory, the gradients of a run, `[steps, n]` integers, and
# a mask `[steps, n]` of the entries that are sent. ---------------------------------


@functools.cache
def _jitted_memory_step(memory: Any) -> Any:
    def step(gradient: Any, is_sent: Any, state: Any) -> Any:
        compensated, state = memory.compensate(gradient, state)
        residual = jnp.where(is_sent, 0, compensated)
        return compensated, residual, memory.hold(residual, compensated, state)

    return jax.jit(step)


def remembered(memory: Any, gradients: np.ndarray, is_sent: np.ndarray) -> Any:
    """Return (compensated, residuals, states) of a run, each a list over steps."""
    states, steps = [memory.init(gradients.shape[1])], []
    for gradient, mask in zip(gradients, is_sent, strict=True):
        *step, state = _jitted_memory_step(memory)(gradient, mask, states[-1])
        steps.append(tuple(map(np.asarray, step)))
        states.append(state)
    compensated, residuals = map(list, zip(*steps, strict=True))
    return compensated, residuals, states


def beside_oracle(memory: Any, gradients: np.ndarray, is_sent: np.ndarray) -> Any:
    """Return an oracle after a run, what it expected, and what `remembered` does."""
    oracle = _oracles.look_up(_oracles.MEMORIES, memory)(memory, gradients.shape[1])
    found, expected = remembered(memory, gradients, is_sent), []
    for gradient, x, residual in zip(gradients, *found[:2], strict=True):
        expected.append(oracle.feed(gradient))
        # The oracle keeps its own bits where nothing was sent.
        oracle.keep(np.where(residual == x, oracle.compensated, residual))
    return oracle, expected, *found


def telescopes(memory: Any, gradients: np.ndarray, is_sent: np.ndarray) -> None:
    """What was sent plus what is held is what it made of gradients."""
    found = beside_oracle(memory, gradients, is_sent)
    oracle, _, compensated, residuals, states = found
    add = lambda parts: np.sum(np.asarray(parts, np.float64), 0)
    total = add(compensated) - add(residuals) + np.asarray(memory.held(states[-1]))
    # Each addition to a residual rounds, where it is not one of integers.
    rtol = 2.0**-23 + oracle.rtol if np.any(oracle.made % 1) else 0
    assert (np.abs(total - oracle.made) <= rtol * add(np.abs(compensated))).all()


def sleeps_through_a_skipped_step(
    memory: Any, gradients: np.ndarray, is_sent: np.ndarray
) -> None:
    """`hold` of all that is held, with nothing sent, leaves the state as it was."""
    *_, states = remembered(memory, gradients, is_sent)
    for state in states:
        held = memory.held(state)
        assert_same(memory.hold(held, held, state), state)


def keeps_its_form(memory: Any, gradients: np.ndarray, is_sent: np.ndarray) -> None:
    """State and compensated gradient keep their structure, shapes and dtypes."""
    compensated, _, states = remembered(memory, gradients, is_sent)
    assert form(compensated) == form(list(gradients))
    assert form(states[1:]) == [form(states[0])] * len(gradients)


def remembers_like_its_oracle(
    memory: Any, gradients: np.ndarray, is_sent: np.ndarray
) -> None:
    """Each compensated gradient is the oracle's."""
    oracle, expected, compensated, *_ = beside_oracle(memory, gradients, is_sent)
    np.testing.assert_allclose(compensated, expected, oracle.rtol, oracle.rtol)


# Controllers: each law takes a controller and the evidence of a run, whose arrays are
# stacked `[steps, ...]`. -----------------------------------------------------------

BAD_STEP = 3  # of a run, arbitrary
# An average in which a step weighs 0.04 or more remembers the roundings of 25 steps; a
# gain is a quotient of two, of three roundings each, and a comparison adds two.
MARGIN = 25 * (2 * 3 + 2) * 2**-24


@functools.cache
def _jitted_run(controller: Any, replicas: int) -> Any:
    def step(state: Any, e: Evidence) -> Any:
        rung, state = controller.decide(e._replace(replicas=replicas), state)
        return state, (rung, state)

    return jax.jit(lambda e: jax.lax.scan(step, controller.init()[1], e)[1])


def decided(controller: Any, evidence: Evidence, jitted_run: Any = _jitted_run) -> Any:
    """Return the rung of every step and the state after it, stacked, in NumPy."""
    run = jitted_run(controller, evidence.replicas)
    return jax.tree.map(np.asarray, run(evidence._replace(replicas=None)))


def each(change: Any, evidence: Any) -> Any:
    """Return evidence, or a state, with a change to all of its arrays."""
    return jax.tree.map(lambda x: change(x) if np.ndim(x) else x, evidence)


def steps_of(evidence: Any, steps: int) -> list[Any]:
    """Return evidence, or the states of a run, step by step."""
    return [each(lambda x: x[i], evidence) for i in range(steps)]  # noqa: B023


def steady(evidence: Evidence) -> Evidence:
    """Return the evidence of the first step, repeated."""
    first = each(lambda x: np.repeat(x[:1], len(x), axis=0), evidence)
    return first._replace(step=evidence.step)


def stays_on_the_ladder(controller: Any, evidence: Evidence) -> None:
    """Every rung is on the ladder, also every rung in the state."""
    oracle = _oracles.look_up(_oracles.CONTROLLERS, controller)
    rungs, states = decided(controller, evidence)
    assert rungs.max() < len(controller.ladder)
    for x in (rungs, *oracle.rungs_of_state(states)):
        assert x.dtype == np.int32
        assert x.min() >= 0
        assert x.max() < len(controller.ladder)


def compiles_once(controller: Any, evidence: Evidence) -> None:
    """The state keeps its form, so one executable serves all steps."""
    decide: Any = jax.jit(
        lambda e, s: controller.decide(e._replace(replicas=evidence.replicas), s)
    )
    first, state = controller.init()
    assert form(first) == ((), "int32", False)
    assert 0 <= first < len(controller.ladder)
    for e in steps_of(evidence, 3):
        rung, after = decide(e._replace(replicas=None), state)
        assert form(rung) == ((), "int32", False)
        assert form(after) == form(state)
        state = after
    assert decide._cache_size() == 1


def decides_alike(controller: Any, evidence: Evidence) -> None:
    """The same evidence leads to the same decisions when traced again."""
    traced_anew = decided(controller, evidence, _jitted_run.__wrapped__)
    assert_same(decided(controller, evidence), traced_anew)


def survives_overflow(controller: Any, evidence: Evidence) -> None:
    """Infinite or NaN energies in one step, or shares, change no later decision."""
    calm = steady(evidence)
    rungs, _ = decided(controller, calm)
    for energy in (np.inf, np.nan):
        bad = each(np.copy, calm)
        bad.energies[BAD_STEP] = bad.energy[BAD_STEP] = energy
        bad.gradient_energies[BAD_STEP] = energy
        bad_rungs, states = decided(controller, bad)
        assert_same(np.delete(bad_rungs, BAD_STEP), np.delete(rungs, BAD_STEP))
        assert not any(np.isinf(x).any() for x in jax.tree.leaves(states))


def believes_only_looks(controller: Any, evidence: Evidence) -> None:
    """Energies of other rungs in a step that does not look change no decision."""
    at = zip(evidence.step, evidence.round_steps - 1, strict=True)
    looks = np.array([bool(controller.looks(*x)) for x in at])
    only = lambda x, other: np.where(looks[:, None], x, other).astype(np.float32)
    evidence = evidence._replace(gradient_energies=only(evidence.gradient_energies, 0))
    rungs, _ = decided(controller, evidence)
    for other in (0.0, 1e3):
        energies = only(evidence.energies, other)
        found, _ = decided(controller, evidence._replace(energies=energies))
        assert_same(found, rungs)


def waits_only_at_own_params(controller: Any, evidence: Evidence) -> None:
    """At the shared params `Fastest` decides on no encoding that needs own params."""
    if not isinstance(controller, gravac.Fastest):
        return  # others take what they are told to
    shared = np.zeros(len(evidence.step), bool)
    rungs, states = decided(controller, evidence._replace(at_own_params=shared))
    needs_own = np.array([x.needs_own_params for x in controller.ladder])
    for x in (rungs, states.home, states.current):
        assert not needs_own[x % needs_own.size].any()


def decides_like_its_oracle(controller: Any, evidence: Evidence) -> None:
    """Every decision is the oracle's, and no comparison of it is close to a tie."""
    oracle = _oracles.look_up(_oracles.CONTROLLERS, controller)
    rungs, states = decided(controller, evidence)
    by_step = (steps_of(x, len(rungs)) for x in (evidence, states))
    expected = list(oracle.decisions(controller, *by_step))
    assert min(x.margin for x in expected) > MARGIN, "choose another seed"
    assert rungs.tolist() == [x.rung for x in expected]
    in_state = [x.tolist() for x in oracle.rungs_of_state(states)]
    by_step = zip(*(x.rungs_of_state for x in expected), strict=True)
    assert in_state == [list(x) for x in by_step]


def laws_of(component: str, tried_on: str) -> tuple[Callable[..., None], ...]:
    """Return the laws of this file that take parameters of these names."""
    functions = filter(inspect.isfunction, list(globals().values()))
    takes = lambda law: [*inspect.signature(law).parameters][:2]
    returns = lambda law: law.__annotations__.get("return", ...)
    is_law = lambda x: takes(x) == [component, tried_on] and returns(x) is None
    return tuple(filter(is_law, functions))


ENCODING_LAWS = laws_of("encoding", "buckets")
# These hold of one replica, whatever comes: they are tried on many situations.
LAWS_OF_ONE = laws_of("encoding", "situation")
LADDER_LAWS = laws_of("ladder", "buckets")
MEMORY_LAWS = laws_of("memory", "gradients")
CONTROLLER_LAWS = laws_of("controller", "evidence")
