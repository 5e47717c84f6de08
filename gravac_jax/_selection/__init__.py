"""Which entries of a bucket are sent, and what they look like on the wire.

A compressor (`compressor.py`) marks entries; `select_entries.py` turns the marks into a
payload and a residual, and `wire_format.py` a payload into bytes. Nothing is sorted:
`quantile.py` finds thresholds by counting, `entries.py` finds marked entries, and
`rungs.py` estimates what other factors would have sent, and `waiting.py` how long
entries wait.

A new compressor is a file here, a line in `COMPRESSORS`, a name in the package's front
door, and an oracle in the tests.
"""

from gravac_jax._selection.compressor import Compressor
from gravac_jax._selection.identity import Identity
from gravac_jax._selection.random_k import RandomK
from gravac_jax._selection.redsync import RedSync
from gravac_jax._selection.sampled import SampledTopK
from gravac_jax._selection.threshold import Threshold
from gravac_jax._selection.top_k import TopK

COMPRESSORS: tuple[type[Compressor], ...] = (
    Identity,
    RandomK,
    RedSync,
    SampledTopK,
    Threshold,
    TopK,
)
