"""Read the lines of `quality`: runs, tuned learning rates, paired gaps."""

import dataclasses
import math
from collections.abc import Iterable

from common.journal import Line


@dataclasses.dataclass(frozen=True)
class Result:
    """One run that counts: its evaluations, in order."""

    method: str
    seed: int
    learning_rate: float
    lines: list[Line]

    @property
    def final(self) -> Line:
        """The last evaluation."""
        return self.lines[-1]

    @property
    def loss(self) -> float:
        """The held-out loss at the end; infinite for a run that diverged."""
        return number(self.final["loss"])

    @property
    def accuracy(self) -> float:
        """The held-out accuracy at the end, in percent; NaN where there is none."""
        return 100 * self.final.get("accuracy", math.nan)

    @property
    def wire_factor(self) -> float:
        """Dense wire bytes over wire bytes, of the whole run."""
        return self.final["dense_wire_bytes"] / max(1, self.final["wire_bytes"])


def number(loss: float | None) -> float:
    """Return a loss as a number: infinite where it was none."""
    return math.inf if loss is None else loss


def results(lines: Iterable[Line]) -> list[Result]:
    """Return the runs that count, in the order of the file."""
    runs: dict[tuple[str, int, float], list[Line]] = {}
    for line in lines:
        if line["phase"] == "test":
            key = (line["method"], line["seed"], line["learning_rate"])
            runs.setdefault(key, []).append(line)
    return [Result(*key, found) for key, found in runs.items()]


def tuning(lines: Iterable[Line]) -> dict[str, dict[float, float]]:
    """Return the final validation loss by method and learning rate."""
    table: dict[str, dict[float, float]] = {}
    for line in lines:  # later evaluations of a run overwrite earlier ones
        if line["phase"] == "tune":
            losses = table.setdefault(line["method"], {})
            losses[line["learning_rate"]] = number(line["loss"])
    return table


def tuned(lines: Iterable[Line]) -> dict[str, float]:
    """Return the best learning rate of every method; the smaller of two alike."""
    return {
        name: min(sorted(losses), key=losses.__getitem__)
        for name, losses in tuning(lines).items()
    }


def paired(runs: list[Result], others: list[Result]) -> list[tuple[Result, Result]]:
    """Return each run with the dense run of its seed, if `others` has one."""
    dense = {x.seed: x for x in others if x.method == "dense"}
    return [(x, dense[x.seed]) for x in runs if x.seed in dense]


def gap(run: Result, dense: Result) -> float:
    """Return the loss of `run` over the loss of `dense`, less one.

    Raises:
      SystemExit: If the dense run diverged: nothing can be compared with it.
    """
    if not math.isfinite(dense.loss):
        raise SystemExit(f"the dense run of seed {dense.seed} diverged")
    return run.loss / dense.loss - 1


def gaps(own: list[Result], runs: list[Result]) -> list[float]:
    """Return the gap in percent of each run with a dense run of its seed in `runs`."""
    return [100 * gap(*pair) for pair in paired(own, runs)]


def ended(runs: Iterable[Result], steps: int) -> list[Result]:
    """Return the runs that have taken all steps."""
    return [x for x in runs if x.final["step"] >= steps]


def by_method(runs: list[Result]) -> dict[str, list[Result]]:
    """Return the runs of each method, in the order of the record."""
    names = dict.fromkeys(x.method for x in runs)
    return {name: [x for x in runs if x.method == name] for name in names}
