"""What must hold for every compressor, exchange, memory and controller.

A law is a function that raises AssertionError if a component breaks it. Its docstring
states the law in one line. The tests try every law on every component of its family,
and on saboteurs (`_saboteurs.py`), which must break it.
"""

import functools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import _oracles
import jax
import jax.numpy as jnp
import numpy as np
from _harness import assert_same
from jax.extend.core import jaxprs_in_params

import gravac_jax as gravac
from gravac_jax import Comm, Evidence, Exchanged
from gravac_jax._selection import entries

KEY_SEED = _oracles.KEY_SEED


def form(tree: Any) -> Any:
    """Return the structure, shapes and dtypes of `tree`, and which types are weak."""
    describe = lambda x: (x.shape, str(x.dtype), bool(getattr(x, "weak_type", False)))
    return jax.tree.map(lambda x: describe(jnp.asarray(x)), tree)


# Compressors: each law takes a compressor, a bucket `[n]` and a factor. -------------


def _select(compressor: Any, k: int, bucket: Any) -> Any:
    state, key = compressor.init(bucket.size), jax.random.key(KEY_SEED)
    payload, _ = compressor.compress(bucket, state, k=k, key=key)
    return payload


@functools.cache
def _jitted_select(compressor: Any, k: int, is_mapped: bool = False) -> Any:
    select = functools.partial(_select, compressor, k)
    return jax.jit(jax.vmap(select) if is_mapped else select)


def selected(compressor: Any, bucket: np.ndarray, factor: float) -> Any:
    """Return the payload of one compiled call, in NumPy."""
    k = compressor.count(bucket.size, factor)
    return jax.tree.map(np.asarray, _jitted_select(compressor, k)(bucket))


def _filled(payload: Any, bucket: np.ndarray) -> Any:
    """Return the payload without its empty slots."""
    is_filled = payload.indices < bucket.size
    return jax.tree.map(lambda x: x[is_filled], payload)


def sends_what_is_there(compressor: Any, bucket: np.ndarray, factor: float) -> None:
    """What is sent plus what is left is the bucket, bit for bit."""
    payload = selected(compressor, bucket, factor)
    rebuilt = np.array(entries.drop(jnp.asarray(bucket), payload.indices))
    payload = _filled(payload, bucket)
    assert not rebuilt[payload.indices].any()
    rebuilt[payload.indices] = payload.values
    assert_same(rebuilt, bucket)


def contracts(compressor: Any, bucket: np.ndarray, factor: float) -> None:
    """What is sent holds at least its share of the energy, entries / n."""
    if compressor.is_blind:
        return  # on average only
    sent = _filled(selected(compressor, bucket, factor), bucket).values
    energy = lambda values: sum(Fraction(float(x)) ** 2 for x in np.ravel(values))
    assert energy(sent) * bucket.size >= energy(bucket) * sent.size


def sends_its_share(compressor: Any, bucket: np.ndarray, factor: float) -> None:
    """The payload has `count` slots: entries in rising order, then empty slots."""
    values, indices = selected(compressor, bucket, factor)
    k = compressor.count(bucket.size, factor)
    assert isinstance(k, int)
    assert 1 <= k <= bucket.size
    assert (values.shape, values.dtype) == ((k,), np.float32)
    assert (indices.shape, indices.dtype) == ((k,), np.int32)
    assert (np.diff(indices) > 0).all()
    assert indices[0] >= 0
    sent = int((indices < bucket.size).sum())
    assert indices[sent:].tolist() == [entries.PAD + i for i in range(sent, k)]
    assert not values[sent:].any()
    is_indifferent = compressor.is_blind or k == bucket.size
    assert is_indifferent or values[:sent].all()  # zeros stay at home


def sends_something(compressor: Any, bucket: np.ndarray, factor: float) -> None:
    """A bucket with a normal number has a nonzero payload."""
    if not compressor.is_blind and (np.abs(bucket) >= 2.0**-126).any():
        assert _filled(selected(compressor, bucket, factor), bucket).values.any()


def leaves_zeros_alone(compressor: Any, bucket: np.ndarray, factor: float) -> None:
    """A bucket of zeros stays a bucket of zeros, and nothing becomes NaN."""
    zeros = selected(compressor, np.zeros_like(bucket), factor)
    assert_same(zeros.values, np.zeros_like(zeros.values))
    assert np.isfinite(selected(compressor, bucket, factor).values).all()


