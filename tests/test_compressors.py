"""Every compressor keeps every law, and chooses what its oracle chooses."""

import _examples
import _laws
import pytest

import gravac_jax as gravac
from gravac_jax._compressors import COMPRESSORS

# Slow to compile, and no bucket is special to them.
ONE_EXAMPLE_DOES = (_laws.is_itself_under_jit, _laws.is_itself_under_vmap)
CASES = [
    pytest.param(law, example, id=f"{law.__name__}-{example}")
    for law in _laws.COMPRESSOR_LAWS
    for example in (["ties"] if law in ONE_EXAMPLE_DOES else _examples.BUCKETS)
]


# The default and the yardstick; the others in the slow run.
QUICK = (gravac.Identity, gravac.Threshold, gravac.TopK)
MEMBERS = [
    pytest.param(x, marks=() if isinstance(x, QUICK) else pytest.mark.slow, id=repr(x))
    for x in _examples.members(COMPRESSORS)
]


@pytest.mark.parametrize(("law", "example"), CASES)
@pytest.mark.parametrize("compressor", MEMBERS)
def test_every_compressor_keeps_the_law(compressor, law, example):
    bucket, factor = _examples.BUCKETS[example]
    law(compressor, bucket, factor)
