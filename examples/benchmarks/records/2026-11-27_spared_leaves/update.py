"""Time updates of a model with small leaves between two virtual CPU devices.

    PYTHONPATH=CHECKOUT:examples/benchmarks python update.py NAME

It prints a line of JSON, with milliseconds of `common.update_time`. CHECKOUT is what is
timed, and NAME is its name.
"""

import json
import sys

import optax
from common.update_time import milliseconds

import gravac_jax as gravac

SMALL, LARGE = 512, 512 * 512
SIZES = [*[SMALL] * 3, *[LARGE] * 4, *[SMALL] * 4, *[LARGE] * 8, *[2 * LARGE] * 2]


def transform(factor: float, bits: int = 2) -> optax.GradientTransformation:
    """Return a transform that sends few bits of all leaves, or some in turn."""
    return gravac.transform(
        compress=True,
        controller=gravac.Fixed(factor),
        exchange=gravac.QuantizedAllReduce(least_bits=bits),
    )


found = {
    "two bits": milliseconds(transform(16), SIZES),
    "in 4 turns": milliseconds(transform(64), SIZES),
    "one bit": milliseconds(transform(32, bits=1), SIZES),
}
print(json.dumps({"name": sys.argv[1], "entries": sum(SIZES), **found}))
