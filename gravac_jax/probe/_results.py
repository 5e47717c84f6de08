"""The results of a probe, as a verdict, as a table and as a file."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gravac_jax as gravac
from gravac_jax.probe._steps import DENSE, DENSE_RUNG

# A compressed step teaches less than a dense one, so it has to be faster by more than
# this. The figure is arbitrary.
MIN_SPEED_UP = 1.05
_NOTES = (
    "- Ranges: 90% confidence intervals of the median, the timing noise of this run.",
    "- In brackets: how many times fewer bytes than a dense step sends.",
    f"- A step pays if it is over {MIN_SPEED_UP:g} times as fast as a dense one.",
    "- A compressed step teaches less. Only training can show how much less.",
)
_COLUMNS = "{:<10}  {:>6}  {:>13}  {:>11}  {:>21}  {:>9}"


class Range(NamedTuple):
    """A median and its 90% confidence interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one exchange at one factor.

    Attributes:
      exchange: The name of the exchange.
      factor: The compression factor n / k.
      wire_bytes: The bytes that one replica sends over the compressed axis in a step.
      step_seconds: The time of a step.
      speed_up: The time of a dense step over the time of this step.
    """

    exchange: str
    factor: float
    wire_bytes: float
    step_seconds: Range
    speed_up: Range

    @property
    def pays(self) -> str:
        """Whether it is faster than a dense step: "yes", "no" or "too close"."""
        if self.speed_up.low > MIN_SPEED_UP:
            return "yes"
        return "no" if self.speed_up.high < MIN_SPEED_UP else "too close"


@dataclasses.dataclass(frozen=True)
class Results:
    """All results of a probe.

    Attributes:
      devices: The number and kind of devices, such as "8 cpu".
      processes: The number of processes.
      params: The number of params.
      axis: The mesh axis that is compressed.
      replicas: The number of replicas along `axis`.
      rounds: How often each step was timed.
      wire: Arguments of `gravac.WireCost`, as far as they were measured.
      headroom: The speed-up of a step that sends nothing over `axis`, the most that
        compression can win. None if computation was not timed.
      rows: One row for each kind of step. The first one is dense.
    """

    devices: str
    processes: int
    params: int
    axis: str
    replicas: int
    rounds: int
    wire: dict[str, float]
    headroom: Range | None
    rows: Sequence[Row]


def verdict(results: Results) -> str:
    """Return one sentence that says whether compression pays."""
    headroom, rows = results.headroom, results.rows
    most = f"without an exchange a step is {headroom} times as fast as a dense one"
    if headroom and headroom.high < MIN_SPEED_UP:
        return f"compression will not pay here: even {most}"
    compressed = [x for x in rows if x.exchange not in (DENSE, DENSE_RUNG)]
    if not compressed:
        return f"compression may pay here: {most}, the most that can be won"
    best = max(compressed, key=lambda x: x.speed_up.middle)
    name = best.exchange + f" at factor {best.factor:g}" * (best.factor > 1)
    thing = "a step" if headroom else "an exchange"
    said = {"yes": "compression pays here", "no": "compression will not pay here"}
    answer = said.get(best.pays, "too close to call")
    if best.pays == "yes" and not headroom:
        # Up to this, (compute + dense) / (compute + best) is high enough.
        seconds, best_seconds = (x.step_seconds.middle for x in (rows[0], best))
        limit = (seconds - MIN_SPEED_UP * best_seconds) / (MIN_SPEED_UP - 1)
        answer += f" if computing a gradient takes less than {limit:.2g} s"
    times = f"{best.speed_up} times as fast as a dense one"
    return f"{answer}: with {name}, the fastest, {thing} is {times}"


def text(results: Results) -> str:
    """Return what the terminal shows: network, headroom, table, verdict and notes."""
    wire, thing = results.wire, "step" if results.headroom else "exchange"
    latency_us = 1e6 * wire["latency_seconds"]
    bandwidth = f"{wire['bytes_per_second'] / 1e6:.4g} MB/s"
    lines = [
        f"{results.params:,} params; {results.devices} devices;"
        f" processes: {results.processes}; rounds of timing: {results.rounds}",
        f"all-reduce over {results.axis}, {results.replicas} replicas:"
        f" {latency_us:.3g} us a message, {bandwidth}",
    ]
    if results.headroom:
        lines.append(
            f"Without an exchange a step takes {1e3 * wire['compute_seconds']:.3g} ms"
            f" and is {results.headroom} times as fast as a dense one"
        )
    header = ("exchange", "factor", "MB sent", f"{thing} ms", "speed-up (90%)", "pays")
    lines += ["", _COLUMNS.format(*header)]
    lines += [_line(x, results.rows[0].wire_bytes) for x in results.rows]
    lines += ["", verdict(results), "", *_NOTES]
    if results.processes == 1 and results.devices.endswith("cpu"):
        lines.append("- CPU devices of one process have no network between them.")
    return "\n".join(lines) + "\n"


def _line(row: Row, dense_wire_bytes: float) -> str:
    is_dense = row.exchange == DENSE
    fewer = f" ({dense_wire_bytes / row.wire_bytes:.3g}x)" * (not is_dense)
    return _COLUMNS.format(
        row.exchange,
        f"{row.factor:g}",
        f"{row.wire_bytes / 1e6:.3g}{fewer}",
        f"{1e3 * row.step_seconds.middle:.3g}",
        "1" if is_dense else str(row.speed_up),
        "" if is_dense else row.pays,
    ).rstrip()


def write(path: Path, results: Results) -> None:
    """Write the results and the verdict as JSON."""
    found = dataclasses.asdict(results) | {"verdict": verdict(results)}
    found["rows"] = [dataclasses.asdict(x) | {"pays": x.pays} for x in results.rows]
    path.write_text(json.dumps(found, indent=1) + "\n")


def read(path: str | os.PathLike[str]) -> gravac.WireCost:
    """Return the network that a probe measured, for a controller to start from.

    Args:
      path: The file that `python -m gravac_jax probe --json FILE` wrote.

    Returns:
      The cost model for `gravac.transform(wire=...)`. Without
      `--loss`, its `compute_seconds` is the default of `gravac.WireCost`.

    Raises:
      ValueError: If the file cannot be read, or a probe did not write it.

    Example:
      >>> import json, pathlib, tempfile
      >>> from gravac_jax import probe
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "probe.json"
      >>> _ = path.write_text(json.dumps({"wire": {"latency_seconds": 0.001}}))
      >>> probe.read(path).latency_seconds
      0.001
    """
    try:
        return gravac.WireCost(**json.loads(Path(path).read_text())["wire"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no measured network ({error!r}). Give a file that"
            " `python -m gravac_jax probe --json FILE` wrote."
        ) from None
