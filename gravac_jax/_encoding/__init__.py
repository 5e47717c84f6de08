"""Encodings: how the values and the indices of a payload travel.

A new one is a file here, a line in a registry, a name in the package's front door and
an oracle in the tests.
"""

from gravac_jax._encoding.bfloat16 import BFloat16
from gravac_jax._encoding.float16 import Float16
from gravac_jax._encoding.float32 import Float32
from gravac_jax._encoding.int8 import Int8
from gravac_jax._encoding.int32 import Int32
from gravac_jax._encoding.uint16 import UInt16

VALUE_ENCODINGS = (BFloat16, Float16, Float32, Int8)
INDEX_ENCODINGS = (Int32, UInt16)
