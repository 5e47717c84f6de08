"""Time steps and exchanges on the GPUs or TPUs of this machine, in twenty minutes.

The record 2026-11-26_h200 is of one GPU; nobody has run it on a TPU or on several
GPUs. It asks three questions, in this order:

- `step`: milliseconds of a GPT's whole step, by method, over all devices.
- `passes`: the work of an exchange without other replicas, at 100 million entries, in
  multiples of one pass: add the gradient to the residual, and write the sum.
- `quality`, with `--data-dir`: the test loss of a small GPT after 1,500 steps, on four
  simulated replicas, in two bits and densely.

`--trace FOLDER` writes a profile of three steps of each method, for TensorBoard or
Perfetto.

    pip install -e '.[examples,cuda]'
    python examples/benchmarks accelerator --out FILE.jsonl --trace DIR --data-dir TEXT
"""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quality.run
from common.journal import Journal, Line
from common.report import show, table
from programs import gpt
from quality.trial import Setting
from training.methods import arguments

import gravac_jax as gravac

AT_ONCE = 4  # steps on their way, as in a training loop that does not wait


@dataclasses.dataclass(frozen=True)
class Args:
    """What to time.

    Args:
      out: The record, JSONL; what is in it is not timed again. Runs of the quality go
        to a file beside it, with `_quality` in its name.
      methods: Methods whose steps are timed, as in training/methods.py.
      alone: Methods whose exchange is timed without other replicas.
      millions: Entries of the GPT, in millions: 1, 25 or 100.
      entries: Entries of the bucket whose exchange is timed.
      rows: Windows of a replica in a step.
      steps: Timings, each of four steps.
      trace: A folder for profiles.
      data_dir: A folder with a text, for the quality.
    """

    out: Path
    methods: tuple[str, ...] = (
        *("dense", "allreducedadam16", "turns4allreducedadam16"),
        *("delayedallreducedadam16", "defaultadam", "fixed100"),
    )
    alone: tuple[str, ...] = (
        *("allreduced4", "allreduced16", "allreduced32", "turns4allreduced16"),
        *("allreducedadam16", "turns4allreducedadam16", "fixed100", "rows64"),
    )
    millions: int = 100
    entries: float = 1e8
    rows: int = 8
    steps: int = 30
    trace: Path | None = None
    data_dir: Path | None = None


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
        with jax.profiler.trace(str(args.trace / name)):
            for _ in range(3):
                state = jax.block_until_ready(take(state))
    return found


def alone(name: str, args: Args) -> Line:
    """Time an exchange without other replicas; "floor" is one pass, "adam" Optax's."""
    gradient = jax.random.normal(jax.random.key(0), (int(args.entries),))
    if name == "floor":
        work = lambda x, state: ((), 0.99 * (x + state))
        state: Any = jnp.zeros_like(gradient)
    elif name == "adam":
        tx = optax.scale_by_adam()
        work, state = tx.update, tx.init(gradient)
    else:
        tx = gravac.transform(axis_name=None, compress=True, **arguments(name))
        work, state = tx.update, tx.init(gradient)
    compiled = jax.jit(work, donate_argnums=1)
    return timed(lambda state: compiled(gradient, state[1]), ((), state), args.steps)


def main(args: Args) -> None:
    """Time what is missing, and print the table."""
    setting = {"millions": args.millions, "entries": args.entries, "rows": args.rows}
    devices = [x.device_kind for x in jax.devices()]
    journal = Journal(args.out, {**setting, "devices": devices})
    for name in args.methods:
        make = lambda name=name: whole_step(name, args)
        journal.once(make, kind="step", method=name)
    for name in ("floor", "adam", *args.alone):
        make = lambda name=name: alone(name, args)
        journal.once(make, kind="passes", method=name)
    middle = lambda line: line["milliseconds"][1]
    (floor,) = journal.find(kind="passes", method="floor")
    passes = lambda x: "" if x["kind"] == "step" else f"{middle(x) / middle(floor):.1f}"
    rows = [
        (x["method"], x["kind"], f"{middle(x):.2f}", passes(x)) for x in journal.lines
    ]
    show(table(("method", "of", "ms", "passes"), rows))
    if args.data_dir is not None:
        quality.run.main(
            quality.run.Args(
                args.data_dir,
                args.out.with_name(f"{args.out.stem}_quality.jsonl"),
                methods=("dense", "allreducedadam16"),
                seeds=1,
                setting=Setting(
                    task="transformer-bytes",
                    steps=1500,
                    optimizer="adam",
                    multiples=(1.0,),
                ),
            )
        )