def commutes_with_scaling(compressor: Any, bucket: np.ndarray, factor: float) -> None:
    """The payload of a bucket times a power of two is the payload times that power."""
    payload = selected(compressor, bucket, factor)
    for scale in map(np.float32, (2.0**-10, 2.0**20)):
        sizes = np.abs(np.stack([bucket, bucket * scale]))
        if ((sizes == 0) | (sizes >= 2.0**-126)).all():  # nothing leaves float32
            scaled = selected(compressor, bucket * scale, factor)
            assert_same(scaled, payload._replace(values=payload.values * scale))


def is_itself_under_jit(compressor: Any, bucket: np.ndarray, factor: float) -> None:
    """The payload is the same whether it is compiled or not."""
    k = compressor.count(bucket.size, factor)
    eager = _select(compressor, k, jnp.asarray(bucket))
    assert_same(eager, selected(compressor, bucket, factor))


def is_itself_under_vmap(compressor: Any, bucket: np.ndarray, factor: float) -> None:
    """Many buckets in a batch have the payloads that they have one by one."""
    buckets = np.stack([bucket, -bucket[::-1]])
    k = compressor.count(bucket.size, factor)
    together = _jitted_select(compressor, k, is_mapped=True)(buckets)
    one_by_one = [selected(compressor, x, factor) for x in buckets]
    assert_same(together, jax.tree.map(lambda *x: np.stack(x), *one_by_one))


def selects_like_its_oracle(compressor: Any, bucket: np.ndarray, factor: float) -> None:
    """The payload holds the oracle's entries, or k of them if it has more."""
    oracle = _oracles.look_up(_oracles.COMPRESSORS, compressor)
    k = oracle.count(bucket.size, factor)
    assert compressor.count(bucket.size, factor) == k
    expected = oracle.indices(bucket, k)
    payload = _filled(selected(compressor, bucket, factor), bucket)
    assert payload.indices.size == min(k, len(expected))
    assert set(payload.indices.tolist()) <= set(expected)
    assert_same(payload.values, bucket[payload.indices])


COMPRESSOR_LAWS = (
    sends_what_is_there,
    contracts,
    sends_its_share,
    sends_something,
    leaves_zeros_alone,
    commutes_with_scaling,
    is_itself_under_jit,
    is_itself_under_vmap,
    selects_like_its_oracle,
)


# Exchanges: each law takes an exchange, buckets `[replicas, n]` of dyadic numbers, so
# that sums are exact in any order, and a ladder that begins with 1. ----------------


def _step(
    exchange: Any, ladder: Any, comm: Comm, bucket: Any, rung: Any, looks: Any = True
) -> Exchanged:
    exchange = exchange.shaped(_oracles.shapes(bucket.size))
    key, state = jax.random.key(KEY_SEED), exchange.init(bucket.size, ladder)
    exchanged, _ = exchange.exchange(
        bucket, state, rung, ladder=ladder, key=key, comm=comm, looks=looks
    )
    return exchanged


@functools.cache
def _jitted_step(exchange: Any, ladder: Any, is_alone: bool = False) -> Any:
    if is_alone:
        return jax.jit(functools.partial(_step, exchange, ladder, Comm(None)))
    step = functools.partial(_step, exchange, ladder, Comm("data"))
    return jax.jit(jax.vmap(step, in_axes=(0, None, None), axis_name="data"))


def exchanged(
    exchange: Any, buckets: np.ndarray, ladder: Any, rung: int, looks: bool = True
) -> Exchanged:
    """Return the outcome on all replicas, `[replicas, ...]`, in NumPy."""
    step = _jitted_step(exchange, ladder)
    return jax.tree.map(np.asarray, step(buckets, np.int32(rung), np.bool_(looks)))


def put_in(jaxpr: Any, rung: int, rungs: int, replicas: int) -> tuple[int, int]:
    """Return (bytes, messages) of the collectives of `jaxpr` if `rung` is taken."""
    taken = list(collectives(jaxpr, rung, rungs))
    size = sum(x.aval.size * x.aval.dtype.itemsize for e in taken for x in e.invars)
    rounds = {"psum": 2, "psum_invariant": 2}  # a ring goes round once to add up
    times = sum(rounds.get(e.primitive.name, 1) for e in taken)
    return size, times * (replicas - 1)


