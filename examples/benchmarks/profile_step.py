"""Where the seconds of a step go, operation by operation, on one process.

The step of each method without other replicas, as steptime.py times it beside whole
ones, under JAX's profiler: milliseconds a step of every operation of the compiled
program, with its shape and where in the program it comes from. All methods train the
same model, so what one has and "dense" has not is its own.

    taskset -c 0 python examples/benchmarks/profile_step.py --data-dir DIR
"""

import collections
import dataclasses
import gzip
import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from steptime_methods import Runner, method
from tasks import load
from tasks.pipeline import batches

CONTAINERS = "while", "cond", "call"  # whose operations are counted one by one
DEFINITION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\S+)")
ORIGIN = re.compile(r'op_name="jit\([^/]*/([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Args:
    """Which steps to take apart."""

    data_dir: Path
    """Where the task's files are."""
    methods: tuple[str, ...] = ("dense", "fixed100", "default")
    """Names as in steptime_methods.py."""
    rung: int = 0
    """Of the ladder of each: 0 is its first factor."""
    task: str = "lstm-ptb"
    """What to train."""
    preset: str = "tiny"
    """Its size."""
    warm_up_steps: int = 40
    """Untimed ones: in its first 32 a controller looks at all rungs."""
    steps: int = 16
    """Profiled ones."""
    rows: int = 20
    """Operations to list."""


def durations(args: Args, name: str) -> tuple[dict[str, float], str]:
    """Milliseconds a step of every operation, and the compiled program."""
    task = load(args.task, args.data_dir, preset=args.preset)
    mesh = jax.make_mesh((1,), ("data",))
    source = batches(task.train, rows=task.rows, replicas=1, seed=0)
    draw = lambda steps: [next(source) for _ in range(steps)]
    runner = Runner(method(name), task, task.init(jax.random.key(0)), mesh)
    runner.prepare(draw(args.warm_up_steps))
    rung = np.int32(min(args.rung, len(runner.method.ladder) - 1))
    data = draw(args.steps)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for batch in data:
                runner.alone.advance(batch, rung)
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found: dict[str, float] = collections.Counter()
    for event in events:
        operation = event.get("args", {}).get("hlo_op", "")
        if operation and not operation.startswith(CONTAINERS):
            found[operation] += event["dur"] / 1e3 / args.steps
    return found, runner.program(data[0])


def described(program: str) -> dict[str, tuple[str, str]]:
    """The shape and the origin of every operation of a program."""
    found = {}
    for line in program.splitlines():
        if definition := DEFINITION.match(line):
            origin = ORIGIN.search(line)
            shape = definition[2].split("{")[0]
            found[definition[1]] = shape, origin[1] if origin else ""
    return found


def table(name: str, spent: dict[str, float], program: str, rows: int) -> Table:
    """The dearest operations that are no part of the model's loss and gradient."""
    total, known = sum(spent.values()), described(program)
    look = lambda x: known.get(x) or known.get(x.removesuffix(".clone"), ("", ""))
    own = {x: ms for x, ms in spent.items() if "jvp(" not in look(x)[1]}
    title = f"{name}: {total:.1f} ms, of which {sum(own.values()):.1f} beside the model"
    found = Table(box=SIMPLE, title=title)
    for column in ("ms", "operation", "shape", "origin"):
        found.add_column(column, justify="right" if column == "ms" else "left")
    for x in sorted(own, key=own.__getitem__, reverse=True)[:rows]:
        shape, origin = look(x)
        found.add_row(f"{own[x]:.2f}", x, shape[:24], origin[-60:])
    return found


def main(args: Args) -> None:
    """Profile, and print a table for each method."""
    for name in args.methods:
        Console().print(table(name, *durations(args, name), args.rows))


if __name__ == "__main__":
    main(tyro.cli(Args))
