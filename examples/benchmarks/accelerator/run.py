"""Time steps and updates on this machine's devices, in twenty minutes on a GPU.

Rows `gpu-step` and `gpu-update` of results.csv are of one GPU; nobody has run it on a
TPU or on several GPUs. It asks two questions, in this order:

- `step`: milliseconds of a GPT's whole step, by method, over all devices.
- `passes`: the work of an update without other replicas, at 100 million entries, in
  multiples of one pass: add the gradient to the residual, and write the sum.
  "lax.top_k" selects a hundredth of the entries by JAX's own `top_k`.

`--trace FOLDER` writes a profile of three steps of each method, for TensorBoard or
Perfetto.

    pip install -e '.[examples,cuda]'
    python examples/benchmarks accelerator --out FILE.jsonl --trace DIR
"""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common.journal import Journal, Line, configuration
from common.report import markdown
from programs import gpt
from training import file_name
from training.sends import parse

import gravac_jax as gravac

AT_ONCE = 4  # steps on their way, as in a training loop that does not wait
FLOOR, TOP_K, FACTOR = "floor", "lax.top_k", 100


@dataclasses.dataclass(frozen=True)
class Args:
    """What to time.

    Args:
      out: The record, JSONL; what is in it is not timed again.
      methods: Methods whose steps are timed, as in training/methods.py.
      alone: Encodings whose update is timed without other replicas, and "lax.top_k".
      millions: Entries of the GPT, in millions: 1, 25 or 100.
      entries: Entries of the bucket whose update is timed.
      rows: Windows of a replica in a step.
      steps: Timings, each of four steps.
      trace: A folder for profiles.
    """

    out: Path
    methods: tuple[str, ...] = (
        *("dense", "adamw Bits(2)", "adamw Bits(2, turns=4)", "late adamw Bits(2)"),
        *("adamw Fastest()", "TopK(100)"),
    )
    alone: tuple[str, ...] = (
        *("Bits(8)", "Bits(2)", "Bits(1)", "Bits(2, turns=4)", "TopK(100)", TOP_K),
        *('TopK(100, select="sampled")', 'TopK(100, select="exact")'),
    )
    millions: int = 100
    entries: float = 1e8
    rows: int = 8
    steps: int = 30
    trace: Path | None = None


def timed(take: Any, state: Any, steps: int) -> Line:
    """Return quartiles of milliseconds a step; `take` maps a state to the next."""
    state = jax.block_until_ready(take(state))  # compile
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        for _ in range(AT_ONCE):
            state = take(state)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - start) / AT_ONCE)
    quartiles = statistics.quantiles(seconds, n=4) if steps > 1 else seconds * 3
    return {"milliseconds": [round(1e3 * x, 3) for x in quartiles]}


def whole_step(name: str, args: Args) -> Line:
    """Time a method's step over all devices, and profile three of them."""
    mesh = gravac.make_mesh()
    made = gpt.step(name, args.millions)
    shape = mesh.size * args.rows, gpt.LENGTH
    tokens = np.random.default_rng(0).integers(0, gpt.VOCABULARY, shape, np.int32)
    step = gravac.data_parallel(made.take, mesh)
    take = lambda state: step(*state[:2], tokens)

    def begin() -> Any:
        params = made.model.init(jax.random.key(0), jnp.asarray(tokens[:1]))
        return gravac.place((params, made.tx.init(params)), mesh)

    found = timed(take, begin(), args.steps)
    if args.trace is not None:
        state = take(begin())
        with jax.profiler.trace(str(args.trace / file_name(name))):
            for _ in range(3):
                state = jax.block_until_ready(take(state))
    return found


def alone(name: str, args: Args) -> Line:
    """Time an update without other replicas; "floor" is one pass."""
    gradient = jax.random.normal(jax.random.key(0), (int(args.entries),))
    state: Any = jnp.zeros_like(gradient)
    if name == FLOOR:
        work: Any = lambda x, state: ((), 0.99 * (x + state))
    elif name == TOP_K:
        work = _top_k
    else:
        tx = gravac.transform(axis_name=None, compress=True, send=parse(name))
        work, state = tx.update, tx.init(gradient)
    compiled = jax.jit(work, donate_argnums=1)
    return timed(lambda state: compiled(gradient, state[1]), ((), state), args.steps)


def _top_k(gradient: jax.Array, residual: jax.Array) -> tuple[Any, jax.Array]:
    """Select a hundredth of the entries, and clear them, without `gravac`."""
    total = gradient + residual
    _, indices = jax.lax.top_k(jnp.abs(total), max(1, total.size // FACTOR))
    return (total[indices], indices), total.at[indices].set(0)


def main(args: Args) -> None:
    """Time what is missing, and print the table."""
    devices = [x.device_kind for x in jax.devices()]
    setting = configuration(args, "methods", "alone", "trace")
    journal = Journal(args.out, {**setting, "devices": devices})
    for name in args.methods:
        make = lambda name=name: whole_step(name, args)
        journal.once(make, kind="step", method=name)
    for name in (FLOOR, *args.alone):
        make = lambda name=name: alone(name, args)
        journal.once(make, kind="passes", method=name)
    middle = lambda line: line["milliseconds"][1]
    (floor,) = journal.find(kind="passes", method=FLOOR)
    passes = lambda x: "" if x["kind"] == "step" else f"{middle(x) / middle(floor):.1f}"
    rows = [["method", "of", "ms", "passes"]]
    for x in journal.lines:
        rows.append([x["method"], x["kind"], f"{middle(x):.2f}", passes(x)])
    print(markdown(rows))
