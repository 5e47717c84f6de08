"""Predict seconds of a step for many hosts, from bytes, messages and compiled programs.

No such steps have been run. Bytes and messages are those that `StepInfo` and the cost
model count; passes over memory and kernels are those of programs compiled for an H100
(the record 2026-11-25_programs); all else is assumed, and printed. r is the time of the
bytes of a dense float32 exchange over the time of computation: the bandwidth follows.

    python examples/benchmarks scale --out FILE.md --picture FILE.png
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
from common.figures import legend_below, picture
from common.report import markdown

import gravac_jax as gravac

TWO_BITS, HALF, EIGHTH = 16, 32, 128  # factors: two bits of all entries, or of a part


@dataclasses.dataclass(frozen=True)
class Args:
    """What is assumed.

    Args:
      out: The tables, Markdown.
      picture: The figure, PNG or SVG.
      params: Entries of the model; all of them are compressed.
      compute_seconds: A step's computation.
      message_seconds: What a message takes besides its bytes.
      memory_bytes: Bytes that the accelerator's memory moves in a second.
      kernel_seconds: What a kernel takes besides its bytes.
      replicas: Numbers of hosts.
      ratios: r.
    """

    out: Path
    picture: Path
    params: int = 124_000_000
    compute_seconds: float = 0.25
    message_seconds: float = 3e-5
    memory_bytes: float = 2.7e12
    kernel_seconds: float = 4e-6
    replicas: tuple[int, ...] = (2, 8, 64, 1024)
    ratios: tuple[float, ...] = (0.1, 0.3, 1, 3, 10, 30, 100, 300)


@dataclasses.dataclass(frozen=True)
class Method:
    """What replicas exchange, and what it costs a device.

    Attributes:
      words: What a reader calls it.
      exchange: The exchange.
      factor: Its factor.
      passes: Bytes read and written beyond a dense step, in units of the gradient's.
      kernels: Kernels beyond a dense step's.
      is_late: Whether the exchange runs beside the computation of the next step.
      interval: Steps from one exchange to the next.
    """

    words: str
    exchange: gravac.Exchange
    factor: float = 1
    passes: float = 0
    kernels: int = 0
    is_late: bool = False
    interval: int = 1


BITS = gravac.QuantizedAllReduce()
DENSE = Method("dense, float32", gravac.DenseMean())
# Passes and kernels of h100.jsonl in 2026-11-25_programs and 2026-11-25_turns; those of
# two bits in 2 turns are taken to be those of one bit of all entries.
METHODS = (
    DENSE,
    Method("dense, bfloat16", gravac.DenseMean("bfloat16"), passes=2, kernels=6),
    Method(
        "dense, one step late", gravac.DenseMean(), passes=4, kernels=19, is_late=True
    ),
    Method("two bits", BITS, TWO_BITS, passes=3.2, kernels=27),
    Method("two bits in 2 turns", BITS, HALF, passes=3.2, kernels=27),
    Method("two bits, one step late", BITS, TWO_BITS, 7.3, 46, is_late=True),
    Method("two bits in 2 turns, late", BITS, HALF, 7.3, 46, is_late=True),
    Method("two bits in 8 turns, late", BITS, EIGHTH, 4, 46, is_late=True),
    Method("two bits in 2 turns, every fourth step", BITS, HALF, 3.2, 27, interval=4),
    # Its passes are assumed: two more than those of an optimizer's step.
    Method("DiLoCo, every 30 steps", gravac.DenseMean(), passes=4, interval=30),
)


def own_seconds(method: Method, args: Args) -> float:
    """Return what a device does beyond a dense step, in seconds."""
    moved = method.passes * 4 * args.params / args.memory_bytes
    return moved + method.kernels * args.kernel_seconds


def traffic(method: Method, args: Args, replicas: int) -> gravac.Traffic:
    """Return what one exchange sends."""
    return method.exchange.traffic(args.params, method.factor, replicas)


def step_seconds(method: Method, args: Args, replicas: int, ratio: float) -> float:
    """Return the mean seconds of a step, whose dense bytes take r computations."""
    mine, dense = (traffic(x, args, replicas) for x in (method, DENSE))
    byte_seconds = ratio * args.compute_seconds / dense.wire_bytes
    exchange = args.message_seconds * mine.messages + byte_seconds * mine.wire_bytes
    local = args.compute_seconds + own_seconds(method, args)
    if method.is_late:
        return max(local, exchange)
    return local + exchange / method.interval


def speed_ups(method: Method, args: Args, replicas: int) -> list[float]:
    """Return how many times as fast as dense steps a step is, at each ratio."""
    seconds = lambda x, ratio: step_seconds(x, args, replicas, ratio)
    return [seconds(DENSE, r) / seconds(method, r) for r in args.ratios]


def assumptions(args: Args) -> list[list[str]]:
    """Return the table of what is assumed."""
    return [
        ["assumed", "value", "because"],
        ["params", f"{args.params:,}", "GPT-2 small; all entries are compressed"],
        [
            "computation",
            f"{1e3 * args.compute_seconds:g} ms",
            "8 windows of 1,024 tokens at 40% of an H100's dense bfloat16 rate are 15"
            " ms; 16 such micro-batches",
        ],
        [
            "a message",
            f"{1e6 * args.message_seconds:g} us",
            "between hosts of one data centre; a ring sends 2 (N - 1) in a row",
        ],
        ["memory", f"{args.memory_bytes / 1e12:g} TB/s", "80% of an H100's 3.35"],
        ["a kernel", f"{1e6 * args.kernel_seconds:g} us", "its launch"],
        ["bandwidth", "from r", "r computations for the bytes of a dense exchange"],
        ["overlap", "whole", "a late exchange takes no time from the computation"],
        ["hosts", "alike", "none is slow, and no other traffic is on the network"],
    ]


def rows(args: Args, replicas: int) -> list[list[str]]:
    """Return the table of one number of replicas."""
    table = [["times as fast as dense steps; r =", *(f"{r:g}" for r in args.ratios)]]
    for method in METHODS[1:]:
        ups = speed_ups(method, args, replicas)
        table.append([method.words, *(f"{x:.2f}" for x in ups)])
    limit = [step_seconds(DENSE, args, replicas, r) for r in args.ratios]
    over = [f"{x / args.compute_seconds:.2f}" for x in limit]
    table.append(["*computation alone, the limit*", *over])
    return table


def draw(args: Args, path: Path) -> None:
    """Draw speed-ups over r, a panel for each number of replicas."""
    ratios = np.array(args.ratios)
    with picture(path, (13, 5), columns=len(args.replicas)) as (figure, axes):
        for axis, n in zip(axes[0], args.replicas, strict=True):
            dense = [step_seconds(DENSE, args, n, r) for r in ratios]
            limit = np.divide(dense, args.compute_seconds)
            axis.plot(ratios, limit, "k:", label="the limit: free communication")
            for method in METHODS[1:]:
                ups = speed_ups(method, args, n)
                line = "-" if method.is_late else "--"
                axis.plot(ratios, ups, line, label=method.words, linewidth=1.4)
            axis.set(xscale="log", yscale="log", xlabel="r", title=f"{n:,} hosts")
        axes[0, 0].set(ylabel="times as fast as dense float32 steps")
        legend_below(figure)


def costs(args: Args, replicas: int) -> list[list[str]]:
    """Return the table of bytes, messages and a device's own work."""
    table = [["method", "MB a step", "messages in a row", "ms of a device's own"]]
    for method in METHODS:
        sent = traffic(method, args, replicas)
        megabytes = sent.wire_bytes / 1e6 / method.interval
        own = f"{1e3 * own_seconds(method, args):.2f}"
        table.append([method.words, f"{megabytes:,.3g}", f"{sent.messages:,}", own])
    return table


def text(args: Args) -> str:
    """Return all tables, as Markdown."""
    parts = [markdown(assumptions(args))]
    for n in args.replicas:
        parts += [f"## {n:,} hosts", *(markdown(x(args, n)) for x in (rows, costs))]
    return "\n\n".join(parts) + "\n"


def main(args: Args) -> None:
    """Write the tables and draw the figure."""
    if not all(math.isfinite(x) and x > 0 for x in args.ratios):
        raise SystemExit("--ratios must be above 0")
    if min(args.replicas) < 2:
        raise SystemExit(f"--replicas must be at least 2, got {args.replicas}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text(args))
    draw(args, args.picture)
