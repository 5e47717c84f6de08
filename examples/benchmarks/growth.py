"""What an exchange costs as replicas are added: bytes from 2 to 1,024, seconds to 64.

Bytes are those that one replica sends, as every exchange declares them and as StepInfo
of a simulated step has them. Seconds are of one simulated step of all replicas on this
device, selection and decompression included, over their number, and do not contain any
network; beside them stands what the bytes take at a bandwidth.

    python examples/benchmarks/growth.py --out FILE.jsonl --picture FILE.png
"""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import journal
import matplotlib
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import gravac_jax as gravac

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WIDE = {"values": gravac.Float32(), "indices": gravac.Int32()}
EXCHANGES = {
    "all-gather": gravac.AllGather(**WIDE),
    "all-gather, 4 bytes": gravac.AllGather(),
    "leader's indices": gravac.LeaderIndices(),
    "shared random-k": gravac.SharedRandomK(),
    "low rank": gravac.LowRank(),
    "dense": gravac.DenseMean(),
    "dense, 16 bits": gravac.DenseMean16(),
}


@dataclasses.dataclass(frozen=True)
class Args:
    """What to count and time."""

    out: Path
    """JSONL; lines that are in it are not made again."""
    picture: Path | None = None
    """The figure."""
    side: int = 512
    """Of the square matrix that is the bucket."""
    factor: float = 100
    """Entries over entries sent."""
    most: int = 1024
    """Replicas, by doubling from 2; simulated up to 64."""
    steps: int = 8
    """Timed, of each, after two."""
    bandwidth_mbit: float = 1000
    """Of one replica's link."""


def simulated(exchange: Any, args: Args, replicas: int) -> tuple[list[float], Any]:
    """Quartiles of the seconds of a step of one replica, and its StepInfo."""
    tx = gravac.transform(
        compress=True, exchange=exchange, controller=gravac.Fixed(args.factor)
    )
    keys = jax.random.split(jax.random.key(0), replicas)
    shape = (args.side, args.side)
    draw = lambda key: jax.random.t(key, 3.0, shape)
    gradients = jax.block_until_ready(jax.jit(jax.vmap(draw))(keys))
    state = gravac.init(tx, jnp.zeros(shape), replicas)

    def step(state: Any, gradient: jax.Array) -> Any:
        updates, state = tx.update(gradient[0], state)
        return state, jnp.sum(updates)

    run, seconds = gravac.simulate(step, replicas), []
    for _ in range(args.steps + 2):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(run(state, gradients))
        seconds.append((time.perf_counter() - start) / replicas)
    quartiles = statistics.quantiles(seconds[2:], n=4)
    return [round(x, 6) for x in quartiles], jax.device_get(state.info)


def line_of(name: str, exchange: Any, args: Args, replicas: int) -> dict[str, Any]:
    """One exchange among so many replicas."""
    entries, shape = args.side**2, (args.side, args.side)
    traffic = exchange.shaped((shape,)).traffic(entries, args.factor, replicas)
    line = {
        "exchange": name,
        "replicas": replicas,
        "is_dense": traffic.entries == entries,
        "payload_bytes": traffic.payload_bytes,
        "wire_bytes": traffic.wire_bytes,
    }
    if replicas <= 64:
        seconds, info = simulated(exchange, args, replicas)
        # Beside the exchange a step sends its evidence: 5 and 2 numbers, of one rung.
        ring = 2 * (replicas - 1) / replicas
        travels = exchange.energies_traffic(entries, args.factor, 1, replicas)
        energies = ring * 4 * 2 if travels is None else travels.wire_bytes
        evidence = ring * 4 * 5 + energies
        off = abs(float(info.wire_bytes) - evidence - traffic.wire_bytes)
        assert off <= 1e-6 * traffic.wire_bytes
        line["step_seconds"] = seconds
    return line


def draw_picture(lines: list[dict[str, Any]], args: Args, path: Path) -> None:
    """Bytes, and the seconds that they take, over the replicas."""
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    styles = ("-", "--", "-.", ":", "-.", "-", "--")
    for (name, marker), style in zip(
        zip(EXCHANGES, "osv^Dx+", strict=True), styles, strict=True
    ):
        mine = [x for x in lines if x["exchange"] == name]
        replicas = [x["replicas"] for x in mine]
        wire = np.array([x["wire_bytes"] for x in mine])
        axes[0].plot(replicas, wire / 1e3, style, marker=marker, label=name)
        timed = [x for x in mine if "step_seconds" in x]
        own = np.array([x["step_seconds"][1] for x in timed])
        network = 8 * wire[: len(timed)] / (args.bandwidth_mbit * 1e6)
        axes[1].plot(
            replicas[: len(timed)], 1e3 * (own + network), style, marker=marker
        )
    axes[0].set(ylabel="kB that one replica sends in a step")
    axes[1].set(
        ylabel=f"ms: measured work of one replica and its\n"
        f"bytes at {args.bandwidth_mbit:,.0f} Mbit/s"
    )
    for axis in axes:
        axis.set(xlabel="replicas", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main(args: Args) -> None:
    """Count, time, show."""
    setting = {"entries": args.side**2, "factor": args.factor, "steps": args.steps}
    record = journal.Journal(args.out, setting)
    done = {(x["exchange"], x["replicas"]) for x in record.lines}
    sizes = [2**i for i in range(1, args.most.bit_length()) if 2**i <= args.most]
    for replicas in sizes:
        for name, exchange in EXCHANGES.items():
            if (name, replicas) not in done:
                record.append(line_of(name, exchange, args, replicas))
    table = Table("replicas", *EXCHANGES, title="kB that one replica sends in a step")
    for replicas in sizes:
        mine = {x["exchange"]: x for x in record.lines if x["replicas"] == replicas}
        mark = lambda x: "*" if x["is_dense"] and "dense" not in x["exchange"] else ""
        in_order = [mine[name] for name in EXCHANGES]
        cells = [f"{x['wire_bytes'] / 1e3:,.0f}{mark(x)}" for x in in_order]
        table.add_row(f"{replicas:,}", *cells)
    console = Console()
    console.print(table)
    console.print("* dense, since payloads would weigh more")
    if args.picture:
        draw_picture(record.lines, args, args.picture)
        console.print(f"The figure is in {args.picture}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
