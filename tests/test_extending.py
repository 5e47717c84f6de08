"""Components that are written outside the package, with public names only.

One of each family keeps the laws of its family and trains a model: the loss falls, the
replicas agree, and sent + kept = gradient + residual. They serve as templates, too.
"""

import dataclasses
from typing import NamedTuple

import _examples
import _laws
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _harness import N, assert_same

import gravac_jax as gravac
from gravac_jax._encodings.ladder import Ladder


@dataclasses.dataclass(frozen=True, repr=False)
class Windows(gravac.Encoding):
    """Averages a window of consecutive entries, which begins at a random one."""

    factor: float

    def _entries(self, n):
        return max(1, int(n / self.factor))

    def traffic(self, bucket, replicas):
        window = gravac.Bucket(self._entries(bucket.n))
        return gravac.Dense().traffic(window, replicas)

    def exchange(self, x, state, *, bucket, key, step, comm):
        k, start = self._entries(bucket.n), jax.random.randint(key, (), 0, bucket.n)
        turned = jnp.roll(x, -start)
        energy = jnp.sum(turned[:k] ** 2)
        comm.tell(energy)
        mean = comm.zeros(x).at[:k].set(comm.mean(turned[:k]))
        residual = turned.at[:k].set(0)
        return gravac.Sent(jnp.roll(mean, start), jnp.roll(residual, start), energy), ()

    def share(self, looked, bucket, replicas):
        return jnp.full_like(looked, self._entries(bucket.n) / bucket.n, shape=())


class TwoStepState(NamedTuple):
    """What was not sent, and the last gradient."""

    residual: jax.Array
    last: jax.Array


class TwoStepMean(gravac.Memory):
    """Feeds back what was not sent, and the mean of the last two gradients."""

    def init(self, n):
        return TwoStepState(jnp.zeros(n), jnp.zeros(n))

    def compensate(self, gradient, state):
        fed = state.residual + (gradient + state.last) / 2
        return fed, state._replace(last=gradient)

    def held(self, state, n):
        return state.residual

    def retain(self, residual, compensated, state):
        return state._replace(residual=residual)


class Patience(NamedTuple):
    """How many steps in a row the gain was good."""

    good_steps: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class OneUpOneDown(gravac.Controller):
    """Climbs after ten steps of a good gain, and falls a rung after a bad one."""

    looks_at = "bucket"
    ladder: tuple[gravac.Encoding, ...]
    least_gain: float = 0.1

    def init(self):
        return jnp.int32(0), (jnp.int32(0), Patience(jnp.int32(0)))

    def decide(self, evidence, state):
        rung, patience = state
        energies = jnp.where(jnp.isfinite(evidence.energies), evidence.energies, 0)
        is_good = energies[rung] >= self.least_gain * energies[0]
        good_steps = jnp.where(is_good, patience.good_steps + 1, 0)
        step = jnp.where(is_good, (good_steps % 10 == 0).astype(jnp.int32), -1)
        rung = jnp.clip(rung + step, 0, len(self.ladder) - 1)
        return rung, (rung, Patience(good_steps))


class Signs(gravac.Clip):
    """Bounds every entry by the mean magnitude of its part."""

    def clip(self, parts, norm, replicas):
        bounds = [jnp.mean(jnp.abs(x)) if x.size else 0.0 for x in parts]
        return tuple(jnp.clip(x, -b, b) for x, b in zip(parts, bounds, strict=True))


# The laws of each family; a law that compares with an oracle needs an oracle. -------


LADDER = gravac.Dense(), Windows(4), Windows(16)


def laws_but(laws, *others):
    kept = [law for law in laws if law not in others]
    return pytest.mark.parametrize("law", kept, ids=lambda law: law.__name__)


@laws_but(
    _laws.ENCODING_LAWS + _laws.LAWS_OF_ONE,
    _laws.contracts,  # on average alone: a window is drawn whatever lies in it
    _laws.is_like_its_oracle,
    _laws.is_the_same_alone,
)
def test_the_encoding_keeps_the_law(law):
    law(Windows(4), _examples.EXACT)


@laws_but(_laws.LADDER_LAWS)
def test_the_encoding_keeps_the_law_beside_another(law):
    pair = gravac.Bits(2, row_entries=32), Windows(64)
    bucket = _laws.bucket_of(_examples.EXACT)
    law(Ladder(pair, bucket, is_looked_at=True), _examples.EXACT)


@laws_but(_laws.MEMORY_LAWS, _laws.telescopes, _laws.remembers_like_its_oracle)
def test_the_memory_keeps_the_law(law):
    law(TwoStepMean(), _examples.GRADIENTS, _examples.IS_SENT)


@pytest.mark.parametrize("law", [_laws.compiles_once, _laws.decides_alike])
def test_the_controller_keeps_the_law(law):
    law(OneUpOneDown(LADDER), _examples.evidence(3, seed=0))


