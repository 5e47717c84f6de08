"""Encodings: what one replica sends of a bucket in one step.

One method is one file: `dense.py`, `bits.py`, `top_k.py`, `low_rank.py`. `base.py` has
the interface. `ladder.py` takes one of several, and `rung_costs.py` adds up what each
costs in all buckets. Below them is arithmetic: `levels.py` rounds rows, `selection.py`
finds the largest entries, and `payload.py` packs them.

A new encoding is a file here, a line in `ENCODINGS`, a name in the package's front
door, and an oracle in the tests.
"""

from gravac_jax._encodings.base import Encoding
from gravac_jax._encodings.bits import Bits
from gravac_jax._encodings.dense import Dense
from gravac_jax._encodings.low_rank import LowRank
from gravac_jax._encodings.top_k import TopK

ENCODINGS: tuple[type[Encoding], ...] = (Bits, Dense, LowRank, TopK)
