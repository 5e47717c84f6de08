"""Exchanges average the buckets of all replicas.

`base.py` has the interface and everything that exchanges share. A new exchange is a
file here, a line in `EXCHANGES`, a name in the package's front door, and an oracle in
the tests.
"""

from gravac_jax._exchanges.all_gather import AllGather
from gravac_jax._exchanges.base import Exchange
from gravac_jax._exchanges.dense import DenseMean
from gravac_jax._exchanges.leader import LeaderIndices
from gravac_jax._exchanges.low_rank import LowRank
from gravac_jax._exchanges.low_rank import by_rank as by_rank
from gravac_jax._exchanges.mixed import Mixed
from gravac_jax._exchanges.quantized import Quantized
from gravac_jax._exchanges.quantized_all_reduce import QuantizedAllReduce
from gravac_jax._exchanges.quantized_top_k import QuantizedTopK
from gravac_jax._exchanges.random_k import SharedRandomK

EXCHANGES: tuple[type[Exchange], ...] = (
    AllGather,
    DenseMean,
    LeaderIndices,
    LowRank,
    Mixed,
    Quantized,
    QuantizedAllReduce,
    QuantizedTopK,
    SharedRandomK,
)