class InSixes(Windows):
    """Asks for buckets of so many entries more, up to a multiple of six."""

    def padded_size(self, n):
        return -(-n // 6) * 6


class TooSmall(Windows):
    """Asks for buckets that are too small."""

    def padded_size(self, n):
        return n - 1


def alone(send, grads):
    """Return what comes of a step of one replica."""
    tx = gravac.transform(None, send=send, compress=True)
    return jax.jit(tx.update)(grads, tx.init(grads))


def test_an_encoding_of_ones_own_says_how_large_its_buckets_are():
    grads = {"a": np.ones((5, 2), np.float32), "b": np.ones(4, np.float32)}
    updates, state = alone(InSixes(4), grads)
    (bucket, _) = jax.tree.leaves(state.local.memory)
    assert bucket.size == 18
    assert not np.any(bucket[14:])
    kept = bucket[:14].sum()
    assert sum(x.sum() for x in updates.values()) + kept == 14
    dense = gravac.Dense().traffic(gravac.Bucket(14), 1)
    assert state.info.dense_bytes == dense.payload_bytes
    with pytest.raises(ValueError, match=r"returned \[13\] for \[14\] entries"):
        alone(TooSmall(4), grads)


class TellsNothing(Windows):
    """Lets no figures travel with its messages."""

    def exchange(self, x, state, *, comm, **others):
        return super().exchange(x, state, comm=gravac.Comm(comm.axis_name), **others)


def test_figures_are_known_though_an_encoding_takes_none_along():
    grads = np.arange(N * 64, dtype=np.float32).reshape(N, 64)
    found = []
    for send in (Windows(4), TellsNothing(4)):
        tx = gravac.transform(send=send, compress=True)
        state = tx.init(grads[0])
        update = jax.vmap(lambda x: tx.update(x, state), axis_name="data")  # noqa: B023
        updates, state = jax.jit(update)(grads)
        found.append((updates, state.info))
    assert_same(*found)


class EstimatesNothing(Windows):
    """Does not say what it would send."""

    share = gravac.Encoding.share


def test_an_encoding_that_estimates_nothing_is_for_controllers_that_ask_nothing():
    ladder, grads = (gravac.Dense(), EstimatesNothing(4)), np.ones(64, np.float32)
    _, state = alone(gravac.Scheduled(ladder, starts=(0,)), grads)
    assert state.info.rung == 1
    with pytest.raises(NotImplementedError, match=r"EstimatesNothing\(4\).*`share`"):
        alone(OneUpOneDown(ladder), grads)


# Training. -------------------------------------------------------------------------

STEPS = 60
RNG = np.random.default_rng(0)
TRUE = RNG.standard_normal((16, 8)).astype(np.float32)
INPUTS = RNG.standard_normal((STEPS, N * 8, 16)).astype(np.float32)

RECIPES = {
    "encoding, memory": {
        "send": gravac.Scheduled((gravac.Dense(), Windows(8)), starts=(6,)),
        "memory": TwoStepMean(),
    },
    "encoding, controller": {"send": OneUpOneDown(LADDER)},
    "clip": {"clip": Signs(), "send": gravac.Bits(2, row_entries=32)},
}


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"] - batch @ TRUE) ** 2)


def trained(recipe):
    """Return (loss, sent, gradients, memory, factor) of each step of a run."""
    exchange = gravac.transform(compress=True, **recipe)
    tx = optax.sgd(0.2)

    def step(params, states, batch):
        loss, grads = gravac.value_and_grad(loss_of, "data")(params, batch)
        sent, transform = exchange.update(grads, states[0], params)
        updates, optimizer = tx.update(sent, states[1], params)
        gathered = jax.lax.all_gather(grads, "data")
        params = optax.apply_updates(params, updates)
        return params, (transform, optimizer), loss, sent, gathered

    params = {"w": jnp.zeros((16, 8))}
    mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])
    states = exchange.init(params), tx.init(params)
    params, states = gravac.place((params, states), mesh)
    run = gravac.data_parallel(step, mesh, donate=False)
    story = []
    for batch in INPUTS:
        params, states, loss, sent, grads = run(params, states, batch)
        assert all(x.is_fully_replicated for x in jax.tree.leaves((params, sent)))
        copies = [np.asarray(x.data) for x in params["w"].addressable_shards]
        assert len({x.tobytes() for x in copies}) == 1
        kept, factor = states[0].local.memory[0], states[0].info.factor
        seen = (loss, sent, grads, kept, factor)
        story.append(jax.tree.map(np.asarray, seen))
    return story


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_is_trained_with_it(name):
    story = trained(RECIPES[name])
    losses = [loss for loss, *_ in story]
    assert losses[-1] < 0.5 * losses[0]
    assert max(factor for *_, factor in story) > 1
    if "clip" in RECIPES[name]:
        return  # what is clipped is not in the story
    before, last = np.zeros((2, N, TRUE.size))
    for _, sent, grads, memory, _ in story:
        kept, gradient = np.float64(memory.residual), grads["w"].reshape(N, -1)
        fed = (gradient + last) / 2 if "memory" in RECIPES[name] else gradient
        total = N * sent["w"].ravel() + kept.sum(0)
        bound = 2.0**-22 * (np.abs(before) + np.abs(gradient) + np.abs(last)).sum(0)
        assert (np.abs(total - (before + fed).sum(0)) <= bound + 1e-9).all()
        before, last = kept, np.float64(gradient)
