"""Every compressor keeps every law, and chooses what its oracle chooses."""

import _examples
import _laws
import pytest

from gravac_jax._compressors import COMPRESSORS


@pytest.mark.parametrize("example", _examples.BUCKETS)
@pytest.mark.parametrize("law", _laws.COMPRESSOR_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", COMPRESSORS, ids=lambda kind: kind.__name__)
def test_every_compressor_keeps_the_law(kind, law, example):
    bucket, factor = _examples.BUCKETS[example]
    law(kind(), bucket, factor)
