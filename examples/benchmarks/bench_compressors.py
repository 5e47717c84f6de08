"""What selection costs: every compressor's whole job, beside the obvious ways to do it.

The job is all that one replica does in a step but talk: add the residual, select,
compact the payload, clear what is sent, and work out the gains of all rungs. It is
given in multiples of the floor, one pass that reads gradient and residual and writes
the residual. Beside it `jax.lax.top_k` and PyTorch's `topk` (extra "bench") do the same
job without the gains. All take turns in one run.

    python examples/benchmarks/bench_compressors.py --out FILE.jsonl
    python examples/benchmarks/bench_compressors.py --out FILE.jsonl --report
"""

import dataclasses
import importlib.metadata
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import journal
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import gravac_jax as gravac
from gravac_jax._selection import COMPRESSORS
from gravac_jax._selection.compressor import Compressor
from gravac_jax._selection.select_entries import Slots, select
from gravac_jax._selection.wire_format import Codec

LADDER = gravac.GraVAC.ladder
GRADIENTS = 4  # in turn, so that the residual does not grow along one of them
SETTLING_STEPS = 3  # not timed: state and residual find their size


@dataclasses.dataclass(frozen=True)
class Args:
    """What to time."""

    out: Path
    """JSONL; a cell that is already in it is not timed again."""
    sizes: tuple[float, ...] = (1e6, 1e7)
    """Entries n of the bucket."""
    factors: tuple[float, ...] = (10, 100, 1000)
    """n / k."""
    methods: tuple[str, ...] = ()
    """Names of compressors, "lax.top_k" and "torch.topk"; default: all there are."""
    steps: int = 25
    """Of each method, timed; a slow one gets fewer,"""
    seconds: float = 20.0
    """as many as take so long, and three at least."""
    report: bool = False
    """Only show what the file holds."""


Step = Callable[[int], Any]  # does the job once, with the i-th gradient


class Job:
    """A method at one size and one factor: its state, and its compiled step."""

    def __init__(self, name: str, gradients: list[np.ndarray], k: int):
        """Compile."""
        self.name, self.k, self.seconds = name, k, []
        self.gradients = gradients
        if name == "torch.topk":
            self.compile_seconds, self.step = 0.0, self._torch()
            return
        bucket = jnp.asarray(gradients[0])
        self.residual = jnp.zeros_like(bucket)
        self.on_device = [jnp.asarray(x) for x in gradients]
        if name == "floor":
            self.state, job = (), _floor
        elif name == "lax.top_k":
            self.state, job = (), lambda *args: _top_k(*args, k=k)
        else:
            compressor = getattr(gravac, name)()
            self.state = compressor.init(bucket.size)
            job = lambda *args: _compress(*args, compressor=compressor, k=k)
        start = time.perf_counter()
        lowered = jax.jit(job, donate_argnums=(1, 2)).lower(
            bucket, self.residual, self.state, jnp.int32(0)
        )
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        self.step = self._jax

    def _jax(self, i: int) -> None:
        self.payload, self.residual, self.state, *_ = jax.block_until_ready(
            self.compiled(
                self.on_device[i % GRADIENTS], self.residual, self.state, np.int32(i)
            )
        )

    def _torch(self) -> Step:
        import torch

        gradients = [torch.from_numpy(x) for x in self.gradients]
        residual = torch.zeros_like(gradients[0])

        def step(i: int) -> None:
            residual.add_(gradients[i % GRADIENTS])
            indices = torch.topk(residual.abs(), self.k, sorted=False).indices
            self.payload = residual[indices], indices
            residual[indices] = 0

        self.residual = residual
        return step

    def time(self, i: int) -> None:
        """Do the job once, and note what it took."""
        start = time.perf_counter()
        self.step(i)
        self.seconds.append(time.perf_counter() - start)

    def shares(self, i: int) -> tuple[float, float, float]:
        """Of one more step: slots used, recall and energy against exact top-k."""
        before = np.array(self.residual)  # a copy: the step overwrites it
        self.step(i)
        bucket = np.abs(before + self.gradients[i % GRADIENTS])
        sent = bucket[(np.asarray(self.residual) == 0) & (bucket > 0)]
        largest = np.partition(bucket, -self.k)[-self.k :]
        energy = lambda x: np.sum(np.square(x.astype(np.float64)))
        recall = np.count_nonzero(sent >= largest.min()) / self.k
        return sent.size / self.k, min(recall, 1.0), energy(sent) / energy(largest)


def _floor(gradient: Any, residual: Any, state: Any, step: Any) -> Any:
    return (), 0.99 * (gradient + residual) + 0 * step, state


