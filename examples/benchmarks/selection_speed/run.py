"""Time a step's work on one device, with every compressor and beside sorting.

The work is the whole `update` of `gravac.transform` without other replicas: add the
residual, select, make the payload, clear what is sent, work out the gains of all rungs,
and decide. It is given in multiples of the floor, one pass that reads gradient and
residual and writes the residual. `jax.lax.top_k` and PyTorch's `topk` (extra "bench")
do the same work without gains and decision. All take turns in one run.

    python examples/benchmarks selection_speed --out FILE.jsonl
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
import numpy as np
from common.journal import Journal, Line
from common.report import show, table
from rich.table import Table

import gravac_jax as gravac

COMPRESSORS = ("Threshold", "TopK", "SampledTopK", "RedSync", "RandomK")
LADDER = gravac.Fastest.ladder
GRADIENTS = 4  # in turn, so that the residual does not grow along one of them
SETTLING_STEPS = 3  # not timed: state and residual find their size
MIN_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Args:
    """What to time.

    Args:
      out: The record, JSONL; what is in it is not timed again.
      sizes: Entries n of the bucket.
      factors: Factors n / k.
      methods: Names of compressors, "lax.top_k" and "torch.topk". Default: all that can
        run here.
      steps: Timed steps of each method.
      seconds: Time after which a slow method takes no more steps than three.
    """

    out: Path
    sizes: tuple[float, ...] = (1e6, 1e7)
    factors: tuple[float, ...] = (10, 100, 1000)
    methods: tuple[str, ...] = ()
    steps: int = 25
    seconds: float = 20.0


Step = Callable[[int], Any]  # does the work once, with the i-th gradient


class Job:
    """A method at one size and one factor: its state, and its compiled step."""

    def __init__(self, name: str, gradients: list[np.ndarray], factor: float):
        self.name, self.gradients = name, gradients
        self.k = max(1, int(gradients[0].size / factor))
        self.seconds: list[float] = []
        self.sent: Any = ()
        self.compile_seconds = 0.0
        self.step = self._torch() if name == "torch.topk" else self._jax(factor)

    def _jax(self, factor: float) -> Step:
        on_device = [jnp.asarray(x) for x in self.gradients]
        start = time.perf_counter()
        state, work = work_of(self.name, on_device[0], self.k, factor)
        jitted = jax.jit(work, donate_argnums=1)
        compiled = jitted.lower(on_device[0], state).compile()
        self.compile_seconds = time.perf_counter() - start
        self.state = state

        def step(i: int) -> None:
            gradient = on_device[i % GRADIENTS]
            self.sent, self.state = jax.block_until_ready(
                compiled(gradient, self.state)
            )

        return step

    def _torch(self) -> Step:
        import torch  # pyright: ignore[reportMissingImports]

        gradients = [torch.from_numpy(x) for x in self.gradients]
        self.state = torch.zeros_like(gradients[0])

        def step(i: int) -> None:
            self.state.add_(gradients[i % GRADIENTS])
            indices = torch.topk(self.state.abs(), self.k, sorted=False).indices
            self.sent = self.state[indices], indices
            self.state[indices] = 0

        return step

    def time(self, i: int) -> None:
        """Take a step, and note what it took."""
        start = time.perf_counter()
        self.step(i)
        self.seconds.append(time.perf_counter() - start)

    def residual(self) -> np.ndarray:
        """Return what was not sent, as a copy: steps overwrite it."""
        kept = self.state
        if hasattr(kept, "local"):  # that of gravac.transform
            kept = kept.local.memory[0].residual
        return np.array(kept).ravel()

    def shares(self, i: int) -> Line:
        """Take a step; return slots used, and energy over that of exact top-k."""
        before = self.residual()
        self.step(i)
        bucket = np.abs(before + self.gradients[i % GRADIENTS])
        sent = bucket[(self.residual() == 0) & (bucket > 0)]
        largest = np.partition(bucket, -self.k)[-self.k :]
        energy = lambda x: np.sum(np.square(x.astype(np.float64)))
        return {
            "used": sent.size / self.k,
            "energy": energy(sent) / energy(largest),
        }


def work_of(name: str, bucket: jax.Array, k: int, factor: float) -> tuple[Any, Any]:
    """Return the state before the first step, and `(gradient, state)` to the next."""
    if name == "floor":
        return jnp.zeros_like(bucket), lambda x, residual: ((), 0.99 * (x + residual))
    if name == "lax.top_k":

        def top_k(gradient: jax.Array, residual: jax.Array) -> Any:
            total = gradient + residual
            _, indices = jax.lax.top_k(jnp.abs(total), k)
            return (total[indices], indices), total.at[indices].set(0)

        return jnp.zeros_like(bucket), top_k
    tx = gravac.transform(
        axis_name=None,
        compress=True,
        # Values that are not rounded: an entry is either sent or kept.
        exchange=gravac.AllGather(getattr(gravac, name)(), "float32", "int32"),
        # Gains of a whole ladder are worked out, and one factor is taken.
        controller=gravac.Scheduled(lambda _: factor, tuple(sorted({*LADDER, factor}))),
    )
    return tx.init(bucket), tx.update


def names() -> tuple[str, ...]:
    """Return all methods that can run here."""
    torch = ["torch.topk"] if importlib.util.find_spec("torch") else []
    return (*COMPRESSORS, "lax.top_k", *torch)


def measure(args: Args, n: int, factor: float, methods: list[str]) -> list[Line]:
    """Return a line for each method at one size and factor."""
    rng = np.random.default_rng(0)
    draw = lambda: rng.standard_t(3, n).astype(np.float32)
    gradients = [draw() for _ in range(GRADIENTS)]
    jobs = [Job(name, gradients, factor) for name in ("floor", *methods)]
    for i in range(SETTLING_STEPS):
        for job in jobs:
            job.step(i)
    last = SETTLING_STEPS + args.steps
    for i in range(SETTLING_STEPS, last):
        for job in jobs:
            if len(job.seconds) < MIN_STEPS or sum(job.seconds) < args.seconds:
                job.time(i)
    floor = statistics.median(jobs[0].seconds)
    lines = []
    for job in jobs:
        middle = statistics.median(job.seconds)
        line = {
            "n": n,
            "factor": factor,
            "method": job.name,
            "steps": len(job.seconds),
            "seconds": [min(job.seconds), middle, max(job.seconds)],
            "floors": middle / floor,
            "compile_seconds": job.compile_seconds,
        }
        lines.append(line if job.name == "floor" else line | job.shares(last))
    return lines


def table_of(lines: list[Line], n: int) -> Table:
    """Return the table of one size."""
    mine = [x for x in lines if x["n"] == n]
    factors, rows = sorted({x["factor"] for x in mine}), []
    for name in dict.fromkeys(x["method"] for x in mine):
        found = {x["factor"]: x for x in mine if x["method"] == name}
        cell = lambda x: f"{1e3 * x['seconds'][1]:.1f} ({x['floors']:.1f})"
        least = lambda key, found=found: min(x.get(key, 1) for x in found.values())
        shares = [f"{least(key):.2f}" for key in ("used", "energy")]
        seconds = max(x["compile_seconds"] for x in found.values())
        cells = [cell(found[f]) if f in found else "" for f in factors]
        rows.append([name, *cells, *shares, f"{seconds:.1f}"])
    columns = ("method", *(f"factor {x:g}" for x in factors))
    columns += ("used", "energy", "compile s")
    return table(columns, rows, f"n = {n:,}: ms (floors)")


def main(args: Args) -> None:
    """Time what is missing, and show all."""
    configuration = {"gradients": "Student t, 3 degrees of freedom", "ladder": LADDER}
    if importlib.util.find_spec("torch"):
        configuration["torch"] = importlib.metadata.version("torch")
    journal = Journal(args.out, configuration)
    for n in map(int, args.sizes):
        for factor in args.factors:
            done = {x["method"] for x in journal.find(n=n, factor=factor)}
            missing = [x for x in args.methods or names() if x not in done]
            if missing:
                found = measure(args, n, factor, missing)
                journal.append(*(x for x in found if x["method"] not in done))
    show(*(table_of(journal.lines, n) for n in sorted({x["n"] for x in journal.lines})))
