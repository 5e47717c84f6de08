"""Error feedback: a memory keeps what was not sent, and adds it to what comes next.

A new memory is a file here, a line in `MEMORIES`, a name in the package's front door,
and an oracle in the tests.
"""

from gravac_jax._error_feedback.base import Memory
from gravac_jax._error_feedback.momentum import Momentum
from gravac_jax._error_feedback.residual import Residual
from gravac_jax._error_feedback.steps import Steps

MEMORIES: tuple[type[Memory], ...] = (Momentum, Residual, Steps)