def collectives(jaxpr: Any, rung: int, rungs: int) -> Iterator[Any]:
    """Return the collectives of `jaxpr` that run if `rung` is taken."""
    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        if eqn.primitive.name == "cond":
            # There is a branch for each rung, or one for all.
            branches = params["branches"]
            taken = rung if len(branches) == rungs else 0
            params["branches"] = (branches[taken],)
        axes = params.get("axes", params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple) else (axes,)
        if eqn.invars and any(isinstance(axis, str) for axis in axes):
            yield eqn
        for inner in jaxprs_in_params(params):
            yield from collectives(inner, rung, rungs)


# How far float32 may take a mean from the mean of what was sent, as a share of the
# largest entry: sums of products round, and so does a mean in bfloat16.
TOLERANCES = {"float32": 2.0**-16, "bfloat16": 2.0**-6}


def made_of(exchange: Any) -> tuple[Any, ...]:
    """Return the exchanges that take the rungs: this one, or those that it mixes."""
    is_mixed = isinstance(exchange, gravac.Mixed)
    return (exchange.few_bits, exchange.sparse) if is_mixed else (exchange,)


def tolerance(exchange: Any) -> float:
    """Return how far an exchange's mean may be off; 0 if it adds up exactly."""

    def of_one(exchange: Any) -> float:
        if isinstance(exchange, gravac.Quantized | gravac.QuantizedTopK):
            return TOLERANCES["float32"]
        is_low_rank = isinstance(exchange, gravac.LowRank)
        return TOLERANCES[exchange.values] if is_low_rank else 0.0

    return max(map(of_one, made_of(exchange)))


def rounds_the_mean(exchange: Any) -> bool:
    """Return whether the mean is rounded, so that dense rungs leave a residual."""
    is_dense = lambda x: isinstance(x, gravac.DenseMean)
    return any(is_dense(x) and x.values == "bfloat16" for x in made_of(exchange))


def is_any(exchange: Any, *kinds: type) -> bool:
    """Return whether some rung is taken by an exchange of one of these kinds."""
    return any(isinstance(x, kinds) for x in made_of(exchange))


def is_ordered(exchange: Any) -> bool:
    """Return whether it matters to an exchange which replica is which."""
    return is_any(exchange, gravac.LeaderIndices, gravac.QuantizedAllReduce)


def keeps_for_others(exchange: Any) -> bool:
    """Return whether a residual has what the rounding of the mean has dropped."""
    return is_any(exchange, gravac.QuantizedAllReduce)


def assert_near(exchange: Any, received: Any, expected: Any, scale: Any = 1) -> None:
    """Two arrays are the same but for what the exchange may round, times `scale`."""
    atol = tolerance(exchange) * float(np.max(scale, initial=0))
    np.testing.assert_allclose(received, expected, rtol=0, atol=atol)


def averages_what_was_sent(exchange: Any, buckets: np.ndarray, ladder: Any) -> None:
    """The mean is the mean over replicas of bucket minus residual."""
    for rung in range(len(ladder)):
        received = exchanged(exchange, buckets, ladder, rung)
        expected = (buckets - received.residual).mean(0)
        rtol = 2.0**-8 if rounds_the_mean(exchange) else 0
        atol = tolerance(exchange) * np.abs(buckets).max()
        np.testing.assert_allclose(received.mean[0], expected, rtol=rtol, atol=atol)


def agrees_on_all_replicas(exchange: Any, buckets: np.ndarray, ladder: Any) -> None:
    """Every replica receives the same means, bit for bit."""
    for rung in range(len(ladder)):
        received = exchanged(exchange, buckets, ladder, rung)
        for x in (received.mean, received.mean_energies):
            assert_same(x, np.stack([x[0]] * len(x)))


def sends_everything_at_factor_1(
    exchange: Any, buckets: np.ndarray, ladder: Any
) -> None:
    """A dense rung leaves no residual, and its mean is the mean of the buckets."""
    if rounds_the_mean(exchange):
        return
    received = exchanged(exchange, buckets, ladder, ladder.index(1))
    assert not received.residual.any()
    np.testing.assert_array_equal(received.mean[0], buckets.mean(0))


def knows_what_it_sent(exchange: Any, buckets: np.ndarray, ladder: Any) -> None:
    """The energy of the rung taken is the energy of what was sent."""
    for rung in range(len(ladder)):
        received = exchanged(exchange, buckets, ladder, rung)
        assert received.energies.shape == (len(buckets), len(ladder))
        whole = np.square(buckets).sum(1)
        sent = np.square(buckets - received.residual).sum(1)
        if not keeps_for_others(exchange):
            assert_near(exchange, received.energies[:, rung], sent, whole)
        assert_near(exchange, received.energy, whole, whole)


