"""The results of a probe, as a verdict and as a table, and the network in its file."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import gravac_jax as gravac

# A compressed step teaches less than a dense one, so it has to be faster by more than
# this. The figure is arbitrary.
MIN_SPEED_UP = 1.05
_NOTES = (
    "- Ranges: 90% confidence intervals of the median, the timing noise of this run.",
    "- In brackets: how many times fewer bytes than a dense step sends.",
    f"- A step pays if it is over {MIN_SPEED_UP:g} times as fast as a dense one.",
    "- A compressed step teaches less. Only training can show how much less.",
)


class Range(NamedTuple):
    """A median and its 90% confidence interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"

    @property
    def pays(self) -> str:
        """Whether a step with this speed-up is fast enough."""
        if self.low > MIN_SPEED_UP:
            return "yes"
        return "no" if self.high < MIN_SPEED_UP else "too close"


def verdict(results: dict[str, Any]) -> str:
    """Return one sentence that says whether compression pays."""
    headroom, (dense, *others) = results["headroom"], results["rows"]
    most = f"without an exchange a step is {headroom} times as fast as a dense one"
    if headroom and headroom.high < MIN_SPEED_UP:
        return f"compression will not pay here: even {most}"
    if not others:
        return f"compression may pay here: {most}, the most that can be won"
    compressed = [x for x in others if x["encoding"] != "Dense()"] or others
    best = max(compressed, key=lambda x: x["speed_up"].middle)
    said = {"yes": "compression pays here", "no": "compression will not pay here"}
    answer = said.get(best["pays"], "too close to call")
    if best["pays"] == "yes" and not headroom:
        # Up to this, (compute + dense) / (compute + best) is high enough.
        seconds, best_seconds = (x["step_seconds"].middle for x in (dense, best))
        limit = (seconds - MIN_SPEED_UP * best_seconds) / (MIN_SPEED_UP - 1)
        answer += f" if computing a gradient takes less than {limit:.2g} s"
    thing = "a step" if headroom else "an exchange"
    times = f"{thing} is {best['speed_up']} times as fast as a dense one"
    return f"{answer}: with {best['encoding']}, the fastest, {times}"


def text(results: dict[str, Any]) -> str:
    """Return what the terminal shows: network, headroom, table, verdict and notes."""
    wire, headroom, rows = results["wire"], results["headroom"], results["rows"]
    lines = [
        f"{results['params']:,} params; {results['devices']} devices;"
        f" processes: {results['processes']}; rounds of timing: {results['rounds']}",
        f"all-reduce over {results['axis']}, {results['replicas']} replicas:"
        f" {1e6 * wire['latency_seconds']:.3g} us a message,"
        f" {wire['bytes_per_second'] / 1e6:.4g} MB/s",
    ]
    if headroom:
        lines.append(
            f"Without an exchange a step takes {1e3 * wire['compute_seconds']:.3g} ms"
            f" and is {headroom} times as fast as a dense one"
        )
    width = max(len(x["encoding"]) for x in rows)
    form = f"{{:<{width}}}  {{:>13}}  {{:>11}}  {{:>21}}  {{:>9}}".format
    milliseconds = "step ms" if headroom else "exchange ms"
    header = form("encoding", "MB sent", milliseconds, "speed-up (90%)", "pays")
    lines += ["", header, *(form(*_cells(x, rows[0])).rstrip() for x in rows)]
    lines += ["", results["verdict"], "", *_NOTES]
    if results["processes"] == 1 and results["devices"].endswith("cpu"):
        lines.append("- CPU devices of one process have no network between them.")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any], dense: dict[str, Any]) -> tuple[str, ...]:
    fewer, speed_up, pays = "", "1", ""
    if row is not dense:
        fewer = f" ({dense['wire_bytes'] / row['wire_bytes']:.3g}x)"
        speed_up, pays = str(row["speed_up"]), row["pays"]
    sent, seconds = row["wire_bytes"], row["step_seconds"].middle
    figures = f"{sent / 1e6:.3g}{fewer}", f"{1e3 * seconds:.3g}"
    return row["encoding"], *figures, speed_up, pays


def read(path: str | os.PathLike[str]) -> gravac.WireCost:
    """Return the network that a probe measured, for a controller to start from.

    Args:
      path: The file that `python -m gravac_jax probe --json FILE` wrote.

    Returns:
      The cost model for `gravac.transform(network=...)`. Without
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
