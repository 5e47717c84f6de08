"""What the quickstart keeps of its runs and makes of them, and a clean Ctrl-C."""

import collections
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.box import SIMPLE
from rich.table import Table

import gravac_jax as gravac

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

COLUMNS = (
    "run|held-out\nloss|gap|kB sent\na step|times\nfewer|network\nms/step|steps"
    "|here\nms/step"
)


@dataclasses.dataclass
class Run:
    """One run: a writer of metrics that keeps the figures of every step.

    Args:
      name: The name of the run.
      network: The modeled network.
      replicas: The number of replicas.
      parameters: The number of params.
      held_out: The loss on held-out text, after the run.
      step_seconds: The mean time of a step on this machine.
      figures: The figures of every step, by name.
    """

    name: str
    network: gravac.WireCost
    replicas: int
    parameters: int
    held_out: float = float("nan")
    step_seconds: float = float("nan")
    figures: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep the figures of a step, and its seconds on the modeled network."""
        del step
        for name, x in scalars.items():
            self.figures[name.removeprefix("gravac/")].append(x)
        is_dense = scalars["gravac/factor"] == 1
        # An all-reduce in a ring, or in few bits each part there and back.
        messages = 2 * (self.replicas - 1)
        wire_bytes = scalars["gravac/wire_bytes"]
        parts = self.network.parts(wire_bytes, messages, is_dense)
        self.figures["network_seconds"].append(sum(parts))

    def close(self) -> None:
        """Do nothing: the figures stay."""

    @property
    def loss(self) -> list[float]:
        """The loss of every step."""
        return self.figures["loss"]

    @property
    def byte_factor(self) -> float:
        """How many times fewer bytes than dense steps the whole run has sent."""
        sent = sum(self.figures["wire_bytes"])
        return sum(self.figures["dense_wire_bytes"]) / max(sent, 1)


def summary(runs: list[Run], bandwidth_mbit: float) -> Table:
    """Return the table at the end; gaps are against the dense run."""
    dense = next((run.held_out for run in runs if run.name == "dense"), float("nan"))
    table = Table(
        box=SIMPLE,
        title="Same model, same batches, same number of steps",
        caption="kB that one replica sends, and how many times fewer than dense;\n"
        f"network: modeled, of {bandwidth_mbit:g} Mbit/s, with 10 ms of compute;\n"
        "here: on this machine, without a network",
        pad_edge=False,
        collapse_padding=True,
    )
    for i, title in enumerate(COLUMNS.split("|")):
        table.add_column(title, justify="right" if i else "left", no_wrap=True)
    for run in runs:
        table.add_row(
            run.name,
            f"{run.held_out:.4f}",
            f"{100 * (run.held_out / dense - 1):+.1f}%" if dense > 0 else "-",
            f"{np.mean(run.figures['wire_bytes']) / 1e3:,.0f}",
            f"{run.byte_factor:.1f}",
            f"{1e3 * np.mean(run.figures['network_seconds']):.0f}",
            f"{len(run.loss)}",
            f"{1e3 * run.step_seconds:.0f}",
        )
    return table


def verdicts(runs: list[Run], bandwidth_mbit: float) -> list[str]:
    """Say in words what each run won and lost beside the dense one."""
    dense = next((run for run in runs if run.name == "dense"), None)
    if dense is None:
        return []
    return [_verdict(run, dense, bandwidth_mbit) for run in runs if run is not dense]


def _verdict(run: Run, dense: Run, bandwidth_mbit: float) -> str:
    gap = 100 * (run.held_out / dense.held_out - 1)
    modeled = [1e3 * np.mean(x.figures["network_seconds"]) for x in (run, dense)]
    here = [1e3 * x.step_seconds for x in (run, dense)]
    return (
        f"{run.name} sent {run.byte_factor:.1f} times fewer bytes than dense, and"
        f" its held-out loss ended {abs(gap):.1f}% {'above' if gap > 0 else 'below'}."
        f" On the modeled network of {bandwidth_mbit:g} Mbit/s a step takes"
        f" {modeled[0]:.0f} ms in place of {modeled[1]:.0f}; here, without a network,"
        f" {here[0]:.0f} ms in place of {here[1]:.0f}."
    )


def draw_picture(runs: list[Run], bandwidth_mbit: float, path: Path) -> None:
    """Draw loss over seconds, bytes and gain over steps, legible in gray."""
    fig, axes = plt.subplots(3, 1, figsize=(8, 8), layout="constrained")
    axes[1].sharex(axes[2])
    for run, line in zip(runs, ("-", "--", ":", "-."), strict=False):
        window = min(20, len(run.loss))
        smooth = np.convolve(run.loss, np.ones(window) / window, "valid")
        seconds = np.cumsum(run.figures["network_seconds"])[window - 1 :]
        axes[0].plot(seconds, smooth, line, label=run.name)
        dense, sent = run.figures["dense_wire_bytes"], run.figures["wire_bytes"]
        fewer = np.divide(dense, np.maximum(sent, 1))
        for axis, course in zip(axes[1:], (fewer, run.figures["gain"]), strict=True):
            axis.plot(np.arange(len(course)) + 1, course, line, linewidth=1)
    axes[0].set(ylabel="training loss, nats a byte\n(mean of 20 steps)")
    axes[0].set(xlabel=f"seconds on a network of {bandwidth_mbit:g} Mbit/s, modeled")
    axes[0].legend()
    axes[1].set(ylabel="times fewer bytes\nthan a dense step", yscale="log")
    axes[1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[1].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes[1].yaxis.set_minor_formatter(NullFormatter())
    axes[1].tick_params(labelbottom=False)
    axes[2].set(ylabel="gain\n(share of energy sent)", xlabel="step", ylim=(0, 1.05))
    for axis in axes:
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)


@contextlib.contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets; a second Ctrl-C interrupts as usual.

    An exception could come between a step that has taken its state's memory and the
    assignment of the new state.
    """
    event = threading.Event()

    def handle(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