def _top_k(gradient: Any, residual: Any, state: Any, step: Any, *, k: int) -> Any:
    del step
    bucket = gradient + residual
    _, indices = jax.lax.top_k(jnp.abs(bucket), k)
    return (bucket[indices], indices), bucket.at[indices].set(0), state


def _compress(
    gradient: Any,
    residual: Any,
    state: Any,
    step: Any,
    *,
    compressor: Compressor,
    k: int,
) -> Any:
    """What `AllGather` does at a fixed factor, without the others."""
    key = jax.random.fold_in(jax.random.key(0), step)
    bucket = gradient + residual
    counts = tuple(compressor.count(bucket.size, factor) for factor in LADDER)
    codec = Codec(gravac.Float32(), gravac.Int32(), bucket.size)
    slots = Slots(counts, (k,), jnp.int32(k), jnp.int32(k))
    selected, state = select(compressor, codec, bucket, state, slots, key)
    return selected.payload, selected.residual, state, selected.energies


def names() -> tuple[str, ...]:
    """All methods that can run here."""
    ours = [x.__name__ for x in COMPRESSORS if x is not gravac.Identity]
    torch = ["torch.topk"] if importlib.util.find_spec("torch") else []
    return (*ours, "lax.top_k", *torch)


def measure(args: Args, n: int, factor: float, methods: list[str]) -> list[dict]:
    """A line for each method at one size and factor."""
    k = max(1, int(n / factor))
    rng = np.random.default_rng(0)
    draw = lambda: rng.standard_t(3, n).astype(np.float32)
    gradients = [draw() for _ in range(GRADIENTS)]
    jobs = [Job(name, gradients, k) for name in ("floor", *methods)]
    for i in range(SETTLING_STEPS):
        for job in jobs:
            job.step(i)
    for i in range(SETTLING_STEPS, SETTLING_STEPS + args.steps):
        for job in jobs:
            if len(job.seconds) < 3 or sum(job.seconds) < args.seconds:
                job.time(i)
    floor = statistics.median(jobs[0].seconds)
    lines = []
    for job in jobs:
        seconds = sorted(job.seconds)
        line = {
            "n": n,
            "factor": factor,
            "method": job.name,
            "steps": len(seconds),
            "seconds": [seconds[0], statistics.median(seconds), seconds[-1]],
            "floors": statistics.median(seconds) / floor,
            "compile_seconds": job.compile_seconds,
        }
        if job.name != "floor":
            last = SETTLING_STEPS + args.steps
            line |= dict(
                zip(("used", "recall", "energy"), job.shares(last), strict=True)
            )
        lines.append(line)
    return lines


def report(lines: list[dict], console: Console) -> None:
    """A table for each size."""
    for n in sorted({x["n"] for x in lines}):
        table = Table(title=f"n = {n:,}: ms (floors)", title_justify="left")
        mine = [x for x in lines if x["n"] == n]
        factors = sorted({x["factor"] for x in mine})
        heads = [f"factor {factor:g}" for factor in factors]
        for head in ("method", *heads, "used", "recall", "energy", "compile s"):
            table.add_column(head, justify="left" if head == "method" else "right")
        for name in dict.fromkeys(x["method"] for x in mine):
            found = {x["factor"]: x for x in mine if x["method"] == name}
            cell = lambda x: f"{1e3 * x['seconds'][1]:.1f} ({x['floors']:.1f})"
            cells = [cell(found[f]) if f in found else "" for f in factors]
            shares = [
                f"{min(x[key] for x in found.values()):.2f}" if name != "floor" else ""
                for key in ("used", "recall", "energy")
            ]
            seconds = max(x["compile_seconds"] for x in found.values())
            table.add_row(name, *cells, *shares, f"{seconds:.1f}" if seconds else "")
        console.print(table)


def main(args: Args) -> None:
    """Time what is missing, and show all."""
    if args.report:
        report(journal.read(args.out)[1], Console())
        return
    configuration = {"gradients": "Student t, 3 degrees of freedom", "ladder": LADDER}
    if importlib.util.find_spec("torch"):
        configuration["torch"] = importlib.metadata.version("torch")
    record = journal.Journal(args.out, configuration)
    console = Console()
    for n in map(int, args.sizes):
        for factor in args.factors:
            done = {
                x["method"]
                for x in record.lines
                if (x["n"], x["factor"]) == (n, factor)
            }
            missing = [x for x in args.methods or names() if x not in done]
            if not missing:
                continue
            console.print(f"n = {n:,}, factor {factor:g}: {', '.join(missing)}")
            for line in measure(args, n, factor, missing):
                if line["method"] not in done:
                    record.append(line)
    report(record.lines, console)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
