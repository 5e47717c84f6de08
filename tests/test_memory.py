"""Every memory keeps every law, and remembers what its oracle remembers."""

import _examples
import _laws
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import choices

import gravac_jax as gravac
from gravac_jax._memory import MEMORIES

# What is sent of an arbitrary run is off by at most this share of all that was
# selected from: a rounding in the addition of each step, and one in the sum.
RUN_RTOL = 2**-23


@pytest.mark.parametrize("law", _laws.MEMORY_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    "memory",
    choices(
        _examples.members(MEMORIES), lambda x: getattr(x, "masking", "none") == "none"
    ),
)
def test_every_memory_keeps_the_law(memory, law):
    law(memory, _examples.GRADIENTS, _examples.IS_SENT)


@pytest.mark.parametrize("memory", [gravac.NoMemory(), gravac.Residual()], ids=repr)
def test_the_first_step_selects_from_the_gradient_itself(memory):
    gradient = jnp.asarray(_examples.GRADIENTS[0])
    compensated, _ = memory.compensate(gradient, memory.init(gradient.size))
    _laws.assert_same(compensated, gradient)


def test_without_memory_there_is_no_state():
    assert gravac.NoMemory().init(1000) == ()


def test_the_residual_is_one_float32_vector_of_the_size_of_the_bucket():
    assert _laws.form(gravac.Residual().init(7)).residual == ((7,), "float32", False)


def test_a_dense_step_empties_the_residual():
    gradients, is_sent = _examples.GRADIENTS[:2], np.array([[False], [True]])
    _, _, states = _laws.remembered(gravac.Residual(), gradients, is_sent)
    _laws.assert_same(states[1].residual, gradients[0])
    assert not np.asarray(states[2].residual).any()


def test_arbitrary_gradients_telescope_to_rounding():
    shape = _examples.GRADIENTS.shape
    gradients = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    compensated, residuals, states = _laws.remembered(
        gravac.Residual(), gradients, _examples.IS_SENT
    )
    exact = lambda x: np.sum(np.asarray(x, np.float64), 0)
    delivered = exact(compensated) - exact(residuals) + exact(states[-1])
    off = np.abs(delivered - exact(gradients))
    assert (off <= RUN_RTOL * exact(np.abs(compensated))).all()
