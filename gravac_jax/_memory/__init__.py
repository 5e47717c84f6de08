"""Error feedback: a memory keeps what was not sent, and adds it to what comes next.

A new memory is a file here, a line in `MEMORIES`, a name in the package's front door,
and an oracle in the tests.
"""

from gravac_jax._memory.base import Memory, Residual
from gravac_jax._memory.momentum import Momentum
from gravac_jax._memory.own_optimizer import OwnOptimizer

MEMORIES: tuple[type[Memory], ...] = (Momentum, Residual, OwnOptimizer)
