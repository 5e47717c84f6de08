"""Compressors choose what to send.

A new one is a file here, a line in `COMPRESSORS`, a name in the package's front door
and an oracle in the tests; every law then holds it to account.
"""

from gravac_jax._compressors.approx import ApproxTopK
from gravac_jax._compressors.blocks import BlockTopK
from gravac_jax._compressors.identity import Identity
from gravac_jax._compressors.randomk import RandomK
from gravac_jax._compressors.redsync import RedSync
from gravac_jax._compressors.sampled import SampledTopK
from gravac_jax._compressors.sidco import SIDCo
from gravac_jax._compressors.threshold import Threshold
from gravac_jax._compressors.topk import TopK

COMPRESSORS = (
    ApproxTopK,
    BlockTopK,
    Identity,
    RandomK,
    RedSync,
    SIDCo,
    SampledTopK,
    Threshold,
    TopK,
)
