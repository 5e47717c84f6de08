"""Deep Gradient Compression, against its equations written out in NumPy.

The oracle is fed the library's selection: whether an entry was sent shows in what is
held back. With momentum 1/2 and gradients of few bits all of it is exact.
"""

import itertools
import math
import random

import _harness
import _oracles
import jax
import numpy as np
import optax
import pytest
from _harness import COMPRESS, PARAMS

import gravac_jax as gravac

STEPS = 50
M, DECAY, RATE = 0.5, 0.25, 0.125


def gradients(replicas, seed=0):
    """Return integers up to 8, `[STEPS, replicas, ...]`; a few of them are large."""
    rng = np.random.default_rng(seed)
    draw = lambda x: rng.integers(-1, 2, (STEPS, replicas, *x.shape))
    spike = lambda x: rng.random((STEPS, replicas, *x.shape)) < 0.1
    drawn = lambda x: (draw(x) * np.where(spike(x), 8, 1)).astype(np.float32)
    return {name: drawn(x) for name, x in PARAMS.items()}


class Dgc:
    """Sections 3.2 and 3.3 of the paper, for N replicas."""

    def __init__(self, memory, replicas, max_norm, decay):
        self.max_norm, self.decay = max_norm, decay
        self.replicas = [_oracles.Masks(memory, 64) for _ in range(replicas)]
        self.dense = _oracles.Masks(memory, 5)

    def clipped(self, w, b):
        """Return each replica's gradient, clipped at sqrt(N) times the bound."""
        if self.max_norm is None:
            return w, b
        bound = self.max_norm * math.sqrt(len(w))
        exact = np.concatenate([w, b], axis=1).astype(np.float64)
        scale = np.minimum(1, bound / np.linalg.norm(exact, axis=1, keepdims=True))
        return w * scale, b * scale

    def step(self, grads, params, kept):
        """(What is selected from, the update of "w", the update of "b")."""
        w, b = self.clipped(grads["w"].reshape(-1, 64), grads["b"])
        w = w + self.decay * params["w"].ravel()
        b = b + self.decay * params["b"]
        fed = zip(self.replicas, w.astype(np.float32), strict=True)
        compensated = np.stack([own.feed(gradient) for own, gradient in fed])
        for own, mine in zip(self.replicas, kept, strict=True):
            # A sum that cancels here may be a rounding there: it is not sent.
            is_nothing = (mine == 0) & (np.abs(own.compensated) <= 2.0**-20)
            own.compensated = np.where(is_nothing, 0, own.compensated)
            own.keep(np.where(mine == 0, 0, own.compensated))
            own.residual = mine
        mean = b.astype(np.float32).mean(0, dtype=np.float32)
        return compensated, (compensated - kept).mean(0), self.dense.add(mean)


def library(memory, replicas, max_norm, decay, send, grads):
    """Return params, residuals and rungs of every step of the library."""
    clip = max_norm and gravac.ClipByGlobalNorm(max_norm)
    parts = {"memory": memory, "send": send, "weight_decay": decay, "clip": clip}
    tx = optax.chain(gravac.transform(compress=COMPRESS, **parts), optax.sgd(RATE))

    def step(params, opt_state, batch):
        mine = jax.tree.map(lambda x: x[0], batch)
        updates, opt_state = tx.update(mine, opt_state, params)
        params = optax.apply_updates(params, updates)
        local, info = opt_state[0].local, opt_state[0].info
        kept = gravac.Comm("data").gather(local.memory[0].residual.reshape(-1))
        return params, opt_state, (params, kept, info.rung)

    run = gravac.data_parallel(step, replicas)
    state = gravac.place((PARAMS, tx.init(PARAMS)), replicas)
    story = []
    for i in range(STEPS):
        *state, seen = run(*state, _harness.at(grads, i))
        story.append(jax.tree.map(np.asarray, seen))
    return story


EXACT = gravac.TopK(8, select="exact", values="float32")
SENDS = {
    "fixed": EXACT,
    "warm-up": gravac.Scheduled((gravac.Dense(), EXACT), starts=(20,)),
}
OPTIONS = {
    "replicas": (1, 4),
    "nesterov": (False, True),
    "masking": (False, True),
    "max_norm": (None, 4.0),
    "decay": (0.0, DECAY),
    "schedule": tuple(SENDS),
}
CASES = list(itertools.product(*OPTIONS.values()))
random.Random(9).shuffle(CASES)  # one row has several replicas and a bound
# Each option in the default run, any two together in it or in the slow one.
SINGLE = _harness.covering(CASES, enumerate, together=1)
PAIRED = [x for x in _harness.covering(CASES, enumerate, together=2) if x not in SINGLE]


@pytest.mark.parametrize(
    tuple(OPTIONS),
    [*SINGLE, *(pytest.param(*x, marks=pytest.mark.slow) for x in PAIRED)],
)
def test_dgc_is_its_equations(replicas, nesterov, masking, max_norm, decay, schedule):
    memory = gravac.Momentum(M, nesterov=nesterov, masking=masking)
    grads = gradients(replicas)
    story = library(memory, replicas, max_norm, decay, SENDS[schedule], grads)
    oracle = Dgc(memory, replicas, max_norm, decay)
    params = {name: x.astype(np.float64) for name, x in PARAMS.items()}
    rungs = set()
    for i, (received, kept, rung) in enumerate(story):
        rungs.add(int(rung))
        before = params if i == 0 else story[i - 1][0]
        compensated, w, b = oracle.step(_harness.at(grads, i), before, kept)
        off = np.where(kept != 0, kept - compensated, 0)
        # What is held is what was selected from: float32 adds up to 50 of them.
        scale = 1 + np.abs(compensated).max()
        assert np.abs(off).max() <= 2.0**-20 * scale
        for name, update in (("w", w.reshape(8, 8)), ("b", b)):
            expected = before[name] - RATE * update
            bound = 2.0**-20 * (scale + np.abs(before[name]).max())
            assert np.abs(received[name] - expected).max() <= bound
    assert rungs == {"fixed": {0}, "warm-up": {0, 1}}[schedule]
