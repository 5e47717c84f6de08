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
from _harness import assert_same, choices

import gravac_jax as gravac


@dataclasses.dataclass(frozen=True)
class Above(gravac.Compressor):
    """Sends what is larger than a share of the largest entry."""

    share: float = 0.25

    def mark(self, bucket, state, wanted):
        sizes = jnp.abs(bucket)
        least = jnp.maximum(self.share * jnp.max(sizes), jnp.finfo(jnp.float32).tiny)
        bits = jax.lax.bitcast_convert_type(least, jnp.int32)
        return gravac.Choice.from_threshold(bucket, bits), state


@dataclasses.dataclass(frozen=True)
class Windows(gravac.Exchange):
    """Averages a window of consecutive entries, which begins at a random one."""

    @property
    def is_blind(self):
        return True

    def traffic(self, n, factor, replicas):
        k, others = max(1, int(n / factor)), replicas - 1
        return gravac.Traffic(k, 4 * k, 2 * others / replicas * 4 * k, 2 * others)

    def prepare(self, bucket, state, rungs, key, comm):
        return jax.random.randint(key, (), 0, bucket.size)

    def send(self, bucket, prepared, k, comm):
        mean = comm.mean(jnp.roll(bucket, -prepared)[:k])
        return jnp.roll(jnp.pad(mean, (0, bucket.size - k)), prepared), ()

    def conclude(self, bucket, state, prepared, found, rungs):
        places = jnp.arange(rungs.n, dtype=jnp.int32)
        is_kept = (places - prepared) % rungs.n >= rungs.sent_count
        residual = jnp.where(is_kept, bucket, 0)
        energy, counts = jnp.sum(bucket**2), jnp.asarray(rungs.counts, jnp.float32)
        sent = energy - jnp.sum(residual**2)
        energies = jnp.where(rungs.is_taken, sent, counts / rungs.n * energy)
        return gravac.Kept(residual, energies, energy), state


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


@dataclasses.dataclass(frozen=True)
class OneUpOneDown(gravac.Controller):
    """Climbs after ten steps of a good gain, and falls a rung after a bad one."""

    ladder: tuple[float, ...] = (1, 4, 16)
    least_gain: float = 0.3

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


def laws_but(laws, *others):
    return [law for law in laws if law not in others]


@pytest.mark.parametrize(
    "bucket", choices(["gaussian", "ties"], lambda x: x == "gaussian")
)
@pytest.mark.parametrize(
    "law", laws_but(_laws.COMPRESSOR_LAWS, _laws.selects_like_its_oracle)
)
def test_the_compressor_keeps_the_law(law, bucket):
    law(Above(), *_examples.BUCKETS[bucket])


@pytest.mark.parametrize(
    "law",
    laws_but(
        _laws.EXCHANGE_LAWS, _laws.exchanges_like_its_oracle, _laws.is_the_same_alone
    ),
)
def test_the_exchange_keeps_the_law(law):
    law(Windows(), _examples.EXCHANGED, _examples.LADDER)


class Wrapped(Windows):
    """Overrides `exchange` itself."""

    def exchange(self, bucket, state, rung, *, figures=(), **others):
        exchanged, state = super().exchange(bucket, state, rung, **others)
        figures = others["comm"].mean(figures)
        return exchanged._replace(figures=figures), state


class InSixes(Windows):
    """Asks for buckets of so many entries more, up to a multiple of six."""

    def padded_size(self, n):
        return -(-n // 6) * 6


class TooSmall(Windows):
    """Asks for buckets that are too small."""

    def padded_size(self, n):
        return n - 1


def test_an_exchange_of_ones_own_says_how_large_its_buckets_are():
    grads = {"a": np.ones((5, 2), np.float32), "b": np.ones(4, np.float32)}
    make = lambda exchange: gravac.transform(
        None, exchange=exchange, compress=True, controller=gravac.Fixed(4)
    )
    tx = make(InSixes())
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    (bucket, _) = jax.tree.leaves(state.local.memory)
    assert bucket.size == 18
    assert not np.any(bucket[14:])
    kept = bucket[:14].sum()
    assert sum(x.sum() for x in updates.values()) + kept == 14
    dense = gravac.DenseMean().traffic(14, 1, 1)
    assert state.info.dense_bytes == dense.payload_bytes
    with pytest.raises(ValueError, match=r"returned \[13\] for \[14\] entries"):
        make(TooSmall()).init(grads)


class Forgetful(Windows):
    """Takes figures, and averages none."""

    def exchange(self, bucket, state, rung, *, figures=(), **others):
        del figures
        return super().exchange(bucket, state, rung, **others)


def test_an_exchange_of_ones_own_averages_the_figures_that_it_is_given():
    grads = np.ones(64, np.float32)
    updates = []
    for exchange in (Windows(), Wrapped()):
        tx = gravac.transform(
            None, exchange=exchange, compress=True, controller=gravac.Fixed(4)
        )
        updates.append(tx.update(grads, tx.init(grads))[0])
    assert_same(*updates)
    tx = gravac.transform(
        None, exchange=Forgetful(), compress=True, controller=gravac.Fixed(4)
    )
    with pytest.raises(TypeError, match=r"Forgetful\.exchange did not average"):
        tx.update(grads, tx.init(grads))


@pytest.mark.parametrize(
    "law",
    laws_but(_laws.MEMORY_LAWS, _laws.telescopes, _laws.remembers_like_its_oracle),
)
def test_the_memory_keeps_the_law(law):
    law(TwoStepMean(), _examples.GRADIENTS, _examples.IS_SENT)


@pytest.mark.parametrize("law", [_laws.compiles_once, _laws.decides_alike])
def test_the_controller_keeps_the_law(law):
    law(OneUpOneDown(), _examples.evidence(3, seed=0))


# Training. -------------------------------------------------------------------------

N, STEPS = 4, 60
RNG = np.random.default_rng(0)
TRUE = RNG.standard_normal((16, 8)).astype(np.float32)
INPUTS = RNG.standard_normal((STEPS, N * 8, 16)).astype(np.float32)

RECIPES = {
    "compressor, memory": {"compressor": Above(), "memory": TwoStepMean()},
    "exchange, controller": {"exchange": Windows(), "controller": OneUpOneDown()},
    "clip": {"clip": Signs(), "exchange": gravac.Quantized(32)},
}


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"] - batch @ TRUE) ** 2)


def trained(recipe):
    """Return (loss, sent, gradients, memory, factor) of each step of a run."""
    recipe = {
        "controller": gravac.Scheduled(lambda i: jnp.where(i > 5, 8, 1), (1, 8)),
        **recipe,
    }
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
