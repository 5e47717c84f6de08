"""Look up seconds of a step by network and method, in a record of `step_seconds`."""

from collections.abc import Iterable, Mapping

import numpy as np
from common.journal import Line
from training.methods import DENSE

from step_seconds.methods import ladder_of

Mbit = float | None  # of a network's links; None is no limit
DENSE_RUNG = "Dense()"


class Timed:
    """The lines of one number of hosts.

    Args:
      lines: The lines of a record of `step_seconds`.
      hosts: The number of hosts whose lines are used.

    Raises:
      SystemExit: If there are no dense steps among them.

    Attributes:
      links: The bandwidths of the record, from fast to slow.
    """

    def __init__(self, lines: Iterable[Line], hosts: int) -> None:
        mine = [x for x in lines if x["hosts"] == hosts]
        self.lines = {(x["bandwidth_mbit"], x["method"]): x for x in mine}
        if not any(x["method"] == DENSE for x in mine):
            raise SystemExit(f"no dense steps of {hosts} hosts are timed")
        links = {x["bandwidth_mbit"] for x in mine}
        self.links: list[Mbit] = sorted(links, key=lambda x: -(x or np.inf))

    def step(self, link: Mbit, name: str, rung: str) -> float:
        """Return the seconds of a step of a method, without what choosing costs.

        A method with one encoding has its own seconds. A rung of others has those of
        the method that always sends the same: if there is one of the same recipe, its.

        Raises:
          SystemExit: If no such step is timed.
        """
        if len(ladder_of(name)) == 1:
            return self.mean(link, name)
        if rung == DENSE_RUNG:
            return self.mean(link, DENSE)
        static = [x for where, x in self.lines if where == link and x.endswith(rung)]
        alike = [x for x in static if name.startswith(x.removesuffix(rung))]
        if not static:
            raise SystemExit(f"no steps of {rung} are timed, for {name}")
        return self.mean(link, max(alike or static[:1], key=len))

    def steps(self, link: Mbit, name: str, taken: Mapping[str, int]) -> float:
        """Return the seconds of as many steps at each encoding as `taken` says."""
        return sum(n * self.step(link, name, rung) for rung, n in taken.items() if n)

    def own_seconds(self, link: Mbit, name: str) -> float:
        """Return what a step of a controller takes beyond steps at its encodings.

        The result is 0 for a method with one encoding, or that was not timed there.
        """
        line = self.lines.get((link, name))
        if line is None or len(ladder_of(name)) == 1:
            return 0.0
        static = self.steps(link, name, line["taken"]) / line["steps"]
        return self.mean(link, name) - static

    def mean(self, link: Mbit, name: str) -> float:
        """Return the mean over all timed steps of a method: its rungs may alternate.

        Raises:
          SystemExit: If the method is not timed there.
        """
        if (link, name) not in self.lines:
            raise SystemExit(f"no steps of {name} are timed")
        return self.lines[link, name]["mean_step_seconds"]

    def median(self, link: Mbit, name: str, part: str) -> float:
        """Return the median seconds of a part of a method's steps."""
        return self.lines[link, name][f"{part}_seconds"][1]
