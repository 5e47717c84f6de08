"""Compressors choose what to send.

A new one is a file here, a line in `COMPRESSORS`, a name in the package's front door
and an oracle in the tests; every law then holds it to account.
"""

from gravac_jax._compressors.identity import Identity
from gravac_jax._compressors.topk import TopK

COMPRESSORS = (Identity, TopK)