def sends_alike_looking_or_not(exchange: Any, buckets: np.ndarray, ladder: Any) -> None:
    """Looking at other rungs changes nothing about the rung taken."""
    for rung in range(len(ladder)):
        looking = exchanged(exchange, buckets, ladder, rung, looks=True)
        other = exchanged(exchange, buckets, ladder, rung, looks=False)
        assert_same((other.mean, other.residual), (looking.mean, looking.residual))
        assert_same(other.energies[:, rung], looking.energies[:, rung])
        assert_same(other.energy, looking.energy)


def on_replicas(
    exchange: Any, buckets: np.ndarray, ladder: Any, rung: Any, looks: Any = True
) -> tuple[Any, Any]:
    """Return what comes of a rung on all replicas, and their states.

    An `np.integer` is known when the step is compiled; other rungs are branches.
    """
    known = rung if isinstance(rung, np.integer) else None
    # A test may put another one in its place.
    platform = jax.lax.platform_dependent
    step = _jitted_on_replicas(exchange, ladder, known, looks is True, platform)
    return step(buckets, rung, looks)


@functools.cache
def _jitted_on_replicas(
    exchange: Any, ladder: Any, known: Any, looks_always: bool, platform: Any
) -> Any:
    del platform

    def step(bucket: Any, rung: Any, looks: Any) -> tuple[Any, Any]:
        return exchange.exchange(
            bucket,
            exchange.init(bucket.size, ladder),
            rung if known is None else known,
            ladder=ladder,
            key=jax.random.key(0),
            comm=Comm("data"),
            looks=looks_always or looks,
        )

    return jax.jit(jax.vmap(step, axis_name="data", in_axes=(0, None, None)))


def declares_its_bytes(exchange: Any, buckets: np.ndarray, ladder: Any) -> None:
    """`traffic` counts the entries, the bytes and the messages that are sent."""
    replicas, n = buckets.shape
    trace = jax.make_jaxpr(
        functools.partial(_step, exchange, ladder, Comm("data")),
        axis_env=[("data", replicas)],
    )
    jaxpr = trace(buckets[0], np.int32(0)).jaxpr
    shaped = exchange.shaped(_oracles.shapes(n))
    for rung, factor in enumerate(ladder):
        traffic = shaped.traffic(n, factor, replicas)
        energies = shaped.energies_traffic(n, factor, len(ladder), replicas)
        _, size, _, messages = np.sum([traffic, energies], axis=0)
        sent = put_in(jaxpr, rung, len(ladder), replicas)
        assert (size, messages) == sent
        residual = exchanged(exchange, buckets, ladder, rung).residual
        changed = np.count_nonzero(buckets - residual, axis=1).max()
        assert tolerance(exchange) or changed <= traffic.entries
        assert shaped.traffic(n, factor, 1).wire_bytes == 0


def averages_energies(exchange: Any, buckets: np.ndarray, ladder: Any) -> None:
    """The mean energies are the means of the replicas' own energies."""
    for rung in range(len(ladder)):
        received = exchanged(exchange, buckets, ladder, rung)
        own = np.column_stack([received.energies, received.energy])
        np.testing.assert_allclose(received.mean_energies[0], own.mean(0), rtol=1e-6)


def ignores_the_order_of_replicas(
    exchange: Any, buckets: np.ndarray, ladder: Any
) -> None:
    """If replicas change places, so do their residuals, and the mean stays."""
    if is_ordered(exchange):
        return
    whole = np.square(buckets).sum(1)
    for rung in range(len(ladder)):
        received = exchanged(exchange, buckets, ladder, rung)
        other = exchanged(exchange, buckets[::-1], ladder, rung)
        for x, y in zip(received[:4], other[:4], strict=True):
            assert_near(exchange, y[::-1], x, whole)


def exchanges_like_its_oracle(exchange: Any, buckets: np.ndarray, ladder: Any) -> None:
    """Mean, residual and energies are those of the oracle."""
    buckets = _off_borders(exchange, buckets)
    for rung, factor in enumerate(ladder):
        received = exchanged(exchange, buckets, ladder, rung)
        assert_like_oracle(exchange, buckets, factor, rung, received)


