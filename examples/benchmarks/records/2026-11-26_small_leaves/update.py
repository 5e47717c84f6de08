"""Time an update in two bits between two virtual CPU devices.

    PYTHONPATH=CHECKOUT:examples/benchmarks python update.py NAME ENTRIES

It prints a line of JSON, with milliseconds of `common.update_time`. CHECKOUT is what is
timed, and NAME is its name.
"""

import json
import sys

from common.update_time import milliseconds

import gravac_jax as gravac

LEAVES = 8

name, entries = sys.argv[1], int(sys.argv[2])
sizes = [entries // LEAVES] * (LEAVES - 1)
sizes.append(entries - sum(sizes))
ladder = gravac.Scheduled(lambda _: 16.0, (1.0, 4.0, 8.0, 16.0, 32.0))
controllers = {"one rung": gravac.Fixed(16), "a ladder": ladder}
found = {
    words: milliseconds(gravac.transform(compress=True, controller=chosen), sizes)
    for words, chosen in controllers.items()
}
print(json.dumps({"of": name, "entries": entries, **found}))
