"""1-bit Adam is Adam, and then the paper's algorithm with frozen second moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _oracles import few_bits
from training.one_bit_adam import one_bit_adam

import gravac_jax as gravac

ENTRIES, STEPS, WARM_UP = 4096, 6, 3
RATE, MAX_NORM = 0.01, 60.0
BUCKET = gravac.Bucket(ENTRIES, ((ENTRIES,),))
SEND = gravac.Scheduled((gravac.Dense(), gravac.Bits(1)), (WARM_UP,))


def gradients(replicas):
    shape = STEPS, replicas, ENTRIES
    found = np.random.default_rng(0).normal(size=shape) + np.linspace(0, 2, ENTRIES)
    return found.astype(np.float32)


def trained(grads):
    tx = optax.chain(one_bit_adam(SEND, MAX_NORM), optax.scale(-RATE))

    def train_step(params, opt_state, mine):
        updates, opt_state = tx.update({"w": mine[0]}, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    replicas = grads.shape[1]
    params = {"w": jnp.zeros(ENTRIES)}
    state = gravac.place((params, tx.init(params)), replicas)
    step = gravac.simulate(train_step, replicas)
    found = []
    for mine in grads:
        state = step(*state, mine)
        found.append(np.asarray(state[0]["w"]))
    return np.stack(found)


def clipped(grads):
    """Clip each replica's gradient at sqrt(N) times the bound."""
    norms = np.linalg.norm(grads, axis=-1, keepdims=True)
    return grads * np.minimum(1, MAX_NORM * grads.shape[1] ** 0.5 / norms)


def algorithm_1(grads):
    """Tang et al., Algorithm 1, with Adam's correction of the moments' bias."""
    replicas = grads.shape[1]
    first, second, moved = np.zeros((3, ENTRIES))
    held_back, found = np.zeros((replicas, ENTRIES)), []
    for step, mine in enumerate(clipped(grads.astype(np.float64)), start=1):
        moments = 0.9 * first + 0.1 * mine
        if step <= WARM_UP:
            second = 0.999 * second + 0.001 * mine.mean(0) ** 2
            corrected = second / (1 - 0.999**step)
            first = moments.mean(0)
        else:
            sent = few_bits(SEND.ladder[1], BUCKET, moments + held_back, (), step)
            first, held_back = sent.mean, sent.residuals
        direction = first / (1 - 0.9**step) / (np.sqrt(corrected) + 1e-8)
        moved = moved - RATE * direction
        found.append(moved)
    return np.stack(found)


@pytest.mark.parametrize("replicas", [2, 4])
def test_1_bit_adam_is_the_papers(replicas):
    grads = gradients(replicas)  # of norms that are clipped with two replicas only
    with jax.numpy_dtype_promotion("standard"):  # Optax's correction needs it
        found = trained(grads)
    np.testing.assert_allclose(found, algorithm_1(grads), atol=2e-5)