def is_the_same_alone(exchange: Any, buckets: np.ndarray, ladder: Any) -> None:
    """Without an axis it does what its oracle does with one replica."""
    alone, buckets = _jitted_step(exchange, ladder, is_alone=True), buckets[:1]
    buckets = _off_borders(exchange, buckets)
    for rung, factor in enumerate(ladder):
        received = alone(buckets[0], np.int32(rung))
        received = jax.tree.map(lambda x: np.asarray(x)[None], received)
        assert_like_oracle(exchange, buckets, factor, rung, received)
        own = np.column_stack([received.energies, received.energy])
        assert_same(received.mean_energies, own)


def _off_borders(exchange: Any, buckets: np.ndarray) -> np.ndarray:
    """Return other numbers where dyadic ones, and means, lie between two codes."""
    if not is_any(exchange, gravac.Quantized, gravac.QuantizedTopK):
        return buckets
    draw = np.random.default_rng(0).standard_normal
    return draw(buckets.shape).astype(np.float32)


def assert_like_oracle(
    exchange: Any, buckets: np.ndarray, factor: float, rung: int, received: Exchanged
) -> None:
    expected = _oracles.look_up(_oracles.EXCHANGES, exchange)(exchange, buckets, factor)
    sizes, whole = np.abs(buckets), np.square(buckets).sum(1)
    assert_near(exchange, received.mean[0], expected.mean, sizes)
    assert_near(exchange, received.residual, expected.residuals, sizes)
    assert_near(exchange, received.energies[:, rung], expected.energies, whole)


EXCHANGE_LAWS = (
    averages_what_was_sent,
    agrees_on_all_replicas,
    sends_everything_at_factor_1,
    knows_what_it_sent,
    sends_alike_looking_or_not,
    declares_its_bytes,
    averages_energies,
    ignores_the_order_of_replicas,
    exchanges_like_its_oracle,
    is_the_same_alone,
)


# Memories: each law takes a memory, the gradients of a run, `[steps, n]` integers, and
# a mask `[steps, n]` of the entries that are sent. ---------------------------------


@functools.cache
def _jitted_memory_step(memory: Any) -> Any:
    def step(gradient: Any, is_sent: Any, state: Any) -> Any:
        compensated, state = memory.compensate(gradient, state)
        residual = jnp.where(is_sent, 0, compensated)
        state = memory.retain(residual, compensated, state)
        return compensated, residual, state

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


def _as_kept_by(oracle: Any, compensated: Any, residual: Any) -> np.ndarray:
    """Return the residual, with the oracle's own bits where nothing was sent."""
    return np.where(residual == compensated, oracle.compensated, residual)


def telescopes(memory: Any, gradients: np.ndarray, is_sent: np.ndarray) -> None:
    """What was sent plus what is held or lost is what it made of gradients."""
    oracle = _oracles.look_up(_oracles.MEMORIES, memory)(memory, gradients.shape[1])
    compensated, residuals, states = remembered(memory, gradients, is_sent)
    for gradient, x, residual in zip(gradients, compensated, residuals, strict=True):
        oracle.feed(gradient)
        oracle.keep(_as_kept_by(oracle, x, residual))
    add = lambda parts: np.sum(np.asarray(parts, np.float64), 0)
    held = np.asarray(memory.held(states[-1], gradients.shape[1]))
    total = add(compensated) - add(residuals) + held + oracle.lost
    # Each addition to a residual rounds, where it is not one of integers.
    is_exact = not np.any(oracle.made % 1)
    rtol = 0 if is_exact else 2.0**-23 + oracle.rtol
    assert (np.abs(total - oracle.made) <= rtol * add(np.abs(compensated))).all()


def sleeps_through_a_skipped_step(
    memory: Any, gradients: np.ndarray, is_sent: np.ndarray
) -> None:
    """`retain` of all that is held, with nothing sent, leaves the state as it was."""
    *_, states = remembered(memory, gradients, is_sent)
    for state in states:
        held = memory.held(state, gradients.shape[1])
        assert_same(memory.retain(held, held, state), state)


def keeps_its_form(memory: Any, gradients: np.ndarray, is_sent: np.ndarray) -> None:
    """State and compensated gradient keep their structure, shapes and dtypes."""
    compensated, _, states = remembered(memory, gradients, is_sent)
    assert form(compensated) == form(list(gradients))
    assert form(states[1:]) == [form(states[0])] * len(gradients)


