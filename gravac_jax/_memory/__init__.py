"""Memories keep what was not sent.

A new one is a file here, a line in `MEMORIES`, a name in the package's front door and
an oracle in the tests.
"""

from gravac_jax._memory.adam import Adam
from gravac_jax._memory.momentum import Momentum
from gravac_jax._memory.none import NoMemory
from gravac_jax._memory.residual import Residual

MEMORIES = (Adam, Momentum, NoMemory, Residual)
