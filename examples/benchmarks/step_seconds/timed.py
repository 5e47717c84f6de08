"""Look up seconds of a step by network, method and factor, in a timing record."""

import re
from collections.abc import Iterable

import numpy as np
from common.journal import Line
from training import one_bit_adam
from training.methods import (
    LOCAL,
    ONE_BIT_ADAM,
    OWNERS,
    arguments,
    in_rounds,
    is_recipe,
)

import gravac_jax as gravac
from step_seconds.methods import method

Mbit = float | None  # of a network's links; None is no limit
# Methods whose steps may be those of a controller's rungs: the kind, and the factor.
STATIC = re.compile(
    rf"((?:{LOCAL})?fixed|(?:{LOCAL}|turns(\d+))?allreduced(?:{'|'.join(OWNERS)})?)(\d+)"
)
ONE_BIT = "32"  # the factor in the names of methods of one bit


def ladder_of(name: str) -> tuple[float, ...]:
    """Return the factors that a method may take."""
    if ONE_BIT_ADAM.fullmatch(name):
        return one_bit_adam.LADDER
    return (1.0,) if is_recipe(name) else method(name).ladder


def _kind_of_rung(name: str, factor: float) -> str:
    """Return the kind of the static methods that take a controller's steps."""
    if "mixed" in name:
        is_sparse = factor in arguments(name)["exchange"].sparse_factors
        return name.replace("mixed", "fixed" if is_sparse else "allreduced")
    kind, found = re.subn("default(256|gradients)?", "allreduced", name)
    if not found:
        return "fixed"
    exchange = arguments(name).get("exchange", gravac.QuantizedAllReduce())
    return kind + (ONE_BIT if exchange.bits(factor) == 1 else "")


def _kind(static: str) -> str:
    """Return the kind of a static method; parts in turn are of that of all entries.

    One bit is a kind of its own.
    """
    name, _, factor = STATIC.fullmatch(static).groups()  # type: ignore[union-attr]
    one_bit = ONE_BIT if "allreduced" in name and factor == ONE_BIT else ""
    return re.sub(r"^turns\d+", LOCAL, name) + one_bit


def _factor(static: str) -> float:
    _, turns, factor = STATIC.fullmatch(static).groups("1")  # type: ignore[union-attr]
    return float(turns) * float(factor)


class Timed:
    """The lines of one number of hosts.

    Args:
      lines: The lines of a record of `step_seconds`.
      hosts: The number of hosts whose lines are used.

    Raises:
      SystemExit: If there are no dense steps or static factors among them.

    Attributes:
      links: The bandwidths of the record, from fast to slow.
      static: The names of the methods with a static factor, the largest factor first.
    """

    def __init__(self, lines: Iterable[Line], hosts: int) -> None:
        mine = [x for x in lines if x["hosts"] == hosts]
        self.lines = {(x["bandwidth_mbit"], x["method"]): x for x in mine}
        names = {x["method"] for x in mine}
        static = filter(STATIC.fullmatch, names)
        self.static = sorted(static, key=lambda x: (-_factor(x), x))
        if "dense" not in names or not self.static:
            raise SystemExit(f"no dense or no static steps of {hosts} hosts are timed")
        links = {x["bandwidth_mbit"] for x in mine}
        self.links: list[Mbit] = sorted(links, key=lambda x: -(x or np.inf))

    def step(self, link: Mbit, name: str, factor: float) -> float:
        """Return the seconds of a step at a factor, without what choosing it costs.

        A method with one factor has its own seconds; others have those of static
        factors. Between and below the timed factors, seconds are linear in the bytes,
        and so in one over the factor; above the highest they are those of the highest.
        Steps of a round take no more than computation, but for the last one. This
        favours rounds: what a replica does to hold its steps back is left out.
        """
        if (link, name) in self.lines and len(ladder_of(name)) == 1:
            return self.mean(link, name)
        if rounds := in_rounds(name):
            steps, inner = rounds
            local = self.median(link, "dense", "slowest_compute")
            return local + (self.step(link, inner, factor) - local) / steps
        if ONE_BIT_ADAM.fullmatch(name):
            in_one_bit = f"{LOCAL}allreducedadam{ONE_BIT}"
            return self.mean(link, "dense" if factor == 1 else in_one_bit)
        if factor == 1 and not is_recipe(name):
            return self.mean(link, "dense")
        kind = _kind_of_rung(name, factor)
        static = [x for x in self.static if _kind(x) == kind]
        if not static:
            raise SystemExit(f"no steps of {kind}<factor> are timed, for {name}")
        at = [1 / _factor(x) for x in static]
        known = [self.mean(link, x) for x in static]
        if 1 / factor > at[-1] and len(at) > 1:
            slope = (known[-1] - known[-2]) / (at[-1] - at[-2])
            return known[-1] + slope * (1 / factor - at[-1])
        return float(np.interp(1 / factor, at, known))

    def steps(self, link: Mbit, name: str, taken: Iterable[int]) -> float:
        """Return the seconds of as many steps at each rung as `taken` says."""
        course = zip(taken, ladder_of(name), strict=False)
        return sum(n * self.step(link, name, factor) for n, factor in course if n)

    def own_seconds(self, link: Mbit, name: str) -> float:
        """Return what a step of a controller takes beyond static factors like its own.

        The result is 0 for a method that has one factor, or was not timed there.
        """
        line = self.lines.get((link, name))
        if line is None or len(ladder_of(name)) == 1:
            return 0.0
        static = self.steps(link, name, line["taken"]) / line["steps"]
        return self.mean(link, name) - static

    def mean(self, link: Mbit, name: str) -> float:
        """Return the mean over all timed steps of a method: its rungs may alternate."""
        return self.lines[link, name]["mean_step_seconds"]

    def median(self, link: Mbit, name: str, part: str) -> float:
        """Return the median seconds of a part of a method's steps."""
        return self.lines[link, name][f"{part}_seconds"][1]
