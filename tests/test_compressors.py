"""Every compressor keeps every law, and chooses what its oracle chooses."""

import _examples
import _laws
import pytest

from gravac_jax._compressors import COMPRESSORS


@pytest.mark.parametrize("example", _examples.BUCKETS)
@pytest.mark.parametrize("law", _laws.COMPRESSOR_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("compressor", _examples.members(COMPRESSORS), ids=repr)
def test_every_compressor_keeps_the_law(compressor, law, example):
    bucket, factor = _examples.BUCKETS[example]
    law(compressor, bucket, factor)