def remembers_like_its_oracle(
    memory: Any, gradients: np.ndarray, is_sent: np.ndarray
) -> None:
    """Each compensated gradient is the oracle's."""
    oracle = _oracles.look_up(_oracles.MEMORIES, memory)(memory, gradients.shape[1])
    compensated, residuals, _ = remembered(memory, gradients, is_sent)
    for gradient, x, residual in zip(gradients, compensated, residuals, strict=True):
        expected = oracle.feed(gradient)
        np.testing.assert_allclose(x, expected, rtol=oracle.rtol, atol=oracle.rtol)
        oracle.keep(_as_kept_by(oracle, x, residual))


MEMORY_LAWS = (
    telescopes,
    sleeps_through_a_skipped_step,
    keeps_its_form,
    remembers_like_its_oracle,
)


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


def steps_of(evidence: Evidence) -> list[Evidence]:
    """Return the evidence step by step."""
    arrays, replicas = evidence._replace(replicas=None), evidence.replicas
    at = lambda i: jax.tree.map(lambda x: x[i], arrays)._replace(replicas=replicas)
    return [at(i) for i in range(len(evidence.step))]


def steady(evidence: Evidence) -> Evidence:
    """Return the evidence of the first step, repeated."""
    repeat = lambda x: np.repeat(x[:1], len(x), axis=0)
    first = jax.tree.map(repeat, evidence._replace(replicas=None))
    return first._replace(step=evidence.step, replicas=evidence.replicas)


def stays_on_the_ladder(controller: Any, evidence: Evidence) -> None:
    """Every rung is on the ladder, also every rung in the state."""
    oracle = _oracles.look_up(_oracles.CONTROLLERS, controller)
    rungs, states = decided(controller, evidence)
    lengths = len(getattr(controller, "rounds", (1,)))  # of rounds, to choose from
    assert rungs.max() < len(controller.ladder)
    for x in (rungs, *oracle.rungs_of_state(states)):
        assert x.dtype == np.int32
        assert x.min() >= 0
        assert x.max() < len(controller.ladder) * lengths


def compiles_once(controller: Any, evidence: Evidence) -> None:
    """The state keeps its form, so one executable serves all steps."""
    decide: Any = jax.jit(
        lambda e, state: controller.decide(
            e._replace(replicas=evidence.replicas), state
        )
    )
    first, state = controller.init()
    assert form(first) == ((), "int32", False)
    assert 0 <= first < len(controller.ladder)
    for e in steps_of(evidence)[:3]:
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
    """Infinite or NaN energies in one step change no later decision."""
    calm = steady(evidence)
    rungs, _ = decided(controller, calm)
    for energy in (np.inf, np.nan):
        copies = jax.tree.map(np.copy, calm._replace(replicas=None))
        bad = copies._replace(replicas=evidence.replicas)
        bad.energies[BAD_STEP] = bad.energy[BAD_STEP] = energy
        bad_rungs, states = decided(controller, bad)
        assert_same(np.delete(bad_rungs, BAD_STEP), np.delete(rungs, BAD_STEP))
        assert not any(np.isinf(x).any() for x in jax.tree.leaves(states))


def believes_only_looks(controller: Any, evidence: Evidence) -> None:
    """Energies of other rungs in a step that does not look change no decision."""
    looks = np.array([bool(controller.looks(i)) for i in evidence.step])
    only = lambda x, other: np.where(looks[:, None], x, other).astype(np.float32)
    seen = only(evidence.gradient_energies, 0)
    evidence = evidence._replace(gradient_energies=seen)
    rungs, _ = decided(controller, evidence)
    for other in (0.0, 1e3):
        energies = only(evidence.energies, other)
        found, _ = decided(controller, evidence._replace(energies=energies))
        assert_same(found, rungs)


def decides_like_its_oracle(controller: Any, evidence: Evidence) -> None:
    """Every decision is the oracle's, and no comparison of it is close to a tie."""
    oracle = _oracles.look_up(_oracles.CONTROLLERS, controller)
    rungs, states = decided(controller, evidence)
    expected = list(oracle.decisions(controller, steps_of(evidence)))
    assert min(x.margin for x in expected) > MARGIN, "choose another seed"
    assert rungs.tolist() == [x.rung for x in expected]
    in_state = [x.tolist() for x in oracle.rungs_of_state(states)]
    by_step = zip(*(x.rungs_of_state for x in expected), strict=True)
    assert in_state == [list(x) for x in by_step]


CONTROLLER_LAWS = (
    stays_on_the_ladder,
    compiles_once,
    decides_alike,
    survives_overflow,
    believes_only_looks,
    decides_like_its_oracle,
)
