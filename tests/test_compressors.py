"""Every compressor keeps every law, and chooses what its oracle chooses."""

import _examples
import _laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _harness import SUM_ROUNDING, N, choices, trajectory

import gravac_jax as gravac
from gravac_jax._compressors import COMPRESSORS

# Slow to compile, and no bucket is special to them.
ONE_EXAMPLE_DOES = (_laws.is_itself_under_jit, _laws.is_itself_under_vmap)
CASES = [
    pytest.param(law, example, id=f"{law.__name__}-{example}")
    for law in _laws.COMPRESSOR_LAWS
    for example in (["ties"] if law in ONE_EXAMPLE_DOES else _examples.BUCKETS)
]


# The default; the others in the slow run.
MEMBERS = choices(
    _examples.members(COMPRESSORS), lambda x: isinstance(x, gravac.Threshold)
)


@pytest.mark.parametrize(("law", "example"), CASES)
@pytest.mark.parametrize("compressor", MEMBERS)
def test_every_compressor_keeps_the_law(compressor, law, example):
    bucket, factor = _examples.BUCKETS[example]
    law(compressor, bucket, factor)


def test_a_short_block_has_its_turn_too():
    compressor, bucket = gravac.BlockTopK(block=4), jnp.ones(10)
    compress = jax.jit(lambda key: compressor.compress(bucket, (), k=1, key=key)[0])
    payloads = jax.vmap(compress)(jax.random.split(jax.random.key(0), 1000))
    blocks = np.bincount(np.ravel(payloads.indices) // 4, minlength=3)
    np.testing.assert_allclose(blocks, [400, 400, 200], atol=4 * np.sqrt(1000) / 2)


class Dense(gravac.Fixed):
    """Dense steps on a ladder, of which none looks at the other rung."""

    ladder = (1.0, 64.0)

    def looks(self, step):
        return step < 0


@pytest.mark.parametrize("how", ["shard_map", "vmap"])
@pytest.mark.parametrize("compressor", MEMBERS)
def test_a_dense_step_that_does_not_look_leaves_the_compressor_as_it_was(
    compressor, how
):
    tx = gravac.transform(compressor=compressor, controller=Dense(1), compress=True)
    rng = np.random.default_rng(0)
    grads = rng.standard_normal((3, N, 256)).astype(np.float32)
    updates, states = trajectory(tx, grads[0, 0], how)(grads)
    np.testing.assert_allclose(updates, grads.mean(1), rtol=0, atol=SUM_ROUNDING * 4)
    assert not states.local.memory[0].residual.any()
    expected = jax.tree.leaves(compressor.init(256))
    for leaf, first in zip(
        jax.tree.leaves(states.local.exchange), expected, strict=True
    ):
        assert np.array_equal(leaf, np.broadcast_to(first, leaf.shape))
