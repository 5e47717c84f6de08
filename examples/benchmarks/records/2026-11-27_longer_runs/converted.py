"""Say of recorded shares what exchanges say since rounding counts a tenth as waiting.

    python converted.py IN OUT LARGEST [chance]

reads a record of `controllers.progress` from before that, and converts the shares of
factors up to the largest that is used. With `chance` it is one from
before parts in turn were said to wait for half of their turns: its share of a part in
one of T turns is a T-th.
"""

import json
import sys
from pathlib import Path

import numpy as np

from gravac_jax._selection.waiting import (
    ROUNDING_WAITS,
    share_by_chance,
    waiting_steps,
)

WHOLE = 32  # bits of an entry that is not rounded


def rounded(share, turns, chance):
    """Return the share of an entry's energy that is left of it when it is rounded."""
    if chance:
        return np.minimum(share * turns, 1)
    left = (1 / share - 1 - (turns - 1) / 2) / turns
    if (left < -0.02).any():
        raise ValueError(f"{share} are no shares of {turns} turns")
    return 1 / (1 + np.maximum(left, 0))


def main(source, target, largest, chance=None):
    """Write the record anew."""
    head, *lines = map(json.loads, Path(source).read_text().splitlines())
    configuration = head["configuration"]
    ladder = np.array(configuration["ladder"])
    ladder = ladder[ladder <= float(largest)]
    turns = np.maximum(1, configuration.get("least_bits", 1) * ladder / WHOLE)

    def converted(share):
        waiting = waiting_steps(rounded(share, turns, chance), turns, ROUNDING_WAITS)
        return share_by_chance(waiting)

    for line in lines:
        if "shares" in line:
            n, around = len(ladder), 1e-3
            share = np.array(line["shares"][:n])
            low, high = share - around, np.minimum(share + around, 1)
            slope = (converted(high) - converted(low)) / (high - low)
            line["shares"][:n] = converted(share).tolist()
            line["deviations"][:n] = (slope * line["deviations"][:n]).tolist()
    Path(target).write_text("".join(json.dumps(x) + "\n" for x in [head, *lines]))


main(*sys.argv[1:])
