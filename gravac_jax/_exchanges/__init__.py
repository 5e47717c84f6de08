"""Exchanges turn the buckets of all replicas into one mean.

A new one is a file here, a line in `EXCHANGES`, a name in the package's front door
and an oracle in the tests.
"""

from gravac_jax._exchanges.allgather import AllGather
from gravac_jax._exchanges.cheapest import Cheapest
from gravac_jax._exchanges.dense import DenseMean
from gravac_jax._exchanges.dense16 import DenseMean16
from gravac_jax._exchanges.leader import LeaderIndices
from gravac_jax._exchanges.lowrank import LowRank
from gravac_jax._exchanges.lowrank import by_rank as by_rank
from gravac_jax._exchanges.randomk import SharedRandomK

EXCHANGES = (
    AllGather,
    Cheapest,
    DenseMean,
    DenseMean16,
    LeaderIndices,
    LowRank,
    SharedRandomK,
)
