"""Components that are written outside the package, with public names only.

One of each family keeps the laws of its family and trains a model: the loss falls, and
the replicas agree. They serve as templates, too.
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
from _harness import N, agreed, assert_same, make_mesh

import gravac_jax as gravac
from gravac_jax._encodings.ladder import Ladder


@dataclasses.dataclass(frozen=True, repr=False)
class Windows(gravac.Encoding):
    """Averages a window of consecutive entries, which begins at a random one."""

    factor: float

    def _entries(self, n):
        return max(1, int(n / self.factor))

    def traffic(self, bucket, replicas):
        return gravac.Dense().traffic(gravac.Bucket(self._entries(bucket.n)), replicas)

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


@dataclasses.dataclass(frozen=True, repr=False)
class OneUpOneDown(gravac.Controller):
    """Climbs after ten steps of a good gain, and falls a rung after a bad one."""

    looks_at = "bucket"
    ladder: tuple[gravac.Encoding, ...]
    least_gain: float = 0.1

    def init(self):
        return jnp.int32(0), (jnp.int32(0), jnp.int32(0))

    def decide(self, evidence, state):
        rung, good_steps = state  # of a good gain, one after the other
        energies = jnp.where(jnp.isfinite(evidence.energies), evidence.energies, 0)
        is_good = energies[rung] >= self.least_gain * energies[0]
        good_steps = jnp.where(is_good, good_steps + 1, 0)
        step = jnp.where(is_good, (good_steps % 10 == 0).astype(jnp.int32), -1)
        rung = jnp.clip(rung + step, 0, len(self.ladder) - 1)
        return rung, (rung, good_steps)


# The laws of each family, but for those that compare with an oracle. ----------------

LADDER = gravac.Dense(), Windows(4), Windows(16)


# A window is drawn whatever lies in it, so it contracts on average alone.
NOT_KEPT = {_laws.contracts, _laws.telescopes, _laws.is_the_same_alone}
NOT_KEPT |= {_laws.is_like_its_oracle, _laws.remembers_like_its_oracle}  # none is known
BESIDE_BITS = (gravac.Bits(2, row_entries=32), Windows(64))
BUCKET = _laws.bucket_of(_examples.EXACT)
EVIDENCE = _examples.evidence(3, seed=0)
COMPONENTS = [
    (_laws.ENCODING_LAWS + _laws.LAWS_OF_ONE, Windows(4), _examples.EXACT),
    (_laws.LADDER_LAWS, Ladder(BESIDE_BITS, BUCKET, True), _examples.EXACT),
    (_laws.MEMORY_LAWS, TwoStepMean(), _examples.GRADIENTS, _examples.IS_SENT),
    ((_laws.compiles_once, _laws.decides_alike), OneUpOneDown(LADDER), EVIDENCE),
]
CASES = [
    pytest.param(law, given, id=f"{type(given[0]).__name__}-{law.__name__}")
    for laws, *given in COMPONENTS
    for law in laws
    if law not in NOT_KEPT
]


@pytest.mark.parametrize(("law", "given"), CASES)
def test_the_component_keeps_the_law(law, given):
    law(*given)


class InSixes(Windows):
    """Asks for buckets of so many entries more, up to a multiple of six."""

    def padded_size(self, n):
        return -(-n // 6) * 6


class TooSmall(Windows):
    """Asks for buckets that are too small."""

    def padded_size(self, n):
        return n - 1


class TellsNothing(Windows):
    """Lets no figures travel with its messages."""

    def exchange(self, x, state, *, comm, **others):
        return super().exchange(x, state, comm=gravac.Comm(comm.axis_name), **others)


class EstimatesNothing(Windows):
    """Does not say what it would send."""

    share = gravac.Encoding.share


def updated(send, grads, axis_name=None):
    """Return what comes of a step of one replica, or of several: `[replicas, n]`."""
    tx = gravac.transform(axis_name, send=send, compress=True)
    update = lambda grads: tx.update(grads, tx.init(grads))
    mapped = jax.vmap(update, axis_name=axis_name) if axis_name else update
    return jax.jit(mapped)(grads)


def test_an_encoding_of_ones_own_says_how_large_its_buckets_are():
    grads = {"a": np.ones((5, 2), np.float32), "b": np.ones(4, np.float32)}
    updates, state = updated(InSixes(4), grads)
    (bucket, _) = jax.tree.leaves(state.local.memory)
    assert bucket.size == 18
    assert not np.any(bucket[14:])
    assert sum(x.sum() for x in updates.values()) + bucket[:14].sum() == 14
    with pytest.raises(ValueError, match=r"returned \[13\] for \[14\] entries"):
        updated(TooSmall(4), grads)


def test_figures_are_known_though_an_encoding_takes_none_along():
    grads = np.arange(N * 64, dtype=np.float32).reshape(N, 64)
    sends = Windows(4), TellsNothing(4)
    (first, one), (second, other) = (updated(x, grads, "data") for x in sends)
    assert_same((first, one.info), (second, other.info))


def test_an_encoding_that_estimates_nothing_is_for_controllers_that_ask_nothing():
    ladder, grads = (gravac.Dense(), EstimatesNothing(4)), np.ones(64, np.float32)
    _, state = updated(gravac.Scheduled(ladder, starts=(0,)), grads)
    assert state.info.rung == 1
    with pytest.raises(NotImplementedError, match=r"EstimatesNothing\(4\).*`share`"):
        updated(OneUpOneDown(ladder), grads)


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
}


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"] - batch @ TRUE) ** 2)


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_is_trained_with_it(name):
    tx = optax.chain(gravac.transform(compress=True, **RECIPES[name]), optax.sgd(0.2))
    step = gravac.train_step(loss_of, tx, make_mesh())
    state, losses, factors = step.init({"w": jnp.zeros((16, 8))}), [], []
    for batch in INPUTS:
        *state, loss = step(*state, batch)
        losses.append(float(np.mean(loss)))
        factors.append(float(optax.tree.get(state[1], "StepInfo").factor))
    assert losses[-1] < 0.5 * losses[0]
    assert max(factors) > 1
    jax.tree.map(agreed, state[0])  # raises where replicas differ
